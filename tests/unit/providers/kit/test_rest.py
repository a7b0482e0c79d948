"""What each HTTP answer means to a read and to a purchase, and at which pace requests are sent."""

from __future__ import annotations

import base64
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from random import Random
from typing import Any, cast

import anyio
import pytest

from spotd_providers.contract.errors import (
    AuthFailed,
    NoBalance,
    NoCapacity,
    OutcomeUnknown,
    PriceMoved,
    ProviderError,
    QuotaExceeded,
    RateLimited,
    RequestRejected,
    Unavailable,
)
from spotd_providers.contract.provider import Services
from spotd_providers.contract.values import (
    AttemptKey,
    InstallId,
    ProviderName,
)
from spotd_providers.kit.calls import raise_for_status
from spotd_providers.kit.http import Http, HttpAnswer
from spotd_providers.kit.rest import Dialect, Meaning, Pace, RefusalWords, RestClient, RestRefused, open_rest
from spotd_providers.kit.vm_boot import doorless_ssh_key
from spotd_providers.testkit.clock import FakeClock, run_virtually
from spotd_providers.testkit.harness import RecordingLog
from spotd_providers.testkit.serve import Call, Canned, Faults, Message, Receive, Scope, Send, Served, serving
from tests.cases import every

KEY = AttemptKey("spotd-lab-j0b1-1")
MART = ProviderName("mart")
HTML = {"content-type": "text/html"}


def words_of(body: Any) -> RefusalWords | None:
    error = body.get("error") if isinstance(body, dict) else None
    return RefusalWords(code=error["code"], text=error.get("message", "")) if isinstance(error, dict) else None


DIALECT = Dialect(
    who="Mart",
    problem_of=words_of,
    codes={
        "sold-out": Meaning.NO_CAPACITY,
        "limit": Meaning.QUOTA,
        "broke": Meaning.NO_BALANCE,
        "bad-key": Meaning.AUTH,
        "below/": Meaning.UNAVAILABLE,
    },
    buy_interval=timedelta(seconds=12),
)


async def _never_asked(_scope: Scope, _receive: Receive, send: Send) -> None:
    message: Message = {"type": "http.response.start", "status": 200, "headers": []}
    await send(message)
    await send({"type": "http.response.body", "body": b'{"ok": true}'})


def _services(credential: str | None = "a-key") -> Services:
    return Services(
        install=InstallId("lab"),
        clock=FakeClock(),
        rng=Random(7),
        log=RecordingLog(),
        state_dir=Path(),
        credential=credential,
    )


@contextmanager
def _mart() -> Iterator[tuple[Faults, Served]]:
    faults = Faults(_never_asked, classify=lambda _request: Call.OTHER)
    with serving(faults) as served:
        yield faults, served


def _outcome(canned: Canned, call: Callable[[RestClient], Awaitable[Any]]) -> tuple[Any, int]:
    """What a call returns or raises while every answer is this one, and how many requests it sent."""
    with _mart() as (faults, served):
        faults.answer(Call.OTHER, canned, times=100)

        async def main() -> Any:
            async with open_rest(served.url, DIALECT, _services(), key_hint="api_key") as client:
                try:
                    return await call(client)
                except (ProviderError, RestRefused) as exc:
                    return exc

        return run_virtually(main), len(served.requests)


def _own(status: int, code: str) -> Canned:
    return Canned(status=status, body=b'{"error": {"code": "%s", "message": "no"}}' % code.encode())


