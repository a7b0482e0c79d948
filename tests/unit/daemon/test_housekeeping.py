"""What a job adds to the state with each checkpoint is bounded, and so is the file on the disk.

`benchmarks/virtual_weeks.py` shows the same for a week of the whole daemon.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from spotd.core.checkpoints import trim
from spotd.core.domain.attempts import HostStatus
from spotd.core.domain.intents import AttemptId, JobId
from spotd.core.domain.jobs import Checkpoint
from spotd.core.domain.plan import Plan, applied, combine
from spotd.core.domain.world import World
from spotd.core.host_reports import absorb
from spotd.core.plan_builder import PlanBuilder
from spotd.daemon.commits import Database
from spotd.daemon.control_loop import Housekeeping
from spotd.store import Folding, Store
from tests.unit.daemon.clocks import VirtualClock
from tests.unit.daemon.rig import Log
from tests.unit.daemon.soak import count_rows, file_bytes
from tests.unit.store import values as v

pytestmark = pytest.mark.anyio
ATTEMPT = AttemptId(job=JobId("j1"), number=1)
AT_ONCE = 10
RULES = Folding()


def save(store: Store, world: World, first: int) -> World:
    """Some checkpoints are accepted, and those that they push out are dropped."""
    fresh = tuple(
        Checkpoint(
            name=f"step-{number}",
            attempt=1,
            step=number,
            bytes=50_000_000_000,
            at=v.NOW,
            manifest_key=f"jobs/j1/checkpoints/1/step-{number}.json",
            sha256="0" * 64,
            metric=None,
        )
        for number in range(first, first + AT_ONCE)
    )
    draft = PlanBuilder(world, v.NOW)
    absorb(draft, ATTEMPT, HostStatus(attempt=ATTEMPT, read_at=v.NOW, checkpoints=fresh))
    accepted = draft.plan()
    dropped = trim(applied(world, accepted), (), v.NOW)
    store.tx(lambda tx: tx.commit(combine(accepted, dropped)))
    return applied(world, combine(accepted, dropped))


@pytest.mark.lengthy
async def test_two_thousand_checkpoints_of_one_job_leave_rows_and_files_as_a_few_hundred_did(tmp_path: Path) -> None:
    path = tmp_path / "state.sqlite"
    with Store.open(path) as store:
        store.tx(lambda tx: tx.commit(v.running_job()))
        world = store.read(lambda reads: reads.world(v.POLICY, v.NOW))
        host_monitor = Housekeeping(Database(store, inline=True), clock=VirtualClock(), log=Log())
        rows: list[int] = []
        pages: list[int] = []
        logs: list[int] = []
        for number in range(0, 2_000, AT_ONCE):
            world = save(store, world, number)
            if number % 40 == 0:
                await host_monitor.fold()
                rows.append(store.tx(count_rows))
                pages.append(store.tx(lambda tx: tx._connection.exec_driver_sql("PRAGMA page_count").scalar_one()))
                logs.append(file_bytes(path, "-wal"))
        events = store.read(lambda reads: reads.events(job_id=JobId("j1"), limit=100_000))
    accepted = [item.event.data["name"] for item in events if item.event.kind == "checkpoint.accepted"]
    assert accepted[-1] == "step-1999"
    assert len(accepted) >= RULES.routine
    assert max(rows[10:]) <= 2 * (RULES.routine + RULES.routine_least + 40) + 20
    assert max(rows[25:]) <= max(rows[10:25])
    assert max(pages[25:]) <= max(pages[10:25]) + 2, "the pages of what was folded are used again"
    assert max(logs[25:]) <= max(logs[10:25]) + 500_000


async def test_a_round_folds_what_many_jobs_have_too_much_of(tmp_path: Path) -> None:
    with Store.open(tmp_path / "state.sqlite") as store:
        one = replace(v.running_job().events[0], kind="checkpoint.accepted")
        many = [replace(one, job=JobId(f"k{number}")) for number in range(60) for _ in range(160)]
        store.tx(lambda tx: tx.commit(Plan(events=tuple(many))))
        host_monitor = Housekeeping(Database(store, inline=True), clock=VirtualClock(), log=Log())
        assert await host_monitor.fold() == 60 * 60
        assert await host_monitor.fold() == 0


async def test_hours_of_notes_of_a_hostile_host_stay_within_the_count(tmp_path: Path) -> None:
    with Store.open(tmp_path / "state.sqlite") as store:
        host_monitor = Housekeeping(
            Database(store, inline=True),
            clock=VirtualClock(),
            log=Log(),
            rules=Folding(of_a_job=500, least=50, piece=100),
        )
        note = replace(v.running_job().events[0], kind="host.note", job=JobId("j1"))
        for _ in range(20):
            store.tx(lambda tx: tx.commit(Plan(events=(note,) * 200)))
            await host_monitor.fold()
        assert store.tx(count_rows) < 800
