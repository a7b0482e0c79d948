"""Data of jobs that stays where it is: listed once by this computer, read by hosts at URLs that expire.

No store key and no token is on a host. Nothing is copied but small files of private repositories, which a hub signs
no URL for; so the only traffic that is paid for is what each machine reads.
"""

from __future__ import annotations

import ipaddress
import re
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Final
from urllib.parse import urljoin, urlsplit

from spotd.daemon.hub import Hub, HubPlace, SourceAway, SourceRefused, repository_of, stored_files
from spotd_jobs.objects.api import StoreError, StoreUnavailable
from spotd_jobs.objects.s3_client import S3Place
from spotd_jobs.spec.model import DataSource
from spotd_jobs.wire.client import web
from spotd_jobs.wire.client.dataset import BYTES_MAX, ETAG, FILES_MAX, STORED, ListedFile, listing_text, read_listing
from spotd_jobs.wire.client.sinks import Unreadable

if TYPE_CHECKING:
    from spotd_jobs.objects.s3_bucket import S3Bucket

HUB_URL: Final = "https://huggingface.co"


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketPlace:
    """A bucket that data is read from.

    Attributes:
        place: `None` where its key is not known; `error` then says why.
        egress: micro-dollars for each GB that is read there.
        near: the AWS region, "?" where it is not known, empty where it is not AWS's.
    """

    name: str
    bucket: str
    prefix: str
    place: S3Place | None
    error: str = ""
    egress: int = 0
    near: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RemotePlaces:
    """Where data may lie, as the config says it now."""

    buckets: tuple[BucketPlace, ...] = ()
    hub: HubPlace = field(default_factory=lambda: HubPlace(url=HUB_URL))


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteListing:
    """What a source holds now."""

    files: tuple[ListedFile, ...]
    revision: str | None = None
    egress: int = 0
    near: str = ""
    by_token: bool = False

    @property
    def bytes(self) -> int:
        return sum(one.size for one in self.files)


class RemoteData:
    """The sources of data beside the store. Synchronous: called from worker threads."""

    def __init__(self, places: Callable[[], RemotePlaces] = RemotePlaces) -> None:
        self._places = places
        self._lock = threading.Lock()
        self._opened: dict[S3Place, S3Bucket] = {}

    def listing(self, one: DataSource, keep: Callable[[str, bytes], None] | None) -> RemoteListing:
        """Return what the source holds now.

        Args:
            keep: stores a file that hosts read from the store, by its SHA-256; `None`: nothing is to be stored yet.

        Raises:
            SourceRefused, SourceAway
        """
        found = self._of_bucket(one) if one.source.startswith("s3://") else self._of_hub(one, keep)
        try:
            read_listing(listing_text(found.files))
        except Unreadable as exc:
            raise SourceRefused(f"cannot be brought to a machine: {exc}") from exc
        return found

    def urls(self, one: DataSource, files: Sequence[ListedFile], expires: datetime) -> Mapping[int, str]:
        """Return where a host reads each file that the store does not have, by its number.

        Raises:
            SourceRefused, SourceAway
            StoreError: of a bucket.
        """
        wanted = {number: file for number, file in enumerate(files) if file.kind != STORED and file.size}
        try:
            if one.source.startswith("s3://"):
                bucket, prefix = self._bucket_of(one.source)
                return {n: bucket.presign_get(prefix + file.path, expires=expires) for n, file in wanted.items()}
            hub, repository = Hub(self._places().hub), repository_of(one.source, one.revision)
            url_of = hub.signed_url if one.by_token else hub.public_url
            return {number: url_of(repository, file.path) for number, file in wanted.items()}
        finally:
            web.drop_connections()

    def _of_bucket(self, one: DataSource) -> RemoteListing:
        bucket, prefix = self._bucket_of(one.source)
        place = self._place_of(one.source)
        files: list[ListedFile] = []
        total = 0
        try:
            for info in bucket.objects_below(prefix):
                total += info.size
                files.append(ListedFile(info.key.removeprefix(prefix), info.size, ETAG, info.etag))
                if len(files) > FILES_MAX or total > BYTES_MAX:
                    hint = "pack them into archives, or name a smaller part of the bucket"
                    raise SourceRefused(
                        f"holds more than {FILES_MAX:,} objects, or more bytes than a dataset", hint=hint
                    )
        except StoreUnavailable as exc:
            raise SourceAway(str(exc)) from exc
        except StoreError as exc:
            hint = f"its key needs to list and read the place: [buckets.{place.name}] in the config"
            raise SourceRefused(f"cannot be listed: {exc}", hint=hint) from exc
        if not files:
            raise SourceRefused(
                "holds no object", hint="it stands for all that is below it and a /; check its spelling"
            )
        files.sort(key=lambda file: file.path.split("/"))
        return RemoteListing(files=tuple(files), egress=place.egress, near=place.near)

    def _of_hub(self, one: DataSource, keep: Callable[[str, bytes], None] | None) -> RemoteListing:
        hub = Hub(self._places().hub)
        repository = repository_of(one.source, one.revision)
        found = hub.snapshot(repository)
        files = found.files
        if found.is_private and keep is not None:
            at = repository_of(one.source, found.commit)
            files = stored_files(found, lambda file: hub.small_file(at, file), keep)
        return RemoteListing(files=files, revision=found.commit, by_token=found.is_private)

    def _place_of(self, source: str) -> BucketPlace:
        """Return the configured place that holds the source: the narrowest.

        Raises:
            SourceRefused
        """
        bucket, _, path = source.removeprefix("s3://").partition("/")
        wanted = path.rstrip("/") + "/"
        found = [one for one in self._places().buckets if one.bucket == bucket and wanted.startswith(one.prefix)]
        if not found:
            hint = f'write [buckets.NAME] with url = "s3://{bucket}" in the config and restart spotd'
            raise SourceRefused("is in no bucket that the config names", hint=hint)
        return max(found, key=lambda one: len(one.prefix))

    def _bucket_of(self, source: str) -> tuple[S3Bucket, str]:
        """Return the bucket, opened, and the prefix of the source's objects in it.

        Raises:
            SourceRefused
        """
        found = self._place_of(source)
        if found.place is None:
            raise SourceRefused(f"cannot be read: {found.error}", hint=f"mend [buckets.{found.name}] in the config")
        with self._lock:
            opened = self._opened.get(found.place)
            if opened is None:
                from spotd_jobs.objects.s3_bucket import S3Bucket  # for jobs whose data lies in a bucket

                try:
                    opened = self._opened[found.place] = S3Bucket(found.place)
                except StoreError as exc:
                    raise SourceRefused(f"cannot be read: {exc}") from exc
        path = source.removeprefix("s3://").partition("/")[2].rstrip("/")
        whole = f"{path}/" if path else ""
        return opened, whole.removeprefix(found.prefix)


