"""Two daemons over one state in PostgreSQL: one leads, the other waits, and goes on when the first is gone."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from spotd.client.transport import DaemonNotice
from spotd.store.postgres import LEASE_S
from tests.e2e.ctl import log_lines, spotctl
from tests.e2e.harness import FINAL, straight_sha256, training_folder, until
from tests.system.postgres.pairs import FAILOVER_S, START_S, Pair, is_saved, leads, two_daemons

pytestmark = pytest.mark.system
FLAGS = "--steps 1500 --save-every 25"


@pytest.fixture
def pair(tmp_path: Path, url: str) -> Iterator[Pair]:
    with two_daemons(tmp_path, url) as pair:
        yield pair


def test_the_second_goes_on_where_the_first_was_killed(pair: Pair, tmp_path: Path) -> None:
    first, second = pair.first, pair.second
    pair.start()
    with pytest.warns(DaemonNotice, match=r"read from the database at .* is in use by process \d+"):
        second.api.status()
    refused = spotctl(second, "cancel", "-y", "anything")
    assert refused.returncode != 0
    assert "this spotd waits" in refused.stderr
    assert "ask on the computer of that one" in refused.stderr

    work = training_folder(tmp_path)
    waits = f"until test -e {tmp_path}/release; do sleep 0.05; done"
    job = first.submit("train", f"python train.py {FLAGS} && {waits}", workdir=work)
    until(lambda: is_saved(first, job), what="a checkpoint", within=120)
    (machine,) = first.running_machines()
    first.kill()
    begun = time.monotonic()
    until(lambda: leads(second), what="the second to lead", within=LEASE_S + 30)
    assert time.monotonic() - begun < FAILOVER_S + START_S
    (same,) = first.running_machines()
    assert same.machine_id == machine.machine_id

    first.start(wait=False)
    until(lambda: log_lines(first, "daemon.waits"), what="the first to wait", within=60)
    (tmp_path / "release").touch()
    until(lambda: second.job(job)["state"] in FINAL, what="the job to end", within=240)
    row = second.job(job)
    assert row["state"] == "SUCCEEDED", row
    assert row["recoveries"] == 0
    assert {span.machine_id for span in first.ledger()} == {machine.machine_id}
    assert second.delivered(job, "weights.sha256") == straight_sha256(tmp_path, FLAGS)
    until(lambda: not first.open_machines(), what="no machine to be left", within=60)


def test_one_that_is_frozen_and_thawed_does_nothing_more(pair: Pair, tmp_path: Path) -> None:
    first, second = pair.first, pair.second
    first.start()
    second.start(wait=False)
    job = first.submit("waits", f"until test -e {tmp_path}/release; do sleep 0.05; done")
    until(lambda: first.state(job) == "RUNNING", what="the job to run", within=120)
    assert first.process is not None
    first.process.send_signal(signal.SIGSTOP)
    until(lambda: leads(second), what="the second to lead", within=LEASE_S + 30)
    first.process.send_signal(signal.SIGCONT)
    until(lambda: log_lines(first, "daemon.lead_lost"), what="the first to find out", within=30)
    until(lambda: not leads(first), what="the first to wait", within=60)
    another = second.submit("another", "true")
    (tmp_path / "release").touch()
    for one in (job, another):
        until(lambda one=one: second.state(one) in FINAL, what=f"{one} to end", within=120)  # type: ignore[misc]  # mypy cannot type a lambda's defaults
        assert second.state(one) == "SUCCEEDED"
    assert second.job(job)["recoveries"] == 0
    until(lambda: not first.open_machines(), what="no machine to be left", within=60)
    assert second.stop() == 0
    until(lambda: leads(first), what="the first to lead again", within=30)
    assert first.state(job) == "SUCCEEDED"


def test_ten_deaths_and_freezes_of_the_leader_in_turn_touch_no_job(pair: Pair, tmp_path: Path) -> None:
    """The one that does not lead takes over each time, within the time that is promised; no call is made twice."""
    leader, other = pair.first, pair.second
    pair.start()
    job = leader.submit("waits", f"echo ran >> {tmp_path}/ran; until test -e {tmp_path}/release; do sleep 0.05; done")
    until(lambda: leader.state(job) == "RUNNING", what="the job to run", within=120)
    took = []
    for number in range(10):
        assert leader.process is not None
        begun = time.monotonic()
        if number % 2:
            leader.process.send_signal(signal.SIGSTOP)
        else:
            leader.kill()
        until(lambda one=other: leads(one), what=f"another to lead, {number}", within=LEASE_S + 30)  # type: ignore[misc]  # mypy cannot type a lambda's defaults
        took.append(time.monotonic() - begun)
        waits = len(log_lines(leader, "daemon.waits"))
        if number % 2:
            leader.process.send_signal(signal.SIGCONT)
            until(lambda one=leader, n=waits: len(log_lines(one, "daemon.waits")) > n, what="it to wait", within=60)  # type: ignore[misc]  # as above
        else:
            leader.start(wait=False)
            until(lambda one=leader: log_lines(one, "daemon.waits"), what="it to wait", within=60)  # type: ignore[misc]  # as above
        leader, other = other, leader
        assert leader.state(job) == "RUNNING"
    print(f"FAILOVER {min(took):.1f} to {max(took):.1f} s")
    assert max(took) < FAILOVER_S + START_S, took
    (tmp_path / "release").touch()
    until(lambda: leader.state(job) in FINAL, what="the job to end", within=120)
    row = leader.job(job)
    assert (row["state"], row["recoveries"], row["attempt"]) == ("SUCCEEDED", 0, 1), row
    assert (tmp_path / "ran").read_text() == "ran\n"
    until(lambda: not pair.first.open_machines(), what="no machine to be left", within=60)
    assert len({span.machine_id for span in pair.first.ledger()}) == 1
