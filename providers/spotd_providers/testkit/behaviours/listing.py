"""What exists: all of ours, nothing of others', and never a wrong "there is none"."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta
from enum import StrEnum
from functools import partial
from itertools import pairwise

from spotd_providers.contract.errors import (
    NoCapacity,
    OfferGone,
    PriceMoved,
    ProviderError,
    RequestRejected,
    Unavailable,
)
from spotd_providers.contract.provider import Bills, ChangesBids, KnowsBalance
from spotd_providers.contract.values import (
    AttemptKey,
    Billing,
    Instance,
    InstanceState,
    Launched,
    LaunchRequest,
    Loss,
    Market,
    MicroUsdPerHour,
    Power,
    ProviderCharge,
    cost,
)
from spotd_providers.testkit.harness import Harness, NotApplicable, OddState
from spotd_providers.testkit.serve import Call
from spotd_providers.testkit.suite import (
    BehaviourFailed,
    an_offer,
    attempt,
    behaviour,
    buy_machine,
    expect,
    offers_of,
    require_nothing_bought,
    require_refusal,
    the_machine,
)


@behaviour()
async def an_unknown_key_finds_nothing(h: Harness) -> None:
    """Find of a key that was never used is empty, and the listing of an account without machines is too."""
    expect(not await h.provider.find(h.key()), "find returns a machine that was never made")
    listing = await h.provider.instances()
    expect(listing.complete and not listing.instances, f"{listing!r} for an account without machines")


@behaviour()
async def keys_that_begin_alike_are_distinguished(h: Harness) -> None:
    """Find of attempt 1 does not return attempt 10, nor the other way round."""
    first, tenth = AttemptKey(f"spotd-{h.install}-j0b-1"), AttemptKey(f"spotd-{h.install}-j0b-10")
    offers = sorted(await offers_of(h), key=lambda o: (o.gpu_price, o.offer_id))
    other = next((o for o in offers if o.pool != offers[0].pool), offers[0])
    await h.provider.launch(h.request(offers[0], tenth))
    await h.settle()
    expect(not await h.provider.find(first), "attempt 10 was taken for attempt 1")
    await h.provider.launch(h.request(other, first))
    await h.settle()
    for key in (first, tenth):
        expect((await the_machine(h, key)).key == key, "attempts 1 and 10 were mixed up")


@behaviour()
async def every_machine_is_listed_however_many(h: Harness) -> None:
    """A listing goes on to the last page."""
    keys = [h.key() for _ in range(60)]
    h.add_machines(keys)
    listing = await h.provider.instances()
    listed = {instance.key for instance in listing.instances}
    missing = set(keys) - listed
    expect(listing.complete, "a listing that went well is called incomplete")
    expect(not missing, f"{len(missing)} of 60 machines are missing")
    expect(len(listing.instances) == 60, f"{len(listing.instances)} machines are listed instead of 60")
    await the_machine(h, keys[-1])


@behaviour()
async def foreign_machines_are_never_shown_or_touched(h: Harness) -> None:
    """Machines without our install label are not listed, not found, and outlive everything we do."""
    foreign = set(h.add_foreign_machines())
    expect(foreign, "the harness made no foreign machine")
    key, instance = await buy_machine(h)
    listing = await h.provider.instances()
    expect([i.key for i in listing.instances] == [key], f"foreign machines are listed: {listing.instances!r}")
    labels = [m.label for m in h.machines() if m.machine_id in foreign and m.label]
    expect(any(label.startswith(f"spotd-{h.install}") for label in labels), "no foreign label begins like ours")
    for label in labels:
        expect(not await h.provider.find(AttemptKey(label)), f"find returns the foreign machine {label!r}")
    await h.provider.terminate(instance.ref)
    await h.settle()
    alive = {machine.machine_id for machine in h.machines() if machine.exists}
    expect(foreign <= alive, f"foreign machines were ended: {foreign - alive}")
    expect(not h.live(key), "our own machine was not ended")


@behaviour()
async def part_of_a_listing_is_called_incomplete(h: Harness) -> None:
    """A listing that broke off says so, or fails; it is never passed for the whole."""
    key, _ = await buy_machine(h)
    h.list_only_part()
    outcome = await attempt(h, h.provider.instances)
    if not isinstance(outcome, ProviderError):
        expect(not outcome.complete, f"part of a listing was passed for the whole: {outcome!r}")
    h.faults.clear()
    expect(h.live(key), "the machine is gone from the world")


@behaviour()
async def a_malformed_row_costs_only_itself_and_completeness(h: Harness) -> None:
    """An unreadable row of a listing hides no other machine, and the listing is no longer complete."""
    keys = [h.key() for _ in range(3)]
    h.add_machines(keys)
    victim = h.live(keys[1])[0]
    h.spoil_listed_row(victim.machine_id)
    outcome = await attempt(h, h.provider.instances)
    if isinstance(outcome, ProviderError):
        raise BehaviourFailed(f"one malformed row cost the whole listing: {outcome!r}")
    listed = {instance.key for instance in outcome.instances}
    expect({keys[0], keys[2]} <= listed, f"one malformed row cost others: {listed}")
    expect(keys[1] in listed or not outcome.complete, "an unreadable row was dropped from a listing called complete")


@behaviour()
async def an_unheard_of_state_is_unknown_and_not_gone(h: Harness) -> None:
    """A state the provider never documented is UNKNOWN: the machine stays listed and found."""
    key, _ = await buy_machine(h)
    h.set_state(h.live(key)[0].machine_id, OddState.UNHEARD_OF)
    machine = await the_machine(h, key)
    expect(machine.state is InstanceState.UNKNOWN, f"an unheard-of state is taken for {machine.state}")
    listing = await h.provider.instances()
    expect(key in {i.key for i in listing.instances}, "the machine is not listed any more")


@behaviour()
async def a_new_machine_is_found_within_the_reconcile_window(h: Harness) -> None:
    """However late listings are, a machine is found before the declared window has passed."""
    window = h.plugin.traits(h.settings()).reconcile_window
    h.set_list_lag(min(timedelta(seconds=60), window / 2))
    request = h.request(await an_offer(h))
    h.faults.lose_answer(Call.LAUNCH)
    outcome = await attempt(h, partial(h.provider.launch, request))
    expect(not isinstance(outcome, Launched), "a lost answer was understood")
    await h.advance(window)
    await the_machine(h, request.key)
    expect(len(h.live(request.key)) == 1, "there is not exactly one machine")


@behaviour()
async def a_launch_under_list_lag_still_names_its_machine(h: Harness) -> None:
    """A machine that listings do not show yet is launched all the same; launch does not take it for failed."""
    h.set_list_lag(timedelta(seconds=45))
    request = h.request(await an_offer(h))
    launched = await h.provider.launch(request)
    machines = h.live(request.key)
    expect(len(machines) == 1 and launched.instance.ref.instance_id == machines[0].machine_id, "another machine")


@behaviour()
async def a_listing_that_cannot_be_had_is_an_error(h: Harness) -> None:
    """When the cloud cannot be reached, find and the listing fail; neither says that there is nothing."""
    key, _ = await buy_machine(h)
    h.served.stop()
    for call in (h.provider.instances, partial(h.provider.find, key)):
        outcome = await attempt(h, call)
        expect(isinstance(outcome, Unavailable), f"{outcome!r} from a cloud that cannot be reached")


# Machines that are taken away: the provider says so, and says why as far as it knows.


async def _all_reports(h: Harness, instance: Instance) -> list[Instance]:
    listing = await h.provider.instances()
    listed = [i for i in listing.instances if i.key == instance.key]
    return [*await h.provider.find(instance.key), *listed]


@behaviour()
async def a_preempted_machine_is_not_called_running(h: Harness) -> None:
    """A machine the cloud took away is gone, ending or paused, for the reason that it was taken away."""
    _, instance = await buy_machine(h, await an_offer(h, Market.SPOT))
    h.preempt(instance.ref.instance_id)
    for report in await _all_reports(h, instance):
        expect(
            report.state in (InstanceState.PAUSED, InstanceState.ENDING, InstanceState.GONE),
            f"a machine that was taken away is {report.state}",
        )
        expect(report.loss in (Loss.PREEMPTED, Loss.OUTBID), f"a machine that was taken away is lost by {report.loss}")


@behaviour()
async def an_outbid_machine_is_paused(h: Harness) -> None:
    """A machine that is outbid but kept is PAUSED for being outbid: it still exists and may wake up."""
    _, instance = await buy_machine(h, await an_offer(h, Market.SPOT))
    h.pause(instance.ref.instance_id)
    report = await the_machine(h, instance.key)
    expect(report.state is InstanceState.PAUSED, f"a paused machine is {report.state}")
    expect(report.loss in (Loss.OUTBID, Loss.PREEMPTED), f"a paused machine is lost by {report.loss}")
    listing = await h.provider.instances()
    states = [i.state for i in listing.instances if i.key == instance.key]
    expect(states == [InstanceState.PAUSED], f"listed as {states}")


@behaviour()
async def a_notice_is_reported(h: Harness) -> None:
    """An announced loss is reported with its time while the machine still runs."""
    if not h.provider.capabilities[Power.NOTICES].available:
        raise NotApplicable(h.provider.capabilities[Power.NOTICES].reason)
    _, instance = await buy_machine(h, await an_offer(h, Market.SPOT))
    h.give_notice(instance.ref.instance_id)
    report = await the_machine(h, instance.key)
    expect(report.notice_at is not None, "the notice is not reported")
    if report.notice_at is not None:
        expect(report.notice_at.utcoffset() == timedelta(0), "the notice's time is not aware UTC")
        expect(report.notice_at - h.clock.now() < timedelta(hours=1), f"the notice is for {report.notice_at}")
    expect(report.state is not InstanceState.GONE, "a machine with a notice is said to be gone")


@behaviour()
async def a_machine_that_cannot_come_up_says_so(h: Harness) -> None:
    """A machine whose image or container cannot be started is reported as lost for that reason."""
    _, instance = await buy_machine(h)
    h.set_state(instance.ref.instance_id, OddState.PROVISION_FAILED)
    for report in await _all_reports(h, instance):
        expect(report.state is not InstanceState.RUNNING, "a machine that cannot come up is called running")
        expect(
            report.loss in (Loss.PROVISION_FAILED, Loss.NO_CAPACITY, Loss.IMAGE_ERROR, Loss.HOST_LOST),
            f"a machine that cannot come up is lost by {report.loss}",
        )


@behaviour()
async def a_machine_that_ended_by_itself_is_not_called_running(h: Harness) -> None:
    """A machine that ended by itself is not RUNNING, and was not preempted."""
    _, instance = await buy_machine(h)
    h.set_state(instance.ref.instance_id, OddState.ENDED_BY_ITSELF)
    for report in await _all_reports(h, instance):
        expect(report.state is not InstanceState.RUNNING, "a machine that ended is called running")
        expect(report.loss is not Loss.PREEMPTED, "a machine that ended by itself is called preempted")


@behaviour()
async def raising_the_bid_of_an_absent_power_is_not_offered(h: Harness) -> None:
    """Whether bids can be changed is declared and implemented alike."""
    declared = h.provider.capabilities[Power.BID_CHANGE].available
    expect(not declared or isinstance(h.provider, ChangesBids), "bid changes are declared and not implemented")


# Prices never above what was agreed, and charges that agree with the cloud's records.


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
