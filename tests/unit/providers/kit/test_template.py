"""What the template of adapters does with the machines of an account, over one in memory."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from spotd_providers.contract.errors import (
    AuthFailed,
    ContractViolation,
    NotSupported,
    OutcomeUnknown,
    PriceMoved,
    ProviderError,
    RequestRejected,
    Unavailable,
)
from spotd_providers.contract.provider import CountsRequests, Services
from spotd_providers.contract.values import (
    AttemptKey,
    CheckLine,
    InstallId,
    Instance,
    InstanceId,
    InstanceRef,
    InstanceState,
    Interruption,
    LaunchRequest,
    Loss,
    Market,
    MicroUsd,
    MicroUsdPerHour,
    Offer,
    OfferId,
    PoolId,
    ProviderCharge,
    ProviderName,
    RegistryLogin,
    Secret,
)
from spotd_providers.kit.calls import Page
from spotd_providers.kit.shapes import CHARGE_ROWS_MAX, Row
from spotd_providers.kit.template import (
    END_READS,
    END_REQUESTS,
    SHOWN_WITHIN,
    Check,
    ProviderTemplate,
    examine,
    require_launchable,
)
from spotd_providers.kit.text import NO_PYTHON
from spotd_providers.testkit.clock import START, FakeClock, run_virtually
from spotd_providers.testkit.harness import RecordingLog
from tests.cases import every

KEY = AttemptKey("spotd-lab-j0b1-1")
MART = ProviderName("mart")


def _services(credential: str | None = "a-key") -> Services:
    return Services(
        install=InstallId("lab"),
        clock=FakeClock(),
        rng=Random(7),
        log=RecordingLog(),
        state_dir=Path(),
        credential=credential,
    )


class Mart(ProviderTemplate):
    """A market whose rows are in memory; `deaf` ends are accepted and do nothing."""

    name = MART
    capabilities = {}  # noqa: RUF012 - a class without powers
    who = "Mart"

    def __init__(self, services: Services, *clients: CountsRequests) -> None:
        super().__init__(services, *clients)
        self.rows: dict[str, dict[str, Any]] = {}
        self.price = 1_000_000
        self.hides: set[str] = set()
        self.deaf = False
        self.silent = False
        self.denies = False
        self.sells = Market.ON_DEMAND
        self.before_end: Callable[[], None] = lambda: None
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
        state = InstanceState.GONE if raw.get("gone") else state
        return Instance(
            ref=ref,
            key=key,
            state=state,
            market=raw.get("market", Market.ON_DEMAND),
            price=None if price is None else MicroUsdPerHour(price),
        )

    async def _buy(self, request: LaunchRequest) -> Instance:
        self.rows["m1"] = {"id": "m1", "label": str(request.key), "price": self.price, "market": self.sells}
        ref = InstanceRef(provider=MART, instance_id=InstanceId("m1"))
        return Instance(ref=ref, key=request.key, state=InstanceState.PENDING)

    async def _ask_end(self, ref: InstanceRef) -> bool:
        self.before_end()
        await anyio.lowlevel.checkpoint()
        self.ends.append(ref.instance_id)
        if not self.deaf:
            self.rows.pop(ref.instance_id, None)
        return not self.denies


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


def test_the_requests_of_all_clients_are_counted() -> None:
    mart = Mart(_services(), SimpleNamespace(requests_sent=3), SimpleNamespace(requests_sent=4))
    assert mart.requests_sent == 7


@every(("row", "runs"), [({}, True), ({"ends": True}, False), ({"gone": True}, False), (None, False)], ids=str)
def test_only_a_machine_that_runs_is_entered(row: dict[str, Any] | None, runs: bool) -> None:
    async def story(mart: Mart) -> None:
        mart.rows = {} if row is None else {"m1": {"id": "m1", "label": str(KEY), **row}}
        if runs:
            assert (await mart._running_row(_ref()))["id"] == "m1"
            return
        with pytest.raises(Unavailable, match="does not run"):
            await mart._running_row(_ref())

    _play(story)


def test_a_machine_of_another_is_not_entered() -> None:
    async def story(mart: Mart) -> None:
        mart.rows = {"m1": {"id": "m1", "label": "spotd-other-j1-1"}}
        with pytest.raises(RequestRejected):
            await mart._running_row(_ref())

    _play(story)


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


@every("label", ["", "a notebook", "spotd-lab2-j0b1-1", "spotd-la-j0b1-1"])
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


@every("number", ["", "../m1", "m 1", "m" * 129])
def test_what_is_no_id_is_sent_nowhere(number: str) -> None:
    async def story(mart: Mart) -> None:
        with pytest.raises(RequestRejected):
            await mart.terminate(_ref(number))
        assert not mart.ends

    _play(story)


@every("row", [{}, {"label": None}, "a row", {"label": str(KEY)}], ids=str)
def test_a_row_that_cannot_be_attributed_proves_no_absence(row: Any) -> None:
    async def story(mart: Mart) -> None:
        mart.rows["odd"] = row
        listing = await mart.instances()
        assert not listing.complete
        assert len(listing.rejected) == 1
        with pytest.raises(Unavailable):
            await mart.find(KEY)

    _play(story)


def test_another_market_than_was_asked_for_is_ended_and_a_breach() -> None:
    async def story(mart: Mart) -> None:
        mart.sells = Market.SPOT
        with pytest.raises(ContractViolation):
            await mart.launch(_request())
        assert not mart.rows
        assert _events(mart) == ["mart.wrong_purchase"]

    _play(story)


def test_a_wrong_purchase_that_is_listed_late_is_shown_as_ending() -> None:
    async def story(mart: Mart) -> None:
        mart.price, mart.silent = 2_000_000, True
        await mart.launch(_request())
        mart.silent = False
        (seen,) = (await mart.instances()).instances
        assert (seen.state, seen.loss) == (InstanceState.ENDING, Loss.PROVISION_FAILED)
        assert "$2.0000/h" in seen.detail
        assert not (await mart.instances()).instances

    _play(story)


def test_a_right_purchase_that_is_listed_late_is_checked_once() -> None:
    async def story(mart: Mart) -> None:
        mart.silent = True
        await mart.launch(_request())
        mart.silent = False
        assert (await mart.instances()).instances[0].state is InstanceState.RUNNING
        mart.rows["m1"]["price"] = 9_000_000  # a change of price is not the purchase
        await mart.instances()
        assert not mart.ends

    _play(story)


def test_a_price_that_is_not_judged_neither_ends_a_machine_nor_is_waited_for() -> None:
    async def story(mart: Mart) -> None:
        mart.judged_prices = frozenset({Market.SPOT})  # type: ignore[misc] # of this market
        mart.price = 9_000_000
        made = await mart.launch(_request())
        assert made.instance.market is Market.ON_DEMAND
        mart.rows["m1"].pop("price")
        await mart.launch(_request())
        assert not mart.ends
        assert not mart._unconfirmed

    _play(story)


def test_a_bid_above_the_offers_price_is_sent_and_a_list_price_above_the_agreement_is_not() -> None:
    async def story(mart: Mart) -> None:
        mart.sells = Market.SPOT
        bid = replace(_request().offer, market=Market.SPOT, gpu_price=MicroUsdPerHour(2_000_000))
        await mart.launch(replace(_request(), offer=bid))
        assert mart.rows

    _play(story)


def test_a_login_that_is_not_taken_buys_nothing() -> None:
    async def story(mart: Mart) -> None:
        mart.no_login = "Mart takes no login"  # type: ignore[misc] # of this market
        login = RegistryLogin(server="ghcr.io", username="me", password=Secret("x"))
        with pytest.raises(NotSupported, match="takes no login"):
            await mart.launch(replace(_request(), login=login))
        assert not mart.rows

    _play(story)


def test_a_purchase_that_is_cancelled_while_it_is_undone_is_undone_all_the_same() -> None:
    async def story(mart: Mart) -> None:
        mart.price = 2_000_000
        with anyio.CancelScope() as scope:
            mart.before_end = scope.cancel
            with pytest.raises(PriceMoved):
                await mart.launch(_request())
        assert not mart.rows

    _play(story)


def test_an_end_that_is_not_confirmed_is_asked_for_once_and_not_read_again() -> None:
    async def story(mart: Mart) -> None:
        await mart.launch(_request())
        mart.confirms_ends, mart.deaf, mart.silent = False, True, True  # type: ignore[misc] # of this market
        await mart.terminate(_ref())
        assert mart.ends == ["m1"]

    _play(story)


@every("confirms", [True, False])
def test_a_new_machine_that_is_said_to_be_absent_is_not_gone_before_it_was_shown(confirms: bool) -> None:
    async def story(mart: Mart) -> None:
        mart.hides.add("m1")
        await mart.launch(_request())
        mart.confirms_ends, mart.denies = confirms, True  # type: ignore[misc] # of this market
        with pytest.raises(Unavailable, match="does not show its new"):
            await mart.terminate(_ref())
        await mart._services.clock.sleep(SHOWN_WITHIN)
        await mart.terminate(_ref())
        assert mart.ends == ["m1", "m1"]

    _play(story)


def test_a_search_that_is_narrow_may_find_a_key_and_only_all_rows_prove_its_absence() -> None:
    class Narrow(Mart):
        async def _rows(self, key: AttemptKey | None) -> tuple[Sequence[Any], bool]:
            asked.append(key)
            rows, _ = await super()._rows(None)
            return [row for row in rows if key is None or row["label"] == key], whole

    asked: list[AttemptKey | None] = []
    whole = True

    async def main() -> None:
        nonlocal whole
        mart = Narrow(_services())
        mart.rows["m1"] = {"id": "m1", "label": str(KEY), "price": 1}
        mart.rows["m2"] = {"id": "m2", "label": str(KEY) + "1", "price": 1}
        assert [i.ref.instance_id for i in await mart.find(KEY)] == ["m1"]
        whole = False
        assert len(await mart.find(KEY)) == 1
        with pytest.raises(Unavailable):
            await mart.find(AttemptKey("spotd-lab-other-1"))
        assert await mart.find(AttemptKey("spotd-lab2-j0b1-1")) == ()
        assert asked == [KEY, KEY, AttemptKey("spotd-lab-other-1")]

    run_virtually(main)


def test_a_machine_that_ended_is_not_found_by_its_key() -> None:
    async def story(mart: Mart) -> None:
        mart.rows["m1"] = {"id": "m1", "label": str(KEY), "price": 1, "gone": True}
        assert await mart.find(KEY) == ()
        assert len((await mart.instances()).instances) == 1

    _play(story)


def test_an_account_is_named_by_its_key_which_the_name_does_not_tell() -> None:
    async def main() -> None:
        names = {await Mart(_services(key)).account() for key in ("a-key", "a-key", "b-key")}
        assert len(names) == 2
        assert not any("key" in name.removeprefix("key ") for name in names)

    run_virtually(main)


# Bills and consoles.


class BillRow(Row):
    amount: int


def _charge(row: BillRow) -> list[ProviderCharge]:
    end = START + timedelta(hours=1)
    return [ProviderCharge(key=KEY, instance_id=InstanceId("m1"), start=START, end=end, amount=MicroUsd(row.amount))]


@every("breaks", ["a failed page", "a page that is promised without a token", "the same page again"])
def test_a_bill_that_breaks_off_is_none(breaks: str) -> None:
    async def story(mart: Mart) -> None:
        async def page(token: str | None) -> Page:
            if token is not None and breaks == "a failed page":
                raise Unavailable("away")
            return [{"amount": 1}], "" if breaks.startswith("a page") else "two"

        with pytest.raises(Unavailable, match="breaks off"):
            await mart._bill(page, BillRow, _charge)

    _play(story)


def test_a_bill_of_several_pages_is_read_to_its_end_and_its_odd_rows_are_logged() -> None:
    async def story(mart: Mart) -> None:
        async def page(token: str | None) -> Page:
            return ([{"amount": 1}, {"amount": "x"}], "two") if token is None else ([{"amount": 2}], None)

        assert [one.amount for one in await mart._bill(page, BillRow, _charge)] == [1, 2]
        assert _events(mart) == ["mart.charge_unreadable"]

    _play(story)


def test_a_bill_with_more_rows_than_any_account_has_is_none() -> None:
    async def story(mart: Mart) -> None:
        async def page(_token: str | None) -> Page:
            return [{"amount": 1}] * (CHARGE_ROWS_MAX + 1), None

        with pytest.raises(Unavailable, match="more than 50,000 rows"):
            await mart._bill(page, BillRow, _charge)

    _play(story)


@every(("last", "said"), [(NO_PYTHON, NO_PYTHON), ("it goes on", "")])
def test_the_console_of_a_machine_is_read_once_for_the_start_scripts_own_words(last: str, said: str) -> None:
    async def story(mart: Mart) -> None:
        reads = []

        async def console() -> Sequence[str]:
            reads.append(1)
            return ["hello", NO_PYTHON, last, ""]

        assert [await mart._complaint(_ref(), console) for _ in range(2)] == [said, said]
        assert len(reads) == 1

    _play(story)


# What is refused before it is sent, and the lines of doctor.


@every(
    ("changes", "field"),
    [
        ({"start_script": "x" * 101}, "start_script"),
        ({"start_script": "ü" * 51}, "start_script"),
        ({"start_script": "a\0b"}, "start_script"),
        ({"key": AttemptKey("k" * 21)}, "key"),
        ({"image": ""}, "image"),
        ({"image": "i" * 31}, "image"),
        ({"offer": replace(_request().offer, extra={"ask": ""})}, "offer"),
    ],
)
def test_what_would_be_refused_for_ever_is_not_sent(changes: dict[str, Any], field: str) -> None:
    def judge(request: LaunchRequest) -> None:
        require_launchable(
            request, who="Mart", extra=("ask",), script_bytes_max=100, key_chars_max=20, image_chars_max=30
        )

    sound = replace(_request(), offer=replace(_request().offer, extra={"ask": "1"}))
    judge(replace(sound, start_script="x" * 100, key=AttemptKey("k" * 20), image="i" * 30))
    with pytest.raises(RequestRejected) as refused:
        judge(replace(sound, **changes))
    assert refused.value.field == field


@every(("error", "hint"), [(AuthFailed("no"), "a new key"), (Unavailable("away"), "later"), (NotSupported("x"), "hm")])
def test_a_key_that_is_not_accepted_is_the_only_line(error: ProviderError, hint: str) -> None:
    async def greet() -> str:
        raise error

    async def main() -> None:
        lines = await examine(greet, lambda _: 1 / 0, accepted="", hint="hm", refused="a new key", unanswered="later")  # type: ignore[arg-type,return-value] # never called
        assert [(line.name, line.ok, line.hint) for line in lines] == [("key", False, hint)]

    run_virtually(main)


def test_each_further_check_is_a_line_whatever_the_one_before_found() -> None:
    async def greet() -> str:
        return "hello"

    async def fails() -> str:
        raise Unavailable("away")

    async def works() -> str:
        return "fine"

    async def main() -> None:
        lines = await examine(
            greet,
            lambda said: (
                CheckLine(name="said", ok=True, detail=said),
                Check(name="one", ask=fails, hint="wait", unanswered="later"),
                Check(name="two", ask=works, hint=""),
            ),
            accepted="accepted",
            hint="",
        )
        assert [(line.name, line.ok, line.detail, line.hint) for line in lines] == [
            ("key", True, "accepted", ""),
            ("said", True, "hello", ""),
            ("one", False, "away", "later"),
            ("two", True, "fine", ""),
        ]

    run_virtually(main)


def _events(mart: Mart) -> list[str]:
    return [line.event for line in mart._services.log.lines]  # type: ignore[attr-defined] # a fake