ANSWERS: dict[str, tuple[Canned, type[Exception], type[Exception], type[ProviderError] | None]] = {
    # the answer; what a read raises; what a purchase raises; the leaf of a refused purchase
    "no capacity": (_own(400, "sold-out"), Unavailable, RestRefused, NoCapacity),
    "no capacity, as an error of the server": (_own(503, "sold-out"), Unavailable, RestRefused, NoCapacity),
    "quota": (_own(403, "limit"), Unavailable, RestRefused, QuotaExceeded),
    "no money": (_own(402, "x"), Unavailable, RestRefused, NoBalance),
    "no money, in words": (_own(400, "broke"), Unavailable, RestRefused, NoBalance),
    "key refused": (_own(401, "x"), AuthFailed, AuthFailed, None),
    "key refused, under an odd status": (_own(404, "bad-key"), AuthFailed, AuthFailed, None),
    "forbidden by the provider": (_own(403, "x"), AuthFailed, AuthFailed, None),
    "forbidden by an edge": (Canned(status=403, body=b"<html/>", headers=HTML), Unavailable, Unavailable, None),
    "absent": (_own(404, "x"), Unavailable, RestRefused, RequestRejected),
    "absent, in no words": (Canned(status=404, body=b""), Unavailable, Unavailable, None),
    "wrong": (_own(422, "x"), Unavailable, RestRefused, RequestRejected),
    "wrong, in no words": (Canned(status=400, body=b"{}"), Unavailable, Unavailable, None),
    "redirect": (Canned(status=302, headers={"location": "https://x"}), Unavailable, Unavailable, None),
    "time-out of the server": (Canned(status=408, body=b"{}"), Unavailable, OutcomeUnknown, None),
    "time-out of the server, in its own words": (_own(408, "x"), Unavailable, OutcomeUnknown, None),
    "error of the server": (Canned(status=500, body=b"{}"), Unavailable, OutcomeUnknown, None),
    "error of the server, in its own words": (_own(500, "x"), Unavailable, OutcomeUnknown, None),
    "error of the layer below": (_own(400, "below/x"), Unavailable, OutcomeUnknown, None),
    "gateway": (Canned(status=502, body=b"<html/>", headers=HTML), Unavailable, OutcomeUnknown, None),
    "success of no JSON": (Canned(status=200, body=b"<html/>", headers=HTML), Unavailable, OutcomeUnknown, None),
    "success of a list": (Canned(status=200, body=b"[]"), Unavailable, OutcomeUnknown, None),
    "too often": (Canned(status=429, body=b"", headers={"retry-after": "3600"}), RateLimited, RateLimited, None),
}


@every(("canned", "read", "bought", "leaf"), ANSWERS.values(), ids=ANSWERS)
def test_what_an_answer_means_to_a_read(canned: Canned, read: type, bought: type, leaf: type | None) -> None:
    outcome, sent = _outcome(canned, lambda client: client.ask("GET", "/things", what="things"))
    assert type(outcome) is read
    is_definite = bought is RestRefused or read is not Unavailable
    assert sent == (1 if is_definite else 3)


@every(("canned", "read", "bought", "leaf"), ANSWERS.values(), ids=ANSWERS)
def test_what_an_answer_means_to_a_purchase(canned: Canned, read: type, bought: type, leaf: type | None) -> None:
    outcome, sent = _outcome(canned, lambda client: client.buy("POST", "/buy", {}, key=KEY))
    assert type(outcome) is bought
    assert sent == 1
    if isinstance(outcome, RestRefused):
        assert type(outcome.of_purchase()) is leaf
    if isinstance(outcome, OutcomeUnknown):
        assert outcome.key == KEY


@every("status", [302, 408, 500, 599])
def test_a_redirect_and_what_a_server_could_not_do_in_time_says_nothing_about_the_request(status: int) -> None:
    with pytest.raises(Unavailable, match="Mart"):
        raise_for_status(HttpAnswer(status=status, headers={}, body=b""), who="Mart", what="a request")


@every("status", [200, 204, 400, 404, 407, 409, 429, 499])
def test_any_other_status_is_an_answer(status: int) -> None:
    raise_for_status(HttpAnswer(status=status, headers={}, body=b""), who="Mart", what="a request")


@every(("code", "text", "said"), [("E9", "it is sold", "it is sold"), ("E9", "", "E9"), ("", "", "no reason given")])
def test_a_refusal_says_its_sentence_or_else_its_word(code: str, text: str, said: str) -> None:
    refused = RestRefused("Mart", status=409, meaning=Meaning.REJECTED, problem=RefusalWords(code=code, text=text))
    assert str(refused) == f"Mart answered 409: {said}"


def test_only_the_providers_own_words_say_that_something_is_absent() -> None:
    ask: Callable[[RestClient], Awaitable[Any]] = lambda client: client.ask_or_absent("GET", "/one", what="one")  # noqa: E731 - shared
    assert _outcome(_own(404, "x"), ask) == (None, 1)
    assert isinstance(_outcome(Canned(status=404, body=b"{}"), ask)[0], Unavailable)
    assert isinstance(_outcome(_own(400, "sold-out"), ask)[0], Unavailable)


