"""The state that the config names: its keys, `spotd migrate`, and `spotd migrate-state` with the secrets of jobs."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from spotd import paths
from spotd.config.credentials import CredentialRef, read_secrets_key
from spotd.config.model import SQLITE_DEFAULT, Config
from spotd.core.domain.intents import JobId
from spotd.daemon.commits import Database, never
from spotd.daemon.grants.inputs import SecretFiles, SecretsMissing
from spotd.daemon.grants.secret_rows import MAKE_KEY
from spotd.daemon.install import this_holder
from spotd.daemon.log import Redactor
from spotd.store import (
    EncryptedSecrets,
    NotDecrypted,
    Reads,
    SecretsKey,
    SecretsKeys,
    Store,
    move_state,
    parse_place,
)
from spotd.store import StateError as StateError
from spotd_jobs.spec.problems import BadValue
from spotd_providers.kit.boundary import install_command

STATE_FILE: Final = "state.sqlite"
SECRETS_FOLDER: Final = "secrets"


def secrets_keys(config: Config, environ: Mapping[str, str]) -> tuple[SecretsKeys, tuple[str, ...]]:
    """Return the keys that the config names, and their texts, which must never be logged.

    What is wrong with them is in `error`: jobs without secrets go on.
    """
    found: dict[str, SecretsKey] = {}
    texts: list[str] = []
    error = ""
    for name in ("secrets_key", "former_secrets_key"):
        ref: CredentialRef | None = getattr(config.daemon, name)
        try:
            if ref is not None:
                key = read_secrets_key(ref, environ=environ)
                texts += [key.hex(), key.hex().upper()]
                found[name] = SecretsKey.of(key)
        except BadValue as exc:
            error = error or f"[daemon] {name}: {exc}; {exc.hint}"
        except ImportError:
            error = f"[daemon] {name} needs cryptography, which is not installed: {install_command('postgres')}"
    keys = SecretsKeys(current=found.get("secrets_key"), former=found.get("former_secrets_key"), error=error)
    return keys, tuple(texts)


def place_of(state: str, state_dir: Path) -> str | Path:
    """Return the place that `[daemon] state` names."""
    return state_dir / STATE_FILE if state == SQLITE_DEFAULT else state


def migrate_state(state: str) -> str | Path:
    """Bring the state that `[daemon] state` names to this version, and return its place.

    Raises:
        StateError: it is in use, newer than this version, of another schema, or cannot be written.
    """
    place = place_of(state, paths.state_dir(os.environ))
    if isinstance(place, Path):
        place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with Store.open(place):
        pass
    return place


async def relocate_state(config: Config, to: str) -> tuple[int, int]:
    """Move the state that the config names to another place; return how many rows it has.

    The secrets of its jobs go with it: from files into encrypted rows, or back. Of jobs that have ended those that
    cannot be read stay behind; the second number is how many.

    Raises:
        StateError: it cannot be moved, nothing was lost, and nothing more lies in files than before.
    """
    state_dir = paths.state_dir(os.environ)
    here, there = place_of(config.daemon.state, state_dir), place_of(to, state_dir)
    keys, _ = secrets_keys(config, os.environ)
    files = SecretFiles(state_dir / SECRETS_FOLDER, Redactor(), never)
    with Store.open(here, for_move_to=str(parse_place(there))) as store:
        me = await this_holder(Database(store, inline=True), state_dir, here)
        was_shared, is_shared = store.is_shared, parse_place(there).url is not None
        rows: Sequence[EncryptedSecrets] | None = None
        values: Mapping[JobId, Mapping[str, str]] = {}
        left = 0
        if is_shared and not was_shared:
            rows, left = store.read(lambda reads: _rows_of_files(reads, files, keys))
        elif was_shared and not is_shared:
            values, left = store.read(lambda reads: _values_of(reads, keys))
            rows = ()
    moved = move_state(here, there, known_by=me.places, secrets=rows, beside=_written(files, values))
    if is_shared and not was_shared:
        _remove(files, (row.job for row in rows or ()))
        _remove(files, files.jobs() - files.jobs(drafts=False))
    return moved, left


@contextmanager
def _written(files: SecretFiles, values: Mapping[JobId, Mapping[str, str]]) -> Iterator[None]:
    """Write the values, and remove them where the state that they belong to was not moved: it has them encrypted."""
    try:
        for job, found in values.items():
            files.write(job, found)
        yield
    except OSError as exc:
        _remove(files, values)
        hint = "check the space and the owner of the state directory"
        raise StateError(f"the secrets of jobs cannot be written: {exc.strerror}", hint=hint) from exc
    except StateError:
        _remove(files, values)
        raise


def _remove(files: SecretFiles, jobs: Iterable[JobId]) -> None:
    for job in jobs:
        files.remove(job)


def _rows_of_files(reads: Reads, files: SecretFiles, keys: SecretsKeys) -> tuple[list[EncryptedSecrets], int]:
    """Return the rows of all jobs whose values lie in files, and how many of ended jobs cannot be read.

    Raises:
        StateError: there is no key for them, or a file of a job that goes on cannot be read.
    """
    found = sorted(reads.names_of(files.jobs(drafts=False)))
    if not found:
        return [], 0
    if keys.current is None:
        why = keys.error or "[daemon] secrets_key is not set"
        number = "1 job has" if len(found) == 1 else f"{len(found)} jobs have"
        raise StateError(f"{number} secrets, which are moved encrypted only: {why}", hint=MAKE_KEY)
    rows, ended = [], frozenset(reads.ended_ids())
    for job in found:
        try:
            rows.append(keys.current.encrypt(job, files.read_all(job)))
        except SecretsMissing as exc:
            if job not in ended:
                raise StateError(str(exc), hint="check the owner of its file below the state directory") from exc
    return rows, len(found) - len(rows)


def _values_of(reads: Reads, keys: SecretsKeys) -> tuple[dict[JobId, dict[str, str]], int]:
    """Return the values of all rows that can be read, and how many of ended jobs cannot.

    Raises:
        StateError: those of a job that goes on cannot be read with the keys of this computer.
    """
    rows, ended = reads.secrets(), frozenset(reads.ended_ids())
    values = {}
    for row in rows:
        try:
            values[row.job] = keys.decrypt(row)
        except NotDecrypted as exc:
            if row.job not in ended:
                hint = "name the key that encrypted them as secrets_key in [daemon]; if it is lost, cancel the job"
                raise StateError(f"the secrets of jobs cannot be moved: {exc}", hint=hint) from exc
    return values, len(rows) - len(values)
