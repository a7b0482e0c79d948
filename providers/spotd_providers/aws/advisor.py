"""AWS's Spot Advisor: how many machines of a type were interrupted in a region within a month, in five bands.

A public document, republished now and then: a prior and no more. It says little on top of the price: the worst band is
a loss every two or three months, which is two hundredths of a percent of the price. So it decides only between offers
that cost the same.
"""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Final

from pydantic import Field, ValidationError

from spotd_providers.aws.wire import Text
from spotd_providers.kit.shapes import Row, row_or_none

SYSTEM: Final = "Linux"
HOURS_PER_MONTH: Final = 730
OPEN_END_FACTOR: Final = 1.5
"""The last band has no upper end: what is in it counts as half above its lower one."""
_GZIP: Final = b"\x1f\x8b"
_BYTES_MAX: Final = 32_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Band:
    """A share of machines that are interrupted within a month; `percent` is the figure that is used."""

    label: str
    percent: float

    @property
    def hazard_ppm(self) -> int:
        """Interruptions per million machine-hours."""
        return round(-math.log(1 - self.percent / 100) / HOURS_PER_MONTH * 1_000_000)


class _Range(Row):
    index: Annotated[int, Field(ge=0, lt=100)]
    label: Text
    max: Annotated[int, Field(gt=0, le=100)]


class _Advice(Row):
    r: Annotated[int, Field(ge=0, lt=100)]


class _Document(Row):
    ranges: list[_Range] = Field(min_length=1)
    spot_advisor: dict[str, dict[str, dict[str, Any]]]


def read_advisor(content: bytes) -> Mapping[tuple[str, str], Band]:
    """Read the band of each region and type for machines with Linux. A row that cannot be read costs itself only.

    Raises:
        ValueError: it is not the Spot Advisor's document.
    """
    try:
        text = gzip.decompress(content) if content.startswith(_GZIP) else content
        document = _Document.model_validate(json.loads(text[:_BYTES_MAX]))
    except (OSError, EOFError, ValidationError, RecursionError, ValueError) as exc:
        raise ValueError(f"it is no copy of spot-advisor-data.json ({type(exc).__name__})") from None
    bands = _bands(document.ranges)
    found: dict[tuple[str, str], Band] = {}
    for region, systems in document.spot_advisor.items():
        for kind, raw in systems.get(SYSTEM, {}).items():
            row = row_or_none(_Advice, raw)
            if row is not None and row.r in bands:
                found[region, kind] = bands[row.r]
    return found


def _bands(ranges: list[_Range]) -> dict[int, Band]:
    bands: dict[int, Band] = {}
    below = 0.0
    for row in sorted(ranges, key=lambda row: row.max):
        percent = float(row.max) if row.max < 100 else min(99.0, below * OPEN_END_FACTOR or 50.0)
        bands[row.index] = Band(label=row.label, percent=percent)
        below = row.max
    return bands
