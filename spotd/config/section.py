"""What every table of the config with fixed keys has in common."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """One table of the config: nothing unknown, nothing coerced."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True, hide_input_in_errors=True
    )
