"""What a grant lets a host read: the checkpoints to restore, data sets, secrets."""

from __future__ import annotations

import gzip
import json
import os
import threading
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import product
from pathlib import Path
from typing import Final, Protocol
from urllib.parse import quote as url_quote

from spotd.core.checkpoints import FALLBACKS, offered
from spotd.core.domain.intents import AttemptId, JobId
from spotd.core.domain.jobs import FailedRestore, Job
from spotd.daemon import object_keys
from spotd.daemon.commits import Beside, CrashPoint, CrashPoints, Database
from spotd.daemon.datasets import Datasets
from spotd.daemon.hosts.host_reader import accepted_manifest
from spotd.daemon.hub import SourceAway, SourceRefused
from spotd.daemon.log import Redactor
from spotd.daemon.remote_data import RemoteData
from spotd_jobs.objects.api import ObjectMissing, ObjectStore
from spotd_jobs.spec.data import DATA_MAX
from spotd_jobs.spec.model import DataSource
from spotd_jobs.wire.client.dataset import (
    CHUNKS_MAX,
    PARTS_MAX,
    STORED,
    data_chunk_key,
    data_listing_key,
    data_root_key,
    file_url_key,
)
from spotd_jobs.wire.client.sinks import clean
from spotd_jobs.wire.grant import DataGrant, InputGrant, Restore
from spotd_jobs.wire.manifest import restore_of

# Which checkpoints a grant offers for restoring, and by which URLs.
#
# Theory. A machine that lives on after its attempt ended may hold write permission for some hours more, and can write
# over chunks and manifests of its own that later attempts refer to; nothing else can, and it can write over no
# others. Where the store keeps versions this changes nothing: every URL names the object as it was first written,
# which is the one that was there when the checkpoint was accepted, and an accepted manifest is read in its first
# version when the newest is another. Where it keeps none, the change is noticed and not undone: a manifest that is
# not the accepted one is left out here, a chunk that is not its hash is refused by the runner, and the next older
# checkpoint is taken.


INPUT_CHUNKS_MAX: Final = 20_000
"""Each needs a URL of its own in a bucket, and a grant is a document of bounded size."""


class InputsMissing(Exception):
    """Outputs of other jobs that a job reads are not there: its own matter, while the store answers everybody else."""


class InputsAway(Exception):
    """The bucket or hub beside the store that holds a job's data does not answer: other jobs do without it.

    Or the state, which holds its secrets.
    """


class RestorePoints:
    """The restore points of one grant: what the store holds is queried at most once in it."""

    def __init__(self, objects: ObjectStore, expires: datetime) -> None:
        self._objects = objects
        self._expires = expires
        self._first: dict[str, Mapping[str, str]] = {}
        self.passed_over: tuple[FailedRestore, ...] = ()
        """What would have come before the newest that is offered."""

    def restores(self, job: Job) -> list[Restore]:
        """Return the newest checkpoints, any of which the runner may restore; one that cannot be read is left out.

        Raises:
            StoreUnavailable
        """
        choices: list[Restore] = []
        left_out: list[str] = []
        for checkpoint in offered(job):
            if len(choices) == FALLBACKS:
                break
            key, owner = checkpoint.manifest_key, object_keys.owner_of(checkpoint.manifest_key)
            accepted = accepted_manifest(self._objects, key, checkpoint.sha256, owner, self._version)
            if accepted is None:
                left_out.extend([checkpoint.name] if not choices else [])
                continue
            choices.append(restore_of(accepted, key, self._url, chunks_base=self._chunks_base(key)))
        if left_out:
            names = [*left_out[1:], choices[0].name if choices else None]
            why = "its manifest in the store is not the one that was accepted"
            self.passed_over = tuple(
                FailedRestore(name=name, reason=why, next=after) for name, after in zip(left_out, names, strict=True)
            )
        return choices

    def inputs(self, job: Job) -> list[InputGrant]:
        """Return the outputs of other jobs that this one reads: those that it was given, and nothing beside them.

        Raises:
            StoreUnavailable
            InputsMissing: some are not in the store any more as their job left them.
        """
        granted: list[InputGrant] = []
        chunks = 0
        for one in () if job.chain is None else job.chain.inputs or ():
            attempt = AttemptId(job=one.job, number=one.attempt)
            key = object_keys.outputs_key(attempt)
            accepted = accepted_manifest(self._objects, key, one.sha256, attempt, self._version)
            if accepted is None:
                raise InputsMissing(f"the outputs of {one.name} are not in the store any more as it left them")
            base = self._chunks_base(key)
            chunks += 0 if base is not None else len(accepted.chunk_keys)
            if chunks > INPUT_CHUNKS_MAX:
                raise InputsMissing(
                    f"its inputs have more than {INPUT_CHUNKS_MAX:,} pieces; pack them into fewer files"
                )
            restore = restore_of(accepted, key, self._url, chunks_base=base)
            granted.append(InputGrant(folder=one.name, restore=restore))
        return granted

    def _url(self, key: str) -> str:
        return self._objects.presign_get(key, expires=self._expires, version=self._version(key))

    def _version(self, key: str) -> str | None:
        folder = key.rpartition("/")[0] + "/"
        if folder not in self._first:
            self._first[folder] = self._objects.first_versions(folder)
        return self._first[folder].get(key)

    def _chunks_base(self, key: str) -> str | None:
        """Return a folder's common beginning of all its URLs, which spares a grant one URL for each chunk."""
        url = self._objects.presign_get(key, expires=self._expires)
        tail = url_quote(key)
        return url.removesuffix(tail) if url.startswith("file://") and url.endswith(tail) else None


