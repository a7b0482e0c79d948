"""Requests to the daemon that waits, with a real leader beside it that lives, is frozen, dies, or dies in between."""

from __future__ import annotations

import re
import signal
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from spotd.client.transport import ClientError, DaemonNotice, DaemonRefused
from spotd.store.postgres import LEASE_S
from spotd.tokens import new_user_token
from tests.e2e.ctl import log_lines, spotctl
from tests.e2e.harness import FINAL, Lab, until
from tests.integration.team.certificates import Authority
from tests.integration.team.conftest import free_port
from tests.system.engines.postgres import Postgres
from tests.system.postgres.pairs import leads, two_daemons
from tests.system.postgres.test_shared_secrets import key_file, named
from tests.system.postgres.test_team_pair import serve_team

pytestmark = pytest.mark.system
FROM_DATABASE = r"read from the database at \S+Z: the state postgresql://\S+ is in use by process \d+"


def is_passed_on(one: Lab, to: Lab) -> bool:
    """Whether the other daemon answers what this one is asked."""
    try:
        return to.process is not None and one.api.status()["status"]["pid"] == to.process.pid
    except (ClientError, DaemonNotice):
        return False


def metrics_of(one: Lab) -> str:
    """What a scraper reads there."""
    address = re.search(r'\[metrics\]\nlisten = "(.+)"', (one.folder / "config.toml").read_text())
    assert address is not None
    with urllib.request.urlopen(f"http://{address[1]}/metrics", timeout=30) as answer:
        return str(answer.read(), "utf-8")


def names(one: Lab) -> list[str]:
    return [job["name"] for job in one.api.jobs({"limit": 100})["jobs"]]


def reads(one: Lab, job: str) -> list[Callable[[], Any]]:
    api = one.api
    return [
        api.status,
        api.jobs,
        lambda: api.job(job),
        lambda: api.why(job),
        lambda: list(api.logs(job)),
        api.cost,
        lambda: api.cost(job),
        lambda: list(api.events({"limit": 10})),
        lambda: api.checkpoints(job),
        api.hosts,
    ]


def test_what_is_asked_of_the_one_that_waits(server: Postgres, url: str, tmp_path: Path) -> None:
    authority, key = Authority(tmp_path), named(key_file(tmp_path, "secrets.key"))
    with two_daemons(tmp_path, url, more=(key, key)) as pair:
        first, second = pair.first, pair.second
        for one in (first, second):
            serve_team(one, authority, new_user_token())
            config = one.folder / "config.toml"
            config.write_text(f'{config.read_text()}\n[metrics]\nlisten = "127.0.0.1:{free_port()}"\n')
        pair.start()
        until(lambda: is_passed_on(second, first), what="a request to be passed on", within=30)
        waits = f"echo of-the-job; until test -e {tmp_path}/release; do sleep 0.05; done"
        job = second.submit("through", waits)
        until(lambda: second.state(job) == "RUNNING", what="the job to run", within=120)
        until(lambda: "of-the-job" in str(list(second.api.logs(job))), what="its log", within=60)
        for read in [*reads(second, job), second.api.providers, second.api.doctor]:
            assert read()  # without any notice, which would be an error here
        assert names(first) == ["through"]
        assert first.process is not None
        for one, figure in ((first, "1.0"), (second, "0.0")):
            assert f"spotd_leads {figure}\n" in metrics_of(one)

        first.process.send_signal(signal.SIGSTOP)
        begun = time.monotonic()
        for read in reads(second, job):
            with pytest.warns(DaemonNotice, match=FROM_DATABASE):
                assert read()
        assert time.monotonic() - begun < LEASE_S  # not by having taken the lead
        with pytest.raises(DaemonRefused, match="the leader does not answer"):
            second.api.cancel(job)
        shown = spotctl(second, "why", job)
        assert shown.returncode == 0
        assert shown.stderr.count("warning: read from the database") <= 1
        first.process.send_signal(signal.SIGCONT)

        until(lambda: is_passed_on(second, first) or leads(second), what="one to lead", within=60)
        leader = second if leads(second) else first
        other = first if leader is second else second
        until(lambda: is_passed_on(other, leader), what="a request to be passed on", within=60)
        leader.kill()
        with pytest.warns(DaemonNotice, match=f"{FROM_DATABASE}.*; the leader cannot be reached at https://"):
            assert other.api.job(job)["job"]["state"] == "RUNNING"
        (tmp_path / "release").touch()
        until(lambda: leads(other), what="it to lead", within=LEASE_S + 60)
        until(lambda: other.state(job) in FINAL, what="the job to end", within=120)
        assert other.job(job)["recoveries"] == 0
        assert len({span.machine_id for span in first.ledger()}) == 1
        for lab in (first, second):
            assert not log_lines(lab, "api.failed")
        dumped = server.dump()
        for secret in ("daemon_", (tmp_path / "secrets.key").read_text().strip()):
            assert secret not in dumped


@pytest.mark.parametrize(("point", "exists"), [("before_commit_submit", False), ("after_commit_submit", True)])
def test_a_leader_that_dies_before_its_answer_has_the_job_once_or_not_at_all(
    url: str, tmp_path: Path, point: str, *, exists: bool
) -> None:
    authority, key = Authority(tmp_path), named(key_file(tmp_path, "secrets.key"))
    with two_daemons(tmp_path, url, more=(key, key)) as pair:
        first, second = pair.first, pair.second
        for one in (first, second):
            serve_team(one, authority, new_user_token())
        first.start(crash_at=point)
        second.start(wait=False)
        until(lambda: log_lines(second, "daemon.waits"), what="the second to wait", within=60)
        until(lambda: is_passed_on(second, first), what="a request to be passed on", within=30)
        with pytest.raises(DaemonRefused, match=r"did not answer .* whether it did what was asked is unknown"):
            second.submit("once", "true")
        until(lambda: leads(second), what="the second to lead", within=LEASE_S + 60)
        assert names(second) == (["once"] if exists else [])
        if not exists:
            second.submit("once", "true")
        until(lambda: second.state("once") in FINAL, what="it to end", within=120)
        assert names(second) == ["once"]
        assert len({span.machine_id for span in first.ledger()}) == 1
