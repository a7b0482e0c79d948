"""The secrets of jobs in a state that several computers share: encrypted rows of it, and which can be read here."""

from __future__ import annotations

import json
import threading
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Final

from spotd.core.domain.intents import JobId
from spotd.daemon.commits import Beside, Database
from spotd.daemon.grants.inputs import InputsAway, SecretFiles, SecretsLocked, SecretsMissing, SecretsRefused
from spotd.daemon.log import Redactor
from spotd.store import EncryptedSecrets, NotDecrypted, Reads, SecretsKeys, StateError, Tx

BYTES_MAX: Final = 16 * 2**20
"""Of the secrets of all jobs of one submission: they are written in one transaction, within the leader's lease."""
NAMED_MAX: Final = 3
AT_ONCE: Final = 100
"""Rows that are read, or encrypted anew, in one transaction."""
GIVE_KEY: Final = "give the same key to every spotd of this state, as secrets_key in [daemon], and reload it"
MAKE_KEY: Final = (
    "make one with `spotd secrets-key FILE`, copy the file to every computer of this state, write "
    'secrets_key = { file = "FILE" } in [daemon], then reload spotd'
)


def _rows_of(jobs: Sequence[JobId], reads: Reads) -> Sequence[EncryptedSecrets]:
    return reads.secrets(jobs)


