"""A daemon whose API is served by TLS on loopback, in a loop of its own, and users with tokens."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from spotd.client.daemon import Daemon
from spotd.core.domain.callers import Caller, Right
from spotd.daemon.policy import Settings, User
from spotd.service.team import TeamListener, waiting_app
from spotd.tokens import digest_of, new_user_token
from spotd_providers.contract.values import InstallId, MicroUsd
from tests.integration.team.certificates import Authority
from tests.unit.api.place import Place, place
from tests.unit.daemon.rig import Log

DOLLAR = 1_000_000
TOKENS = {name: new_user_token() for name in ("ada", "eve", "vic", "ole")}


def user(name: str, right: Right, budget: float | None = None) -> User:
    limit = None if budget is None else MicroUsd(round(budget * DOLLAR))
    return User(caller=Caller(name=name, right=right, budget_per_day=limit), digest=digest_of(TOKENS[name]))


USERS = (
    user("ada", Right.SUBMIT, 50),
    user("eve", Right.SUBMIT, 50),
    user("vic", Right.VIEW),
    user("ole", Right.OPERATE),
)


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


class Team:
    """The listener of a daemon, and how a user of a token reaches it."""

    def __init__(self, served: Place, folder: Path, files: tuple[Path, Path] | None) -> None:
        self.served = served
        self.port = free_port()
        self.log = Log()
        self._folder = folder
        self.settings = Settings(
            install=InstallId("lab"),
            state_dir=folder,
            state_url=folder / "state",
            socket=served.socket,
            store_place="",
            open_objects=lambda: served.rig.objects,
            providers=(),
            api_address=("127.0.0.1", self.port),
            api_files=files,
            users=USERS,
        )
        self.listener = self._made()

    def _made(self) -> TeamListener:
        found = TeamListener(self.settings, ("127.0.0.1", self.port), log=self.log)
        found.gate.app = self.served
        return found

    @property
    def url(self) -> str:
        return f"{'https' if self.settings.api_files else 'http'}://127.0.0.1:{self.port}"

    def token_file(self, name: str, token: str = "") -> Path:
        path = self._folder / f"{name}.token"
        path.write_text(token or TOKENS[name])
        path.chmod(0o600)
        return path

    def set_users(self, *users: User) -> None:
        async def reload() -> None:
            self.listener.reload(replace(self.settings, users=users))

        self.served.call(reload)

    def wait_for_lead(self) -> None:
        self.listener.gate.app = waiting_app(lambda: "the state is in use by process 7 on other")


@pytest.fixture(scope="session")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture
def as_user(authority: Authority, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A client that reaches daemons by the environment, as spotctl does."""

    def client(name: str, *teams: Team, token: str = "", ca: Path | None = authority.file, host: str = "") -> Daemon:
        urls = ",".join(team.url.replace("127.0.0.1", host or "127.0.0.1") for team in teams)
        monkeypatch.setenv("SPOTCTL_URL", urls)
        monkeypatch.setenv("SPOTCTL_TOKEN_FILE", str(teams[0].token_file(name, token)))
        if ca is None:
            monkeypatch.delenv("SPOTCTL_CA", raising=False)
        else:
            monkeypatch.setenv("SPOTCTL_CA", str(ca))
        return Daemon()

    return client


@contextmanager
def team_of(folder: Path, files: tuple[Path, Path] | None) -> Iterator[Team]:
    """The API is served to users until the block ends."""
    with place() as served:
        found = Team(served, folder, files)
        running = served._portal.start_task_soon(found.listener.run)
        try:
            reached(found.port)
            yield found
        finally:
            running.cancel()


def reached(port: int) -> None:
    """Wait until something listens."""
    for _ in range(10_000):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
    raise AssertionError("nothing listens")


@pytest.fixture
def team(tmp_path: Path, authority: Authority) -> Iterator[Team]:
    with team_of(tmp_path, authority.issue(f"t{tmp_path.name[-20:]}", "127.0.0.1", "localhost")) as found:
        yield found
