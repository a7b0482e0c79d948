"""Finds out what a bucket's store really enforces, by trying what must be refused.

A store that accepts an upload outside a grant's prefix, above its size, after its end or with a forged signature
would let any host overwrite every job's data: it gets no grants at all. Whatever merely lacks a feature is told apart
from that and worked around. Costs about twenty requests below `.probe/`, all of which is deleted again.

The forms are sent by the very code that hosts run.
"""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final

from spotd_jobs.objects.api import StoreError, StoreUnavailable
from spotd_jobs.runner import web
from spotd_jobs.runner.sinks import SinkDenied, SinkError
from spotd_jobs.runner.sinks_s3 import PostSink

if TYPE_CHECKING:
    from spotd_jobs.objects.s3 import S3Store

PROBES: Final = ".probe/"
LIFE: Final = timedelta(minutes=5)
_SIZE_MAX: Final = 64
_CONTENT: Final = b"spotd looks whether this store keeps its word"
_ORDER: Final = ("a-b", "a.b", "a/x", "a0")


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """What a store does.

    Attributes:
        refusal: why it gets no grants, in one sentence; empty when it may have them.
        checksums: it verifies a SHA-256 sent with a form, and tells it afterwards.
        ordered: it lists keys in the order of their bytes.
    """

    refusal: str = ""
    checksums: bool = False
    ordered: bool = False


def probe(store: S3Store) -> Findings:
    """Every forgery was tried.

    Raises:
        StoreError: it could not be found out: the store is away, or lets us do nothing.
    """
    place = f"{PROBES}{uuid.uuid4().hex}/"
    try:
        refusal = _refusal(store, place)
        return Findings(
            refusal=refusal,
            checksums=not refusal and _verifies_checksums(store, place),
            ordered=_lists_in_order(store, place),
        )
    except SinkError as exc:
        raise StoreUnavailable(f"{store.place} cannot be probed: {exc}") from exc
    finally:
        web.drop_connections()
        store.delete([info.key for info in store.list(place)])


def _refusal(store: S3Store, place: str) -> str:
    """The first thing that speaks against grants, empty if nothing does."""
    now = datetime.now(UTC)
    inside, outside = f"{place}inside/", f"{place}outside/"

    def form(**changes: Any) -> dict[str, Any]:
        return store.form(inside, **{"expires": now + LIFE, "size_max": _SIZE_MAX, "checksums": False, **changes})

    good = form()
    if not _accepted(good):
        return "it takes no uploads by a signed form (POST policy), and no other way is available yet"
    if store.get(f"{inside}probe", bytes_max=_SIZE_MAX) != _CONTENT:
        return "it stores something else than what was sent by a form"
    beside = {**good, "key_prefix": store.place.prefix + outside}
    signature = next((name for name in good["form"] if name.lower() == "x-amz-signature"), "x-amz-signature")
    forged = {**good["form"], signature: "0" * 64}
    forgeries: dict[str, Callable[[], bool]] = {
        "outside the prefix that was granted": lambda: _accepted(beside),
        "larger than was granted": lambda: _accepted(form(size_max=len(_CONTENT) - 1)),
        "after the grant has expired": lambda: _accepted(form(expires=now - timedelta(hours=1))),
        "with a forged signature": lambda: _accepted({**good, "form": forged}),
        "without any signature": lambda: _accepted({**good, "form": {}}),
    }
    for words, is_accepted in forgeries.items():
        if is_accepted():
            return f"it accepts an upload {words}"
    return _refusal_of_urls(store, f"{inside}probe")


def _refusal_of_urls(store: S3Store, key: str) -> str:
    url = store.presign_get(key, expires=datetime.now(UTC) + LIFE)
    if _status(url) != 200:
        return "it does not serve a signed URL"
    other = url[:-1] + ("0" if url[-1] != "0" else "1")
    if _status(other) < 400:
        return "it serves a URL with a forged signature"
    if _status(url.partition("?")[0]) < 400:
        return "everybody can read from it without a signature"
    return ""


def _verifies_checksums(store: S3Store, place: str) -> bool:
    """Whether wrong content is refused, and the hash of right content told."""
    folder = f"{place}checksums/"
    fields = store.form(folder, expires=datetime.now(UTC) + LIFE, size_max=_SIZE_MAX, checksums=True)
    if _accepted(fields, sha256="0" * 64) or not _accepted(fields):
        return False
    return store.stored_sha256(f"{folder}probe") == hashlib.sha256(_CONTENT).hexdigest()


def _lists_in_order(store: S3Store, place: str) -> bool:
    folder = f"{place}order/"
    for name in _ORDER:
        store.put(folder + name, b"x")
    listed = [key.removeprefix(folder) for key in store.keys_as_listed(folder)]
    if sorted(listed) != sorted(_ORDER):
        raise StoreError(f"{store.place} does not list what was just stored, so nothing in it can be relied upon")
    return listed == list(_ORDER)


def _accepted(fields: dict[str, Any], sha256: str | None = None) -> bool:
    """Whether the store takes an object by this form, as a host would send it."""
    try:
        PostSink(fields).put("probe", _CONTENT, sha256)
    except SinkDenied:
        return False
    except SinkError as exc:
        if "HTTP 501" in str(exc):
            return False  # it has no such upload
        raise
    return True


def _status(url: str) -> int:
    try:
        return web.request("GET", url)[0]
    except web.WebError as exc:
        raise SinkError(str(exc)) from None
