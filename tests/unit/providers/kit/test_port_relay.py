"""Ports of machines that only run commands for us: own hosts, and nodes of a Slurm cluster behind their login node."""

from __future__ import annotations

import base64
import shlex
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random

import anyio
import pytest

from spotd_providers.contract.errors import Unavailable
from spotd_providers.contract.provider import PortConnection
from spotd_providers.kit import port_relay
from spotd_providers.slurm.plugin import SlurmProvider
from spotd_providers.ssh.plugin import SshProvider
from spotd_providers.testkit.suite import an_offer, buy_machine
from tests.cases import every
from tests.unit.providers.slurm import harness as slurm
from tests.unit.providers.ssh import harness as ssh
from tests.unit.providers.ssh.harness import SshHarness

ODD = bytes(range(256)) * 40 + b"\n\n\0" + Random(21).randbytes(70_000)
SRUN = """#!/bin/sh
while :; do case $1 in --*) echo "$1" >>"{told}"; shift ;; *) break ;; esac; done
exec "$@"
"""


@contextmanager
def echo_server() -> Iterator[int]:
    """Send back what comes, to every connection, and close once nothing more comes."""

    def serve(near: socket.socket) -> None:
        with near:
            while data := near.recv(65536):
                near.sendall(data)

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


async def exchange(connection: PortConnection, sent: bytes) -> bytes:
    got = bytearray()
    async with anyio.create_task_group() as group:

        async def send() -> None:
            await connection.send(sent)
            await connection.send_eof()

        group.start_soon(send)
        while data := await connection.receive():
            got += data
    return bytes(got)


@pytest.mark.process
def test_a_port_of_a_job_on_an_own_host_carries_any_bytes_for_several_at_once(tmp_path: Path) -> None:
    async def story(h: SshHarness, provider: SshProvider) -> None:
        h.hosts["titan"].profile = "echo Welcome; set -x; echo careful >&2"
        h.hosts["atlas"].profile = h.hosts["titan"].profile
        _, machine = await buy_machine(h)
        with echo_server() as port:
            open_now = [await provider.open_port(machine.ref, port) for _ in range(6)]
            for number, one in enumerate(open_now):
                sent = bytes([number]) * number + ODD
                assert await exchange(one, sent) == sent
            for one in open_now:
                await one.aclose()
            assert len(h.server.talks) == 6
        with socket.create_server(("127.0.0.1", 0)) as unused:
            port = unused.getsockname()[1]
        with pytest.raises(Unavailable, match=rf"nothing answers at port {port} of the machine: Connection refused"):
            await provider.open_port(machine.ref, port)
        await provider.terminate(machine.ref)
        with pytest.raises(Unavailable, match="does not run"):
            await provider.open_port(machine.ref, port)

    ssh.play(tmp_path, story)


@pytest.mark.process
def test_a_port_of_a_slurm_job_is_reached_by_a_step_of_it(tmp_path: Path) -> None:
    async def story(h: slurm.SlurmHarness, provider: SlurmProvider) -> None:
        told = tmp_path / "told"
        h.login.program("srun", SRUN.format(told=told))
        _, machine = await buy_machine(h, await an_offer(h))
        await h.settle()
        number = machine.ref.instance_id.partition(":")[0]
        with echo_server() as port:
            one = await provider.open_port(machine.ref, port)
            assert await exchange(one, ODD) == ODD
            await one.aclose()
        assert {f"--jobid={number}", "--overlap"} <= set(told.read_text().split())
        where = await provider.shell(machine.ref)
        assert (where.host, where.user) == ("127.0.0.1", "login")
        assert shlex.join(where.command) == f"srun --overlap --nodes=1 --ntasks=1 --jobid={number} --pty bash"
        assert where.no_ports

    slurm.play(tmp_path, story)


class Script:
    """Pipes that print what is in a list, and then nothing more."""

    def __init__(self, *pieces: bytes) -> None:
        self.pieces = list(pieces)
        self.is_closed = False

    async def read(self) -> bytes:
        return self.pieces.pop(0) if self.pieces else b""

    async def write(self, data: bytes) -> None:
        del data

    async def aclose(self) -> None:
        self.is_closed = True


@pytest.mark.parametrize(
    ("pieces", "words"),
    [
        pytest.param([], "ended", id="nothing"),
        pytest.param([b"no such command\n"], "ended", id="no relay"),
        pytest.param([b"x" * 40_000, b"x" * 40_000], "no line of a relay", id="a long line"),
        pytest.param([b"x\n" * 20_000, b"y\n" * 20_000], "starts no relay", id="very many lines"),
        pytest.param([b"MARK n", b"o \x1b[2Jgone\n"], "nothing answers at port 7", id="a hostile reason"),
    ],
)
def test_what_starts_no_relay_is_given_up_and_ended(
    pieces: list[bytes], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("secrets.token_hex", lambda _: "MARK")
    made = Script(*pieces)

    async def run(_command: str) -> Script:
        return made

    async def main() -> None:
        with pytest.raises(Unavailable, match=words) as raised:
            await port_relay.open_relay(run, 7, who="a host", path="/bin")
        assert "\x1b" not in str(raised.value)
        assert made.is_closed

    anyio.run(main)


@every("line", [b"!!!\n", b"AAA\n", b"A" * 70_000])
def test_bytes_that_no_relay_wrote_end_the_connection(line: bytes) -> None:
    async def main() -> None:
        with pytest.raises(Unavailable, match="no line of a relay"):
            await port_relay.RelayConnection(Script(line), "a host").receive()

    anyio.run(main)


def test_many_lines_that_arrive_together_are_no_long_line() -> None:
    line = base64.b64encode(b"x" * 16_384) + b"\n"
    together = line * 8

    async def main() -> None:
        made = port_relay.RelayConnection(Script(together[:20_000], together[20_000:]), "a host")
        assert [len(await made.receive()) for _ in range(8)] == [16_384] * 8

    anyio.run(main)
