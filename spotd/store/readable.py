"""Rows that hold a value of which nothing can be made: each is set aside alone, and every other one is read.

A damaged file, another program or a newer version writes such rows. No answer and no decision may fail for one of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import Final, TypeVar

from sqlalchemy import Connection, select

from spotd.core.domain.ids import JobId
from spotd.core.domain.states import InvariantBroken
from spotd.core.domain.world import UnreadableRow
from spotd.store import rows
from spotd.store.mapping import Row
from spotd.store.tables import ATTEMPTS, CHECKPOINTS, JOBS

T = TypeVar("T")
ROW_ERRORS: Final = (ValueError, KeyError, TypeError, OverflowError, AttributeError, RecursionError, InvariantBroken)
WORDS_MAX: Final = 300


def error_words(error: Exception) -> str:
    """Return what is wrong with a row, short enough to be shown."""
    return f"{type(error).__name__}: {error}"[:WORDS_MAX]


def kept(read: Callable[[Row], T], found: Iterable[Row]) -> Iterator[T]:
    """Return what is made of those rows that can be understood."""
    for row in found:
        with suppress(*ROW_ERRORS):
            yield read(row)


def set_aside(connection: Connection, job_id: JobId) -> tuple[UnreadableRow, ...]:
    """Return which rows of this job cannot be understood: its own or its checkpoints', then its attempts'."""
    found: list[UnreadableRow] = []

    def attempted(read: Callable[[], object], attempt: int | None) -> None:
        try:
            read()
        except ROW_ERRORS as exc:
            found.append(UnreadableRow(job=job_id, attempt=attempt, error=error_words(exc)))

    for row in rows.fetch(connection, select(JOBS).where(JOBS.c.id == job_id)):
        attempted(lambda row=row: rows.JOB.read(row, spec=rows.spec_in(row.spec), checkpoints=()), None)  # type: ignore[misc]  # mypy cannot type a lambda's defaults
    if not found:
        for row in rows.fetch(connection, select(CHECKPOINTS).where(CHECKPOINTS.c.job_id == job_id)):
            attempted(lambda row=row: rows.CHECKPOINT.read(row), None)  # type: ignore[misc]  # as above
    attempts = select(ATTEMPTS).where(ATTEMPTS.c.job_id == job_id).order_by(ATTEMPTS.c.number)
    for row in rows.fetch(connection, attempts):
        attempted(lambda row=row: rows.attempt_in(row), row.number)  # type: ignore[misc]  # as above
    return tuple(found)
