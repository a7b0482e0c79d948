"""Objects in a bucket: AWS, and everything that speaks its protocol, by `endpoint_url`.

Nothing is assumed of what the store enforces: the probe of `s3.py` finds it out by what is here.

Retries are few and bounded, so that a store that is away is reported soon. Nothing here logs, and no error quotes a
URL, a form or a key of the account.
"""

from __future__ import annotations

import base64
import re
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import replace
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import IO, Any, Final
from urllib.parse import unquote_plus

from spotd_jobs.objects import api, s3_client
from spotd_jobs.objects.s3_grants import S3Grants, Signer
from spotd_jobs.wire.grant import KEY_BYTES_MAX

URL_LIFE_MAX_S: Final = 7 * 86400
"""A presigned URL cannot live longer, whatever it states."""
PAGE: Final = 1000
"""Objects in one answer of a listing, and in one call that deletes."""
CREATE_TRIES: Final = 5
PART_BYTES_MAX: Final = 5 * 1024**3
VERSIONS_MAX: Final = 200_000
"""Of one prefix: how many there are was an untrusted host's choice."""
_WRITER: Final = "spotd-writer"
_XML_CARRIES: Final = re.compile("[\t\n\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]*").fullmatch
"""Any other character makes the whole document unreadable; a carriage return would come out as a line feed."""


