"""What a decision or a reconciliation is to write."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime

from spotd.core.domain.attempts import Attempt
from spotd.core.domain.charges import Charge
from spotd.core.domain.cooldowns import Cooldown
from spotd.core.domain.ids import AttemptId, IntentId, JobId
from spotd.core.domain.intents import Intent
from spotd.core.domain.jobs import Job
from spotd.core.domain.records import Experience
from spotd.core.domain.verdicts import Verdict
from spotd.core.domain.world import UnreadableRow
from spotd_providers.contract.values import ProviderName


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Something happened, and why. Committed with the state it explains."""

    at: datetime
    kind: str
    message: str
    job: JobId | None = None
    attempt: int | None = None
    data: Mapping[str, str | int | float | bool | None] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Contained:
    """A failure that was kept from everything else.

    Attributes:
        subject: what could not be judged: an attempt, a job, a provider's listing or offers.
        error: the exception, in words.
    """

    subject: str
    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is to be written in one commit. Rows replace their former values by id."""

    jobs: Mapping[JobId, Job] = field(default_factory=dict)
    attempts: Mapping[AttemptId, Attempt] = field(default_factory=dict)
    intents: Mapping[IntentId, Intent] = field(default_factory=dict)
    cooldowns: tuple[Cooldown, ...] = ()
    experience: Experience = field(default_factory=dict)
    """A record of nothing is forgotten."""
    charges: tuple[Charge, ...] = ()
    events: tuple[Event, ...] = ()
    verdicts: Mapping[JobId, Verdict] = field(default_factory=dict)
    wake_at: datetime | None = None
    list_again: frozenset[ProviderName] = frozenset()
    """Providers whose machines must be listed again at once, before a large loss is believed."""
    full_reads: frozenset[AttemptId] = frozenset()
    """Attempts about which only a read of all that their hosts wrote can decide."""
    shared_silence: tuple[str, ...] = ()
    """Why silent hosts are not taken for lost at the moment, in words; not written."""
    sealed: tuple[UnreadableRow, ...] = ()
    """Rows that cannot be understood: they are marked as over, as they stand."""
    contained: tuple[Contained, ...] = ()
    """What raised and was left out, so that everything else could go on; not written."""

    @property
    def is_empty(self) -> bool:
        rows = self.jobs or self.attempts or self.intents or self.cooldowns or self.charges or self.events
        return not (rows or self.sealed or self.experience)
