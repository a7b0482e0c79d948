"""Records of what was seen of a provider, a pool, a host or an image: counts and spans that fade.

Theory. A record is a sum over attempts that are over: how many events of one kind, and over how much time. It fades by
half in each half-life of its kind, so that markets may change and a host that was repaired is taken again. What is
added to one level is added to every coarser one, too (host, pool, provider), so a record that is dropped because it
has faded is still part of the coarser sums: this is how the table stays small.

Counts are in millionths of an event, spans in whole microseconds, so that sums do not depend on their order by more
than a rounding. A clock that was ahead left records of the future: they do not fade before their time, and do not grow.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from enum import StrEnum
from types import MappingProxyType
from typing import Final

from spotd_providers.contract.values import ProviderName

ONE: Final = 1_000_000
"""One event, in millionths."""
COUNT_MAX: Final = 10**12
SPAN_MAX: Final = timedelta(days=36_500)
FADED: Final = ONE // 50
"""A record of fewer events than this, and of less than `FADED_SPAN`, is forgotten."""
FADED_SPAN: Final = timedelta(minutes=10)
KEPT_FOR: Final = timedelta(days=120)
"""No record is kept for longer after it was last added to."""
RECORDS_MAX: Final = 2_000
"""So many are kept of each kind, those that were added to last."""


class RecordKind(StrEnum):
    """What a record counts, and over which time. The strings are stored.

    LOSSES_PROVIDER, LOSSES_POOL, LOSSES_HOST: machines that were lost, over the hours for which they lived.
    LOSSES_TIME: the same of one provider in one part of the week.
    STARTS: machines whose command began to run, over the time that it took since the launch; by image.
    FAILED_STARTS, SLOW_STARTS, EARLY_LOSSES: of one host, for its memory.
    """

    LOSSES_PROVIDER = "losses_provider"
    LOSSES_POOL = "losses_pool"
    LOSSES_HOST = "losses_host"
    LOSSES_TIME = "losses_time"
    STARTS = "starts"
    FAILED_STARTS = "failed_starts"
    SLOW_STARTS = "slow_starts"
    EARLY_LOSSES = "early_losses"


OF_HOSTS: Final = frozenset(
    {RecordKind.LOSSES_HOST, RecordKind.FAILED_STARTS, RecordKind.SLOW_STARTS, RecordKind.EARLY_LOSSES}
)
_HALF_LIFE_OF_LOSSES: Final = timedelta(days=14)
_HALF_LIFE_OF_FAULTS: Final = timedelta(days=3)
HALF_LIFE: Final[Mapping[RecordKind, timedelta]] = {
    kind: _HALF_LIFE_OF_FAULTS
    if kind in {RecordKind.FAILED_STARTS, RecordKind.SLOW_STARTS, RecordKind.EARLY_LOSSES}
    else _HALF_LIFE_OF_LOSSES
    for kind in RecordKind
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordId:
    """Whose record it is: the subject is a host, a pool, an image, a market or a part of the week."""

    kind: RecordKind
    provider: ProviderName
    subject: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """A sum that fades.

    Attributes:
        count: events, in millionths.
        at: when it was added to last, and as of when it is stated.
    """

    id: RecordId
    count: int
    span: timedelta
    at: datetime


Experience = Mapping[RecordId, Record]
"""Every record, by whose it is."""
NO_EXPERIENCE: Final[Experience] = MappingProxyType({})


def faded(record: Record, now: datetime) -> Record:
    """Return the record as of now."""
    kept = kept_share(record, now)
    if kept == 1:
        return record
    return replace(record, count=int(record.count * kept), span=record.span * kept, at=now)


def kept_share(record: Record, now: datetime) -> float:
    """Return which share of the record has not faded."""
    age = now - record.at
    return 1.0 if age <= timedelta(0) else 0.5 ** min(age / HALF_LIFE[record.id.kind], 60.0)


def added(known: Record | None, identity: RecordId, count: int, span: timedelta, now: datetime) -> Record:
    """Return the record with so much more in it, as of now, within the bounds of what can be stored."""
    before = Record(id=identity, count=0, span=timedelta(0), at=now) if known is None else faded(known, now)
    return replace(
        before,
        count=max(0, min(before.count + count, COUNT_MAX)),
        span=max(timedelta(0), min(before.span + span, SPAN_MAX)),
        at=now,
    )


def with_records(known: Experience, changed: Experience) -> Experience:
    """Return every record, the changed ones as they are now, without those of nothing."""
    if not changed:
        return known
    return {identity: one for identity, one in {**known, **changed}.items() if one.count or one.span}


def nothing(identity: RecordId, now: datetime) -> Record:
    """Return the record that replaces one that is to be forgotten."""
    return Record(id=identity, count=0, span=timedelta(0), at=now)


def is_faded(record: Record, now: datetime) -> bool:
    """Whether nothing that matters is left of the record."""
    left = faded(record, now)
    return (left.count < FADED and left.span < FADED_SPAN) or now - record.at > KEPT_FOR
