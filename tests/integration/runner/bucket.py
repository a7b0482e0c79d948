"""The rig's store in a bucket of a real S3 server: presigned reads and POST forms, as a stranger's machine has them."""

from __future__ import annotations

import hashlib
from datetime import UTC, datetime, timedelta

from spotd_jobs.objects.api import ObjectMissing
from spotd_jobs.objects.s3 import S3Store
from spotd_jobs.wire.grant import Blob, Upload, UploadMethod
from tests.integration.runner.rig import Stored

_MUCH = 1 << 30
_SIZE_MAX = 1 << 26


class BucketStore:
    """What `rig.FolderStore` is for files: the daemon's side of the store."""

    def __init__(self, store: S3Store) -> None:
        self._store = store

    def put(self, key: str, data: bytes) -> str:
        self._store.put(key, data)
        return self.url(key)

    def get(self, key: str) -> bytes | None:
        try:
            return self._store.get(key, bytes_max=_MUCH)
        except ObjectMissing:
            return None

    def url(self, key: str) -> str:
        return self._store.presign_get(key, expires=datetime.now(UTC) + timedelta(hours=2))

    def keys(self, prefix: str) -> list[str]:
        return [info.key for info in self._store.list(prefix)]

    def bytes_below(self, prefix: str) -> int:
        """How much is stored there now."""
        return sum(info.size for info in self._store.list(prefix))

    def head(self, key: str) -> Stored | None:
        info = self._store.head(key)
        return None if info is None else Stored(info.size, info.sha256)

    def upload(self, prefix: str, expires: datetime) -> Upload:
        """Leave to write below the prefix."""
        granted = self._store.grant_upload(prefix, expires=expires, size_max=_SIZE_MAX)
        return Upload(
            method=UploadMethod(granted.method),
            prefix=granted.prefix,
            expires=granted.expires,
            size_max=granted.size_max,
            fields=dict(granted.fields),
        )

    def blob(self, key: str, data: bytes) -> Blob:
        return Blob(url=self.put(key, data), sha256=hashlib.sha256(data).hexdigest(), size=len(data))
