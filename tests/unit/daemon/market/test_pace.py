"""How long a poller waits: the pace is a promise to the user, and a rest that a provider asked for is one to it."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import cast

import anyio
import pytest

from spotd.daemon.commits import never
from spotd.daemon.controllers import WakeEvent
from spotd.daemon.market.offer_cache import OfferCache
from spotd.daemon.market.pollers import HourlyRate, Poller, PollPace
from spotd.daemon.market.supervisor import ProviderSupervisor
from spotd.daemon.policy import ProviderSettings, Settings
from spotd_jobs.objects.folder import FolderStore
from spotd_providers.contract.errors import AuthFailed, ProviderError, RateLimited, Unavailable
from spotd_providers.contract.provider import ProviderPlugin, ProviderTraits
from spotd_providers.contract.values import Listing, OfferPage, OfferQuery
from tests.unit.core.builders import INSTALL, SHOP
from tests.unit.daemon.clocks import VirtualClock
from tests.unit.daemon.rig import Log
from tests.unit.daemon.shop import Shop

pytestmark = pytest.mark.anyio
MINUTE = timedelta(minutes=1)
EVERY_MINUTE = PollPace(poll_every=MINUTE)


class Asked(Shop):
    """Notes when it is asked for its offers."""

    def __init__(self, clock: VirtualClock) -> None:
        super().__init__(clock)
        self.clock = clock
        self.asked_s: list[float] = []
        self.answers_whole = True

    async def offers(self, query: OfferQuery) -> OfferPage:
        self.asked_s.append(anyio.current_time())
        page = await super().offers(query)
        return page if self.answers_whole else replace(page, complete=False)


async def ring_often(poller: Poller) -> None:
    while True:
        await anyio.sleep(1)
        poller.ask_again()


async def pauses_s(shop: Asked, *, hours: float, pace: PollPace = EVERY_MINUTE) -> list[float]:
    """Seconds between one question and the next."""
    offer_cache = OfferCache(WakeEvent())
    offer_cache.open(shop.name)
    poller = Poller(
        shop,
        offer_cache=offer_cache,
        clock=shop.clock,
        rng=Random(1),
        log=Log(),
        pace=pace,
        query=OfferQuery,
        crash=never,
    )
    async with anyio.create_task_group() as group:
        if pace.offers_every_min:
            group.start_soon(ring_often, poller)
        with anyio.move_on_after(hours * 3600):
            await poller.offers.run()
        group.cancel_scope.cancel()
    return [after - before for before, after in pairwise(shop.asked_s)]


async def test_a_poll_never_comes_later_than_its_interval_and_not_always_at_the_same_moment() -> None:
    pauses = await pauses_s(Asked(VirtualClock()), hours=3)
    assert len(pauses) > 100
    assert all(0.9 * 60 <= pause <= 60 for pause in pauses), pauses
    assert len({round(pause) for pause in pauses}) > 3


async def test_a_clock_that_runs_fast_makes_no_pause_longer_where_part_of_a_market_is_known() -> None:
    shop = Asked(VirtualClock(speed=10_000.0))
    shop.answers_whole = False
    pauses = await pauses_s(shop, hours=0.02, pace=PollPace(poll_every=50 * MINUTE))
    assert len(pauses) > 50
    assert max(pauses) <= 0.6, pauses


async def test_a_marketplace_that_counts_questions_is_asked_evenly_and_not_more_often_than_it_answers() -> None:
    hasty = PollPace(poll_every=timedelta(seconds=5), offers_every_min=timedelta(seconds=15))
    pauses = await pauses_s(Asked(VirtualClock()), hours=1, pace=hasty)
    assert len(pauses) > 100
    assert set(pauses) == {15.0}


@pytest.mark.parametrize(
    ("failure", "least_s"),
    [
        pytest.param(RateLimited("slow down", retry_after=timedelta(seconds=90)), 90, id="longer-than-the-pace"),
        pytest.param(RateLimited("slow down", retry_after=timedelta(seconds=60)), 60, id="as-long-as-the-pace"),
        pytest.param(Unavailable("down"), 60, id="away"),
        pytest.param(AuthFailed("no"), 60, id="refused"),
    ],
)
async def test_a_failing_provider_is_never_asked_again_before_its_rest_is_over(
    failure: ProviderError, least_s: float
) -> None:
    shop = Asked(VirtualClock())
    shop.always["offers"] = failure
    pauses = await pauses_s(shop, hours=3)
    assert len(pauses) > 10
    assert all(pause >= least_s for pause in pauses), pauses


class Listed(Shop):
    """Notes when it is asked for its machines."""

    def __init__(self, clock: VirtualClock) -> None:
        super().__init__(clock)
        self.listed_s: list[float] = []

    async def instances(self) -> Listing:
        self.listed_s.append(anyio.current_time())
        return await super().instances()


async def ring_for_machines(poller: Poller, *, every_s: float) -> None:
    while True:
        await anyio.sleep(every_s)
        poller.list_again()


async def lists_s(
    shop: Listed, *, minutes: float, pace: PollPace = EVERY_MINUTE, rings_every_s: float = 0.0, watched: bool = True
) -> list[float]:
    """Seconds between one list of the machines and the next."""
    clock = VirtualClock()
    offer_cache = OfferCache(WakeEvent())
    offer_cache.open(shop.name)
    offer_cache.watched = frozenset({shop.name} if watched else ())
    poller = Poller(
        shop, offer_cache=offer_cache, clock=clock, rng=Random(1), log=Log(), pace=pace, query=OfferQuery, crash=never
    )
    async with anyio.create_task_group() as group:
        if rings_every_s:
            group.start_soon(lambda: ring_for_machines(poller, every_s=rings_every_s))
        with anyio.move_on_after(minutes * 60):
            await poller.machines.run()
        group.cancel_scope.cancel()
    return [after - before for before, after in pairwise(shop.listed_s)]


async def test_machines_are_listed_every_twelve_seconds_while_any_lives_and_seldom_otherwise() -> None:
    pauses = await lists_s(Listed(VirtualClock()), minutes=30)
    assert 150 <= len(pauses) <= 170, len(pauses)
    assert max(pauses) <= 12.3
    assert len(await lists_s(Listed(VirtualClock()), minutes=30, watched=False)) == 2


async def test_machines_are_never_listed_less_often_than_prices_nor_more_often_than_the_provider_allows() -> None:
    hasty = PollPace(poll_every=timedelta(seconds=5))
    assert max(await lists_s(Listed(VirtualClock()), minutes=5, pace=hasty)) <= 5.3
    counted = PollPace(poll_every=MINUTE, machines_every_min=timedelta(seconds=30))
    assert min(await lists_s(Listed(VirtualClock()), minutes=30, pace=counted)) >= 27
    assert min(await lists_s(Listed(VirtualClock()), minutes=30, pace=counted, rings_every_s=0.5)) >= 27


async def test_a_list_that_is_asked_for_comes_within_seconds_and_fifteen_times_a_minute_at_most() -> None:
    pauses = await lists_s(Listed(VirtualClock()), minutes=10, rings_every_s=0.1)
    assert all(4 <= pause <= 4.5 for pause in pauses), pauses


@pytest.mark.parametrize(
    ("failure", "least_s", "most_s"),
    [
        pytest.param(RateLimited("slow down", retry_after=timedelta(seconds=90)), 90, 100, id="a-rest"),
        pytest.param(RateLimited("slow down", retry_after=timedelta(days=1)), 290, 301, id="a-rest-of-a-day"),
        pytest.param(AuthFailed("no"), 50, 60, id="refused"),
        pytest.param(Unavailable("down"), 4, 265, id="away"),
    ],
)
async def test_a_provider_that_wants_a_rest_gets_it_but_its_machines_are_listed_within_minutes(
    failure: ProviderError, least_s: float, most_s: float
) -> None:
    shop = Listed(VirtualClock())
    shop.always["instances"] = failure
    pauses = await lists_s(shop, minutes=60, rings_every_s=0 if isinstance(failure, Unavailable) else 1)
    assert len(pauses) > 4
    assert all(least_s <= pause <= most_s for pause in pauses), pauses


def test_a_provider_is_asked_as_often_as_the_config_says_and_as_seldom_as_its_plugin_wants(tmp_path: Path) -> None:
    plugin = SimpleNamespace(
        traits=lambda _: ProviderTraits(
            start_script_bytes_max=4096, offers_every_min=timedelta(seconds=4), machines_every_min=timedelta(seconds=3)
        )
    )
    one = ProviderSettings(
        name=SHOP,
        title="the shop",
        enabled=True,
        fee_ppm=1_000_000,
        poll_every=timedelta(seconds=45),
        machines_every=timedelta(seconds=20),
        plugin=cast("ProviderPlugin", plugin),
    )
    supervisor = ProviderSupervisor(
        Settings(
            install=INSTALL,
            state_dir=tmp_path,
            state_url=":memory:",
            socket=tmp_path / "socket",
            store_place="",
            open_objects=lambda: FolderStore(tmp_path),
            providers=(one,),
        ),
        offer_cache=OfferCache(WakeEvent()),
        clock=VirtualClock(),
        seed=1,
        log=Log(),
        crash=never,
        world=lambda: None,
        account_known=lambda _provider, _account: None,
    )
    assert supervisor._pace(one) == PollPace(
        poll_every=timedelta(seconds=45),
        machines_every=timedelta(seconds=20),
        offers_every_min=timedelta(seconds=4),
        machines_every_min=timedelta(seconds=3),
    )


def test_requests_are_counted_by_the_hour_and_projected_before_one_has_passed() -> None:
    at = datetime(2026, 3, 2, tzinfo=UTC)
    request_counts = HourlyRate()
    for minute in range(10):
        request_counts.note(5 * (minute + 1), at=at + minute * MINUTE)
    now = at + 10 * MINUTE
    assert (request_counts.per_hour(now), request_counts.last_minute(now)) == (300, 0)
    assert request_counts.last_minute(now - timedelta(seconds=1)) == 5
    request_counts.note(3, at=now)  # it was opened anew: its own count began again
    assert request_counts.last_minute(now) == 3
    request_counts.note(4, at=at - timedelta(hours=8))  # the clock was set back
    assert request_counts.per_hour(at - timedelta(hours=8)) >= 1
    later = now + timedelta(hours=9)
    request_counts.note(5, at=later)
    assert request_counts.per_hour(later) == 1
