"""A probe of what a bucket's store really enforces, by trying what must be refused.

A store that accepts an upload outside a grant's prefix, above its size, after its end or with a forged signature
would let any host overwrite every job's data: it gets no grants at all. A store that only lacks a feature is
distinguished and worked around: without forms, temporary credentials are tried where the store has them
(`probe_credentials.py`). Costs about twenty requests below `.probe/`, all of which is deleted again.

The uploads are sent by the very code that hosts run.
"""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

from spotd_jobs.objects.api import StoreError, StoreUnavailable
from spotd_jobs.objects.s3_grants import GrantMethod, methods_for
from spotd_jobs.wire.client import web
from spotd_jobs.wire.client.sinks import Sink, SinkDenied, SinkError
from spotd_jobs.wire.client.sinks_s3 import PostSink, SigV4Sink

if TYPE_CHECKING:
    from spotd_jobs.objects.s3 import S3Store

PROBES: Final = ".probe/"
LIFE: Final = timedelta(minutes=5)
SIZE_MAX: Final = 64
CONTENT: Final = b"spotd checks what this store enforces"
_ORDER: Final = ("a-b", "a.b", "a/x", "a0")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """What came of one method. Both are empty where the store has it and enforces it.

    Attributes:
        lacks: that the store does not have this method.
        refusal: what it accepts that must be refused.
    """

    lacks: str = ""
    refusal: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """What a store does.

    Attributes:
        refusal: why it gets no grants, in one sentence; empty when it may have them.
        method: how grants are made where there is no refusal.
        checksums: it verifies a SHA-256 sent with a form, and states it afterwards.
        ordered: it lists keys in the order of their bytes.
    """

    refusal: str = ""
    method: GrantMethod = GrantMethod.FORM
    checksums: bool = False
    ordered: bool = False


def probe(store: S3Store) -> Findings:
    """Every forgery was tried.

    Raises:
        StoreError: it could not be found out: the store is away, or lets us do nothing.
    """
    place = f"{PROBES}{uuid.uuid4().hex}/"
    try:
        method, refusal = _method(store, place)
        return Findings(
            refusal=refusal,
            method=method,
            checksums=not refusal and _verifies_checksums(store, method, place),
            ordered=_lists_in_order(store, place),
        )
    except SinkError as exc:
        raise StoreUnavailable(f"{store.place} cannot be probed: {exc}") from exc
    finally:
        web.drop_connections()
        store.delete([info.key for info in store.list(place)])


def _method(store: S3Store, place: str) -> tuple[GrantMethod, str]:
    """How grants are made here, or what speaks against any.

    A method that the store lacks leads to the next. One that it has and does not enforce ends the search: such a store
    is not to be trusted by any other method either.
    """
    methods, lacks = methods_for(store.place), []
    for method in methods:
        verdict = refusal_of_forms(store, place) if method is GrantMethod.FORM else _by_credential(store, method, place)
        if verdict.lacks:
            lacks.append(verdict.lacks)
            continue
        return method, verdict.refusal or _refusal_of_urls(store, f"{place}inside/probe")
    ways = "; ".join(lacks)
    return methods[0], f"{ways}; docs/stores.md says what each store needs"


def _by_credential(store: S3Store, method: GrantMethod, place: str) -> Tried:
    from spotd_jobs.objects.probe_credentials import refusal_of_credentials

    return refusal_of_credentials(store, method, place)


def refusal_of_forms(store: S3Store, place: str) -> Tried:
    """Return what speaks against signed forms."""
    now = store.now()
    inside, outside = f"{place}inside/", f"{place}outside/"

    def form(**changes: Any) -> dict[str, Any]:
        return store.form(inside, **{"expires": now + LIFE, "size_max": SIZE_MAX, "checksums": False, **changes})

    good = form()
    if not accepted(PostSink(good)):
        return Tried(lacks="it takes no uploads by a signed form (POST policy)")
    if store.get(f"{inside}probe", bytes_max=SIZE_MAX) != CONTENT:
        return Tried(refusal="it stores something else than what was sent by a form")
    beside = {**good, "key_prefix": store.place.prefix + outside}
    one = store.form_of(f"{place}markers/one", expires=now + LIFE, size_max=SIZE_MAX)
    signature = next((name for name in good["form"] if name.lower() == "x-amz-signature"), "x-amz-signature")
    forged = {**good["form"], signature: "0" * 64}
    forgeries: dict[str, Callable[[], bool]] = {
        "outside the prefix that was granted": lambda: accepted(PostSink(beside)),
        "under another name than was granted": lambda: accepted(PostSink(one), "one-more"),
        "larger than was granted": lambda: accepted(PostSink(form(size_max=len(CONTENT) - 1))),
        "after the grant has expired": lambda: accepted(PostSink(form(expires=now - timedelta(hours=1)))),
        "with a forged signature": lambda: accepted(PostSink({**good, "form": forged})),
        "without any signature": lambda: accepted(PostSink({**good, "form": {}})),
    }
    for words, is_accepted in forgeries.items():
        if is_accepted():
            return Tried(refusal=f"it accepts an upload {words}")
    return Tried()


def _refusal_of_urls(store: S3Store, key: str) -> str:
    url = store.presign_get(key, expires=store.now() + LIFE)
    if _status(url) != 200:
        return "it does not serve a signed URL"
    other = url[:-1] + ("0" if url[-1] != "0" else "1")
    if _status(other) < 400:
        return "it serves a URL with a forged signature"
    if _status(url.partition("?")[0]) < 400:
        return "everybody can read from it without a signature"
    return ""


def _verifies_checksums(store: S3Store, method: GrantMethod, place: str) -> bool:
    """Whether wrong content is refused, and the hash of right content stated."""
    folder = f"{place}inside/" if method is not GrantMethod.FORM else f"{place}checksums/"
    expires = store.now() + LIFE
    if method is GrantMethod.FORM:
        sink: Sink = PostSink(store.form(folder, expires=expires, size_max=SIZE_MAX, checksums=True))
    else:
        sink = SigV4Sink(store.credential(method, folder, expires=expires, checksums=True)[0])
    if accepted(sink, "checked", sha256="0" * 64) or not accepted(sink, "checked"):
        return False
    return store.stored_sha256(f"{folder}checked") == hashlib.sha256(CONTENT).hexdigest()


def _lists_in_order(store: S3Store, place: str) -> bool:
    folder = f"{place}order/"
    for name in _ORDER:
        store.put(folder + name, b"x")
    listed = [key.removeprefix(folder) for key in store.keys_as_listed(folder)]
    if sorted(listed) != sorted(_ORDER):
        raise StoreError(f"{store.place} does not list what was just stored, so nothing in it can be relied upon")
    return listed == list(_ORDER)


def accepted(sink: Sink, name: str = "probe", *, sha256: str | None = None) -> bool:
    """Whether the store takes an object by this grant, as a host would send it."""
    try:
        sink.put(name, CONTENT, sha256)
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
