"""What a host may read of datasets: each of their objects by a URL of its own, and nothing beside them."""

from __future__ import annotations

import gzip
import json
import threading
from collections.abc import Sequence
from datetime import datetime, timedelta
from itertools import product
from typing import Final

from spotd.core.domain.ids import AttemptId
from spotd.core.domain.jobs import Job
from spotd.daemon import object_keys
from spotd.daemon.datasets import Datasets
from spotd.daemon.grants.restore_points import InputsMissing
from spotd_jobs.objects.api import ObjectMissing, ObjectStore
from spotd_jobs.spec.keys import DATA_MAX
from spotd_jobs.spec.model import DataSource
from spotd_jobs.wire.client.dataset import CHUNKS_MAX, PARTS_MAX, data_root_key
from spotd_jobs.wire.grant import DataGrant

SIGNED_AGAIN: Final = timedelta(hours=2)
"""The URLs of a dataset are many: they are made anew only when a third of their time is over."""
KNOWN_MAX: Final = 4
PAGE_KEYS: Final = 10_000
PAGES_MAX: Final = -(-(CHUNKS_MAX + PARTS_MAX + 1) // PAGE_KEYS)


class DataGrants:
    """The permission to read datasets, for grants. Synchronous."""

    def __init__(self, objects: ObjectStore) -> None:
        self._objects = objects
        self._datasets = Datasets(objects)
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
        bases = [self._base(one.sha256 or "", expires) for one in job.spec.data]
        if any(base is None for base in bases):
            self._write_urls(attempt, job, now, expires)
        return [
            DataGrant(
                source=one.source,
                path=one.path,
                sha256=one.sha256 or "",
                bytes=one.bytes,
                files=one.files,
                base=base,
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
        count = -(-len(self._keys_of(one.sha256 or "", one.source)) // PAGE_KEYS)
        return [self._url(object_keys.data_urls_key(attempt, number, page), expires) for page in range(count)]

    def _write_urls(self, attempt: AttemptId, job: Job, now: datetime, expires: datetime) -> None:
        with self._lock:
            signed = self._signed.get(attempt)
        if signed is not None and timedelta(0) <= now - signed < SIGNED_AGAIN:
            return
        for number, one in enumerate(job.spec.data):
            keys = self._keys_of(one.sha256 or "", one.source)
            for page, start in enumerate(range(0, len(keys), PAGE_KEYS)):
                urls = {key: self._url(key, expires) for key in keys[start : start + PAGE_KEYS]}
                text = json.dumps(urls, separators=(",", ":")).encode()
                self._objects.put(object_keys.data_urls_key(attempt, number, page), gzip.compress(text, 1))
        with self._lock:
            self._signed[attempt] = now

    def _keys_of(self, sha256: str, source: str) -> Sequence[str]:
        with self._lock:
            known = self._keys.get(sha256)
        if known is not None:
            return known
        try:
            keys = tuple(dict.fromkeys(self._datasets.keys_of(sha256)))
        except ObjectMissing as exc:
            raise InputsMissing(f"the dataset {source} is not in the store any more") from exc
        with self._lock:
            while len(self._keys) >= KNOWN_MAX:
                del self._keys[next(iter(self._keys))]
            self._keys[sha256] = keys
        return keys

    def _url(self, key: str, expires: datetime) -> str:
        return self._objects.presign_get(key, expires=expires)

    def _base(self, sha256: str, expires: datetime) -> str | None:
        key = data_root_key(sha256)
        url = self._url(key, expires)
        return url.removesuffix(key) if url.startswith("file://") and url.endswith(key) else None
