"""Which offers a job could use, best first, and why the others were passed over.

Theory. Many jobs ask for the same thing. A *requirement key* is everything in a job that decides which offers fit and
what they cost it; offers are filtered, priced and sorted once per key and decision, and every job of that key walks the
same list. Cooldowns and offers already taken in this decision are checked during the walk, since they change.

A physical machine is sold once, and a marketplace may sell to one account only every few seconds. A job that chose
what another one is buying would be refused after its turn, and a queue of jobs would follow one another from refusal to
refusal, each a more expensive one. So a host is left alone while a launch there has no answer; once it has one, the
offer cache no longer holds the offer. Offers without a host are pools (a type in a zone) of more than one machine.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from typing import Final

from spotd.core.domain.cooldowns import (
    EVERYWHERE,
    CooldownScope,
    at_once_words,
    cooling_until,
    pool_subject,
    pressed_until,
    refusal_subject,
    unable_subject,
)
from spotd.core.domain.copies import replace
from spotd.core.domain.intents import JobId
from spotd.core.domain.jobs import Job
from spotd.core.domain.market import MarketSnapshot, Quote, gang_of, resolve_gpu
from spotd.core.domain.policy import Policy, ProviderPolicy, registry_server
from spotd.core.domain.states import AttemptState
from spotd.core.domain.world import NO_EXPERIENCE, PassedOver, VerdictKind, World
from spotd.core.pricing import (
    gpu_price_limit,
    gpu_price_within,
    most_frequent_first,
    needs_of,
    passed_over_words,
    per_gpu_words,
    quote,
    repriced,
    span_words,
    usual_bid,
    wanted_words,
)
from spotd.core.ranking.expected_cost import Costing, RankedOffers, RequirementKey
from spotd.core.ranking.remaining_work import Kind
from spotd_jobs.spec.model import PriceLimit, Resources
from spotd_providers.contract import gpus
from spotd_providers.contract.values import (
    HostId,
    Market,
    MicroUsdPerGpuHour,
    MicroUsdPerHour,
    Offer,
    ProviderName,
    as_usd,
    per_gpu,
    shares,
    whole_machine,
)

ANOTHER_KIND: Final = "another GPU or count"
ANOTHER_NUMBER: Final = "not sold in that number of machines"
"""Why an offer was passed over."""
POOLS_ASKED: Final = 2
"""Of a range of machines, each number is asked for in so many pools: each refusal costs the time of a call."""


class CandidateCatalogue:
    """The market as one decision sees it: fresh offers only, ranked once per requirement key."""

    def __init__(self, world: World, market: MarketSnapshot, now: datetime) -> None:
        policy, attempts = world.policy, world.attempts.values()
        self._policy = policy
        self.costing = Costing.of(policy, world.experience, attempts, now)
        self._by_price = Costing.of(policy, NO_EXPERIENCE, (), now) if world.experience else self.costing
        self._now = now
        self._lists: dict[RequirementKey, RankedOffers] = {}
        self._lists_pressed: dict[RequirementKey, RankedOffers] = {}
        self._gpu_sets: dict[str, frozenset[str]] = {}
        self._lows = market.lows
        self._cooling: dict[tuple[ProviderName, CooldownScope, str], tuple[str, datetime]] = {}
        self.waits: list[datetime] = []
        """When something that cools down may be tried again."""
        # A bid that is remembered holds nothing back: no decision is to be woken by its end.
        of_offers = (c for c in world.cooldowns if c.scope is not CooldownScope.BID)
        newest = {(c.provider, c.scope, c.subject): c for c in of_offers}
        self._cooling_pressed: dict[tuple[ProviderName, CooldownScope, str], tuple[str, datetime]] = {}
        """For a job whose deadline nothing else can meet."""
        for subject, cooldown in newest.items():
            ends_at = cooling_until(cooldown, market.by_provider.get(cooldown.provider))
            if ends_at > now:
                self._cooling[subject] = (cooldown.reason, ends_at)
                self.waits.append(ends_at)
                sooner = min(ends_at, pressed_until(cooldown))
                if sooner > now:
                    self._cooling_pressed[subject] = (cooldown.reason, sooner)
        self._refusing: defaultdict[JobId, dict[tuple[ProviderName, str], tuple[str, datetime]]] = defaultdict(dict)
        """By job, which markets and offers it leaves alone, since they refused it, in words, and until when."""
        for (provider, scope, name), found in self._cooling.items():
            if scope is CooldownScope.JOB:
                self._refusing[JobId(name.partition(" ")[0])][provider, name] = found
        self.pause = self._cooling.get((EVERYWHERE, CooldownScope.STORE, ""))
        """Why nothing can be launched anywhere for now, and until when."""
        self.has_lost_hosts = self._cooling != self._cooling_pressed
        """Whether a job whose deadline nothing else can meet has more offers than others."""
        self._taken: set[tuple[ProviderName, HostId]] = set()
        self._buying = {
            (item.quote.offer.provider, item.quote.offer.host_id)
            for item in attempts
            if item.state is AttemptState.INTENDED and item.quote.offer.host_id is not None
        }
        self._attempts = attempts
        self._rented: Counter[tuple[str, int]] | None = None
        self.silent: dict[ProviderName, str] = {}
        self.size = 0
        self._offer_indexes = []
        for name, known in policy.providers.items():
            if name not in market.by_provider and known.unusable:
                self.silent[name] = known.unusable
        for name in sorted(market.by_provider):
            provider_offers = market.by_provider[name]
            rules = policy.providers.get(name)
            if rules is None:
                continue
            last_error = _last_error(rules, provider_offers.at, provider_offers.error, now)
            if last_error:
                self.silent[name] = last_error
                continue
            self._offer_indexes.append((rules, provider_offers))
            self.size += provider_offers.offer_index.size

    def is_scarce(self, nodes: int) -> bool:
        """Whether so many pools refused so many machines at once that fewer are asked for before another pool is."""
        refused = (name for _, scope, name in self._cooling if scope is CooldownScope.POOL)
        return sum(name.startswith(at_once_words(nodes)) for name in refused) >= POOLS_ASKED

    @contextmanager
    def pressed(self) -> Iterator[None]:
        """Within the block, show the market as a job sees it whose deadline nothing else can meet."""
        self._press()
        try:
            yield
        finally:
            self._press()

    def _press(self) -> None:
        self._cooling, self._cooling_pressed = self._cooling_pressed, self._cooling
        self._lists, self._lists_pressed = self._lists_pressed, self._lists

    def hurry_words(self, offer: Offer) -> str:
        """Why this offer may be bought now although its host cools down for others; empty where it does not."""
        found = self._cooling_pressed.get((offer.provider, CooldownScope.HOST, offer.host_id or ""))
        if found is None or self._cooldown(offer) is not None:
            return ""
        until = f"{found[1]:%H:%M} UTC"
        return f"; its host is avoided until {until} after a preemption, for which the deadline leaves no time"

    def list_for(self, key: RequirementKey) -> RankedOffers:
        found = self._lists.get(key)
        if found is None:
            found = self._lists[key] = self._build(key)
        return found

    def _build(self, key: RequirementKey) -> RankedOffers:
        wanted = key.resources
        mismatches: Counter[str] = Counter()
        groups: list[tuple[ProviderPolicy, bool, Sequence[Offer]]] = []
        for rules, provider_offers in self._offer_indexes:
            if wanted.providers and rules.name not in wanted.providers:
                mismatches[f"provider {rules.name} not asked for"] += provider_offers.offer_index.size
                continue
            if provider_offers.words_against_nodes(wanted.nodes):
                why = f"{rules.name} starts no {wanted.nodes} machines that reach each other"
                mismatches[why] += provider_offers.offer_index.size
                continue
            if key.image and (why := self._policy.words_against_image(rules, key.image)):
                mismatches[why] += provider_offers.offer_index.size
                continue
            left_out = provider_offers.offer_index.size
            for (gpu, count), group in provider_offers.offer_index.groups(wanted.nodes):
                left_out -= len(group)
                if self.fits_gpu(wanted, gpu, count):
                    gangs = group if wanted.nodes == 1 else [gang_of(offer, wanted.nodes) for offer in group]
                    groups.append((rules, provider_offers.sells_spot, gangs))
                else:
                    mismatches[ANOTHER_KIND] += len(group)
            if left_out:
                mismatches[ANOTHER_NUMBER] += left_out
        costing = self._by_price if key.terms is None else self.costing
        return RankedOffers(key, groups, mismatches, self._policy.bid_headroom_ppm, costing)

    def by_price(self, offers: RankedOffers) -> RankedOffers:
        """Return the same offers as they rank by price, and by the little that their providers state of them."""
        return self.list_for(replace(offers.key, terms=None, needs=replace(offers.key.needs, data_bytes=0)))

    def key_of(self, job: Job) -> RequirementKey:
        """Return what of the job decides which offers fit, what they cost it and how they rank."""
        needs, terms = needs_of(job, self._policy), self.costing.terms_of(job)
        image = job.spec.image if registry_server(job.spec.image) in self._policy.registries else ""
        return RequirementKey(resources=job.spec.resources, needs=needs, image=image, terms=terms)

    def no_gangs(self, wanted: Resources) -> str:
        """Why no provider can start what a job of several machines asks for; empty where one can."""
        asked = [
            (rules.name, shown.words_against_nodes(wanted.nodes))
            for rules, shown in self._offer_indexes
            if not wanted.providers or rules.name in wanted.providers
        ]
        if not all(why for _, why in asked):
            return ""
        reasons = "; ".join(f"{name}: {why}" for name, why in asked)
        return f"no provider in the config can start {wanted.nodes} machines that reach each other: {reasons}"

    def kinds_on_offer(self, provider: ProviderName) -> Collection[Kind]:
        """Return the kinds of machine that a provider offers now."""
        return {
            kind for rules, shown in self._offer_indexes if rules.name == provider for kind in shown.offer_index.by_gpu
        }

    def rented_now(self, wanted: Resources) -> int:
        """Return how many machines of this kind jobs have: the market does not show them."""
        if self._rented is None:
            held = (a.quote.offer for a in self._attempts if a.machine.may_compute)
            self._rented = Counter((offer.gpu, offer.gpu_count // offer.nodes) for offer in held)
        return sum(number for kind, number in self._rented.items() if self.fits_gpu(wanted, *kind))

    def fits_gpu(self, wanted: Resources, gpu: str, count: int) -> bool:
        """Whether this kind of machine is one that the job asks for."""
        for one in wanted.gpu:
            if count == one.count and gpu in self._gpu_set(one.name, gpu):
                return True
        return not wanted.gpu and count == wanted.gpu_count

    def _gpu_set(self, name: str, offered: str) -> frozenset[str]:
        found = self._gpu_sets.get(name)
        if found is None:
            found = self._gpu_sets[name] = resolve_gpu(name)
        if offered not in found and gpus.matches(found, offered):
            return found | {offered}
        return found

    def quote_at(self, offers: RankedOffers, index: int) -> Quote:
        """Return the full quote of one entry, built once."""
        made = offers.quotes.get(index)
        if made is None:
            offer = offers.entries[index]
            rules = self._policy.providers[offer.provider]
            egress, is_own = self._policy.egress.price_for(offer), rules.is_own
            made = offers.quotes[index] = quote(
                offer, offers.key.needs, rules.fee_ppm, self._now, egress, is_own=is_own
            )
        return made

    def ranked(
        self, offers: RankedOffers, passed_over: defaultdict[str, int] | None = None, job: JobId | None = None
    ) -> Iterator[Quote]:
        """Every quote of the key that is neither cooling nor taken, best first; counts the others if asked to.

        Args:
            job: which leaves alone what refused it again and again; `None`: any job.
        """
        index, refusing = offers.walked, self._refusing.get(job, {}) if job is not None and self._refusing else {}
        while (offer := offers.at(index)) is not None:
            why = self.blocked(offer)
            if refusing and not why and (refused := self._refusal(job, offer)):
                why = refused[0]
            if not why:
                yield self.quote_at(offers, index)
            elif passed_over is not None:
                passed_over[why] += 1
            index += 1

    def ranked_total(self, offers: RankedOffers, offer: Offer) -> int:
        """By how much this offer ranks among those of the key."""
        return offers.ranked_total(offer, self._policy.providers[offer.provider].fee_ppm)

    def first_free(self, offers: RankedOffers) -> Quote | None:
        """Return the best quote that is neither cooling nor taken; move the shared mark past what is blocked."""
        while (offer := offers.at(offers.walked)) is not None:
            why = self.blocked(offer)
            if not why:
                return self.quote_at(offers, offers.walked)
            offers.blocked[why] += 1
            offers.walked += 1
        return None

    def lows(self, wanted: Resources) -> Iterator[MicroUsdPerHour]:
        """Yield the lowest price of the GPU part of each kind of machine that this asks for, of the last days."""
        for (gpu, count), price in self._lows.items():
            if self.fits_gpu(wanted, gpu, count):
                yield MicroUsdPerHour(price * wanted.nodes)

    def refusal_of(self, job: Job, offer: Offer) -> tuple[VerdictKind, str] | None:
        """Return why this job leaves alone what sells the offer, which may be free for others, and until when."""
        found = self._refusal(job.id, offer)
        if found is None:
            return None
        return VerdictKind.COOLING, f"{found[0]}; asked again in {span_words(found[1] - self._now)}"

    def _refusal(self, job: JobId | None, offer: Offer) -> tuple[str, datetime] | None:
        if job is None or not self._refusing or not (of_job := self._refusing.get(job)):
            return None
        subjects = (
            refusal_subject(job, offer.market),
            unable_subject(job, offer.market),
            unable_subject(job, offer.market, offer.offer_id),
        )
        found = (of_job.get((offer.provider, subject)) for subject in subjects)
        return next((one for one in found if one is not None), None)

    def free_at(self, offers: RankedOffers) -> datetime | None:
        """When the first of these offers cools down no more, `None` where none of them cools down."""
        ends = (self._cooldown(offer) for offer in offers.entries)
        return min((end[1] for end in ends if end is not None), default=None)

    def blocked(self, offer: Offer) -> str:
        """Why this offer may not be bought in this decision, or an empty string."""
        if self._taken and offer.host_id is not None and (offer.provider, offer.host_id) in self._taken:
            return "taken by another job in this decision"
        if self._buying and (offer.provider, offer.host_id) in self._buying:
            return "a launch on this host has no answer yet"
        found = self._cooldown(offer) if self._cooling else None
        return "" if found is None else found[0]

    def _cooldown(self, offer: Offer) -> tuple[str, datetime] | None:
        """Return what keeps this offer from being used for a while, in words, and until when."""
        cooling = self._cooling
        if not cooling:
            return None
        provider = offer.provider
        if offer.host_id is not None and (found := cooling.get((provider, CooldownScope.HOST, offer.host_id))):
            return "host avoided for now after a preemption", found[1]
        if found := cooling.get((provider, CooldownScope.POOL, offer.pool)):
            return "a machine was lost or refused there a moment ago", found[1]
        if offer.nodes > 1 and (found := cooling.get((provider, CooldownScope.POOL, pool_subject(offer)))):
            return f"{offer.nodes} machines at once were refused there a moment ago", found[1]
        for quota in offer.quotas:
            if found := cooling.get((provider, CooldownScope.QUOTA, quota)):
                return "a quota of the account is used up", found[1]
        if found := cooling.get((provider, CooldownScope.OFFER, offer.offer_id)):
            return "offer was refused a moment ago", found[1]
        if found := cooling.get((provider, CooldownScope.PROVIDER, "")):
            return f"{provider} is left alone for a while: {found[0]}", found[1]
        return None

    def take(self, offer: Offer) -> None:
        """Take this offer, and everything else on its host. Where hosts have no names, there may be more."""
        if offer.host_id is not None:
            self._taken.add((offer.provider, offer.host_id))


def _last_error(rules: ProviderPolicy, at: datetime | None, error: str, now: datetime) -> str:
    if rules.unusable:
        return rules.unusable
    if at is None:
        return error or "no prices yet"
    if now - at > rules.quote_ttl:
        age = int((now - at).total_seconds())
        return f"prices are {age} s old" + (f": {error}" if error else "")
    return ""


# What a job accepts to pay for a machine, and what is agreed or bid within that.


def ceiling_for(gpu: str, gpu_count: int, limit: PriceLimit | None, policy: Policy) -> MicroUsdPerGpuHour | None:
    """Return the highest effective price per GPU-hour for this GPU: the job's own, else the config's, else `None`.

    The GPU may be spelled in any way. A name that leaves its form open has the lowest ceiling of what it may be.
    """
    if limit is not None and limit.per_gpu_hour is not None:
        return MicroUsdPerGpuHour(limit.per_gpu_hour)
    if limit is not None and limit.machine_hour is not None:
        return per_gpu(MicroUsdPerHour(limit.machine_hour), gpu_count)
    if gpu in policy.ceilings or not policy.ceilings:
        return policy.ceilings.get(gpu, policy.ceiling_default)
    found = [policy.ceilings.get(name, policy.ceiling_default) for name in resolve_gpu(gpu)]
    known = [ceiling for ceiling in found if ceiling is not None]
    return min(known) if len(known) == len(found) else None


def ceilings_of(wanted: Resources, limit: PriceLimit | None, policy: Policy) -> Mapping[str, MicroUsdPerGpuHour]:
    """Return the ceiling of each GPU that a job names, by canonical name; those without one are left out."""
    found: dict[str, MicroUsdPerGpuHour] = {}
    for one in wanted.gpu:
        for name in sorted(resolve_gpu(one.name)):
            ceiling = ceiling_for(name, one.count, limit, policy)
            if ceiling is not None:
                found[name] = max(ceiling, found.get(name, ceiling))
    return found


def total_ceiling(ceiling: MicroUsdPerGpuHour, gpu_count: int, limit: PriceLimit | None) -> MicroUsdPerHour:
    """Return the same for the whole machine, exact where the job states it so: its share of a GPU is rounded up."""
    total = whole_machine(ceiling, gpu_count)
    if limit is None or limit.per_gpu_hour is not None or limit.machine_hour is None:
        return total
    return MicroUsdPerHour(min(total, limit.machine_hour))


def words_against_bid(market: MarketSnapshot, quote: Quote) -> str:
    """Why this is not to be bid: the machine costs no more on-demand, by the newest offers of its host.

    They may state less than at the launch.
    """
    sold, here = market.by_provider.get(quote.offer.provider), quote.offer
    if sold is None or here.host_id is None:
        return ""
    alike = sold.offer_index.by_gpu.get((here.gpu, here.gpu_count // here.nodes), ())
    own = (one for one in alike if one.host_id == here.host_id)
    prices = (one.gpu_price if one.market is Market.ON_DEMAND else one.on_demand_price for one in own)
    on_demand = min((price * here.nodes for price in prices if price is not None), default=None)
    if on_demand is None or quote.price.gpu < on_demand:
        return ""
    return f"the same machine costs ${as_usd(on_demand):.4f} per hour on-demand by now"


def is_admissible(candidate: Quote, ceiling: MicroUsdPerGpuHour | None, limit: PriceLimit | None) -> bool:
    """Whether the machine costs no more than the job accepts."""
    if ceiling is None:
        return False
    return candidate.price.total <= total_ceiling(ceiling, candidate.offer.gpu_count, limit)


def ceilings_of_kinds(job: Job, offers: RankedOffers, policy: Policy) -> Iterator[tuple[Kind, int]]:
    """Yield the ceiling of a whole machine of each kind, where the speed of machines is known for the job."""
    if offers.terms.speeds.is_known:
        for kind in offers.kinds:
            ceiling = ceiling_for(*kind, job.spec.price, policy)
            yield kind, 0 if ceiling is None else total_ceiling(ceiling, kind[1], job.spec.price)


def highest_ceiling(job: Job, policy: Policy) -> int:
    """Return what no machine that the job accepts costs more than, whatever its GPU."""
    price, wanted = job.spec.price, job.spec.resources
    counts = [shares(g.count) * wanted.nodes for g in wanted.gpu] or [shares(wanted.gpu_count) * wanted.nodes]
    if price is not None and price.machine_hour is not None:
        return price.machine_hour
    if price is not None and price.per_gpu_hour is not None:
        return price.per_gpu_hour * max(counts)
    return max([*policy.ceilings.values(), policy.ceiling_default or 0]) * max(counts)


def agree(
    job: Job, chosen: Quote, ceiling: MicroUsdPerGpuHour, next_best: int | None, policy: Policy
) -> tuple[Quote, MicroUsdPerHour]:
    """Return what to bid or at most to pay for the GPU part, and the quote at that price where we pay what we bid.

    A bid is no higher than leaves this offer the best choice beside the next best: up to `next_best` for the machine.
    """
    offer = chosen.offer
    allowed = total_ceiling(ceiling, offer.gpu_count, job.spec.price)
    limit = gpu_price_limit(chosen, ceiling)
    if allowed < whole_machine(ceiling, offer.gpu_count):
        limit = min(limit, gpu_price_within(chosen, allowed))
    if offer.market is Market.ON_DEMAND or not offer.pays_bid:
        return chosen, MicroUsdPerHour(max(limit, offer.gpu_price))
    wanted = min(limit, usual_bid(offer, policy.bid_headroom_ppm))
    if next_best is not None:
        wanted = min(wanted, gpu_price_within(chosen, next_best))
    bid = MicroUsdPerHour(max(offer.gpu_price, wanted))
    return repriced(chosen, bid), bid


# Why none of the offers is taken for a job, in words.


NOT_COMPARED: Final = "ranked behind those, not compared"


def nothing_fits(catalogue: CandidateCatalogue, job: Job, offers: RankedOffers) -> tuple[VerdictKind, str]:
    silent = "; ".join(f"{name}: {why}" for name, why in sorted(catalogue.silent.items()))
    silent = f" ({silent})" if silent else ""
    if catalogue.size == 0:
        return VerdictKind.NO_OFFERS, f"no provider shows offers now{silent}"
    if why := catalogue.no_gangs(job.spec.resources):
        return VerdictKind.NO_MATCH, f"{why}{silent}"
    wanted, others = wanted_words(job.spec.resources), dict(offers.mismatches)
    kinds = others.pop(ANOTHER_KIND, 0)
    reasons = []
    if kinds:
        reasons.append("1 offer is another machine" if kinds == 1 else f"{kinds} offers are other machines")
    if others:
        reasons.append(passed_over_words(others))
    if own := catalogue.rented_now(job.spec.resources):
        reasons.append(f"your own jobs have {own} such machine{'s' if own > 1 else ''}")
    return VerdictKind.NO_MATCH, f"no {wanted.removeprefix('a ')} is on offer now ({', '.join(reasons)}){silent}"


def all_blocked(catalogue: CandidateCatalogue, offers: RankedOffers) -> str:
    reasons = sorted({catalogue.blocked(offer) for offer in offers.entries})
    return f"all {len(offers.entries)} offers that fit are out for now: {'; '.join(reasons)}"


def all_too_expensive(catalogue: CandidateCatalogue, offers: RankedOffers, compared: Mapping[str, int]) -> PassedOver:
    """Return why each offer is not taken; those that rank behind the last one compared are not read at all.

    Many jobs of the same requirements pass over the same offers, so the sums are made once.
    """
    known = (offers.walked, offers.read, *compared.items())
    found = offers.summaries.get(known)
    if found is None:
        counts = offers.mismatches + offers.blocked
        counts.update(compared)
        unread = catalogue.size - counts.total()
        if unread > 0:
            counts[NOT_COMPARED] = unread
        found = offers.summaries[known] = most_frequent_first(counts)
    return found


def too_expensive(
    job: Job, offers: RankedOffers, best: Quote, ceiling: MicroUsdPerGpuHour | None
) -> tuple[VerdictKind, str]:
    offer = best.offer
    if ceiling is None:
        return (
            VerdictKind.NO_CEILING,
            f"no ceiling for {offer.gpu}: give max_price in the job or set [ceilings] in the config",
        )
    allowed = total_ceiling(ceiling, offer.gpu_count, job.spec.price)
    which = "the best by expected cost" if offers.terms.speeds.is_known else "the cheapest"
    over = as_usd(per_gpu(MicroUsdPerHour(best.price.total - allowed), offer.gpu_count))
    return (
        VerdictKind.ABOVE_CEILING,
        f"{which}, {offers.words_of(best)}, is ${over:.4f} above the ceiling of {per_gpu_words(ceiling)}",
    )
