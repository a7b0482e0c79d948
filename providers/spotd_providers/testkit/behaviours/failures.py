"""Ending machines: whatever its state, as often as asked, and never a false success."""

from __future__ import annotations

import json
import re
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, Final

from spotd_providers.contract.errors import AuthFailed, ProviderError, RateLimited, Unavailable
from spotd_providers.contract.provider import (
    Bills,
    ChangesBids,
    GivesShell,
    KnowsAccount,
    KnowsBalance,
    OpensPorts,
    ReadsLogs,
)
from spotd_providers.contract.values import Instance, InstanceId, InstanceRef, InstanceState, Listing, Offer, OfferPage
from spotd_providers.testkit.harness import LOGIN, Harness, NotApplicable
from spotd_providers.testkit.serve import FOR_EVER, GATEWAY_ERROR, NOT_JSON, STRIKES, Call, Canned, Faults
from spotd_providers.testkit.suite import an_offer, attempt, behaviour, buy_machine, expect, require_refusal


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


# Failures of the cloud: every failure is a leaf of the contract, in bounded time, without a secret in it.


REQUESTS_MAX: Final = 12
"""However a read retries, one call of it sends no more than this while every answer is an error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Read:
    """A call without side effects, and the requests it makes."""

    name: str
    of: Call
    call: Callable[[Harness, Instance], Awaitable[Any]]

    def __str__(self) -> str:
        return self.name


READS: Final = (
    Read(name="offers", of=Call.OFFERS, call=lambda h, _: h.provider.offers(h.query())),
    Read(name="instances", of=Call.LIST, call=lambda h, _: h.provider.instances()),
    Read(name="find", of=Call.LIST, call=lambda h, machine: h.provider.find(machine.key)),
)


def _odd(body: bytes) -> Callable[[Faults, Call, int], None]:
    return lambda faults, call, times: faults.answer(call, Canned(status=200, body=body), times=times)


READ_FAULTS: Final[dict[str, Callable[[Faults, Call, int], None]]] = {
    **{name: strike for name, strike in STRIKES.items() if name != "no answer"},
    "connection lost before": lambda faults, call, times: faults.lose_answer(call, times=times, after_effect=False),
    "empty object": _odd(b"{}"),
    "empty list": _odd(b"[]"),
    "null": _odd(b"null"),
    "text": _odd(b'"ok"'),
    "number": _odd(b"1e999"),
    "deep": _odd(b"[" * 100_000),
    "binary": _odd(bytes(range(256))),
}


@behaviour(cases=READS)
async def a_failed_read_is_a_leaf_and_never_a_false_none(h: Harness, case: Read) -> None:
    """Whatever comes back, a read raises a leaf or admits that it is incomplete; it never hides a machine."""
    _, machine = await buy_machine(h)
    for name, strike in READ_FAULTS.items():
        strike(h.faults, case.of, FOR_EVER)
        outcome = await attempt(h, partial(case.call, h, machine))
        h.faults.clear()
        if isinstance(outcome, ProviderError):
            expect(
                isinstance(outcome, Unavailable | RateLimited | AuthFailed),
                f"{name}: {outcome!r} is not what a read that failed raises",
            )
        elif isinstance(outcome, Listing):
            hidden = machine.key not in {i.key for i in outcome.instances}
            expect(not (hidden and outcome.complete), f"{name}: a listing called complete hides a machine")
        elif isinstance(outcome, OfferPage):
            expect(outcome.offers or not outcome.complete, f"{name}: was taken for an empty market")
        else:
            expect(outcome, f"{name}: find says that there is no machine")
    expect(await case.call(h, machine), "the call does not recover when the fault ends")


_ODD_BODIES: Final = (
    b"", b"null", b'"ok"', b"[null]", b"{}", b"[" * 50_000, b"\xff\xfe", b"<a><b/></a>",
    b'{"id": {}, "success": [], "error": {"a": 1}, "message": 7, "detail": null, "errors": {}, "url": "http://["}',
    b'{"result_url": "https://[", "credit": "\\ud800", "results": 7, "records": {}, "instances": {"a": []}}',
    b'{"machines": [[]], "count": -1, "now": "x", "lines": {}, "charges": [7], "offers": {}, "pods": "x"}',
)  # fmt: skip
_ODD_STATUSES: Final = (204, 302, 400, 404, 422, 599)
_ODD_HEADERS: Final = (
    {"content-type": "application/json"},
    {"content-type": "text/xml; charset=utf-9", "retry-after": "-1e9", "date": "yesterday", "location": "http://["},
    {"content-encoding": "gzip", "retry-after": "9" * 400, "x-ratelimit-reset": "\u00b2", "content-type": ""},
)
EVERY_CALL: Final = (
    "offers", "instances", "find", "launch", "terminate", "check", "account", "balance", "charges", "logs", "shell",
    "open_port", "change_bid",
)  # fmt: skip


@behaviour(cases=EVERY_CALL)
async def whatever_the_cloud_answers_only_the_contract_is_raised(h: Harness, case: str) -> None:
    """Any status with any headers and any body, on any call, ends in a result or in a leaf of the contract."""
    offer = await an_offer(h)
    _, machine = await buy_machine(h, offer)
    calls = _every_call(h, offer, machine)
    if case not in calls:
        raise NotApplicable(f"this provider has no {case}")
    whole = [(200, body) for body in _ODD_BODIES]
    refused = [(status, _ODD_BODIES[number % len(_ODD_BODIES)]) for number, status in enumerate(_ODD_STATUSES)]
    for number, (status, body) in enumerate([*whole, *refused]):
        canned = Canned(status=status, body=body, headers=_ODD_HEADERS[number % len(_ODD_HEADERS)])
        for call in Call:
            h.faults.answer(call, canned, times=FOR_EVER)
        await attempt(h, calls[case])
        h.faults.clear()


def _every_call(h: Harness, offer: Offer, machine: Instance) -> dict[str, Callable[[], Awaitable[Any]]]:
    provider, now = h.provider, h.clock.now()
    calls: dict[str, Callable[[], Awaitable[Any]]] = {
        "offers": partial(provider.offers, h.query()),
        "instances": provider.instances,
        "find": partial(provider.find, machine.key),
        "launch": lambda: provider.launch(h.request(offer)),
        "terminate": partial(provider.terminate, machine.ref),
        "check": provider.check,
    }
    if isinstance(provider, KnowsAccount):
        calls["account"] = provider.account
    if isinstance(provider, KnowsBalance):
        calls["balance"] = provider.balance
    if isinstance(provider, Bills):
        calls["charges"] = partial(provider.charges, now - timedelta(days=1), now)
    if isinstance(provider, ReadsLogs):
        calls["logs"] = partial(provider.logs, machine.ref, lines=10)
    if isinstance(provider, GivesShell):
        calls["shell"] = partial(provider.shell, machine.ref)
    if isinstance(provider, OpensPorts):
        calls["open_port"] = partial(provider.open_port, machine.ref, 1)
    if isinstance(provider, ChangesBids):
        calls["change_bid"] = partial(provider.change_bid, machine.ref, offer.gpu_price)
    return calls


FLOOD_ROWS: Final = 25_000
REASONS_MAX: Final = 2_000
"""Of one page of offers; of more rejected rows only the number is of use."""
_ITEMS: Final = re.compile(rb"<item>.*</item>", re.DOTALL)


@behaviour(cases=READS)
async def a_flood_of_empty_rows_is_bounded(h: Harness, case: Read) -> None:
    """A list of very many rows that say nothing keeps a bounded number of reasons, and is not called complete."""
    _, machine = await buy_machine(h)
    h.faults.edit(case.of, _flooded, times=FOR_EVER)
    outcome = await attempt(h, partial(case.call, h, machine))
    h.faults.clear()
    if isinstance(outcome, OfferPage):
        expect(len(outcome.rejected) <= REASONS_MAX, f"{len(outcome.rejected):,} reasons are kept")
        expect(len(outcome.offers) <= FLOOD_ROWS, "more offers than rows")
    elif isinstance(outcome, Listing):
        expect(not outcome.complete, "a list of rows that cannot be understood is called complete")
    else:
        expect(isinstance(outcome, ProviderError) or outcome, "find says that there is no machine")
    expect(await case.call(h, machine), "the call does not recover when the flood ends")


def _flooded(true: Canned) -> Canned:
    """Return the true answer with every list of objects in it replaced by one of very many empty ones."""
    body = _ITEMS.sub(b"<item/>" * FLOOD_ROWS, true.body)
    with suppress(ValueError):  # XML, or nothing that could hold a list
        body = json.dumps(_with_floods(json.loads(true.body))).encode()
    return Canned(status=true.status, body=body, headers=true.headers)


def _with_floods(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _with_floods(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [{}] * FLOOD_ROWS
    return value


@behaviour(cases=READS)
async def a_slow_answer_times_out(h: Harness, case: Read) -> None:
    """A read whose answer never comes gives up in bounded time, as Unavailable."""
    _, machine = await buy_machine(h)
    h.faults.hang(case.of, times=FOR_EVER)
    await require_refusal(h, partial(case.call, h, machine), Unavailable)
    h.faults.clear()
    expect(await case.call(h, machine), "the call does not recover when the fault ends")


@behaviour(cases=READS)
async def a_storm_of_rate_limits_is_not_answered_by_a_storm(h: Harness, case: Read) -> None:
    """While every answer is a rate limit, a read sends a few requests and raises RateLimited."""
    _, machine = await buy_machine(h)
    for advice_s in (3600, 5, None):
        before = len(h.requests(case.of))
        h.faults.answer(case.of, h.rate_limit_answer(advice_s), times=FOR_EVER)
        error = await require_refusal(h, partial(case.call, h, machine), RateLimited)
        h.faults.clear()
        sent = len(h.requests(case.of)) - before
        expect(1 <= sent <= REQUESTS_MAX, f"{sent} requests were sent into the storm")
        if isinstance(error, RateLimited):
            expect(error.retry_after.total_seconds() > 0, "it says not how long to wait")
            if advice_s is not None:
                expect(error.retry_after.total_seconds() >= advice_s, f"it asks to wait {error.retry_after} only")


@behaviour(cases=READS)
async def a_single_hiccup_is_survived_or_reported(h: Harness, case: Read) -> None:
    """One failed answer either is retried or raises; the next call is as if nothing had been."""
    _, machine = await buy_machine(h)
    h.faults.answer(case.of, GATEWAY_ERROR)
    outcome = await attempt(h, partial(case.call, h, machine))
    if isinstance(outcome, ProviderError):
        expect(isinstance(outcome, Unavailable), f"{outcome!r} for a gateway error")
    h.faults.clear()
    expect(await case.call(h, machine), "the call does not recover")


@behaviour(cases=READS)
async def a_wrong_content_type_is_survived_or_reported(h: Harness, case: Read) -> None:
    """A true answer under a wrong content type is read, or is Unavailable; it crashes nothing."""
    _, machine = await buy_machine(h)

    def as_html(true: Canned) -> Canned:
        return Canned(status=true.status, body=true.body, headers={**true.headers, "content-type": "text/html"})

    h.faults.edit(case.of, as_html, times=FOR_EVER)
    outcome = await attempt(h, partial(case.call, h, machine))
    expect(isinstance(outcome, Unavailable) or outcome, f"{outcome!r} for a wrong content type")


@behaviour(cases=READS)
async def a_refused_key_is_auth_failed(h: Harness, case: Read) -> None:
    """A read whose key is not accepted is AuthFailed."""
    _, machine = await buy_machine(h)
    h.break_auth()
    outcome = await attempt(h, partial(case.call, h, machine))
    if case.of is Call.OFFERS and isinstance(outcome, OfferPage):
        return  # some clouds show their prices to anybody
    expect(isinstance(outcome, AuthFailed), f"{outcome!r} for a key that is not accepted")


@behaviour(cases=("offers", "instances", "launch", "terminate"))
async def a_cloud_that_echoes_secrets_is_not_quoted(h: Harness, case: str) -> None:
    """An error page that repeats our key or our start script leaves neither in errors nor in logs."""
    offer = await an_offer(h)
    _, machine = await buy_machine(h, offer)
    echo = " ".join(h.secrets()).encode()
    login = LOGIN if h.plugin.traits(h.settings()).private_images.available else None
    for status in (400, 401, 403, 404, 422, 500, 503):
        body = b'{"success":false,"error":"bad request: %s","message":"%s","msg":"%s","detail":"%s"}' % ((echo,) * 4)
        for call in Call:
            h.faults.answer(call, Canned(status=status, body=body), times=FOR_EVER)
        calls: dict[str, Callable[[], Awaitable[Any]]] = {
            "offers": partial(h.provider.offers, h.query()),
            "instances": h.provider.instances,
            "launch": partial(h.provider.launch, h.request(offer, login=login)),
            "terminate": partial(h.provider.terminate, machine.ref),
        }
        outcome = await attempt(h, calls[case])
        if case == "instances" and not isinstance(outcome, ProviderError):
            expect(not outcome.complete, f"HTTP {status} was taken for a complete listing")
        h.faults.clear()
    # `run` searches errors, logs and URLs for the secrets when the behaviour is over.


@behaviour()
async def what_is_shown_holds_no_secret(h: Harness) -> None:
    """Offers, machines, check lines and the provider's own repr hold neither key nor grant."""
    _, machine = await buy_machine(h)
    shown = [
        repr(h.provider),
        repr(await h.provider.offers(h.query())),
        repr(await h.provider.instances()),
        repr(await h.provider.find(machine.key)),
        repr(await h.provider.check()),
        repr(h.settings()),
    ]
    for secret in h.secrets():
        expect(not any(secret in text for text in shown), "a secret is shown")


@behaviour()
async def the_key_travels_in_headers_only(h: Harness) -> None:
    """No URL holds the key, nor any body but of a request that exchanges it; every request signs itself anew."""
    _, machine = await buy_machine(h)
    await h.provider.instances()
    await h.provider.check()
    await h.provider.terminate(machine.ref)
    if h.credential is None:
        return
    for request in h.requests():
        for secret in h.secrets():
            expect(secret not in request.url, f"a secret is in the URL of a {request.method}")
        is_out = h.credential.encode() not in request.body or request.path in h.key_exchanges
        expect(is_out, f"the key is in the body of {request.method} {request.path}")
