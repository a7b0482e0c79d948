"""A job carried across many losses ends with the same bytes as one that was never interrupted."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.harness import (
    FINAL,
    LEAVES_AT_ONCE,
    Lab,
    assert_books_are_clean,
    host,
    lab,
    straight_sha256,
    training_folder,
    until,
)

pytestmark = pytest.mark.e2e
SCALE = 60.0
HOSTS = "".join(host(f"h{i}", 0.30 + i / 200) for i in range(80))


def newest_machine(found: Lab) -> str:
    """The machine bought last; its folder is made before anything runs on it."""
    hosts = found.machine_folder("x").parent
    return max((path.name for path in hosts.iterdir()), default="") if hosts.is_dir() else ""


def below(folder: Path, prefix: str) -> bool:
    """Something of this prefix is somewhere below the folder, which changes while it is read."""
    return any(name.startswith(prefix) for _, folders, files in os.walk(folder) for name in (*folders, *files))


def in_checkpoint_write(found: Lab, machine: str) -> bool:
    return below(found.machine_folder(machine) / "spotd" / "checkpoints", "tmp-ballast-")


def attempt_folder(found: Lab, machine: str) -> Path:
    key = next((s.key for s in found.ledger() if s.machine_id == machine), "spotd-lab-none-0")
    _, _, job, number = key.split("-")
    return found.folder / "state" / "store" / "jobs" / job / "attempts" / number


def in_upload(found: Lab, machine: str) -> bool:
    """Chunks of this attempt are in the store, and a manifest for them is not yet."""
    attempt = attempt_folder(found, machine)
    data = list(attempt.glob("data/*"))
    return bool(data) and len(data) > 2 * len(list(attempt.glob("checkpoints/*.json")))


def has_published(found: Lab, machine: str) -> bool:
    return any(attempt_folder(found, machine).glob("checkpoints/*.json"))


def in_restore(found: Lab, machine: str) -> bool:
    """The runner has begun to fetch and the user's command does not run yet."""
    return below(found.machine_folder(machine) / "spotd", ".spotd-restore-")


def runs(found: Lab, machine: str) -> bool:
    return below(found.machine_folder(machine) / "spotd" / "checkpoints", "step-")


STRIKES: dict[str, Callable[[Lab, str], bool]] = {
    "in the middle of a restore": in_restore,
    "in the middle of a checkpoint": in_checkpoint_write,
    "in the middle of an upload": in_upload,
    "at any moment": runs,
    "before anything new was saved": lambda _lab, _machine: True,
}


@pytest.mark.parametrize(
    ("losses", "each_min"),
    [
        pytest.param(5, 1),
        pytest.param(10, 2, marks=pytest.mark.lengthy),
        pytest.param(22, 2, marks=pytest.mark.slow),
    ],
)
def test_losses_at_the_worst_moments_change_no_bit(tmp_path: Path, losses: int, each_min: int) -> None:
    """Each kind of moment is met at least so often, and some attempt resumes from another that resumed."""
    flags = f"--steps {270 * losses} --save-every 15"
    release = tmp_path / "release"
    code = training_folder(tmp_path)
    run = f"RELEASE={release} BALLAST=8000000 SAVE_S=0.12 {sys.executable} slow_train.py {flags} --pace 0.02"
    struck: Counter[str] = Counter()
    with lab(tmp_path / "lab", hosts=HOSTS, scale=SCALE, daemon=LEAVES_AT_ONCE) as found:
        found.start()
        job = found.submit("net", run, workdir=code, checkpoint={"every": "1m", "settle": "10s", "stop_grace": "60s"})
        last = ""
        while struck.total() < losses or min(struck[name] for name in STRIKES) < each_min:
            assert struck.total() < 3 * losses, struck
            wanted = min(STRIKES, key=lambda name: (struck[name], name))

            def reached(wanted: str = wanted, last: str = last) -> tuple[str, str] | None:
                machine = newest_machine(found)
                if machine <= last:
                    return None
                if STRIKES[wanted](found, machine):
                    return machine, wanted
                # A restore is over in a blink: one that was missed is struck as it runs, and the next one is tried.
                missed = wanted == "in the middle of a restore" and has_published(found, machine)
                return (machine, "at any moment") if missed else None

            last, name = until(reached, what=f"a machine {wanted} ({struck})", within=120, every=0.002)
            assert found.state(job) not in FINAL, f"the job ended after {struck}: make it longer"
            found.control("preempt", {"machine": last, "notice": False, "lasting": "60d"})
            struck[name] += 1
        release.touch()
        found.wait_final(job, within=120)
        assert found.state(job) == "SUCCEEDED"
        assert found.delivered(job, "weights.sha256") == straight_sha256(tmp_path, flags)
        assert found.job(job)["recoveries"] >= losses - each_min
        until(lambda: not found.open_machines(), what="every machine to be gone")
        assert_books_are_clean(found, reconcile_s=2 * SCALE)
