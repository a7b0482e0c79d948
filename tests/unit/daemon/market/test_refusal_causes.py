"""What made a provider refuse launches is asked about within a minute, and the job goes on when it is over."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import anyio
import pytest

from spotd.core.domain.cooldowns import Cooldown, CooldownEnd, CooldownScope
from spotd.core.domain.jobs import Job
from spotd.core.domain.world import World
from spotd.daemon.controllers import WakeEvent
from spotd.daemon.market import offer_cache as refusal_causes
from spotd.daemon.market.offer_cache import CauseWatch, Evidence, OfferCache
from spotd_providers.contract.errors import AuthFailed, NoBalance, OfferGone, ProviderError, RateLimited, Unavailable
from spotd_providers.contract.values import Balance, Capability, MicroUsd, MicroUsdPerHour, Power
from tests.unit.core.builders import NOW, SHOP, job, market, offer, shop_policy
from tests.unit.daemon.clocks import VirtualClock
from tests.unit.daemon.rig import Rig
from tests.unit.daemon.shop import Shop

pytestmark = pytest.mark.anyio
MINUTE = timedelta(minutes=1)


class Prepaid(Shop):
    """Sells nothing without credit."""

    credit = 0

    @property
    def capabilities(self) -> Mapping[Power, Capability]:
        return {**super().capabilities, Power.BALANCE: Capability(available=True)}

    async def balance(self) -> Balance:
        await self._enter("balance", lambda: None)
        return Balance(available=MicroUsd(self.credit))


@pytest.fixture
def virtual() -> VirtualClock:
    return VirtualClock()


@pytest.fixture
def prepaid(tmp_path: Path, virtual: VirtualClock) -> Rig:
    return Rig(tmp_path, clock=virtual, shops=[Prepaid(virtual)])


async def refused_for(rig: Rig, span: timedelta, error: ProviderError, item: Job | None = None) -> None:
    """The job's launches are refused for so long."""
    rig.shop.always["launch"] = error
    name = await rig.submit(item)
    began = rig.clock.now()
    await rig.until(lambda: rig.clock.now() - began >= span, within=span + MINUTE)
    assert rig.shop.counts["launch"] >= 1 or isinstance(rig.shop, Prepaid)
    assert not rig.shop.alive()
    del name


@pytest.mark.lengthy
async def test_an_account_that_was_filled_after_hours_launches_within_a_minute(prepaid: Rig) -> None:
    async with prepaid.ready():
        await refused_for(prepaid, timedelta(hours=3), NoBalance("no credit"))
        assert prepaid.shop.counts["launch"] <= 3 * 5 + 5
        prepaid.shop.always.clear()
        assert isinstance(prepaid.shop, Prepaid)
        prepaid.shop.credit = 20_000_000
        filled_at = prepaid.clock.now()
        await prepaid.until(lambda: bool(prepaid.shop.alive()), within=timedelta(minutes=2))
        assert prepaid.clock.now() - filled_at <= MINUTE


async def test_a_key_that_works_again_launches_within_a_minute(rig: Rig) -> None:
    async with rig.ready():
        rig.shop.always["instances"] = rig.shop.always["offers"] = AuthFailed("the key was revoked")
        await refused_for(rig, timedelta(hours=1), AuthFailed("the key was revoked"))
        assert rig.shop.counts["launch"] <= 6
        rig.shop.always.clear()
        mended_at = rig.clock.now()
        await rig.until(lambda: bool(rig.shop.alive()), within=timedelta(hours=1))
        assert rig.clock.now() - mended_at <= MINUTE


async def test_an_offer_that_was_gone_once_is_bought_when_the_next_list_shows_it(
    tmp_path: Path, virtual: VirtualClock
) -> None:
    rig = Rig(tmp_path, clock=virtual, shops=[Shop(virtual, offers=[offer("only")])])
    async with rig.ready():
        rig.shop.faults["launch"] = deque([OfferGone("no_such_ask")])
        await rig.submit()
        began = rig.clock.now()
        await rig.until(lambda: bool(rig.shop.alive()), within=timedelta(minutes=20))
        assert rig.clock.now() - began <= MINUTE


async def test_nothing_but_the_balance_is_asked_while_nothing_is_refused_and_that_seldom(prepaid: Rig) -> None:
    async with prepaid.ready():
        began = prepaid.clock.now()
        await prepaid.until(lambda: prepaid.clock.now() - began >= timedelta(hours=1))
        assert 1 <= prepaid.shop.counts["balance"] <= 7


