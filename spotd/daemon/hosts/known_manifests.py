"""Manifests whose hash is known, read back from a store that their hosts may still write to."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

from spotd.core.domain.ids import AttemptId
from spotd_jobs.objects.api import ObjectStore, StoreError, StoreUnavailable
from spotd_jobs.wire.client.manifest_text import MANIFEST_BYTES_MAX
from spotd_jobs.wire.manifest import AcceptedManifest, verify_manifest


def known_manifest(
    objects: ObjectStore, key: str, sha256: str | None, first_version: Callable[[str], str | None] | None = None
) -> bytes | None:
    """Return the manifest of this very hash, also where it was written over in a store that keeps versions.

    Args:
        first_version: where the store was asked for the first versions of many keys already.

    Raises:
        StoreUnavailable
    """
    data = read_manifest(objects, key)
    if data is None or hashlib.sha256(data).hexdigest() != sha256:
        first = objects.first_versions(key).get(key) if first_version is None else first_version(key)
        data = None if first is None else read_manifest(objects, key, first)
    return data if data is not None and hashlib.sha256(data).hexdigest() == sha256 else None


def accepted_manifest(
    objects: ObjectStore,
    key: str,
    sha256: str | None,
    writer: AttemptId,
    first_version: Callable[[str], str | None] | None = None,
) -> AcceptedManifest | None:
    """Return the manifest of this very hash as it reads, where it is one of this attempt.

    Its chunks are not asked for one by one: they are verified by content whenever they are read.

    Raises:
        StoreUnavailable
    """
    data = known_manifest(objects, key, sha256, first_version)
    verdict = None if data is None else verify_manifest(data, writer.job, writer.number, None)
    return verdict if isinstance(verdict, AcceptedManifest) else None


def read_manifest(objects: ObjectStore, key: str, version: str | None = None) -> bytes | None:
    """Return the bytes of a manifest, `None` where there is none that can be read.

    Raises:
        StoreUnavailable
    """
    try:
        return objects.get(key, bytes_max=MANIFEST_BYTES_MAX, version=version)
    except StoreUnavailable:
        raise
    except StoreError:
        return None
