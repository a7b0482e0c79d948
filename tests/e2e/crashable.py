"""The daemon with a way to kill it at a named point: `python tests/e2e/crashable.py`.

`SPOTD_CRASH_AT="name:nth"` names a point of `crash.CrashPoint` and which passage of it is the last. The process ends
by SIGKILL, so nothing is cleaned up, as in a power cut. `SPOTD_CRASH_FILE` names a file that may hold such a setting
at any later time: a test can choose the point while the daemon runs, and passages count from that moment.
`SPOTD_FLOOR_S` is for how long, on the wall, a start and a save may last at the least, with which deadlines count.
Nothing else in spotd reads these variables.
"""

from __future__ import annotations

import os
import signal
import sys
from collections import Counter
from pathlib import Path

from spotd.daemon.commits import CrashPoint, CrashPoints, never
from spotd.service import memory

VARIABLE = "SPOTD_CRASH_AT"
FILE_VARIABLE = "SPOTD_CRASH_FILE"
FLOOR_VARIABLE = "SPOTD_FLOOR_S"
OF_SEVERAL = frozenset(
    {
        CrashPoint.BEFORE_COMMIT_REPLACE_SENT,
        CrashPoint.AFTER_COMMIT_REPLACE_SENT,
        CrashPoint.BEFORE_COMMIT_REPLACED,
        CrashPoint.AFTER_COMMIT_REPLACED,
    }
)
"""Only a job of several machines passes these: `test_gang_crash_points.py`."""


def crash_points(setting: str | None) -> CrashPoints:
    """Return what ends this process at the point that the setting names.

    Raises:
        ValueError: there is no such point, or the count is not a positive whole number.
    """
    if not setting:
        return never
    name, _, nth = setting.partition(":")
    fatal, last = CrashPoint(name), int(nth or "1")
    if last < 1:
        raise ValueError(f"{VARIABLE}={setting}: passages count from 1")
    passed: Counter[CrashPoint] = Counter()

    def reached(point: CrashPoint) -> None:
        passed[point] += 1
        if point is fatal and passed[point] == last:
            os.kill(os.getpid(), signal.SIGKILL)

    return reached


def crash_points_of_file(path: Path) -> CrashPoints:
    """Return what ends this process at the point that the file names by then; a missing or empty file names none."""
    chosen = ""
    points: CrashPoints = never

    def reached(point: CrashPoint) -> None:
        nonlocal chosen, points
        setting = path.read_text(encoding="utf-8").strip() if path.exists() else ""
        if setting != chosen:
            chosen, points = setting, crash_points(setting)
        points(point)

    return reached


def main() -> int:
    memory.postpone_gc()
    from spotd.service import accelerated
    from spotd.service.main import run

    if len(sys.argv) > 3 or (len(sys.argv) > 1 and sys.argv[1] != "--config"):
        sys.stderr.write("usage: crashable.py [--config FILE]\n")
        return 2
    if FLOOR_VARIABLE in os.environ:
        floor_s = float(os.environ[FLOOR_VARIABLE])
        accelerated.PROVIDER_LEAST_S["provision_timeout"] = accelerated.LEAST_S["save_allowance"] = floor_s
    config = sys.argv[2] if len(sys.argv) == 3 else None
    file = os.environ.get(FILE_VARIABLE)
    crash = crash_points_of_file(Path(file)) if file else crash_points(os.environ.get(VARIABLE))
    return run(config, {}, crash=crash)


if __name__ == "__main__":
    sys.exit(main())
