"""A provider that is down, slow or lying is named, and delays neither another's poll nor a launch elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from itertools import pairwise
from pathlib import Path

import pytest

from spotd_providers.contract.errors import Unavailable
from spotd_providers.contract.provider import Clock
from spotd_providers.contract.values import (
    AttemptKey,
    InstanceState,
    Listing,
    OfferId,
    OfferPage,
    OfferQuery,
    ProviderName,
    Rejected,
)
from tests.unit.api.handlers.test_handlers import submitted
from tests.unit.core.builders import SHOP, offer, shop_policy
from tests.unit.daemon.clocks import VirtualClock
from tests.unit.daemon.rig import Rig
from tests.unit.daemon.shop import Shop

pytestmark = pytest.mark.anyio
BAD = ProviderName("bad")
ANSWERS_IN = timedelta(seconds=30)
POLL = timedelta(minutes=1)


class Dated(Shop):
    """Notes when it is asked for its offers and for its machines."""

    def __init__(self, clock: Clock, **more: object) -> None:
        super().__init__(clock, **more)  # type: ignore[arg-type]  # handed on as they are
        self.clock = clock
        self.asked: list[datetime] = []

    async def offers(self, query: OfferQuery) -> OfferPage:
        self.asked.append(self.clock.now())
        return await super().offers(query)


class Slow(Dated):
    """Every answer takes half a minute."""

    async def offers(self, query: OfferQuery) -> OfferPage:
        await self.clock.sleep(ANSWERS_IN)
        return await super().offers(query)

    async def instances(self) -> Listing:
        await self.clock.sleep(ANSWERS_IN)
        return await super().instances()


class Lying(Dated):
    """Rows about prices that mean nothing, a list with a hole, a machine that meditates."""

    async def offers(self, query: OfferQuery) -> OfferPage:
        rows = tuple(Rejected(offer_id=OfferId(f"n{i}"), reason="its price is no number") for i in range(7))
        page = await super().offers(query)
        return replace(page, offers=(), rejected=rows)

    async def instances(self) -> Listing:
        return replace(await super().instances(), complete=False)


def down(clock: VirtualClock) -> Shop:
    shop = Dated(clock, name=BAD)
    shop.always["offers"] = shop.always["instances"] = Unavailable("connection refused")
    return shop


def with_bad(folder: Path, clock: VirtualClock, bad: Shop) -> Rig:
    """A daemon with a good shop and this one, which would be the cheaper if it could be relied on."""
    policy = shop_policy()
    rules = replace(policy.providers[SHOP], name=BAD)
    bad.offer_index = [replace(offer("b1", price=100_000), provider=BAD)]
    policy = replace(policy, providers={**policy.providers, BAD: rules})
    return Rig(folder, clock=clock, shops=[Dated(clock), bad], policy=policy)


CASES = {
    "down": (down, "connection refused", False),
    "slow": (lambda clock: Slow(clock, name=BAD), "has not answered for", False),
    "lying": (lambda clock: Lying(clock, name=BAD), "7 of 7 rows about prices cannot be used", False),
}


@pytest.mark.long
@pytest.mark.parametrize(("make", "named", "ok"), CASES.values(), ids=CASES)
async def test_one_bad_provider_is_named_and_delays_no_poll_and_no_launch_elsewhere(
    make: object, named: str, ok: bool, tmp_path: Path
) -> None:
    clock = VirtualClock()
    bad = make(clock)  # type: ignore[operator]  # one of the makers above
    rig = with_bad(tmp_path, clock, bad)
    good = rig.shop
    assert isinstance(good, Dated)
    async with rig.running():
        job = await submitted(rig)
        asked_at = clock.now()
        await rig.until(lambda: bool(good.alive()))
        assert clock.now() - asked_at <= timedelta(seconds=2), "its launch waited for the other provider"
        await clock.sleep(timedelta(seconds=15))
        (found,) = [row for row in await rig.handlers().health.providers() if row["name"] == BAD]
        assert (found["ok"], named in found["detail"]) == (ok, True), found
        (provider_offers,) = [row for row in (await rig.handlers().jobs.why(job))["offers"] if row["provider"] == BAD]
        assert named in f"{provider_offers['error']}; {provider_offers['note']}"
        (well,) = [row for row in (await rig.handlers().jobs.why(job))["offers"] if row["provider"] == SHOP]
        assert (well["error"], well["note"]) == ("", "")
        await clock.sleep(timedelta(minutes=8))
    assert_in_step(good.asked)


def assert_in_step(asked: Sequence[datetime]) -> None:
    """It was asked at its own pace, whatever the other one did."""
    assert len(asked) >= 8
    pauses = [after - before for before, after in pairwise(asked)]
    assert max(pauses) <= POLL + timedelta(seconds=1), max(pauses)


async def test_a_slow_provider_is_named_between_its_answers_and_its_offers_count(tmp_path: Path) -> None:
    clock = VirtualClock()
    rig = with_bad(tmp_path, clock, Slow(clock, name=BAD))
    async with rig.running():
        await rig.until(lambda: rig.offer_cache.page(BAD) is not None)
        (found,) = [row for row in await rig.handlers().health.providers() if row["name"] == BAD]
        assert (found["ok"], found["offers"]) == (True, 1)
        assert "answers slowly: the newest answer took 30 s" in found["detail"]


async def test_a_list_with_a_hole_and_a_machine_in_no_known_state_are_named(tmp_path: Path) -> None:
    clock = VirtualClock()
    bad = Lying(clock, name=BAD)
    rig = with_bad(tmp_path, clock, bad)
    key = AttemptKey("spotd-lab-j9-1")
    bad.put_machine(key)
    bad.set_state(key, InstanceState.UNKNOWN)
    bad.always["terminate"] = Unavailable("it does not end it either")
    async with rig.running():
        await rig.until(lambda: rig.offer_cache.machines(BAD).listing is not None)
        (found,) = [row for row in await rig.handlers().health.providers() if row["name"] == BAD]
    assert not found["ok"]
    assert "its list of machines is not complete" in found["detail"]
    assert "shows 1 of our machines in no state that is known" in found["detail"]
