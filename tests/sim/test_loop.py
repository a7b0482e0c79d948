"""The event loop of a simulated process: time passes on the agenda alone, and a dead process does nothing."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta

import anyio

from tests.sim.agenda import Agenda
from tests.sim.loop import ProcessLoop

START = datetime(2026, 1, 5, tzinfo=UTC)
HOUR = timedelta(hours=1)


def hourly(agenda: Agenda, asleep_until: datetime | None = None) -> tuple[ProcessLoop, list[timedelta]]:
    """Start a process that notes the time after each of three hours."""
    loop, noted = ProcessLoop(agenda, lambda: asleep_until), []

    async def note() -> None:
        for _ in range(3):
            with anyio.move_on_after(3600):
                await anyio.sleep_forever()
            noted.append((agenda.now - START) // HOUR * HOUR)

    loop.create_task(note())
    return loop, noted


def test_a_deadline_passes_when_the_agenda_reaches_it() -> None:
    agenda = Agenda(START)
    _, noted = hourly(agenda)
    agenda.run(START + timedelta(days=1), lambda: False)
    assert noted == [HOUR, 2 * HOUR, 3 * HOUR]


def test_nothing_runs_while_the_computer_sleeps() -> None:
    agenda = Agenda(START)
    _, noted = hourly(agenda, asleep_until=START + 10 * HOUR)
    agenda.run(START + timedelta(days=1), lambda: False)
    assert noted == [11 * HOUR, 12 * HOUR, 13 * HOUR]


def test_nothing_runs_in_a_closed_loop() -> None:
    agenda = Agenda(START)
    loop, noted = hourly(agenda)
    agenda.run(START + 1.5 * HOUR, lambda: False)
    for task in asyncio.all_tasks(loop):
        task.cancel()
    loop.run()
    loop.close()
    agenda.run(START + timedelta(days=1), lambda: False)
    assert noted == [HOUR]
