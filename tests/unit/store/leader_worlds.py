"""Several processes that lead a state in PostgreSQL in turn, on virtual time: links are cut, processes freeze and die.

The shipped `Leadership` runs in each of them, with its thread. Below it is a model of what its statements meet there:
one row with a lock, transactions, a statement's time-out, the end of a session that is idle within its transaction,
links that lose requests or answers, a server that crashes, and a standby that lacks the last commits. That the
statements do this in PostgreSQL is shown by `tests/system/postgres`; what follows from any order of faults is shown
here.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from random import Random
from types import SimpleNamespace
from typing import Any, Final, NamedTuple

import greenlet
import pytest
from sqlalchemy import exc

from spotd.service.http_server import ASK_EVERY_S
from spotd.store import LeadershipLost, StateUnavailable, StoreInUse, parse_place
from spotd.store import postgres as leading

PLACE: Final = parse_place("postgresql://spotd@db/spotd")
WRITE: Final = "a write of the state"
LOST_ANSWER_S: Final = 10.0
"""After so long without an acknowledgement a link is given up (`tcp_user_timeout`)."""
FAILOVER_S: Final = 20.0


class Hub:
    """Runs one piece of one process at a time, in the order of virtual time."""

    def __init__(self) -> None:
        self.now = 1000.0
        self._due: list[tuple[float, int, greenlet.greenlet, int]] = []
        self._order = 0
        self._turns: dict[greenlet.greenlet, int] = {}
        self._of: dict[greenlet.greenlet, Process | None] = {}
        self._main = greenlet.getcurrent()
        self.after_each: Callable[[], None] = lambda: None

    def start(self, work: Callable[[], None], process: Process | None = None) -> greenlet.greenlet:
        task = greenlet.greenlet(work, parent=self._main)
        self._of[task] = process if process is not None else self._of.get(greenlet.getcurrent())
        self.wake(task, 0)
        return task

    def wake(self, task: greenlet.greenlet, seconds: float) -> None:
        self._order += 1
        heapq.heappush(self._due, (self.now + seconds, self._order, task, self._turns.get(task, 0)))

    def sleep(self, seconds: float) -> None:
        self.wake(greenlet.getcurrent(), seconds)
        self._main.switch()

    def process(self) -> Process:
        found = self._of[greenlet.getcurrent()]
        assert found is not None
        return found

    def run_until(self, end: float) -> None:
        while self._due and self._due[0][0] <= end:
            when, _, task, turn = heapq.heappop(self._due)
            if turn != self._turns.get(task, 0) or task.dead:
                continue
            self.now = max(self.now, when)
            process = self._of[task]
            if process is not None and process.is_dead(task):
                continue
            if process is not None and process.frozen_until > self.now:
                self._order += 1
                heapq.heappush(self._due, (process.frozen_until, self._order, task, turn))
                continue
            self._turns[task] = turn + 1
            task.switch()
            self.after_each()
        self.now = end

    def end(self) -> None:
        """Let no piece go on."""
        for task in self._of:
            if task and not task.dead:
                task.throw(greenlet.GreenletExit)


class Event:
    """As `threading.Event`."""

    def __init__(self, hub: Hub) -> None:
        self._hub, self._is_set = hub, False
        self._waiting: list[greenlet.greenlet] = []

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        self._is_set = True
        for task in self._waiting:
            self._hub.wake(task, 0)
        self._waiting.clear()

    def wait(self, timeout: float) -> bool:
        if not self._is_set:
            self._waiting.append(greenlet.getcurrent())
            self._hub.sleep(timeout)
            with suppress(ValueError):
                self._waiting.remove(greenlet.getcurrent())
        return self._is_set


class Thread:
    """As `threading.Thread`."""

    def __init__(self, hub: Hub, target: Callable[[], None]) -> None:
        self._hub, self._target, self._over = hub, target, Event(hub)

    def start(self) -> None:
        def work() -> None:
            self._target()
            self._over.set()

        self._hub.start(work)

    def join(self, timeout: float) -> None:
        self._over.wait(timeout)


class Commit(NamedTuple):
    """What one transaction wrote."""

    holder: str
    epoch: int
    number: int


@dataclass(frozen=True)
class Row:
    """The leader's row."""

    holder: str = ""
    epoch: int = 0
    expires: float = 0.0
    words: str = ""
    commits: int = 0


