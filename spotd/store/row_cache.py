"""What the one writer remembers of rows it has read, so that an unchanged row is not read again.

Only what `world` showed last is remembered. A job is forgotten when it is written, and everything is forgotten after a
rollback: what a transaction showed that never happened must not vouch for anything.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Final

from spotd.core.domain.ids import AttemptId, JobId
from spotd.core.domain.jobs import Job
from spotd.core.domain.quotes import Quote
from spotd.core.domain.records import Experience
from spotd.store import rows
from spotd.store.mapping import to_json
from spotd.store.views import JobView
from spotd_jobs.spec.model import JobSpec

_LISTS_MAX: Final = 4


@dataclass(slots=True)
class RowCache:
    """Values by id; of specs and quotes with the text they were read from; lists of jobs by what was asked."""

    jobs: dict[JobId, Job] = field(default_factory=dict)
    specs: dict[JobId, tuple[str, JobSpec]] = field(default_factory=dict)
    quotes: dict[AttemptId, tuple[str, Quote]] = field(default_factory=dict)
    lists: dict[Hashable, tuple[JobView, ...]] = field(default_factory=dict)
    experience: Experience | None = None

    def forget(self) -> None:
        self.jobs.clear()
        self.specs.clear()
        self.quotes.clear()
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
            known = self.specs[job] = (text, rows.spec_in(text))
        return known[1]

    def spec_text(self, job: Job) -> str:
        """Return the text of a spec that is to be stored."""
        known = self.specs.get(job.id)
        if known is not None and known[1] is job.spec:
            return known[0]
        return rows.spec_out(job.spec)

    def quote(self, attempt: AttemptId, text: str) -> Quote:
        """Return the value of a stored quote."""
        known = self.quotes.get(attempt)
        if known is None or known[0] != text:
            known = self.quotes[attempt] = (text, rows.quote_in(text))
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
