"""Ports of a job's machine at this computer: loopback only, for as long as the job has the machine."""

from __future__ import annotations

import errno
import queue
import socket
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from spotd.cli.entry import CommandFailed, ExitCode, of_state
from spotd.client.daemon import Daemon
from spotd.client.transport import ClientError

CONNECTIONS_MAX: Final = 64
"""At a time, of one port."""
CONNECT_S: Final = 30.0
PIECE: Final = 64 * 1024
FINAL: Final = frozenset({"SUCCEEDED", "FAILED", "CANCELLED", "EXPIRED"})


def listen(port: int) -> socket.socket:
    """Listen on a port of this computer's loopback address.

    Raises:
        CommandFailed: it is taken.
    """
    try:
        return socket.create_server(("127.0.0.1", port))
    except OSError as exc:
        is_taken = exc.errno == errno.EADDRINUSE
        reason = "another program listens there" if is_taken else exc.strerror or type(exc).__name__
        raise CommandFailed(
            f"port {port} of this computer cannot be used: {reason}",
            code=ExitCode.LOCAL_IO,
            hint="choose another one here: spotctl forward JOB PORT:LOCAL",
        ) from exc


@dataclass(frozen=True, slots=True)
class Opened:
    """A port that is reached now."""

    port: int


def carry(
    daemon: Daemon, ref: str, listeners: Mapping[int, socket.socket], said: queue.Queue[Opened | str | ClientError]
) -> None:
    """Lead to each of these ports of the machine; what becomes of each is put into `said`."""
    for port, listener in listeners.items():
        threading.Thread(
            target=_follow, args=(daemon, ref, port, listener, said), daemon=True, name=f"port {port}"
        ).start()


def _follow(
    daemon: Daemon, ref: str, port: int, listener: socket.socket, said: queue.Queue[Opened | str | ClientError]
) -> None:
    try:
        for record in daemon.port(ref, port):
            if record["kind"] == "open":
                said.put(Opened(port))
                where = (listener, record["socket"])
                threading.Thread(target=_accept, args=where, daemon=True, name=f"accept {port}").start()
            else:
                said.put(record["text"])
                return
        said.put("the daemon stopped")
    except ClientError as exc:
        said.put(exc)


def _accept(listener: socket.socket, path: str) -> None:
    free = threading.BoundedSemaphore(CONNECTIONS_MAX)
    while True:
        free.acquire()
        try:
            near, _ = listener.accept()
        except OSError:
            return
        threading.Thread(target=_connect, args=(near, path, free), daemon=True, name="forwarded").start()


def _connect(near: socket.socket, path: str, free: threading.BoundedSemaphore) -> None:
    with suppress(OSError), near, socket.socket(socket.AF_UNIX) as far:
        far.settimeout(CONNECT_S)
        far.connect(path)
        far.settimeout(None)
        back = threading.Thread(target=_copy, args=(far, near), daemon=True, name="forwarded back")
        back.start()
        _copy(near, far)
        back.join()
    free.release()


def _copy(source: socket.socket, target: socket.socket) -> None:
    """Copy until the source has no more, and say so to the target."""
    with suppress(OSError):
        while data := source.recv(PIECE):
            target.sendall(data)
    # Of a connection that broke the other half would wait for ever.
    with suppress(OSError):
        target.shutdown(socket.SHUT_WR)


def left_machine(daemon: Daemon, ref: str, words: str) -> CommandFailed | None:
    """Return what ends a forwarding whose job has left the machine; `None` where it succeeded."""
    state = str(daemon.job(ref)["job"]["state"])
    if state not in FINAL:
        return CommandFailed(f"{ref}: {words} ({state})", code=ExitCode.UNREACHABLE, hint=f"spotctl why {ref}")
    code = of_state(state)
    if code is ExitCode.OK:
        return None
    return CommandFailed(f"{ref} has ended: {state}", code=code, hint=f"spotctl show {ref}")


def words_of(ports: Sequence[tuple[int, int]]) -> str:
    return ", ".join(f"http://127.0.0.1:{local}" for _, local in ports)
