"""Manifests and chunks as the daemon reads them back: blocking calls for a worker thread, hashing included."""

from __future__ import annotations

import hashlib

from spotd.core.domain.checkpoints import Checkpoint
from spotd.daemon import object_keys
from spotd_jobs.objects.api import ObjectMissing, ObjectStore, StoreError, StoreUnavailable
from spotd_jobs.wire.client.manifest_text import MANIFEST_BYTES_MAX
from spotd_jobs.wire.manifest import AcceptedManifest, BadManifest, verify_manifest
from spotd_jobs.wire.manifest_document import Chunk


class DamagedContent(StoreError):
    """A chunk that differs from its manifest."""


def checkpoint_manifest(objects: ObjectStore, checkpoint: Checkpoint) -> tuple[AcceptedManifest | None, str]:
    """Return the manifest as it was accepted, or why it is not there any more. Its chunks are not read.

    Raises:
        StoreUnavailable: nothing is known.
    """
    try:
        data = objects.get(checkpoint.manifest_key, bytes_max=MANIFEST_BYTES_MAX)
    except ObjectMissing:
        return None, "its manifest is gone from the store"
    except StoreUnavailable:
        raise
    except StoreError as exc:
        return None, str(exc)
    if hashlib.sha256(data).hexdigest() != checkpoint.sha256:
        return None, "its manifest is not the one that was accepted"
    owner = object_keys.owner_of(checkpoint.manifest_key)
    verdict = verify_manifest(data, owner.job, owner.number, None)
    return (None, verdict.reason) if isinstance(verdict, BadManifest) else (verdict, "")


def piece_problem(objects: ObjectStore, chunk: Chunk) -> str:
    """Return what is wrong with one chunk in the store, in words; empty where nothing is.

    Raises:
        StoreUnavailable: nothing is known.
    """
    try:
        piece(objects, chunk)
    except ObjectMissing:
        return f"chunk {chunk.sha256[:12]} is gone from the store"
    except StoreUnavailable:
        raise
    except StoreError as exc:
        return str(exc)
    return ""


def piece(objects: ObjectStore, chunk: Chunk) -> bytes:
    """Return the chunk's content.

    Raises:
        ObjectMissing, StoreUnavailable
        Damaged: it differs from its manifest.
    """
    data = objects.get(chunk.key, bytes_max=chunk.size)
    if len(data) != chunk.size or hashlib.sha256(data).hexdigest() != chunk.sha256:
        raise DamagedContent(f"chunk {chunk.sha256[:12]} holds other content than was saved")
    return data
