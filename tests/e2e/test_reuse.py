"""Two queued jobs, one machine: the second one begins where the first one is done, and finds nothing of it."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.ctl import assert_no_traceback, spotctl
from tests.e2e.harness import Lab, host, lab, until

pytestmark = pytest.mark.e2e
HOSTS = host("h0", 0.30) + host("h1", 0.90)
JOB = """
name = "{name}"
run = "{run}"
image = "scratch"
{secrets}
outputs = ["out/**"]
[resources]
gpu = ["RTX_4090:1"]
[price]
max_price = 2.00
"""
CANARY = "canary-of-the-first-job"


def submitted(found: Lab, folder: Path, name: str, run: str, *, secret: str = "", more: str = "") -> str:
    file, values = folder / f"{name}.toml", folder / "secrets.env"
    secrets = 'secrets = ["CANARY"]' if secret else ""
    file.write_text(JOB.format(name=name, run=run, secrets=f"{secrets}\n{more}"))
    values.write_text(f"CANARY={secret}\n")
    given = ["--secret-file", str(values)] if secret else []
    done = spotctl(found, "submit", str(file), "-y", "-o", "id", *given)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def attempts(found: Lab, ref: str) -> list[dict[str, Any]]:
    return [dict(one) for one in found.api.job(ref)["job"]["attempts"]]


def machines(found: Lab) -> set[str]:
    return {span.machine_id for span in found.ledger()}


def seconds_between(found: Lab, ref: str, first: str, last: str) -> float:
    at = {event["kind"]: event["at"] for event in found.events(ref)}
    return (datetime.fromisoformat(at[last]) - datetime.fromisoformat(at[first])).total_seconds()


@pytest.mark.lengthy
def test_the_second_job_begins_on_the_machine_of_the_first_and_finds_nothing_of_it(tmp_path: Path) -> None:
    daemon = '[budget]\nmachines = 1\n[reuse]\nwait = "10m"\n'
    with lab(tmp_path / "lab", hosts=HOSTS, scale=20.0, daemon=daemon, market='provisioning = "4m"') as found:
        found.shares_machines = True
        found.start()
        leaves = "mkdir out; echo $CANARY > out/seen; echo $CANARY > left; (setsid sleep 1000 &) ; sleep 1"
        first = submitted(found, tmp_path, "first", leaves, secret=CANARY)
        looks = "mkdir out; ls -A . > out/files; env > out/env; echo $SPOTD_CHECKPOINT_DIR > out/where"
        second = submitted(found, tmp_path, "second", looks)
        found.wait_final(first, second)
        assert (found.state(first), found.state(second)) == ("SUCCEEDED", "SUCCEEDED")
        assert found.delivered(first, "seen") == CANARY
        (machine,) = machines(found)
        assert found.delivered(second, "files") == "out"
        assert CANARY not in found.delivered(second, "env")
        until(lambda: not found.open_machines(), what="the machine to end")
        assert [len(attempts(found, ref)) for ref in (first, second)] == [1, 1]
        left = [path for path in found.machine_folder(machine).rglob("*") if path.is_file()]
        assert not [path for path in left if CANARY.encode() in path.read_bytes()]
        launched = seconds_between(found, first, "attempt.intended", "attempt.running")
        taken = seconds_between(found, second, "attempt.intended", "attempt.running")
        print(f"from the decision to the command: {launched:.0f} s with a launch, {taken:.0f} s without, virtual")
        assert taken < launched / 2
        assert_no_traceback(found)
