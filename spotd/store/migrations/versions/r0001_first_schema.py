"""The first schema, where the other revisions begin. No state takes this step: a new one is made from the tables."""

from __future__ import annotations

revision: str = "0001"
down_revision: str | None = None


def upgrade() -> None:
    raise NotImplementedError("a state without tables is made by spotd.store.engine")
