"""The contract of an object store, as the daemon uses it. Hosts never see this: they get grants.

Keys are `/`-separated relative paths without `.`, `..`, empty parts or control characters. Every method is
synchronous and may block; the daemon calls them through its bounded threads.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import IO, Any, Final, Protocol, runtime_checkable

from spotd_jobs.wire.client.sinks import TEMPORARY, is_plain
from spotd_jobs.wire.grant import KEY_BYTES_MAX, NAME_BYTES_MAX


class StoreError(Exception):
    """The object store failed; the message names the place and the way out, never a key or a signed URL."""


class StoreUnavailable(StoreError):
    """It does not answer or its disk is full; the same call may work later."""


class ObjectMissing(StoreError):
    """There is no object under this key."""


class ObjectTooLarge(StoreError):
    """The object holds more bytes than were asked for at most."""


class Conflict(StoreError):
    """A conditional write lost: the object exists already."""


class GrantsRefused(StoreError):
    """A store that does not limit untrusted writers, so no grant may be given out for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectInfo:
    """What a listing, or a query of one object, shows.

    Attributes:
        size: bytes.
        etag: changes whenever the content changes; not a content hash.
        sha256: lower-case hex, only where the store itself verified it at upload.
        modified: the store's clock.
    """

    key: str
    size: int
    etag: str
    modified: datetime
    sha256: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class UploadGrant:
    """How one attempt may write below one prefix, as JSON for `grant.json`.

    Attributes:
        method: `folder` (a directory path), `post` (an S3 POST policy form) or `sigv4` (a prefix-limited temporary
            credential).
        fields: the method's own data. A secret in the sense that it permits writing below `prefix` until `expires`.
        liveness_marker: the same for the one object that was asked for beside the prefix; its `prefix` is all
            before the name.
    """

    method: str
    prefix: str
    expires: datetime
    size_max: int
    fields: Mapping[str, Any]
    liveness_marker: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """One finding about how a store is set up, and what to do about it."""

    name: str
    detail: str
    ok: bool = True
    hint: str = ""


@runtime_checkable
class ShowsDates(Protocol):
    """A store whose answers state when they were given, by its own clock.

    Attributes:
        date_shown: takes the date of each answer, in any thread.
    """

    date_shown: Callable[[datetime], None]


class ObjectStore(Protocol):
    """A bucket prefix or a folder."""

    @property
    def shared_with_hosts_by(self) -> str:
        """`filesystem` when only hosts that see this computer's files can use its grants, else `network`."""
        ...

    def put(self, key: str, data: bytes, *, create_only: bool = False) -> ObjectInfo:
        """All or nothing, durable when it returns.

        Raises:
            Conflict: `create_only` and the object exists.
        """
        ...

    def put_file(self, key: str, path: Path) -> ObjectInfo: ...

    def get(self, key: str, *, bytes_max: int, version: str | None = None) -> bytes:
        """Return the object, refused when larger than `bytes_max`, of which no more than that is asked for.

        Args:
            version: one of `first_versions`.

        Raises:
            ObjectMissing, ObjectTooLarge, StoreError
        """
        ...

    def head(self, key: str) -> ObjectInfo | None: ...

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """Every object below the prefix, in key order, strongly consistent."""
        ...

    def list_after(self, prefix: str, after: str, *, page: int = 1000) -> Iterator[ObjectInfo]:
        """Every object below the prefix whose key is greater than `after`, in key order.

        Args:
            page: how many are asked for at once.
        """
        ...

    def stored(self, prefix: str) -> Iterator[ObjectInfo]:
        """Everything below the prefix that takes up space: every version of an object, parts of unfinished uploads."""
        ...

    def delete(self, keys: Sequence[str]) -> None:
        """Delete the objects; absent ones do not matter."""
        ...

    def delete_listed(self, key: str) -> None:
        """Delete the object, also under a name that no key can have: hosts may write any below their prefix.

        Raises:
            StoreError: it is still there, since its name could mean another object too.
        """
        ...

    def presign_get(self, key: str, *, expires: datetime, version: str | None = None) -> str:
        """Return a URL that reads exactly this object until then, without any other credential."""
        ...

    def first_versions(self, prefix: str) -> Mapping[str, str]:
        """Return the first version of each object below the prefix; empty where the store keeps no versions."""
        ...

    def grant_upload(
        self, prefix: str, *, expires: datetime, size_max: int, marker_key: str | None = None
    ) -> UploadGrant:
        """Permit to write objects of at most `size_max` bytes below `prefix`, which ends in `/`, and nothing else.

        Args:
            marker_key: of one more object, of a few bytes, that may be written; a store that cannot permit exactly this
                much gives a grant without it.

        Raises:
            GrantsRefused: the store would not enforce it.
        """
        ...

    def revoke_upload(self, prefix: str) -> None:
        """Revoke what can be revoked of the permission to write below `prefix`; the rest expires.

        Raises:
            StoreError: it could not be taken back now.
        """
        ...

    def advice(self) -> Sequence[Advice]:
        """Return what of the store's own settings costs money or checkpoints.

        Raises:
            StoreError
        """
        ...


# Which keys an object may have, the same in every store.


_FORBIDDEN: Final = re.compile(r"[\x00-\x1f\x7f\\\ud800-\udfff]")


def require_key(key: str) -> str:
    """Return the key, if it is a relative path that stays below the store and every file system can hold.

    Raises:
        StoreError: naming what is wrong with it.
    """
    parts = key.split("/")
    wrong = None
    if not key or len(key.encode(errors="surrogateescape")) > KEY_BYTES_MAX:
        wrong = f"is empty or longer than {KEY_BYTES_MAX} bytes"
    elif not is_plain(key):
        wrong = "has an empty part, '.' or '..'"
    elif _FORBIDDEN.search(key):
        wrong = "holds a control character, a backslash or broken text"
    elif any(len(part.encode()) > NAME_BYTES_MAX for part in parts):
        wrong = f"has a part longer than {NAME_BYTES_MAX} bytes"
    elif any(part.startswith(TEMPORARY) for part in parts):
        wrong = f"has a part that begins with {TEMPORARY}, which is for unfinished writes"
    if wrong is not None:
        raise StoreError(f"the object key {key[:100]!r} {wrong}")
    return key


def require_prefix(prefix: str) -> str:
    """Return the key of the folder that the prefix of a grant names.

    Raises:
        StoreError: it does not end in `/`, or is no place in a store.
    """
    if not prefix.endswith("/"):
        raise StoreError(f"the prefix of a grant must end in '/', not {prefix[:100]!r}")
    return require_key(prefix[:-1])


def is_key(key: str) -> bool:
    """Whether every method of a store takes this key."""
    try:
        require_key(key)
    except StoreError:
        return False
    return True


def require_listed_key(key: str) -> str:
    """Return the key as it was listed, if it means the same object to every store: no part of it can lead elsewhere.

    Raises:
        StoreError
    """
    if "\0" in key or not is_plain(key):
        raise StoreError(f"the object key {key[:100]!r} has an empty part, '.' or '..', or a NUL")
    return key


# Files of this computer that are stored or hold objects.


@contextmanager
def source_file(path: Path) -> Iterator[IO[bytes]]:
    """Open a file that is to be stored.

    Raises:
        StoreError: it cannot be read.
    """
    try:
        source = path.open("rb")
    except OSError as exc:
        raise StoreError(f"{path} cannot be read: {exc.strerror}") from exc
    with source:
        yield source


def flush_folder(folder: Path) -> None:
    """Bring the names in a folder to disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
