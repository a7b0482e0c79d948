"""Core values as rows of their tables."""

from __future__ import annotations

import json
from collections import namedtuple
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache, lru_cache
from typing import Any, Final

from sqlalchemy import Connection, Select, select

from spotd.core.domain.attempts import Attempt
from spotd.core.domain.intents import AttemptId, JobId
from spotd.core.domain.jobs import Checkpoint, Job
from spotd.core.domain.market import Quote
from spotd.core.domain.states import InvariantBroken
from spotd.core.domain.world import Experience, UnreadableRow
from spotd.core.plan import Event
from spotd.store.tables import ATTEMPTS, CHECKPOINTS, JOBS
from spotd.store.values import ATTEMPT, CHECKPOINT, EVENT, JOB, Columns, Row, T, compact, from_json, to_json
from spotd.store.views import JobView
from spotd_jobs.spec.codec import spec_from_json, spec_to_json
from spotd_jobs.spec.model import JobSpec, Resources
from spotd_providers.contract.values import NO_GPU, InstanceId, InstanceRef, ProviderName


@cache
def _shape(names: tuple[str, ...]) -> Any:
    shape: Any = namedtuple("Row", names)  # type: ignore[misc]  # the names are known only at run time
    return shape._make


def fetch(connection: Connection, query: Select[Any], values: Mapping[str, object] | None = None) -> Iterator[Row]:
    """Return the rows of a select, as named tuples: an attribute of SQLAlchemy's own rows costs ten times as much."""
    result = connection.execute(query, values)
    return map(_shape(tuple(result.keys())), result)


def spec_out(spec: JobSpec) -> str:
    return compact(spec_to_json(spec))


@lru_cache(maxsize=64)
def spec_in(text: str) -> JobSpec:
    """Return the value of a stored spec; the jobs of an array share one."""
    return spec_from_json(json.loads(text))


def quote_in(text: str) -> Quote:
    return from_json(Quote, text)


def gpu_wanted(resources: Resources) -> str:
    """Return what the user asked for, short enough for a column of a table."""
    if resources.gpu:
        return ", ".join(f"{gpu.name}:{gpu.count}" for gpu in resources.gpu)
    if resources.min_vram_mb is not None:
        return f">={-(-resources.min_vram_mb // 1000)}GB:{resources.gpu_count}"
    return f"any:{resources.gpu_count}" if resources.gpu_count else f"{NO_GPU}:0"


def job_out(job: Job, spec_text: str) -> Columns:
    return {**JOB.out(job), "spec": spec_text, "gpu_wanted": gpu_wanted(job.spec.resources)}


def checkpoint_out(job: JobId, ordinal: int, checkpoint: Checkpoint) -> Columns:
    return {"job_id": job, "ordinal": ordinal, **CHECKPOINT.out(checkpoint)}


def attempt_out(attempt: Attempt, quote_text: str) -> Columns:
    """Raise InvariantBroken for a machine at another provider than the one that was agreed."""
    offer = attempt.quote.offer
    if attempt.ref is not None and attempt.ref.provider != offer.provider:
        raise InvariantBroken(
            f"attempt {attempt.key} was bought at {offer.provider} but its machine is {attempt.ref.provider}'s"
        )
    return {
        **ATTEMPT.out(attempt),
        "quote": quote_text,
        "provider": offer.provider,
        "offer_id": offer.offer_id,
        "host_id": offer.host_id,
        "gpu": offer.gpu,
        "gpu_count": offer.gpu_count,
        "price_total": attempt.quote.price.total,
        "on_demand_total": attempt.quote.on_demand,
    }


def attempt_in(row: Row) -> Attempt:
    """Return the attempt in a row, its quote read anew."""
    return ATTEMPT.read(row, quote=quote_in(row.quote))


def ref_in(row: Row) -> InstanceRef | None:
    """Return the machine in a row of an attempt that cannot be understood, by its columns alone."""
    if not isinstance(row.ref_id, str) or not isinstance(row.provider, str):
        return None
    return InstanceRef(
        provider=ProviderName(row.provider), instance_id=InstanceId(row.ref_id), scope=str(row.ref_scope or "")
    )


def event_out(seq: int, event: Event) -> Columns:
    return {"seq": seq, **EVENT.out(event)}


