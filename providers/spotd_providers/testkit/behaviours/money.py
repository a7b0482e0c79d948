"""Prices never above what was agreed, and charges that agree with the cloud's records."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta
from enum import StrEnum
from functools import partial
from itertools import pairwise

from spotd_providers.contract.errors import NoCapacity, OfferGone, PriceMoved, ProviderError, RequestRejected
from spotd_providers.contract.money import MicroUsdPerHour, cost
from spotd_providers.contract.provider import Bills, ChangesBids, KnowsBalance
from spotd_providers.contract.values import Billing, LaunchRequest, Market, Power, ProviderCharge
from spotd_providers.testkit.expect import (
    an_offer,
    attempt,
    buy_machine,
    expect,
    require_nothing_bought,
    require_refusal,
)
from spotd_providers.testkit.harness import Harness
from spotd_providers.testkit.knobs import NotApplicable, OddState
from spotd_providers.testkit.suite import behaviour

ROUNDED = timedelta(minutes=1)
"""Charges of one kind may overlap by less than this."""
BEGINS = timedelta(minutes=5)
BILLED_FOR = timedelta(hours=1)
LACKS = timedelta(minutes=1)
"""What the spans of charges may lack of a machine's life at either end."""


async def _never_costs_more(h: Harness, request: LaunchRequest) -> None:
    outcome = await attempt(h, partial(h.provider.launch, request))
    if isinstance(outcome, ProviderError):
        expect(
            isinstance(outcome, PriceMoved | OfferGone | NoCapacity | RequestRejected),
            f"{outcome!r} instead of PriceMoved",
        )
        require_nothing_bought(h, request.key)
    for machine in h.live(request.key):
        expect(machine.price is not None, "the harness does not state what its machines cost")
        expect(
            machine.price is not None and machine.price <= request.price_max,
            f"a machine was bought at {machine.price}, agreed were {request.price_max}",
        )


@behaviour(cases=tuple(Market))
async def a_price_that_moved_is_not_paid(h: Harness, case: Market) -> None:
    """When the price rose after the poll, nothing is bought above what was agreed."""
    request = h.request(await an_offer(h, case))
    h.raise_price(request.offer, 2.0)
    await _never_costs_more(h, request)


