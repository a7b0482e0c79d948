"""A plugin that returns nonsense, or raises what it should not, costs a row or its own reading, and nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import pytest

from spotd.core.domain.states import JobState
from spotd.daemon.log import HIDDEN, Redactor
from spotd.daemon.market import plugin_fields, plugin_values
from spotd.daemon.market.guarded import _sane, guarded
from spotd.service import main
from spotd_providers.contract import errors
from spotd_providers.contract.provider import Bills, KnowsBalance, ProviderTraits, ReadsLogs
from spotd_providers.contract.values import (
    AttemptKey,
    Balance,
    Benchmark,
    CheckLine,
    InstallId,
    Instance,
    InstanceId,
    InstanceRef,
    InstanceState,
    Launched,
    LaunchRequest,
    Listing,
    MicroUsd,
    MicroUsdPerHour,
    Offer,
    OfferPage,
    OfferQuery,
    ProviderCharge,
    ProviderName,
    Rejected,
)
from tests.unit.api.handlers.test_handlers import submitted
from tests.unit.core.builders import NOW, SHOP, offer, shop_policy
from tests.unit.daemon.clocks import VirtualClock
from tests.unit.daemon.market.test_listing_anomalies import BAD, Dated
from tests.unit.daemon.rig import Log, Rig
from tests.unit.daemon.shop import Shop

pytestmark = [pytest.mark.anyio, pytest.mark.long]
HUGE = "x" * 1_000_000
NAIVE = datetime(2026, 3, 2, 12, 0)  # noqa: DTZ001 - what a careless plugin makes
BAD_OFFER = replace(offer("b1", price=100_000), provider=BAD)
BAD_REF = InstanceRef(provider=BAD, instance_id=InstanceId("m1"))
BAD_MACHINE = Instance(ref=BAD_REF, key=AttemptKey("spotd-lab-j-1"), state=InstanceState.RUNNING)


class Nasty(str):
    """A text that fails when it is looked at closely."""

    __slots__ = ()

    def __len__(self) -> int:
        raise RuntimeError("no length")


@dataclass(frozen=True, slots=True, kw_only=True)
class Trap(Offer):
    """An offer whose price cannot be read."""

    @property  # type: ignore[misc]  # a field that is a property is the point
    def gpu_price(self) -> Any:
        raise RuntimeError("no price")


def endless(row: Any) -> Iterator[Any]:
    while True:
        yield row


def breaking(row: Any) -> Iterator[Any]:
    yield row
    raise RuntimeError("in the middle")


ODD: list[Any] = [
    None, 1.5, float("nan"), float("inf"), -1, 10**30, True, "7", b"x", [], {}, object(), HUGE, "a\x00b", "\ud800",
    "\u202e", NAIVE, NAIVE.replace(year=1), NAIVE.replace(year=9999),
    datetime.max.replace(tzinfo=timezone(timedelta(hours=-14))),
    datetime(1, 1, 1, tzinfo=timezone(timedelta(hours=14))), timedelta.max, timedelta(days=-1), 5e-324, 1e308,
    Nasty("n"), lambda: None,
]  # fmt: skip
OFFER_FIELDS = list(Offer.__dataclass_fields__)
INSTANCE_FIELDS = list(Instance.__dataclass_fields__)


def page(*rows: Any, **more: Any) -> OfferPage:
    return OfferPage(offers=tuple(rows), at=NOW, **more)


def listing(*rows: Any, **more: Any) -> Listing:
    return Listing(**{"instances": tuple(rows), "complete": True, "at": NOW, **more})


def plain_offers(value: Any) -> OfferPage:
    return plugin_values.offer_page(value, BAD, now=NOW)


def plain_listing(value: Any) -> Listing:
    return plugin_values.listing(value, BAD, now=NOW)


@pytest.mark.parametrize("field", OFFER_FIELDS)
def test_no_value_of_an_offers_field_costs_more_than_that_row(field: str) -> None:
    good = replace(BAD_OFFER, offer_id="good")  # type: ignore[arg-type]  # a NewType
    for value in ODD:
        if value is HUGE and field == "extra":
            continue
        try:
            found = plain_offers(page(replace(BAD_OFFER, **{field: value}), good))
        except Exception as exc:
            if isinstance(value, Nasty):
                continue  # costs the reading
            raise AssertionError(f"{field} = {value!r:.40}") from exc
        assert "good" in {one.offer_id for one in found.offers}, value
        for one in found.offers:
            assert_sane_offer(one)


def assert_sane_offer(one: Offer) -> None:
    assert type(one) is Offer
    for name in ("gpu_price", "storage_price", "upload_price", "download_price", "gpu_count"):
        assert type(getattr(one, name)) is int
    for name in ("on_demand_price", "gpu_vram_mb", "memory_mb", "disk_gb_max", "capacity_score", "hazard_ppm"):
        assert getattr(one, name) is None or type(getattr(one, name)) is int
    assert one.speed_score is None or (type(one.speed_score) in (int, float) and 0 <= one.speed_score <= 1e12)
    for name in ("offer_id", "pool", "gpu", "region"):
        assert getattr(one, name).encode() is not None
        assert len(getattr(one, name)) <= 256
    assert 0 <= one.gpu_price <= 10**10
    assert hash((one.offer_id, one.host_id, one.pool, one.quotas))


@pytest.mark.parametrize("field", INSTANCE_FIELDS)
def test_no_value_of_a_machines_field_forgets_a_machine_that_can_be_named(field: str) -> None:
    other = replace(BAD_MACHINE, ref=replace(BAD_REF, instance_id="m2"))  # type: ignore[arg-type]  # a NewType
    for value in ODD:
        if isinstance(value, Nasty):
            continue
        found = plain_listing(listing(replace(BAD_MACHINE, **{field: value}), other))
        named = {machine.ref.instance_id: machine for machine in found.instances}
        assert "m2" in named
        if field not in {"ref", "key"}:
            assert "m1" in named, value
        assert found.complete is (len(named) == 2), value
        for machine in found.instances:
            assert isinstance(machine.state, InstanceState)
            for at in (machine.created_at, machine.notice_at):
                assert at is None or (at.tzinfo is UTC and 2010 <= at.year <= 2100)
            assert machine.price is None or type(machine.price) is int
            assert machine.detail.encode() is not None
            assert len(machine.detail) <= 1000


@pytest.mark.parametrize(
    ("stated", "believed"),
    [
        pytest.param(NAIVE, NOW, id="no-zone"),
        pytest.param("soon", NOW, id="a-text"),
        pytest.param(datetime.max.replace(tzinfo=UTC), None, id="year-9999"),
        pytest.param(datetime.min.replace(tzinfo=UTC), NOW, id="year-1"),
        pytest.param(NOW + timedelta(minutes=2), NOW + timedelta(minutes=2), id="in-two-minutes"),
    ],
)
def test_a_notice_without_a_legible_time_is_a_notice_and_one_of_another_age_is_none(
    stated: Any, believed: datetime | None
) -> None:
    (machine,) = plain_listing(listing(replace(BAD_MACHINE, notice_at=stated))).instances
    assert machine.notice_at == believed


def test_past_prices_are_those_of_now_and_before_in_their_order_and_no_more_than_a_bound() -> None:
    price, hour = MicroUsdPerHour(200_000), timedelta(hours=1)
    odd: Any = (None, (NOW,), (NAIVE, price), (NOW + hour, price), (NOW - hour, -1), (NOW, float("nan")), "ab")
    legible = ((NOW, price), (NOW - 2 * hour, price))
    own: Any = replace(BAD_MACHINE, past_prices=(*odd, *legible))
    many: Any = replace(BAD_MACHINE, past_prices=tuple((NOW - n * hour, price) for n in range(900, 0, -1)))
    assert plugin_values.instance(own, BAD, now=NOW).past_prices == legible[::-1]
    found = plugin_values.instance(many, BAD, now=NOW).past_prices
    assert (len(found), found[-1][0]) == (plugin_values.PAST_PRICES_MAX, NOW - hour)


def test_a_machine_is_never_older_than_renting_by_the_hour_nor_born_tomorrow() -> None:
    for stated in (datetime(1970, 1, 1, tzinfo=UTC), NOW + timedelta(days=2), NAIVE, 1.0):
        (machine,) = plain_listing(listing(replace(BAD_MACHINE, created_at=stated))).instances  # type: ignore[arg-type]  # the point
        assert machine.created_at is None


@pytest.mark.parametrize(
    ("rows", "kept", "complete"),
    [
        pytest.param([BAD_MACHINE, replace(BAD_MACHINE, state=InstanceState.GONE)], 1, True, id="a-row-twice"),
        pytest.param([BAD_MACHINE, replace(BAD_MACHINE, key=AttemptKey("spotd-lab-j-2"))], 0, False, id="two-keys"),
        pytest.param([replace(BAD_MACHINE, ref=replace(BAD_REF, provider=SHOP))], 0, False, id="another-providers"),
        pytest.param([BAD_MACHINE, None, 7, {}], 1, False, id="no-machines"),
    ],
)
def test_rows_that_contradict_each_other_prove_no_machines_end(rows: list[Any], kept: int, complete: bool) -> None:
    found = plain_listing(listing(*rows))
    assert (len(found.instances), found.complete) == (kept, complete)
    assert all(machine.state is InstanceState.RUNNING for machine in found.instances)
    assert complete or found.rejected


@pytest.mark.parametrize("complete", [None, 1, "yes", [1]])
def test_only_a_plain_true_makes_an_answer_complete(complete: Any) -> None:
    assert not plain_listing(listing(BAD_MACHINE, complete=complete)).complete
    assert not plain_offers(page(BAD_OFFER, complete=complete)).complete


def test_more_rows_than_any_market_has_are_cut_off_and_said_to_be() -> None:
    many = [replace(BAD_OFFER, offer_id=f"b{n}") for n in range(plugin_values.OFFERS_MAX + 1)]  # type: ignore[arg-type]  # a NewType
    found = plain_offers(page(*many))
    assert (len(found.offers), found.complete) == (plugin_values.OFFERS_MAX, False)
    assert not plain_offers(OfferPage(offers=endless(BAD_OFFER), at=NOW)).complete  # type: ignore[arg-type]  # the point
    assert not plain_listing(Listing(instances=endless(BAD_MACHINE), complete=True, at=NOW)).complete  # type: ignore[arg-type]  # the point


def test_a_row_that_equals_a_known_offer_is_that_offer_whatever_it_is_made_of() -> None:
    known: dict[str, Offer] = {BAD_OFFER.offer_id: BAD_OFFER}
    alike = replace(BAD_OFFER, gpu_price=100_000.0, gpu_count=True)  # type: ignore[arg-type]  # equal, and of other types
    (found,) = plugin_values.offer_page(page(alike), BAD, now=NOW, known=known).offers
    assert found is BAD_OFFER
    (found,) = plugin_values.offer_page(
        page(replace(BAD_OFFER, gpu_price=MicroUsdPerHour(7))), BAD, now=NOW, known=known
    ).offers
    assert found.gpu_price == 7


def test_an_offer_twice_in_one_answer_is_one_offer() -> None:
    found = plain_offers(page(BAD_OFFER, replace(BAD_OFFER, gpu_price=MicroUsdPerHour(1))))
    assert [one.gpu_price for one in found.offers] == [100_000]
    assert [one.reason for one in found.rejected] == ["the same offer twice in one answer"]


# --- the whole daemon ------------------------------------------------------------------------------------------


class Raising(Dated):
    """Answers with what `answer` makes, or raises what it raises."""

    def __init__(self, clock: VirtualClock, name: ProviderName, answer: Callable[[], Any]) -> None:
        super().__init__(clock, name=name)
        self.answer = answer

    async def offers(self, query: OfferQuery) -> OfferPage:
        await super().offers(query)
        answer: OfferPage = self.answer()
        return answer

    async def instances(self) -> Listing:
        await super().instances()
        answer: Listing = self.answer()
        return answer


def raises(exc: BaseException) -> Callable[[], Any]:
    def answer() -> Any:
        raise exc

    return answer


def odd_error(**changes: Any) -> errors.ProviderError:
    made = errors.RateLimited("x", retry_after=timedelta(seconds=1))
    for name, value in changes.items():
        setattr(made, name, value)
    return made


class Unspeakable(errors.Unavailable):
    def __str__(self) -> str:
        raise RuntimeError("no words")


class Unclean(errors.Unavailable):
    def __str__(self) -> str:
        return "\ud800\x00" + HUGE


ANSWERS: Mapping[str, Callable[[], Any]] = {
    "nothing": lambda: None,
    "a-number": lambda: 7,
    "a-bare-list": lambda: [BAD_OFFER, BAD_MACHINE],
    "a-look-alike": lambda: SimpleNamespace(offers=(), instances=(), complete=True, at=NOW, rejected=()),
    "an-error-class": lambda: RuntimeError,
    "its-own-exception": raises(KeyError("x")),
    "the-end-of-the-process": raises(SystemExit(3)),
    "a-group": raises(ExceptionGroup("many", [RuntimeError("x")])),
    "a-time-out-of-its-own": raises(TimeoutError()),
    "the-end-of-a-generator": raises(StopAsyncIteration()),
    "memory": raises(MemoryError()),
    "a-wait-of-nothing": raises(odd_error(retry_after=None)),
    "a-wait-without-end": raises(odd_error(retry_after=timedelta.max)),
    "a-wait-into-the-past": raises(odd_error(retry_after=timedelta.min)),
    "a-wait-in-words": raises(odd_error(retry_after="60")),
    "an-error-that-cannot-be-said": raises(Unspeakable("x")),
    "an-error-that-cannot-be-written": raises(Unclean("x")),
    "a-price-as-a-float": lambda: page(replace(BAD_OFFER, gpu_price=0.25)),  # type: ignore[arg-type]  # the point
    "another-providers-offer": lambda: page(offer("o1")),
    "another-providers-machine": lambda: listing(replace(BAD_MACHINE, ref=replace(BAD_REF, provider=SHOP))),
    "an-instant-without-a-zone": lambda: listing(replace(BAD_MACHINE, created_at=NAIVE, notice_at=NAIVE), at=NAIVE),
    "a-price-that-raises": lambda: page(Trap(**{n: getattr(BAD_OFFER, n) for n in OFFER_FIELDS if n != "gpu_price"})),
    "a-page-dated-by-a-text": lambda: OfferPage(offers=(), at="now"),  # type: ignore[arg-type]  # the point
    "rows-that-are-none": lambda: OfferPage(offers=None, at=NOW),  # type: ignore[arg-type]  # the point
    "machines-that-are-none": lambda: Listing(instances=None, complete=True, at=NOW),  # type: ignore[arg-type]  # the point
    "a-generator-that-breaks": lambda: OfferPage(offers=breaking(BAD_OFFER), at=NOW),  # type: ignore[arg-type]  # the point
    "machines-that-break-off": lambda: Listing(instances=breaking(BAD_MACHINE), complete=True, at=NOW),  # type: ignore[arg-type]  # the point
    "refusals-that-are-texts": lambda: page(BAD_OFFER, rejected=("x", None, Rejected(offer_id=None, reason=7))),  # type: ignore[arg-type]  # the point
}  # fmt: skip


async def test_whatever_plugins_answer_the_daemon_lives_on_and_buys_elsewhere(tmp_path: Path) -> None:
    clock = VirtualClock()
    bad = {ProviderName(name): Raising(clock, ProviderName(name), answer) for name, answer in ANSWERS.items()}
    policy = shop_policy()
    rules = {name: replace(policy.providers[SHOP], name=name) for name in bad}
    rig = Rig(
        tmp_path,
        clock=clock,
        shops=[Dated(clock), *bad.values()],
        policy=replace(policy, providers={**policy.providers, **rules}),
    )
    async with rig.running():
        await submitted(rig)
        await rig.until(lambda: bool(rig.shop.alive()), within=timedelta(minutes=5))
        asked = {name: shop.counts["instances"] for name, shop in bad.items()}
        await clock.sleep(timedelta(minutes=12))
        assert not [name for name, shop in bad.items() if shop.counts["instances"] <= asked[name]], "asked no more"
        for row in await rig.handlers().health.providers():
            assert len(row["detail"]) < 2000
            assert row["ok"] is (row["name"] == SHOP), row


class Misbuying(Shop):
    """Sells, and answers with something else."""

    def __init__(self, clock: VirtualClock, answer: Callable[[Instance], Any]) -> None:
        super().__init__(clock)
        self.answer = answer

    async def launch(self, request: LaunchRequest) -> Launched:
        made = await super().launch(request)
        answer: Launched = self.answer(made.instance)
        return answer


def changed(ref: InstanceRef, **fields: Any) -> InstanceRef:
    return replace(ref, **fields)


def launched(made: Instance, **fields: Any) -> Launched:
    return Launched(instance=replace(made, **fields))


LAUNCHES: Mapping[str, Callable[[Instance], Any]] = {
    "nothing": lambda _: None,
    "a-bare-machine": lambda made: made,
    "no-machine": lambda _: Launched(instance=None),  # type: ignore[arg-type]  # the point
    "another-providers-machine": lambda made: Launched(
        instance=replace(made, ref=replace(made.ref, provider=BAD))
    ),
    "a-machine-without-an-id": lambda made: launched(made, ref=changed(made.ref, instance_id=None)),
    "a-machine-with-a-numeric-id": lambda made: launched(made, ref=changed(made.ref, instance_id=7)),
    "an-instant-without-a-zone": lambda made: launched(made, created_at=NAIVE, price=1.5),
    "another-key": lambda made: launched(made, key="spotd-lab-x-9"),
    "no-key": lambda made: launched(made, key=None),
    "an-exit": lambda _: raises(SystemExit(1))(),
}  # fmt: skip
LAUNCHES_OF_EVERY_RUN = frozenset({"no-machine", "another-providers-machine", "another-key", "an-exit"})
"""One answer of each kind: nothing, another's machine, another's key, and what is no answer."""


@pytest.mark.parametrize(
    "answer",
    [
        pytest.param(answer, id=name, marks=() if name in LAUNCHES_OF_EVERY_RUN else pytest.mark.lengthy)
        for name, answer in LAUNCHES.items()
    ],
)
async def test_an_odd_answer_to_a_launch_leaves_one_machine_that_is_found_by_its_key(
    answer: Callable[[Instance], Any], tmp_path: Path
) -> None:
    clock = VirtualClock()
    rig = Rig(tmp_path, clock=clock, shops=[Misbuying(clock, answer)])
    async with rig.ready():
        job = await rig.submit()
        await rig.until_running(job, 1)
        assert len(rig.shop.alive()) == 1
        assert len(rig.shop.requests) == 1
        await rig.cancel(job)
        await rig.until_state(job, JobState.CANCELLED)
        await rig.until(lambda: not rig.shop.alive())


class Clinging(Shop):
    """Cannot end a machine the first time."""

    def __init__(self, clock: VirtualClock, failure: BaseException) -> None:
        super().__init__(clock)
        self.failures = [failure]

    async def terminate(self, ref: InstanceRef) -> None:
        if self.failures:
            raise self.failures.pop()
        await super().terminate(ref)


@pytest.mark.parametrize(
    "failure",
    [
        SystemExit(1),
        pytest.param(KeyError("x"), marks=pytest.mark.lengthy),
        pytest.param(odd_error(retry_after=None), marks=pytest.mark.lengthy),
        odd_error(retry_after=timedelta.min),
        Unspeakable("x"),
        pytest.param(Unclean("x"), marks=pytest.mark.lengthy),
    ],
    ids=lambda failure: type(failure).__name__,
)
async def test_a_termination_that_fails_oddly_is_made_again(failure: BaseException, tmp_path: Path) -> None:
    clock = VirtualClock()
    rig = Rig(tmp_path, clock=clock, shops=[Clinging(clock, failure)])
    async with rig.ready():
        job = await rig.submit()
        await rig.until_running(job, 1)
        await rig.cancel(job)
        await rig.until(lambda: not rig.shop.alive(), within=timedelta(minutes=10))


# --- powers ----------------------------------------------------------------------------------------------------


class Rich(Shop):
    """A shop with an account."""

    answer: Any = None

    @property
    def capabilities(self) -> Any:
        raise RuntimeError("no powers")

    async def balance(self) -> Any:
        return self.answer

    async def charges(self, since: datetime, until: datetime) -> Any:
        return self.answer

    async def check(self) -> Any:
        return self.answer


CHARGE = ProviderCharge(
    key=None,
    instance_id="m1",  # type: ignore[arg-type]  # a NewType
    start=NOW,
    end=NOW + timedelta(hours=1),
    amount=MicroUsd(5),
)


async def test_a_guard_has_the_powers_of_its_provider_and_no_others() -> None:
    clock = VirtualClock()
    rich, poor = (guarded(shop, clock=clock, log=Log()) for shop in (Rich(clock), Shop(clock)))
    assert isinstance(rich, KnowsBalance)
    assert isinstance(rich, Bills)
    assert not isinstance(rich, ReadsLogs)
    assert not isinstance(poor, KnowsBalance)
    assert guarded(rich, clock=clock, log=Log()) is rich
    assert rich.capabilities == {}


@pytest.mark.parametrize("value", ODD, ids=lambda value: f"{type(value).__name__}")
async def test_odd_money_is_no_balance_and_no_charge(value: Any) -> None:
    clock = VirtualClock()
    shop = Rich(clock)
    rich = guarded(shop, clock=clock, log=Log())
    assert isinstance(rich, KnowsBalance)
    assert isinstance(rich, Bills)
    shop.answer = Balance(available=value, burn=value)
    if value != -1 or isinstance(value, bool):
        with pytest.raises(errors.Unavailable):
            await rich.balance()
    shop.answer = value
    for ask in (rich.balance, lambda: rich.charges(NOW, NOW), rich.check):
        try:
            assert not await ask() or value in ([], {})
        except errors.Unavailable:
            continue
    for field in ProviderCharge.__dataclass_fields__:
        if isinstance(value, Nasty):
            continue
        shop.answer = [replace(CHARGE, **{field: value}), CHARGE]
        assert CHARGE in await rich.charges(NOW, NOW)
    shop.answer = [CheckLine(name=value, ok=value, detail=value, hint=value)]
    if not isinstance(value, Nasty):
        (line,) = await rich.check()
        assert type(line.ok) is bool


async def test_a_balance_that_never_comes_is_given_up() -> None:
    clock = VirtualClock()

    class Silent(Rich):
        async def balance(self) -> Any:
            await anyio.sleep_forever()

    rich = guarded(Silent(clock), clock=clock, log=Log())
    assert isinstance(rich, KnowsBalance)
    with pytest.raises(errors.Unavailable, match="no answer within 60 s"):
        await rich.balance()


def test_a_call_that_a_plugin_cancels_itself_does_not_end_the_task_that_polls_it() -> None:
    class Cancelling(Shop):
        async def instances(self) -> Listing:
            raise asyncio.CancelledError

    async def story() -> None:
        clock = VirtualClock()
        with pytest.raises(errors.ProviderError, match="cancelled its own call"):
            await guarded(Cancelling(clock), clock=clock, log=Log()).instances()
        with anyio.move_on_after(0.01) as scope:
            await guarded(Hanging(clock), clock=clock, log=Log()).instances()
        assert scope.cancelled_caught

    class Hanging(Shop):
        async def instances(self) -> Listing:
            await anyio.sleep_forever()
            raise AssertionError

    anyio.run(story)


def test_a_subclass_of_an_error_keeps_its_leafs_meaning() -> None:
    class MyNoCapacity(errors.NoCapacity):
        pass

    assert type(_sane(MyNoCapacity("sold out"))) is errors.NoCapacity


def test_a_secret_that_a_provider_quotes_is_hidden_in_errors_machines_and_logs() -> None:
    """Whatever an adapter does: a host may print the login with which its image was pulled."""
    password = "canary-of-the-registry"
    redactor = Redactor()
    redactor.register([password])

    class Quoting(Rich):
        async def instances(self) -> Listing:
            found = await super().instances()
            return replace(found, instances=tuple(replace(i, detail=f"-p {password}") for i in found.instances))

        async def find(self, key: AttemptKey) -> tuple[Instance, ...]:
            return (await self.instances()).instances

        async def launch(self, request: LaunchRequest) -> Launched:
            if request.image == "refused":
                raise errors.RequestRejected(f"no {password}", field="login", reason=password)
            made = await super().launch(request)
            return Launched(instance=replace(made.instance, detail=password))

        async def logs(self, ref: InstanceRef, *, lines: int) -> list[str]:
            return [f"docker login -p {password}"]

    async def story() -> None:
        clock = VirtualClock()
        plugin = Quoting(clock)
        shown = guarded(plugin, clock=clock, log=Log(), hide=redactor.clean)
        request = LaunchRequest(
            key=AttemptKey("spotd-lab-j1-1"),
            install=InstallId("lab"),
            offer=offer(),
            price_max=MicroUsdPerHour(10**6),
            image="scratch",
            disk_gb=1,
            start_script="",
        )
        made = await shown.launch(request)
        with pytest.raises(errors.RequestRejected) as refused:
            await shown.launch(replace(request, image="refused"))
        assert isinstance(shown, ReadsLogs)
        texts = [
            repr(made),
            repr(await shown.instances()),
            repr(await shown.find(request.key)),
            repr(await shown.logs(made.instance.ref, lines=5)),
            f"{refused.value}{refused.value.reason}",
        ]
        assert len((await shown.instances()).instances) == 1
        for text in texts:
            assert password not in text
            assert HIDDEN in text

    anyio.run(story)


GOOD_TRAITS = ProviderTraits(start_script_bytes_max=4096)


@pytest.mark.parametrize("field", list(ProviderTraits.__dataclass_fields__))
def test_traits_that_are_none_are_refused(field: str) -> None:
    assert plugin_values.traits(GOOD_TRAITS) is GOOD_TRAITS
    for value in (None, -1, 1.5, float("nan"), timedelta(days=-1), timedelta.max, HUGE, "a\x00"):
        odd: dict[str, Any] = {field: value}
        with pytest.raises(plugin_fields.MalformedValue):
            plugin_values.traits(replace(GOOD_TRAITS, **odd))
    with pytest.raises(plugin_fields.MalformedValue):
        plugin_values.traits(None)


def test_what_is_in_order_is_handed_on_as_it_is() -> None:
    whole = replace(
        BAD_OFFER, region="Texas, US", cpus=8, memory_mb=1000, reliability=0.99, cuda_max="12.4",
        on_demand_price=MicroUsdPerHour(5), extra={"ask": "7"}, duration_max=timedelta(days=3), capacity_score=9,
        speed_score=98.4,
    )  # fmt: skip
    assert plain_offers(page(whole)).offers[0] is whole


def test_benchmarks_that_are_none_are_left_out_and_cost_no_offer() -> None:
    good = Benchmark(test="t", gpu="H100_SXM", score=3.0)
    scores: list[Any] = [0, -1, float("nan"), 1e300, "x", None]
    odd = [replace(good, score=score) for score in scores]
    stated: list[Any] = [(good, *odd, None, 7), [good], [*odd, good]]
    for some in stated:
        found = plain_offers(replace(page(BAD_OFFER), benchmarks=some))
        assert (found.benchmarks, len(found.offers)) == ((good,), 1)
    none: list[Any] = [None, 7, "x", {}, object()]
    for some in none:
        assert plain_offers(replace(page(BAD_OFFER), benchmarks=some)).benchmarks == ()


class Misdescribed:
    """A plugin whose description fails."""

    name = BAD
    title = "bad"
    settings_model = None
    needs_credential = False

    def __init__(self, traits: Callable[[], Any]) -> None:
        self._traits = traits

    def traits(self, settings: Any) -> Any:
        return self._traits()


@pytest.mark.parametrize(
    "traits",
    [
        raises(KeyError("x")),
        lambda: None,
        lambda: replace(GOOD_TRAITS, default_fee_multiplier="NaN"),
        lambda: replace(GOOD_TRAITS, default_fee_multiplier="1e308"),
        lambda: replace(GOOD_TRAITS, default_fee_multiplier=1.2),  # type: ignore[arg-type]  # the point
        lambda: replace(GOOD_TRAITS, default_fee_multiplier="-1"),
    ],
    ids=["fails", "none", "nan", "huge", "a-float", "negative"],
)
def test_a_plugin_that_cannot_describe_itself_is_not_used_and_the_daemon_starts(traits: Callable[[], Any]) -> None:
    common = SimpleNamespace(
        api_key=None, fee_multiplier=None, poll_every=None, machines_every=None, owned=None, enabled=True
    )
    one = SimpleNamespace(name=BAD, common=common, plugin=Misdescribed(traits), settings={})
    config = SimpleNamespace(daemon=SimpleNamespace(poll_every=timedelta(minutes=1), machines_every=timedelta(12)))
    settings = main.provider_settings(one, config, {})  # type: ignore[arg-type]  # what of them is read
    assert (settings.fee_ppm, "a bug in it" in settings.last_error) == (1_000_000, True)