class Leader(NamedTuple):
    words: str
    seconds: float
    holder: str
    epoch: int
    api: str


class Taken(NamedTuple):
    epoch: int
    commits: int


@dataclass
class Found:
    """The answer to a statement."""

    row: Any = None
    rowcount: int = 0

    def one_or_none(self) -> Any:
        return self.row

    def one(self) -> Any:
        assert self.row is not None
        return self.row


class Server:
    """The database: what was committed, and who holds the row."""

    def __init__(self, hub: Hub) -> None:
        self.hub = hub
        self.row = Row(expires=hub.now)
        self.commits: list[Commit] = []
        self.former: list[tuple[Row, list[Commit]]] = []
        self.fates: dict[int, str] = {}
        self.down_until = 0.0
        self.taken_at = 0.0
        """Also by a process that never knows, since the answer was lost: it has its lease, then another may lead."""
        self.sessions: list[Session] = []
        self.holder: Session | None = None
        self._xid = 700

    def next_xid(self) -> int:
        self._xid += 1
        self.fates[self._xid] = "in progress"
        return self._xid

    def crash(self, seconds: float) -> None:
        self.down_until = self.hub.now + seconds
        for session in [*self.sessions]:
            session.end()

    def promote(self, lacking: int) -> None:
        """A standby takes over, without so many of the last commits."""
        self.crash(1.0)
        if lacking and self.former:
            self.row, commits = self.former[-min(lacking, len(self.former))]
            self.commits = [*commits]
            # Its numbers of transactions go on from where they were there, and are given a second time.
            self.fates = {xid: fate for xid, fate in self.fates.items() if xid <= self._xid - lacking}
            self._xid -= lacking
        self.former.clear()


@dataclass(eq=False)
class Session:
    """One session at the server: what it wrote and has not committed."""

    server: Server
    statement_s: float
    is_over: bool = False
    row: Row | None = None
    writes: list[Commit] = field(default_factory=list)
    xid: int = 0
    active_at: float = 0.0

    def __post_init__(self) -> None:
        self.server.sessions.append(self)

    def end(self) -> None:
        """Roll back, and be no more."""
        self.rollback()
        self.is_over = True
        with suppress(ValueError):
            self.server.sessions.remove(self)

    def rollback(self) -> None:
        if self.xid:
            self.server.fates[self.xid] = "aborted"
        self._release()

    def _release(self) -> None:
        self.row, self.writes, self.xid = None, [], 0
        if self.server.holder is self:
            self.server.holder = None

    def end_if_idle(self) -> None:
        if self.row is not None and self.server.hub.now - self.active_at >= leading.IDLE_MS / 1000:
            self.end()

    def change(self, matches: Callable[[Row], bool], changed: Callable[[Row], Row]) -> Row | None:
        """Return the row after an UPDATE of it; `None` where it does not match. Waits for who holds it."""
        server, begun = self.server, self.server.hub.now
        while True:
            seen = server.row if self.row is None else self.row
            if not matches(seen):
                return None
            if server.holder in {None, self}:
                break
            server.holder.end_if_idle()
            if server.hub.now - begun >= self.statement_s:
                raise failure("57014")
            server.hub.sleep(0.1)
            if self.is_over:
                raise failure(None)
        server.holder = self
        self.row = changed(seen)
        self.xid = self.xid or server.next_xid()
        return self.row

    def commit(self) -> None:
        server = self.server
        if self.row is not None:
            server.former.append((server.row, [*server.commits]))
            if self.row.epoch > server.row.epoch:
                server.taken_at = server.hub.now
            server.row = self.row
            server.commits += self.writes
            server.fates[self.xid] = "committed"
            del server.former[:-5]
        self._release()


