"""The values of jobs' secrets in a state that several computers share: encrypted, so that its database shows none.

Theory. AES-256-GCM with a random nonce of 96 bits. What is encrypted is one document for each job, with its names in
it; the job's id is authenticated beside it, so that a row which is moved to another job cannot be read there. A key is
known by the beginning of its hash, which stands beside what it encrypted. The document is padded, so that its size
shows little of a value's length.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
from base64 import b64decode, b64encode
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Self

from sqlalchemy import Connection, delete, insert, select

from spotd.core.domain.intents import JobId
from spotd.store.place import Leader
from spotd.store.tables import ACTIVE, JOB_SECRETS, JOBS, chunks

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

_NONCE_BYTES: Final = 12
_PADDED_TO: Final = 256
_ID_LENGTH: Final = 8
_ID_BEGIN: Final = b"spotd secrets key 1\0"
_PROOF_BEGIN: Final = b"spotd daemons 1\0"
_LEADER_BEGIN: Final = b"spotd leader 1\0"
_JOB_BEGIN: Final = "spotd secrets 1\0"


class NotDecrypted(Exception):
    """What is stored was encrypted with another key or for another job, or was changed; the message shows no value."""


@dataclass(frozen=True, slots=True)
class SecretsKey:
    """One key. `id` names it to people and in rows."""

    id: str
    _cipher: AESGCM = field(repr=False, compare=False)
    _proves: bytes = field(repr=False, compare=False)
    _states: bytes = field(repr=False, compare=False)

    @classmethod
    def of(cls, key: bytes) -> Self:
        """Return the key of these 32 bytes.

        Raises:
            ImportError: the library that encrypts is not installed.
        """
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        return cls(
            hashlib.sha256(_ID_BEGIN + key).hexdigest()[:_ID_LENGTH],
            AESGCM(key),
            hmac.digest(key, _PROOF_BEGIN, "sha256"),
            hmac.digest(key, _LEADER_BEGIN, "sha256"),
        )

    def token_for(self, term: str, certificate: str) -> str:
        """Return by what a daemon that has this key, too, is known to the leader of this term, and to no other.

        Args:
            certificate: hash of that behind which it is sent: what is sent behind another one opens no leader.
        """
        return f"daemon_{hmac.digest(self._proves, f'{term} {certificate}'.encode(), 'sha256').hex()}"

    def proof_of(self, term: str, url: str, certificate: str) -> str:
        """Return what proves that a daemon with this key stated where it leads, since others may write the database.

        Args:
            url: where it serves its API.
            certificate: hash of that behind which it does.
        """
        return hmac.digest(self._states, json.dumps([term, url, certificate]).encode(), "sha256").hex()

    def encrypt(self, job: JobId, values: Mapping[str, str]) -> EncryptedSecrets:
        """Return the row of this job."""
        text = json.dumps(dict(values)).encode("ascii")
        nonce = os.urandom(_NONCE_BYTES)
        padded = text + b" " * (-len(text) % _PADDED_TO)
        data = nonce + self._cipher.encrypt(nonce, padded, _bound_to(job))
        return EncryptedSecrets(job=job, key_id=self.id, data=b64encode(data).decode("ascii"))

    def decrypt(self, row: EncryptedSecrets) -> dict[str, str]:
        """Return the values by name.

        Raises:
            NotDecrypted: another key encrypted them, or the row is not as it was written for this job.
        """
        from cryptography.exceptions import InvalidTag

        try:
            data = b64decode(row.data, validate=True)
            text = self._cipher.decrypt(data[:_NONCE_BYTES], data[_NONCE_BYTES:], _bound_to(row.job))
            return {str(name): str(value) for name, value in json.loads(text).items()}
        except (InvalidTag, ValueError, TypeError, AttributeError):
            words = f"the secrets of job {row.job} are not what was stored for it"
        raise NotDecrypted(words)


def _bound_to(job: JobId) -> bytes:
    return f"{_JOB_BEGIN}{job}".encode()


@dataclass(frozen=True, slots=True, kw_only=True)
class EncryptedSecrets:
    """The secrets of one job as they are stored."""

    job: JobId
    key_id: str
    data: str = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class SecretsKeys:
    """The keys of this computer.

    Attributes:
        current: encrypts, `None` where there is none.
        former: reads what it encrypted before there was `current`.
        error: why a key that the config names is not here; empty where nothing is wrong.
    """

    current: SecretsKey | None = None
    former: SecretsKey | None = None
    error: str = ""

    def find(self, key_id: str) -> SecretsKey | None:
        """Return the key of this id."""
        return next((one for one in (self.current, self.former) if one is not None and one.id == key_id), None)

    def proofs_of(self, term: str, url: str, certificate: str) -> tuple[str, ...]:
        """Return the proof by each key, so that daemons with the former or the current one alone find theirs."""
        keys = (self.current, self.former)
        return tuple(one.proof_of(term, url, certificate) for one in keys if one is not None)

    def key_of(self, leader: Leader) -> SecretsKey | None:
        """Return the key with which it was stated where this one leads; `None` where that was stated without any."""
        for one in (self.current, self.former):
            if one is None:
                continue
            mine = one.proof_of(leader.term, leader.url, leader.certificate).encode()
            if any(hmac.compare_digest(mine, stated.encode("utf-8", "replace")) for stated in leader.proofs):
                return one
        return None

    def words_against(self, key_id: str) -> str:
        """Why what the key of this id encrypted cannot be read here, in a sentence; empty where it can."""
        if self.find(key_id) is not None:
            return ""
        here = "is not set here"
        if self.error:
            here = f"cannot be used here: {self.error}"
        elif self.current is not None:
            here = f"is {self.current.id} here"
        return f"its secrets were encrypted with key {key_id}, and [daemon] secrets_key {here}"

    def decrypt(self, row: EncryptedSecrets) -> dict[str, str]:
        """Return the values by name.

        Raises:
            NotDecrypted
        """
        key = self.find(row.key_id)
        if key is None:
            raise NotDecrypted(f"job {row.job} has to wait: {self.words_against(row.key_id)}")
        return key.decrypt(row)


_COLUMNS: Final = (JOB_SECRETS.c.job_id, JOB_SECRETS.c.key_id, JOB_SECRETS.c.data)


def read_secrets(connection: Connection, jobs: Collection[JobId] | None = None) -> tuple[EncryptedSecrets, ...]:
    """Return the rows of all jobs, or of these few."""
    query = select(*_COLUMNS).order_by(JOB_SECRETS.c.job_id)
    rows = connection.execute(query if jobs is None else query.where(JOB_SECRETS.c.job_id.in_(jobs)))
    return tuple(EncryptedSecrets(job=JobId(one), key_id=key_id, data=data) for one, key_id, data in rows)


def secrets_key_ids(connection: Connection, *, going_on: bool = False) -> dict[JobId, str]:
    """Return which key each job's secrets need; with `going_on` of jobs alone that have not ended."""
    query = select(JOB_SECRETS.c.job_id, JOB_SECRETS.c.key_id).order_by(JOB_SECRETS.c.job_id)
    if going_on:
        query = query.join_from(JOB_SECRETS, JOBS, JOBS.c.id == JOB_SECRETS.c.job_id).where(ACTIVE)
    return {JobId(job): key_id for job, key_id in connection.execute(query)}


def write_secrets(connection: Connection, rows: Iterable[EncryptedSecrets]) -> None:
    """Store these in place of what is stored for their jobs, which are in the state."""
    fresh = [{"job_id": row.job, "key_id": row.key_id, "data": row.data} for row in rows]
    delete_secrets(connection, (JobId(row["job_id"]) for row in fresh))
    if fresh:
        connection.execute(insert(JOB_SECRETS), fresh)


def delete_secrets(connection: Connection, jobs: Iterable[JobId]) -> None:
    """Delete what is stored for these jobs."""
    for some in chunks(jobs):
        connection.execute(delete(JOB_SECRETS).where(JOB_SECRETS.c.job_id.in_(some)))
