"""Which keys an object may have, the same in every store."""

from __future__ import annotations

import re
from typing import Final

from spotd_jobs.objects.api import StoreError
from spotd_jobs.wire.client.files import TEMPORARY
from spotd_jobs.wire.client.paths import is_plain
from spotd_jobs.wire.fields import KEY_BYTES_MAX, NAME_BYTES_MAX

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