# What the one writer remembers of rows it has read, so that an unchanged row is not read again.
#
# Only what `world` showed last is remembered. A job is forgotten when it is written, and everything is forgotten after
# a
# rollback: what a transaction showed that never happened must not vouch for anything.


_LISTS_MAX: Final = 4


@dataclass(slots=True)
class RowCache:
    """Values by id; specs, quotes and attempts with what they were read from; lists of jobs by what was asked."""

    jobs: dict[JobId, Job] = field(default_factory=dict)
    specs: dict[JobId, tuple[str, JobSpec]] = field(default_factory=dict)
    quotes: dict[AttemptId, tuple[str, Quote]] = field(default_factory=dict)
    attempts: dict[AttemptId, tuple[Row, Attempt]] = field(default_factory=dict)
    lists: dict[Hashable, tuple[JobView, ...]] = field(default_factory=dict)
    experience: Experience | None = None

    def forget(self) -> None:
        self.jobs.clear()
        self.specs.clear()
        self.quotes.clear()
        self.attempts.clear()
        self.lists.clear()
        self.experience = None

    def listed(self, asked: Hashable, read: Callable[[], tuple[JobView, ...]]) -> tuple[JobView, ...]:
        """Return the same lines until anything is written: a person's screen asks more often than a job changes."""
        found = self.lists.get(asked)
        if found is None:
            found = read()
            if len(self.lists) >= _LISTS_MAX:
                self.lists.clear()
            self.lists[asked] = found
        return found

    def spec(self, job: JobId, text: str) -> JobSpec:
        """Return the value of a stored spec."""
        known = self.specs.get(job)
        if known is None or known[0] != text:
            known = self.specs[job] = (text, spec_in(text))
        return known[1]

    def spec_text(self, job: Job) -> str:
        """Return the text of a spec that is to be stored."""
        known = self.specs.get(job.id)
        if known is not None and known[1] is job.spec:
            return known[0]
        return spec_out(job.spec)

    def attempt(self, attempt: AttemptId, row: Row) -> Attempt:
        """Return the attempt in a row: to compare two rows costs a tenth of reading one."""
        known = self.attempts.get(attempt)
        if known is None or known[0] != row:
            known = self.attempts[attempt] = (row, ATTEMPT.read(row, quote=self.quote(attempt, row.quote)))
        return known[1]

    def quote(self, attempt: AttemptId, text: str) -> Quote:
        """Return the value of a stored quote."""
        known = self.quotes.get(attempt)
        if known is None or known[0] != text:
            known = self.quotes[attempt] = (text, quote_in(text))
        return known[1]

    def quote_text(self, attempt: AttemptId, quote: Quote) -> str:
        """Return the text of a quote that is to be stored."""
        known = self.quotes.get(attempt)
        if known is not None and known[1] is quote:
            return known[0]
        return to_json(quote)

    def keep_only(self, jobs: set[JobId], attempts: set[AttemptId]) -> None:
        """Forget everything else, so that the memory is as small as the world."""
        if len(self.jobs) > len(jobs) or len(self.specs) > len(jobs):
            self.jobs = {i: v for i, v in self.jobs.items() if i in jobs}
            self.specs = {i: v for i, v in self.specs.items() if i in jobs}
        if len(self.quotes) > len(attempts):
            self.quotes = {i: v for i, v in self.quotes.items() if i in attempts}
        if len(self.attempts) > len(attempts):
            self.attempts = {i: v for i, v in self.attempts.items() if i in attempts}


# Rows that hold a value of which nothing can be made: each is set aside alone, and every other one is read.
#
# A damaged file, another program or a newer version writes such rows. No answer and no decision may fail for one of
# them.


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

    for row in fetch(connection, select(JOBS).where(JOBS.c.id == job_id)):
        attempted(lambda row=row: JOB.read(row, spec=spec_in(row.spec), checkpoints=()), None)  # type: ignore[misc]  # mypy cannot type a lambda's defaults
    if not found:
        for row in fetch(connection, select(CHECKPOINTS).where(CHECKPOINTS.c.job_id == job_id)):
            attempted(lambda row=row: CHECKPOINT.read(row), None)  # type: ignore[misc]  # as above
    attempts = select(ATTEMPTS).where(ATTEMPTS.c.job_id == job_id).order_by(ATTEMPTS.c.number)
    for row in fetch(connection, attempts):
        attempted(lambda row=row: attempt_in(row), row.number)  # type: ignore[misc]  # as above
    return tuple(found)
