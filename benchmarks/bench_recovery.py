"""From the death of a machine to the next machine's launch call, and on to the first step there, piece by piece.

Real processes on the local market in real time. The daemon can learn of a death only by asking, so the yardstick is
its poll interval: the goal is a launch call within one interval and one second. The moments are taken where they are
true: the death from the market that killed, detection and decision from the daemon's events, the call from the
market's ledger, the rest from what the runner and the training wrote down themselves.

With a notice spotd's own share is what counts: from the notice to the runner's seeing it, from the runner's last report
to the launch call, and on the next machine all but the boot and the transfer of bytes. The job's saving and its upload
are the job's. The goal is ten seconds for 95 of 100. `bench_recovery_clouds.py` measures the same at three clouds.

Run: python benchmarks/bench_recovery.py [--losses 10] [--polls 1 5] [--noticed 20]
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

REPO = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPO))
from tests.e2e.harness import Lab, host, lab, until  # noqa: E402 - the folder above must be importable first

PIECES = ("detect", "decide", "launch", "boot", "restore", "start", "first step")
GOAL_OVER_POLL_S = 1.0
NOTICED_PIECES = ("see the notice", "detect the end", "decide", "launch", "prepare and verify", "start the job")
GOAL_NOTICED_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovery:
    """Seconds on the wall: the death, then the end of every piece."""

    moments: tuple[float, ...]

    @property
    def pieces(self) -> tuple[float, ...]:
        return tuple(after - before for before, after in pairwise(self.moments))

    @property
    def to_launch(self) -> float:
        return sum(self.pieces[:3])


def runner_events(found: Lab, job: str, attempt: int) -> dict[str, float]:
    """When the runner did what, in its own words; the first of each kind."""
    first: dict[str, float] = {}
    folder = found.folder / "state" / "store" / "jobs" / job / "attempts" / str(attempt) / "events"
    for path in sorted(folder.glob("*.json")):
        event = json.loads(path.read_text())
        first.setdefault(event["kind"], datetime.fromisoformat(event["at"]).timestamp())
    return first


def one_recovery(found: Lab, job: str, number: int, died_at: float, notes: Path) -> Recovery:
    """How attempt `number` came to its first step after its predecessor died."""
    note = notes / str(number)
    until(note.exists, what=f"the first step of attempt {number}", within=60)
    wanted = {"boot", "restored", "started"}
    until(lambda: runner_events(found, job, number).keys() >= wanted, what="the runner's events")
    own = runner_events(found, job, number)
    events = {(e["kind"], e["attempt"]): found.real(datetime.fromisoformat(e["at"])) for e in found.events(job)}
    key = f"-{job}-{number}"
    called_at = min(found.real(span.start) for span in found.ledger() if span.key.endswith(key))
    return Recovery(
        moments=(
            died_at,
            events["attempt.outbid", number - 1],
            events["attempt.intended", number],
            called_at,
            own["boot"],
            own["restored"],
            own["started"],
            float(note.read_text()),
        )
    )


def one_noticed(found: Lab, job: str, number: int, noticed_at: float, notes: Path) -> tuple[float, ...]:
    """Spotd's own share in the change to attempt `number`, piece by piece."""
    until((notes / str(number)).exists, what=f"the first step of attempt {number}", within=120)
    before, after = runner_events(found, job, number - 1), runner_events(found, job, number)
    events = {(e["kind"], e["attempt"]): found.real(datetime.fromisoformat(e["at"])) for e in found.events(job)}
    intended_at = events["attempt.intended", number]
    ended_at = max(at for (kind, attempt), at in events.items() if attempt == number - 1 and at <= intended_at)
    key = f"-{job}-{number}"
    called_at = min(found.real(span.start) for span in found.ledger() if span.key.endswith(key))
    return (
        before["preempt_notice"] - noticed_at,
        ended_at - before["exit"],
        intended_at - ended_at,
        called_at - intended_at,
        after["restored"] - after["boot"] - transfer_s(found, job, number),
        after["started"] - after["restored"],
    )


