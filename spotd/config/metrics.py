"""The `[metrics]` table: where Prometheus reads the daemon's figures."""

from __future__ import annotations

import re
from typing import Annotated, Final

from pydantic import AfterValidator, Field, model_validator

from spotd.config.values import Section, hinted

HINT: Final = 'write listen = "127.0.0.1:9464"'
_ADDRESS: Final = re.compile(r"(?:\[([0-9a-fA-F:.]{2,45})\]|([A-Za-z0-9.-]{1,253})):([0-9]{1,5})")
_LOOPBACK: Final = re.compile(r"127(\.[0-9]{1,3}){3}|::1|localhost")


def parse_address(text: str) -> tuple[str, int]:
    """Return host and port.

    Raises:
        PydanticCustomError: it is no address with a port.
    """
    found = _ADDRESS.fullmatch(text)
    if found is None or not 0 < int(found[3]) < 65_536:
        raise hinted("is no address with a port", HINT)
    return found[1] or found[2], int(found[3])


def _address(text: str) -> str:
    parse_address(text)
    return text


class MetricsSection(Section):
    """Figures for Prometheus, which needs spotd[metrics]; docs/how-to/monitoring.md."""

    listen: Annotated[str | None, AfterValidator(_address), Field(examples=["127.0.0.1:9464"])] = None
    """Where they are served, at /metrics. Absent: nowhere."""

    remote: bool = False
    """Whether listen may be an address that other computers reach. The figures say what runs and what it costs, and
    have no password."""

    @model_validator(mode="after")
    def _stays_here(self) -> MetricsSection:
        if self.listen is not None and not self.remote and not _LOOPBACK.fullmatch(parse_address(self.listen)[0]):
            raise hinted(
                f"{self.listen} is reached from other computers, and the figures have no password",
                f"{HINT}, or remote = true beside it",
            )
        return self
