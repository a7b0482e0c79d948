"""The history beside the running daemon: fed by every poll, asked through the API, and never in anybody's way."""

from __future__ import annotations

import threading
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path

import anyio
import pytest
from anyio import from_thread

from spotd.api.requests import HistoryQuery, PriceQuery
from spotd.api.responses import ApiUnavailable, Invalid
from spotd.core.domain.states import JobState
from spotd.daemon.clock import SystemClock
from spotd.daemon.market.price_recorder import PriceRecorder
from spotd.history import History
from spotd_providers.contract.values import MicroUsdPerHour, OfferId
from tests.unit.core.builders import SHOP, job
from tests.unit.daemon.rig import Log, Rig

pytestmark = pytest.mark.anyio
HOUR = timedelta(hours=1)


async def kept(rig: Rig) -> None:
    """The history runs beside the rest, until it is cancelled."""
    await rig.price_recorder.run()


async def test_what_was_polled_can_be_asked_for(rig: Rig) -> None:
    async with rig.ready(), anyio.create_task_group() as group:
        group.start_soon(kept, rig)
        await rig.clock.sleep(HOUR)
        rig.shop.offer_index[0] = replace(rig.shop.offer_index[0], gpu_price=MicroUsdPerHour(100_000))
        await rig.clock.sleep(HOUR)
        shown = await rig.handlers().prices.quotes(PriceQuery(gpu="4090"))
        since = rig.clock.now() - 2 * HOUR
        found = await rig.handlers().prices.history(HistoryQuery(gpu="rtx 4090", since=since, every_s=3600))
        (prices,) = found["prices"]
        assert (prices["gpu"], prices["market"], found["bucket_s"], found["trouble"]) == ("RTX_4090", "spot", 3600, "")
        assert prices["buckets"][-1]["low_usd_gpu_h"] == shown["quotes"][0]["effective_usd_gpu_h"]
        assert prices["buckets"][0]["low_usd_gpu_h"] > prices["buckets"][-1]["low_usd_gpu_h"]
        assert prices["buckets"][-1]["offers"] == pytest.approx(2.0, abs=0.05)
        one = await rig.handlers().prices.history(HistoryQuery(provider=SHOP, offer="o2"))
        assert one["prices"][0]["buckets"][-1]["offers"] == pytest.approx(1.0, abs=0.05)
        group.cancel_scope.cancel()


async def test_what_is_sold_as_several_machines_only_is_shown_so_and_is_no_part_of_the_history(rig: Rig) -> None:
    async with rig.ready(), anyio.create_task_group() as group:
        group.start_soon(kept, rig)
        gangs = replace(rig.shop.offer_index[0], offer_id=OfferId("gangs"), nodes_min=2)
        rig.shop.offer_index.append(replace(gangs, gpu_price=MicroUsdPerHour(10_000), on_demand_price=None))
        await rig.clock.sleep(HOUR)
        (shown, *_) = (await rig.handlers().prices.quotes(PriceQuery(gpu="4090")))["quotes"]
        assert (shown["offer"], shown["nodes"], shown["gpu_count"]) == ("gangs", 2, 2)
        assert shown["effective_usd_h"] == pytest.approx(2 * 0.01, rel=0.5)
        found = await rig.handlers().prices.history(HistoryQuery(gpu="rtx 4090", since=rig.clock.now() - HOUR))
        assert all(bucket["low_usd_gpu_h"] > 0.1 for bucket in found["prices"][0]["buckets"])
        group.cancel_scope.cancel()


@pytest.mark.parametrize(
    ("query", "message"),
    [
        (HistoryQuery(gpu="H1000"), "no GPU is known"),
        (HistoryQuery(provider="nobody"), "there is no provider"),
    ],
    ids=["gpu", "provider"],
)
async def test_what_nobody_sells_is_refused(rig: Rig, query: HistoryQuery, message: str) -> None:
    async with rig.ready():
        with pytest.raises(Invalid, match=message):
            await rig.handlers().prices.history(query)


async def test_a_range_that_ends_before_it_begins_is_refused(rig: Rig) -> None:
    async with rig.ready():
        now = rig.clock.now()
        with pytest.raises(Invalid, match="ends before it begins"):
            await rig.handlers().prices.history(HistoryQuery(since=now, until=now - HOUR))