def transfer_s(found: Lab, job: str, attempt: int) -> float:
    folder = found.folder / "state" / "store" / "jobs" / job / "attempts" / str(attempt) / "events"
    events = [json.loads(path.read_text()) for path in folder.glob("*.json")]
    return sum(float(event["data"]["seconds"]) for event in events if event["kind"] == "restored")


def report_noticed(found: list[tuple[float, ...]], poll_s: float) -> None:
    print(f"with a notice, poll_every = {poll_s:g} s, {len(found)} losses; spotd's own share, median and largest")
    for name, values in zip(NOTICED_PIECES, zip(*found, strict=True), strict=True):
        print(f"  {name:20} {statistics.median(values):7.3f} {max(values):7.3f}")
    shares = sorted(sum(pieces) for pieces in found)
    late = shares[math.ceil(0.95 * len(shares)) - 1]
    verdict = "met" if late <= GOAL_NOTICED_S else "NOT MET"
    print(f"  spotd's own share: median {statistics.median(shares):.2f}, 95 of 100 within {late:.2f}", end=" ")
    print(f"({late / GOAL_NOTICED_S:.2f}x of at most {GOAL_NOTICED_S:g} s: {verdict})")


def recoveries(folder: Path, *, poll_s: float, losses: int, notice: bool = False) -> list[Any]:
    rng = Random(1)
    code, notes = folder / "code", folder / "notes"
    code.mkdir(parents=True)
    notes.mkdir()
    for source in (REPO / "examples" / "numpy" / "train.py", REPO / "benchmarks" / "first_step.py"):
        shutil.copy(source, code)
    flavour = "notice" if notice else "sudden"
    hosts = "".join(host(f"h{i}", 0.30 + i / 100, flavour=flavour) for i in range(losses + 5))
    command = f"NOTES={notes} {sys.executable} first_step.py --steps 1000000 --save-every 10 --pace 0.02"
    measured: list[Any] = []
    with lab(folder / "lab", hosts=hosts, scale=1.0, poll_s=poll_s) as found:
        found.fresh = True
        found.start()
        job = found.submit("net", command, workdir=code)
        for number in range(2, losses + 2):
            until((notes / str(number - 1)).exists, what="a machine that trains", within=60)
            # The death must fall anywhere between two polls, and after a checkpoint.
            time.sleep(1.5 + rng.uniform(0, poll_s))
            (machine,) = found.running_machines()
            found.control("preempt", {"machine": machine.machine_id, "notice": notice, "lasting": "1d"})
            one = one_noticed if notice else one_recovery
            measured.append(one(found, job, number, time.time(), notes))
        found.api.cancel(job)
        found.wait_final(job)
    return measured


def report(found: list[Recovery], poll_s: float) -> None:
    print(f"poll_every = {poll_s:g} s, {len(found)} losses; seconds, median and largest")
    for name, values in zip(PIECES, zip(*(one.pieces for one in found), strict=True), strict=True):
        print(f"  {name:12} {statistics.median(values):7.3f} {max(values):7.3f}")
    launches = [one.to_launch for one in found]
    limit = poll_s + GOAL_OVER_POLL_S
    print(
        f"  death to launch call: median {statistics.median(launches):.3f}, largest {max(launches):.3f}, limit"
        f" {limit:.1f} ({max(launches) / limit:.2f}x; {sum(s <= limit for s in launches)} of {len(launches)} within:"
        f" {'met' if max(launches) <= limit else 'NOT MET'})"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--losses", type=int, default=10)
    parser.add_argument("--polls", type=float, nargs="+", default=[1.0, 5.0])
    parser.add_argument("--noticed", type=int, default=20, help="losses with a notice, at the last of --polls")
    args = parser.parse_args()
    for poll_s in args.polls if args.losses else ():
        with tempfile.TemporaryDirectory(prefix="spotd-bench-") as folder:
            report(recoveries(Path(folder), poll_s=poll_s, losses=args.losses), poll_s)
    if args.noticed:
        with tempfile.TemporaryDirectory(prefix="spotd-bench-") as folder:
            found = recoveries(Path(folder), poll_s=args.polls[-1], losses=args.noticed, notice=True)
            report_noticed(found, args.polls[-1])


if __name__ == "__main__":
    main()
