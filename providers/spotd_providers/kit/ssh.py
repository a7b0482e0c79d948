"""Calls of a host over SSH: one connection that is kept, a host key that was pinned, and answers that are whole.

The same calls can be made of this computer, where what SSH leads to is here (`LocalShell`).

A command runs in the user's login shell, whose profile may print what it likes. So a script is sent on standard input,
its answer stands between two marks that were drawn for this call, and without the second one it was cut off. What a
script does begins with its last line, since a shell runs what it has read so far when a connection breaks.

Nothing of the user's own OpenSSH settings, agent or known hosts is used. A key of a host that is not pinned, or not the
pinned one, is refused: it is added by a person, who compares its fingerprint.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
import shlex
import signal
import subprocess
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import anyio

from spotd_providers.contract.errors import AuthFailed, RateLimited, Unavailable
from spotd_providers.contract.provider import Clock
from spotd_providers.kit.boundary import install_command
from spotd_providers.kit.calls import RETRY_AFTER_MAX, Rest
from spotd_providers.kit.http import AnswerLost
from spotd_providers.kit.port_relay import Pipes

if TYPE_CHECKING:
    import asyncssh
    from anyio.abc import Process

CONNECT_S: Final = 10.0
REPEAT_WITHIN_S: Final = 5.0
KEEPALIVE_S: Final = 15
ANSWER_BYTES_MAX: Final = 4 * 1024 * 1024
CALLS_MAX: Final = 4
"""At a time on one connection; sshd allows ten."""
CHANGES: Final = frozenset({"launch", "end"})
"""Operations of a host's script that are not asked again by themselves; every other one is a read."""
BUSY_STATUS: Final = 75
"""What a script exits with that did nothing because another one is at work (`EX_TEMPFAIL`)."""
BUSY_WAIT: Final = timedelta(seconds=15)
FULL_WAIT: Final = timedelta(seconds=5)
CLOSES_WITHIN_S: Final = 1.0
_PIECE: Final = 64 * 1024
_REST_FIRST_S: Final = 5
_REST_MAX_S: Final = 60
_ASK_AGAIN: Final = re.compile(rb"ask again in (\d{1,6}) s")

