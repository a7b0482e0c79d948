"""A standby of PostgreSQL that is promoted without the last commits: what was lost is not gone on from memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from spotd.client.transport import ClientError
from spotd.store import LeadershipLost, StateUnavailable, Store
from tests.e2e.ctl import assert_no_traceback, log_lines
from tests.e2e.harness import FINAL, Lab, host, lab
from tests.system.engines import postgres
from tests.system.engines.postgres import Postgres
from tests.waiting import until

pytestmark = pytest.mark.system


@pytest.fixture
def servers() -> Iterator[tuple[Postgres, Postgres]]:
    """A server and a standby that follows it."""
    reason = postgres.missing()
    if reason:
        pytest.skip(reason)
    with postgres.running() as first:
        standby = first.standby()
        try:
            yield first, standby
        finally:
            standby.end()


def either(first: Postgres, standby: Postgres) -> str:
    """Return the URL of a state on the one of the two that is no standby. What only reads finds it, too."""
    ports = f"host=127.0.0.1,127.0.0.1&port={first.port},{standby.port}"
    return f"postgresql://spotd@/spotd?{ports}&target_session_attrs=primary"


def put(store: Store, value: str) -> None:
    store.tx(lambda tx: tx.set_meta("word", value))


def word(store: Store) -> str | None:
    return store.read(lambda reads: reads.meta("word"))


def has_word(standby: Postgres) -> bool:
    with suppress(RuntimeError):  # it has no tables yet
        return standby.sql("SELECT value FROM meta WHERE key = 'word'") == "kept"
    return False


def promote(first: Postgres, standby: Postgres) -> None:
    first.kill()
    standby.promote()


def is_lost(store: Store, value: str) -> bool:
    """Try to write it; return whether that is refused for good, and not only for now."""
    try:
        put(store, value)
    except LeadershipLost:
        return True
    except StateUnavailable:
        pass
    return False


def test_a_standby_with_every_commit_is_gone_on_with(servers: tuple[Postgres, Postgres]) -> None:
    first, standby = servers
    with Store.open(either(first, standby)) as store:
        put(store, "kept")
        until(lambda: has_word(standby), what="the copy", within=20)
        promote(first, standby)

        def is_put() -> bool:
            with suppress(StateUnavailable):
                put(store, "after")
                return True
            return False

        until(is_put, what="the state to be written again", within=20)
        assert not store.is_lost


@pytest.mark.parametrize("writes", [True, False], ids=["a leader that writes", "a leader that only renews its lease"])
def test_a_leader_whose_last_commits_are_gone_stops(servers: tuple[Postgres, Postgres], *, writes: bool) -> None:
    first, standby = servers
    url = either(first, standby)
    with Store.open(url) as store:
        put(store, "kept")
        until(lambda: has_word(standby), what="the copy", within=20)
        standby.cut_off()
        put(store, "lost")
        promote(first, standby)
        until(lambda: is_lost(store, "late") if writes else store.is_lost, what="the leader to stop", within=9)
        with pytest.raises(LeadershipLost, match=r"lacks its last commits|another one took the lead"):
            put(store, "later")
    with Store.open(url) as store:
        assert word(store) == "kept"


def test_a_daemon_whose_last_commits_are_gone_takes_back_the_machine_that_it_bought_by_them(
    servers: tuple[Postgres, Postgres], tmp_path: Path
) -> None:
    first, standby = servers
    shared = f'state = "{either(first, standby)}"\n[store]\nurl = "file://{tmp_path}/store"\n'
    hosts = "".join(host(f"h{i}", 0.30 + i / 100) for i in range(3))

    def waits_for(name: str) -> str:
        return f"echo ran >> {tmp_path}/{name}.ran; until test -e {tmp_path}/{name}; do sleep 0.05; done"

    with lab(tmp_path / "a", hosts=hosts, scale=20.0, daemon=shared) as one:
        one.start()
        before = one.submit("before", waits_for("release-before"))
        after = one.submit("after", waits_for("release-after"), schedule={"after": ["before"]})
        until(lambda: one.state(before) == "RUNNING", what="the first job to run", within=60)
        states = "SELECT state FROM jobs ORDER BY name DESC"
        until(lambda: standby.sql(states) == "RUNNING\nQUEUED", what="the standby to have it", within=20)
        standby.cut_off()
        (tmp_path / "release-before").touch()
        until(lambda: one.state(after) == "RUNNING", what="the second job to run", within=60)
        (bought,) = (span for span in one.running_machines() if after in span.key)
        assert standby.sql(states) == "RUNNING\nQUEUED"
        promote(first, standby)
        until(lambda: log_lines(one, "survey.recovered"), what="the machine to be taken back", within=45)
        until(lambda: is_running(one, after), what="the second job to run by what is known of it now", within=30)
        assert log_lines(one, "daemon.lead_lost")
        (tmp_path / "release-after").touch()
        until(lambda: all(one.state(job) in FINAL for job in (before, after)), what="both to end", within=60)
        assert [one.state(job) for job in (before, after)] == ["SUCCEEDED", "SUCCEEDED"]
        until(lambda: not one.open_machines(), what="no machine to be left", within=60)
        assert [span.machine_id for span in one.ledger() if after in span.key] == [bought.machine_id]
        assert len({span.machine_id for span in one.ledger()}) == 2
        assert (tmp_path / "release-after.ran").read_text() == "ran\n"
        assert_no_traceback(one)


def is_running(one: Lab, job: str) -> bool:
    with suppress(ClientError):  # it leads again in a moment
        return one.state(job) == "RUNNING"
    return False
