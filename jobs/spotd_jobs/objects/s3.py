"""An object store in a bucket, which is trusted with no more than a probe of it has seen.

boto3 is imported when a store is opened, so that a user without a bucket neither waits for it nor needs it.

Theory. Stores differ in what they enforce, and a store that ignores what a grant states would let any host write
anywhere. What this one does is found out by a probe (`probe`) and never assumed: until the probe has seen every
forgery refused, `grant_upload` gives nothing. Grants are POST policies where the store has them (one signature that
permits objects of limited size below one prefix until an instant, with no power to read, list or delete), else
temporary credentials that may only put below the prefix (`s3_grants.py`).
"""

from __future__ import annotations

import hashlib
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from spotd_jobs.objects import api
from spotd_jobs.objects.s3_bucket import PAGE, S3Bucket
from spotd_jobs.objects.s3_client import S3Place
from spotd_jobs.objects.s3_grants import GrantMethod, folder_of, methods_for
from spotd_jobs.wire.client import web
from spotd_jobs.wire.client.sinks import Sink, SinkDenied, SinkError
from spotd_jobs.wire.client.sinks_s3 import Credential, PostSink, SigV4Sink
from spotd_jobs.wire.client.web import CLOCK
from spotd_jobs.wire.grant import MARKER_BYTES_MAX

# A probe of what a bucket's store really enforces, by trying what must be refused.
#
# A store that accepts an upload outside a grant's prefix, above its size, after its end or with a forged signature
# would let any host overwrite every job's data: it gets no grants at all. A store that only lacks a feature is
# distinguished and worked around: without forms, temporary credentials are tried where the store has them. A credential
# is more than a form: it can be used with every verb. So every verb is tried outside the prefix, and what is there must
# still be there afterwards, whatever the store answered. Costs about twenty requests below `.probe/`, all of which is
# deleted again.
#
# The uploads are sent by the very code that hosts run.


PROBES: Final = ".probe/"
LIFE: Final = timedelta(minutes=5)
SIZE_MAX: Final = 64
CONTENT: Final = b"spotd checks what this store enforces"
STALE_S: Final = 3600.0
"""A signature as old as this must be worth nothing: no store accepts more than a quarter of an hour."""
B2_TRIES: Final = 5
B2_PAUSE_S: Final = 1.0
"""B2 keeps a record of each key, and one that was just made may not be known everywhere yet."""
_OTHERS: Final = b"another attempt's"
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


def probe(store: S3Bucket) -> Findings:
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
        raise api.StoreUnavailable(f"{store.place} cannot be probed: {exc}") from exc
    finally:
        web.drop_connections()
        store.delete([info.key for info in store.objects_below(place)])


def _method(store: S3Bucket, place: str) -> tuple[GrantMethod, str]:
    """How grants are made here, or what speaks against any.

    A method that the store lacks leads to the next. One that it has and does not enforce ends the search: such a store
    is not to be trusted by any other method either.
    """
    methods, lacks = methods_for(store.place), []
    for method in methods:
        verdict = (
            refusal_of_forms(store, place)
            if method is GrantMethod.FORM
            else refusal_of_credentials(store, method, place)
        )
        if verdict.lacks:
            lacks.append(verdict.lacks)
            continue
        return method, verdict.refusal or _refusal_of_urls(store, f"{place}inside/probe")
    ways = "; ".join(lacks)
    return methods[0], f"{ways}; docs/stores.md says what each store needs"


