"""A state in PostgreSQL: several daemons may be started on it, and one of them leads.

Theory. The leader is named in one row, with an epoch that grows by one each time that another process leads. The row
has an expiry by the database's own clock; the leader moves it on every few seconds, over a connection of its own. Each
write transaction begins by an UPDATE of that row in the epoch that the process was given: a process that no longer
leads finds no row, and a successor's UPDATE of it waits until the transaction is over. So no commit of an older epoch
can follow one of a newer, whichever process was stopped, slept, or cut off from the database for however long. By its
own steady clock a leader gives up after two thirds of the expiry, before a successor can begin.

That UPDATE also counts the commits. A standby that is promoted, or a backup that is restored, may lack the last of
them, while the row names the leader as before. What this process remembers is then not what the state holds: its own
count is ahead of the row's, it stops to lead, and whichever process leads next reads everything anew.

The row also holds where the leader serves its API, for those that wait. It counts only beside the lead that wrote it.

What this cannot stop is a call to a provider that is on its way as the lease ends. It follows the commit of its intent
at once, so the successor finds an open intent and searches for the machine by its key.

A commit whose answer is lost may have happened. PostgreSQL is asked by the number of the transaction what became of it.
A promoted standby may have given that number to another one, so the count of commits must say the same; where the two
do not agree in time, this process stops to lead.

Sources: the manual's chapters on explicit locking (row-level locks), on `pg_xact_status`, on libpq's keywords and on
error codes.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from sqlalchemy import Connection, Engine, Text, create_engine, event, exc, text
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.pool import QueuePool

from spotd.core.domain.states import InvariantBroken
from spotd.store.place import (
    DatabasePlace,
    Leader,
    LeadershipLost,
    StateError,
    StateUnavailable,
    StoreInUse,
    StoreMoved,
    StoreTooNew,
    StoreUnsupported,
)
from spotd.store.tables import COUNTING_WHERE, FENCE, METADATA

if TYPE_CHECKING:
    from sqlalchemy.engine import URL

LEASE_S: Final = 15
"""A leader that renewed nothing for so long is followed by another; so a failover takes this and a few seconds."""
RENEW_S: Final = 4.0
GIVE_UP_S: Final = LEASE_S * 2 / 3
PROOFS_MAX: Final = 2
LEASE_STATEMENT_MS: Final = 3_000
STATEMENT_MS: Final = 10_000
IDLE_MS: Final = 10_000
"""A process that is stopped within a transaction holds the leader's row: the database ends its session after this."""
FATE_S: Final = 10.0
FATE_PAUSE_S: Final = 0.25
CONNECT_S: Final = 5
_SETTING: Final = re.compile(r"(?:-c\s*|--)([A-Za-z_][\w.]*)=(\S*)")
_NAMED: Final = re.compile(r'(?:relation|column) [\w."]+')
_LINK: Final = {
    "connect_timeout": CONNECT_S,
    "keepalives_idle": 5,
    "keepalives_interval": 2,
    "keepalives_count": 3,
    "tcp_user_timeout": 10_000,
}
"""A cut link is found out within these; without them a process waits for the system's two hours."""


@compiles(Text, "postgresql")
def _text(_type: Text, _compiler: Any, **_: Any) -> str:
    """Order texts by their bytes, as SQLite does: states are compared as ranges, and lists are in order of ids."""
    return 'TEXT COLLATE "C"'


