"""What users, disks and networks get wrong: each is answered with a sentence and a way out, and nothing is lost."""

from __future__ import annotations

import resource
import sqlite3
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from spotd_jobs.wire.manifest_document import parse_manifest
from tests.e2e.ctl import assert_no_traceback, log_lines, spotctl
from tests.e2e.harness import LEAVES_AT_ONCE, DaemonRefused, Lab, host, lab, straight_sha256, training_folder, until

pytestmark = pytest.mark.e2e
HOSTS = "".join(host(f"h{i}", 0.30 + i / 100) for i in range(4))


@pytest.fixture(scope="module")
def quiet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """A daemon that has nothing to do, for input that must not give it anything."""
    with lab(tmp_path_factory.mktemp("bad-input") / "lab", hosts=HOSTS, scale=60.0) as made:
        made.start()
        until(lambda: made.api.prices({})["quotes"], what="prices")
        yield made
        assert_no_traceback(made)


@pytest.fixture
def found(tmp_path: Path) -> Iterator[Lab]:
    with lab(tmp_path / "lab", hosts=HOSTS, scale=60.0, daemon=LEAVES_AT_ONCE) as made:
        yield made
        assert_no_traceback(made)


JOB = """name = "net"
run = "true"
image = "none"
[resources]
gpu = ["RTX_4090:1"]
disk = "10GB"
[price]
max_price = 0.5
"""


@pytest.mark.parametrize(
    ("right", "wrong", "words"),
    [
        ("[resources]", "[resources]\nmin_vrm = 4", ("job.toml:5", "min_vrm", "min_vram")),
        ('disk = "10GB"', 'disk = "10 parsecs"', ("job.toml:6", "disk", "parsecs")),
        ("max_price = 0.5", 'max_price = "cheap"', ("job.toml:8", "max_price", "cheap")),
        ("RTX_4090:1", "RTX_4909:1", ("job.toml:5", "RTX_4909", "RTX_4090")),
        ("RTX_4090:1", "RTX_4090:900", ("job.toml:5", "900")),
        ('image = "none"', 'image = "none', ("job.toml:3",)),
        ('image = "none"', 'image = "none"\nworkdir = "not-there"', ("workdir", "not-there")),
    ],
    ids=[
        "unknown key",
        "wrong unit",
        "price in words",
        "no such GPU",
        "too many GPUs",
        "broken TOML",
        "missing folder",
    ],
)
def test_a_wrong_job_file_is_refused_with_its_place_and_a_way_out(
    quiet: Lab, tmp_path: Path, right: str, wrong: str, words: tuple[str, ...]
) -> None:
    file = tmp_path / "job.toml"
    file.write_text(JOB.replace(right, wrong))
    done = spotctl(quiet, "submit", "-y", str(file))
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    assert "error: " in done.stderr
    for word in words:
        assert word in done.stderr
    assert quiet.api.jobs({})["jobs"] == []


def test_a_missing_job_file_is_named(quiet: Lab, tmp_path: Path) -> None:
    done = spotctl(quiet, "submit", "-y", str(tmp_path / "nowhere.toml"))
    assert done.returncode == 2
    assert "nowhere.toml" in done.stderr
    assert quiet.api.jobs({})["jobs"] == []


def test_a_ceiling_nothing_can_meet_is_told_with_the_lowest_price(quiet: Lab, tmp_path: Path) -> None:
    file = tmp_path / "job.toml"
    file.write_text(JOB.replace("max_price = 0.5", "max_price = 0.01"))
    refused = spotctl(quiet, "submit", "-y", "--no-wait-price", str(file))
    assert refused.returncode == 3
    assert "0.01" in refused.stderr
    assert "hint: " in refused.stderr
    assert quiet.api.jobs({})["jobs"] == []

    job = spotctl(quiet, "submit", "-y", "-o", "id", str(file)).stdout.strip()
    until(lambda: quiet.state(job) == "WAITING_PRICE", what="the job to wait for its price")
    why = spotctl(quiet, "why", job).stdout
    assert "0.0100" in why
    assert "0.3014" in why, "the lowest price is not named"
    assert spotctl(quiet, "cancel", "-y", job).returncode == 0
    assert quiet.ledger() == ()


