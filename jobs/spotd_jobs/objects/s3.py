"""An object store in a bucket: AWS, and everything that speaks its protocol, by `endpoint_url`.

boto3 is imported when a store is opened, so that a user without a bucket neither waits for it nor needs it.

Theory. Stores differ in what they enforce, and a store that ignores what a grant states would let any host write
anywhere. What this one does is found out by a probe (`probe.py`) and never assumed: until the probe has seen every
forgery refused, `grant_upload` gives nothing. Grants are POST policies where the store has them (one signature that
permits objects of limited size below one prefix until an instant, with no power to read, list or delete), else
temporary credentials that may only put below the prefix (`s3_grants.py`).

Retries are few and bounded, so that a store that is away is reported soon. Nothing here logs, and no error quotes a
URL, a form or a key of the account.
"""

from __future__ import annotations

import base64
import re
import shutil
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import replace
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final
from urllib.parse import unquote_plus

from spotd_jobs.objects.api import (
    Advice,
    Conflict,
    GrantsRefused,
    ObjectInfo,
    ObjectMissing,
    ObjectTooLarge,
    StoreError,
    StoreUnavailable,
    UploadGrant,
)
from spotd_jobs.objects.folder import TEMPORARY_PREFIX, checked_key, listed_key
from spotd_jobs.objects.s3_advice import advice
from spotd_jobs.objects.s3_client import S3Place, s3_client, s3_keys
from spotd_jobs.objects.s3_errors import GONE, Busy, Empty, translated
from spotd_jobs.objects.s3_grants import GrantMethod, S3Grants, folder_of
from spotd_jobs.objects.s3_signing import Signer
from spotd_jobs.wire.fields import MARKER_BYTES_MAX

if TYPE_CHECKING:
    from spotd_jobs.objects.probe import Findings

URL_LIFE_MAX_S: Final = 7 * 86400
"""A presigned URL cannot live longer, whatever it states."""
DELETED_PER_CALL: Final = 1000
CREATE_TRIES: Final = 5
PART_BYTES_MAX: Final = 5 * 1024**3
VERSIONS_MAX: Final = 200_000
"""Of one prefix: how many there are was an untrusted host's choice."""
_KEY_MAX: Final = 1024
_WRITER: Final = "spotd-writer"
_XML_CARRIES: Final = re.compile("[\t\n\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]*").fullmatch
"""Any other character makes the whole document unreadable; a carriage return would come out as a line feed."""