async def test_a_balance_that_carries_no_useful_run_keeps_its_job_waiting_until_money_was_added(prepaid: Rig) -> None:
    assert isinstance(prepaid.shop, Prepaid)
    prepaid.shop.credit = 10_000
    async with prepaid.ready():
        await prepaid.until(lambda: prepaid.shop.counts["balance"] >= 1)
        name = await prepaid.submit()
        began = prepaid.clock.now()
        await prepaid.until(lambda: prepaid.clock.now() - began >= timedelta(hours=1))
        assert prepaid.shop.counts["launch"] == 0
        why = await prepaid.handlers().jobs.why(name)
        assert (why["kind"], why["state"]) == ("balance", "QUEUED")
        assert why["sentence"].startswith(
            "the balance at shop leaves $0.01 for a launch: a useful run of 1 x RTX_4090 at"
        )
        [row] = await prepaid.handlers().health.providers()
        assert (row["balance_usd"], row["spend_usd_h"], row["runway_s"]) == (0.01, 0.0, None)
        prepaid.shop.credit = 20_000_000
        filled_at = prepaid.clock.now()
        await prepaid.until(lambda: bool(prepaid.shop.alive()), within=timedelta(minutes=2))
        assert prepaid.clock.now() - filled_at <= MINUTE
        await prepaid.until(lambda: prepaid.attempts(name)[0].meter.since is not None)
        [row] = await prepaid.handlers().health.providers()
        assert row["balance_usd"] == 20.0
        assert row["spend_usd_h"] > 0
        assert row["runway_s"] == pytest.approx(20.0 / row["spend_usd_h"] * 3600)


@pytest.mark.parametrize("answer", [Unavailable("away"), RateLimited("slow", retry_after=timedelta(hours=1))])
async def test_a_balance_that_cannot_be_asked_changes_nothing(prepaid: Rig, answer: ProviderError) -> None:
    prepaid.shop.always["balance"] = answer
    async with prepaid.ready():
        await prepaid.submit()
        await prepaid.until(lambda: bool(prepaid.shop.alive()), within=timedelta(minutes=2))


@pytest.mark.parametrize("value", [float("nan"), 1e308, "$5", None, True, 10**30], ids=str)
async def test_a_balance_that_is_no_amount_changes_nothing(prepaid: Rig, value: Any) -> None:
    assert isinstance(prepaid.shop, Prepaid)
    prepaid.shop.credit = value
    async with prepaid.ready():
        await prepaid.submit()
        await prepaid.until(lambda: bool(prepaid.shop.alive()), within=timedelta(minutes=2))
        [row] = await prepaid.handlers().health.providers()
        assert (row["balance_usd"], row["balance_at"], row["runway_s"]) == (None, None, None)


def test_a_debt_is_nothing_left() -> None:
    seen = Evidence()
    assert seen.balance_stated(SHOP, Balance(available=MicroUsd(-5)), NOW)
    assert not seen.balance_stated(SHOP, Balance(available=MicroUsd(-9)), NOW)
    stated = seen.stated_balance(SHOP)
    assert stated is not None
    assert stated[0].available == 0
    assert seen.balance_stated(SHOP, Balance(available=MicroUsd(1)), NOW)


@pytest.mark.long
async def test_a_key_that_may_list_and_not_buy_is_tried_seldom(rig: Rig) -> None:
    async with rig.ready():
        await refused_for(rig, timedelta(hours=2), AuthFailed("this key may not rent"))
        assert rig.shop.counts["launch"] <= 12


@pytest.mark.parametrize("error", [RateLimited("slow down", retry_after=timedelta(days=1)), AuthFailed("no")])
async def test_a_provider_that_does_not_say_is_asked_again_within_minutes(error: ProviderError) -> None:
    clock, offer_cache = VirtualClock(), OfferCache(WakeEvent())
    shop = Prepaid(clock)
    offer_cache.open(shop.name)
    offer_cache.evidence.awaited = {SHOP: frozenset({CooldownEnd.CREDIT, CooldownEnd.KEY})}
    shop.always["balance"] = error
    watch = CauseWatch(shop, offer_cache=offer_cache, clock=clock, ask_again=lambda: None)
    assert timedelta(seconds=30) <= await watch.ask() <= timedelta(minutes=5)


