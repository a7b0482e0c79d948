"""What a daemon knew of own machines when it rented one, or left one; kept for the oracles."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Final

from spotd.core.domain.attempts import Attempt
from spotd.core.domain.intents import AttemptId, IntentKind, IntentState, JobId
from spotd.core.domain.jobs import Job
from spotd.core.domain.plan import Plan
from spotd.core.domain.policy import Policy
from spotd.core.domain.states import EndReason
from spotd.core.domain.world import Verdict, VerdictKind, World
from spotd.core.ranking.candidates import ceiling_for
from spotd_providers.contract.values import Offer, ProviderName
from tests.sim.machines import gpus_of

if TYPE_CHECKING:
    from tests.sim.daemon import Daemon

MILLION: Final = 1_000_000
REMEMBERED: Final = timedelta(days=7)
Kind = tuple[str, int]


@dataclass(kw_only=True)
class Waited:
    """For so long a job had one verdict after the other of this kind, by true dates."""

    since: datetime
    until: datetime
    kind: VerdictKind
    limit: timedelta


@dataclass(frozen=True, kw_only=True)
class Rented:
    """A launch at a provider of rented machines, and which own machine its job could expect at that moment."""

    at: datetime
    attempt: AttemptId
    limit: timedelta
    expected: str


@dataclass(frozen=True, kw_only=True)
class Left:
    """An own machine that was ordered to stop."""

    at: datetime
    attempt: AttemptId
    reason: EndReason
    detail: str
    limit: timedelta
    target: str


class OwnRecord:
    """Filled by the daemon of the simulator as it reads, decides and commits."""

    def __init__(self, daemon: Daemon) -> None:
        self._daemon = daemon
        self.verdicts: defaultdict[JobId, list[Waited]] = defaultdict(list)
        self.rented: list[Rented] = []
        self.left: list[Left] = []
        self.seen: defaultdict[ProviderName, dict[Kind, datetime]] = defaultdict(dict)
        """When each kind was offered last, by the daemon's dates: what its price history holds."""
        self._pages: dict[ProviderName, tuple[datetime, tuple[Offer, ...]]] = {}
        """Of this process."""

    def recall(self) -> None:
        """A process begins: it knows no offers, and what its history holds."""
        self._pages.clear()
        for name in [name for name, cloud in self._daemon.clouds.items() if cloud.trade.owned]:
            for kind, at in self.seen[name].items():
                if name not in self._daemon.absent:
                    self._daemon.process.offer_cache.evidence.note_kinds(name, (kind,), at)

    def note_page(self, name: ProviderName, offers: tuple[Offer, ...]) -> None:
        self._pages[name] = self._daemon.now, offers
        if self._daemon.clouds[name].trade.owned:
            self.seen[name].update({(one.gpu, one.gpu_count): self._daemon.now for one in offers})

    def note_verdicts(self, verdicts: Mapping[JobId, Verdict]) -> None:
        now, policy = self._daemon.true, self._daemon.policy.current
        for job, verdict in verdicts.items():
            owner = self._daemon.world.jobs.get(job)
            if owner is None:
                continue
            of_job, limit = self.verdicts[job], limit_of(owner, policy)
            if of_job and (of_job[-1].kind, of_job[-1].limit) == (verdict.kind, limit):
                of_job[-1].until = now
            else:
                of_job.append(Waited(since=now, until=now, kind=verdict.kind, limit=limit))

    def note(self, before: World, plan: Plan, after: World) -> None:
        if not any(cloud.trade.owned for cloud in self._daemon.clouds.values()):
            return
        self.note_verdicts(plan.verdicts)
        for intent in plan.intents.values():
            is_new = intent.state is IntentState.OPEN and intent.id not in before.intents
            item = None if intent.attempt is None else plan.attempts.get(intent.attempt)
            if is_new and intent.kind is IntentKind.LAUNCH and item is not None:
                self._note_launch(item, before, after)
        for identity, own in plan.attempts.items():
            former = before.attempts.get(identity)
            if own.stop is not None and former is not None and former.stop is None and own.quote.is_own:
                job = after.jobs[identity.job]
                self.left.append(
                    Left(
                        at=self._daemon.true,
                        attempt=identity,
                        reason=own.stop.reason,
                        detail=own.stop.detail,
                        limit=limit_of(job, self._daemon.policy.current),
                        target=job.moves.provider if job.moves.attempt == identity.number else "",
                    )
                )

    def _note_launch(self, item: Attempt, before: World, after: World) -> None:
        policy, job = self._daemon.policy.current, after.jobs[item.id.job]
        rules = policy.providers.get(item.provider)
        if rules is None or rules.is_own:
            return
        places = self._expected(job, policy, before)
        self.rented.append(
            Rented(at=self._daemon.true, attempt=item.id, limit=limit_of(job, policy), expected="; ".join(places))
        )

    def _expected(self, job: Job, policy: Policy, before: World) -> Iterable[str]:
        """Yield what the job could wait for: seen within a week, had by a job, or not known yet."""
        now, count = self._daemon.now, gpus_of(job.spec)
        for name in policy.own_providers:
            rules = policy.providers[name]
            if job.spec.resources.nodes > 1 and not self._daemon.clouds[name].trade.gangs:
                continue
            if rules.unusable or (job.spec.resources.providers and name not in job.spec.resources.providers):
                continue
            page = self._pages.get(name)
            is_fresh = page is not None and now - page[0] <= rules.quote_ttl - self._daemon.pace
            if page is None and not self.seen[name] and name not in self._daemon.absent:
                yield f"{name} is not known"
            offered = [one for one in page[1] if one.gpu_count == count] if page is not None and is_fresh else []
            if offered:
                prices = (one.gpu_price * rules.fee_ppm // MILLION for one in offered if type(one.gpu_price) is int)
                ceiling = ceiling_for("RTX_4090", count, job.spec.price, policy)
                if ceiling is not None and min(prices, default=ceiling * count + 1) <= ceiling * max(1, count):
                    yield f"{count} at {name} is on offer"
                    continue
            at = self.seen[name].get(("RTX_4090", count))
            held = [
                item.key
                for item in before.attempts.values()
                if item.provider == name and item.quote.offer.gpu_count == count and item.machine.may_compute
            ]
            if held:
                yield f"{count} at {name} is had by {held[0]}"
            elif not offered and at is not None and now - at <= REMEMBERED:
                yield f"{count} at {name} was free at {at}"


def limit_of(job: Job, policy: Policy) -> timedelta:
    own = job.spec.resources.rent_after
    return policy.rent_after if own is None else own