class S3Store:
    """An `ObjectStore` below one prefix of a bucket.

    Args:
        clock: what dates every form, URL and credential that is signed here.
        findings: what a probe of this very place found; without them it is probed before the first grant.
    """

    def __init__(
        self,
        place: S3Place,
        *,
        clock: Callable[[], datetime] = lambda: datetime.now(UTC),
        findings: Findings | None = None,
    ) -> None:
        self.place = place
        self._clock = clock
        self._client = s3_client(place, place.access_key, place.secret_key)
        own, where = s3_keys(place, place.access_key, place.secret_key), self._client.meta
        self._reader = Signer(place=place, endpoint=where.endpoint_url, region=where.region_name, keys=own, clock=clock)
        signer = replace(self._reader, keys=s3_keys(place, *place.signing_keys))
        self._grants = S3Grants(place, signer, clock, self._translated)
        self._findings = findings
        self._versioned: bool | None = None
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
        from spotd_jobs.objects.probe import probe

        with self._probing:
            if self._findings is None:
                self._findings = probe(self)
            return self._findings

    def put(self, key: str, data: bytes, *, create_only: bool = False) -> ObjectInfo:
        """All or nothing, durable when it returns.

        Raises:
            Conflict: `create_only` and the object exists.
        """
        full = self._full(key)
        if create_only:
            return self._create(key, full, data)
        with self._translated(key):
            answer = self._client.put_object(Bucket=self.place.bucket, Key=full, Body=data)
        return _info(key, len(data), answer)

    def put_file(self, key: str, path: Path) -> ObjectInfo:
        """Store a copy of the file as it was read; durable when it returns.

        Raises:
            StoreError: the file cannot be read.
        """
        full = self._full(key)
        try:
            source = path.open("rb")
        except OSError as exc:
            raise StoreError(f"{path} cannot be read: {exc.strerror}") from exc
        with source, self._translated(key):
            self._client.upload_fileobj(source, self.place.bucket, full)
        found = self.head(key)
        if found is None:
            raise StoreError(f"the object {key} is not in {self.place} although it was just stored")
        return found

    def get(self, key: str, *, bytes_max: int, version: str | None = None) -> bytes:
        """Return the object, refused when larger than `bytes_max`, of which no more than that is asked for.

        Raises:
            ObjectMissing, StoreError
        """
        try:
            with self._opened(key, version, f"bytes=0-{bytes_max}") as (body, _):
                data = body.read(bytes_max + 1)
        except Empty:
            return b""
        if len(data) > bytes_max:
            raise ObjectTooLarge(f"the object {key} is larger than the {bytes_max} bytes that are accepted here")
        return data

    def get_file(self, key: str, path: Path) -> None:
        """Write the object's bytes to `path`, all or not at all.

        Raises:
            ObjectMissing, StoreError
        """
        spooled = path.with_name(f"{TEMPORARY_PREFIX}{uuid.uuid4().hex}")
        with self._opened(key) as (body, size):
            try:
                with spooled.open("xb") as file:
                    shutil.copyfileobj(body, file, 1 << 20)
                if spooled.stat().st_size != size:
                    raise StoreUnavailable(f"the object {key} was cut short on its way from {self.place}")
                spooled.replace(path)
            except OSError as exc:
                raise StoreError(f"{path} cannot be written: {exc.strerror}") from exc
            finally:
                spooled.unlink(missing_ok=True)

    def head(self, key: str) -> ObjectInfo | None:
        """Return what is known of the object, or `None` if there is none."""
        return self._head(key, checksums=self._findings is not None and self._findings.checksums)

    def stored_sha256(self, key: str) -> str | None:
        """Return the object's content hash as the store states it, for the probe to judge."""
        found = self._head(key, checksums=True)
        return found.sha256 if found is not None else None

    def keys_as_listed(self, prefix: str) -> Iterator[str]:
        """Return the keys in the order in which the store gives them, for the probe to judge."""
        return (info.key for info in self._listed(prefix))

    def _head(self, key: str, *, checksums: bool) -> ObjectInfo | None:
        full = self._full(key)
        try:
            with self._translated(key):
                if checksums:
                    answer = self._client.head_object(Bucket=self.place.bucket, Key=full, ChecksumMode="ENABLED")
                else:
                    answer = self._client.head_object(Bucket=self.place.bucket, Key=full)
        except ObjectMissing:
            return None
        return ObjectInfo(
            key=key,
            size=answer["ContentLength"],
            etag=answer["ETag"].strip('"'),
            modified=answer["LastModified"].astimezone(UTC),
            sha256=_hex(answer.get("ChecksumSHA256")),
        )

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """Every object whose key begins with the prefix, in key order (by bytes)."""
        folder = prefix.rpartition("/")[0]
        if folder:
            checked_key(folder)
        found = self._listed(prefix)
        if self._findings is not None and self._findings.ordered:
            return found
        return iter(sorted(found, key=lambda info: info.key.encode()))

    def list_after(self, prefix: str, after: str, *, page: int = DELETED_PER_CALL) -> Iterator[ObjectInfo]:
        """Every object below the prefix whose key is greater than `after`, in key order (by bytes)."""
        if self._findings is not None and self._findings.ordered:
            return self._listed(prefix, after=after, page=page)
        return (info for info in self.list(prefix) if info.key.encode() > after.encode())

    def stored(self, prefix: str) -> Iterator[ObjectInfo]:
        """Everything below the prefix that takes up space: every version of an object, parts of unfinished uploads."""
        yield from self._versions(prefix) if self._keeps_versions() else self._listed(prefix, folders=True)
        yield from self._parts(prefix)

    def _versions(self, prefix: str) -> Iterator[ObjectInfo]:
        head = self.place.prefix
        with self._translated(prefix):
            pages = self._client.get_paginator("list_object_versions")
            for page in pages.paginate(Bucket=self.place.bucket, Prefix=head + prefix):
                for item in page.get("Versions", ()):
                    yield _listed_info(item, item["Key"].removeprefix(head))

    def _parts(self, prefix: str) -> Iterator[ObjectInfo]:
        """List parts of uploads that were never completed; none where the store has no such uploads."""
        head = self.place.prefix
        try:
            with self._translated(prefix):
                pages = self._client.get_paginator("list_multipart_uploads")
                for page in pages.paginate(Bucket=self.place.bucket, Prefix=head + prefix, EncodingType="url"):
                    for upload in page.get("Uploads", ()):
                        yield from self._parts_of(unquote_plus(upload["Key"]), upload["UploadId"])
        except StoreUnavailable:
            raise
        except StoreError:
            return  # it does not know this question, or the key may not ask it

    def _parts_of(self, full: str, upload: str) -> Iterator[ObjectInfo]:
        key = full.removeprefix(self.place.prefix)
        try:
            with self._translated(key):
                pages = self._client.get_paginator("list_parts")
                for page in pages.paginate(Bucket=self.place.bucket, Key=full, UploadId=upload):
                    for item in page.get("Parts", ()):
                        yield _listed_info(item, key)
        except ObjectMissing:
            return  # it was completed or given up
        except StoreUnavailable:
            raise
        except StoreError:
            # No honest writer uses a name that the answer cannot hold, so it counts as much as one part may be.
            yield ObjectInfo(key=key, size=PART_BYTES_MAX, etag="", modified=self.now())

    def delete(self, keys: Sequence[str]) -> None:
        """Delete the objects; absent ones do not matter."""
        every = [self._full(key) for key in keys]
        easy = [full for full in every if _XML_CARRIES(full)]
        for start in range(0, len(easy), DELETED_PER_CALL):
            some = easy[start : start + DELETED_PER_CALL]
            with self._translated(keys[start]):
                answer = self._client.delete_objects(
                    Bucket=self.place.bucket, Delete={"Objects": [{"Key": key} for key in some], "Quiet": True}
                )
            failed = [error for error in answer.get("Errors", ()) if error.get("Code") not in GONE]
            if failed:
                raise StoreError(f"{len(failed)} objects cannot be deleted from {self.place}: {failed[0].get('Code')}")
        for key in (key for key in keys if not _XML_CARRIES(key)):
            self.delete_listed(key)

    def delete_listed(self, key: str) -> None:
        """Delete the object, also under a name that no key can have: a host may write any below its prefix.

        A list of keys is sent as XML, which cannot hold every character; an address can.
        """
        full = self.place.prefix + listed_key(key)
        with suppress(ObjectMissing), self._translated(key):
            self._client.delete_object(Bucket=self.place.bucket, Key=full)

    def first_versions(self, prefix: str) -> dict[str, str]:
        """Return the first version of each object below the prefix; empty where the store keeps no versions."""
        head, first = self.place.prefix, {}
        if not self._keeps_versions():
            return {}
        with self._translated(prefix):
            pages = self._client.get_paginator("list_object_versions")
            for page in pages.paginate(Bucket=self.place.bucket, Prefix=head + prefix):
                for item in page.get("Versions", ()):
                    first[item["Key"].removeprefix(head)] = item["VersionId"]  # the newest of a key comes first
                if len(first) > VERSIONS_MAX:
                    break
        return first

    def _keeps_versions(self) -> bool:
        """Whether an overwritten object can still be read; a store that does not answer is taken to keep none."""
        if self._versioned is None:
            try:
                with self._translated(""):
                    answer = self._client.get_bucket_versioning(Bucket=self.place.bucket)
                self._versioned = answer.get("Status") == "Enabled"
            except StoreUnavailable:
                raise
            except StoreError:
                self._versioned = False
        return self._versioned

    def presign_get(self, key: str, *, expires: datetime, version: str | None = None) -> str:
        """Return a URL that reads exactly this object until then, without any other credential."""
        full = self._full(key)
        left = int((expires - self.now()).total_seconds())
        seconds = min(URL_LIFE_MAX_S, max(1, left))
        with self._translated(key):
            return self._reader.url(full, seconds=seconds, version=version)

    def grant_upload(
        self, prefix: str, *, expires: datetime, size_max: int, marker_key: str | None = None
    ) -> UploadGrant:
        """Permit to write objects of at most `size_max` bytes below `prefix`, which ends in `/`, and nothing else.

        Raises:
            GrantsRefused: the store would not enforce it.
        """
        if not prefix.endswith("/"):
            raise StoreError(f"the prefix of a grant must end in '/', not {prefix[:100]!r}")
        checked_key(prefix[:-1])
        findings = self.findings()
        if findings.refusal:
            raise GrantsRefused(f"{self.place} gets no grants: {findings.refusal}")
        checksums = findings.checksums
        if findings.method is GrantMethod.FORM:
            fields = self.form(prefix, expires=expires, size_max=size_max, checksums=checksums)
            one = (
                None
                if marker_key is None
                else self.form_of(checked_key(marker_key), expires=expires, size_max=MARKER_BYTES_MAX)
            )
            return UploadGrant(
                method="post", prefix=prefix, expires=expires, size_max=size_max, fields=fields, liveness_marker=one
            )
        also = "" if marker_key is None or findings.method is GrantMethod.B2 else checked_key(marker_key)
        fields, until = self.credential(findings.method, prefix, expires=expires, checksums=checksums, also=also)
        one = {**fields, "key_prefix": self.place.prefix + folder_of(also)} if also else None
        return UploadGrant(
            method="sigv4", prefix=prefix, expires=until, size_max=size_max, fields=fields, liveness_marker=one
        )

    def advice(self) -> Sequence[Advice]:
        """Return what of the bucket's own settings costs money or checkpoints, as far as the key may read them."""
        return advice(self._client, self.place)

    def revoke_upload(self, prefix: str) -> None:
        """Revoke what can be revoked of the permission to write below `prefix`; the rest expires.

        Raises:
            StoreError: it could not be taken back now.
        """
        if self._findings is not None and not self._findings.refusal:
            self._grants.revoke(self._findings.method, prefix)

    def form(self, prefix: str, *, expires: datetime, size_max: int, checksums: bool) -> dict[str, Any]:
        """Return a signed POST policy, as `UploadGrant.fields`; the probe decides whether the store heeds it."""
        return self._grants.form(prefix, expires=expires, size_max=size_max, checksums=checksums)

    def form_of(self, key: str, *, expires: datetime, size_max: int) -> dict[str, Any]:
        """Return the same for exactly one object."""
        return self._grants.form_of(key, expires=expires, size_max=size_max)

    def credential(
        self, method: GrantMethod, prefix: str, *, expires: datetime, checksums: bool, also: str = ""
    ) -> tuple[dict[str, Any], datetime]:
        """Return a temporary credential, as `UploadGrant.fields`, and its end; the probe decides whether it is limited.

        Args:
            also: one object outside the prefix that may be put, too.

        Raises:
            StoreError
        """
        return self._grants.credential(method, prefix, expires=expires, checksums=checksums, also=also)

    def now(self) -> datetime:
        """Return the present instant by the clock that dates what is signed here."""
        return self._clock()

    def _full(self, key: str) -> str:
        full = self.place.prefix + checked_key(key)
        if len(full.encode()) > _KEY_MAX:
            raise StoreError(f"the object key {key[:100]!r} is longer than {_KEY_MAX} bytes with the store's prefix")
        return full

    def _create(self, key: str, full: str, data: bytes) -> ObjectInfo:
        """Raise Conflict unless this very call made the object, also where its first answer was lost."""
        writer = uuid.uuid4().hex
        for _ in range(CREATE_TRIES):
            try:
                with self._translated(key):
                    answer = self._client.put_object(
                        Bucket=self.place.bucket, Key=full, Body=data, IfNoneMatch="*", Metadata={_WRITER: writer}
                    )
                return _info(key, len(data), answer)
            except Busy:
                continue
            except Conflict:
                # A retry loses against its own first try, whose answer did not come through.
                with self._translated(key):
                    stored = self._client.head_object(Bucket=self.place.bucket, Key=full)
                if stored["Metadata"].get(_WRITER) != writer:
                    raise
                found = self.head(key)
                if found is not None:
                    return found
        raise StoreUnavailable(f"others are creating the object {key} in {self.place}; try again")

    def _listed(
        self, prefix: str, *, after: str | None = None, page: int = DELETED_PER_CALL, folders: bool = False
    ) -> Iterator[ObjectInfo]:
        head = self.place.prefix
        more: dict[str, Any] = {} if after is None else {"StartAfter": head + after}
        with self._translated(prefix):
            pages = self._client.get_paginator("list_objects_v2")
            found = pages.paginate(
                Bucket=self.place.bucket, Prefix=head + prefix, PaginationConfig={"PageSize": page}, **more
            )
            for one in found:
                for item in one.get("Contents", ()):
                    key = item["Key"].removeprefix(head)
                    if key.endswith("/") and not folders and not item["Size"]:
                        continue  # a folder, as some stores show it
                    yield _listed_info(item, key)

    @contextmanager
    def _opened(
        self, key: str, version: str | None = None, asked: str | None = None
    ) -> Iterator[tuple[IO[bytes], int]]:
        more = {name: value for name, value in (("VersionId", version), ("Range", asked)) if value is not None}
        full = self._full(key)
        with self._translated(key):
            answer: Any = self._client.get_object(Bucket=self.place.bucket, Key=full, **more)  # type: ignore[arg-type]  # the stubs know these two only by name
            body: Any = answer["Body"]
            try:
                yield body, answer["ContentLength"]
            finally:
                body.close()

    def _translated(self, key: str) -> AbstractContextManager[None]:
        return translated(self.place, key)


def open_bucket(place: S3Place) -> S3Store:
    """Open the store, probed if it answers; one that is away now is probed before its first grant.

    Raises:
        StoreError: it answers, and cannot be used as it is configured.
    """
    store = S3Store(place)
    with suppress(StoreUnavailable):
        store.findings()
    return store


def _listed_info(item: Any, key: str) -> ObjectInfo:
    """One row of a listing of objects, versions or parts."""
    return ObjectInfo(
        key=key, size=item["Size"], etag=item["ETag"].strip('"'), modified=item["LastModified"].astimezone(UTC)
    )


def _info(key: str, size: int, answer: Any) -> ObjectInfo:
    date = answer["ResponseMetadata"]["HTTPHeaders"].get("date")
    modified = parsedate_to_datetime(date).astimezone(UTC) if date else datetime.now(UTC)
    return ObjectInfo(key=key, size=size, etag=answer["ETag"].strip('"'), modified=modified)


def _hex(checksum: str | None) -> str | None:
    """Return the SHA-256 of the whole object as hex; `None` for the checksum of a multipart upload's parts."""
    if checksum is None or "-" in checksum:
        return None
    try:
        return base64.b64decode(checksum, validate=True).hex()
    except ValueError:
        return None
