"""The records of what was seen of providers, pools, hosts and images."""

from __future__ import annotations

from collections.abc import Collection
from datetime import datetime
from itertools import groupby
from typing import Final

from sqlalchemy import Connection, bindparam, delete, select

from spotd.core.domain.records import RECORDS_MAX, Experience, Record, RecordKind, is_faded
from spotd.store import rows
from spotd.store.readable import kept
from spotd.store.tables import EXPERIENCE

_NEWEST: Final = select(EXPERIENCE).order_by(EXPERIENCE.c.at.desc()).limit(2 * len(RecordKind) * RECORDS_MAX)
"""All of them, and a bound on what was added since the last that faded were deleted."""
_ONE: Final = delete(EXPERIENCE).where(
    EXPERIENCE.c.kind == bindparam("k"), EXPERIENCE.c.provider == bindparam("p"), EXPERIENCE.c.subject == bindparam("s")
)


def load_experience(connection: Connection) -> Experience:
    """Return every record; one that cannot be understood is left out."""
    found = kept(rows.RECORD.read, rows.fetch(connection, _NEWEST))
    return {one.id: one for one in found}


def delete_records(connection: Connection, records: Collection[Record]) -> int:
    """Delete these records; return how many they are."""
    if records:
        connection.execute(_ONE, [{"k": r.id.kind.value, "p": r.id.provider, "s": r.id.subject} for r in records])
    return len(records)


def forget_faded(connection: Connection, now: datetime) -> int:
    """Delete what has faded, and of each kind what is more than is kept; return how many records it was."""
    newest_first = sorted(load_experience(connection).values(), key=lambda one: (one.id.kind, -one.at.timestamp()))
    gone: list[Record] = []
    for _, of_kind in groupby(newest_first, key=lambda one: one.id.kind):
        gone += [one for n, one in enumerate(of_kind) if n >= RECORDS_MAX or is_faded(one, now)]
    return delete_records(connection, gone)
