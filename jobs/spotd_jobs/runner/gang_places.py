"""The two kinds of places among several machines: the first one, and every other (see `gang`)."""

from __future__ import annotations

import binascii
import hmac
import json
import os
import socket
import threading
from typing import Any, Callable

from spotd_jobs.runner.gang import (
    KEPT,
    OBJECT,
    PING_S,
    Gang,
    GangIncomplete,
    GangPlace,
    Link,
    MemberStore,
    PartStore,
    next_url_of,
    place_of,
)
from spotd_jobs.runner.process import ProcessEnd
from spotd_jobs.runner.shutdown import Stop, time_to_save
from spotd_jobs.runner.store import NotCurrent, RunnerGrant, RunnerStore, round_of
from spotd_jobs.wire.client import web
from spotd_jobs.wire.client.sinks import clean, log_line, reason_of
from spotd_jobs.wire.client.web import Backoff, steady

_CONNECT_S = 5.0
_FIND_PAUSE_S, _FIND_PAUSE_MAX_S = 0.2, 2.0
_BYE_S = 5.0
_OBJECT_MAX = 65536


def join(grant: RunnerGrant, boot: int) -> Gang | None:
    """Return this machine's part in the work of several; `None` where it works alone.

    Raises:
        GangIncomplete, NotCurrent: as `place_of`.
    """
    place = place_of(grant)
    if place is None:
        return None
    return First(place, grant, boot) if place.rank == 0 else Other(place, grant, boot)


def report_end(grant: RunnerGrant, boot: int, row: dict[str, Any]) -> bool:
    """Let the first machine know that this one does nothing; return whether it is one beside the first.

    Such a machine stores no end itself: the first one may save just then, and an end that is stored ends all.
    """
    try:
        place = place_of(grant)
    except GangIncomplete:
        return False
    except NotCurrent:
        return True
    if place is None or place.rank == 0:
        return False
    other = Other(place, grant, boot)
    other.attach(MemberStore(lambda: grant, boot, lambda: True), lambda: None, lambda _: None)
    other.await_first()
    other.close(row)
    return True