class SecretRows:
    """What `SecretFiles` is for a state of one computer. Values are in the commit of their jobs, or not at all."""

    def __init__(self, database: Database, keys: SecretsKeys, redactor: Redactor, place: str) -> None:
        """`place`: the state as messages call it."""
        self._database = database
        self._keys = keys
        self._redactor = redactor
        self._place = place
        self._key_ids: dict[JobId, str] = {}
        """Of what is stored, as far as this process knows."""
        self._lock = threading.Lock()
        self.locked: Mapping[JobId, str] = {}
        """Jobs whose secrets cannot be read with the keys of this computer, and why."""

    async def begin(self, files: SecretFiles) -> None:
        """Read which keys are needed, and encrypt anew what the former key encrypted.

        Before any job is launched, and when the keys have changed.

        Args:
            files: of this computer, where a move of the state that was cut short may have left values.

        Raises:
            StateError: the state cannot be read or written now.
        """
        former = self._keys.former
        found = await self._database.read(lambda reads: reads.secrets_key_ids())
        old = [job for job, key_id in found.items() if former is not None and key_id == former.id]
        for start in range(0, len(old), AT_ONCE):
            await self._database.tx(partial(self._encrypt_anew, old[start : start + AT_ONCE]))
        found = await self._database.read(lambda reads: reads.secrets_key_ids()) if old else found
        with self._lock:
            self._key_ids |= found
        self.use(self._keys)
        for job in files.jobs() & found.keys():
            for row in await self._database.read(partial(_rows_of, [job])):
                with suppress(NotDecrypted):  # then the file may be all that there is of them
                    self._keys.decrypt(row)
                    files.remove(job)

    def _encrypt_anew(self, jobs: Sequence[JobId], tx: Tx) -> None:
        keys, rows = self._keys, []
        for row in tx.secrets(jobs):
            with suppress(NotDecrypted):  # it stays as it is, and is refused where it is asked for
                if keys.current is not None:
                    rows.append(keys.current.encrypt(row.job, keys.decrypt(row)))
        tx.write_secrets(rows)

    def use(self, keys: SecretsKeys) -> None:
        """Read with these keys from now on."""
        with self._lock:
            self._keys = keys
            against = {key_id: keys.words_against(key_id) for key_id in {*self._key_ids.values()}}
            self.locked = {job: against[key_id] for job, key_id in self._key_ids.items() if against[key_id]}

    def _note(self, key_ids: Mapping[JobId, str]) -> None:
        with self._lock:
            self._key_ids |= key_ids
            words = {job: self._keys.words_against(key_id) for job, key_id in key_ids.items()}
            if locked := {job: why for job, why in words.items() if why}:
                self.locked = {**self.locked, **locked}

    async def refusal(self, values: Mapping[str, str], *, jobs: int = 0) -> SecretsRefused | None:
        """Return why no job with these secrets can be taken here."""
        if not values:
            return None
        keys = self._keys
        if keys.current is None:
            why = keys.error or "[daemon] secrets_key is not set"
            words = f"the secrets of a job cannot be stored in {self._place}, which holds them encrypted only: {why}"
            return SecretsRefused(words, MAKE_KEY)
        key_ids = await self._database.read(lambda reads: reads.secrets_key_ids(going_on=True))
        others = {job: key_id for job, key_id in key_ids.items() if keys.find(key_id) is None}
        if others:
            # With two keys in use, each spotd could start only the jobs that it took itself.
            named = ", ".join([*others][:NAMED_MAX]) + (" ..." if len(others) > NAMED_MAX else "")
            words = f"job {named} in {self._place} has to wait: {keys.words_against(next(iter(others.values())))}"
            return SecretsRefused(words, f"{GIVE_KEY}; if that key is lost, cancel what waits for it")
        if len(json.dumps(dict(values))) * jobs > BYTES_MAX:  # as they are encoded to be encrypted
            words = f"the secrets of {jobs:,} jobs are larger than {BYTES_MAX // 2**20} MiB together"
            return SecretsRefused(words, "submit fewer jobs at once, or fetch what is large by a token")
        return None

    def prepare(self, by_job: Mapping[JobId, Mapping[str, str]]) -> Beside | None:
        """Return what writes the values within the commit of their jobs."""
        key = self._keys.current
        found = {job: values for job, values in by_job.items() if values}
        for values in found.values():
            self._redactor.register(values.values())
        if not found:
            return None
        if key is None:
            raise SecretsMissing("[daemon] secrets_key is not set")  # `refusal` was not asked, or the config changed
        rows = [key.encrypt(job, values) for job, values in found.items()]
        self._note(dict.fromkeys(found, key.id))
        return lambda tx: tx.write_secrets(rows)

    def read(self, job: JobId, names: Collection[str]) -> dict[str, str]:
        """Return the values of these names. To be called in a thread that may wait.

        Raises:
            SecretsLocked: this computer has no key for them.
            SecretsMissing: they are not there, or one of the names is not.
            InputsAway: the state does not answer.
        """
        return self._values(job, names, self._rows([job]).get(job)) if names else {}

    def missing(self, names: Mapping[JobId, Collection[str]]) -> dict[JobId, SecretsMissing]:
        """Return why the values of these names cannot be read, of each job of which they cannot.

        Raises:
            InputsAway: the state does not answer.
        """
        found: dict[JobId, SecretsMissing] = {}
        wanted = [job for job, those in names.items() if those]
        for start in range(0, len(wanted), AT_ONCE):
            some = wanted[start : start + AT_ONCE]
            rows = self._rows(some)
            for job in some:
                try:
                    self._values(job, names[job], rows.get(job))
                except SecretsMissing as exc:
                    found[job] = exc
        return found

    def _rows(self, jobs: Sequence[JobId]) -> dict[JobId, EncryptedSecrets]:
        try:
            return {row.job: row for row in self._database.read_here(partial(_rows_of, jobs))}
        except StateError as exc:
            raise InputsAway(f"the secrets of job {jobs[0]}: {exc.message}") from exc

    def _values(self, job: JobId, names: Collection[str], row: EncryptedSecrets | None) -> dict[str, str]:
        if row is None:
            raise SecretsMissing(f"the secrets of job {job} are not in the state; submit it again")
        if words := self._keys.words_against(row.key_id):
            self._note({job: row.key_id})
            raise SecretsLocked(words)
        try:
            stored = self._keys.decrypt(row)
        except NotDecrypted as exc:
            raise SecretsMissing(f"{exc}; submit it again") from exc
        missing = sorted(set(names) - stored.keys())
        if missing:
            raise SecretsMissing(f"job {job} has no value for {', '.join(missing)}; submit it again")
        values = {name: stored[name] for name in sorted(names)}
        self._redactor.register(values.values())
        return values

    def register(self, values: Collection[str]) -> None:
        """Keep these out of the log."""
        self._redactor.register(values)

    def discard(self, jobs: Collection[JobId]) -> None:
        """Nothing was written for jobs that were not."""
        for job in jobs:
            self.remove(job)

    def remove(self, job: JobId) -> None:
        """Their rows went with the commit by which the job succeeded."""
        with self._lock:
            self._key_ids.pop(job, None)
