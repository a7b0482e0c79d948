"""The state that the config names: its keys, `spotd migrate`, and `spotd migrate-state` with the secrets of jobs."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
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


async def relocate_state(config: Config, to: str) -> int:
    """Move the state that the config names to another place; return how many rows it has.

    The secrets of its jobs go with it: from files into encrypted rows, or back.

    Raises:
        StateError: it cannot be moved, and nothing was lost.
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
        if is_shared and not was_shared:
            rows = store.read(lambda reads: _rows_of_files(reads, files, keys))
        elif was_shared and not is_shared:
            rows, values = (), _values_of(store.read(lambda reads: reads.secrets()), keys)
    for job, found in values.items():
        files.write(job, found)
    moved = move_state(here, there, known_by=me.places, secrets=rows)
    for row in rows or ():
        files.remove(row.job)
    return moved


def _rows_of_files(reads: Reads, files: SecretFiles, keys: SecretsKeys) -> list[EncryptedSecrets]:
    """Return the rows of all jobs whose values lie in files.

    Raises:
        StateError: there is no key for them, or a file cannot be read.
    """
    found = sorted(reads.names_of(files.jobs()))
    if not found:
        return []
    if keys.current is None:
        why = keys.error or "[daemon] secrets_key is not set"
        number = "1 job has" if len(found) == 1 else f"{len(found)} jobs have"
        raise StateError(f"{number} secrets, which are moved encrypted only: {why}", hint=MAKE_KEY)
    rows = []
    for job in found:
        try:
            rows.append(keys.current.encrypt(job, files.read_all(job)))
        except SecretsMissing as exc:
            raise StateError(str(exc), hint="check the owner of its file below the state directory") from exc
    return rows


def _values_of(rows: Sequence[EncryptedSecrets], keys: SecretsKeys) -> dict[JobId, dict[str, str]]:
    """Return the values of all rows.

    Raises:
        StateError: some cannot be read with the keys of this computer.
    """
    try:
        return {row.job: keys.decrypt(row) for row in rows}
    except NotDecrypted as exc:
        hint = "name the key that encrypted them as secrets_key in [daemon]"
        raise StateError(f"the secrets of jobs cannot be moved: {exc}", hint=hint) from exc