class First(Gang):
    """The machine of rank 0: the others connect to it, and it decides when all begin and why all end."""

    def __init__(self, place: GangPlace, grant: RunnerGrant, boot: int) -> None:
        super().__init__(place, grant, boot)
        self._token = binascii.hexlify(os.urandom(24)).decode()
        self._id = "%s-%d-%d-%s" % (grant.job_id, grant.attempt, boot, binascii.hexlify(os.urandom(4)).decode())
        self._links: dict[int, Link] = {}
        self._addresses: dict[int, str] = {}
        self._restored: dict[int, str] = {}
        self._ends: dict[int, dict[str, Any]] = {}
        self._stopping: Stop | None = None
        self._blamed: int | None = None
        self._probe = 0
        self._own_end: ProcessEnd | None = None
        self._keeping = False
        self._listener: socket.socket | None = None
        self._show: Callable[[str], None] = lambda _: None

    def attach(self, store: RunnerStore, wake: Callable[[], None], show: Callable[[str], None]) -> None:
        self._wake, self._show = wake, show
        self._listener = socket.create_server((self.place.address, 0), backlog=self.place.nodes)
        port = self._listener.getsockname()[1]
        document = store.document(address=self.place.address, port=port, token=self._token)
        for work in (
            self._accept,
            lambda: self._ping(lambda: list(self._links.values())),
            lambda: store.put(OBJECT, json.dumps(document).encode()),
        ):
            threading.Thread(target=work, name="gang", daemon=True).start()

    def gather(self, restored: str) -> None:
        give_up_at = steady() + self._wait_s
        others = range(1, self.place.nodes)
        with self._change:
            while True:
                if self._closed:
                    return
                if all(rank in self._links and self._links[rank].is_ready for rank in others):
                    break
                missing = [rank for rank in others if rank not in self._links]
                if missing and steady() > give_up_at:
                    raise GangIncomplete("%s did not come within %d s" % (self._words(missing[0]), self._wait_s))
                if not missing:
                    give_up_at = steady() + self._wait_s  # it is there, and may come again for as long if it breaks
                self._change.wait(PING_S)
            other = next((rank for rank in others if self._restored[rank] != restored), None)
            if other is not None:
                raise GangIncomplete("%s goes on from another checkpoint than the first" % self._words(other))
            addresses = [self.place.address] + [self._addresses[rank] for rank in others]
            self._begun = {"id": self._id, "addresses": addresses, "port": _free_port(self.place.address)}
        for link in list(self._links.values()):
            link.send(begin=self._begun)

    def stop(self) -> Stop | None:
        with self._change:
            if self._lost:
                return Stop("member_lost", self._lost)
            if self._stopping is not None:
                return self._stopping
            failed = self._first_failure()
            if failed is None or (self._begun is not None and not self._has_every_answer()):
                return None
            self._blamed, row = failed, self._ends[failed]
            return Stop(str(row["outcome"]), "%s: %s" % (self._words(failed), clean(str(row.get("reason")))))

    def pass_on(self, stop: Stop) -> None:
        if self._passed is stop:
            return
        self._passed = stop
        grace_s = self.grace_s if stop.grace_s is None else stop.grace_s
        if stop.at is not None:
            grace_s = min(grace_s, time_to_save(stop.at))  # what they save is stored by this machine, or with its parts
        keeps = stop.outcome == "member_lost" and self.keep_s > 0
        for link in list(self._links.values()):
            link.send(**{"keep" if keeps else "stop": {"reason": stop.reason, "grace_s": grace_s}})

    def send_part(self, row: dict[str, Any], rank: int = 0) -> None:
        link = self._links.get(rank)
        if link is not None:
            link.send(part=row)

    def absent(self) -> list[int]:
        ranks = range(1, self.place.nodes)
        return [rank for rank in ranks if rank not in self._links or not self._links[rank].is_open]

    def end_commands(self, reason: str) -> None:
        if self._passed is None:
            self.pass_on(Stop("stopped", reason))

    def settle(self, ended: ProcessEnd, tick: Callable[[], Stop | None]) -> ProcessEnd:
        with self._change:
            self._own_end = ended
        if not ended.succeeded:
            self._ask_all()
        while not self._is_settled() and tick() is None:
            continue
        with self._change:
            blamed = self._first_failure() if self._blamed is None and ended.succeeded else self._blamed
        if blamed is None:
            return ended
        row = self._ends[blamed]
        code, number = row.get("exit_code"), row.get("signal")
        return ProcessEnd(None if number else int(code or 1), int(number) if number else None, ended.at)

    def close(self, exit_row: dict[str, Any]) -> None:
        with self._change:
            self._closed = True
            self._change.notify_all()
        for rank, link in list(self._links.items()):
            if rank in self._ends:
                link.send(bye=1)
            else:
                link.send(stop={"reason": str(exit_row.get("reason") or "the first machine has ended"), "grace_s": 0.0})
            link.close()
        if self._listener is not None:
            self._listener.close()

    def await_round(self) -> list[int]:
        with self._change:
            if not self._keeping:
                self._keeping, self._lost, self._stopping = True, "", None
                self._ends.clear()
            gone = self.absent()
        return [self.place.seats[rank][0] for rank in gone]

    def begins_again(self, grant: RunnerGrant) -> bool:
        later = round_of(grant)
        if later is not None and later <= self.round:
            return False
        with self._change:
            self._closed = True
            self._change.notify_all()
        for link in list(self._links.values()):
            link.send(again=1)
            link.close()
        if self._listener is not None:
            self._listener.close()
        return True

    def _is_settled(self) -> bool:
        """Whether it is known what the end of this machine's command means."""
        with self._change:
            if self._own_end is None or not self._own_end.succeeded:
                return self._has_every_answer()
            return len(self._ends) == self.place.nodes - 1

    def _ask_all(self) -> None:
        with self._change:
            self._probe += 1
            probe = self._probe
        for link in list(self._links.values()):
            link.send(probe=probe)

    def _has_every_answer(self) -> bool:
        """Whether each of the others has shown that it lives after something failed."""
        return self._probe > 0 and all(
            rank in self._ends or (rank in self._links and self._links[rank].answered >= self._probe)
            for rank in range(1, self.place.nodes)
        )

    def _first_failure(self) -> int | None:
        """Return the first of the others whose command, or what had to be done before it, failed."""
        return next((rank for rank, row in self._ends.items() if row.get("outcome") != "succeeded"), None)

    def _accept(self) -> None:
        while self._listener is not None:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            try:
                Link(connection, self._on_message, self._on_lost, self.silent_s).start()
            except OSError as error:
                log_line("another machine could not connect: " + reason_of(error))

    def _on_message(self, link: Link, message: dict[str, Any]) -> None:
        if link.rank < 0:
            self._welcome(link, message)
            return
        if "log" in message:
            prefix = "[%d] " % link.rank
            self._show("".join(prefix + line + "\n" for line in str(message["log"]).splitlines()))
        if "part" in message:
            self.on_part(link.rank, message["part"])
            return
        if message.get("ready"):
            self._restored[link.rank] = str(message.get("restored"))
            link.is_ready = True
        if "probe" in message:
            link.answered = int(message["probe"])
        if "stopping" in message:
            with self._change:
                self._stopping = self._stopping or self._stop_of(link.rank, message["stopping"])
        if "ended" in message and not (self._keeping and message["ended"].get("waits")):
            with self._change:
                self._ends.setdefault(link.rank, dict(message["ended"]))
            if not message["ended"].get("waits"):
                link.send(bye=1)
            if message["ended"].get("outcome") != "succeeded":
                self._ask_all()
        if message.keys() != {"ping"}:
            self._notify()

    def _stop_of(self, rank: int, row: dict[str, Any]) -> Stop:
        at = row.get("at")
        reason = "%s: %s" % (self._words(rank), clean(str(row.get("reason"))))
        return Stop(str(row["outcome"]), reason, None if at is None else float(at))

    def _welcome(self, link: Link, message: dict[str, Any]) -> None:
        """Take in a machine that knows the token; one that comes again after all have begun was lost meanwhile."""
        rank = int(message["rank"])
        known = hmac.compare_digest(str(message["token"]).encode(), self._token.encode())
        known = known and 0 < rank < self.place.nodes and int(message.get("round") or 0) == self.round
        if not known or self._keeping:
            link.close()  # one that replaces another comes again, and finds this machine in its next round
            return
        with self._change:
            before = self._links.get(rank)
            if self._begun is not None or rank in self._ends:
                self._lost = self._lost or "%s was started again" % self._words(rank)
                link.close()
            else:
                link.rank = rank
                self._links[rank] = link
                self._addresses[rank] = clean(str(message["address"]))
        if before is not None:
            before.close()
        self._notify()

    def _on_lost(self, link: Link) -> None:
        with self._change:
            rank = link.rank
            if rank < 0 or self._links.get(rank) is not link or self._keeping:
                return
            if rank in self._ends and not self._ends[rank].get("waits"):
                return
            if self._begun is None:
                del self._links[rank]
            elif not self._closed:
                self._lost = self._lost or "%s is lost" % self._words(rank)
        self._notify()


