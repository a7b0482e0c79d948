"""Every call that names a machine, made on machines of others: none is ended, changed or shown."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, Final

from spotd_providers.contract.errors import ProviderError
from spotd_providers.contract.money import MicroUsdPerHour
from spotd_providers.contract.provider import ChangesBids, GivesShell, ReadsLogs
from spotd_providers.contract.values import InstanceId, InstanceRef, Market, Power
from spotd_providers.testkit.expect import BehaviourFailed, all_offers, an_offer, attempt, buy_machine, expect
from spotd_providers.testkit.harness import Harness, WorldMachine
from spotd_providers.testkit.knobs import NotApplicable
from spotd_providers.testkit.suite import behaviour

ENDS: Final = "terminate"
CALLS: Final[dict[str, tuple[Power, type] | None]] = {
    ENDS: None,
    "change_bid": (Power.BID_CHANGE, ChangesBids),
    "logs": (Power.LOGS, ReadsLogs),
    "shell": (Power.SHELL, GivesShell),
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


def _call(h: Harness, name: str, ref: InstanceRef, price: MicroUsdPerHour) -> Callable[[], Awaitable[object]]:
    further: dict[str, dict[str, Any]] = {"change_bid": {"price": price}, "logs": {"lines": 10}}
    return partial(getattr(h.provider, name), ref, **further.get(name, {}))


def _world(h: Harness, ids: Sequence[str]) -> dict[str, WorldMachine]:
    return {machine.machine_id: machine for machine in h.machines() if machine.machine_id in ids}


async def _another_bid(h: Harness, name: str) -> MicroUsdPerHour:
    """Return a price that no machine has, above what the cheapest machine of a bid market costs."""
    offer = await an_offer(h, Market.SPOT if name == "change_bid" else None)
    return MicroUsdPerHour(offer.gpu_price + offer.gpu_price // 3 + 1)


@behaviour(cases=tuple(CALLS))
async def a_reference_to_a_foreign_machine_is_not_acted_on(h: Harness, case: str) -> None:
    """A call that names a machine without our install label leaves it as it is and shows nothing of it."""
    _require_power(h, case)
    foreign = list(h.add_foreign_machines())
    expect(foreign, "the harness made no foreign machine")
    price = await _another_bid(h, case)
    await h.settle()
    before = _world(h, foreign)
    await _try_all(h, case, foreign, "", price, before)
    _, own = await buy_machine(h)
    await h.provider.instances()
    # Once more: what a provider remembers of its own machines may not let a foreign one pass.
    await _try_all(h, case, foreign, own.ref.scope, price, before)
    expect(h.live(own.key), "our own machine was ended")


async def _try_all(
    h: Harness,
    name: str,
    foreign: Sequence[str],
    scope: str,
    price: MicroUsdPerHour,
    before: dict[str, WorldMachine],
) -> None:
    for number in foreign:
        ref = InstanceRef(provider=h.plugin.name, instance_id=InstanceId(number), scope=scope)
        outcome = await attempt(h, _call(h, name, ref, price))
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
    offers = [one for one in await all_offers(h) if case == ENDS or one.market is Market.SPOT]
    first = min(offers, key=lambda one: (one.gpu_price, one.offer_id))
    other = next((one for one in offers if one.pool != first.pool), None)
    others = list(h.add_foreign_machines())
    key, instance = await buy_machine(h, first)
    if other is not None:
        _, kept = await buy_machine(h, other)
        others.append(kept.ref.instance_id)
    await h.settle()
    before = _world(h, others)
    outcome = await attempt(h, _call(h, case, instance.ref, MicroUsdPerHour(first.gpu_price * 4 // 3)))
    if isinstance(outcome, ProviderError):
        raise BehaviourFailed(f"{case} of our own machine was refused: {outcome!r}") from outcome
    await h.settle()
    expect(_world(h, others) == before, f"{case} changed other machines: {_world(h, others)!r}")
    expect(bool(h.live(key)) == (case != ENDS), "our own machine is not as it was to be")
