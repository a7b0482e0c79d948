"""Optional powers: declared, with the sentence a user reads where they are missing; and the doctor's lines."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Final

from spotd_providers.contract.errors import NotSupported
from spotd_providers.contract.provider import Bills, ChangesBids, GivesShell, KnowsBalance, ReadsLogs
from spotd_providers.contract.values import CheckLine, Market, Power
from spotd_providers.testkit.expect import (
    BehaviourFailed,
    all_offers,
    an_offer,
    attempt,
    buy_machine,
    expect,
    require_refusal,
)
from spotd_providers.testkit.faults import FOR_EVER, STRIKES, Call
from spotd_providers.testkit.harness import Harness
from spotd_providers.testkit.knobs import NotApplicable
from spotd_providers.testkit.suite import behaviour

PROTOCOLS: Final[dict[Power, type]] = {
    Power.BID_CHANGE: ChangesBids,
    Power.LOGS: ReadsLogs,
    Power.BALANCE: KnowsBalance,
    Power.BILLING: Bills,
    Power.SHELL: GivesShell,
}
SENTENCE_LETTERS_MIN: Final = 12


@behaviour()
async def every_power_is_declared(h: Harness) -> None:
    """Every optional power is declared; each missing one has a sentence, each present one its Protocol."""
    for power in Power:
        capability = h.provider.capabilities.get(power)
        if capability is None:
            raise BehaviourFailed(f"{power} is not declared")
        if not capability.available:
            expect(len(capability.reason.strip()) >= SENTENCE_LETTERS_MIN, f"{power} is missing without a sentence")
        protocol = PROTOCOLS.get(power)
        if capability.available and protocol is not None:
            expect(isinstance(h.provider, protocol), f"{power} is declared and not implemented")


@behaviour(cases=tuple(PROTOCOLS))
async def a_missing_power_raises_not_supported(h: Harness, case: Power) -> None:
    """Calling a power that is missing raises NotSupported with the declared sentence."""
    capability = h.provider.capabilities[case]
    if capability.available or not isinstance(h.provider, PROTOCOLS[case]):
        return  # there is nothing that could be called in vain
    offer = await an_offer(h)
    _, instance = await buy_machine(h, offer)
    now = h.clock.now()
    provider = h.provider
    calls: dict[Power, Callable[[], object]] = {}
    if isinstance(provider, ChangesBids):
        calls[Power.BID_CHANGE] = partial(provider.change_bid, instance.ref, offer.gpu_price)
    if isinstance(provider, ReadsLogs):
        calls[Power.LOGS] = partial(provider.logs, instance.ref, lines=10)
    if isinstance(provider, KnowsBalance):
        calls[Power.BALANCE] = provider.balance
    if isinstance(provider, Bills):
        calls[Power.BILLING] = partial(provider.charges, now, now)
    if isinstance(provider, GivesShell):
        calls[Power.SHELL] = partial(provider.shell, instance.ref)
    error = await require_refusal(h, calls[case], NotSupported)  # type: ignore[arg-type] # each returns an awaitable of its own
    expect(capability.reason in str(error), f"{error!r} does not say {capability.reason!r}")


@behaviour()
async def logs_are_lines_of_text(h: Harness) -> None:
    """The provider's log of a machine is at most the lines asked for."""
    if not isinstance(h.provider, ReadsLogs) or not h.provider.capabilities[Power.LOGS].available:
        raise NotApplicable(h.provider.capabilities[Power.LOGS].reason)
    _, instance = await buy_machine(h)
    lines = await h.provider.logs(instance.ref, lines=5)
    expect(len(lines) <= 5, f"{len(lines)} lines instead of at most 5")
    expect(not any("\n" in line for line in lines), "a line is no single line of text")


@behaviour()
async def spot_and_host_identity_are_as_declared(h: Harness) -> None:
    """Spot offers, host ids and scores of capacity exist exactly where their powers are declared."""
    offers = await all_offers(h)
    sells_spot = any(offer.market is Market.SPOT for offer in offers)
    expect(h.provider.capabilities[Power.SPOT].available == sells_spot, f"spot is declared {not sells_spot}")
    shows_hosts = any(offer.host_id is not None for offer in offers)
    declared = h.provider.capabilities[Power.HOST_IDENTITY].available
    expect(declared == shows_hosts, f"host identity is declared {declared}, offers show {shows_hosts}")
    scores = any(offer.capacity_score is not None for offer in offers)
    declared = h.provider.capabilities[Power.CAPACITY_SCORES].available
    expect(declared == scores, f"scores of capacity are declared {declared}, offers show {scores}")


@behaviour()
async def a_healthy_provider_checks_out(h: Harness) -> None:
    """Check of a healthy account is a few lines that are all fine."""
    lines = await h.provider.check()
    expect(lines, "check says nothing")
    for line in lines:
        expect(line.name.strip() and line.detail.strip(), f"{line!r} says nothing")
        expect(line.ok, f"{line!r} for a healthy account")


def _require_finding(outcome: object) -> None:
    if isinstance(outcome, Exception):
        raise BehaviourFailed(f"check raised {outcome!r} for a finding") from outcome
    lines = [line for line in outcome if isinstance(line, CheckLine)] if isinstance(outcome, list | tuple) else []
    bad = [line for line in lines if not line.ok]
    expect(bad, f"check finds nothing wrong: {outcome!r}")
    expect(all(line.detail.strip() for line in bad), f"a finding says nothing: {bad!r}")


@behaviour(cases=("gateway error", "not JSON", "empty", "connection lost", "no answer"))
async def check_finds_failures_and_never_raises(h: Harness, case: str) -> None:
    """When nothing works, check returns lines that say so."""
    for call in Call:
        STRIKES[case](h.faults, call, FOR_EVER)
    _require_finding(await attempt(h, h.provider.check))


@behaviour()
async def check_names_a_refused_key_with_a_way_out(h: Harness) -> None:
    """A key that is not accepted is a line of check with a hint."""
    h.break_auth()
    outcome = await attempt(h, h.provider.check)
    _require_finding(outcome)
    if not isinstance(outcome, Exception):
        expect(any(line.hint.strip() for line in outcome if not line.ok), "no line offers a way out")


@behaviour()
async def check_of_an_unreachable_cloud_says_so(h: Harness) -> None:
    """Check of a cloud that cannot be connected to returns lines that say so."""
    h.served.stop()
    _require_finding(await attempt(h, h.provider.check))


@behaviour(opens=True)
async def closing_leaves_nothing_behind(h: Harness) -> None:
    """A provider can be opened, used, closed and opened again; no task outlives it."""
    before = asyncio.all_tasks()
    for _ in range(2):
        async with h.opened() as provider:
            expect(provider.name == h.plugin.name, f"the provider calls itself {provider.name!r}")
            await provider.offers(h.query())
            await provider.instances()
    left = asyncio.all_tasks() - before
    expect(not left, f"tasks outlive the provider: {left!r}")


@behaviour(opens=True)
async def machines_outlive_the_provider(h: Harness) -> None:
    """Closing ends no machine; a provider that is opened anew finds it by its key."""
    async with h.opened():
        key, instance = await buy_machine(h)
    async with h.opened() as provider:
        found = await provider.find(key)
        expect([i.ref for i in found] == [instance.ref], f"found after reopening: {found!r}")
