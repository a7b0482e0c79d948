"""An object store in a bucket, which is trusted with no more than a probe of it has seen.

boto3 is imported when a store is opened, so that a user without a bucket neither waits for it nor needs it.

Theory. Stores differ in what they enforce, and a store that ignores what a grant states would let any host write
anywhere. What this one does is found out by a probe (`probe.py`) and never assumed: until the probe has seen every
forgery refused, `grant_upload` gives nothing. Grants are POST policies where the store has them (one signature that
permits objects of limited size below one prefix until an instant, with no power to read, list or delete), else
temporary credentials that may only put below the prefix (`s3_grants.py`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import UTC, datetime

from spotd_jobs.objects.api import GrantsRefused, ObjectInfo, StoreUnavailable, UploadGrant
from spotd_jobs.objects.keys import require_key, require_prefix
from spotd_jobs.objects.probe import Findings, probe
from spotd_jobs.objects.s3_bucket import PAGE, S3Bucket
from spotd_jobs.objects.s3_client import S3Place
from spotd_jobs.objects.s3_grants import GrantMethod, folder_of
from spotd_jobs.wire.fields import MARKER_BYTES_MAX


class S3Store(S3Bucket):
    """An `ObjectStore` below one prefix of a bucket.

    Args:
        findings: what a probe of this very place found; without them it is probed before the first grant.
    """

    def __init__(
        self,
        place: S3Place,
        *,
        clock: Callable[[], datetime] = lambda: datetime.now(UTC),
        findings: Findings | None = None,
    ) -> None:
        super().__init__(place, clock=clock)
        self._findings = findings
        self._probing = threading.Lock()

    def __repr__(self) -> str:
        return f"S3Store({str(self.place)!r})"

    @property
    def shared_with_hosts_by(self) -> str:
        """`network`: every computer that reaches the store can use a grant."""
        return "network"

    def findings(self) -> Findings:
        """Return what this store enforces, found out once.

        Raises:
            StoreError: it could not be found out.
        """
        with self._probing:
            if self._findings is None:
                self._findings = probe(self)
            return self._findings

    def head(self, key: str) -> ObjectInfo | None:
        return self.info_of(key, checksums=self._findings is not None and self._findings.checksums)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        folder = prefix.rpartition("/")[0]
        if folder:
            require_key(folder)
        found = self.objects_below(prefix)
        return found if self._is_ordered else iter(sorted(found, key=lambda info: info.key.encode()))

    def list_after(self, prefix: str, after: str, *, page: int = PAGE) -> Iterator[ObjectInfo]:
        # A store may take no notice of where to begin: a reader that got all from the first again would never end.
        found = self.objects_below(prefix, after=after, page=page) if self._is_ordered else self.list(prefix)
        return (info for info in found if info.key.encode() > after.encode())

    @property
    def _is_ordered(self) -> bool:
        return self._findings is not None and self._findings.ordered

    def grant_upload(
        self, prefix: str, *, expires: datetime, size_max: int, marker_key: str | None = None
    ) -> UploadGrant:
        require_prefix(prefix)
        findings = self.findings()
        if findings.refusal:
            raise GrantsRefused(f"{self.place} gets no grants: {findings.refusal}")
        if findings.method is GrantMethod.FORM:
            method = "post"
            fields = self.grants.form(prefix, expires=expires, size_max=size_max, checksums=findings.checksums)
            one = None
            if marker_key is not None:
                one = self.grants.form_of(require_key(marker_key), expires=expires, size_max=MARKER_BYTES_MAX)
        else:
            method = "sigv4"
            also = "" if marker_key is None or findings.method is GrantMethod.B2 else require_key(marker_key)
            fields, expires = self.grants.credential(
                findings.method, prefix, expires=expires, checksums=findings.checksums, also=also
            )
            one = {**fields, "key_prefix": self.place.prefix + folder_of(also)} if also else None
        return UploadGrant(
            method=method, prefix=prefix, expires=expires, size_max=size_max, fields=fields, liveness_marker=one
        )

    def revoke_upload(self, prefix: str) -> None:
        if self._findings is not None and not self._findings.refusal:
            self.grants.revoke(self._findings.method, prefix)


def open_bucket(place: S3Place) -> S3Store:
    """Open the store, probed if it answers; one that is away now is probed before its first grant.

    Raises:
        StoreError: it answers, and cannot be used as it is configured.
    """
    store = S3Store(place)
    with suppress(StoreUnavailable):
        store.findings()
    return store
