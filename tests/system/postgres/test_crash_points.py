"""`kill -9` at every point of the store and of the daemon, over PostgreSQL: it keeps the promises of a file."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Final

import pytest

from spotd.daemon.commits import CrashPoint
from spotd.store import Store, StorePoint
from tests.e2e.harness import LEAVES_AT_ONCE, lab
from tests.e2e.person import Person
from tests.e2e.test_crash_points import HOSTS, SCALE, STORIES, Story, play
from tests.e2e.test_gang_crash_points import AT_STAKE, lose_first_at_each
from tests.e2e.test_gang_kept import HOSTS as GANG_HOSTS
from tests.system.engines.postgres import Postgres
from tests.system.postgres.test_shared_secrets import key_file, named
from tests.unit.store.dying import before, deadly
from tests.unit.store.test_crashes import Seen, assert_before_or_after, look, run_to_death

pytestmark = pytest.mark.system
OF_FILES: Final = {CrashPoint.BEFORE_WRITE_SECRETS, CrashPoint.AFTER_WRITE_SECRETS}
"""A job's secrets are rows of its commit here."""


def expire(server: Postgres, url: str) -> None:
    """As the database's clock does to a leader that was killed, fifteen seconds later."""
    schema = url.rpartition("%3D")[2]
    server.sql(f"UPDATE {schema}.leader SET expires = clock_timestamp() - interval '1 second'")  # noqa: S608 - ours


def test_a_writer_that_is_killed_leaves_the_state_before_or_after(server: Postgres) -> None:
    urls = {point: server.url(f"dying_{point.replace('.', '_')}") for point in StorePoint}
    run_to_death("dying", urls[StorePoint.BEGUN].replace("dying_begun", "dying_{}"))
    with Store.open(":memory:") as store:
        empty = store.read(look)
        store.tx(lambda tx: tx.commit(before()))
        first = store.read(look)
        store.tx(lambda tx: tx.commit(deadly()))
        alive: tuple[Seen, Seen, Seen] = (empty, first, store.read(look))
    for point, url in urls.items():
        expire(server, url)
        assert_before_or_after(url, alive, point)


@pytest.mark.parametrize("story", [pytest.param(story, id=story.__name__) for story in STORIES])
def test_no_machine_is_forgotten_or_doubled_when_the_daemon_dies(
    story: Story, server: Postgres, url: str, tmp_path: Path
) -> None:
    store = tmp_path / "lab" / "state" / "store"
    key = named(key_file(tmp_path, "secrets.key"))
    settings = f'state = "{url}"\n{key}\n[store]\nurl = "file://{store}"\n[reuse]\nwait = "15m"\n'
    with lab(tmp_path / "lab", hosts=HOSTS, scale=SCALE, daemon=settings) as found:
        found.environment["SPOTD_CRASH_FILE"] = str(tmp_path / "crash")
        found.start()
        found.before_start = partial(expire, server, url)
        for point in sorted(set(STORIES[story]) - OF_FILES):
            folder = tmp_path / point.value
            folder.mkdir()
            play(story, point, Person(found), folder)


def test_a_gang_goes_on_without_its_first_machine_wherever_the_daemon_dies(
    server: Postgres, url: str, tmp_path: Path
) -> None:
    settings = f'state = "{url}"\n{LEAVES_AT_ONCE}[store]\nurl = "file://{tmp_path / "objects"}"\n'
    with lab(tmp_path / "lab", hosts=GANG_HOSTS, scale=SCALE, daemon=settings) as found:
        found.environment["SPOTD_CRASH_FILE"] = str(tmp_path / "crash")
        found.start()
        found.before_start = partial(expire, server, url)
        lose_first_at_each(found, AT_STAKE, tmp_path)