def failure(state: str | None) -> exc.DBAPIError:
    """What SQLAlchemy raises: with a code of the server's, or for a link that is gone."""
    cause = Exception("the link broke" if state is None else "the statement took too long")
    cause.sqlstate = state  # type: ignore[attr-defined]  # psycopg's errors have it
    return exc.OperationalError("", None, cause, connection_invalidated=state is None)


class Connection:
    """A client's end of a session."""

    def __init__(self, process: Process, session: Session) -> None:
        self._process, self._session = process, session
        self._is_begun = self._is_single = False
        self.is_broken = False

    def execution_options(self, *, isolation_level: str) -> Connection:
        """Make each statement a transaction."""
        assert isolation_level == "AUTOCOMMIT"
        self._is_single = True
        return self

    def execute(self, statement: Any, given: Any = None) -> Any:
        self._is_begun = not self._is_single
        return self._across(lambda: self._effect(statement, given or {}))

    def commit(self) -> None:
        self._is_begun = False
        try:
            self._across(self._session.commit)
        except exc.DBAPIError:
            self.is_broken = True
            self._process.left.append(self._session)
            raise

    def rollback(self) -> None:
        """Where nothing was begun the driver asks nothing."""
        if self._is_begun:
            self._across(self._session.rollback)

    def _across(self, effect: Callable[[], Any]) -> Any:
        """Do this at the server, unless the request or its answer is lost."""
        process, hub = self._process, self._process.hub
        hub.sleep(process.rng.uniform(0.0002, 0.002))
        self._session.end_if_idle()
        if self._session.is_over:
            raise failure(None)
        if process.loses_requests_until > hub.now:
            hub.sleep(LOST_ANSWER_S)
            raise failure(None)
        found = effect()
        if self._is_single:
            self._session.commit()
        self._session.active_at = hub.now
        hub.sleep(process.rng.uniform(0.0002, 0.002))
        if process.loses_answers_until > hub.now:
            hub.sleep(LOST_ANSWER_S)
            raise failure(None)
        if self._session.is_over:
            raise failure(None)
        return found

    def _effect(self, statement: Any, given: dict[str, Any]) -> Found:
        server = self._session.server
        now, row = server.hub.now, server.row if self._session.row is None else self._session.row

        def mine(one: Row) -> bool:
            return one.holder == given["me"] and ("epoch" not in given or one.epoch == given["epoch"])

        def leased(one: Row) -> Row:
            return replace(one, expires=server.hub.now + leading.LEASE_S)

        if statement is leading._TAKE:
            taken = self._session.change(
                lambda one: one.expires < now,
                lambda one: replace(leased(one), holder=given["me"], epoch=one.epoch + 1, words=given["words"]),
            )
            return Found(None if taken is None else Taken(taken.epoch, taken.commits))
        if statement is leading._RENEW:
            renewed = self._session.change(lambda one: mine(one) and one.commits >= given["commits"], leased)
            return Found(rowcount=0 if renewed is None else 1)
        if statement is leading._GIVE_BACK:
            self._session.change(mine, lambda one: replace(one, expires=server.hub.now))
        elif statement is leading._FENCE:
            begun = self._session.change(mine, lambda one: replace(one, commits=one.commits + 1))
            return Found(None if begun is None else (begun.commits, self._session.xid))
        elif statement is leading._FATE:
            return Found((server.fates.get(given["xid"]), row.commits) if mine(row) else None)
        elif statement is leading._WHO:
            return Found(Leader(row.words, row.expires - now, row.holder, row.epoch, ""))
        elif isinstance(statement, tuple) and statement[0] is WRITE:
            self._session.writes.append(statement[1])
        return Found()