def test_purchases_keep_their_interval_and_do_not_queue_for_long() -> None:
    with _mart() as (_, served):
        services = _services()
        began = services.clock.now()
        found: list[Any] = []

        async def buy(client: RestClient) -> None:
            try:
                await client.buy("POST", "/buy", {}, key=KEY)
                found.append(services.clock.now() - began)
            except RateLimited as exc:
                found.append(exc)

        async def main() -> None:
            async with (
                open_rest(served.url, DIALECT, services, key_hint="") as client,
                anyio.create_task_group() as group,
            ):
                for _ in range(3):
                    group.start_soon(buy, client)

        run_virtually(main)
        assert sorted(map(type, found), key=str) == sorted([timedelta, timedelta, RateLimited], key=str)
        assert max(services.clock.slept) == DIALECT.buy_interval  # type: ignore[attr-defined] # a fake
        assert len(served.requests) == 2


@every("status", [200, 503])
def test_the_date_of_each_answer_is_shown_and_one_that_is_none_is_not(status: int) -> None:
    shown: list[datetime] = []
    services = replace(_services(), date_shown=shown.append)
    with _mart() as (faults, served):

        async def main() -> None:
            async with open_rest(served.url, DIALECT, services, key_hint="") as client:
                for date in ("Sun, 01 Mar 2026 05:00:00 GMT", "yesterday", ""):
                    headers = {"content-type": "application/json", **({"date": date} if date else {})}
                    faults.answer(Call.OTHER, Canned(status=status, body=b"{}", headers=headers), times=1)
                    with suppress(ProviderError):
                        await client.ask("GET", "/machines", what="machines")

        run_virtually(main)
    assert [at for at in shown if at.year == 2026 and at.month == 3] == [datetime(2026, 3, 1, 5, tzinfo=UTC)]


def test_without_a_key_nothing_is_opened() -> None:
    async def main() -> None:
        with pytest.raises(AuthFailed, match="put it there"):
            async with open_rest("http://127.0.0.1:9", DIALECT, _services(None), key_hint="put it there"):
                raise AssertionError

    run_virtually(main)


