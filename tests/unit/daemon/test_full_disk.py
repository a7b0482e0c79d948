"""The disk of the state is full for hours: no budget is broken, no cancelled machine lives on, nothing is bought."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path

import pytest

from spotd.core.domain.intents import JobId
from spotd.core.domain.states import AttemptState, EndReason, JobState
from spotd.core.metering import spent
from spotd.store import StateUnavailable
from spotd_providers.contract.errors import OutcomeUnknown, Unavailable
from spotd_providers.contract.values import AttemptKey, InstanceState, Loss, MicroUsd, cost
from tests.unit.core.builders import job, shop_policy
from tests.unit.daemon.rig import Rig

pytestmark = pytest.mark.anyio

BUDGET = MicroUsd(100_000)


@contextmanager
def full(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing can be written; what is there can be read."""

    def refused(_work: object) -> None:
        raise StateUnavailable("the disk with the state is full", hint="free some space there")

    with monkeypatch.context() as patched:
        patched.setattr(rig.store, "tx", refused)
        yield


async def beats(rig: Rig, name: JobId, span: timedelta) -> datetime | None:
    """The host works until its grant orders it to stop; returns when that was."""
    host, until = rig.host(name, 1), rig.clock.now() + span
    stopped: datetime | None = None
    while rig.clock.now() < until:
        await rig.clock.sleep(timedelta(seconds=15))
        if stopped is None and rig.shop.alive():
            host.beat("run")
            if rig.grant(name, 1).orders.stop is not None:
                stopped = rig.clock.now()
    return stopped


async def test_a_full_disk_breaks_no_budget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(tmp_path, policy=replace(shop_policy(), budget_day=BUDGET))
    async with rig.running():
        name = await rig.submit()
        await rig.until_running(name, 1)
        began = rig.clock.now()
        with full(rig, monkeypatch):
            stopped = await beats(rig, name, timedelta(minutes=25))
            assert stopped is not None
            (ended,) = rig.shop.ended_at.values()
            billed = cost(rig.attempts(name)[0].quote.price.total, ended - began)
            assert billed <= BUDGET
            assert rig.database.last_error == "the disk with the state is full"
            assert len(rig.shop.requests) == 1
        await rig.until(lambda: rig.database.last_error == "")
        await rig.until(lambda: rig.attempts(name)[0].state is AttemptState.ENDED)
    assert rig.log.events().count("state.held") == 1


