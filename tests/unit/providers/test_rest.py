"""What each HTTP answer means to a read and to a purchase, and what the template does with an account's machines."""

from __future__ import annotations

import base64
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from random import Random
from typing import Any

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
    Instance,
    InstanceId,
    InstanceRef,
    InstanceState,
    Interruption,
    LaunchRequest,
    Market,
    MicroUsdPerHour,
    Offer,
    OfferId,
    PoolId,
    ProviderName,
)
from spotd_providers.kit.calls import Page, raise_for_status
from spotd_providers.kit.http import HttpAnswer
from spotd_providers.kit.rest import Dialect, Meaning, RefusalWords, RestClient, RestRefused, open_rest
from spotd_providers.kit.template import END_READS, END_REQUESTS, SHOWN_WITHIN, ProviderTemplate
from spotd_providers.kit.vm_boot import doorless_ssh_key
from spotd_providers.testkit.clock import FakeClock, run_virtually
from spotd_providers.testkit.harness import RecordingLog
from spotd_providers.testkit.serve import Call, Canned, Faults, Message, Receive, Scope, Send, Served, serving

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
    "error of the layer below": (_own(400, "below/x"), Unavailable, OutcomeUnknown, None),
    "gateway": (Canned(status=502, body=b"<html/>", headers=HTML), Unavailable, OutcomeUnknown, None),
    "success of no JSON": (Canned(status=200, body=b"<html/>", headers=HTML), Unavailable, OutcomeUnknown, None),
    "success of a list": (Canned(status=200, body=b"[]"), Unavailable, OutcomeUnknown, None),
    "too often": (Canned(status=429, body=b"", headers={"retry-after": "3600"}), RateLimited, RateLimited, None),
}


@pytest.mark.parametrize(("canned", "read", "bought", "_leaf"), ANSWERS.values(), ids=ANSWERS)
def test_what_an_answer_means_to_a_read(canned: Canned, read: type, bought: type, _leaf: type | None) -> None:
    outcome, sent = _outcome(canned, lambda client: client.ask("GET", "/things", what="things"))
    assert type(outcome) is read
    is_definite = bought is RestRefused or read is not Unavailable
    assert sent == (1 if is_definite else 3)


@pytest.mark.parametrize(("canned", "_read", "bought", "leaf"), ANSWERS.values(), ids=ANSWERS)
def test_what_an_answer_means_to_a_purchase(canned: Canned, _read: type, bought: type, leaf: type | None) -> None:
    outcome, sent = _outcome(canned, lambda client: client.buy("POST", "/buy", {}, key=KEY))
    assert type(outcome) is bought
    assert sent == 1
    if isinstance(outcome, RestRefused):
        assert type(outcome.of_purchase()) is leaf
    if isinstance(outcome, OutcomeUnknown):
        assert outcome.key == KEY


@pytest.mark.parametrize("status", [302, 408, 500, 599])
def test_a_redirect_and_what_a_server_could_not_do_in_time_says_nothing_about_the_request(status: int) -> None:
    with pytest.raises(Unavailable, match="Mart"):
        raise_for_status(HttpAnswer(status=status, headers={}, body=b""), who="Mart", what="a request")


@pytest.mark.parametrize("status", [200, 204, 400, 404, 407, 409, 429, 499])
def test_any_other_status_is_an_answer(status: int) -> None:
    raise_for_status(HttpAnswer(status=status, headers={}, body=b""), who="Mart", what="a request")


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


def test_without_a_key_nothing_is_opened() -> None:
    async def main() -> None:
        with pytest.raises(AuthFailed, match="put it there"):
            async with open_rest("http://127.0.0.1:9", DIALECT, _services(None), key_hint="put it there"):
                raise AssertionError

    run_virtually(main)


# The template, over an account in memory.


class Mart(ProviderTemplate):
    """A market whose rows are in memory; `deaf` ends are accepted and do nothing."""

    name = MART
    capabilities = {}  # noqa: RUF012 - a class without powers
    who = "Mart"

    def __init__(self, services: Services) -> None:
        super().__init__(services)
        self.rows: dict[str, dict[str, Any]] = {}
        self.price = 1_000_000
        self.hides: set[str] = set()
        self.deaf = False
        self.silent = False
        self.ends: list[str] = []

    async def _page(self, _token: str | None) -> Page:
        return [row for number, row in self.rows.items() if number not in self.hides], None

    async def _row(self, ref: InstanceRef) -> Any | None:
        if self.silent:
            raise Unavailable("Mart is silent")
        return None if ref.instance_id in self.hides else self.rows.get(ref.instance_id)

    def _label(self, raw: Any) -> str | None:
        return raw.get("label") if isinstance(raw, dict) else None

    def _machine(self, raw: Any, key: AttemptKey) -> Instance | None:
        if "id" not in raw:
            return None
        ref = InstanceRef(provider=MART, instance_id=InstanceId(raw["id"]))
        price = raw.get("price")
        state = InstanceState.ENDING if raw.get("ends") else InstanceState.RUNNING
        return Instance(
            ref=ref,
            key=key,
            state=state,
            market=raw.get("market", Market.ON_DEMAND),
            price=None if price is None else MicroUsdPerHour(price),
        )

    async def _buy(self, request: LaunchRequest) -> Instance:
        self.rows["m1"] = {"id": "m1", "label": str(request.key), "price": self.price}
        ref = InstanceRef(provider=MART, instance_id=InstanceId("m1"))
        return Instance(ref=ref, key=request.key, state=InstanceState.PENDING)

    async def _ask_end(self, ref: InstanceRef) -> None:
        self.ends.append(ref.instance_id)
        if not self.deaf:
            self.rows.pop(ref.instance_id, None)