class Other(Gang):
    """A machine of another rank: it does what the first one says, and ends with it."""

    def __init__(self, place: GangPlace, grant: RunnerGrant, boot: int) -> None:
        super().__init__(place, grant, boot)
        self.store_type = PartStore if self.has_parts else MemberStore
        self._link: Link | None = None
        self._ready: dict[str, Any] = {}
        self._bye = False
        self._ordered: Stop | None = None
        self._keeping = False
        self._again = False
        self._store: RunnerStore | None = None

    def attach(self, store: RunnerStore, wake: Callable[[], None], show: Callable[[str], None]) -> None:
        del show
        self._wake, self._store = wake, store
        if isinstance(store, MemberStore):
            store.forward = lambda text: self._send(log=text)
        for work in (self._connect, lambda: self._ping(lambda: [self._link] if self._link else [])):
            threading.Thread(target=work, name="gang", daemon=True).start()

    def await_first(self) -> None:
        """Return once this machine is connected to the first one, or has given it up."""
        with self._change:
            self._change.wait_for(lambda: self._link is not None or bool(self._lost), self._wait_s)

    def gather(self, restored: str) -> None:
        with self._change:
            self._ready = {"ready": 1, "restored": restored}
        self._send(**self._ready)
        with self._change:
            while self._begun is None:
                if self._lost or self._ordered is not None:
                    raise GangIncomplete(self._lost or str(self._ordered and self._ordered.reason))
                self._change.wait(PING_S)

    def stop(self) -> Stop | None:
        with self._change:
            if self._ordered is not None:
                return self._ordered
            return Stop("member_lost", self._lost, None, 0.0, flush=False) if self._lost else None

    def pass_on(self, stop: Stop) -> None:
        if self._passed is not stop and stop is not self._ordered:
            self._passed = stop
            self._send(stopping={"outcome": stop.outcome, "reason": stop.reason, "at": stop.at})

    def send_part(self, row: dict[str, Any], rank: int = 0) -> None:
        del rank
        self._send(part=row)

    def absent(self) -> list[int]:
        return [0] if self._bye or self._lost or self._link is None else []

    def settle(self, ended: ProcessEnd, tick: Callable[[], Stop | None]) -> ProcessEnd:
        """Stay until the first one knows what the end of this command means, and has this machine's parts.

        It may be that another one is lost.
        """
        if self.keep_s > 0 or self.has_parts:
            outcome = "succeeded" if ended.succeeded else "failed"
            row = {"outcome": outcome, "exit_code": ended.exit_code, "signal": ended.signal, "reason": ended.words()}
            self._send(ended=dict(row, waits=True))
            while not self._bye and tick() is None:
                continue
        return ended

    def await_round(self) -> list[int]:
        with self._change:
            if not self._keeping:
                self._keeping, self._ordered = True, None
            is_alone, self._lost = bool(self._lost), ""
        if is_alone and not self.is_without_first:
            self.is_without_first = True
            threading.Thread(target=self._wait_for_next, args=(self._store,), name="gang-waits", daemon=True).start()
        return []

    def waits_through(self, stop: Stop) -> bool:
        return stop.outcome == "member_lost" and bool(self._next_url)

    def begins_again(self, grant: RunnerGrant) -> bool:
        self._next_url = next_url_of(grant) or self._next_url  # a URL expires
        is_later = self.is_without_first and (round_of(grant) or 0) > self.round
        return self._again or is_later or bool(self.next_grant)

    def close(self, exit_row: dict[str, Any]) -> None:
        if not self._bye:
            self._send(ended={name: exit_row.get(name) for name in ("outcome", "exit_code", "signal", "reason")})
        with self._change:
            self._change.wait_for(lambda: self._bye or bool(self._lost), _BYE_S)
            self._closed = True
            self._change.notify_all()
        if self._link is not None:
            self._link.close()

    def _send(self, **message: Any) -> None:
        link = self._link
        if link is not None:
            link.send(**message)

    def _connect(self) -> None:
        """Find the first machine and connect, again where that breaks before all have begun."""
        pauses = Backoff(_FIND_PAUSE_S, _FIND_PAUSE_MAX_S)
        give_up_at = steady() + self._wait_s
        while not self._closed:
            if self._link is None and self._begun is None:
                try:
                    self._dial()
                    give_up_at = steady() + self._wait_s
                except (web.WebError, OSError, ValueError, KeyError, TypeError, AttributeError) as error:
                    if steady() > give_up_at:
                        with self._change:
                            self._lost = "the first machine was not found: " + reason_of(error)
                        self._notify()
                        return
            with self._change:
                self._change.wait_for(lambda: self._closed, pauses.next_s())

    def _dial(self) -> None:
        found = json.loads(web.read(str(self._gang["first_url"]), _OBJECT_MAX))
        connection = socket.create_connection((str(found["address"]), int(found["port"])), _CONNECT_S)
        link = Link(connection, self._on_message, self._on_lost, self.silent_s)
        link.rank = 0
        hello = {"token": str(found["token"]), "rank": self.place.rank, "round": self.round}
        link.send(address=self.place.address, **hello)
        with self._change:
            self._link = link
            self._change.notify_all()
        link.start()
        if self._ready:
            link.send(**self._ready)

    def _on_message(self, link: Link, message: dict[str, Any]) -> None:
        if "part" in message:
            self.on_part(0, message["part"])
            return
        if "probe" in message:
            link.send(probe=int(message["probe"]))
        with self._change:
            if "begin" in message:
                self._begun = dict(message["begin"])
            if message.get("bye"):
                self._bye = True
            self._again = self._again or bool(message.get("again"))
            if "keep" in message and self._ordered is None and not self._keeping:
                row = message["keep"]
                self._ordered = Stop(KEPT, clean(str(row["reason"])), None, float(row["grace_s"]))
            if "stop" in message and (self._ordered is None or self._ordered.outcome == KEPT):
                row = message["stop"]
                self._ordered = Stop("stopped", clean(str(row["reason"])), None, float(row["grace_s"]))
        if message.keys() != {"ping"}:
            self._notify()

    def _on_lost(self, link: Link) -> None:
        with self._change:
            if self._link is link:
                self._link = None
            if self._begun is not None and not (self._closed or self._again or self._bye):
                self._lost = self._lost or "the first machine is lost"
        self._notify()


def _free_port(address: str) -> int:
    """Return a port that nothing listens on now: the processes of the job bind it themselves."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind((address, 0))
        return int(probe.getsockname()[1])
