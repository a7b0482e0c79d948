"""Who leads a state in PostgreSQL: one process at a time, whatever becomes of it, of the server and of the link."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from typing import Final

import pytest
from sqlalchemy import text

from spotd.store import (
    Leader,
    LeadershipLost,
    Reads,
    StateError,
    StateUnavailable,
    Store,
    StoreInUse,
    StoreTooNew,
    Tx,
    parse_place,
)
from spotd.store import postgres as leading
from tests.system.engines.network import Proxy
from tests.system.engines.postgres import Postgres
from tests.unit.api import worlds
from tests.waiting import until

pytestmark = pytest.mark.system
ALIVE: Final = """
import sys, time
from spotd.store import Store
store = Store.open(sys.argv[1])
print(flush=True)
time.sleep(600)
"""


def put(store: Store, value: str) -> None:
    store.tx(lambda tx: tx.set_meta("word", value))


def word(store: Store) -> str | None:
    return store.read(lambda reads: reads.meta("word"))


def expire(server: Postgres, url: str) -> None:
    """As the database's clock does to a leader that is not heard of."""
    schema = url.rpartition("%3D")[2]
    server.sql(f"UPDATE {schema}.leader SET expires = clock_timestamp() - interval '1 second'")  # noqa: S608 - ours


def test_one_process_leads_and_the_next_begins_where_it_ended(url: str) -> None:
    with Store.open(url) as first:
        put(first, "a")
        with pytest.raises(StoreInUse, match=r"is in use by process \d+ on .+, whose lease lasts 1?\d s more"):
            Store.open(url)
    with Store.open(url) as second:
        assert word(second) == "a"
        assert not second.is_lost


def test_a_server_says_whether_it_keeps_commits(url: str) -> None:
    with Store.open(url) as store:
        found = store.read(lambda reads: reads.server_settings())
    assert set(found) == {"server_version", "fsync", "full_page_writes", "synchronous_standby_names"}
    assert int(found["server_version"].partition(".")[0]) >= 13


