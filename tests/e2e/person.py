"""Somebody who works with a daemon that dies under him: starts it again, and repeats a wish until it was heard."""

from __future__ import annotations

import signal
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

from spotd.daemon.commits import CrashPoint
from spotd_providers.local.hosts import Segment
from tests.e2e.harness import FINAL, DaemonUnreachable, Lab, until

T = TypeVar("T")


class Person:
    """Plays one story over a lab, through every death of the daemon.

    A wish whose answer was lost is made again, after a look at whether it was fulfilled: that is all a person can do.
    """

    def __init__(self, lab: Lab) -> None:
        self.lab = lab
        self.deaths: list[str] = []
        self.restarted_at = lab.now()
        self._after: list[CrashPoint] = []

    def arm(self, point: CrashPoint, *, then: CrashPoint | None = None) -> None:
        """The daemon dies when it passes the point next; and, restarted, at once again at `then`."""
        self._after = [then] if then is not None else []
        self._write(point)

    def disarm(self) -> None:
        self.crash_file.unlink(missing_ok=True)

    @property
    def crash_file(self) -> Path:
        return Path(self.lab.environment["SPOTD_CRASH_FILE"])

    def _write(self, point: CrashPoint) -> None:
        draft = self.crash_file.with_suffix(".draft")
        draft.write_text(f"{point.value}:1", encoding="utf-8")
        draft.replace(self.crash_file)

    def revive(self) -> None:
        """The daemon answers; it died as by a power cut, or not at all."""
        while self.lab.is_dead:
            process = self.lab.process
            assert process is not None
            assert process.returncode == -signal.SIGKILL, f"exit code {process.returncode}: {self.lab.log_tail()}"
            self.deaths.append(self.crash_file.read_text(encoding="utf-8"))
            self.disarm()
            if self._after:
                self._write(self._after.pop(0))
            self.lab.start(wait=False)
            until(lambda: self.lab.is_dead or self.lab.answers(), what="the daemon to answer", within=60)
            self.restarted_at = self.lab.now()

    def wish(self, call: Callable[[], T], *, fulfilled: Callable[[], T | None] = lambda: None) -> T:
        """The answer to the call, made again when the daemon died meanwhile and it was not fulfilled."""
        while True:
            self.revive()
            try:
                return fulfilled() or call()
            except DaemonUnreachable:
                until(lambda: self.lab.is_dead, what="the daemon that broke off to be dead", within=30)

    def sees(self, probe: Callable[[], T | None], *, what: str, within: float = 60.0) -> T:
        """The probe's first true answer, whatever happens to the daemon until then."""

        def alive() -> T | None:
            try:
                self.revive()
                return probe()
            except DaemonUnreachable:
                return None

        return until(alive, what=what, within=within)

    def submit(self, name: str, run: str, **changes: Any) -> str:
        """The id of the one job of this name."""

        def known() -> str | None:
            found = [job["id"] for job in self.lab.api.jobs({})["jobs"] if job["name"] == name]
            assert len(found) < 2, f"{name} was queued twice"
            return found[0] if found else None

        # A machine that waits for another job is none that was forgotten: only stories about that have one.
        own = {"reuse": False, **changes}
        return self.wish(lambda: self.lab.submit(name, run, **own), fulfilled=known)

    def sees_state(self, ref: str, *states: str) -> None:
        self.sees(lambda: self.lab.state(ref) in states, what=f"{ref} to be {' or '.join(states)}")

    def sees_machine(self, ref: str) -> str:
        """The machine that runs for this job."""

        def running() -> str | None:
            mine = [s.machine_id for s in self.lab.running_machines() if _job_of(s) == ref]
            return mine[0] if mine else None

        return self.sees(running, what=f"a machine of {ref}")

    def sees_the_end(self, ref: str, state: str) -> None:
        """The job ended so, and the market has no machine of anybody any more."""

        def final() -> str | None:
            found = self.lab.state(ref)
            return found if found in FINAL else None

        found = self.sees(final, what=f"{ref} to be final")
        assert found == state, f"{ref} ended as {found}"
        self.sees(lambda: not self.lab.open_machines(), what="every machine to be gone")


def _job_of(segment: Segment) -> str:
    return segment.key.split("-")[2]


def assert_one_machine_each(lab: Lab, ref: str, *, ended_by: Any) -> None:
    """By the market's own books: one machine for an attempt at most, one that runs at a time, none after the end."""
    mine = [span for span in lab.ledger() if _job_of(span) == ref]
    machines = {span.key: set[str]() for span in mine}
    for span in mine:
        machines[span.key].add(span.machine_id)
    assert all(len(found) == 1 for found in machines.values()), f"an attempt had two machines: {machines}"
    known = {f"-{ref}-{attempt['attempt']}" for attempt in lab.job(ref)["attempts"]}
    named = {key.removeprefix(key[: key.index("-", len("spotd-"))]) for key in machines}
    assert named <= known, f"machines of no attempt: {named - known}"
    running = sorted((s for s in mine if not s.paused and s.start != s.end), key=lambda s: s.start)
    for before, after in pairwise(running):
        if before.machine_id != after.machine_id:
            assert before.end is not None
            assert before.end <= after.start, f"{before.machine_id} and {after.machine_id} ran at once"
    for span in mine:
        assert span.end is not None, f"{span.machine_id} was forgotten"
        assert span.end <= ended_by, f"{span.machine_id} was billed until {span.end}, and not at most {ended_by}"
