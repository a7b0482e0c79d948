"""Own machines before rented ones: for how long a job waits for one, and what that means for it now.

Theory. What an own machine costs is a price like any other (electricity, a share, nothing), and offers rank by it. With
`rent_after` a job besides takes no rented machine while it waits for an own one. It waits where one can be expected: a
provider of own machines that the job accepts has offered such a machine within `EXPECTED_FOR`, or one of our jobs has
it, whether or not that provider answers now; or nothing is known of that provider yet, as at the first start. An own
machine that is offered and that the job cannot use (its disk, its price) is not waited for, nor one that was not seen.
A job that can rent nothing, by its own `providers` or the config's, waits for the market like any other.

The time counts as it does for `on_demand_after`: from the first decision in which nothing but the market kept the job
from a machine, within its windows, over launches that come to nothing. It counts anew after an own machine got the job
further, for instance when its owner's hours have begun: then an own machine is tried first again. A rented machine that
is lost does not begin it anew. Once it is over the cheapest machine is taken, own or rented, and a rented one is left
for an own one only as a move (`relocation`). A job that runs on an own machine is never moved to a rented one.

A deadline comes first: a job waits no longer than it could still be in time on a machine that is started then, with the
reserve of slack pacing. Where its work is not known that cannot be judged, and it does not wait.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import cached_property
from itertools import islice
from typing import Final

from spotd.core.deadlines import array_waits, due_words, waiting_time
from spotd.core.domain.attempts import Attempt
from spotd.core.domain.copies import replace
from spotd.core.domain.intents import JobId
from spotd.core.domain.jobs import Job
from spotd.core.domain.market import MarketSnapshot, Quote
from spotd.core.domain.policy import Policy
from spotd.core.domain.world import World
from spotd.core.plan_builder import PlanBuilder
from spotd.core.pricing import machine_words, span_words
from spotd.core.ranking.candidates import CandidateCatalogue, ceiling_for, is_admissible
from spotd.core.schedule import is_untried
from spotd_jobs.spec.model import Resources
from spotd_providers.contract.values import MicroUsdPerHour, ProviderName

EXPECTED_FOR: Final = timedelta(days=7)
"""An own machine that was not seen for longer is not waited for."""
COMPARED_MAX: Final = 200
"""So many own offers are compared for one that the job could use."""
PLACES_MAX: Final = 3
"""So many own machines are named in a sentence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnWait:
    """The job takes own machines alone for now.

    Attributes:
        job: as it asks for those.
        sentence: what it waits for, and until when.
        until: when one is rented for it; `None` where that depends on its windows.
    """

    job: Job
    sentence: str
    until: datetime | None


def rent_limit(job: Job, policy: Policy) -> timedelta:
    """Return how long the job waits for an own machine: as it says, else as the config does."""
    own = job.spec.resources.rent_after
    return policy.rent_after if own is None else own


def keeps_own(job: Job, item: Attempt, policy: Policy) -> bool:
    """Whether no rented machine is taken in place of this one, whatever it costs."""
    return item.quote.is_own and rent_limit(job, policy) > timedelta(0)