# The values of a job's secrets: one private file per job in the state folder, and nowhere else but in grants. Where
# several computers share the state they are encrypted rows of it (`secret_rows`).


class SecretsMissing(Exception):
    """Values that a job needs are not there; the message names them, never shows them."""


class SecretsLocked(SecretsMissing):
    """They are there, encrypted with a key that this computer does not have."""


@dataclass(frozen=True, slots=True)
class SecretsRefused:
    """Why no job with secrets can be taken now, and the way out."""

    message: str
    hint: str


class JobSecrets(Protocol):
    """The values of jobs' secrets, wherever they lie. The redactor knows each before any other part sees it."""

    async def refusal(self, values: Mapping[str, str], *, jobs: int = 0) -> SecretsRefused | None:
        """Return why these secrets of so many new jobs cannot be kept; of jobs taken back no number bounds them."""
        ...

    def prepare(self, by_job: Mapping[JobId, Mapping[str, str]]) -> Beside | None:
        """Keep the values of new jobs, or return what keeps them within the commit of these."""
        ...

    def discard(self, jobs: Collection[JobId]) -> None:
        """Forget what was prepared for jobs whose commit failed."""
        ...

    def read(self, job: JobId, names: Collection[str]) -> dict[str, str]:
        """Return the values of these names.

        Raises:
            SecretsMissing, InputsAway
        """
        ...

    def missing(self, names: Mapping[JobId, Collection[str]]) -> dict[JobId, SecretsMissing]:
        """Return why the values of these names cannot be read, of each job of which they cannot.

        Raises:
            InputsAway
        """
        ...

    def register(self, values: Collection[str]) -> None:
        """Keep these out of the log."""
        ...

    def remove(self, job: JobId) -> None:
        """Forget the values of a job that succeeded."""
        ...


