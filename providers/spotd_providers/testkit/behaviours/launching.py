"""Every call that names a machine, made on machines of others: none is ended, changed or shown."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, Final

import anyio

from spotd_providers.contract.errors import (
    AuthFailed,
    ContractViolation,
    NoBalance,
    NoCapacity,
    OfferGone,
    OutcomeUnknown,
    ProviderError,
    QuotaExceeded,
    RateLimited,
    RequestRejected,
    Unavailable,
)
from spotd_providers.contract.provider import (
    ChangesBids,
    GivesShell,
    OpensPorts,
    Provider,
    ReadsLogs,
    ReplacesMembers,
)
from spotd_providers.contract.values import (
    InstanceId,
    InstanceRef,
    InstanceState,
    Launched,
    LaunchRequest,
    Market,
    MicroUsdPerHour,
    Offer,
    Power,
)
from spotd_providers.testkit.clock import until
from spotd_providers.testkit.harness import START_SCRIPT, Harness, NotApplicable, WorldMachine
from spotd_providers.testkit.serve import FOR_EVER, SERVER_ERROR, STRIKES, Call
from spotd_providers.testkit.suite import (
    BehaviourFailed,
    an_offer,
    attempt,
    behaviour,
    buy_machine,
    expect,
    offers_of,
    require_nothing_bought,
    require_one_machine,
    require_refusal,
    the_machine,
)

ENDS: Final = "terminate"
CALLS: Final[dict[str, tuple[Power, type] | None]] = {
    ENDS: None,
    "change_bid": (Power.BID_CHANGE, ChangesBids),
    "logs": (Power.LOGS, ReadsLogs),
    "shell": (Power.SHELL, GivesShell),
    "open_port": (Power.PORTS, OpensPorts),
    "replace_members": (Power.REPLACE, ReplacesMembers),
    "drop_members": (Power.REPLACE, ReplacesMembers),
}
"""Every call of the contract that takes a reference, with its power where it is an optional one."""
CHANGES: Final = (ENDS, "change_bid")
"""The calls that end or change a machine."""


def _require_power(h: Harness, name: str) -> None:
    needs = CALLS[name]
    if needs is not None:
        capability = h.provider.capabilities[needs[0]]
        if not capability.available or not isinstance(h.provider, needs[1]):
            raise NotApplicable(capability.reason)


def _call(h: Harness, name: str, ref: InstanceRef, offer: Offer) -> Callable[[], Awaitable[object]]:
    further: dict[str, dict[str, Any]] = {
        "change_bid": {"price": MicroUsdPerHour(offer.gpu_price + offer.gpu_price // 3 + 1)},
        "logs": {"lines": 10},
        "open_port": {"port": 1},
        "drop_members": {"ranks": [1]},
    }
    if name == "replace_members":
        return partial(getattr(h.provider, name), h.request(offer), ref, [1], 1)
    return partial(getattr(h.provider, name), ref, **further.get(name, {}))


def _world(h: Harness, ids: Sequence[str]) -> dict[str, WorldMachine]:
    return {machine.machine_id: machine for machine in h.machines() if machine.machine_id in ids}


@behaviour(cases=tuple(CALLS))
async def a_reference_to_a_foreign_machine_is_not_acted_on(h: Harness, case: str) -> None:
    """A call that names a machine without our install label leaves it as it is and shows nothing of it."""
    _require_power(h, case)
    foreign = list(h.add_foreign_machines())
    expect(foreign, "the harness made no foreign machine")
    offer = await an_offer(h, Market.SPOT if case == "change_bid" else None)
    await h.settle()
    before = _world(h, foreign)
    await _try_all(h, case, foreign, "", offer, before)
    _, own = await buy_machine(h)
    await h.provider.instances()
    # Once more: what a provider remembers of its own machines may not let a foreign one pass.
    await _try_all(h, case, foreign, own.ref.scope, offer, before)
    expect(h.live(own.key), "our own machine was ended")


async def _try_all(
    h: Harness,
    name: str,
    foreign: Sequence[str],
    scope: str,
    offer: Offer,
    before: dict[str, WorldMachine],
) -> None:
    for number in foreign:
        ref = InstanceRef(provider=h.plugin.name, instance_id=InstanceId(number), scope=scope)
        outcome = await attempt(h, _call(h, name, ref, offer))
        # A machine of others may be taken for an absent one: its end is a success, and its log is empty.
        is_as_absent = name == ENDS or (name == "logs" and not outcome)
        if not is_as_absent and not isinstance(outcome, ProviderError):
            raise BehaviourFailed(f"{name} of a foreign machine returned {outcome!r}")
    await h.settle()
    expect(_world(h, foreign) == before, f"{name} changed foreign machines: {_world(h, foreign)!r}")


@behaviour(cases=CHANGES)
async def a_change_of_one_machine_changes_no_other(h: Harness, case: str) -> None:
    """Ending or changing one of our machines leaves all others as they are, ours and those of others."""
    _require_power(h, case)
    offers = [one for one in await offers_of(h) if case == ENDS or one.market is Market.SPOT]
    first = min(offers, key=lambda one: (one.gpu_price, one.offer_id))
    other = next((one for one in offers if one.pool != first.pool), None)
    others = list(h.add_foreign_machines())
    key, instance = await buy_machine(h, first)
    if other is not None:
        _, kept = await buy_machine(h, other)
        others.append(kept.ref.instance_id)
    await h.settle()
    before = _world(h, others)
    outcome = await attempt(h, _call(h, case, instance.ref, first))
    if isinstance(outcome, ProviderError):
        raise BehaviourFailed(f"{case} of our own machine was refused: {outcome!r}") from outcome
    await h.settle()
    expect(_world(h, others) == before, f"{case} changed other machines: {_world(h, others)!r}")
    expect(bool(h.live(key)) == (case != ENDS), "our own machine is not as it was to be")


# Buying: at most once, under our key, and never a wrong word about whether it happened.


@behaviour()
async def a_launch_makes_one_machine_that_carries_the_key(h: Harness) -> None:
    """After a launch the world holds one machine, under our key, as it was ordered."""
    offer = await an_offer(h)
    request = h.request(offer)
    launched = await h.provider.launch(request)
    require_one_machine(h, request.key)
    machine = h.live(request.key)[0]
    expect(launched.instance.key == request.key, f"the answer carries {launched.instance.key!r}")
    expect(launched.instance.ref.provider == h.plugin.name, f"{launched.instance.ref!r} names another provider")
    expect(launched.instance.state is not InstanceState.GONE, "the new machine is said to be gone")
    expect(launched.instance.ref.instance_id == machine.machine_id, "the answer names another machine")
    if machine.market is not None:
        expect(machine.market is offer.market, f"a machine was bought {machine.market} instead of {offer.market}")
    if machine.image is not None:
        expect(machine.image == request.image, f"the machine runs the image {machine.image!r}")
    if machine.disk_gb is not None:
        expect(machine.disk_gb >= request.disk_gb, f"the machine has {machine.disk_gb} GB of disk")
    if machine.start_script is not None:
        expect(START_SCRIPT.strip() in machine.start_script, "the start script arrived changed")


@behaviour()
async def a_launched_machine_is_found_and_listed(h: Harness) -> None:
    """A machine that was bought is returned by find and by the listing, with one ref."""
    key, instance = await buy_machine(h)
    found = await the_machine(h, key)
    listing = await h.provider.instances()
    listed = [i for i in listing.instances if i.key == key]
    expect(listing.complete, "a listing that went well is called incomplete")
    expect(len(listed) == 1, f"listed {len(listed)} times")
    expect(found.ref == listed[0].ref == instance.ref, "launch, find and listing name different machines")
    expect(found.state in (InstanceState.RUNNING, InstanceState.PENDING), f"a machine that is up is {found.state}")


@behaviour(cases=tuple(STRIKES))
async def a_lost_answer_means_unknown_and_one_machine(h: Harness, case: str) -> None:
    """A purchase whose answer is lost is OutcomeUnknown, is never repeated, and is found by its key."""
    request = h.request(await an_offer(h))
    STRIKES[case](h.faults, Call.LAUNCH, 1)
    error = await require_refusal(h, partial(h.provider.launch, request), OutcomeUnknown)
    expect(isinstance(error, OutcomeUnknown) and error.key == request.key, f"{error!r} does not carry the key")
    h.faults.clear()
    require_one_machine(h, request.key)
    await h.settle()
    await the_machine(h, request.key)
    require_one_machine(h, request.key)


@behaviour(cases=("connection lost", "no answer"))
async def a_purchase_that_never_happened_is_unknown_until_find_says_so(h: Harness, case: str) -> None:
    """A connection that breaks before the effect is no different; find then shows that there is none."""
    request = h.request(await an_offer(h))
    if case == "connection lost":
        h.faults.lose_answer(Call.LAUNCH, after_effect=False)
    else:
        h.faults.hang(Call.LAUNCH, after_effect=False)
    await require_refusal(h, partial(h.provider.launch, request), OutcomeUnknown)
    h.faults.clear()
    require_nothing_bought(h, request.key)
    expect(h.launch_calls() == 1, "the purchase was tried again")
    await h.settle()
    expect(not await h.provider.find(request.key), "find returns a machine that was never made")


@behaviour()
async def an_unreachable_cloud_sells_nothing(h: Harness) -> None:
    """A cloud that cannot be connected to is Unavailable: nothing was bought, for certain."""
    request = h.request(await an_offer(h))
    h.served.stop()
    # A connection kept from before may die under the request, which is as unknown as any other lost answer.
    await require_refusal(h, partial(h.provider.launch, request), Unavailable, OutcomeUnknown)
    await require_refusal(h, partial(h.provider.launch, request), Unavailable)
    require_nothing_bought(h, request.key)


@behaviour(cases=("with advice", "without advice"))
async def a_rate_limited_launch_is_refused_and_not_repeated(h: Harness, case: str) -> None:
    """A launch that meets a rate limit raises RateLimited at once; the daemon decides what happens next."""
    request = h.request(await an_offer(h))
    h.faults.answer(Call.LAUNCH, h.rate_limit_answer(30 if case == "with advice" else None))
    error = await require_refusal(h, partial(h.provider.launch, request), RateLimited)
    expect(isinstance(error, RateLimited) and error.retry_after.total_seconds() > 0, "it says not how long to wait")
    if case == "with advice" and isinstance(error, RateLimited):
        expect(error.retry_after.total_seconds() >= 30, f"it asks to wait {error.retry_after} instead of 30 s")
    require_nothing_bought(h, request.key)
    expect(h.launch_calls() == 1, f"{h.launch_calls()} requests to buy were sent")


@behaviour()
async def a_failed_confirmation_does_not_deny_the_purchase(h: Harness) -> None:
    """If the cloud sold the machine and then cannot be asked about it, launch does not say that nothing happened."""
    request = h.request(await an_offer(h))
    h.faults.answer(Call.LIST, SERVER_ERROR, times=FOR_EVER)
    outcome = await attempt(h, partial(h.provider.launch, request))
    expect(isinstance(outcome, Launched | OutcomeUnknown), f"{outcome!r} although the machine was bought")
    h.faults.clear()
    require_one_machine(h, request.key)
    await h.settle()
    await the_machine(h, request.key)


@behaviour()
async def a_cancelled_launch_leaves_at_most_one_machine_that_is_found(h: Harness) -> None:
    """Cancelling a launch in flight buys nothing more, and what it bought is found by its key."""
    request = h.request(await an_offer(h))
    h.faults.hang(Call.LAUNCH)
    async with anyio.create_task_group() as group:
        group.start_soon(h.provider.launch, request)
        await until(lambda: h.faults.hanging)
        group.cancel_scope.cancel()
    h.faults.clear()
    await h.settle()
    require_one_machine(h, request.key)
    await the_machine(h, request.key)


REFUSALS: Final[dict[str, tuple[Callable[[Harness, Offer], None], tuple[type[ProviderError], ...]]]] = {
    "vanished offer": (lambda h, offer: h.vanish_offer(offer), (OfferGone, NoCapacity)),
    "no capacity": (lambda h, offer: h.exhaust_capacity(offer), (NoCapacity, OfferGone)),
    "empty account": (lambda h, _: h.empty_balance(), (NoBalance,)),
    "used-up quota": (lambda h, _: h.exhaust_quota(), (QuotaExceeded,)),
    "refused key": (lambda h, _: h.break_auth(), (AuthFailed,)),
}


@behaviour(cases=tuple(REFUSALS))
async def a_refused_launch_buys_nothing(h: Harness, case: str) -> None:
    """A launch that the cloud refuses raises the leaf that names the cause, and nothing is bought."""
    request = h.request(await an_offer(h))
    cause, leaves = REFUSALS[case]
    cause(h, request.offer)
    await require_refusal(h, partial(h.provider.launch, request), *leaves)
    require_nothing_bought(h, request.key)


@behaviour()
async def a_start_script_beyond_the_limit_is_refused(h: Harness) -> None:
    """A start script longer than the declared limit is RequestRejected with the field's name, and nothing is bought."""
    limit = h.plugin.traits(h.settings()).start_script_bytes_max
    expect(limit >= len(START_SCRIPT), f"a limit of {limit} bytes holds no start script")
    request = h.request(await an_offer(h), start_script="#" + "x" * limit)
    error = await require_refusal(h, partial(h.provider.launch, request), RequestRejected)
    expect(isinstance(error, RequestRejected) and error.field and error.reason, f"{error!r} names no field or reason")
    require_nothing_bought(h, request.key)
    expect(h.launch_calls() <= 1, f"{h.launch_calls()} requests to buy were sent")