class OwnFirst:
    """The jobs that may wait for an own machine, in one decision.

    Attributes:
        providers: of own machines, where one may be launched.
    """

    def __init__(
        self,
        builder: PlanBuilder,
        world: World,
        market: MarketSnapshot,
        time_to_wait: Callable[[Job], timedelta | None],
    ) -> None:
        self._builder = builder
        self._world = world
        self._seen, self._sellers, self._of_hosts = market.seen, market.by_provider, market.of_hosts
        self._time_to_wait = time_to_wait
        self._words: dict[JobId, str] = {}
        policy = world.policy
        self.providers = tuple(name for name in policy.own_providers if not policy.providers[name].unusable)

    def with_words(self, sentence: str, job: Job) -> str:
        """Return the sentence with what came of the job's wait."""
        words = self._words.get(job.id, "") if self._words else ""
        return f"{sentence}; {words}" if words else sentence

    def wait(self, job: Job, catalogue: CandidateCatalogue, *, begins: bool = True) -> OwnWait | None:
        """Return what the job waits for; `None` where it may rent.

        Args:
            begins: nothing but the market keeps the job from a machine, so that its time counts.
        """
        limit, now = rent_limit(job, self._world.policy), self._builder.now
        wanted = job.spec.resources
        if limit <= timedelta(0) or not self._own_providers(wanted) or not self._rented_providers(wanted):
            return None
        places = list(islice(self._places(job, catalogue), PLACES_MAX))
        if not places:
            self._words[job.id] = "no own machine that it could use was seen, so none is waited for"
            return None
        since = self._since(job)
        if begins and since != job.pacing.own_wanted_since:
            current = self._builder.job(job.id)
            self._builder.put_job(replace(current, pacing=replace(current.pacing, own_wanted_since=since)))
        waited = waiting_time(job, since, now)
        if waited >= limit:
            self._words[job.id] = f"it waited {span_words(waited)} for an own machine, so one may be rented"
            return None
        spare = self._time_to_wait(job)
        if spare is not None and spare <= timedelta(0):
            self._words[job.id] = "its deadline leaves no time to wait for an own machine"
            return None
        left = limit - waited if spare is None else min(limit - waited, spare)
        self._builder.wake(now + left)
        own = replace(job.spec.resources, providers=self._own_providers(job.spec.resources))
        return OwnWait(
            job=replace(job, spec=replace(job.spec, resources=own)),
            sentence=f"waits for an own machine: {'; '.join(places)}; {_end_words(job, limit, waited, spare, now)}",
            until=None if job.spec.schedule.windows else now + left,
        )

    def rent_beside(self, job: Job, agreed: Quote, catalogue: CandidateCatalogue) -> MicroUsdPerHour | None:
        """Return what the best machine to rent costs now for as much work as this own machine does in an hour."""
        wanted = job.spec.resources
        rented = self._rented_providers(wanted)
        if not rented:
            return None
        elsewhere = replace(job, spec=replace(job.spec, resources=replace(wanted, providers=rented)))
        offers = catalogue.list_for(catalogue.key_of(elsewhere))
        best = next(catalogue.ranked(offers), None)
        if best is None:
            return None
        return MicroUsdPerHour(best.price.total * offers.speed_of(agreed.offer) // offers.speed_of(best.offer))

    def _own_providers(self, wanted: Resources) -> tuple[ProviderName, ...]:
        """Return which providers of own machines the job accepts."""
        return tuple(name for name in self.providers if _accepts(wanted, name))

    def _rented_providers(self, wanted: Resources) -> tuple[ProviderName, ...]:
        """Return at which providers one could be rented for the job: where there is none, nothing is put off."""
        rules = self._world.policy.providers.values()
        return tuple(
            sorted(one.name for one in rules if not (one.is_own or one.unusable) and _accepts(wanted, one.name))
        )

    def _since(self, job: Job) -> datetime:
        """Return since when the job waits; it may wait as long as another one of its array that is like it."""
        since, now = self._builder.job(job.id).pacing.own_wanted_since, self._builder.now
        if since is None and job.array is not None and is_untried(job):
            since = self._array_waits.get(job.array.id)
        return since if since is not None and since <= now else now

    @cached_property
    def _array_waits(self) -> dict[JobId, datetime]:
        return array_waits(self._world.jobs.values(), lambda pacing: pacing.own_wanted_since)

    def _places(self, job: Job, catalogue: CandidateCatalogue) -> Iterator[str]:
        """Yield the own machines that the job could use, in words."""
        policy, now = self._world.policy, self._builder.now
        for name in self._own_providers(job.spec.resources):
            if policy.words_against_image(policy.providers[name], job.spec.image):
                continue
            seller = self._sellers.get(name)
            if seller is not None and seller.words_against_nodes(job.spec.resources.nodes):
                continue
            held = self._held.get(name, {})
            kinds = {kind: at for kind, at in self._seen.get(name, {}).items() if now - at <= EXPECTED_FOR}
            fitting = [kind for kind in sorted({*kinds, *held}) if catalogue.fits_gpu(job.spec.resources, *kind)]
            silent, on_offer = catalogue.silent.get(name), catalogue.kinds_on_offer(name)
            usable = self._usable(job, name, catalogue) if any(kind in on_offer for kind in fitting) else {}
            if silent and not self._seen.get(name) and not held:
                yield f"{name}, of which nothing is known yet: {silent}"
            for kind in fitting:
                what = f"{machine_words(*kind)} at {name}"
                if kind in usable:
                    yield f"{what}, {usable[kind] or 'free now'}"
                elif silent:
                    yield f"{what}, {silent}"
                elif kind in held:
                    yield f"{what}, where {held[kind]} runs"
                elif kind not in on_offer:
                    yield f"{what}, last free {due_words(kinds[kind])}"

    def _usable(self, job: Job, name: ProviderName, catalogue: CandidateCatalogue) -> dict[tuple[str, int], str]:
        """Return the kinds on offer there that the job could use, each with what keeps it from one now, if anything."""
        wanted = replace(job.spec.resources, providers=(name,))
        offers = catalogue.list_for(catalogue.key_of(replace(job, spec=replace(job.spec, resources=wanted))))
        found: dict[tuple[str, int], str] = {}
        for index in range(COMPARED_MAX):
            offer = offers.at(index)
            if offer is None:
                break
            ceiling = ceiling_for(offer.gpu, offer.gpu_count, job.spec.price, self._world.policy)
            if is_admissible(catalogue.quote_at(offers, index), ceiling, job.spec.price):
                blocked = catalogue.blocked(offer)
                kind = offer.gpu, offer.gpu_count // offer.nodes
                found[kind] = blocked if blocked and found.get(kind, blocked) else ""
        return found

    @cached_property
    def _held(self) -> dict[ProviderName, dict[tuple[str, int], str]]:
        """Which kinds of own machine our jobs have, or have a part of, and one of those jobs."""
        found: dict[ProviderName, dict[tuple[str, int], str]] = {}
        for item in self._world.attempts.values():
            offer, owner = item.quote.offer, self._world.jobs.get(item.id.job)
            if item.quote.is_own and item.machine.may_compute and owner is not None:
                known = found.setdefault(offer.provider, {})
                known[offer.gpu, offer.gpu_count // offer.nodes] = owner.name
                host = None if offer.host_id is None else self._of_hosts.get((offer.provider, offer.host_id))
                known.update(dict.fromkeys(host or (), owner.name))
        return found


def _accepts(wanted: Resources, name: ProviderName) -> bool:
    return not wanted.providers or name in wanted.providers


def _end_words(job: Job, limit: timedelta, waited: timedelta, spare: timedelta | None, now: datetime) -> str:
    left = limit - waited
    if spare is not None and spare < left:
        return f"one is rented from {due_words(now + spare)} on, when its deadline leaves no more time"
    after = f"after {span_words(limit)} (rent_after)"
    if job.spec.schedule.windows:
        return f"one is rented {after} within its windows, of which {span_words(left)} are left"
    return f"one is rented from {due_words(now + left)} on, {after}"