async def test_a_machine_that_was_cancelled_ends_in_time_although_nothing_can_be_written(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with rig.running():
        name = await rig.submit()
        await rig.until_running(name, 1)
        await rig.cancel(name)
        due = rig.attempts(name)[0].stop
        assert due is not None
        with full(rig, monkeypatch):
            rig.shop.faults["terminate"].append(Unavailable("away for a moment"))
            await beats(rig, name, timedelta(minutes=12))
            (ended,) = rig.shop.ended_at.values()
            assert ended <= due.deadline + timedelta(minutes=2)
        await rig.until_state(name, JobState.CANCELLED)
        assert [a.end_reason for a in rig.attempts(name)] == [EndReason.CANCELLED]


async def test_an_order_to_end_that_failed_is_repeated_although_nothing_can_be_written(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with rig.running():
        name = await rig.submit()
        host = await rig.until_running(name, 1)
        rig.shop.always["terminate"] = Unavailable("away")
        host.exit("succeeded")
        await rig.until(lambda: rig.attempts(name)[0].state is AttemptState.ENDING)
        await rig.until(lambda: rig.shop.counts["terminate"] > 0)
        with full(rig, monkeypatch):
            await rig.clock.sleep(timedelta(minutes=5))
            del rig.shop.always["terminate"]
            await rig.clock.sleep(timedelta(minutes=3))
            assert not rig.shop.not_gone()


@pytest.mark.parametrize("by", [pytest.param("outbid", marks=pytest.mark.lengthy), "cancelled"])
async def test_what_was_ended_while_nothing_could_be_written_is_not_booked_on_while_its_provider_is_away(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    async with rig.running():
        name = await rig.submit()
        host = await rig.until_running(name, 1)
        machine = rig.attempts(name)[0]
        if by == "cancelled":
            await rig.cancel(name)
        with full(rig, monkeypatch):
            if by == "outbid":
                await rig.clock.sleep(timedelta(minutes=10))
                host.beat("run")
                rig.shop.set_state(machine.key, InstanceState.PAUSED, Loss.OUTBID)
            await rig.until(lambda: bool(rig.shop.ended_at))
            (ended,) = rig.shop.ended_at.values()
            for call in ("instances", "terminate", "find"):
                rig.shop.always[call] = Unavailable("away")
            await rig.clock.sleep(timedelta(minutes=5))
        await rig.until(lambda: rig.database.last_error == "")
        assert rig.attempts(name)[0].ref == machine.ref
        await rig.clock.sleep(timedelta(minutes=20))
        booked = spent(rig.attempts(name)[0], rig.clock.now())
        assert machine.meter.since is not None
        assert booked <= cost(machine.meter.rate, ended - machine.meter.since + timedelta(minutes=1))
        rig.shop.always.clear()
        await rig.until(lambda: rig.attempts(name)[0].state is AttemptState.ENDED)


async def test_a_machine_that_became_known_and_was_ended_unsaved_is_booked_up_to_its_end(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The state learns of the machine in the cycle that follows the outage, of a list from before its end."""
    async with rig.running():
        rig.shop.faults["launch"].append(OutcomeUnknown("the line broke", key=AttemptKey("")))
        rig.shop.always["instances"] = rig.shop.always["find"] = Unavailable("away")
        name = await rig.submit()
        await rig.until(lambda: bool(rig.shop.alive()))
        await rig.until(lambda: any(a.outcome_unknown for a in rig.attempts(name)))
        await rig.cancel(name)
        with full(rig, monkeypatch):
            rig.shop.always.clear()
            await rig.until(lambda: rig.shop.counts["terminate"] > 0)
            for call in ("instances", "terminate", "find"):
                rig.shop.always[call] = Unavailable("away")
            await rig.clock.sleep(timedelta(minutes=5))
            (ended,) = rig.shop.ended_at.values()
        await rig.until(lambda: rig.database.last_error == "")
        await rig.clock.sleep(timedelta(minutes=20))
        (item,) = rig.attempts(name)
        assert item.ref is not None
        booked = spent(item, rig.clock.now())
        assert booked <= cost(item.quote.price.total, ended - item.intended_at + timedelta(minutes=1))


async def test_a_machine_whose_end_was_taken_unsaved_and_forgotten_is_ended_again(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with rig.running():
        name = await rig.submit()
        await rig.until_running(name, 1)
        await rig.cancel(name)
        with full(rig, monkeypatch), monkeypatch.context() as patched:
            patched.setattr(rig.shop, "_end", lambda _ref: None)
            await rig.until(lambda: rig.shop.counts["terminate"] > 0)
            began = rig.clock.now()
        assert rig.shop.alive()
        await rig.until(lambda: not rig.shop.alive(), within=timedelta(minutes=10))
        await rig.until_state(name, JobState.CANCELLED)
        await rig.until(lambda: rig.attempts(name)[0].state is AttemptState.ENDED)
        (ended,) = rig.shop.ended_at.values()
        item = rig.attempts(name)[0]
        assert item.launched_at is not None
        assert ended > began
        assert spent(item, ended) >= cost(item.quote.price.total, began - item.launched_at)


async def test_nothing_is_bought_while_nothing_can_be_written(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    async with rig.running():
        with full(rig, monkeypatch):
            with pytest.raises(StateUnavailable):
                await rig.submit(job(1))
            await rig.clock.sleep(timedelta(minutes=15))
        assert not rig.shop.requests