async def test_a_disk_without_room_holds_the_history_and_nothing_else(rig: Rig) -> None:
    rig.history._free_bytes = lambda _: 1_000_000
    async with rig.ready(), anyio.create_task_group() as group:
        group.start_soon(kept, rig)
        job_id = await rig.submit(job())
        await rig.until_state(job_id, JobState.STARTING)
        await rig.clock.sleep(HOUR / 12)
        assert "only 1 MB are free" in rig.price_recorder.last_error
        assert rig.log.events().count("history.held") == 1
        rows = {row["name"]: row for row in (await rig.handlers().doctor.report())["checks"]}
        assert not rows["price history"]["ok"]
        rig.history._free_bytes = lambda _: 10**12
        await rig.until(lambda: not rig.price_recorder.last_error)
        assert rig.log.events().count("history.back") == 1
        rows = {row["name"]: row for row in (await rig.handlers().doctor.report())["checks"]}
        assert rows["price history"]["ok"]
        group.cancel_scope.cancel()


async def test_a_damaged_file_is_told_in_the_log_and_as_an_event(rig: Rig) -> None:
    (rig.folder / "prices.sqlite").write_bytes(b"no database" * 1000)
    async with rig.ready(), anyio.create_task_group() as group:
        group.start_soon(kept, rig)
        await rig.until(lambda: "history.set_aside" in rig.kinds())
        assert rig.log.events().count("history.set_aside") == 1
        assert (rig.folder / "prices.sqlite.damaged").exists()
        group.cancel_scope.cancel()


async def test_a_defect_of_the_history_ends_no_task(rig: Rig, tmp_path: Path) -> None:
    async with rig.ready(), anyio.create_task_group() as group:
        rig.history.step = lambda now: now < 1 // 0  # type: ignore[method-assign]  # a defect, planted
        group.start_soon(kept, rig)
        job_id = await rig.submit(job())
        await rig.until_state(job_id, JobState.STARTING)
        await rig.clock.sleep(HOUR / 12)
        assert rig.log.events().count("history.failed") == 1
        assert "ZeroDivisionError" in rig.price_recorder.last_error
        group.cancel_scope.cancel()


async def test_a_file_that_cannot_be_opened_is_told_to_whoever_asks(rig: Rig) -> None:
    (rig.folder / "prices.sqlite").mkdir()
    async with rig.ready():
        with pytest.raises(ApiUnavailable, match=r"prices\.sqlite"):
            await rig.handlers().prices.history(HistoryQuery())


def test_the_file_is_closed_after_the_call_that_its_end_has_left_behind(tmp_path: Path) -> None:
    """SQLite's driver does not survive a connection that is closed during a statement of another thread."""
    order: list[str] = []
    goes_on = threading.Event()

    class Slow(History):
        def step(self, now: int) -> bool:
            from_thread.run_sync(begun.set)
            goes_on.wait(10)
            order.append("step")
            return False

        def close(self) -> None:
            order.append("close")

    async def ends_during_a_step() -> None:
        recorder = PriceRecorder(Slow(tmp_path / "p.sqlite"), clock=SystemClock(), log=Log(), note=lambda *_: None)
        recorder.controller.wake_event.notify()
        async with anyio.create_task_group() as group:
            group.start_soon(recorder.run)
            await begun.wait()
            threading.Timer(0.05, goes_on.set).start()
            group.cancel_scope.cancel()

    begun = anyio.Event()
    anyio.run(ends_during_a_step)
    assert order == ["step", "close"]


async def test_what_was_offered_before_a_restart_is_recalled(rig: Rig) -> None:
    seen: list[tuple[object, object, datetime]] = []
    async with rig.ready(), anyio.create_task_group() as group:
        group.start_soon(kept, rig)
        await rig.clock.sleep(HOUR / 12)
        await rig.price_recorder.recall([SHOP], lambda *one: seen.append((one[0], one[1], one[2])))
        [(provider, kinds, at)] = seen
        assert (provider, kinds) == (SHOP, (("RTX_4090", 1),))
        assert timedelta(0) <= rig.clock.now() - at < HOUR / 12
        group.cancel_scope.cancel()
