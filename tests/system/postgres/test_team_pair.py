"""A team at two daemons: `spotctl` finds the one that leads, and a waiting one knows who may ask."""

from __future__ import annotations

import signal
import warnings
from contextlib import suppress
from pathlib import Path

import pytest

from spotd.client.daemon import Daemon
from spotd.client.transport import ClientError, DaemonNotice, DaemonRefused, DaemonUnreachable
from spotd.store.postgres import LEASE_S
from spotd.tokens import digest_of, new_user_token
from tests.e2e.ctl import log_lines
from tests.e2e.harness import Lab, until
from tests.integration.team.certificates import Authority
from tests.integration.team.conftest import free_port
from tests.system.postgres.pairs import leads, two_daemons

pytestmark = pytest.mark.system


def serve_team(found: Lab, authority: Authority, token: str) -> str:
    """The daemon serves the API by TCP to an operator; returns its URL."""
    certificate, key = authority.issue(f"api-{found.folder.name}", "127.0.0.1")
    port, config = free_port(), found.folder / "config.toml"
    tables = f'[api]\nlisten = "127.0.0.1:{port}"\ncertificate = "{certificate}"\nkey = "{key}"\n'
    user = f'[users.ole]\nrole = "operate"\ntoken_sha256 = "{digest_of(token).hex()}"\n'
    config.write_text(f"{config.read_text()}\n{tables}{user}")
    config.chmod(0o600)
    return f"https://127.0.0.1:{port}"


def pid_at(daemon: Daemon) -> int:
    """Of the process that answers there, 0 where none does."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DaemonNotice)
        with suppress(ClientError):
            return daemon.status()["status"]["pid"]
    return 0


def test_the_leader_is_found_before_and_after_it_was_killed(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority, token, file = Authority(tmp_path), new_user_token(), tmp_path / "token"
    file.write_text(token)
    file.chmod(0o600)
    with two_daemons(tmp_path, url) as pair:
        places = [serve_team(one, authority, token) for one in (pair.second, pair.first)]
        monkeypatch.setenv("SPOTCTL_CA", str(authority.file))
        monkeypatch.setenv("SPOTCTL_TOKEN_FILE", str(file))
        pair.start()
        monkeypatch.setenv("SPOTCTL_URL", places[0])
        leader = pair.first.process
        assert leader is not None
        until(lambda: pid_at(Daemon()) == leader.pid, what="the second to pass it on", within=30)
        monkeypatch.setenv("SPOTCTL_URL", ",".join(places))
        ole = Daemon()
        assert ole.status()["status"]["version"]
        pair.first.kill()

        def answers() -> bool:
            assert pair.second.process is not None
            return pid_at(ole) == pair.second.process.pid and leads(pair.second)

        until(answers, what="the second to lead", within=LEASE_S + 60)
        assert ole.place == places[0]
        pair.first.start(wait=False)
        until(lambda: log_lines(pair.first, "daemon.waits"), what="the first to wait", within=60)
        config = pair.first.folder / "config.toml"
        config.write_text(config.read_text().partition("[users.ole]")[0])
        assert pair.first.process is not None
        pair.first.process.send_signal(signal.SIGHUP)
        monkeypatch.setenv("SPOTCTL_URL", places[1])

        def is_refused() -> bool:
            try:
                Daemon().status()
            except DaemonRefused as exc:
                return exc.code == "unauthorized"
            except DaemonUnreachable:
                return False  # the reload ended the connection of the user under this very request
            return False

        until(is_refused, what="the waiting one to forget the user", within=60)