def refusal_of_forms(store: S3Bucket, place: str) -> Tried:
    """Return what speaks against signed forms."""
    now = store.now()
    inside, outside = f"{place}inside/", f"{place}outside/"

    def form(**changes: Any) -> dict[str, Any]:
        return store.grants.form(inside, **{"expires": now + LIFE, "size_max": SIZE_MAX, "checksums": False, **changes})

    good = form()
    if not takes_object(PostSink(good)):
        return Tried(lacks="it takes no uploads by a signed form (POST policy)")
    if store.get(f"{inside}probe", bytes_max=SIZE_MAX) != CONTENT:
        return Tried(refusal="it stores something else than what was sent by a form")
    beside = {**good, "key_prefix": store.place.prefix + outside}
    one = store.grants.form_of(f"{place}markers/one", expires=now + LIFE, size_max=SIZE_MAX)
    signature = next((name for name in good["form"] if name.lower() == "x-amz-signature"), "x-amz-signature")
    forged = {**good["form"], signature: "0" * 64}
    forgeries: dict[str, Callable[[], bool]] = {
        "outside the prefix that was granted": lambda: takes_object(PostSink(beside)),
        "under another name than was granted": lambda: takes_object(PostSink(one), "one-more"),
        "larger than was granted": lambda: takes_object(PostSink(form(size_max=len(CONTENT) - 1))),
        "after the grant has expired": lambda: takes_object(PostSink(form(expires=now - timedelta(hours=1)))),
        "with a forged signature": lambda: takes_object(PostSink({**good, "form": forged})),
        "without any signature": lambda: takes_object(PostSink({**good, "form": {}})),
    }
    for words, is_accepted in forgeries.items():
        if is_accepted():
            return Tried(refusal=f"it accepts an upload {words}")
    return Tried()


def refusal_of_credentials(store: S3Bucket, method: GrantMethod, place: str) -> Tried:
    """Return what speaks against credentials of this kind."""
    inside, outside = f"{place}inside/", f"{place}outside/"
    one = f"{place}markers/one"
    also = "" if method is GrantMethod.B2 else one
    try:
        fields, _ = store.grants.credential(method, inside, expires=store.now() + LIFE, checksums=False, also=also)
    except api.StoreUnavailable:
        raise
    except api.StoreError as exc:
        return Tried(lacks=str(exc))
    if not _takes_object_soon(method, SigV4Sink(fields)):
        return Tried(lacks=f"it takes no uploads by a temporary credential ({method.value})")
    if store.get(f"{inside}probe", bytes_max=SIZE_MAX) != CONTENT:
        return Tried(refusal="it stores something else than what was sent with a temporary credential")
    store.put(f"{outside}probe", _OTHERS)
    tries: dict[str, Callable[[], bool]] = {
        "an upload outside the prefix that was granted": lambda: takes_object(
            SigV4Sink({**fields, "key_prefix": store.place.prefix + outside})
        ),
        "an upload under another name than was granted": lambda: takes_object(
            SigV4Sink({**fields, "key_prefix": store.place.prefix + folder_of(one)}), "one-more"
        ),
        "an upload with a forged signature": lambda: takes_object(SigV4Sink({**fields, "secret_key": "0" * 64})),
        "an upload signed an hour ago": lambda: _works(fields, "PUT", f"{store.place.prefix}{inside}late", STALE_S),
        "a temporary credential for reading what is another's": lambda: _works(
            fields, "GET", f"{store.place.prefix}{outside}probe"
        ),
        "a temporary credential for listing what is another's": lambda: _works(
            fields, "GET", "", query={"list-type": "2", "prefix": store.place.prefix + outside}
        ),
        "a temporary credential for deleting what is another's": lambda: _deletes(store, fields, f"{outside}probe"),
    }
    if fields["session_token"]:
        tries["an upload without the token of its credential"] = lambda: takes_object(
            SigV4Sink({**fields, "session_token": ""})
        )
    if method is GrantMethod.R2:
        ended = store.now() - timedelta(minutes=1)
        late, _ = store.grants.credential(method, f"{place}ended/", expires=ended, checksums=False)
        tries["an upload after the grant has expired"] = lambda: takes_object(SigV4Sink(late))
    for words, is_accepted in tries.items():
        if is_accepted():
            return Tried(refusal=f"it accepts {words}")
    if store.get(f"{outside}probe", bytes_max=SIZE_MAX) != _OTHERS:
        return Tried(refusal="a temporary credential can change what is another's")
    return Tried()


def _takes_object_soon(method: GrantMethod, sink: SigV4Sink) -> bool:
    tries = B2_TRIES if method is GrantMethod.B2 else 1
    for number in range(tries):
        if number:
            time.sleep(B2_PAUSE_S)
        if takes_object(sink):
            return True
    return False


def _works(
    fields: dict[str, Any], method: str, key: str, old_s: float = 0.0, *, query: dict[str, str] | None = None
) -> bool:
    """Whether the store does this for the holder of the credential."""
    url, headers = Credential(fields).request(method, key, CLOCK.now() - old_s, query=query)
    try:
        status, _, _ = web.request(method, url, headers, [CONTENT] if method == "PUT" else None)
    except web.WebError as exc:
        raise SinkError(str(exc)) from None
    return status < 400