class SecretFiles:
    """The files of secrets. The redactor knows every value before any other part sees it."""

    def __init__(self, folder: Path, redactor: Redactor, crash: CrashPoints) -> None:
        self._folder = folder
        self._redactor = redactor
        self._crash = crash

    async def refusal(self, _values: Mapping[str, str], *, jobs: int = 0) -> SecretsRefused | None:  # noqa: ARG002 - the protocol's
        """Nothing speaks against a file."""
        return None

    def prepare(self, by_job: Mapping[JobId, Mapping[str, str]]) -> Beside | None:
        """Write the files: they are there before their jobs are."""
        groups: dict[frozenset[tuple[str, str]], list[JobId]] = {}
        for job, values in by_job.items():
            groups.setdefault(frozenset(values.items()), []).append(job)
        for jobs in groups.values():
            self.write_all(jobs, by_job[jobs[0]])
        return None

    def discard(self, jobs: Collection[JobId]) -> None:
        """Remove the files of jobs that were not committed."""
        for job in jobs:
            self.remove(job)

    def register(self, values: Collection[str]) -> None:
        """Keep these out of the log."""
        self._redactor.register(values)

    def write(self, job: JobId, values: Mapping[str, str]) -> None:
        """Write the values durably, readable by this user only. Nothing is written for a job without secrets."""
        self._redactor.register(values.values())
        if not values:
            return
        self._crash(CrashPoint.BEFORE_WRITE_SECRETS)
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._folder.chmod(0o700)
        path = self._path(job)
        draft = path.with_suffix(".draft")
        draft.unlink(missing_ok=True)
        handle = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(dict(values), file)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
        self._crash(CrashPoint.AFTER_WRITE_SECRETS)

    def write_all(self, jobs: Sequence[JobId], values: Mapping[str, str]) -> None:
        """Write the same values for each of these jobs, on the disk only once where it can link files."""
        self.write(jobs[0], values)
        if not values:
            return
        for job in jobs[1:]:
            path = self._path(job)
            path.unlink(missing_ok=True)
            try:
                path.hardlink_to(self._path(jobs[0]))
            except OSError:
                self.write(job, values)

    def read(self, job: JobId, names: Collection[str]) -> dict[str, str]:
        """Return the values of these names.

        Raises:
            SecretsMissing: the file, or one of the names, is not there.
        """
        if not names:
            return {}
        stored = self.read_all(job)
        missing = sorted(name for name in names if not isinstance(stored.get(name), str))
        if missing:
            raise SecretsMissing(f"job {job} has no value for {', '.join(missing)}; submit it again")
        values = {name: stored[name] for name in sorted(names)}
        self._redactor.register(values.values())
        return values

    def missing(self, names: Mapping[JobId, Collection[str]]) -> dict[JobId, SecretsMissing]:
        """Return why the values of these names cannot be read, of each job of which they cannot."""
        found: dict[JobId, SecretsMissing] = {}
        for job, those in names.items():
            try:
                self.read(job, those)
            except SecretsMissing as exc:
                found[job] = exc
        return found

    def read_all(self, job: JobId) -> dict[str, str]:
        """Return all values of the job.

        Raises:
            SecretsMissing: the file is not there, or no such file.
        """
        try:
            return dict(json.loads(self._path(job).read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            raise SecretsMissing(f"the secrets of job {job} cannot be read; submit it again") from None

    def jobs(self, *, drafts: bool = True) -> frozenset[JobId]:
        """Return the jobs whose values, or drafts of them, lie here, whether or not such a job exists."""
        found = self._folder.iterdir() if self._folder.is_dir() else ()
        kinds = {".json", ".draft"} if drafts else {".json"}
        return frozenset(JobId(path.stem) for path in found if path.suffix in kinds)

    def remove(self, job: JobId) -> None:
        """Remove the job's values; fine if there were none."""
        for path in (self._path(job), self._path(job).with_suffix(".draft")):
            path.unlink(missing_ok=True)

    async def remove_of_no_job(self, database: Database) -> None:
        """Remove the values of jobs that are not in the state. A job whose row cannot be understood keeps its own.

        Raises:
            StoreError: the state cannot be read now.
        """
        lying = self.jobs()
        known = await database.read(lambda reads: reads.names_of(lying))
        for job in lying - known.keys():
            self.remove(job)

    def _path(self, job: JobId) -> Path:
        return self._folder / f"{job}.json"


# What a host may read of datasets: each of their objects by a URL of its own, and nothing beside them.


SIGNED_AGAIN: Final = timedelta(hours=2)
"""The URLs of a dataset are many: they are made anew only when a third of their time is over."""
BY_TOKEN_AGAIN: Final = timedelta(minutes=20)
"""The same where a hub signs them, which says of an hour."""
KNOWN_MAX: Final = 4
PAGE_KEYS: Final = 10_000
PAGES_MAX: Final = -(-(CHUNKS_MAX + PARTS_MAX + 1) // PAGE_KEYS)


class DataGrants:
    """The permission to read datasets, for grants. Synchronous."""

    def __init__(self, objects: ObjectStore, remote: RemoteData | None = None) -> None:
        self._objects = objects
        self._datasets = Datasets(objects, remote=remote)
        self._lock = threading.Lock()
        self._keys: dict[str, Sequence[str]] = {}
        """Of the newest few datasets: what is named by its hash never changes."""
        self._signed: dict[AttemptId, datetime] = {}

    def grants(self, attempt: AttemptId, job: Job, now: datetime, expires: datetime) -> list[DataGrant]:
        """Return what this attempt may read; where that needs many URLs, they are in the store.

        Raises:
            InputsMissing: a dataset is not in the store any more.
            StoreError
        """
        if not job.spec.data:
            return []
        bases = ["" if one.is_url else self._base(one, expires) for one in job.spec.data]
        if any(base is None for base in bases):
            self._write_urls(attempt, job, now, expires)
        return [
            DataGrant(
                source=one.source if one.is_elsewhere else clean(one.source),
                path=one.path,
                sha256=one.sha256 or "",
                bytes=one.bytes,
                files=one.files,
                base=base or None,
                urls=[] if base is not None else self._pages(attempt, number, one, expires),
            )
            for number, (one, base) in enumerate(zip(job.spec.data, bases, strict=True))
        ]

    def forget(self, attempt: AttemptId) -> list[str]:
        """Return the keys of what was written for an attempt that has ended."""
        with self._lock:
            self._signed.pop(attempt, None)
        return [object_keys.data_urls_key(attempt, *place) for place in product(range(DATA_MAX), range(PAGES_MAX))]

    def _pages(self, attempt: AttemptId, number: int, one: DataSource, expires: datetime) -> list[str]:
        count = -(-len(self._keys_of(one)) // PAGE_KEYS)
        return [self._url(object_keys.data_urls_key(attempt, number, page), expires) for page in range(count)]

    def _write_urls(self, attempt: AttemptId, job: Job, now: datetime, expires: datetime) -> None:
        with self._lock:
            signed = self._signed.get(attempt)
        again = BY_TOKEN_AGAIN if any(one.by_token for one in job.spec.data) else SIGNED_AGAIN
        if signed is not None and timedelta(0) <= now - signed < again:
            return
        for number, one in enumerate(job.spec.data):
            if one.is_url or self._base(one, expires) is not None:
                continue
            try:
                found = self._urls_of(one, expires)
            except (SourceRefused, SourceAway) as exc:
                if signed is not None:
                    return  # what was signed before is good for a while, and this is no failure of the store
                if isinstance(exc, SourceAway):
                    raise InputsAway(f"{one.source}: {exc}") from exc
                raise InputsMissing(f"{one.source} {exc}; {exc.hint}") from exc
            keys = self._keys_of(one)
            for page, start in enumerate(range(0, len(keys), PAGE_KEYS)):
                urls = {key: found[key] for key in keys[start : start + PAGE_KEYS]}
                text = json.dumps(urls, separators=(",", ":")).encode()
                self._objects.put(object_keys.data_urls_key(attempt, number, page), gzip.compress(text, 1))
        with self._lock:
            self._signed[attempt] = now

    def _urls_of(self, one: DataSource, expires: datetime) -> Mapping[str, str]:
        """Return the URL of everything that `_keys_of` names.

        Raises:
            SourceRefused, SourceAway: of a place beside the store.
            StoreError
        """
        if not one.is_listed:
            return {key: self._url(key, expires) for key in self._keys_of(one)}
        files = self._datasets.listing(one.sha256 or "")
        urls = {data_listing_key(one.sha256 or ""): self._url(data_listing_key(one.sha256 or ""), expires)}
        urls |= {file_url_key(number): url for number, url in self._datasets.remote.urls(one, files, expires).items()}
        for number, file in enumerate(files):
            if file.kind == STORED:
                urls[file_url_key(number)] = self._url(data_chunk_key(file.check), expires)
        return urls

    def _keys_of(self, one: DataSource) -> Sequence[str]:
        """Return by what a host asks for each part of a dataset."""
        sha256 = one.sha256 or ""
        with self._lock:
            known = self._keys.get(sha256)
        if known is not None:
            return known
        try:
            if one.is_listed:
                files = enumerate(self._datasets.listing(sha256))
                keys = (data_listing_key(sha256), *(file_url_key(number) for number, file in files if file.size))
            else:
                keys = tuple(dict.fromkeys(self._datasets.keys_of(sha256)))
        except ObjectMissing as exc:
            raise InputsMissing(f"the dataset {one.source} is not in the store any more") from exc
        with self._lock:
            while len(self._keys) >= KNOWN_MAX:
                del self._keys[next(iter(self._keys))]
            self._keys[sha256] = keys
        return keys

    def _url(self, key: str, expires: datetime) -> str:
        return self._objects.presign_get(key, expires=expires)

    def _base(self, one: DataSource, expires: datetime) -> str | None:
        if one.is_listed:
            return None
        key = data_root_key(one.sha256 or "")
        url = self._url(key, expires)
        return url.removesuffix(key) if url.startswith("file://") and url.endswith(key) else None