# How large a file is that a URL of a job's data serves, as a plan and a price need it before any machine reads it.
#
# The URL is chosen by a client of the API, which may be an agent. So nothing but a public address is asked, also
# behind a redirect, and of the answer only the size is used.


TIMEOUT_S: Final = 8.0
"""Of one answer."""
REDIRECTS_MAX: Final = 5
STORE_HINT: Final = "fetch it once and store it: spotctl data put NAME DIR, then the name as source"
_RANGE: Final = re.compile(r"bytes 0-0/(\d{1,19})")


class UrlRefused(Exception):
    """A URL that machines cannot read data from. The text goes on after the URL; `hint` is a way out."""

    def __init__(self, message: str, *, hint: str = STORE_HINT) -> None:
        super().__init__(message)
        self.hint = hint


def require_public(url: str) -> None:
    """Require that every address of the URL's host is one that any computer reaches, and that its answers are sealed.

    Raises:
        UrlRefused
    """
    parts = urlsplit(url)
    if parts.scheme != "https" or not parts.hostname:
        raise UrlRefused("redirects to another protocol than https")
    try:
        found = socket.getaddrinfo(parts.hostname, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as exc:
        raise UrlRefused("names a host that cannot be found", hint="check its spelling") from exc
    if not all(ipaddress.ip_address(str(place[0]).partition("%")[0]).is_global for *_, place in found):
        raise UrlRefused("leads to a private address, which rented machines do not reach")


def measure_url(url: str, *, require: Callable[[str], None] = require_public) -> int:
    """Return how many bytes the URL serves, to a client that names no user.

    Args:
        require: raises `UrlRefused` where the URL, or one it redirects to, may not be asked.

    Raises:
        UrlRefused: it serves nothing, not to everybody, or not in parts.
    """
    try:
        for _ in range(REDIRECTS_MAX):
            require(url)
            status, headers, _ = web.request("GET", url, {"Range": "bytes=0-0"}, timeout_s=TIMEOUT_S, foreign=True)
            if status not in {301, 302, 303, 307, 308} or "location" not in headers:
                return _size_in(status, headers)
            url = urljoin(url, headers["location"])
    except web.WebError as exc:
        raise UrlRefused(f"cannot be read now: {exc}", hint="try again, or store it: spotctl data put") from exc
    except ValueError as exc:
        raise UrlRefused("redirects to no URL") from exc
    finally:
        web.drop_connections()
    raise UrlRefused("redirects too often")


def _size_in(status: int, headers: dict[str, str]) -> int:
    if status in {401, 403}:
        raise UrlRefused(f"is not served to everybody (HTTP {status})")
    if status in {404, 410}:
        raise UrlRefused(f"is not there (HTTP {status})", hint="check its spelling")
    if status == 200:
        raise UrlRefused("is not served in parts, so that a download that was cut would begin again")
    found = _RANGE.fullmatch(headers.get("content-range", "")) if status == 206 else None
    if found is None or not int(found[1]):
        raise UrlRefused(f"serves no size (HTTP {status})")
    return int(found[1])