Lines = list[list[str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class SshTarget:
    """Where a host is reached. `name` is how errors call it."""

    name: str
    address: str
    port: int
    user: str


def ssh_library() -> Any:
    """Return asyncssh, silent below warnings: at INFO it logs each command.

    Raises:
        AuthFailed: it is not installed.
    """
    try:
        import asyncssh
    except ImportError as exc:
        raise AuthFailed(f"SSH needs the library asyncssh: {install_command('ssh')}") from exc
    logging.getLogger("asyncssh").setLevel(logging.WARNING)
    return asyncssh


def own_key(path: Path) -> str:
    """Return the public half of the private key in this file, which is made unless it is there.

    Raises:
        AuthFailed: it cannot be read or made.
    """
    library = ssh_library()
    try:
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            key = library.generate_private_key("ssh-ed25519", comment="spotd")
            path.touch(mode=0o600)
            key.write_private_key(str(path))
        return str(library.read_private_key(str(path)).export_public_key().decode().strip())
    except (OSError, library.Error, ValueError) as exc:
        raise AuthFailed(f"the SSH key {path} cannot be used: {type(exc).__name__}") from exc


class _ConnectionBroke(AnswerLost):
    """Whether the script ran is not known; another connection may carry it at once, as after a time-out none would."""


class SshLink:
    """The connection to one host."""

    def __init__(self, target: SshTarget, *, key_file: Path, known_hosts: Path, clock: Clock) -> None:
        self._target = target
        self._key_file = key_file
        self._known_hosts = known_hosts
        self._connection: asyncssh.SSHClientConnection | None = None
        self._connecting = anyio.Lock()
        self._calls = anyio.CapacityLimiter(CALLS_MAX)
        self._rest = Rest(clock)
        self._failure: AuthFailed | Unavailable | None = None
        self._failures = 0
        self.requests_sent = 0

    @property
    def is_connected(self) -> bool:
        return self._connection is not None and not self._connection.is_closed()

    async def ask(
        self, command: str, script: str, *, timeout_s: float, patient: bool = False, repeatable: bool = False
    ) -> Lines:
        """Run a script by `command`, which reads it, and return the lines of its answer, split at tabs.

        Args:
            script: functions, and as its last line the call of one.
            patient: fail at once where a connection failed a moment ago, as for what is asked again and again.
            repeatable: run it once more where the connection broke under it: twice is as good as once.

        Raises:
            Unavailable, AuthFailed, RateLimited: it certainly did not run.
            AnswerLost: it may have run.
        """
        async with self._calls:
            begun = anyio.current_time()
            try:
                return await self._exchange(command, script, timeout_s, patient=patient)
            except _ConnectionBroke:
                # One that was silent until it broke is not worth a second wait.
                if not repeatable or anyio.current_time() - begun > REPEAT_WITHIN_S:
                    raise
            return await self._exchange(command, script, timeout_s, patient=patient)

    async def _exchange(self, command: str, script: str, timeout_s: float, *, patient: bool) -> Lines:
        library = ssh_library()
        connection, process = await self._session(command, patient=patient)
        token = secrets.token_hex(16)
        self.requests_sent += 1
        try:
            with anyio.fail_after(timeout_s):
                async with process:
                    process.stdin.write(_frame(script, token).encode())
                    process.stdin.write_eof()
                    text = await _read(process.stdout)
                    await process.wait_closed()
            return _lines(text, process.exit_status, token, who=self._target.name)
        except TimeoutError as exc:
            self._drop(connection)
            raise AnswerLost(f"{self._target.name} did not answer in time") from exc
        except (library.Error, OSError) as exc:
            self._drop(connection)
            raise _ConnectionBroke(f"the answer of {self._target.name} was lost") from exc
        except AnswerLost as exc:
            # asyncssh may show a connection that broke as the plain end of what the script printed.
            if connection.is_closed():
                raise _ConnectionBroke(str(exc)) from exc
            raise

    async def _session(self, command: str, *, patient: bool) -> tuple[asyncssh.SSHClientConnection, Any]:
        """Start the command; a connection that turns out to be dead is made anew once, since nothing ran on it."""
        library = ssh_library()
        cause: Exception | None = None
        for _ in range(2):
            connection = await self._reach(patient=patient)
            try:
                with anyio.fail_after(CONNECT_S):
                    return connection, await connection.create_process(command, encoding=None, stderr=library.STDOUT)
            except (library.Error, OSError, TimeoutError) as exc:
                if isinstance(exc, library.ChannelOpenError) and not await _closes(connection):
                    name = self._target.name
                    raise RateLimited(f"{name} takes no more sessions now", retry_after=FULL_WAIT) from exc
                cause = exc
                self._drop(connection)
        raise Unavailable(f"{self._target.name} does not answer") from cause

    async def _reach(self, *, patient: bool) -> asyncssh.SSHClientConnection:
        """Return the connection, made anew if there is none."""
        async with self._connecting:
            if self._connection is not None and not self._connection.is_closed():
                return self._connection
            pinned = self._known_keys()
            if patient and self._failure is not None and self._rest.left() > timedelta(0):
                raise type(self._failure)(str(self._failure))
            try:
                self._connection = await self._connect(pinned)
            except (AuthFailed, Unavailable) as exc:
                self._failures += 1
                self._failure = exc
                wait_s = min(_REST_FIRST_S * 2 ** min(self._failures, 8) // 2, _REST_MAX_S)
                self._rest.take(timedelta(seconds=wait_s))
                raise
            self._failure, self._failures = None, 0
            return self._connection

    async def _connect(self, pinned: bytes) -> asyncssh.SSHClientConnection:
        library, target = ssh_library(), self._target
        try:
            with anyio.fail_after(CONNECT_S):
                connection: asyncssh.SSHClientConnection = await library.connect(
                    target.address,
                    target.port,
                    username=target.user,
                    client_keys=[str(self._key_file)],
                    known_hosts=pinned,
                    config=None,
                    agent_path=None,
                    preferred_auth="publickey",
                    keepalive_interval=KEEPALIVE_S,
                    keepalive_count_max=3,
                )
                return connection
        except library.PermissionDenied as exc:
            raise AuthFailed(f"{target.name} refuses spotd's key for the user {target.user}") from exc
        except library.HostKeyNotVerifiable as exc:
            raise AuthFailed(
                f"{target.name} shows another host key than the pinned one: it was installed anew, or another machine"
                f" answers; `spotctl hosts rm {_address_words(target)}` and `hosts add` pin the new one"
            ) from exc
        except (library.Error, OSError, TimeoutError, ValueError) as exc:
            raise Unavailable(f"{target.name} does not answer ({type(exc).__name__})") from exc

    async def run(self, command: str) -> Pipes:
        """Start a command that is spoken with, on a connection of its own: sshd allows few sessions on one.

        Raises:
            Unavailable, AuthFailed: it certainly does not run.
        """
        library = ssh_library()
        connection = await self._connect(self._known_keys())
        self.requests_sent += 1
        try:
            with anyio.fail_after(CONNECT_S):
                process = await connection.create_process(command, encoding=None, stderr=library.DEVNULL)
                return _SshPipes(connection, process)
        except (library.Error, OSError, TimeoutError) as exc:
            connection.abort()
            raise Unavailable(f"{self._target.name} starts no program ({type(exc).__name__})") from exc
        except BaseException:
            connection.abort()
            raise

    def _known_keys(self) -> bytes:
        """Return the file of pinned keys, read each time, so that a new one needs no restart."""
        library, target = ssh_library(), self._target
        try:
            content = self._known_hosts.read_bytes()
            keys = library.import_known_hosts(content.decode()).match(target.address, "", _port(target))[0]
        except FileNotFoundError:
            content, keys = b"", []
        except (OSError, ValueError) as exc:
            raise AuthFailed(f"the pinned host keys in {self._known_hosts} cannot be read") from exc
        if not keys:
            raise AuthFailed(
                f"no host key of {target.name} is pinned: run `spotctl hosts add {_address_words(target)}`"
            )
        return content

    def _drop(self, connection: asyncssh.SSHClientConnection) -> None:
        connection.abort()
        if self._connection is connection:
            self._connection = None

    async def aclose(self) -> None:
        """End the connection; what was started on the host goes on."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.abort()
            with anyio.move_on_after(CONNECT_S, shield=True):
                await connection.wait_closed()


class _SshPipes:
    def __init__(self, connection: asyncssh.SSHClientConnection, process: Any) -> None:
        self._connection = connection
        self._process = process

    async def read(self) -> bytes:
        try:
            return bytes(await self._process.stdout.read(_PIECE))
        except ssh_library().Error as exc:
            raise OSError(type(exc).__name__) from exc

    async def write(self, data: bytes) -> None:
        try:
            self._process.stdin.write(data)
            await self._process.stdin.drain()
        except ssh_library().Error as exc:
            raise OSError(type(exc).__name__) from exc

    async def aclose(self) -> None:
        # What runs there sees the end of its input, and ends.
        self._connection.abort()
        await self._connection.wait_closed()


class LocalShell:
    """The same of this computer: no connection, and no environment of the daemon but the way home."""

    def __init__(self) -> None:
        self._calls = anyio.CapacityLimiter(CALLS_MAX)
        self.requests_sent = 0

    async def ask(
        self, command: str, script: str, *, timeout_s: float, patient: bool = False, repeatable: bool = False
    ) -> Lines:
        """Run a script as `SshLink.ask` does.

        Raises:
            Unavailable, RateLimited: it certainly did not run.
            AnswerLost: it may have run.
        """
        del patient, repeatable
        async with self._calls:
            token = secrets.token_hex(16)
            self.requests_sent += 1
            environ = {"HOME": str(Path.home()), "PATH": os.defpath, "LANG": "C.UTF-8"}
            try:
                process = await anyio.open_process(
                    shlex.split(command), stderr=subprocess.STDOUT, env=environ, start_new_session=True
                )
            except OSError as exc:
                raise Unavailable(f"no shell can be started here ({type(exc).__name__})") from exc
            try:
                with anyio.fail_after(timeout_s):
                    text = await _exchange(process, _frame(script, token).encode())
                    status = await process.wait()
            except (OSError, TimeoutError, anyio.BrokenResourceError) as exc:
                raise AnswerLost("the answer of this computer was lost") from exc
            finally:
                with anyio.CancelScope(shield=True):
                    if process.returncode is None:
                        with suppress(ProcessLookupError):
                            os.killpg(process.pid, signal.SIGKILL)
                    await process.aclose()
            return _lines(text, status, token, who="this computer")

    async def run(self, command: str) -> Pipes:
        """Start a command that is spoken with.

        Raises:
            Unavailable: it certainly does not run.
        """
        self.requests_sent += 1
        environ = {"HOME": str(Path.home()), "PATH": os.defpath, "LANG": "C.UTF-8"}
        try:
            process = await anyio.open_process(
                shlex.split(command), stderr=subprocess.DEVNULL, env=environ, start_new_session=True
            )
        except OSError as exc:
            raise Unavailable(f"no program can be started here ({type(exc).__name__})") from exc
        return _LocalPipes(process)

    async def aclose(self) -> None:
        """Do nothing: a shell lives for one call."""


class _LocalPipes:
    def __init__(self, process: Process) -> None:
        self._process = process

    async def read(self) -> bytes:
        if self._process.stdout is None:
            return b""
        try:
            return await self._process.stdout.receive(_PIECE)
        except anyio.EndOfStream:
            return b""
        except (anyio.BrokenResourceError, anyio.ClosedResourceError) as exc:
            raise OSError(type(exc).__name__) from exc

    async def write(self, data: bytes) -> None:
        if self._process.stdin is None:
            raise OSError("no pipe")
        try:
            await self._process.stdin.send(data)
        except (anyio.BrokenResourceError, anyio.ClosedResourceError) as exc:
            raise OSError(type(exc).__name__) from exc

    async def aclose(self) -> None:
        if self._process.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGTERM)
        await self._process.aclose()


async def _exchange(process: Process, script: bytes) -> bytes:
    """Send the script and return what it prints."""
    if process.stdin is None or process.stdout is None:
        raise OSError("the shell has no pipes")
    async with process.stdin as given:
        await given.send(script)
    text = bytearray()
    async for piece in process.stdout:
        text += piece
        if len(text) > ANSWER_BYTES_MAX:
            raise OSError("the answer is larger than any that makes sense")
    return bytes(text)


def _lines(text: bytes, status: int | None, token: str, *, who: str) -> Lines:
    """Return the lines between the marks."""
    if status == BUSY_STATUS:
        wait = _ASK_AGAIN.search(text)
        span = timedelta(seconds=int(wait[1])) if wait is not None else BUSY_WAIT
        raise RateLimited(f"{who} is busy", retry_after=min(span, RETRY_AFTER_MAX))
    _, begin, rest = text.decode("utf-8", "replace").partition(f"{token} begin\n")
    answer, end, _ = rest.partition(f"{token} end\n")
    if not begin or not end:
        raise AnswerLost(f"the answer of {who} is not whole")
    return [line.split("\t") for line in answer.splitlines() if line]


async def _closes(connection: asyncssh.SSHClientConnection) -> bool:
    """Whether the connection ends: its sessions are refused a moment before that is seen of itself."""
    with anyio.move_on_after(CLOSES_WITHIN_S):
        await connection.wait_closed()
    return connection.is_closed()


def printer(name: str, text: str) -> str:
    """Return a shell function of this name that prints the text, whatever it holds; no process list shows it."""
    mark = secrets.token_hex(16)
    return f"{name}() {{ cat <<'{mark}'\n{text}\n{mark}\n}}\n"


def _frame(script: str, token: str) -> str:
    """Return the script with its last line between marks, in a group: a part of one is a syntax error, and not run."""
    functions, _, call = script.rstrip("\n").rpartition("\n")
    busy = f"[ $? = {BUSY_STATUS} ] && exit {BUSY_STATUS}"
    return f"{functions}\n{{\necho '{token} begin'\n({call}) </dev/null\n{busy}\necho '{token} end'\nexit 0\n}}\n"


def _port(target: SshTarget) -> int | None:
    return None if target.port == 22 else target.port


def _address_words(target: SshTarget) -> str:
    return target.address if target.port == 22 else f"{target.address} --port {target.port}"


async def _read(stream: Any) -> bytes:
    text = bytearray()
    while piece := await stream.read(64 * 1024):
        text += piece
        if len(text) > ANSWER_BYTES_MAX:
            raise OSError("the answer is larger than any that makes sense")
    return bytes(text)