class Engine:
    """One connection of a process to the server, made anew where it broke."""

    def __init__(self, process: Process, statement_s: float) -> None:
        self._process, self._statement_s = process, statement_s
        self._session: Session | None = None

    @contextmanager
    def connect(self) -> Iterator[Connection]:
        process, server = self._process, self._process.server
        if self._session is None or self._session.is_over:
            if server.down_until > process.hub.now or process.loses_requests_until > process.hub.now:
                process.hub.sleep(process.rng.uniform(0.01, leading.CONNECT_S))
                raise failure(None)
            self._session = Session(server, self._statement_s)
            process.sessions.append(self._session)
        session, connection = self._session, Connection(process, self._session)
        try:
            yield connection
            if connection.is_broken:
                self._session = None
            connection.rollback()
        except exc.DBAPIError as error:
            self._session = None if error.connection_invalidated else session
            if error.connection_invalidated:
                process.left.append(session)
            else:
                session.rollback()
            raise

    def dispose(self) -> None:
        if self._session is not None:
            self._session.end()


class Process:
    """One daemon, as far as it leads: it commits, and after each commit makes the call that the commit states."""

    def __init__(self, hub: Hub, server: Server, rng: Random, name: str) -> None:
        self.hub, self.server, self.rng, self.name = hub, server, rng, name
        self.frozen_until = self.loses_requests_until = self.loses_answers_until = 0.0
        self.sessions: list[Session] = []
        self.left: list[Session] = []
        """Sessions of a link that broke, of which the server does not know it yet."""
        self.lead: leading.Leadership | None = None
        self.known: list[Commit] = []
        """Commits that this process was answered to have made."""
        self.refused: list[Commit] = []
        """Those of which it was answered that nothing was written."""
        self.able_since = hub.now
        self._tasks: set[greenlet.greenlet] = set()
        self._gone: set[greenlet.greenlet] = set()
        self._life = 0
        self.numbers = 0

    def is_dead(self, task: greenlet.greenlet) -> bool:
        return task in self._gone

    def start(self) -> None:
        self._life += 1
        self.able_since = self.hub.now
        self.hub.start(self._live, self)

    @property
    def is_alive(self) -> bool:
        return self._life > 0

    def kill(self) -> None:
        self._life = 0
        self.lead = None
        self._gone.update(task for task, one in self.hub._of.items() if one is self)
        for session in self.sessions:
            session.end()

    def is_able(self) -> bool:
        now = self.hub.now
        return self.is_alive and max(self.frozen_until, self.loses_requests_until, self.loses_answers_until) <= now

    def leads(self) -> bool:
        """Whether it would act, asked without changing it."""
        lead = self.lead
        return lead is not None and not lead._lost and self.hub.now - lead._held_since < leading.GIVE_UP_S

    def _live(self) -> None:
        while True:
            try:
                self.lead = leading.Leadership(PLACE, steady=lambda: self.hub.now)
            except (StoreInUse, StateUnavailable):
                self.hub.sleep(ASK_EVERY_S)
                continue
            engine = Engine(self, leading.STATEMENT_MS / 1000)
            with suppress(LeadershipLost):
                while not self.lead.is_lost:
                    self._commit(engine, self.lead)
                    self.hub.sleep(self.rng.uniform(0.1, 3.0))
            ended, self.lead = self.lead, None
            engine.dispose()
            ended.release()

    def _commit(self, engine: Engine, lead: leading.Leadership) -> None:
        self.numbers += 1
        written = Commit(lead._me, lead.epoch, self.numbers)
        try:
            with engine.connect() as connection:
                lead.begin(connection)  # type: ignore[arg-type]  # the model stands for SQLAlchemy's
                connection.execute((WRITE, written))
                self.hub.sleep(self.rng.choice([0.001, 0.02, 0.5]))
                lead.commit(connection)  # type: ignore[arg-type]  # as above
        except LeadershipLost:
            raise
        except (StateUnavailable, exc.DBAPIError):
            self.refused.append(written)
        else:
            self.known.append(written)


