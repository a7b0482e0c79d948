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
