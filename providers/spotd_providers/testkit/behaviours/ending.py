"""Ending machines: whatever its state, as often as asked, and never a false success."""

from __future__ import annotations

from functools import partial

from spotd_providers.contract.errors import AuthFailed, ProviderError, Unavailable
from spotd_providers.contract.values import InstanceId, InstanceRef, InstanceState
from spotd_providers.testkit.expect import attempt, buy_machine, expect, require_refusal
from spotd_providers.testkit.faults import FOR_EVER, GATEWAY_ERROR, NOT_JSON, STRIKES, Call
from spotd_providers.testkit.harness import Harness
from spotd_providers.testkit.suite import behaviour


@behaviour()
async def a_terminated_machine_ends(h: Harness) -> None:
    """After terminate the world holds no machine under the key, and the provider lists none that runs."""
    key, instance = await buy_machine(h)
    await h.provider.terminate(instance.ref)
    await h.settle()
    expect(not h.live(key), "the machine still exists")
    left = [i for i in await h.provider.find(key) if i.state not in (InstanceState.GONE, InstanceState.ENDING)]
    expect(not left, f"find returns {left!r}")


@behaviour()
async def terminating_twice_succeeds(h: Harness) -> None:
    """Terminate of a machine that is ending or gone succeeds."""
    key, instance = await buy_machine(h)
    for _ in range(2):
        await h.provider.terminate(instance.ref)
    await h.settle()
    await h.provider.terminate(instance.ref)
    expect(not h.live(key), "the machine still exists")


@behaviour()
async def terminating_an_absent_machine_succeeds(h: Harness) -> None:
    """Terminate of a machine that never existed (an id of the right form) succeeds."""
    _, instance = await buy_machine(h)
    digits = [i for i, char in enumerate(instance.ref.instance_id) if char.isdigit()]
    expect(digits, f"the harness's machine ids hold no digit: {instance.ref.instance_id!r}")
    text = instance.ref.instance_id
    other = text[: digits[-1]] + str((int(text[digits[-1]]) + 5) % 10) + text[digits[-1] + 1 :]
    absent = InstanceRef(provider=instance.ref.provider, instance_id=InstanceId(other), scope=instance.ref.scope)
    expect(other not in {machine.machine_id for machine in h.machines()}, "the changed id exists")
    await h.provider.terminate(absent)
    expect(h.live(instance.key), "another machine was ended")


@behaviour(cases=("connection lost", "no answer", "answer cut", "gateway error"))
async def a_lost_end_is_an_error_or_truly_the_end(h: Harness, case: str) -> None:
    """When the answer to terminate is lost, the call may fail, and asking again succeeds."""
    key, instance = await buy_machine(h)
    STRIKES[case](h.faults, Call.TERMINATE, 1)
    await attempt(h, partial(h.provider.terminate, instance.ref))
    h.faults.clear()
    await h.provider.terminate(instance.ref)
    await h.settle()
    expect(not h.live(key), "the machine still exists")


@behaviour(cases=("gateway error", "not JSON", "rate limited"))
async def an_end_that_did_not_happen_is_no_success(h: Harness, case: str) -> None:
    """Terminate never succeeds while the cloud refuses to end the machine."""
    key, instance = await buy_machine(h)
    canned = {"gateway error": GATEWAY_ERROR, "not JSON": NOT_JSON, "rate limited": h.rate_limit_answer(None)}[case]
    h.faults.answer(Call.TERMINATE, canned, times=FOR_EVER)
    await require_refusal(h, partial(h.provider.terminate, instance.ref), ProviderError)
    expect(h.live(key), "the machine ended although every request to end it was refused")
    h.faults.clear()
    await h.provider.terminate(instance.ref)
    await h.settle()
    expect(not h.live(key), "the machine still exists")


@behaviour()
async def a_refused_key_is_not_taken_for_an_absent_machine(h: Harness) -> None:
    """Terminate with a key that is not accepted is AuthFailed, whatever status the cloud wraps that in."""
    key, instance = await buy_machine(h)
    h.break_auth()
    await require_refusal(h, partial(h.provider.terminate, instance.ref), AuthFailed)
    expect(h.live(key), "the machine ended although the key was refused")


@behaviour()
async def a_paused_machine_can_be_ended(h: Harness) -> None:
    """A machine that is outbid and only bills storage can be terminated."""
    key, instance = await buy_machine(h)
    h.pause(instance.ref.instance_id)
    await h.provider.terminate(instance.ref)
    await h.settle()
    expect(not h.live(key), "the paused machine still exists")


@behaviour()
async def an_unreachable_cloud_ends_nothing(h: Harness) -> None:
    """Terminate of a cloud that cannot be connected to is Unavailable."""
    _, instance = await buy_machine(h)
    h.served.stop()
    await require_refusal(h, partial(h.provider.terminate, instance.ref), Unavailable)
