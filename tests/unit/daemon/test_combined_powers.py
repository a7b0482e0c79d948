"""Attacks from the documents: two powers over one machine that runs, and a fault between them."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from spotd.core import relocation
from spotd.core.domain.states import AttemptState, EndReason
from spotd_providers.contract.values import InstanceState, Loss, MicroUsd
from tests.unit.core.builders import MINUTE, offer
from tests.unit.daemon.ledger import BID, KEY, Hosts, Market, at_work, first_runs, rig_of, stop_reasons
from tests.unit.daemon.rig import Rig

pytestmark = pytest.mark.anyio
HOUR = timedelta(hours=1)
HERE, CHEAP = offer("o1"), offer("o2", price=100_000)


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relocation, "DWELL", 3 * MINUTE)
    monkeypatch.setattr(relocation, "_is_worth", lambda _found: True)


def market(rig: Rig) -> Market:
    assert isinstance(rig.shop, Market)
    return rig.shop


async def test_a_move_over_midnight_keeps_the_budget_of_both_days(tmp_path: Path) -> None:
    midnight = datetime(2026, 3, 2, tzinfo=UTC)
    rig = rig_of(tmp_path, at=midnight - 7 * MINUTE, offers=[HERE], moves_max=2, budget_day=MicroUsd(120_000))
    hosts, shop = Hosts(rig, tmp_path), market(rig)
    async with at_work(rig, hosts):
        name = await rig.submit()
        await first_runs(rig, name)
        await rig.until(lambda: rig.clock.now() >= midnight - 2 * MINUTE)
        hosts.deaf = True
        shop.offer_index = [HERE, CHEAP]
        await rig.until(lambda: bool(stop_reasons(rig, name)))
        await rig.until(lambda: rig.clock.now() >= midnight + MINUTE / 2)
        hosts.deaf = False
        await rig.clock.sleep(2 * HOUR)
        assert shop.most_alive["spotd-lab-j1"] == 1
        for since, until in ((midnight - HOUR, midnight), (midnight, rig.clock.now())):
            assert shop.billed(since, until) <= 120_000
        assert rig.job(name).spent + sum(
            a.meter.settled for a in rig.attempts(name) if a.state is not AttemptState.ENDED
        ) == pytest.approx(shop.billed(), abs=4_000)


async def test_eight_hours_of_sleep_after_a_leave_was_ordered(tmp_path: Path) -> None:
    rig = rig_of(tmp_path, hold_max=30 * MINUTE)
    hosts, shop = Hosts(rig, tmp_path), market(rig)
    async with at_work(rig, hosts):
        name = await rig.submit()
        await first_runs(rig, name)
        shop.set_state(KEY, InstanceState.PAUSED, Loss.OUTBID)
        await rig.until(lambda: "attempt.held" in rig.kinds())
        shop.offer_index = [BID, replace(CHEAP, pays_bid=True)]
        await rig.until(lambda: "attempt.left" in rig.kinds())
        rig.clock.offset += 8 * HOUR
        await rig.until(lambda: len(rig.attempts(name)) == 2 and rig.attempts(name)[1].running_at is not None)
        await rig.clock.sleep(2 * MINUTE)
        assert [m.key for m in shop.alive()] == ["spotd-lab-j1-2"]
        assert shop.most_alive["spotd-lab-j1"] == 1
        assert rig.attempts(name)[0].end_reason is EndReason.OUTBID
        await rig.cancel(name)
        await rig.until(lambda: not shop.not_gone())
        await rig.clock.sleep(MINUTE)
        assert rig.job(name).spent == pytest.approx(shop.billed(), rel=0.02, abs=5_000)


async def test_a_machine_wakes_in_a_hold_with_its_clock_set_to_1970(tmp_path: Path) -> None:
    rig = rig_of(tmp_path, hold_max=30 * MINUTE)
    hosts, shop = Hosts(rig, tmp_path), market(rig)
    async with at_work(rig, hosts):
        name = await rig.submit()
        await first_runs(rig, name)
        await rig.clock.sleep(4 * MINUTE)
        shop.set_state(KEY, InstanceState.PAUSED, Loss.OUTBID)
        await rig.until(lambda: "attempt.held" in rig.kinds())
        await rig.clock.sleep(5 * MINUTE)
        hosts.clocks_off = datetime(1970, 1, 1, tzinfo=UTC) - rig.clock.now()
        shop.set_state(KEY, InstanceState.RUNNING)
        await rig.until(lambda: "attempt.resumed" in rig.kinds())
        await rig.clock.sleep(5 * MINUTE)
        assert [a.state for a in rig.attempts(name)] == [AttemptState.RUNNING], rig.kinds()
        await rig.cancel(name)
        await rig.until(lambda: not shop.not_gone())
        await rig.clock.sleep(MINUTE)
        over = rig.job(name).spent - shop.billed()
        assert -1_000 <= over <= 5_000