class World:
    """Three processes over one server, and what befalls them."""

    def __init__(self, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rng = Random(seed)
        self.hub = Hub()
        self.server = Server(self.hub)
        self.processes = [Process(self.hub, self.server, Random(seed * 7 + n), f"p{n}") for n in range(3)]
        self.partitions = 0
        self._promoted_at = 0.0
        self.broken: list[str] = []
        self.longest_gap = 0.0
        self._led_at = self.hub.now
        self._up_since = self.hub.now
        self.hub.after_each = self._judge
        shim = SimpleNamespace(
            Event=lambda: Event(self.hub), Thread=lambda *, target, name, daemon: Thread(self.hub, target)
        )
        monkeypatch.setattr(leading, "threading", shim)
        monkeypatch.setattr(
            leading,
            "open_postgres",
            lambda _place, *, statement_ms: Engine(self.hub.process(), statement_ms / 1000),
        )

    @property
    def was_promoted(self) -> bool:
        return self._promoted_at > 0

    def run(self, seconds: float = 240.0) -> None:
        for process in self.processes:
            process.start()
        self.hub.start(self._befall)
        self.hub.run_until(self.hub.now + seconds)
        self.hub.end()

    def _befall(self) -> None:
        rng = self.rng
        while True:
            self.hub.sleep(rng.uniform(1, 40))
            whom = next((one for one in self.processes if one.leads()), None)
            if whom is None or rng.random() < 0.25:
                whom = rng.choice(self.processes)
            seconds = rng.choice([0.5, 3.0, 9.0, 12.0, 16.0, 45.0]) * rng.uniform(0.8, 1.2)
            what = rng.choice(["cut", "cut", "cut", "deaf", "freeze", "kill", "crash", "promote"])
            if what == "cut":
                self.partitions += 1
                whom.loses_requests_until = self.hub.now + seconds
                whom.able_since = whom.loses_requests_until
            elif what == "deaf":
                self.partitions += 1
                whom.loses_answers_until = self.hub.now + seconds
                whom.able_since = whom.loses_answers_until
            elif what == "freeze":
                whom.frozen_until = whom.able_since = self.hub.now + seconds
            elif what == "kill":
                whom.kill()
                self.hub.start(self._starting(whom, seconds))
            elif what == "crash":
                self.server.crash(seconds / 4)
                self._up_since = self.server.down_until
            elif rng.random() < 0.5:
                self._promoted_at = self.hub.now
                self.server.promote(rng.randrange(4))
                self._up_since = self.server.down_until
            for process in self.processes:
                for session in process.left:
                    session.end_if_idle()

    def _starting(self, process: Process, seconds: float) -> Callable[[], None]:
        def work() -> None:
            self.hub.sleep(seconds)
            if not process.is_alive:
                process.start()

        return work

    def _judge(self) -> None:
        """Who leads is one at most; and while one could lead for long enough, one does."""
        now = self.hub.now
        leaders = [one.name for one in self.processes if one.leads()]
        # A standby may lack renewals, too: a leader that cannot ask leads on beside the next one for its lease.
        if len(leaders) > 1 and now - self._promoted_at > leading.LEASE_S:
            self.broken.append(f"{now:.1f}: {leaders} lead at once")
        if leaders or (not self.processes[0].numbers and not self.server.row.epoch):
            self._led_at = now
        able = [one.able_since for one in self.processes if one.is_able()]
        if able and self.server.down_until <= now:
            gap = now - max(self._led_at, self._up_since, self.server.taken_at, min(able))
            self.longest_gap = max(self.longest_gap, gap)
            if gap > FAILOVER_S:
                self.broken.append(f"{now:.1f}: nobody leads for {gap:.1f} s")
