"""AWS's own scores of how likely a spot launch is to succeed now: 1 to 10 for each zone.

AWS scores a *set* of types, low whenever there are fewer than three, and lets an account ask only a limited number of
different questions a day. So the sets are fixed by what the region sells: the types with the same GPUs, among which a
job may choose. They are asked seldom. A GPU that fewer than three types carry has no score.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from spotd_providers.aws.hardware import Hardware
from spotd_providers.aws.wire import ScoreRow
from spotd_providers.contract.values import CAPACITY_SCORE_MAX, Market
from spotd_providers.kit.shapes import row_or_none

TYPES_MIN: Final = 3


def sets_of_types(kinds: Iterable[Hardware]) -> list[tuple[str, ...]]:
    """Group the types with the same GPUs: each group is scored together."""
    found: defaultdict[tuple[str, int], list[str]] = defaultdict(list)
    for kind in kinds:
        # The types without a GPU differ in size: a score of all of them says nothing about one.
        if Market.SPOT.value in kind.sold_as and kind.gpu_count:
            found[kind.gpu, kind.gpu_count].append(kind.instance_type)
    return [tuple(sorted(types)) for _, types in sorted(found.items()) if len(types) >= TYPES_MIN]


def scores_of(rows: Sequence[Any], types: Iterable[str], zone_by_id: Mapping[str, str]) -> dict[tuple[str, str], int]:
    """Return the score of each type and zone name: AWS states the zone's id, which is not its name in this account."""
    by_zone: dict[str, int] = {}
    for raw in rows:
        row = row_or_none(ScoreRow, raw)
        zone = zone_by_id.get(row.AvailabilityZoneId) if row is not None else None
        if row is not None and zone is not None and 1 <= row.Score <= CAPACITY_SCORE_MAX:
            by_zone[zone] = row.Score
    return {(kind, zone): score for kind in types for zone, score in by_zone.items()}
