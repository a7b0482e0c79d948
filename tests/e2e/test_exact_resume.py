"""A job carried across many losses ends with the same bytes as one that was never interrupted."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.harness import FINAL, Lab, assert_books_are_clean, host, lab, straight_sha256, training_folder, until

pytestmark = pytest.mark.e2e
SEED = 20261121
SCALE = 60.0
HOSTS = "".join(host(f"h{i}", 0.30 + i / 100) for i in range(40))


def newest_machine(found: Lab) -> str | None:
    running = found.running_machines()
    return max(s.machine_id for s in running) if running else None


def in_checkpoint_write(found: Lab, machine: str) -> bool:
    return any(found.machine_folder(machine).rglob("tmp-ballast-*/ballast.bin"))


def in_upload(found: Lab, machine: str) -> bool:
    """Chunks of this attempt are in the store, and a manifest for them is not yet."""
    key = next(s.key for s in found.ledger() if s.machine_id == machine)
    attempt = found.folder / "state" / "store" / "jobs" / key.split("-")[2] / "attempts" / key.split("-")[3]
    data = list(attempt.glob("data/*"))
    return bool(data) and len(data) > 2 * len(list(attempt.glob("checkpoints/*.json")))


def in_restore(found: Lab, machine: str) -> bool:
    """The runner has begun to fetch and the user's command does not run yet."""
    home = found.machine_folder(machine) / "spotd"
    return home.is_dir() and any(p.name.startswith(".spotd-restore-") for p in home.rglob("*"))


def runs(found: Lab, machine: str) -> bool:
    return any(found.machine_folder(machine).rglob("step-*"))


def test_more_than_twenty_losses_at_the_worst_moments_change_no_bit(tmp_path: Path) -> None:
    flags = "--steps 900 --save-every 15"
    code = training_folder(tmp_path)
    run = f"BALLAST=3000000 SAVE_S=0.12 {sys.executable} slow_train.py {flags} --pace 0.012"
    strikes: list[tuple[str, Callable[[Lab, str], bool]]] = [
        ("in the middle of a checkpoint", in_checkpoint_write),
        ("in the middle of an upload", in_upload),
        ("in the middle of a restore", in_restore),
        ("at any moment", runs),
    ]
    struck: dict[str, int] = {}
    with lab(tmp_path / "lab", hosts=HOSTS, scale=SCALE) as found:
        found.start()
        job = found.submit("net", run, workdir=code, checkpoint={"every": "1m", "settle": "10s", "stop_grace": "60s"})
        losses = 0
        last = ""
        while losses < 22:
            name, moment = strikes[losses % len(strikes)]
            if losses in (7, 8):
                name, moment = "before anything new was saved", lambda _lab, _machine: True

            def reached(moment: Callable[[Lab, str], bool] = moment, last: str = last) -> str | None:
                if found.state(job) in FINAL:
                    return "final"
                machine = newest_machine(found)
                return machine if machine and machine > last and moment(found, machine) else None

            machine = until(reached, what=f"a machine {name} (loss {losses}, seed {SEED})", within=60, every=0.005)
            assert machine != "final", f"the job ended after {losses} losses: make it longer"
            found.control("preempt", {"machine": machine, "notice": False, "lasting": "60d"})
            struck[name] = struck.get(name, 0) + 1
            last, losses = machine, losses + 1
        found.wait_final(job, within=120)
        assert found.state(job) == "SUCCEEDED"
        assert found.delivered(job, "weights.sha256") == straight_sha256(tmp_path, flags)
        assert found.job(job)["recoveries"] >= 20
        assert all(count >= 2 for count in struck.values()), struck
        until(lambda: not found.open_machines(), what="every machine to be gone")
        assert_books_are_clean(found, reconcile_s=2 * SCALE)
