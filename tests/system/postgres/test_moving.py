"""A state moves between SQLite and PostgreSQL whole, and its old place is never used again."""

from __future__ import annotations

from pathlib import Path

import pytest

from spotd.config.credentials import CredentialRef
from spotd.config.model import Config, DaemonSection
from spotd.core.domain.intents import JobId
from spotd.daemon.commits import Database, never
from spotd.daemon.grants.inputs import SecretFiles
from spotd.daemon.install import this_holder
from spotd.daemon.log import Redactor
from spotd.service.state import relocate_state
from spotd.store import SecretsKey, StateError, StateUnavailable, Store, StoreMoved, move_state, moving
from spotd.store.store import MOVED_TO
from spotd.store.tables import META, METADATA
from tests.system.engines.postgres import Postgres
from tests.unit.store import values as v

pytestmark = pytest.mark.system
KNOWN = frozenset({"0123abcd"})


def rows(store: Store) -> dict[str, list[tuple[object, ...]]]:
    def read(reads: object) -> dict[str, list[tuple[object, ...]]]:
        tables = (table for table in METADATA.sorted_tables if table is not META)
        connection = reads.connection  # type: ignore[attr-defined]  # a Reads, whose class is the store's own
        return {t.name: [tuple(row) for row in connection.execute(t.select().order_by(*t.primary_key))] for t in tables}

    return store.read(read)


@pytest.fixture
def old(tmp_path: Path) -> Path:
    path = tmp_path / "state.sqlite"
    with Store.open(path) as store:
        store.tx(lambda tx: tx.commit(v.running_job()))
        store.tx(lambda tx: tx.set_meta("state_id", "abc"))
    return path


def test_all_rows_are_the_same_there_and_back(old: Path, url: str, tmp_path: Path) -> None:
    with Store.open(old) as store:
        before = rows(store)
    assert sum(map(len, before.values())) == 5
    move_state(old, url, known_by=KNOWN)
    with Store.open(url) as store:
        assert rows(store) == before
        assert store.read(lambda reads: reads.meta("state_id")) == "abc"
        store.tx(lambda tx: tx.commit(v.running_job("j2")))
        later = rows(store)
    back = tmp_path / "back.sqlite"
    move_state(url, back, known_by=KNOWN)
    with Store.open(back) as store:
        assert rows(store) == later
    with pytest.raises(StoreMoved, match="was moved to"):
        Store.open(url)


def test_the_old_place_is_never_opened_again(old: Path, url: str) -> None:
    move_state(old, url, known_by=KNOWN)
    with pytest.raises(StoreMoved, match=r"was moved to postgresql://"):
        Store.open(old)


def test_a_move_that_was_broken_off_is_ended_by_the_same_command(old: Path, url: str) -> None:
    with Store.open(old) as store:
        before = rows(store)
        store.tx(lambda tx: tx.set_meta(MOVED_TO, url))
    with pytest.raises(StoreMoved):
        Store.open(old)
    move_state(old, url, known_by=KNOWN)
    with Store.open(url) as store:
        assert rows(store) == before


def test_nothing_is_laid_over_a_state_that_is_not_empty(old: Path, url: str) -> None:
    with Store.open(url) as store:
        store.tx(lambda tx: tx.commit(v.running_job("other")))
    with pytest.raises(StateError, match="is not empty"):
        move_state(old, url, known_by=KNOWN)
    Store.open(old).close()


async def holder_of(place: Path | str, folder: Path) -> frozenset[str]:
    with Store.open(place) as store:
        return (await this_holder(Database(store, inline=True), folder, place)).places


@pytest.mark.anyio
async def test_the_new_state_may_claim_the_lease_that_the_old_one_held(old: Path, url: str, tmp_path: Path) -> None:
    former = await holder_of(old, tmp_path)
    move_state(old, url, known_by=former)
    assert former & await holder_of(url, tmp_path / "another")


# --- the secrets of jobs ---

KEY, OTHER = bytes(range(32)), bytes(range(1, 33))
VALUES = {"TOKEN": "canary-value"}


@pytest.fixture
def files(old: Path, monkeypatch: pytest.MonkeyPatch) -> SecretFiles:
    """Those of the one job that there is, and of a job that a crash kept from being queued."""
    monkeypatch.setenv("STATE_DIRECTORY", str(old.parent))
    files = SecretFiles(old.parent / "secrets", Redactor(), never)
    for job in ("j1", "never-queued"):
        files.write(JobId(job), VALUES)
    return files


def config(state: str, key: bytes | None = None) -> Config:
    ref = None if key is None else CredentialRef.model_validate(key.hex())
    return Config(daemon=DaemonSection(state=state, secrets_key=ref))


def encrypted(url: str) -> list[tuple[str, str]]:
    with Store.open(url) as store:
        return [(row.job, row.key_id) for row in store.read(lambda reads: reads.secrets())]


@pytest.mark.anyio
async def test_secrets_become_rows_and_files_again(files: SecretFiles, old: Path, url: str) -> None:
    await relocate_state(config("sqlite", KEY), url)
    assert files.jobs() == {JobId("never-queued")}
    assert encrypted(url) == [("j1", SecretsKey.of(KEY).id)]
    back = f"sqlite:///{old.parent}/back.sqlite"
    await relocate_state(config(url, KEY), back)
    assert files.read(JobId("j1"), ["TOKEN"]) == VALUES
    with Store.open(back) as store:
        assert store.read(lambda reads: reads.secrets()) == ()
        assert store.read(lambda reads: reads.names_of([JobId("j1")]))