@behaviour()
async def a_start_script_of_the_full_limit_is_accepted(h: Harness) -> None:
    """A start script of exactly the declared limit is bought and arrives whole."""
    limit = h.plugin.traits(h.settings()).start_script_bytes_max
    filler = "#" * (limit - len(START_SCRIPT.encode()) - 1) + "\n"
    script = START_SCRIPT + filler
    expect(len(script.encode()) == limit, "the test's own script has the wrong size")
    request = h.request(await an_offer(h), start_script=script)
    await h.provider.launch(request)
    require_one_machine(h, request.key)
    arrived = h.live(request.key)[0].start_script
    if arrived is not None:
        expect(script.strip() in arrived, "the start script arrived changed")


@behaviour()
async def an_interruptible_purchase_is_never_an_on_demand_one(h: Harness) -> None:
    """If the cloud sells on-demand where we bid, launch says ContractViolation and the machine is ended."""
    request = h.request(await an_offer(h, Market.SPOT))
    h.sell_on_demand_instead()
    await require_refusal(h, partial(h.provider.launch, request), ContractViolation)
    require_nothing_bought(h, request.key)


@behaviour()
async def what_a_refused_launch_left_behind_is_ended(h: Harness) -> None:
    """A refusal that leaves a machine behind is cleaned up before launch says that there is none."""
    request = h.request(await an_offer(h))
    h.refuse_but_leave_machine()
    outcome = await attempt(h, partial(h.provider.launch, request))
    if not isinstance(outcome, Exception):
        raise BehaviourFailed(f"a refused launch returned {outcome!r}")
    if not isinstance(outcome, OutcomeUnknown):
        require_nothing_bought(h, request.key)