def _deletes(store: S3Bucket, fields: dict[str, Any], key: str) -> bool:
    _works(fields, "DELETE", store.place.prefix + key)
    return store.info_of(key, checksums=False) is None


def _refusal_of_urls(store: S3Bucket, key: str) -> str:
    url = store.presign_get(key, expires=store.now() + LIFE)
    if _status(url) != 200:
        return "it does not serve a signed URL"
    other = url[:-1] + ("0" if url[-1] != "0" else "1")
    if _status(other) < 400:
        return "it serves a URL with a forged signature"
    if _status(url.partition("?")[0]) < 400:
        return "everybody can read from it without a signature"
    return ""


def _verifies_checksums(store: S3Bucket, method: GrantMethod, place: str) -> bool:
    """Whether wrong content is refused, and the hash of right content stated."""
    folder = f"{place}inside/" if method is not GrantMethod.FORM else f"{place}checksums/"
    expires = store.now() + LIFE
    if method is GrantMethod.FORM:
        sink: Sink = PostSink(store.grants.form(folder, expires=expires, size_max=SIZE_MAX, checksums=True))
    else:
        sink = SigV4Sink(store.grants.credential(method, folder, expires=expires, checksums=True)[0])
    if takes_object(sink, "checked", sha256="0" * 64) or not takes_object(sink, "checked"):
        return False
    stored = store.info_of(f"{folder}checked", checksums=True)
    return stored is not None and stored.sha256 == hashlib.sha256(CONTENT).hexdigest()


def _lists_in_order(store: S3Bucket, place: str) -> bool:
    folder = f"{place}order/"
    for name in _ORDER:
        store.put(folder + name, b"x")
    listed = [info.key.removeprefix(folder) for info in store.objects_below(folder)]
    if sorted(listed) != sorted(_ORDER):
        raise api.StoreError(f"{store.place} does not list what was just stored, so nothing in it can be relied upon")
    return listed == list(_ORDER)


def takes_object(sink: Sink, name: str = "probe", *, sha256: str | None = None) -> bool:
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

    def head(self, key: str) -> api.ObjectInfo | None:
        return self.info_of(key, checksums=self._findings is not None and self._findings.checksums)

    def list(self, prefix: str) -> Iterator[api.ObjectInfo]:
        folder = prefix.rpartition("/")[0]
        if folder:
            api.require_key(folder)
        found = self.objects_below(prefix)
        return found if self._is_ordered else iter(sorted(found, key=lambda info: info.key.encode()))

    def list_after(self, prefix: str, after: str, *, page: int = PAGE) -> Iterator[api.ObjectInfo]:
        # A store may take no notice of where to begin: a reader that got all from the first again would never end.
        found = self.objects_below(prefix, after=after, page=page) if self._is_ordered else self.list(prefix)
        return (info for info in found if info.key.encode() > after.encode())

    @property
    def _is_ordered(self) -> bool:
        return self._findings is not None and self._findings.ordered

    def grant_upload(
        self, prefix: str, *, expires: datetime, size_max: int, marker_key: str | None = None
    ) -> api.UploadGrant:
        api.require_prefix(prefix)
        findings = self.findings()
        if findings.refusal:
            raise api.GrantsRefused(f"{self.place} gets no grants: {findings.refusal}")
        if findings.method is GrantMethod.FORM:
            method = "post"
            fields = self.grants.form(prefix, expires=expires, size_max=size_max, checksums=findings.checksums)
            one = None
            if marker_key is not None:
                one = self.grants.form_of(api.require_key(marker_key), expires=expires, size_max=MARKER_BYTES_MAX)
        else:
            method = "sigv4"
            also = "" if marker_key is None or findings.method is GrantMethod.B2 else api.require_key(marker_key)
            fields, expires = self.grants.credential(
                findings.method, prefix, expires=expires, checksums=findings.checksums, also=also
            )
            one = {**fields, "key_prefix": self.place.prefix + folder_of(also)} if also else None
        return api.UploadGrant(
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
    with suppress(api.StoreUnavailable):
        store.findings()
    return store