class S3Bucket:
    """Objects below one prefix of a bucket, and grants for hosts, as far as the store can be used without a probe.

    Args:
        clock: what dates every form, URL and credential that is signed here.
    """

    def __init__(self, place: s3_client.S3Place, *, clock: Callable[[], datetime] = lambda: datetime.now(UTC)) -> None:
        self.place = place
        self.now = clock
        self._client = s3_client.s3_client(place, place.access_key, place.secret_key)
        own, where = s3_client.s3_keys(place, place.access_key, place.secret_key), self._client.meta
        self._reader = Signer(place=place, endpoint=where.endpoint_url, region=where.region_name, keys=own, clock=clock)
        signer = replace(self._reader, keys=s3_client.s3_keys(place, *place.signing_keys))
        self.grants = S3Grants(place, signer, clock, self._store_errors)
        self._versioned: bool | None = None
        self.date_shown: Callable[[datetime], None] = lambda _: None
        # Also of a refusal, as of a signature whose date is wrong.
        self._client.meta.events.register("after-call.s3", self._note_date)

    def _note_date(self, http_response: Any, **_: Any) -> None:
        with suppress(TypeError, ValueError):
            self.date_shown(parsedate_to_datetime(http_response.headers.get("date")))

    def put(self, key: str, data: bytes, *, create_only: bool = False) -> api.ObjectInfo:
        full = self._full(key)
        if create_only:
            return self._create(key, full, data)
        with self._store_errors(key):
            answer = self._client.put_object(Bucket=self.place.bucket, Key=full, Body=data)
        return _info(key, len(data), answer)

    def put_file(self, key: str, path: Path) -> api.ObjectInfo:
        full = self._full(key)
        with api.source_file(path) as source, self._store_errors(key):
            self._client.upload_fileobj(source, self.place.bucket, full)
        found = self.info_of(key, checksums=False)
        if found is None:
            raise api.StoreError(f"the object {key} is not in {self.place} although it was just stored")
        return found

    def get(self, key: str, *, bytes_max: int, version: str | None = None) -> bytes:
        try:
            with self._open(key, version, f"bytes=0-{bytes_max}") as body:
                data = body.read(bytes_max + 1)
        except s3_client.Empty:
            return b""
        if len(data) > bytes_max:
            raise api.ObjectTooLarge(f"the object {key} is larger than the {bytes_max} bytes that are accepted here")
        return data

    def info_of(self, key: str, *, checksums: bool) -> api.ObjectInfo | None:
        """Return what is known of the object, its content hash only if `checksums` asks for it."""
        full = self._full(key)
        try:
            with self._store_errors(key):
                if checksums:
                    answer = self._client.head_object(Bucket=self.place.bucket, Key=full, ChecksumMode="ENABLED")
                else:
                    answer = self._client.head_object(Bucket=self.place.bucket, Key=full)
        except api.ObjectMissing:
            return None
        return api.ObjectInfo(
            key=key,
            size=answer["ContentLength"],
            etag=answer["ETag"].strip('"'),
            modified=answer["LastModified"].astimezone(UTC),
            sha256=_hex(answer.get("ChecksumSHA256")),
        )

    def objects_below(
        self, prefix: str, *, after: str | None = None, page: int = PAGE, folders: bool = False
    ) -> Iterator[api.ObjectInfo]:
        """List the objects below the prefix in the order in which the store gives them.

        Args:
            folders: objects that some stores show for a folder, too.
        """
        head = self.place.prefix
        more: dict[str, Any] = {} if after is None else {"StartAfter": head + after}
        for item in self._items(
            "list_objects_v2", prefix, "Contents", Prefix=head + prefix, PaginationConfig={"PageSize": page}, **more
        ):
            key = item["Key"].removeprefix(head)
            if folders or item["Size"] or not key.endswith("/"):
                yield _listed_info(item, key)

    def stored(self, prefix: str) -> Iterator[api.ObjectInfo]:
        if self._keeps_versions():
            for item in self._versions(prefix):
                yield _listed_info(item, item["Key"].removeprefix(self.place.prefix))
        else:
            yield from self.objects_below(prefix, folders=True)
        yield from self._parts(prefix)

    def first_versions(self, prefix: str) -> dict[str, str]:
        first: dict[str, str] = {}
        if self._keeps_versions():
            for item in self._versions(prefix):
                first[item["Key"].removeprefix(self.place.prefix)] = item[
                    "VersionId"
                ]  # the newest of a key comes first
                if len(first) > VERSIONS_MAX:
                    break
        return first

    def _versions(self, prefix: str) -> Iterator[Any]:
        return self._items("list_object_versions", prefix, "Versions", Prefix=self.place.prefix + prefix)

    def _parts(self, prefix: str) -> Iterator[api.ObjectInfo]:
        """List parts of uploads that were never completed; none where the store has no such uploads."""
        full = self.place.prefix + prefix
        try:
            for upload in self._items("list_multipart_uploads", prefix, "Uploads", Prefix=full, EncodingType="url"):
                yield from self._parts_of(unquote_plus(upload["Key"]), upload["UploadId"])
        except api.StoreUnavailable:
            raise
        except api.StoreError:
            return  # it does not know this question, or the key may not ask it

    def _parts_of(self, full: str, upload: str) -> Iterator[api.ObjectInfo]:
        key = full.removeprefix(self.place.prefix)
        try:
            for item in self._items("list_parts", key, "Parts", Key=full, UploadId=upload):
                yield _listed_info(item, key)
        except api.ObjectMissing:
            return  # it was completed or given up
        except api.StoreUnavailable:
            raise
        except api.StoreError:
            # No honest writer uses a name that the answer cannot hold, so it counts as much as one part may be.
            yield api.ObjectInfo(key=key, size=PART_BYTES_MAX, etag="", modified=self.now())

    def _items(self, operation: Any, key: str, kind: str, **asked: Any) -> Iterator[Any]:
        """Every item of a kind that all pages of an answer hold."""
        with self._store_errors(key):
            for page in self._client.get_paginator(operation).paginate(Bucket=self.place.bucket, **asked):
                yield from page.get(kind, ())

    def delete(self, keys: Sequence[str]) -> None:
        every = [self._full(key) for key in keys]
        easy = [full for full in every if _XML_CARRIES(full)]
        for start in range(0, len(easy), PAGE):
            some = easy[start : start + PAGE]
            with self._store_errors(keys[start]):
                answer = self._client.delete_objects(
                    Bucket=self.place.bucket, Delete={"Objects": [{"Key": key} for key in some], "Quiet": True}
                )
            failed = [error for error in answer.get("Errors", ()) if error.get("Code") not in s3_client.GONE]
            if failed:
                raise api.StoreError(
                    f"{len(failed)} objects cannot be deleted from {self.place}: {failed[0].get('Code')}"
                )
        for key in (key for key in keys if not _XML_CARRIES(key)):
            self.delete_listed(key)

    def delete_listed(self, key: str) -> None:
        # A list of keys is sent as XML, which cannot hold every character; an address can.
        full = self.place.prefix + api.require_listed_key(key)
        with suppress(api.ObjectMissing), self._store_errors(key):
            self._client.delete_object(Bucket=self.place.bucket, Key=full)

    def presign_get(self, key: str, *, expires: datetime, version: str | None = None) -> str:
        full = self._full(key)
        left = int((expires - self.now()).total_seconds())
        seconds = min(URL_LIFE_MAX_S, max(1, left))
        with self._store_errors(key):
            return self._reader.url(full, seconds=seconds, version=version)

    def advice(self) -> Sequence[api.Advice]:
        return s3_client.advice(self._client, self.place)

    def _keeps_versions(self) -> bool:
        if self._versioned is None:
            self._versioned = s3_client.keeps_versions(self._client, self.place)
        return self._versioned

    def _full(self, key: str) -> str:
        full = self.place.prefix + api.require_key(key)
        if len(full.encode()) > KEY_BYTES_MAX:
            raise api.StoreError(
                f"the object key {key[:100]!r} is longer than {KEY_BYTES_MAX} bytes with the store's prefix"
            )
        return full

    def _create(self, key: str, full: str, data: bytes) -> api.ObjectInfo:
        """Raise Conflict unless this very call made the object, also where its first answer was lost."""
        writer = uuid.uuid4().hex
        for _ in range(CREATE_TRIES):
            try:
                with self._store_errors(key):
                    answer = self._client.put_object(
                        Bucket=self.place.bucket, Key=full, Body=data, IfNoneMatch="*", Metadata={_WRITER: writer}
                    )
                return _info(key, len(data), answer)
            except s3_client.Busy:
                continue
            except api.Conflict:
                # A retry loses against its own first try, whose answer did not come through.
                with self._store_errors(key):
                    stored = self._client.head_object(Bucket=self.place.bucket, Key=full)
                if stored["Metadata"].get(_WRITER) != writer:
                    raise
                found = self.info_of(key, checksums=False)
                if found is not None:
                    return found
        raise api.StoreUnavailable(f"others are creating the object {key} in {self.place}; try again")

    @contextmanager
    def _open(self, key: str, version: str | None, asked: str) -> Iterator[IO[bytes]]:
        more = {"Range": asked} if version is None else {"Range": asked, "VersionId": version}
        full = self._full(key)
        with self._store_errors(key):
            answer: Any = self._client.get_object(Bucket=self.place.bucket, Key=full, **more)  # type: ignore[arg-type]  # the stubs know these two only by name
            body: Any = answer["Body"]
            try:
                yield body
            finally:
                body.close()

    def _store_errors(self, key: str) -> AbstractContextManager[None]:
        return s3_client.store_errors(self.place, key)


def _listed_info(item: Any, key: str) -> api.ObjectInfo:
    """One row of a listing of objects, versions or parts."""
    return api.ObjectInfo(
        key=key, size=item["Size"], etag=item["ETag"].strip('"'), modified=item["LastModified"].astimezone(UTC)
    )


def _info(key: str, size: int, answer: Any) -> api.ObjectInfo:
    date = answer["ResponseMetadata"]["HTTPHeaders"].get("date")
    modified = parsedate_to_datetime(date).astimezone(UTC) if date else datetime.now(UTC)
    return api.ObjectInfo(key=key, size=size, etag=answer["ETag"].strip('"'), modified=modified)


def _hex(checksum: str | None) -> str | None:
    """Return the SHA-256 of the whole object as hex; `None` for the checksum of a multipart upload's parts."""
    if checksum is None or "-" in checksum:
        return None
    try:
        return base64.b64decode(checksum, validate=True).hex()
    except ValueError:
        return None