def _request(price_max: int = 1_000_000) -> LaunchRequest:
    offer = Offer(
        provider=MART,
        offer_id=OfferId("one"),
        pool=PoolId("one"),
        market=Market.ON_DEMAND,
        interruption=Interruption.NEVER,
        gpu="H100_SXM",
        gpu_count=1,
        gpu_price=MicroUsdPerHour(1_000_000),
    )
    return LaunchRequest(
        key=KEY,
        install=InstallId("lab"),
        offer=offer,
        price_max=MicroUsdPerHour(price_max),
        image="image",
        disk_gb=10,
        start_script="true",
    )


def _play(story: Callable[[Mart], Awaitable[None]]) -> None:
    run_virtually(lambda: _told(story))


async def _told(story: Callable[[Mart], Awaitable[None]]) -> None:
    await story(Mart(_services()))


def _ref(number: str = "m1") -> InstanceRef:
    return InstanceRef(provider=MART, instance_id=InstanceId(number))


def test_a_machine_that_costs_more_is_ended_and_the_launch_fails() -> None:
    async def story(mart: Mart) -> None:
        mart.price = 1_000_002
        with pytest.raises(PriceMoved):
            await mart.launch(_request())
        assert not mart.rows
        mart.price = 1_000_001  # the last digit of a float, for one GPU
        await mart.launch(_request())
        assert mart.rows

    _play(story)


def test_an_offer_above_the_agreed_price_is_not_asked_for() -> None:
    async def story(mart: Mart) -> None:
        with pytest.raises(PriceMoved):
            await mart.launch(_request(price_max=999_999))
        assert not mart.rows

    _play(story)


def test_a_wrong_purchase_that_cannot_be_ended_has_an_unknown_outcome() -> None:
    async def story(mart: Mart) -> None:
        mart.price, mart.deaf = 2_000_000, True
        with pytest.raises(OutcomeUnknown):
            await mart.launch(_request())
        assert len(mart.ends) == END_REQUESTS

    _play(story)


def test_a_purchase_that_is_not_shown_yet_is_checked_when_it_is_listed() -> None:
    async def story(mart: Mart) -> None:
        mart.price, mart.silent = 2_000_000, True
        made = await mart.launch(_request())
        assert made.instance.price is None
        mart.silent, mart.deaf = False, True
        assert len((await mart.instances()).instances) == 1  # its end failed, so that the next list tries again
        mart.deaf = False
        await mart.instances()
        assert not mart.rows

    _play(story)


def test_a_new_machine_that_is_not_shown_yet_is_not_gone() -> None:
    async def story(mart: Mart) -> None:
        mart.hides.add("m1")
        await mart.launch(_request())
        mart.deaf = True  # it is not known everywhere yet
        with pytest.raises(Unavailable):
            await mart.terminate(_ref())
        await mart._services.clock.sleep(SHOWN_WITHIN)
        await mart.terminate(_ref())

    _play(story)


def test_an_end_counts_once_it_is_shown() -> None:
    async def story(mart: Mart) -> None:
        await mart.launch(_request())
        mart.deaf = True
        with pytest.raises(Unavailable):
            await mart.terminate(_ref())
        assert len(mart.ends) == END_REQUESTS
        assert len(mart._services.clock.slept) == END_REQUESTS * (END_READS - 1)  # type: ignore[attr-defined] # a fake
        mart.rows["m1"]["ends"] = True
        await mart.terminate(_ref())

    _play(story)


@pytest.mark.parametrize("label", ["", "a notebook", "spotd-lab2-j0b1-1", "spotd-la-j0b1-1"])
def test_a_machine_of_others_is_neither_ended_nor_listed(label: str) -> None:
    async def story(mart: Mart) -> None:
        mart.rows["m7"] = {"id": "m7", "label": label, "price": 1}
        with pytest.raises(RequestRejected):
            await mart.terminate(_ref("m7"))
        listing = await mart.instances()
        assert listing.complete
        assert not listing.instances
        assert not mart.ends

    _play(story)


@pytest.mark.parametrize("number", ["", "../m1", "m 1", "m" * 129])
def test_what_is_no_id_is_sent_nowhere(number: str) -> None:
    async def story(mart: Mart) -> None:
        with pytest.raises(RequestRejected):
            await mart.terminate(_ref(number))
        assert not mart.ends

    _play(story)


@pytest.mark.parametrize("row", [{}, {"label": None}, "a row", {"label": str(KEY)}], ids=str)
def test_a_row_that_cannot_be_attributed_proves_no_absence(row: Any) -> None:
    async def story(mart: Mart) -> None:
        mart.rows["odd"] = row
        listing = await mart.instances()
        assert not listing.complete
        assert len(listing.rejected) == 1
        with pytest.raises(Unavailable):
            await mart.find(KEY)

    _play(story)


@pytest.mark.parametrize("start", [0, 1, 2**255 - 20, 2**255 - 1, 7 * 2**200])
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