def open_postgres(place: DatabasePlace, *, reads_only: bool = False, statement_ms: int = STATEMENT_MS) -> Engine:
    """Return an engine with one connection. It connects at its first use.

    Raises:
        StoreUnsupported: the driver is not installed.
    """
    if place.url is None:
        raise ValueError("this place is not in PostgreSQL")
    url = place.url
    given, options = _options(url)
    settings = {
        **given,
        "synchronous_commit": "on",
        "statement_timeout": str(statement_ms),
        "idle_in_transaction_session_timeout": str(IDLE_MS),
        "default_transaction_read_only": "on" if reads_only else "off",
        "TimeZone": "UTC",
    }
    try:
        engine = create_engine(
            url.set(drivername="postgresql+psycopg").difference_update_query(["options"]),
            # Statements are prepared nowhere: a pooler between may give each transaction another session.
            connect_args={**_LINK, **options, "application_name": "spotd", "prepare_threshold": None},
            isolation_level="REPEATABLE READ" if reads_only else "READ COMMITTED",
            poolclass=QueuePool,
            pool_size=1,
            max_overflow=0,
            pool_timeout=CONNECT_S,
            hide_parameters=True,
        )
    except ImportError as error:
        raise StoreUnsupported(
            "a state in PostgreSQL needs psycopg, which is not installed", hint="install the extra spotd[postgres]"
        ) from error
    event.listen(engine, "connect", partial(_set, settings))
    return engine


def _set(settings: Mapping[str, str], connection: Any, _record: object) -> None:
    """Set these for the session. Not as options of the connection's start, which PgBouncer refuses."""
    calls = ", ".join("set_config(%s, %s, false)" for _ in settings)
    with connection.cursor() as cursor:
        cursor.execute(f"SELECT {calls}", [part for pair in settings.items() for part in pair])
    connection.commit()


def _options(url: URL) -> tuple[dict[str, str], dict[str, str]]:
    """Return the settings that the URL gives, and its options where they hold anything else."""
    given = url.query.get("options", "")
    text = given if isinstance(given, str) else " ".join(given)
    found = _SETTING.findall(text)
    if _SETTING.sub("", text).strip() or "\\" in text:
        return {}, {"options": text}
    return dict(found), {}


def translate_postgres(place: DatabasePlace, error: BaseException | None) -> Exception:
    """Return our error for a driver's error, by its SQLSTATE."""
    state = getattr(error, "sqlstate", None)
    words = _first_line(error)
    if state is None:
        return StateUnavailable(
            f"the state {place} cannot be reached: {words}",
            hint="check that PostgreSQL runs there and that its host, port, user and password file are right",
        )
    if state[:2] in {"22", "23"}:
        return InvariantBroken(f"the state {place} refused a write that breaks its rules: {words}")
    if state[:2] in {"28"} or state in {"3D000", "42501"}:
        return StateUnavailable(
            f"the state {place} refuses this user: {words}",
            hint="check the user and database of the URL, the password file (PGPASSFILE) and the user's rights there",
        )
    if state in {"42P01", "42703"}:
        return lacking(place, next(iter(_NAMED.findall(words)), words))
    if state == "25006":
        return LeadershipLost(
            f"the state {place} cannot be written: that server is a standby", hint="name the primary in the URL"
        )
    if state == "53100":
        return StateUnavailable(
            f"the disk with the state {place} is full", hint="free some space there; nothing was half-written"
        )
    if state[:2] in {"08", "40", "53", "55", "57", "58"}:
        return StateUnavailable(f"the state {place} cannot be used now: {words}", hint="spotd tries again")
    return StateError(f"the state {place} failed unexpectedly ({state}): {words}", hint="this is a defect of spotd")


def lacking(place: DatabasePlace, what: str) -> StateUnavailable:
    """Return the error of a state that is not made yet, or not as a spotd left it, by what it has not."""
    return StateUnavailable(
        f"the state {place} lacks {what}",
        hint="a spotd that begins to lead makes the tables of a new state: if none does, check the database and the "
        "schema (search_path) of the URL in [daemon] state, or restore that database from a backup",
    )


def _first_line(error: BaseException | None) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


