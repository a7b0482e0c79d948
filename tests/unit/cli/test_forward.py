"""`spotctl forward` where the daemon itself leads to the machine: own hosts, Slurm, Kubernetes."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import pytest
from anyio.abc import SocketStream

from spotd.api.handlers import ports as port_handlers
from spotd.core.domain.states import JobState
from spotd.daemon.market.guarded import guarded
from spotd.shell_address import fault_of
from spotd_providers.contract.errors import Unavailable
from spotd_providers.contract.provider import PortConnection
from spotd_providers.contract.values import Capability, InstanceRef, Power
from tests.cases import every
from tests.unit.api import worlds
from tests.unit.cli.conftest import Ctl
from tests.unit.daemon.shop import Shop


class Plain:
    """A connection to this computer, as if it was the machine."""

    def __init__(self, stream: SocketStream) -> None:
        self._stream = stream

    async def receive(self) -> bytes:
        try:
            return await self._stream.receive()
        except anyio.EndOfStream:
            return b""

    async def send(self, data: bytes) -> None:
        await self._stream.send(data)

    async def send_eof(self) -> None:
        await self._stream.send_eof()

    async def aclose(self) -> None:
        await self._stream.aclose()


class Leading(Shop):
    """A shop that leads to the ports of its machines."""

    power = Capability(available=True)
    opened = 0

    @property
    def capabilities(self) -> Mapping[Power, Capability]:
        return {**super().capabilities, Power.PORTS: self.power}

    async def open_port(self, ref: InstanceRef, port: int) -> PortConnection:
        try:
            stream = await anyio.connect_tcp("127.0.0.1", port)
        except OSError as exc:
            raise Unavailable(f"nothing answers at port {port} of the machine: Connection refused") from exc
        self.opened += 1
        return Plain(stream)


@pytest.fixture
def shop(ctl: Ctl, monkeypatch: pytest.MonkeyPatch) -> Leading:
    """The shop on whose machine `llama-lora` runs."""
    made = Leading(ctl.rig.clock)
    entries: Any = ctl.place.handlers.context.providers
    name = ctl.rig.shop.name
    entries[name] = replace(entries[name], provider=guarded(made, clock=ctl.rig.clock, log=ctl.rig.log))
    ctl.place.write(worlds.running(), worlds.waiting())
    monkeypatch.setattr(port_handlers, "CHECK_EVERY_S", 0.02)
    return made


@pytest.fixture
def page() -> Iterator[int]:
    """The port of a program on the machine, which sends back what comes in capitals."""

    def serve(near: socket.socket) -> None:
        with near:
            while data := near.recv(65536):
                near.sendall(data.upper())

    def accept() -> None:
        while True:
            try:
                near, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=serve, args=(near,), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=accept, daemon=True).start()
        yield listener.getsockname()[1]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def reach(local: int) -> socket.socket:
    for _ in range(2000):
        try:
            return socket.create_connection(("127.0.0.1", local), timeout=20)
        except OSError:
            threading.Event().wait(0.01)
    raise AssertionError("nothing listens")


def whole(near: socket.socket) -> bytes:
    got = b""
    while data := near.recv(65536):
        got += data
    return got


def meanwhile(work: Callable[[], Any], run: Callable[[], Any]) -> tuple[Any, Any]:
    with ThreadPoolExecutor(1) as thread:
        done = thread.submit(work)
        result = run()
        return done.result(30), result


@pytest.mark.parametrize(
    ("state", "code", "words"),
    [
        (JobState.SUCCEEDED, 0, "has ended: SUCCEEDED"),
        (JobState.FAILED, 1, "error: llama-lora has ended: FAILED"),
        (JobState.RECOVERING, 5, "the job has left this machine (RECOVERING)"),
    ],
)
def test_several_connections_are_carried_until_the_job_leaves_the_machine(
    state: JobState, code: int, words: str, ctl: Ctl, shop: Leading, page: int
) -> None:
    local = free_port()

    def use() -> list[bytes]:
        near = [reach(local) for _ in range(8)]
        for number, one in enumerate(near):
            one.sendall(b"step %d " % number + b"x" * 200_000)
            one.shutdown(socket.SHUT_WR)
        got = [whole(one) for one in near]
        for one in near:
            one.close()
        ctl.place.write(worlds.ended(state, name="llama-lora", ident=worlds.RUNNING_ID))
        return got

    got, result = meanwhile(use, lambda: ctl("forward", "llama-lora", f"{page}:{local}"))
    assert got == [b"STEP %d " % number + b"X" * 200_000 for number in range(8)]
    assert (result.code, result.out) == (code, "")
    assert words in result.err
    assert shop.opened == 9, "one to see that something answers, and one for each connection"
    folder = Path(os.environ["SPOTD_SOCKET"]).parent
    assert not list(folder.glob("port-*")), "the daemon's socket is gone with the use"


def test_a_daemon_that_stops_and_a_time_that_is_over_end_it(ctl: Ctl, shop: Leading, page: int) -> None:
    result = ctl("forward", "llama-lora", f"{page}:{free_port()}", "--for", "1s")
    assert (result.code, "the time of --for is over" in result.err) == (0, True)
    assert ctl("forward", "llama-lora", "6006", "--for", "soon").code == 2


def test_a_port_that_is_taken_here_is_named_with_a_way_out(ctl: Ctl, shop: Leading, page: int) -> None:
    result = ctl("forward", "llama-lora", str(page))
    assert result.code == 74
    assert f"port {page} of this computer cannot be used: another program listens there" in result.err
    assert "forward JOB PORT:LOCAL" in result.err
    assert not shop.opened


def test_where_nothing_answers_and_where_nothing_leads_there_a_sentence_says_why(ctl: Ctl, shop: Leading) -> None:
    away = free_port()
    result = ctl("forward", "llama-lora", f"{away}:{free_port()}")
    assert (result.code, result.out) == (5, "")
    assert f"nothing answers at port {away} of the machine: Connection refused" in result.err
    shop.power = Capability(available=False, reason="machines of this shop have no doors")
    result = ctl("forward", "llama-lora", f"{away}:{free_port()}")
    assert (result.code, "machines of this shop have no doors" in result.err) == (2, True)
    assert "has no machine now" in ctl("forward", "prep", str(away)).err
    assert ctl("forward", "nothing", str(away)).code == 6
    assert ctl("forward", "llama-lora", str(away), "--print").code == 2


def test_only_its_user_may_open_the_socket(ctl: Ctl, shop: Leading, page: int) -> None:
    from spotd.client.daemon import Daemon

    records = Daemon().port("llama-lora", page)
    first = next(records)
    path = Path(first["socket"])
    assert (path.stat().st_mode & 0o777, path.parent.stat().st_mode & 0o777) == (0o600, 0o700)
    with socket.socket(socket.AF_UNIX) as near:
        near.connect(str(path))
        near.sendall(b"loss")
        near.shutdown(socket.SHUT_WR)
        assert whole(near) == b"LOSS"
    ctl.place.write(worlds.ended(JobState.FAILED, name="llama-lora", ident=worlds.RUNNING_ID))
    assert next(records)["kind"] == "end"
    assert not path.exists()


@pytest.mark.parametrize("port", ["0", "65536", "a", "1e3", "-1", "6006%0a"])
def test_what_is_no_port_is_refused_by_the_daemon(port: str, ctl: Ctl, shop: Leading) -> None:
    from spotd.client.transport import DaemonRefused, Transport

    with pytest.raises(DaemonRefused):
        Transport(Path(os.environ["SPOTD_SOCKET"])).json("GET", f"/v1/jobs/llama-lora/ports/{port}")


@every(
    ("host", "command"),
    [
        ("", ()),
        ("", ("rm", "-rf", "/")),
        ("", ("/tmp/kubectl",)),
        ("", ("kubectl", "exec", "a;b")),
        ("login", ("srun", "$(id)")),
        ("login", ("srun", "a b")),
        ("login", ("srun", 7)),
        ("login", ("-oProxyCommand=x",)),
        ("login", tuple("a" * 40)),
    ],
)
def test_a_command_that_no_provider_needs_is_refused(host: str, command: tuple[Any, ...]) -> None:
    assert fault_of(host, 22, "me", command)
    assert not fault_of("login", 22, "me", ("srun", "--overlap", "--jobid=7", "--pty", "bash"))
    assert not fault_of("", 22, "me", ("kubectl", "-n", "jobs", "exec", "-it", "pod-1", "-c", "job", "--", "sh"))
