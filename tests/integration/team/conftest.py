"""A daemon whose API is served by TLS on loopback, in a loop of its own, and users with tokens."""

from __future__ import annotations

import shutil
import socket
import tempfile
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest

from spotd.api.app import make_app
from spotd.certificates import certificate_hash
from spotd.client.daemon import Daemon
from spotd.core.domain.policy import Caller, Right
from spotd.daemon.commits import Database
from spotd.daemon.policy import Settings, User
from spotd.service.http_server import serve
from spotd.service.team import TeamListener
from spotd.service.waiting import READS, DatabaseReads, WaitingApp
from spotd.store import Leader, SecretsKey, SecretsKeys, StoreInUse
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


LEADER = "process 7 on other"
KEYS = SecretsKeys(current=SecretsKey.of(b"k" * 32))


def in_use(leader: Leader | None) -> StoreInUse:
    return StoreInUse(f"the state is in use by {LEADER}", hint="wait", leader=leader)


def proven(leader: Leader) -> Leader:
    """The same as stated by a daemon with the key of these tests."""
    return replace(leader, proofs=KEYS.proofs_of(leader.term, leader.url, leader.certificate))


class Stated(Database):
    """The row of the leader, as far as it is stated."""

    def __init__(self, term: str) -> None:
        self._term = term
        self.api = ("", "")
        self.proofs: tuple[str, ...] = ()

    @property
    def term(self) -> str:
        return self._term

    def state_api(self, url: str, certificate: str, proofs: Sequence[str]) -> None:
        self.api, self.proofs = (url, certificate), tuple(proofs)


class StateReads(DatabaseReads):
    """Answers from the state of this very place."""

    def __init__(self, served: Place) -> None:
        self._served = served

    @asynccontextmanager
    async def app(self) -> AsyncIterator[Any]:
        if self._served.rig.control_loop.state is None:
            await self._served.rig.control_loop.adopt()
        yield make_app(self._served.handlers, on_failure=lambda *_: None, only=READS)

    def end(self) -> None:
        pass


async def _event() -> tuple[anyio.Event, anyio.Event]:
    return anyio.Event(), anyio.Event()


async def _set(event: anyio.Event) -> None:
    event.set()


class Team:
    """The listener of a daemon, and how a user of a token reaches it."""

    def __init__(self, served: Place, folder: Path, files: tuple[Path, Path] | None) -> None:
        self.served = served
        self.files = files
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

    def lead(self, term: str = "me.1", keys: SecretsKeys = KEYS) -> Leader:
        """As the daemon does that leads a state in PostgreSQL; what it states there."""
        self.settings = replace(self.settings, secrets_keys=keys)
        stated = Stated(term)

        async def begin() -> None:
            self.listener.reload(self.settings)
            self.listener.lead(stated)

        self.served.call(begin)
        assert stated.api == (self.url, certificate_hash(self.files[0]) if self.files else "")
        return Leader(term=term, words=LEADER, url=stated.api[0], certificate=stated.api[1], proofs=stated.proofs)

    def wait_for_lead(self, leader: Leader | None = None, keys: SecretsKeys = KEYS) -> WaitingApp:
        """As a daemon that waits while this one leads."""
        log = self.log

        async def begin() -> WaitingApp:
            return WaitingApp(in_use(leader), keys=lambda: keys, reads=StateReads(self.served), log=log)

        self.app = self.served.call(begin)
        self.listener.gate.app = self.app
        return self.app

    @contextmanager
    def owner(self) -> Iterator[Daemon]:
        """A client at the socket of a daemon that waits."""
        path = Path(tempfile.mkdtemp(prefix="spotd-")) / "s"
        closing = self.served.call(_event)
        with socket.socket(socket.AF_UNIX) as sock:
            sock.bind(str(path))
            sock.listen()
            task = self.served._portal.start_task_soon(
                partial(serve, self.app, sock, started=closing[0], closing=closing[1])
            )
            self.served.call(closing[0].wait)
            try:
                yield Daemon(path)
            finally:
                self.served.call(lambda: _set(closing[1]))
                task.result(20)
        shutil.rmtree(path.parent)


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
        served.handlers.context.users = lambda: {one.caller.name: one.caller for one in USERS}
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