COLUMNS: Final = """
SELECT c.relname, a.attname,
       CASE format_type(a.atttypid, NULL)
            WHEN 'double precision' THEN 'FLOAT'
            WHEN 'bigint' THEN CASE WHEN c.relname = 'events' AND a.attname = 'seq' THEN 'INTEGER' ELSE 'BIGINT' END
            WHEN 'character varying' THEN 'VARCHAR(' || (a.atttypmod - 4) || ')'
            ELSE upper(format_type(a.atttypid, NULL)) END,
       CAST(a.attnotnull AS INTEGER),
       coalesce(array_position(CAST(i.indkey AS SMALLINT[]), a.attnum) + 1, 0)
FROM pg_class c
JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped
LEFT JOIN pg_index i ON i.indrelid = c.oid AND i.indisprimary
WHERE c.relkind = 'r' AND c.relnamespace = CAST(current_schema() AS REGNAMESPACE)
"""
"""The columns as SQLite describes those of the same tables, so that one fingerprint stands for a revision."""


def create_tables(connection: Connection) -> None:
    """Make the tables of this version within the transaction of the connection."""
    METADATA.create_all(connection, checkfirst=False)
    # SQLite's condition of the index is not PostgreSQL's: without one it would forbid a job's second attempt.
    connection.execute(text("DROP INDEX ix_attempts_one_counting"))
    one = f"CREATE UNIQUE INDEX ix_attempts_one_counting ON attempts (job_id) WHERE {COUNTING_WHERE}"
    connection.execute(text(one))


_MAKE_LEASE: Final = (
    # Two processes may come to an empty database at one moment.
    "SELECT pg_advisory_xact_lock(7305128)",
    """CREATE TABLE IF NOT EXISTS leader (id INTEGER PRIMARY KEY CHECK (id = 1), holder TEXT NOT NULL,
    epoch BIGINT NOT NULL, expires TIMESTAMPTZ NOT NULL, words TEXT NOT NULL, commits BIGINT NOT NULL DEFAULT 0,
    api TEXT NOT NULL DEFAULT '')""",
    # ALTER TABLE locks out the leader, also where it has nothing to do.
    *(
        f"""DO $$ BEGIN IF NOT EXISTS
    (SELECT FROM pg_attribute WHERE attrelid = to_regclass('leader') AND attname = '{name}')
    THEN ALTER TABLE leader ADD COLUMN {name} {kind}; END IF; END $$"""
        for name, kind in (("commits", "BIGINT NOT NULL DEFAULT 0"), ("api", "TEXT NOT NULL DEFAULT ''"))
    ),
    # ON CONFLICT would wait for the transaction that the leader has under way.
    "INSERT INTO leader SELECT 1, '', 0, clock_timestamp(), '' WHERE NOT EXISTS (SELECT FROM leader)",
)
_TAKE: Final = text(
    f"UPDATE leader SET holder = :me, epoch = epoch + 1, words = :words, api = '', "  # noqa: S608 - a constant of ours
    f"expires = clock_timestamp() + interval '{LEASE_S} seconds' WHERE expires < clock_timestamp() "
    "RETURNING epoch, commits"
)
_RENEW: Final = text(
    f"UPDATE leader SET api = :api, expires = clock_timestamp() + interval '{LEASE_S} seconds' "  # noqa: S608 - as above
    "WHERE holder = :me AND epoch = :epoch AND commits >= :commits"
)
_GIVE_BACK: Final = text("UPDATE leader SET expires = clock_timestamp() WHERE holder = :me AND epoch = :epoch")
_WHO: Final = text(
    "SELECT words, extract(epoch FROM expires - clock_timestamp()) AS seconds, holder, epoch, api FROM leader"
)
_FENCE: Final = text(
    f"{FENCE} = commits + 1 WHERE id = 1 AND holder = :me AND epoch = :epoch "
    "RETURNING commits, CAST(CAST(pg_current_xact_id() AS TEXT) AS BIGINT)"
)
_FATE: Final = text(
    "SELECT pg_xact_status(CAST(CAST(:xid AS TEXT) AS XID8)), commits FROM leader WHERE holder = :me AND epoch = :epoch"
)
_BEHIND: Final = "the database lacks its last commits: a standby was promoted or a backup restored"
_NEWEST: Final = text(
    "SELECT holder, epoch, commits, version_num, (SELECT value FROM meta WHERE key = 'moved_to') "
    "FROM leader, alembic_version"
)