@behaviour(cases=tuple(Market))
async def price_max_is_respected(h: Harness, case: Market) -> None:
    """An agreed price below the offer's never buys at the offer's."""
    offer = await an_offer(h, case)
    await _never_costs_more(h, h.request(offer, price_max=MicroUsdPerHour(offer.gpu_price // 2)))


@behaviour()
async def a_machine_is_bought_at_the_offered_price_or_less(h: Harness) -> None:
    """What the cloud charges for a machine is what was offered, whole machine against whole machine."""
    offer = await an_offer(h)
    key, _ = await buy_machine(h, offer)
    for machine in h.live(key):
        if machine.price is None:
            raise NotApplicable("the harness does not state what its machines cost")
        expect(machine.price <= offer.gpu_price, f"{offer.gpu_price} was offered, {machine.price} is charged")


@behaviour()
async def the_balance_is_what_the_account_holds(h: Harness) -> None:
    """The balance is the cloud's own, never more."""
    truth = h.true_balance()
    expect(isinstance(h.provider, KnowsBalance), "the account has a balance and the provider does not read it")
    if isinstance(h.provider, KnowsBalance):
        stated = await h.provider.balance()
        # Rounded up to a micro-dollar at the edge, like every amount.
        expect(truth.available <= stated.available <= truth.available + 1, f"{stated!r} is stated, {truth!r} is true")


@behaviour()
async def a_changed_bid_is_what_the_machine_costs_at_most(h: Harness) -> None:
    """After a change of bid the cloud knows the new bid for the whole machine."""
    if not isinstance(h.provider, ChangesBids):
        raise NotApplicable(h.provider.capabilities[Power.BID_CHANGE].reason)
    offer = await an_offer(h, Market.SPOT)
    key, instance = await buy_machine(h, offer)
    bid = MicroUsdPerHour(offer.gpu_price + 100_000)
    await h.provider.change_bid(instance.ref, bid)
    prices = [machine.price for machine in h.live(key)]
    expect(all(price is not None and abs(price - bid) <= offer.gpu_count for price in prices), f"the bid is {prices}")


@behaviour()
async def a_bid_on_an_absent_machine_is_refused(h: Harness) -> None:
    """A bid on a machine that is gone is an error, not a success."""
    if not isinstance(h.provider, ChangesBids):
        raise NotApplicable(h.provider.capabilities[Power.BID_CHANGE].reason)
    offer = await an_offer(h, Market.SPOT)
    _, instance = await buy_machine(h, offer)
    await h.provider.terminate(instance.ref)
    await h.settle()
    await require_refusal(h, partial(h.provider.change_bid, instance.ref, offer.gpu_price), ProviderError)


class Condition(StrEnum):
    """What may have become of a machine when its bill is read."""

    RUNS = "runs"
    PAUSED = "paused"
    OUT_OF_REACH = "out of reach"
    ENDED_BY_ITSELF = "ended by itself"
    PROVISION_FAILED = "provision failed"


@behaviour(cases=tuple(Condition))
async def what_is_billed_is_what_is_stated(h: Harness, case: Condition) -> None:
    """A machine that is stated to bill all, its disk or nothing does so in the cloud's own ledger."""
    offer = await an_offer(h, Market.SPOT if case is Condition.PAUSED else None)
    key, instance = await buy_machine(h, offer)
    machine = instance.ref.instance_id
    await h.advance(BEGINS)
    match case:
        case Condition.PAUSED:
            h.pause(machine)
        case Condition.OUT_OF_REACH:
            h.lose_contact(machine)
        case Condition.ENDED_BY_ITSELF | Condition.PROVISION_FAILED:
            h.set_state(machine, OddState(case.value))
        case Condition.RUNS:
            pass
    await h.settle()
    reports = [one for one in await h.provider.find(key) if one.ref == instance.ref]
    stated = {one.billing for one in reports}
    stated |= {one.billing for one in (await h.provider.instances()).instances if one.ref == instance.ref}
    expect(len(stated) <= 1, f"find and list disagree about what is billed: {sorted(stated)}")
    price = reports[0].price if reports and reports[0].price else offer.gpu_price
    before = h.billed(machine)
    await h.advance(BILLED_FOR)
    grown = h.billed(machine) - before
    most = cost(price, BILLED_FOR)
    for billing in stated:
        said = f"a machine that {case} is stated to bill {billing}, and cost {grown} micro-dollars in {BILLED_FOR}"
        if billing is Billing.FULL:
            expect(grown >= most * 9 // 10, said)
        elif billing is Billing.DISK:
            expect(grown <= most // 2, said)
        elif billing is Billing.NOTHING:
            expect(grown == 0, said)


@behaviour()
async def charges_are_the_clouds_own(h: Harness) -> None:
    """What the provider says was billed for a machine is what the cloud's ledger holds, to one cent, and covers it."""
    if not isinstance(h.provider, Bills):
        raise NotApplicable(h.provider.capabilities[Power.BILLING].reason)
    since = h.clock.now() - timedelta(hours=1)
    key, instance = await buy_machine(h)
    began = h.clock.now()
    await h.advance(timedelta(hours=2))
    ended = h.clock.now()
    await h.provider.terminate(instance.ref)
    await h.settle()
    billed = h.billed(instance.ref.instance_id)
    charges = await h.provider.charges(since, h.clock.now() + timedelta(hours=1))
    ours = [c for c in charges if c.key == key or c.instance_id == instance.ref.instance_id]
    charged = sum(charge.amount for charge in ours)
    expect(billed > 0, "the harness billed nothing for two hours")
    expect(abs(charged - billed) <= 10_000, f"{charged} micro-dollars are charged, {billed} were billed")
    _require_spans(ours, began, ended)


def _require_spans(charges: Sequence[ProviderCharge], began: datetime, ended: datetime) -> None:
    """Each time is charged once for each kind, in one currency, and together they cover what lies between these."""
    expect({charge.currency for charge in charges} == {"USD"}, "a charge in dollars does not say USD")
    expect(all(charge.start.tzinfo and charge.end.tzinfo for charge in charges), "a span has no time zone")
    expect(all(charge.start <= charge.end for charge in charges), "a span ends before it begins")
    for kind in {charge.kind for charge in charges if charge.amount > 0}:
        own = sorted((c.start, c.end) for c in charges if c.kind == kind and c.amount > 0)
        overlaps = any(before[1] - after[0] >= ROUNDED for before, after in pairwise(own))
        expect(not overlaps, f"two charges of the kind {kind} are for the same time")
    spans = [(charge.start, charge.end) for charge in charges if charge.amount > 0]
    reach = f"the charges are for {min(spans)[0]} to {max(end for _, end in spans)}, the machine ran {began} to {ended}"
    expect(min(spans)[0] <= began + LACKS and max(end for _, end in spans) >= ended - LACKS, reach)
