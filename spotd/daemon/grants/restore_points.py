"""Which checkpoints a grant offers for restoring, and by which URLs.

Theory. A machine that lives on after its attempt ended may hold write permission for some hours more, and can write
over chunks and manifests of its own that later attempts refer to; nothing else can, and it can write over no others.
Where the store keeps versions this changes nothing: every URL names the object as it was first written, which is the
one that was there when the checkpoint was accepted, and an accepted manifest is read in its first version when the
newest is another. Where it keeps none, the change is noticed and not undone: a manifest that is not the accepted one is
left out here, a chunk that is not its hash is refused by the runner, and the next older checkpoint is taken.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Final
from urllib.parse import quote as url_quote

from spotd.core.checkpoints.retention import FALLBACKS, offered
from spotd.core.domain.checkpoints import FallbackRestore
from spotd.core.domain.ids import AttemptId
from spotd.core.domain.jobs import Job
from spotd.daemon import object_keys
from spotd.daemon.hosts.known_manifests import accepted_manifest
from spotd_jobs.objects.api import ObjectStore
from spotd_jobs.wire.grant import InputGrant, Restore
from spotd_jobs.wire.manifest import restore_of

INPUT_CHUNKS_MAX: Final = 20_000
"""Each needs a URL of its own in a bucket, and a grant is a document of bounded size."""


class InputsMissing(Exception):
    """Outputs of other jobs that a job reads are not there: its own matter, while the store answers everybody else."""


class RestorePoints:
    """The restore points of one grant: what the store holds is queried at most once in it."""

    def __init__(self, objects: ObjectStore, expires: datetime) -> None:
        self._objects = objects
        self._expires = expires
        self._first: dict[str, Mapping[str, str]] = {}
        self.passed_over: tuple[FallbackRestore, ...] = ()
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
                FallbackRestore(name=name, reason=why, next=after) for name, after in zip(left_out, names, strict=True)
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
