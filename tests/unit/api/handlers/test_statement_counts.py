"""What one answer costs, in statements and in steps of the database, which depend on no machine."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import event

from spotd.api.handlers import Handlers
from spotd.api.requests import EventQuery, LogQuery
from spotd.api.responses import NotFound
from spotd.core.domain.intents import AttemptId, JobId
from spotd.core.domain.states import AttemptState, JobState
from spotd.daemon import object_keys
from spotd.store import Store
from spotd_jobs.objects.folder import FolderStore
from tests.unit.daemon.rig import Rig
from tests.unit.store import values as v

pytestmark = [pytest.mark.anyio, pytest.mark.long]

NAME = "train"
STEPS = 50
"""The database counts in units of so many steps of its own."""


class Cost:
    """Statements and units of steps of a store's reader."""

    def __init__(self, store: Store) -> None:
        self.statements, self.units = 0, 0
        event.listen(store._reader, "before_cursor_execute", self._statement)
        event.listen(store._reader, "connect", lambda raw, _: raw.set_progress_handler(self._unit, STEPS))

    def _statement(self, *args: Any) -> None:
        self.statements += args[2].startswith("SELECT")

    def _unit(self) -> int:
        self.units += 1
        return 0


def same_job_again_and_again(store: Store, runs: int) -> None:
    """Ended jobs of one job file, each with one attempt and an event."""
    rows: list[Any] = []
    for number in range(runs):
        text, at = f"j{number:05d}", v.NOW + timedelta(minutes=number)
        rows.append(v.job(text, JobState.SUCCEEDED, name=NAME, attempts_made=1, submitted_at=at))
        rows.append(v.attempt(text, 1, AttemptState.ENDED))
    store.tx(lambda tx: tx.commit(v.plan(*rows)))


async def everything(records: AsyncIterator[Any]) -> list[Any]:
    return [record async for record in records]


ANSWERS: dict[str, Callable[[Handlers], Awaitable[Any]]] = {
    "show": lambda handlers: handlers.jobs.detail(NAME),
    "why": lambda handlers: handlers.jobs.why(NAME),
    "cost of a job": lambda handlers: handlers.receipts.cost(NAME),
    "checkpoints": lambda handlers: handlers.checkpoints.entries(NAME),
    "pull": lambda handlers: handlers.files.entries(NAME, None),
    "logs": lambda handlers: everything(handlers.logs.stream(NAME, LogQuery())),
    "events of a job": lambda handlers: everything(handlers.events.stream(EventQuery(job=NAME))),
    "the last events": lambda handlers: everything(handlers.events.stream(EventQuery(limit=20))),
}


async def cost_of(folder: Path, runs: int, answer: str) -> Cost:
    store = Store.open(folder / "state.sqlite")
    cost = Cost(store)
    same_job_again_and_again(store, runs)
    rig = Rig(folder, store=store)
    rig.pollers[v.VAST] = rig.pollers[rig.shop.name]
    await rig.control_loop.adopt()
    cost.statements = cost.units = 0
    with suppress(NotFound):
        await ANSWERS[answer](rig.handlers())
    store.close()
    return cost


@pytest.mark.parametrize("answer", ANSWERS)
async def test_an_answer_about_one_job_costs_the_same_after_hundreds_of_runs_of_one_name(
    tmp_path_factory: pytest.TempPathFactory, answer: str
) -> None:
    few = await cost_of(tmp_path_factory.mktemp("few"), 30, answer)
    many = await cost_of(tmp_path_factory.mktemp("many"), 300, answer)
    assert many.statements == few.statements
    assert many.units <= 1.5 * few.units + 20


class Listings(FolderStore):
    """Counts the objects that were listed."""

    listed = 0

    def list_after(self, prefix: str, after: str, *, page: int = 1000) -> Any:
        for info in super().list_after(prefix, after, page=page):
            self.listed += 1
            yield info


async def test_a_long_log_is_listed_as_often_as_it_is_read(tmp_path: Path) -> None:
    store = Store.open(tmp_path / "state.sqlite")
    same_job_again_and_again(store, 1)
    rig = Rig(tmp_path, store=store)
    rig.pollers[v.VAST] = rig.pollers[rig.shop.name]
    rig.objects = Listings(tmp_path / "objects")
    prefix = object_keys.log_prefix(AttemptId(job=JobId("j00000"), number=1))
    for number in range(1000):
        rig.objects.put(f"{prefix}{number:06d}", b"one line\n")
    await rig.control_loop.adopt()
    records = await everything(rig.handlers().logs.stream(NAME, LogQuery()))
    assert "".join(record["text"] for record in records if record["kind"] == "log") == "one line\n" * 1000
    assert rig.objects.listed <= 1000 + 2 * len(records)
    store.close()