@pytest.mark.parametrize("error", [RateLimited("slow down", retry_after=timedelta(minutes=1)), AuthFailed("no")])
async def test_the_key_is_tried_although_the_balance_is_not_stated(error: ProviderError) -> None:
    clock, offer_cache = VirtualClock(), OfferCache(WakeEvent())
    shop = Prepaid(clock)
    offer_cache.open(shop.name)
    offer_cache.evidence.awaited = {SHOP: frozenset({CooldownEnd.KEY})}
    offer_cache.evidence.waits_for_balance = True
    shop.always["balance"] = error
    shop.always["instances"] = AuthFailed("the key was revoked")
    asked: list[bool] = []
    watch = CauseWatch(shop, offer_cache=offer_cache, clock=clock, ask_again=lambda: asked.append(True))
    await watch.ask()
    del shop.always["instances"]
    await watch.ask()
    assert asked == [True]


async def test_the_key_is_tried_although_the_balance_is_never_answered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(refusal_causes, "ASK_DEADLINE_S", 0.05)
    clock, offer_cache = VirtualClock(), OfferCache(WakeEvent())
    shop = Prepaid(clock)
    offer_cache.open(shop.name)
    offer_cache.evidence.awaited = {SHOP: frozenset({CooldownEnd.KEY})}
    monkeypatch.setattr(shop, "balance", anyio.sleep_forever)
    await CauseWatch(shop, offer_cache=offer_cache, clock=clock, ask_again=lambda: None).ask()
    assert shop.counts["instances"] == 1


async def test_the_balance_of_a_former_key_holds_nothing_back(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, offer_cache = VirtualClock(), OfferCache(WakeEvent())
    shop = Prepaid(clock)
    offer_cache.open(shop.name)
    offer_cache.evidence.balance_stated(SHOP, Balance(available=MicroUsd(0)), clock.now())
    shop.always["balance"] = AuthFailed("this key may not read the account")
    await CauseWatch(shop, offer_cache=offer_cache, clock=clock, ask_again=lambda: None).reconcile_once()
    assert offer_cache.snapshot().by_provider[SHOP].balance is None


def test_a_balance_counts_as_risen_only_when_it_has() -> None:
    seen = Evidence()
    assert not seen.credit_seen(SHOP, MicroUsd(0), NOW)
    assert seen.credit_seen(SHOP, MicroUsd(5), NOW)
    assert not seen.credit_seen(SHOP, MicroUsd(5), NOW)
    assert not seen.credit_seen(SHOP, MicroUsd(4), NOW)
    assert seen.credit_seen(SHOP, MicroUsd(6), NOW)


def test_the_lowest_price_of_a_kind_is_kept_for_a_week() -> None:
    seen = Evidence()
    for usd, day in ((4, 0), (1, 1), (3, 2)):
        seen.prices_seen(market(offer(price=usd)).by_provider[SHOP].offer_index, NOW + timedelta(days=day))
    assert seen.lows() == {("RTX_4090", 1): MicroUsdPerHour(1)}
    seen.prices_seen(market(offer(price=3)).by_provider[SHOP].offer_index, NOW + timedelta(days=9))
    assert seen.lows() == {("RTX_4090", 1): MicroUsdPerHour(3)}
    assert job().budget is None


def test_a_balance_of_long_ago_does_not_hide_that_the_account_was_filled() -> None:
    seen = Evidence()
    rich = MicroUsd(100_000_000)
    assert seen.credit_seen(SHOP, rich, NOW)
    waits = World(policy=shop_policy(), jobs={}, attempts={}, intents={})
    seen.update(waits, NOW)
    cooling = Cooldown(
        provider=SHOP,
        scope=CooldownScope.PROVIDER,
        subject="",
        until=NOW + timedelta(days=9),
        reason="no credit",
        since=NOW,
        ends=CooldownEnd.CREDIT,
    )
    seen.update(replace(waits, cooldowns=(cooling,)), NOW)
    assert seen.credit_seen(SHOP, MicroUsd(20_000_000), NOW), "spent and filled again before the first question"
    seen.update(replace(waits, cooldowns=(cooling,)), NOW)
    assert not seen.credit_seen(SHOP, MicroUsd(20_000_000), NOW)
