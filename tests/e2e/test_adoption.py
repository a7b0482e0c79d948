"""The state folder is lost while two jobs run: both are taken back, on the machines that they have."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest

from tests.e2e.ctl import assert_no_traceback, log_lines, spotctl
from tests.e2e.harness import Lab, assert_books_are_clean, host, lab, straight_sha256, training_folder, until

pytestmark = pytest.mark.e2e
SCALE = 10.0
"""A machine lives half an hour without its daemon: three minutes here, in which the state is lost and rebuilt."""
HOSTS = "".join(host(f"h{i}", 0.30 + i / 100) for i in range(4))


def lose_state(found: Lab) -> None:
    """Delete the state folder; the clock of an accelerated market is no state of spotd's."""
    state = found.folder / "state"
    clock = (state / "clock.json").read_bytes()
    shutil.rmtree(state)
    state.mkdir(mode=0o700)
    (state / "clock.json").write_bytes(clock)


def take_over(found: Lab, store: Path) -> None:
    """Write into the config what the daemon asks for: the former holder of the label is gone for good."""
    (lease,) = (store / "installs" / "lab").glob("*.json")
    identity = json.loads(lease.read_bytes())["identity"]
    config = found.folder / "config.toml"
    text = config.read_text(encoding="utf-8")
    config.write_text(text.replace("[daemon]", f'[daemon]\ntake_over = ["{identity}"]', 1), encoding="utf-8")


def test_a_lost_state_is_rebuilt_while_two_jobs_run_and_no_bit_of_them_changes(tmp_path: Path) -> None:
    flags, release, store = "--steps 400 --save-every 15", tmp_path / "release", tmp_path / "objects"
    code = training_folder(tmp_path)
    run = f"RELEASE={release} {sys.executable} slow_train.py {flags} --pace 0.2"
    kept = f'[store]\nurl = "file://{store}"\n'
    with lab(tmp_path / "lab", hosts=HOSTS, scale=SCALE, daemon=kept) as found:
        found.start()
        jobs = [
            found.submit(name, run, workdir=code, checkpoint={"every": "1m", "settle": "2s", "stop_grace": "60s"})
            for name in ("one", "two")
        ]
        until(lambda: all(found.job(job)["checkpoint"] for job in jobs), what="both jobs to have saved", within=90)
        machines = {s.key: s.machine_id for s in found.running_machines()}
        assert len(machines) == 2
        found.kill()
        lose_state(found)
        found.start(wait=False)
        assert found.exit_code() != 0
        assert "take_over" in found.log_tail()
        take_over(found, store)
        found.start()
        until(lambda: log_lines(found, "survey.state_lost"), what="the loss to be noticed")
        assert not found.api.jobs({})["jobs"]
        until(lambda: "2 machines" in spotctl(found, "reconcile").stdout, what="the machines to be listed")

        shown = spotctl(found, "reconcile", "--adopt")
        assert (shown.returncode, shown.stdout.count("take back: ")) == (0, 2), shown
        assert all(machine in shown.stdout for machine in machines.values())
        assert not found.api.jobs({})["jobs"], "a plan changes nothing"

        done = spotctl(found, "reconcile", "--adopt", "--yes")
        assert done.stdout.endswith("2 jobs taken back\n"), done
        again = spotctl(found, "reconcile", "--adopt", "--yes")
        assert again.stdout == "the state knows every job of the store\n"
        until(lambda: all(found.state(job) == "RUNNING" for job in jobs), what="both jobs to run again")
        release.touch()
        found.wait_final(*jobs, within=120)
        assert [found.state(job) for job in jobs] == ["SUCCEEDED", "SUCCEEDED"]
        until(lambda: not found.open_machines(), what="every machine to be gone")
        assert {s.key: s.machine_id for s in found.ledger()} == machines, "nothing ran twice, on no other machine"
        assert {found.delivered(job, "weights.sha256") for job in jobs} == {straight_sha256(tmp_path, flags)}
        assert [found.job(job)["recoveries"] for job in jobs] == [0, 0]
        assert_books_are_clean(found, reconcile_s=6 * SCALE)
        assert_no_traceback(found)
