"""What a provider is asked for follows the queue, and a new job is not kept waiting by an answer made for others."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from random import Random

import anyio
import pytest

from spotd.core.domain.states import JobState
from spotd.core.domain.world import World
from spotd.daemon.commits import never
from spotd.daemon.controllers import WakeEvent
from spotd.daemon.market.guarded import guarded
from spotd.daemon.market.offer_cache import OfferCache, offer_query
from spotd.daemon.market.pollers import Poller, PollPace
from spotd_jobs.spec.model import GpuAlternative, Resources
from spotd_providers.contract.values import MicroUsdPerGpuHour, OfferPage, OfferQuery
from tests.unit.core.builders import SHOP, job, offer, shop_policy
from tests.unit.daemon.clocks import VirtualClock
from tests.unit.daemon.rig import Log
from tests.unit.daemon.shop import Shop

pytestmark = pytest.mark.anyio


def wants(number: int, *names: str, count: int = 1, state: JobState = JobState.WAITING_PRICE, **more: object) -> World:
    resources = Resources(gpu=tuple(GpuAlternative(name=name, count=count) for name in names), **more)  # type: ignore[arg-type]  # handed on as they are
    one = job(number, resources=resources, state=state)
    return World(policy=shop_policy(), jobs={one.id: one}, attempts={}, intents={})


def together(*worlds: World, **changes: object) -> World:
    jobs = {name: one for world in worlds for name, one in world.jobs.items()}
    return World(policy=shop_policy(**changes), jobs=jobs, attempts={}, intents={})


def test_the_gpus_that_jobs_wait_for_come_before_those_of_jobs_that_run() -> None:
    world = together(wants(1, "RTX_4090", state=JobState.RUNNING), wants(2, "L40S", disk_gb=500))
    asked = offer_query(world, SHOP)
    assert (asked.gpus, asked.disk_gb, asked.gpu_counts, asked.vram_mb_min) == (("L40S", "RTX_4090"), 500, (1,), None)


def test_a_family_is_asked_for_by_its_members_and_a_count_by_itself() -> None:
    asked = offer_query(wants(1, "h100", count=8), SHOP)
    assert set(asked.gpus) == {"H100_SXM", "H100_PCIE", "H100_NVL"}
    assert asked.gpu_counts == (8,)


def test_a_job_without_a_gpus_name_asks_for_memory() -> None:
    asked = offer_query(together(wants(1, min_vram_mb=40_000, gpu_count=2), wants(2, min_vram_mb=24_000)), SHOP)
    assert (asked.gpus, asked.vram_mb_min, asked.gpu_counts) == ((), 24_000, (1, 2))
    assert offer_query(wants(1), SHOP).vram_mb_min == 0


def test_final_jobs_and_jobs_for_other_providers_ask_for_nothing() -> None:
    done = wants(1, "L40S", state=JobState.SUCCEEDED)
    elsewhere = wants(2, "A40", providers=("aws",))
    assert offer_query(together(done, elsewhere), SHOP) == OfferQuery()


def test_ceilings_are_watched_unless_a_job_waits_for_the_same() -> None:
    price = MicroUsdPerGpuHour(1)
    world = together(wants(1, "L40S"), ceilings={"L40S": price, "A40": price, "B200_SXM": price})
    asked = offer_query(world, SHOP)
    assert (asked.gpus, asked.watched) == (("L40S",), ("A40", "B200_SXM"))


class Narrow(Shop):
    """Sells what it is asked for."""

    def __init__(self, clock: VirtualClock) -> None:
        super().__init__(clock, offers=[offer("o1"), replace(offer("o2"), gpu="L40S")])
        self.asked: list[tuple[float, tuple[str, ...]]] = []

    async def offers(self, query: OfferQuery) -> OfferPage:
        self.asked.append((anyio.current_time(), query.gpus))
        return replace(await super().offers(query), offers=tuple(o for o in self.offer_index if o.gpu in query.gpus))


async def test_a_new_jobs_gpu_is_asked_for_within_seconds_where_the_last_answer_was_narrow() -> None:
    clock = VirtualClock()
    shop = Narrow(clock)
    offer_cache = OfferCache(WakeEvent())
    offer_cache.open(shop.name)
    query = [OfferQuery(gpus=("RTX_4090",))]
    poller = Poller(
        shop,
        offer_cache=offer_cache,
        clock=clock,
        rng=Random(1),
        log=Log(),
        pace=PollPace(poll_every=timedelta(minutes=1)),
        query=lambda: query[0],
        crash=never,
    )
    async with anyio.create_task_group() as group:
        group.start_soon(poller.offers.run)
        await anyio.sleep(20)
        query[0] = OfferQuery(gpus=("RTX_4090", "L40S"))
        submitted = anyio.current_time()
        await anyio.sleep(300)
        group.cancel_scope.cancel()
    at, gpus = shop.asked[1]
    assert gpus == ("RTX_4090", "L40S")
    assert at - submitted <= 6
    assert len(shop.asked) <= 8, "the others come at their pace"


async def test_a_plugin_that_narrows_without_saying_so_proves_nothing_about_other_gpus() -> None:
    clock = VirtualClock()
    guard = guarded(Narrow(clock), clock=clock, log=Log())
    assert (await guard.offers(OfferQuery(gpus=("L40S",)))).whole == {("L40S", 0)}
    everything = guarded(Shop(clock, offers=[offer("o1")]), clock=clock, log=Log())
    page = await everything.offers(OfferQuery(gpus=("L40S",)))
    assert (page.complete, page.whole) == (True, frozenset())
