"""Conditions of statements, built once: to build a statement costs more than to run it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from enum import StrEnum
from typing import Any, Final, TypeVar

from sqlalchemy import BindParameter, Column, ColumnElement, bindparam, literal_column

from spotd.core.domain.intents import IntentState
from spotd.core.domain.states import AttemptState, JobState
from spotd.store.tables import ATTEMPTS, INTENTS, JOBS

T = TypeVar("T")
PARAMETERS_MAX: Final = 10_000
"""Values in one IN list; SQLite's limit is 32,766."""
IDS: Final[BindParameter[Any]] = bindparam("ids", expanding=True)
"""The list that a statement is run with: `column.in_(IDS)`, then `{"ids": some}`."""


def chunks(values: Iterable[T]) -> Iterator[Sequence[T]]:
    """Yield the values in pieces that fit into one statement."""
    every = list(values)
    for start in range(0, len(every), PARAMETERS_MAX):
        yield every[start : start + PARAMETERS_MAX]


def _one_of(column: Column[Any], words: Iterable[StrEnum]) -> ColumnElement[bool]:
    # In the text of the statement: parameters of a list are put together anew each time that it runs.
    return column.in_([literal_column(f"'{word.value}'") for word in sorted(words)])


ACTIVE: Final = _one_of(JOBS.c.state, (state for state in JobState if not state.is_final))
FINAL: Final = _one_of(JOBS.c.state, (state for state in JobState if state.is_final))
NOT_ENDED: Final = _one_of(ATTEMPTS.c.state, (state for state in AttemptState if state is not AttemptState.ENDED))
OPEN: Final = _one_of(INTENTS.c.state, (s for s in IntentState if s not in {IntentState.DONE, IntentState.FAILED}))
