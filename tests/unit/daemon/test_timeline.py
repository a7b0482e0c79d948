"""A daemon whose computer's clock is set begins anew with the new date, and nothing that it stored changes its span."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from pathlib import Path

import anyio
import pytest

from spotd.core.bills import DONE
from spotd.core.domain.attempts import MachineState, ReadBill
from spotd.core.domain.cooldowns import Cooldown, CooldownScope
from spotd.core.domain.intents import JobId, Meter
from spotd.core.domain.plan import Event, Plan
from spotd.core.domain.states import AttemptState, JobState
from spotd.daemon.clock import ANCHOR, Computer, SteadyClock, Timeline, begin_timeline, read_anchor
from spotd.daemon.commits import never
from spotd.daemon.log import Redactor
from spotd.service.composition import App, DaemonEnded
from spotd.service.main import load_settings
from spotd.store import Store
from spotd_providers.contract.values import AttemptKey
from tests.unit.core.builders import MINUTE, NOW, SHOP, shop_policy, world_with
from tests.unit.daemon.rig import Log

HOUR = timedelta(hours=1)


@dataclass
class Machine:
    """A computer whose clocks a test sets."""

    wall: datetime = NOW
    uptime_s: float = 1000.0
    boot: str = "one"

    def passes(self, span: timedelta) -> None:
        self.wall += span
        self.uptime_s += span.total_seconds()

    @property
    def computer(self) -> Computer:
        return Computer(
            wall=lambda: self.wall,
            uptime_s=lambda: self.uptime_s,
            boot_id=lambda: self.boot,
            compare_every_s=0.01,
        )


@pytest.fixture
def store() -> Iterator[Store]:
    with Store.open(":memory:") as opened:
        yield opened


def begin(store: Store, machine: Machine, log: Log | None = None) -> Timeline:
    return begin_timeline(store, shop_policy(), machine.computer, log or Log())


def filled(store: Store) -> None:
    world = world_with(AttemptState.RUNNING)
    cool = Cooldown(provider=SHOP, scope=CooldownScope.HOST, subject="h", until=NOW + 5 * MINUTE, reason="why")
    (job,) = world.jobs.values()
    told = [Event(at=NOW, kind="test", message="", job=job.id, attempt=n) for n in (None, 1)]
    store.tx(
        lambda tx: tx.commit(Plan(jobs=world.jobs, attempts=world.attempts, cooldowns=(cool,), events=tuple(told)))
    )


def test_a_steady_clock_follows_the_uptime_alone() -> None:
    machine = Machine()
    clock = SteadyClock(NOW, uptime_s=lambda: machine.uptime_s)
    machine.wall += 8 * HOUR
    assert clock.now() == NOW
    machine.uptime_s += 60
    assert clock.now() == NOW + MINUTE


def test_a_restart_in_the_same_uptime_continues_the_timeline_although_the_clock_runs_a_little_differently(
    store: Store,
) -> None:
    machine = Machine()
    begin(store, machine)
    machine.passes(HOUR)
    machine.wall += timedelta(seconds=3)
    assert begin(store, machine).clock.now() == NOW + HOUR


@pytest.mark.parametrize("step", [8 * HOUR, -2 * HOUR, timedelta(days=400)], ids=str)
def test_a_clock_that_was_set_while_the_daemon_was_down_moves_what_is_stored(store: Store, step: timedelta) -> None:
    machine, log = Machine(), Log()
    first = begin(store, machine)
    issued = first.issued()
    filled(store)
    machine.passes(MINUTE)
    machine.wall += step
    timeline = begin(store, machine, log)
    now = timeline.clock.now()
    assert now == NOW + MINUTE + step
    assert timeline.issued() > issued
    world = store.read(lambda reads: reads.world(shop_policy(), now))
    (item,) = world.attempts.values()
    assert item.meter.since == now
    assert item.meter.settled == 73_334, "eleven minutes, whatever the clock says"
    assert [c.until for c in world.cooldowns] == [NOW + 5 * MINUTE + step]
    assert "clock.stepped" in log.events()
    assert "clock.stepped" in [e.event.kind for e in store.read(lambda reads: reads.newest_events())]
    assert begin(store, machine, Log()).clock.now() == now, "it is moved once"


def test_a_computer_that_starts_with_a_clock_of_the_past_dates_nothing_before_what_is_stored(store: Store) -> None:
    machine, log = Machine(), Log()
    begin(store, machine)
    filled(store)
    later = Machine(wall=NOW - 100 * HOUR, uptime_s=20.0, boot="two")
    assert begin(store, later, log).clock.now() == NOW
    assert log.events() == ["clock.behind"]


@pytest.mark.parametrize("text", ["", "{}", "[]", "null", '{"boot_id": "one", "boot_s": NaN}', "x" * 100])
def test_an_anchor_that_cannot_be_read_begins_a_new_timeline(store: Store, text: str) -> None:
    assert read_anchor(text) is None
    store.tx(lambda tx: tx.set_meta(ANCHOR, text))
    assert begin(store, Machine()).clock.now() == NOW


async def answered(path: Path) -> None:
    """The daemon has begun to serve its API."""
    while not await anyio.Path(path).exists():  # noqa: ASYNC110 - a file tells no event
        await anyio.sleep(0.02)
    async with await anyio.connect_unix(path) as stream:
        await stream.send(b"GET / HTTP/1.0\r\n\r\n")
        await stream.receive()


def test_a_daemon_whose_clock_is_set_ends_its_run_for_the_next_one(tmp_path: Path) -> None:
    machine = Machine()
    overrides = {"STATE_DIRECTORY": str(tmp_path / "state"), "SPOTD_SOCKET": str(tmp_path / "run" / "s.sock")}
    config = tmp_path / "config.toml"
    config.write_text('[daemon]\ninstall = "lab"\n')
    settings = replace(load_settings(config, overrides), providers=())

    async def run_of(steps: timedelta | None) -> DaemonEnded:
        app = App(settings, load=lambda: settings, redactor=Redactor(), crash=never, computer=machine.computer)
        ended: list[DaemonEnded] = []

        async def run() -> None:
            ended.append(await app.run())

        async with anyio.create_task_group() as group:
            group.start_soon(run)
            with anyio.fail_after(60):
                await answered(tmp_path / "run" / "s.sock")
            if steps is None:
                os.kill(os.getpid(), signal.SIGTERM)
            else:
                machine.passes(5 * MINUTE)
                machine.wall += steps
        return ended[0]

    assert anyio.run(run_of, 8 * HOUR) is DaemonEnded.CLOCK_SET
    assert anyio.run(run_of, None) is DaemonEnded.BY_SIGNAL
    with Store.open(tmp_path / "state" / "state.sqlite") as store:
        kinds = [seen.event.kind for seen in store.read(lambda reads: reads.newest_events())]
    assert kinds.count("clock.stepped") == 1


def test_a_clock_set_back_over_midnight_books_the_second_midnight_as_well(store: Store) -> None:
    machine = Machine(wall=NOW)
    begin(store, machine)
    filled(store)
    machine.passes(timedelta(hours=12, seconds=1))  # a second past midnight
    machine.wall -= timedelta(seconds=11)
    begin(store, machine)
    machine.passes(timedelta(seconds=12))
    machine.wall -= timedelta(minutes=1)
    timeline = begin(store, machine)
    charges = store.read(lambda reads: reads.charges_of(next(iter(reads.world(shop_policy(), NOW).jobs))))
    assert len({charge.start for charge in charges}) == len(charges) == 4, "two of them begin at midnight"
    assert sum(charge.amount for charge in charges) in range(4_868_110, 4_868_120), "twelve hours, 13 s and ten minutes"
    world = store.read(lambda reads: reads.world(shop_policy(), timeline.clock.now()))
    assert next(iter(world.attempts.values())).meter.since == timeline.clock.now()


def test_what_is_over_moves_with_the_clock_while_the_bill_of_its_machine_is_open(store: Store) -> None:
    """A job that had the machine first has its share of that bill, however long ago it ended."""
    machine, day = Machine(), timedelta(days=1)
    begin(store, machine)
    world = world_with(AttemptState.ENDING, machine=MachineState.GONE, meter=Meter())
    [item], [owner] = world.attempts.values(), world.jobs.values()
    item = replace(item, state=AttemptState.ENDED)
    old, alone = NOW - 20 * day, "spotd-lab-j3-1"
    rows = [
        replace(item, ended_at=old, bill=ReadBill(tries=DONE)),
        replace(item, id=replace(item.id, job=JobId("j2")), key=AttemptKey("spotd-lab-j2-1"), machine_key=item.key),
        replace(item, id=replace(item.id, job=JobId("j3")), key=AttemptKey(alone), ended_at=old),
    ]
    rows[1] = replace(rows[1], ended_at=NOW - day)
    jobs = {one.id.job: replace(owner, id=one.id.job, state=JobState.SUCCEEDED, ended_at=NOW) for one in rows}
    ends = tuple(Event(at=NOW, kind="test", message="", job=one.id.job, attempt=n) for one in rows for n in (None, 1))
    store.tx(lambda tx: tx.commit(Plan(jobs=jobs, attempts={one.id: one for one in rows}, events=ends)))
    machine.wall += 30 * day
    begin(store, machine)
    found = [store.read(lambda reads, one=one: reads.attempts_of(one.id.job))[0] for one in rows]  # type: ignore[misc]  # a default, not an argument
    moved = [after.ended_at - before.ended_at for after, before in zip(found, rows, strict=True)]
    assert moved == [30 * day, 30 * day, timedelta(0)]
    assert found[1].intended_at - rows[1].intended_at == 30 * day
    assert [one.id for one in store.read(lambda reads: reads.attempts_on_machine_of(found[1]))] == [
        rows[0].id,
        rows[1].id,
    ]