def newest_commit(connection: Connection, place: DatabasePlace, head: str) -> tuple[object, ...]:
    """Return what names the newest commit that this transaction sees; `head` is the revision of the tables.

    Raises:
        StateUnavailable: it is not made yet, or damaged.
        StoreTooNew: this version does not read these tables.
        StoreMoved: the state is used elsewhere.
    """
    row = connection.execute(_NEWEST).one_or_none()
    if row is None:
        raise lacking(place, "the row of its leader or of its revision")
    *newest, revision, moved_to = row
    if revision != head:
        raise StoreTooNew(
            f"the state {place} is at revision {revision}, and this version reads {head}",
            hint="install the same version of spotd on all computers",
        )
    if moved_to is not None:
        raise StoreMoved(f"the state {place} was moved to {moved_to}", hint="name that one in [daemon] state")
    return tuple(newest)


def _term(holder: str, epoch: int) -> str:
    return f"{holder}.{epoch}"


def _leader(row: Any) -> Leader:
    """Return who leads; what another lead stated of its API, of an older version or of this one, does not count."""
    term = _term(row.holder, row.epoch)
    with suppress(ValueError, TypeError, AttributeError, KeyError):
        found = json.loads(row.api)
        if found["term"] == term:
            url, certificate, proofs = str(found["url"]), str(found["certificate"]), found.get("proofs", [])
            shown = tuple(map(str, proofs[:PROOFS_MAX]))
            return Leader(term=term, words=row.words, url=url, certificate=certificate, proofs=shown)
    return Leader(term=term, words=row.words)