@behaviour()
async def launches_beside_each_other_do_not_mix(h: Harness) -> None:
    """Concurrent launches and reads each get their own answer: one machine for each key."""
    offers = sorted(await offers_of(h), key=lambda o: (o.gpu_price, o.offer_id))
    first = offers[0]
    second = next((o for o in offers if o.pool != first.pool), None)
    expect(second is not None, "the harness sells only one pool")
    requests = [h.request(offer) for offer in (first, second) if offer is not None]
    answers: dict[str, Launched] = {}
    provider: Provider = h.provider

    async def buy(request: LaunchRequest) -> None:
        answers[request.key] = await provider.launch(request)

    async with anyio.create_task_group() as group:
        for request in requests:
            group.start_soon(buy, request)
        group.start_soon(provider.offers, h.query())
        group.start_soon(provider.instances)
        group.start_soon(provider.find, h.key())
    for request in requests:
        machines = h.live(request.key)
        expect(len(machines) == 1, f"{len(machines)} machines exist under {request.key}")
        expect(answers[request.key].instance.key == request.key, "a launch got another one's answer")
        expect(answers[request.key].instance.ref.instance_id == machines[0].machine_id, "two launches mixed up")
    expect(h.launch_calls() == len(requests), f"{h.launch_calls()} requests to buy were sent")
