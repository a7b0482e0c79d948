"""What happens to the link and to the server: one daemon leads at most, no job is touched, no call is made twice."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path

import pytest

from spotd.client.transport import ClientError
from spotd.store.postgres import LEASE_S
from tests.e2e.ctl import log_lines
from tests.e2e.harness import FINAL, Lab, until
from tests.system.engines import network, pgbouncer, postgres
from tests.system.engines.postgres import Postgres
from tests.system.postgres.pairs import FAILOVER_S, START_S, Pair, leads, two_daemons

pytestmark = pytest.mark.system


def waits_for(folder: Path, name: str) -> str:
    """A command that notes each start and ends when it may."""
    return f"echo ran >> {folder}/{name}.ran; until test -e {folder}/{name}; do sleep 0.05; done"


def at(line: dict[str, str]) -> datetime:
    return datetime.fromisoformat(line["timestamp"])


def is_running(one: Lab, job: str) -> bool:
    with suppress(ClientError):
        return one.state(job) == "RUNNING"
    return False


def assert_each_ran_once(pair: Pair, folder: Path, leader: Lab, *names: str) -> None:
    """Each job succeeded on the one machine that was bought for it, and nothing is left."""
    for name in names:
        (folder / name).touch()
    until(lambda: all(leader.state(name) in FINAL for name in names), what="all to end", within=120)
    for name in names:
        row = leader.job(name)
        assert (row["state"], row["recoveries"]) == ("SUCCEEDED", 0), row
        assert (folder / f"{name}.ran").read_text() == "ran\n"
    until(lambda: not pair.first.open_machines(), what="no machine to be left", within=60)
    machines = Counter(span.key for span in {s.machine_id: s for s in pair.first.ledger()}.values())
    assert set(machines.values()) == {1}, machines
    assert len(machines) == len(names), machines


Links = tuple[network.NetworkLink, ...] | tuple[network.Proxy, ...]


@contextmanager
def cuttable() -> Iterator[tuple[Postgres, Links, tuple[str, str]]]:
    """A server, two links to it, and the URL of one state over each."""
    if network.may_make_networks():
        with network.network(2) as net, postgres.running(namespace=net.namespace) as server:
            url = server.url("links")
            first, second = (url.replace("@127.0.0.1:", f"@{link.host}:") for link in net.links)
            yield server, net.links, (first, second)
        return
    with postgres.running() as server, network.proxies(server.port, 2) as links:
        url = server.url("links")
        first, second = (url.replace(f":{server.port}/", f":{link.port}/") for link in links)
        yield server, links, (first, second)


def test_one_whose_network_is_cut_stops_before_the_other_leads(tmp_path: Path) -> None:
    reason = postgres.missing()
    if reason:
        pytest.skip(reason)
    with cuttable() as (_server, links, urls), two_daemons(tmp_path, *urls) as pair:
        first, second = pair.first, pair.second
        pair.start()
        running = first.submit("running", waits_for(tmp_path, "running"))
        first.submit("waiting", waits_for(tmp_path, "waiting"))  # there is one machine for the two
        until(lambda: is_running(first, running), what="the first job to run", within=120)
        links[0].cut()
        cut = time.monotonic()
        (tmp_path / "running").touch()  # from now on the former leader would like to end one machine and buy another
        until(lambda: leads(second), what="the second to lead", within=LEASE_S + 30)
        assert time.monotonic() - cut < FAILOVER_S + START_S
        lost, began = log_lines(first, "daemon.lead_lost")[0], log_lines(second, "daemon.starting")[0]
        assert at(lost) < at(began)
        until(lambda: is_running(second, "waiting"), what="the second job to run", within=60)
        assert not leads(first)
        links[0].heal()
        until(lambda: log_lines(first, "daemon.waits"), what="the first to wait", within=60)
        assert_each_ran_once(pair, tmp_path, second, "running", "waiting")
        second.stop()
        until(lambda: leads(first), what="the first to lead again", within=60)


def test_a_server_that_crashes_while_jobs_are_committed_loses_and_doubles_none(
    server: Postgres, url: str, tmp_path: Path
) -> None:
    with two_daemons(tmp_path, url) as pair:
        first = pair.first
        first.start()
        first.submit("running", waits_for(tmp_path, "running"))
        until(lambda: is_running(first, "running"), what="the job to run", within=120)
        taken, refused = [], []
        for number in range(30):
            if number == 10:
                server.kill()
            if number == 20:
                server.start()
            name = f"queued-{number}"
            try:
                first.submit(name, "true", resources={"gpu": ["H100:8"], "disk": "10GB"})
                taken.append(name)
            except ClientError:
                refused.append(name)
        until(lambda: leads(first), what="it to lead again", within=60)
        until(lambda: is_running(first, "running"), what="the job to be known", within=60)
        assert refused
        known = Counter(job["name"] for job in first.api.jobs({"limit": 100})["jobs"])
        assert set(known.values()) == {1}
        assert set(taken) <= known.keys()
        for name in known.keys() - {"running"}:
            first.api.cancel(name)
        assert_each_ran_once(pair, tmp_path, first, "running")


@pytest.fixture
def small() -> Iterator[Postgres]:
    """A server whose disk is a file system of its own."""
    reason = postgres.missing() or postgres.no_disk_of_its_own()
    if reason:
        pytest.skip(reason)
    with postgres.running(disk_mb=160) as server:
        yield server


def test_a_full_disk_of_the_server_is_waited_for(small: Postgres, tmp_path: Path) -> None:
    with two_daemons(tmp_path, small.url("small")) as pair:
        pair.start()
        pair.first.submit("running", waits_for(tmp_path, "running"))
        until(lambda: is_running(pair.first, "running"), what="the job to run", within=120)
        with small.full_disk():
            refusal = until(lambda: refusal_of(pair.first), what="the disk to be found full", within=120)
            assert "the disk with the state" in refusal
            (machine,) = pair.first.running_machines()
            small.use_up_log()
            until(lambda: log_lines(pair.first, "daemon.lead_lost"), what="the lead to be lost", within=60)
            assert not leads(pair.first)
            assert not leads(pair.second)
        until(lambda: leads(pair.first) or leads(pair.second), what="one to lead", within=FAILOVER_S + 60)
        leader = pair.first if leads(pair.first) else pair.second
        until(lambda: is_running(leader, "running"), what="the job to be known", within=60)
        assert [span.machine_id for span in pair.first.running_machines()] == [machine.machine_id]
        assert_each_ran_once(pair, tmp_path, leader, "running")


def refusal_of(one: Lab) -> str:
    """Write a job; return why that is refused."""
    try:
        one.submit(f"filler-{time.monotonic_ns()}", "true", env={"FILLER": "x" * 30_000}, price={"max_price": 0.001})
    except ClientError as exc:
        return str(exc)
    return ""


def test_two_daemons_over_a_pooler_of_sessions(server: Postgres, url: str, tmp_path: Path) -> None:
    reason = pgbouncer.missing()
    if reason:
        pytest.skip(reason)
    with pgbouncer.running(server) as port, two_daemons(tmp_path, url.replace(f":{server.port}/", f":{port}/")) as pair:
        pair.start()
        pair.first.submit("running", waits_for(tmp_path, "running"))
        until(lambda: is_running(pair.first, "running"), what="the job to run", within=120)
        pair.first.kill()
        killed = time.monotonic()
        until(lambda: leads(pair.second), what="the second to lead", within=LEASE_S + 30)
        assert time.monotonic() - killed < FAILOVER_S + START_S
        assert_each_ran_once(pair, tmp_path, pair.second, "running")