def test_a_gpu_that_nobody_sells_is_waited_for_and_named(quiet: Lab, tmp_path: Path) -> None:
    file = tmp_path / "job.toml"
    file.write_text(JOB.replace("RTX_4090:1", "H100:8"))
    job = spotctl(quiet, "submit", "-y", "-o", "id", str(file)).stdout.strip()
    until(lambda: quiet.state(job) == "WAITING_PRICE", what="the job to wait")
    assert "H100" in spotctl(quiet, "why", job).stdout
    assert spotctl(quiet, "cancel", "-y", job).returncode == 0


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('[budget]\nday = "much"', ("budget.day", "much")),
        ("[budget]\ndya = 4.0", ("dya", "day")),
        ('[ceilings]\ndefault = "1 EUR"', ("default", "1 EUR")),
    ],
    ids=["bad value", "unknown key", "foreign money"],
)
def test_a_daemon_with_a_bad_config_does_not_start_and_says_where(
    tmp_path: Path, line: str, words: tuple[str, ...]
) -> None:
    with lab(tmp_path / "lab", hosts=HOSTS, daemon=line) as made:
        made.start(wait=False)
        assert made.exit_code() == 2
        said = made.log_tail()
        assert "error: " in said
        assert str(made.folder / "config.toml") in said
        for word in words:
            assert word in said
        assert_no_traceback(made)
        assert not (made.folder / "state" / "state.sqlite").exists()


def test_a_second_daemon_is_refused_and_the_first_goes_on(found: Lab) -> None:
    found.start()
    first = found.process
    found.start(wait=False)
    second, found.process = found.process, first
    assert second is not None
    until(lambda: second.poll() is not None, what="the second daemon to end")
    assert second.returncode == 1
    assert "another spotd daemon answers at" in found.log_tail()
    assert "hint: " in found.log_tail()
    assert found.answers()


def test_a_second_daemon_on_the_same_state_is_refused_too(found: Lab) -> None:
    found.start()
    first = found.process
    found.environment["SPOTD_SOCKET"] = str(found.folder / "run" / "other.sock")
    found.start(wait=False)
    second, found.process = found.process, first
    assert second is not None
    until(lambda: second.poll() is not None, what="the second daemon to end")
    assert second.returncode == 1
    assert "is in use by process" in found.log_tail()
    assert found.answers()


def test_a_database_from_a_newer_version_is_left_as_it_is(found: Lab) -> None:
    found.start()
    assert found.stop() == 0
    state = found.folder / "state" / "state.sqlite"
    with sqlite3.connect(state) as connection:
        connection.execute("UPDATE alembic_version SET version_num = '9001'")
    connection.close()
    before = state.read_bytes()
    found.start(wait=False)
    assert found.exit_code() == 1
    assert "was written by a newer spotd" in found.log_tail()
    assert "hint: install the newer spotd again" in found.log_tail()
    assert state.read_bytes() == before


@pytest.mark.skipif(not hasattr(resource, "prlimit"), reason="another process's limits can be set on Linux only")
def test_a_full_disk_is_waited_out_and_loses_nothing(found: Lab, tmp_path: Path) -> None:
    """No file of the daemon may grow beyond 64 KiB for a while, which is how a full disk looks to it."""
    found.start()
    assert found.process is not None
    job = found.submit("net", f"until test -e {tmp_path / 'release'}; do sleep 0.05; done")
    until(lambda: found.state(job) == "RUNNING", what="the job to run")
    wal = found.folder / "state" / "state.sqlite-wal"
    limit = 64 * 1024
    until(lambda: wal.stat().st_size > limit, what="the write-ahead log to be longer than the limit")
    assert (found.folder / "spotd-1.log").stat().st_size < limit
    was = resource.prlimit(found.process.pid, resource.RLIMIT_FSIZE)
    resource.prlimit(found.process.pid, resource.RLIMIT_FSIZE, (limit, was[1]))
    (tmp_path / "release").touch()
    held = until(lambda: log_lines(found, "state.held"), what="the daemon to say that it holds")
    assert "full" in held[0]["error"] or "disk" in held[0]["error"]
    assert held[0]["hint"]
    with pytest.raises(DaemonRefused) as refused:
        found.submit("second", "true")
    assert refused.value.code == "unavailable"
    assert refused.value.hint
    listed = spotctl(found, "ls")
    assert listed.returncode != 0
    assert "disk" in listed.stderr
    assert "hint: running jobs go on" in listed.stderr
    until(lambda: not found.open_machines(), what="the machine to end itself")

    resource.prlimit(found.process.pid, resource.RLIMIT_FSIZE, was)
    until(lambda: log_lines(found, "state.back"), what="the daemon to go on")
    found.wait_final(job)
    assert found.state(job) == "SUCCEEDED"
    second = found.submit("second", "true")
    found.wait_final(second)
    assert found.state(second) == "SUCCEEDED"


