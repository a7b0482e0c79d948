"""Several machines that run one command together: they find each other, begin at once, and end at once.

The provider gives each machine its rank. The first one, of rank 0, speaks for all: it alone writes to the store, except
for the content of parts of a checkpoint (`parts`). Its heartbeat is that of all, and it reports how they ended. It
listens on its own address and leaves that, with a token, in `gang.json` in the store; the others read it by a URL of
the grant, and connect. So what cannot read the grant cannot connect, and a machine that comes back after its attempt
has ended finds neither a grant nor the first machine.

All machines prepare side by side. Once all are ready the first one draws an id and a port for their rendezvous, and all
begin. From then on each connection carries a sign of life every second in both directions. A machine whose connection
breaks, or from which there was no sign for `silent_s`, is lost, and with it the attempt: the others stop their command.
A command that fails is no proof of an error of its own, since a lost machine makes the commands of all others fail: so
the first machine then asks every other one for an answer, and a machine that gives none is the cause.

Where the grant has `keep_s`, a loss of another one than the first does not end the attempt. All stop their command, the
first stores what is complete, reports which are lost, and waits for a grant of a later round, which says who takes part
from then on. Then the runners of all start once more, on the same machines. A machine of an earlier round than its
grant names is not taken in, and ends.

The loss of the first ends the attempt, since it alone may write. But where the grant has `next_url`, the others stop
their command and wait there for their next attempt, as long as before. Each writes a word meanwhile, which nothing is
restored from: so the daemon knows which of them live.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
import threading
from typing import Any, Callable, NamedTuple

from spotd_jobs.runner.handover import next_of
from spotd_jobs.runner.process import ProcessEnd
from spotd_jobs.runner.shutdown import Stop
from spotd_jobs.runner.store import ROUND_VARIABLE, NotCurrent, RunnerGrant, RunnerStore, round_of
from spotd_jobs.wire.client.sinks import SinkError, clean, log_line, reason_of
from spotd_jobs.wire.client.web import now_text, steady

RANK_VARIABLE = "SPOTD_NODE_RANK"
ADDRESS_VARIABLE = "SPOTD_NODE_ADDRESS"
KEPT = "kept"
"""The outcome of a command that was stopped since another machine is replaced: the attempt goes on."""
OBJECT = "gang.json"
WAITS = "waits/%d-%d.json"
"""The word of a machine that waits without the first one, by its round and by its rank at the provider."""
PING_S = 1.0
_SILENT_PINGS = 5
_ASK_EVERY_S = 2.0
_LEAST_PAUSE_S = 0.05
_ASLEEP_S = 5.0
"""A watch that comes so late has watched nothing meanwhile: this machine was suspended, or had no time to compute."""
_LINE_MAX = 1024 * 1024
_SIOCGIFADDR = 0x8915


class GangIncomplete(Exception):
    """Not all machines came, or this one does not know its place among them."""


class GangPlace(NamedTuple):
    """Which machine this is, of how many, and where the others reach it.

    Attributes:
        seats: by rank, the rank that the provider gave, and the round in which the machine came.
    """

    rank: int
    nodes: int
    address: str
    seats: tuple[tuple[int, int], ...] = ()


def place_of(grant: RunnerGrant) -> GangPlace | None:
    """Return this machine's place; `None` where it works alone.

    Raises:
        GangIncomplete: the provider gave it no place among those that the grant is for.
        NotCurrent: another machine has its place.
    """
    gang = grant.raw.get("gang")
    rank, address = os.environ.get(RANK_VARIABLE, ""), os.environ.get(ADDRESS_VARIABLE, "")
    if gang is None:
        if rank not in ("", "0"):
            raise GangIncomplete("this machine is number %s of several, and its attempt is for one" % clean(rank))
        return None
    nodes = int(gang["nodes"])
    since = gang.get("since") or [0] * nodes
    if not rank.isdigit() or int(rank) >= len(since) or not address:
        raise GangIncomplete("the provider did not say which of the %d machines this is, and its address" % nodes)
    came = os.environ.get(ROUND_VARIABLE, "") or "0"
    if str(since[int(rank)]) != came:
        raise NotCurrent("another machine has taken its place", grant.raw.get("self_terminate"))
    seats = tuple((seat, int(one)) for seat, one in enumerate(since) if one is not None)
    return GangPlace(seats.index((int(rank), int(came))), nodes, address, seats)


def next_url_of(grant: RunnerGrant) -> str:
    """Return where a machine that lost the first one finds its next attempt; empty where it is to end then."""
    return str((grant.raw.get("gang") or {}).get("next_url") or "")


def interface_of(address: str) -> str:
    """Return the name of the network interface with this address; empty where none has it."""
    try:
        import fcntl

        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            for _, name in socket.if_nameindex():
                try:
                    row = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                except OSError:
                    continue
                if socket.inet_ntoa(row[20:24]) == address:
                    return name
    except (ImportError, OSError):
        return ""
    return ""


class Link:
    """One connection to another machine, in lines of JSON.

    Args:
        on_message: called from the connection's own thread, in order.
        on_lost: called once, when the connection has ended.
        silent_s: nothing is sent for longer to a machine that takes nothing.
    """

    def __init__(
        self,
        connection: socket.socket,
        on_message: Callable[[Link, dict[str, Any]], None],
        on_lost: Callable[[Link], None],
        silent_s: float,
    ) -> None:
        self._socket = connection
        self._on_message = on_message
        self._on_lost = on_lost
        self._sending = threading.Lock()
        self.rank = -1
        self.alive_at = steady()
        self.is_open = True
        self.is_ready = False
        self.answered = 0
        connection.settimeout(None)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # A full pipe to a machine that is gone must not hold up this one.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", max(1, int(silent_s)), 0))

    def start(self) -> None:
        threading.Thread(target=self._read, name="gang-link", daemon=True).start()

    def send(self, **message: Any) -> None:
        """Send the message, or end the connection."""
        try:
            with self._sending:
                self._socket.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            self.close()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _read(self) -> None:
        try:
            with self._socket.makefile("rb") as lines:
                while True:
                    line = lines.readline(_LINE_MAX)
                    if not line.endswith(b"\n"):
                        break
                    message = json.loads(line)
                    self.alive_at = steady()
                    self._on_message(self, message)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            if self.is_open and not isinstance(error, OSError):
                log_line("another machine sent what is no message: " + type(error).__name__)
        self.is_open = False
        self.close()
        self._on_lost(self)


class MemberStore(RunnerStore):
    """Stores nothing: what a machine beside the first one prints goes to that one, which stores it.

    A machine that comes back from the dead has no other way to write, so it can spoil nothing.
    """

    forward: Callable[[str], None] = staticmethod(lambda _: None)

    @property
    def parallel(self) -> int:
        return 1

    def put_once(self, name: str, data: bytes) -> None:
        del name, data

    def put(
        self,
        name: str,
        data: bytes | memoryview,
        sha256: str | None = None,
        give_up: Callable[[], bool] | None = None,
    ) -> None:
        del sha256, give_up
        if name.startswith("log/"):
            self.forward(bytes(data).decode("utf-8", "replace"))

    def put_liveness_marker(self, data: bytes) -> None:
        del data

    def put_word(self, name: str, data: bytes) -> None:
        """Store that this machine waits; nothing is ever restored from that.

        Raises:
            SinkError: it is not stored, now.
        """
        super().put_once(name, data)


class PartStore(MemberStore):
    """Stores the content of this machine's part of a checkpoint, and nothing that gives it a meaning.

    Each upload draws the ends of its names, so none replaces what another machine sent. What no manifest of the first
    machine names is removed by the daemon.
    """

    @property
    def parallel(self) -> int:
        return super(MemberStore, self).parallel

    def put(
        self,
        name: str,
        data: bytes | memoryview,
        sha256: str | None = None,
        give_up: Callable[[], bool] | None = None,
    ) -> None:
        if name.startswith("data/"):
            super(MemberStore, self).put(name, data, sha256, give_up)
        else:
            super().put(name, data)


class Gang:
    """What one machine does together with the others. The subclasses are its two kinds of places."""

    store_type: type[RunnerStore] = RunnerStore

    def __init__(self, place: GangPlace, grant: RunnerGrant, boot: int) -> None:
        self.place = place
        self.has_parts = grant.checkpoint.get("saved_by") == "all"
        """Whether each machine saves a part of every checkpoint (`parts`)."""
        self.on_part: Callable[[int, dict[str, Any]], None] = lambda _rank, _row: None
        """Called with what another machine says of a checkpoint's parts, from the thread of its connection."""
        self._gang = grant.raw["gang"]
        self.grace_s = grant.stop_grace_s
        self._wait_s = float(self._gang["wait_s"])
        self.silent_s = float(self._gang["silent_s"])
        self.keep_s = float(self._gang.get("keep_s") or 0.0)
        self._next_url = next_url_of(grant)
        self.next_grant = ""
        """Where the grant of this machine's next attempt is, once it has one."""
        self.is_without_first = False
        """Whether this machine waits for its next attempt, since the first one is lost."""
        self.round = round_of(grant) or 0
        self._boot = boot
        self._own = (grant.job_id, grant.attempt)
        self._word_every_s = grant.heartbeat_s
        self._change = threading.Condition()
        self._wake: Callable[[], None] = lambda: None
        self._closed = False
        self._passed: Stop | None = None
        self._begun: dict[str, Any] | None = None
        self._lost = ""

    @property
    def saves(self) -> bool:
        """Whether what this machine's job saves, and its outputs, are stored."""
        return self.place.rank == 0

    def keeps(self, outcome: str) -> bool:
        """Whether this machine waits for another one after its command was stopped with this outcome."""
        is_lost = outcome == "member_lost" and self._begun is not None
        return self.keep_s > 0 and (outcome == KEPT or (is_lost and (self.place.rank == 0 or bool(self._next_url))))

    def waits_through(self, stop: Stop) -> bool:
        """Whether this machine, which waits already, goes on waiting after it learned of this."""
        del stop
        return False

    def is_outdated(self, grant: RunnerGrant) -> bool:
        """Whether other machines take part since, before the command of this one has begun."""
        return self._begun is None and (round_of(grant) or 0) > self.round

    def attach(self, store: RunnerStore, wake: Callable[[], None], show: Callable[[str], None]) -> None:
        """Begin to search for the other machines.

        Args:
            wake: called when there is something new to react to.
            show: takes what another machine printed.
        """
        raise NotImplementedError

    def gather(self, restored: str) -> None:
        """Return once all machines are ready to begin.

        Args:
            restored: the hash of the manifest that this one goes on from; empty where it starts afresh.

        Raises:
            GangIncomplete: one of them did not come in time, was lost, or goes on from something else.
        """
        raise NotImplementedError

    def stop(self) -> Stop | None:
        """Return the reason to stop that the other machines give, if there is one."""
        raise NotImplementedError

    def pass_on(self, stop: Stop) -> None:
        """Let the others know that this machine stops its command."""
        raise NotImplementedError

    def send_part(self, row: dict[str, Any], rank: int = 0) -> None:
        """Say something of a checkpoint's parts to the machine of this rank."""
        raise NotImplementedError

    def absent(self) -> list[int]:
        """Return the ranks of the others that cannot say anything more."""
        raise NotImplementedError

    def end_commands(self, reason: str) -> None:
        """Let the others stop their commands, where nothing else does: what they saved is then as it stays."""

    def settle(self, ended: ProcessEnd, tick: Callable[[], Stop | None]) -> ProcessEnd:
        """Return how the command has ended on all machines, where that is this machine's to say."""
        raise NotImplementedError

    def close(self, exit_row: dict[str, Any]) -> None:
        """End this machine's part."""
        raise NotImplementedError

    def await_round(self) -> list[int]:
        """Wait for the next round from now on; return by their ranks at the provider the machines that are lost."""
        raise NotImplementedError

    def begins_again(self, grant: RunnerGrant) -> bool:
        """Whether the next round begins, as far as this machine may know; the others learn it from the first."""
        raise NotImplementedError

    def environment(self) -> dict[str, str]:
        """Return what the job's processes learn of their place."""
        found = {"SPOTD_NODES": str(self.place.nodes), "SPOTD_NODE_RANK": str(self.place.rank)}
        begun = self._begun
        if begun is not None:
            addresses = [str(one) for one in begun["addresses"]]
            found.update(
                SPOTD_NODE_IPS="\n".join(addresses),
                SPOTD_RENDEZVOUS_ID=str(begun["id"]),
                MASTER_ADDR=addresses[0],
                MASTER_PORT=str(int(begun["port"])),
                NNODES=str(self.place.nodes),
                NODE_RANK=str(self.place.rank),
            )
        interface = interface_of(self.place.address)
        for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME") if interface else ():
            if name not in os.environ:
                found[name] = interface
        return found

    def _words(self, rank: int) -> str:
        return "machine %d of %d" % (rank + 1, self.place.nodes)

    def _ping(self, links: Callable[[], list[Link]]) -> None:
        """Send signs of life, and end connections over which none came, until this part has ended."""
        before = steady()
        while True:
            with self._change:
                if self._closed:
                    return
                self._change.wait_for(lambda: self._closed, min(PING_S, self.silent_s / _SILENT_PINGS))
            now = steady()
            asleep = now - before > _ASLEEP_S
            before = now
            for link in links():
                if asleep:
                    link.alive_at = now
                elif now - link.alive_at > self.silent_s:
                    link.close()
                    continue
                link.send(ping=1)

    def _wait_for_next(self, store: RunnerStore | None) -> None:
        """Say again and again that this machine waits, until its next attempt is there."""
        seat = self.place.seats[self.place.rank][0]
        every_s = max(_LEAST_PAUSE_S, min(_ASK_EVERY_S, self._word_every_s))
        number, next_word_at = 0, steady()
        while not self._closed and not self.next_grant:
            found = next_of(self._next_url)
            if found is not None and found[:2] != self._own:
                self.next_grant = found[2]
                self._notify()
                return
            if isinstance(store, MemberStore) and steady() >= next_word_at:
                number, next_word_at = number + 1, steady() + self._word_every_s
                word = store.document(seq=number, at=now_text(), round=self.round, rank=seat)
                try:
                    store.put_word(WAITS % (self.round, seat), json.dumps(word).encode())
                except SinkError as error:
                    log_line("that this machine waits can not be stored now: " + reason_of(error))
            with self._change:
                self._change.wait_for(lambda: self._closed, every_s)

    def _notify(self) -> None:
        with self._change:
            self._change.notify_all()
        self._wake()