@pytest.mark.anyio
async def test_without_a_key_nothing_is_moved(files: SecretFiles, old: Path, url: str) -> None:
    with pytest.raises(StateError, match=r"1 job has secrets.* secrets_key is not set") as refused:
        await relocate_state(config("sqlite"), url)
    assert "canary" not in str(refused.value)
    assert files.read(JobId("j1"), ["TOKEN"]) == VALUES
    Store.open(old).close()  # it was not sealed
    await relocate_state(config("sqlite", KEY), url)


@pytest.mark.anyio
@pytest.mark.parametrize("key", [None, OTHER])
async def test_without_their_key_they_are_not_moved_back(
    files: SecretFiles, old: Path, url: str, key: bytes | None
) -> None:
    await relocate_state(config("sqlite", KEY), url)
    back = old.parent / "back.sqlite"
    with pytest.raises(StateError, match=f"encrypted with key {SecretsKey.of(KEY).id}"):
        await relocate_state(config(url, key), f"sqlite:///{back}")
    assert not back.exists()
    assert JobId("j1") not in files.jobs()
    assert encrypted(url)  # it was not sealed


@pytest.mark.anyio
async def test_a_move_back_that_is_refused_leaves_no_value_in_a_file(files: SecretFiles, old: Path, url: str) -> None:
    await relocate_state(config("sqlite", KEY), url)
    with pytest.raises(StateError, match="was moved to"):
        await relocate_state(config(url, KEY), "sqlite")
    back = old.parent / "back.sqlite"
    with Store.open(back) as store:
        store.tx(lambda tx: tx.commit(v.running_job("other")))
    with pytest.raises(StateError, match="is not empty"):
        await relocate_state(config(url, KEY), f"sqlite:///{back}")
    assert files.jobs() == {JobId("never-queued")}


@pytest.mark.anyio
async def test_a_move_back_that_is_broken_off_leaves_no_value_and_is_ended_by_the_same_command(
    files: SecretFiles, old: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    await relocate_state(config("sqlite", KEY), url)
    back = f"sqlite:///{old.parent}/back.sqlite"

    def full(*_: object) -> int:
        assert JobId("j1") in files.jobs()
        raise StateUnavailable("the disk is full", hint="free some space")

    with monkeypatch.context() as patched:
        patched.setattr(moving, "_copy", full)
        with pytest.raises(StateUnavailable):
            await relocate_state(config(url, KEY), back)
    assert JobId("j1") not in files.jobs()
    await relocate_state(config(url, KEY), back)
    assert files.read(JobId("j1"), ["TOKEN"]) == VALUES


def end(store: Store, job: str) -> None:
    store.tx(
        lambda tx: tx.connection.exec_driver_sql(
            f"update jobs set state = 'CANCELLED', ended_at = submitted_at where id = '{job}'"  # noqa: S608 - ours
        )
    )


@pytest.mark.anyio
async def test_secrets_of_ended_jobs_whose_key_is_lost_stay_behind(files: SecretFiles, old: Path, url: str) -> None:
    await relocate_state(config("sqlite", KEY), url)
    with Store.open(url) as store:
        store.tx(lambda tx: tx.commit(v.running_job("j2")))
        store.tx(lambda tx: tx.write_secrets([SecretsKey.of(OTHER).encrypt(JobId("j2"), VALUES)]))
        end(store, "j1")
    _, left = await relocate_state(config(url, OTHER), f"sqlite:///{old.parent}/back.sqlite")
    assert left == 1
    assert files.jobs() == {JobId("never-queued"), JobId("j2")}


@pytest.mark.anyio
async def test_files_that_cannot_be_read_stop_the_move_only_of_jobs_that_go_on(
    files: SecretFiles, old: Path, url: str
) -> None:
    path = old.parent / "secrets" / "j1.json"
    path.write_text("half")
    with pytest.raises(StateError, match="j1 cannot be read"):
        await relocate_state(config("sqlite", KEY), url)
    with Store.open(old) as store:
        end(store, "j1")
    _, left = await relocate_state(config("sqlite", KEY), url)
    assert (left, encrypted(url)) == (1, [])


@pytest.mark.anyio
async def test_a_draft_that_a_crash_left_is_no_secret(files: SecretFiles, old: Path, url: str) -> None:
    files.remove(JobId("j1"))
    (old.parent / "secrets" / "j1.draft").write_text("half")
    assert (await relocate_state(config("sqlite", KEY), url))[1] == 0
    assert encrypted(url) == []
    assert files.jobs() == {JobId("never-queued")}


@pytest.mark.anyio
async def test_between_two_servers_no_key_is_needed(files: SecretFiles, server: Postgres, url: str) -> None:
    await relocate_state(config("sqlite", KEY), url)
    before = encrypted(url)
    other = server.url(f"{url.rpartition('%3D')[2]}_moved")
    await relocate_state(config(url), other)
    assert encrypted(other) == before