def steady_s() -> float:
    """Return seconds that no setting of the clock moves, and that pass while the computer sleeps where it can tell."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()


class Leadership:
    """The lead of this process, from construction until `release`, or until `is_lost`."""

    def __init__(self, place: DatabasePlace, *, steady: Callable[[], float] = steady_s) -> None:
        """Make this process the leader.

        Raises:
            StoreInUse: another one leads.
            StateUnavailable: the database does not answer.
        """
        self._place = place
        self._steady = steady
        self._me = secrets.token_hex(16)
        self._engine = open_postgres(place, statement_ms=LEASE_STATEMENT_MS)
        self._released = threading.Event()
        self._lost = ""
        self._api = ""
        self._commits = self._xid = 0
        self._held_since = steady()
        try:
            self._epoch = self._take()
        except exc.DBAPIError as error:
            self._engine.dispose()
            raise translate_postgres(place, error.orig) from error
        except BaseException:
            self._engine.dispose()
            raise
        self._thread = threading.Thread(target=self._renew_always, name="leader-lease", daemon=True)
        self._thread.start()

    def _take(self) -> int:
        words = f"process {os.getpid()} on {socket.gethostname()}"
        with self._engine.connect() as connection:
            for statement in _MAKE_LEASE:
                connection.execute(text(statement))
            connection.commit()
        with self._single() as connection:
            self._held_since = self._steady()
            taken = connection.execute(_TAKE, {"me": self._me, "words": words}).one_or_none()
            if taken is None:
                row = connection.execute(_WHO).one()
                raise StoreInUse(
                    f"the state {self._place} is in use by {row.words}, "
                    f"whose lease lasts {max(0, int(row.seconds))} s more",
                    hint="this spotd waits and leads when that one stops",
                    leader=_leader(row),
                )
            self._commits = int(taken.commits)
            return int(taken.epoch)

    @contextmanager
    def _single(self) -> Iterator[Connection]:
        """Yield a connection whose statements are each a transaction.

        A link that is cut between a statement and its COMMIT would hold the leader's row until that session is ended.
        """
        with self._engine.connect() as connection:
            yield connection.execution_options(isolation_level="AUTOCOMMIT")

    @property
    def epoch(self) -> int:
        return self._epoch

    @property
    def term(self) -> str:
        return _term(self._me, self._epoch)

    def state_api(self, url: str, certificate: str, proofs: Sequence[str]) -> None:
        """State where this leader serves its API, from the next renewal of the lease on."""
        stated = {"term": self.term, "url": url, "certificate": certificate, "proofs": list(proofs)}
        self._api = json.dumps(stated) if url else ""

    @property
    def is_lost(self) -> bool:
        """Whether this process must not act any more. Once lost it stays lost."""
        if not self._lost and self._steady() - self._held_since >= GIVE_UP_S:
            self._lost = f"the lease could not be renewed for {GIVE_UP_S:.0f} s"
        return bool(self._lost)

    def lose(self, why: str) -> LeadershipLost:
        """Stop to lead for this reason; return the error that states it."""
        self._lost = self._lost or why
        return LeadershipLost(
            f"this spotd does not lead the state {self._place} any more: {self._lost}",
            hint="it stops and waits until it may lead again",
        )

    def begin(self, connection: Connection) -> None:
        """Hold the leader's row until the transaction is over.

        Raises:
            LeadershipLost: another process leads, or may; or the state is not the one that this process wrote.
        """
        if self.is_lost:
            raise self.lose(self._lost)
        row = connection.execute(_FENCE, {"me": self._me, "epoch": self._epoch}).one_or_none()
        if row is None:
            raise self.lose("another one took the lead")
        if row[0] != self._commits + 1:
            raise self.lose(_BEHIND)
        self._xid = int(row[1])

    def commit(self, connection: Connection) -> None:
        """Commit what `begin` began.

        Raises:
            LeadershipLost: it is not known what became of it.
        """
        try:
            connection.commit()
        except exc.DBAPIError as error:
            if not error.connection_invalidated:
                raise
            self._require_committed(error)
        self._commits += 1

    def _require_committed(self, error: exc.DBAPIError) -> None:
        """Return when the transaction happened although its answer was lost; raise ours for the error if it did not."""
        begun = self._steady()
        asked = {"xid": self._xid, "me": self._me, "epoch": self._epoch}
        while self._steady() - begun < FATE_S:
            with suppress(exc.DBAPIError), self._single() as connection:
                fate = connection.execute(_FATE, asked).one_or_none()
                if fate is not None and fate[1] < self._commits:
                    raise self.lose(_BEHIND) from error
                if fate == ("committed", self._commits + 1):
                    return
                if fate == ("aborted", self._commits):
                    raise translate_postgres(self._place, error.orig) from error
            if self._released.wait(FATE_PAUSE_S):
                break
        raise self.lose("the database does not say whether a transaction was committed") from error

    def _renew_always(self) -> None:
        while not self._released.wait(RENEW_S) and not self.is_lost:
            asked = self._steady()
            with suppress(exc.DBAPIError), self._single() as connection:
                mine = {"me": self._me, "epoch": self._epoch, "commits": self._commits, "api": self._api}
                renewed = connection.execute(_RENEW, mine).rowcount
                if renewed == 0:
                    self.lose(f"another one took the lead, or {_BEHIND}")
                elif not self.is_lost:
                    self._held_since = asked

    def release(self) -> None:
        """Let another process lead at once."""
        if self._released.is_set():
            return
        self._released.set()
        self._thread.join(LEASE_STATEMENT_MS / 1000 + CONNECT_S)
        for _ in range(2):  # the first link may be one to a server that is gone
            with suppress(exc.DBAPIError), self._single() as connection:
                connection.execute(_GIVE_BACK, {"me": self._me, "epoch": self._epoch})
                break
        self._engine.dispose()