@every("start", [0, 1, 2**255 - 20, 2**255 - 1, 7 * 2**200])
def test_a_doorless_key_is_a_point_of_the_curve(start: int) -> None:
    kind, blob, _ = doorless_ssh_key(start).split()
    assert kind == "ssh-ed25519"
    raw = base64.b64decode(blob)
    assert raw[:19] == b"\0\0\0\x0bssh-ed25519\0\0\0\x20"
    y, prime = int.from_bytes(raw[19:], "little"), 2**255 - 19
    assert y < prime
    d = -121665 * pow(121666, -1, prime) % prime
    x_squared = (y * y - 1) * pow(d * y * y + 1, -1, prime) % prime
    root = pow(x_squared, (prime + 3) // 8, prime)
    roots = (root, root * pow(2, (prime - 1) // 4, prime) % prime)
    assert any(x * x % prime == x_squared for x in roots)


# What a dialect may say besides its table.


_SAYS = Dialect(
    who="Mart",
    problem_of=words_of,
    text_of=lambda text: RefusalWords(code="bad-key", text=text) if "key" in text else None,
    is_refusal=lambda body: body.get("ok") is False,
    codes={"sold-out": Meaning.NO_CAPACITY, "moved": Meaning.PRICE_MOVED, "bad-key": Meaning.AUTH},
    paces={"ends": Pace(interval=timedelta(seconds=3), penalty=timedelta(seconds=5), rest_max=timedelta(seconds=20))},
)
NO = b'{"ok": false, "error": {"code": "%s"}}'


def _met(
    canned: Canned, call: Callable[[RestClient], Awaitable[Any]], dialect: Dialect = _SAYS
) -> tuple[Any, Services]:
    services = _services()
    with _mart() as (faults, served):
        faults.answer(Call.OTHER, canned, times=100)

        async def main() -> Any:
            async with open_rest(served.url, _SAYS, services, key_hint="api_key") as client:
                try:
                    return await call(client)
                except (ProviderError, RestRefused) as exc:
                    return exc

        return run_virtually(main), services


def _buying(client: RestClient) -> Awaitable[Any]:
    return client.buy("POST", "/buy", {}, key=KEY)


def test_a_success_that_says_it_is_none_is_a_refusal() -> None:
    refused, _ = _met(Canned(status=200, body=NO % b"sold-out"), _buying)
    assert isinstance(refused, RestRefused)
    assert isinstance(refused.of_purchase(), NoCapacity)
    dearer, _ = _met(Canned(status=200, body=NO % b"moved"), _buying)
    assert isinstance(dearer.of_purchase(), PriceMoved)
    bought, _ = _met(Canned(status=200, body=b'{"ok": true}'), _buying)
    assert bought == {"ok": True}


def test_words_that_are_no_json_count_where_the_dialect_knows_them() -> None:
    text = {"content-type": "text/plain"}
    assert isinstance(_met(Canned(status=403, body=b"your key is bad", headers=text), _buying)[0], AuthFailed)
    assert isinstance(_met(Canned(status=403, body=b"go away", headers=text), _buying)[0], Unavailable)


def test_an_end_without_content_is_one_and_a_purchase_names_no_machine() -> None:
    change: Callable[[RestClient], Awaitable[Any]] = lambda client: client.change("DELETE", "/one", what="ends")  # noqa: E731 - shared
    assert _met(Canned(status=204), change)[0] == {}
    assert isinstance(_met(Canned(status=200, body=b""), change)[0], Unavailable)


def test_a_change_that_is_refused_says_so() -> None:
    refused, _ = _met(_own(404, "x"), lambda client: client.change("DELETE", "/one", what="ends"))
    assert isinstance(refused, RestRefused)
    assert refused.meaning is Meaning.ABSENT


def test_a_kind_of_request_with_a_pace_of_its_own_waits_for_no_other_and_rests_no_longer_than_it_may() -> None:
    async def three(client: RestClient) -> None:
        for what in ("ends", "things", "ends"):
            await client.ask("GET", "/things", what=what)

    _, services = _met(Canned(status=200, body=b"{}"), three)
    assert services.clock.slept == [timedelta(seconds=3)]  # type: ignore[attr-defined] # a fake

    async def throttled(client: RestClient) -> timedelta:
        with pytest.raises(RateLimited) as limited:
            await client.ask("GET", "/things", what="ends")
        assert limited.value.retry_after >= timedelta(hours=1)
        with pytest.raises(RateLimited):
            await client.ask("GET", "/things", what="ends")
        return max(services.clock.slept)  # type: ignore[attr-defined,no-any-return] # a fake

    busy = Canned(status=429, headers={"retry-after": "3600"})
    with _mart() as (faults, served):
        faults.answer(Call.OTHER, busy, times=100)
        services = _services()

        async def main() -> timedelta:
            async with open_rest(served.url, _SAYS, services, key_hint="") as client:
                return await throttled(client)

        assert run_virtually(main) == timedelta(seconds=20)


def test_a_429_that_names_no_wait_costs_the_penalty_of_its_kind() -> None:
    ends, _ = _met(Canned(status=429), lambda client: client.change("DELETE", "/one", what="ends", attempts=1))
    assert timedelta(seconds=5) < ends.retry_after < timedelta(seconds=6)
    other, _ = _met(Canned(status=429), lambda client: client.ask("GET", "/one", what="x", attempts=1))
    assert timedelta(seconds=12) < other.retry_after < timedelta(seconds=13)


@every(("interval_s", "at_once"), [(2, 1), (0, 3)], ids=["paced", "as they come"])
def test_one_purchase_is_on_its_way_at_a_time_where_they_are_paced(interval_s: int, at_once: int) -> None:
    on_way: list[int] = []
    most: list[int] = []

    class SlowHttp:
        requests_sent = 0

        async def send(self, *_: Any, **_options: Any) -> HttpAnswer:
            on_way.append(1)
            most.append(sum(on_way))
            await services.clock.sleep(timedelta(seconds=40))
            on_way.append(-1)
            return HttpAnswer(status=200, headers={}, body=b"{}")

    services = _services()
    dialect = replace(DIALECT, buy_interval=timedelta(seconds=interval_s))
    client = RestClient(cast("Http", SlowHttp()), dialect, clock=services.clock, rng=Random(1))

    async def main() -> None:
        async with anyio.create_task_group() as group:
            for _ in range(3):
                group.start_soon(_bought, client)

    run_virtually(main)
    assert (max(most), len(on_way), sum(on_way)) == (at_once, 6, 0)


async def _bought(client: RestClient) -> None:
    await client.buy("POST", "/buy", {}, key=KEY)