def test_a_corrupt_chunk_costs_one_checkpoint_and_not_the_result(found: Lab, tmp_path: Path) -> None:
    flags = "--steps 400 --save-every 40"
    found.start()
    rules = {"every": "1m", "settle": "1s", "stop_grace": "60s"}
    run = f"{sys.executable} train.py {flags} --pace 0.02"
    job = found.submit("net", run, workdir=training_folder(tmp_path), outputs=["out/**"], checkpoint=rules)
    until(lambda: len(found.api.checkpoints(job)["checkpoints"]) >= 3, what="three checkpoints")
    (machine,) = found.running_machines()
    found.kill()
    found.control("preempt", {"machine": machine.machine_id, "notice": False, "lasting": "60d"})
    store = found.folder / "state" / "store"
    folder = store / "jobs" / job / "attempts" / "1" / "checkpoints"
    manifests = sorted((parse_manifest(p.read_bytes()) for p in folder.iterdir()), key=lambda m: m.serial)
    older, newest = (set(m.chunk_sizes()) for m in manifests[-2:])
    victim = store / sorted(newest - older)[0]
    data = bytearray(victim.read_bytes())
    data[len(data) // 2] ^= 1
    victim.chmod(0o600)
    victim.write_bytes(data)

    found.start()
    until(lambda: found.job(job)["attempt"] == 2 and found.state(job) == "RUNNING", what="the second attempt to run")
    bad, before = manifests[-1].name, manifests[-2].name
    said = f"checkpoint {bad} could not be restored"
    until(lambda: said in spotctl(found, "why", job).stdout, what="why to say so", every=0.3)
    found.wait_final(job)
    assert found.state(job) == "SUCCEEDED"
    (note,) = [e["message"] for e in found.events(job) if e["kind"] == "checkpoint.fallback"]
    assert note.startswith(f"checkpoint {bad} could not be restored (")
    good = note.rpartition(": falling back to ")[2]
    assert good == before
    receipt = spotctl(found, "cost", job).stdout
    assert f"attempt 2 began from {good}: {bad} could not be restored (" in receipt
    assert found.job(job)["attempts"][-1]["resumed_from"] == good
    assert found.delivered(job, "weights.sha256") == straight_sha256(tmp_path, flags)


SAVES_WHEN_TOLD = """
trap 'cd "$SPOTD_CHECKPOINT_DIR"; mkdir saved; echo x > saved/state; touch saved/DONE; exit 1' TERM
while true; do sleep 0.1; done
"""
FAST = 600.0
BUDGET = 0.8


def test_a_used_up_budget_of_the_day_saves_and_stops_every_machine(tmp_path: Path) -> None:
    with lab(tmp_path / "lab", hosts=HOSTS, scale=FAST, daemon=f"[budget]\nday = {BUDGET}") as found:
        found.start()
        job = found.submit("net", SAVES_WHEN_TOLD)
        until(lambda: found.state(job) == "RUNNING", what="the job to run")
        until(lambda: found.state(job) == "QUEUED", what="the job to be stopped")
        assert "budget" in found.job(job)["reason"]
        assert [c["name"] for c in found.api.checkpoints(job)["checkpoints"]] == ["saved"]
        until(lambda: not found.open_machines(), what="the machine to be gone")
        until(lambda: found.api.why(job)["why"]["kind"] == "budget_day", what="the verdict")
        why = spotctl(found, "why", job).stdout
        assert f"${BUDGET}" in why
        assert found.job(job)["spent_usd"] <= BUDGET
        found.api.cancel(job)
        found.wait_final(job)
        assert len({s.machine_id for s in found.ledger()}) == 1
        assert_no_traceback(found)


def test_a_used_up_budget_of_the_job_saves_it_and_waits_for_a_lower_price_or_more_money(tmp_path: Path) -> None:
    with lab(tmp_path / "lab", hosts=HOSTS, scale=FAST) as found:
        found.start()
        job = found.submit("net", SAVES_WHEN_TOLD, budget={"job": BUDGET})
        until(lambda: found.state(job) == "RUNNING", what="the job to run")
        until(lambda: found.state(job) == "QUEUED", what="the job to be stopped")
        assert "budget" in found.job(job)["reason"]
        assert [c["name"] for c in found.api.checkpoints(job)["checkpoints"]] == ["saved"]
        until(lambda: not found.open_machines(), what="the machine to be gone")
        until(lambda: found.api.why(job)["why"]["kind"] == "budget_job", what="the verdict")
        assert "waits for a lower price, or for spotctl budget net +USD" in found.api.why(job)["why"]["sentence"]
        assert 0 < found.job(job)["spent_usd"] <= BUDGET
        assert len({s.machine_id for s in found.ledger()}) == 1
        found.api.cancel(job)
        found.wait_final(job)
        assert_no_traceback(found)
