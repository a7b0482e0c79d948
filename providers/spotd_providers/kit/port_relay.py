"""Connections to a port of a machine through a program that runs there: for machines that only run commands for us.

The program connects to the loopback address there. Both directions are lines of base64, since what lies between (a
login shell, Slurm's `srun`) may hold back what is no whole line; an empty line says that nothing more comes. Whatever
was printed before the program began is skipped up to a mark that was drawn for this connection.
"""

from __future__ import annotations

import base64
import binascii
import secrets
import shlex
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Final, Protocol

import anyio

from spotd_providers.contract.errors import Unavailable
from spotd_providers.kit.text import clean

OPEN_S: Final = 25.0
GREETING_BYTES_MAX: Final = 64 * 1024
LINE_BYTES_MAX: Final = 64 * 1024
SEND_BYTES: Final = 16 * 1024
CLOSE_S: Final = 5.0
RELAY: Final = """\
import base64, os, socket, sys, threading
def say(data):
    sys.stdout.buffer.write(data + b"\\n")
    sys.stdout.buffer.flush()
try:
    there = socket.create_connection(("127.0.0.1", int(sys.argv[2])), 10)
except OSError as exc:
    say(("%s no %s" % (sys.argv[1], exc.strerror or exc)).encode())
    sys.exit(0)
there.settimeout(None)
say((sys.argv[1] + " ok").encode())
def forward():
    try:
        for line in sys.stdin.buffer:
            data = base64.b64decode(line)
            if data:
                there.sendall(data)
            else:
                there.shutdown(socket.SHUT_WR)
    finally:
        os._exit(0)
thread = threading.Thread(target=forward)
thread.start()
try:
    while True:
        data = there.recv(16384)
        say(base64.b64encode(data))
        if not data:
            break
except OSError:
    os._exit(0)
thread.join()
"""


class Pipes(Protocol):
    """The standard input and output of a program that runs elsewhere."""

    async def read(self) -> bytes:
        """Return what it printed; empty at its end."""
        ...

    async def write(self, data: bytes) -> None: ...

    async def aclose(self) -> None: ...


class RelayConnection:
    """A `PortConnection` over a running relay."""

    def __init__(self, pipes: Pipes, who: str) -> None:
        self._pipes = pipes
        self._who = who
        self._rest = b""

    async def _line(self, *, most: int) -> bytes:
        """Return the next line without its end; what is left of one that was cut counts as none."""
        while b"\n" not in self._rest:
            if len(self._rest) > most:
                raise Unavailable(f"{self._who} sends what is no line of a relay")
            try:
                piece = await self._pipes.read()
            except OSError as exc:
                raise Unavailable(f"the way to {self._who} broke") from exc
            if not piece:
                raise Unavailable(f"the way to {self._who} ended")
            self._rest += piece
        line, _, self._rest = self._rest.partition(b"\n")
        return line

    async def greet(self, mark: str, port: int) -> None:
        """Wait until the relay says that it is connected.

        Raises:
            Unavailable: it is not, with its reason.
        """
        skipped = 0
        while True:
            line = await self._line(most=GREETING_BYTES_MAX)
            _, found, said = line.decode("utf-8", "replace").rpartition(f"{mark} ")
            if found and said == "ok":
                return
            if found and said.startswith("no "):
                raise Unavailable(f"nothing answers at port {port} of the machine: {clean(said[3:])}")
            skipped += len(line) + 1
            if skipped > GREETING_BYTES_MAX:
                raise Unavailable(f"{self._who} starts no relay")

    async def receive(self) -> bytes:
        try:
            return base64.b64decode(await self._line(most=LINE_BYTES_MAX), validate=True)
        except binascii.Error as exc:
            raise Unavailable(f"{self._who} sends what is no line of a relay") from exc

    async def send(self, data: bytes) -> None:
        for at in range(0, len(data), SEND_BYTES):
            await self._write(base64.b64encode(data[at : at + SEND_BYTES]) + b"\n")

    async def send_eof(self) -> None:
        await self._write(b"\n")

    async def _write(self, data: bytes) -> None:
        try:
            await self._pipes.write(data)
        except OSError as exc:
            raise Unavailable(f"the way to {self._who} broke") from exc

    async def aclose(self) -> None:
        with anyio.move_on_after(CLOSE_S, shield=True), suppress(OSError):
            await self._pipes.aclose()


async def open_relay(
    run: Callable[[str], Awaitable[Pipes]], port: int, *, who: str, path: str, through: tuple[str, ...] = ()
) -> RelayConnection:
    """Connect to a port of where `run` runs a command.

    Args:
        path: PATH of the command and of Python there.
        through: words before Python, which lead on to the machine.

    Raises:
        Unavailable: nothing listens there, or no relay starts.
    """
    mark = secrets.token_hex(16)
    words = ("env", f"PATH={path}", *through, "python3", "-c", RELAY, mark, str(port))
    made: RelayConnection | None = None
    try:
        with anyio.fail_after(OPEN_S):
            made = RelayConnection(await run(shlex.join(words)), who)
            await made.greet(mark, port)
            return made
    except TimeoutError as exc:
        await _give_up(made)
        raise Unavailable(f"port {port} of the machine was not reached within {OPEN_S:.0f} s") from exc
    except BaseException:
        await _give_up(made)
        raise


async def _give_up(made: RelayConnection | None) -> None:
    if made is not None:
        await made.aclose()