def test_a_killed_leader_is_followed_within_its_lease(url: str) -> None:
    with subprocess.Popen([sys.executable, "-c", ALIVE, url], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.kill()
    found: list[Store] = []

    def leads() -> bool:
        with suppress(StoreInUse):
            found.append(Store.open(url))
        return bool(found)

    until(leads, what="another process to lead", within=leading.LEASE_S + 5)
    found[0].close()


def test_a_former_leader_commits_nothing_more(server: Postgres, url: str) -> None:
    with Store.open(url) as former:
        put(former, "former")
        expire(server, url)
        with Store.open(url) as leader:
            with pytest.raises(LeadershipLost, match="does not lead"):
                put(former, "late")
            assert former.is_lost
            assert word(leader) == "former"
            put(leader, "leader")
            with pytest.raises(LeadershipLost):
                put(former, "later")
            assert word(leader) == "leader"


def test_a_transaction_that_is_under_way_ends_before_another_process_leads(server: Postgres, url: str) -> None:
    begun, may_end = threading.Event(), threading.Event()
    with Store.open(url) as former:

        def slow() -> None:
            def work(tx: object) -> None:
                begun.set()
                may_end.wait(8)
                tx.set_meta("word", "whole")  # type: ignore[attr-defined]  # a Tx, whose class is the store's own

            former.tx(work)

        writer = threading.Thread(target=slow)
        writer.start()
        begun.wait(8)
        expire_later = threading.Thread(target=expire, args=(server, url))
        expire_later.start()  # waits for the row itself
        may_end.set()
        writer.join()
        expire_later.join()
        with Store.open(url) as leader:
            assert word(leader) == "whole"


def test_a_process_that_asks_for_the_lead_waits_for_no_transaction(url: str) -> None:
    def ask(_tx: object) -> None:
        with pytest.raises(StoreInUse):
            leading.Leadership(place)

    place = parse_place(url)
    with Store.open(url) as leader:
        leader.tx(ask)


def test_a_leader_of_a_version_that_counted_no_commits_is_followed(server: Postgres, url: str) -> None:
    with Store.open(url) as former:
        put(former, "former")
    server.sql(f"ALTER TABLE {url.rpartition('%3D')[2]}.leader DROP COLUMN commits")
    with Store.open(url) as leader:
        put(leader, "leader")
        assert word(leader) == "leader"


def test_the_leader_states_where_it_is_reached_and_nothing_stated_before_counts(server: Postgres, url: str) -> None:
    def leader() -> Leader:
        with pytest.raises(StoreInUse) as caught:
            Store.open(url)
        assert caught.value.leader is not None
        return caught.value.leader

    table = f"{url.rpartition('%3D')[2]}.leader"
    with Store.open(url) as store:
        assert (leader().term, leader().url) == (store.term, "")
        stated = Leader(
            term=store.term, words=leader().words, url="https://a:1", certificate="c" * 64, proofs=("p", "q")
        )
        store.state_api(stated.url, stated.certificate, stated.proofs)
        until(lambda: leader().url, what="the row", within=20)
        assert leader() == stated
        of_former = json.dumps({"term": store.term, "url": stated.url, "certificate": stated.certificate})
        server.sql(f"UPDATE {table} SET api = '{of_former}'")  # noqa: S608 - ours
        assert leader() == replace(stated, proofs=()), "a version that knows no proofs stated it"
        odd = {"term": store.term, "url": "u", "certificate": "c", "proofs": 5}
        server.sql(f"UPDATE {table} SET api = '{json.dumps(odd)}'")  # noqa: S608 - ours
        assert leader().url == ""
        # As by a version that leads and knows nothing of this.
        server.sql(f"UPDATE {table} SET epoch = epoch + 1")  # noqa: S608 - ours
        assert leader().url == ""
        for text in ("", "no JSON", "[]", '{"term": 1}'):
            server.sql(f"UPDATE {table} SET api = '{text}'")  # noqa: S608 - ours
            assert leader().url == ""
    expire(server, url)
    with Store.open(url):
        assert leader().url == ""


def test_a_reader_sees_one_moment_delays_no_commit_and_writes_nothing(server: Postgres, url: str) -> None:
    with Store.open(url) as leader, closing(Store.open_to_read(url)) as reader:
        put(leader, "a")

        def work(reads: Reads) -> tuple[str | None, str | None]:
            before = reads.meta("word")
            put(leader, "b")
            return before, reads.meta("word")

        assert reader.read(work) == ("a", "a")
        assert word(reader) == "b"
        for number, plan in enumerate((worlds.waiting(), worlds.ended())):
            assert len(reader.read(lambda reads: reads.jobs())) == number
            leader.tx(lambda tx, plan=plan: tx.commit(plan))  # type: ignore[misc]  # a lambda's default
        assert len(reader.read(lambda reads: reads.jobs())) == 2
        with pytest.raises(StateUnavailable, match="is written by another spotd"):
            put(reader, "c")
        with pytest.raises(StateError, match="cannot be written"):
            reader.read(lambda reads: Tx.set_meta(reads, "word", "c"))  # type: ignore[arg-type]  # as a defect would
        assert word(leader) == "b"
        server.sql(f"UPDATE {url.rpartition('%3D')[2]}.alembic_version SET version_num = '9999'")  # noqa: S608 - ours
        with pytest.raises(StoreTooNew, match="is at revision 9999, and this version reads"):
            word(reader)


def test_a_state_that_lacks_tables_says_what_and_where_and_what_to_do(server: Postgres, url: str) -> None:
    def refusal(call: Callable[[], object]) -> str:
        with pytest.raises(StateUnavailable) as caught:
            call()
        assert "a spotd that begins to lead makes the tables of a new state" in caught.value.hint
        assert "restore that database from a backup" in caught.value.hint
        return caught.value.message

    schema = url.rpartition("%3D")[2]
    with closing(Store.open_to_read(url)) as reader:
        never = refusal(lambda: word(reader))
        assert re.fullmatch(rf'the state postgresql://\S+{schema} lacks relation "\w+"', never)
        with Store.open(url) as leader:
            put(leader, "a")
            assert word(reader) == "a", "it is made now"
            server.sql(f"ALTER TABLE {schema}.meta RENAME TO away")
            calls: tuple[Callable[[], object], ...]
            calls = (lambda: word(reader), lambda: word(leader), lambda: put(leader, "b"))
            for call in calls:
                assert refusal(call).endswith('lacks relation "meta"')
            server.sql(f"ALTER TABLE {schema}.away RENAME TO meta")
            server.sql(f"ALTER TABLE {schema}.meta RENAME COLUMN value TO away")
            assert refusal(lambda: put(leader, "b")).endswith('lacks column "value"')
            server.sql(f"ALTER TABLE {schema}.meta RENAME COLUMN away TO value")
            put(leader, "c")
            assert word(reader) == "c"
            server.sql(f"DELETE FROM {schema}.alembic_version")  # noqa: S608 - ours
            assert refusal(lambda: word(reader)).endswith("lacks the row of its leader or of its revision")


def test_reads_that_last_delay_no_renewal_of_the_lease(server: Postgres, url: str) -> None:
    asked = text("SELECT expires FROM leader")
    with Store.open(url) as leader, closing(Store.open_to_read(url)) as reader, closing(Store.open_to_read(url)) as eye:

        def expires() -> object:
            return eye.read(lambda reads: reads.connection.execute(asked).scalar_one())

        def while_it_reads(reads: Reads) -> str | None:
            for _ in range(2):
                before = expires()
                until(lambda: reads.meta("word") and expires() != before, what="a renewal", within=20)  # noqa: B023  # used within the turn
            return reads.meta("word")

        put(leader, "a")
        assert leader.read(lambda _: reader.read(while_it_reads)) == "a"
        assert not leader.is_lost


def test_a_server_that_crashes_and_comes_back_is_used_again(server: Postgres, url: str) -> None:
    with Store.open(url) as store:
        put(store, "before")
        server.kill()
        with pytest.raises(StateUnavailable):
            put(store, "never")
        server.start()
        until(lambda: is_put(store, "after"), what="the state to be written again", within=20)
        assert word(store) == "after"
        assert not store.is_lost


def is_put(store: Store, value: str) -> bool:
    with suppress(StateUnavailable):
        put(store, value)
        return True
    return False


def test_a_leader_that_cannot_renew_its_lease_stops_before_another_may_begin(
    server: Postgres, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr(leading, "RENEW_S", 3600.0)
    with Store.open(url) as store:
        assert store._leads is not None
        monkeypatch.setattr(store._leads, "_steady", lambda: now[0])
        monkeypatch.setattr(store._leads, "_held_since", 0.0)
        now[0] = leading.GIVE_UP_S - 0.1
        put(store, "in time")
        now[0] = leading.GIVE_UP_S
        assert store.is_lost
        with pytest.raises(LeadershipLost, match="could not be renewed"):
            put(store, "too late")
        assert leading.GIVE_UP_S + leading.LEASE_STATEMENT_MS / 1000 < leading.LEASE_S


class Link(Proxy):
    """One that can be cut at a statement: before it arrives, or before its answer does."""

    cut_before_commit = cut_after_commit = False

    def __init__(self, port: int) -> None:
        self._writing: set[socket.socket] = set()
        self._swallows: set[socket.socket] = set()
        super().__init__(port)

    def is_passed(self, data: bytes, far: socket.socket, *, is_forth: bool) -> bool:
        if not is_forth:
            return far not in self._swallows
        if b"UPDATE meta" in data:
            self._writing.add(far)
        if far in self._writing and b"COMMIT\0" in data:
            if self.cut_before_commit:
                self.cut_before_commit = False
                return False
            if self.cut_after_commit:
                self.cut_after_commit = False
                self._swallows.add(far)  # its answer, when it has come
        return True


@contextmanager
def linked(server: Postgres) -> Iterator[Link]:
    link = Link(server.port)
    try:
        yield link
    finally:
        link.close()


def test_a_commit_that_never_arrived_is_known_not_to_have_happened(server: Postgres, url: str) -> None:
    with linked(server) as link, Store.open(url.replace(f":{server.port}/", f":{link.port}/")) as store:
        put(store, "before")
        link.cut_before_commit = True
        with pytest.raises(StateUnavailable):
            put(store, "lost")
        assert word(store) == "before"
        put(store, "again")
        assert not store.is_lost


def test_a_commit_whose_answer_is_lost_is_known_to_have_happened(server: Postgres, url: str) -> None:
    with linked(server) as link, Store.open(url.replace(f":{server.port}/", f":{link.port}/")) as store:
        put(store, "before")
        link.cut_after_commit = True
        put(store, "kept")
        assert word(store) == "kept"
        assert not store.is_lost


@pytest.mark.parametrize(
    "what", ["postgresql://nobody@127.0.0.1:{port}/spotd", "postgresql://spotd@127.0.0.1:{port}/no"]
)
def test_a_user_or_a_database_that_is_not_there_is_said(server: Postgres, what: str) -> None:
    with pytest.raises(StateUnavailable, match=r"refuses this user|cannot be reached") as caught:
        Store.open(what.format(port=server.port))
    assert "does not exist" in str(caught.value)
