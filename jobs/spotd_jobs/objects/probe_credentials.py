"""Finds out whether a temporary credential really is limited to the prefix it was made for.

A credential is more than a form: it can be used with every verb. So every verb is tried outside the prefix, and what
is there must still be there afterwards, whatever the store answered.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

from spotd_jobs.objects.api import StoreError, StoreUnavailable
from spotd_jobs.objects.probe import CONTENT, LIFE, SIZE_MAX, Tried, accepted
from spotd_jobs.objects.s3_grants import GrantMethod, folder_of
from spotd_jobs.wire.client import web
from spotd_jobs.wire.client.clocks import CLOCK
from spotd_jobs.wire.client.sigv4 import Credential
from spotd_jobs.wire.client.sinks import SinkError
from spotd_jobs.wire.client.sinks_s3 import SigV4Sink

if TYPE_CHECKING:
    from spotd_jobs.objects.s3 import S3Store

STALE_S: Final = 3600.0
"""A signature as old as this must be worth nothing: no store accepts more than a quarter of an hour."""
B2_TRIES: Final = 5
B2_PAUSE_S: Final = 1.0
"""B2 keeps a record of each key, and one that was just made may not be known everywhere yet."""
_OTHERS: Final = b"another attempt's"


def refusal_of_credentials(store: S3Store, method: GrantMethod, place: str) -> Tried:
    """Return what speaks against credentials of this kind."""
    inside, outside = f"{place}inside/", f"{place}outside/"
    one = f"{place}markers/one"
    also = "" if method is GrantMethod.B2 else one
    try:
        fields, _ = store.credential(method, inside, expires=store.now() + LIFE, checksums=False, also=also)
    except StoreUnavailable:
        raise
    except StoreError as exc:
        return Tried(lacks=str(exc))
    if not _accepted_soon(method, SigV4Sink(fields)):
        return Tried(lacks=f"it takes no uploads by a temporary credential ({method.value})")
    if store.get(f"{inside}probe", bytes_max=SIZE_MAX) != CONTENT:
        return Tried(refusal="it stores something else than what was sent with a temporary credential")
    store.put(f"{outside}probe", _OTHERS)
    tries: dict[str, Callable[[], bool]] = {
        "an upload outside the prefix that was granted": lambda: accepted(
            SigV4Sink({**fields, "key_prefix": store.place.prefix + outside})
        ),
        "an upload under another name than was granted": lambda: accepted(
            SigV4Sink({**fields, "key_prefix": store.place.prefix + folder_of(one)}), "one-more"
        ),
        "an upload with a forged signature": lambda: accepted(SigV4Sink({**fields, "secret_key": "0" * 64})),
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
        tries["an upload without the token of its credential"] = lambda: accepted(
            SigV4Sink({**fields, "session_token": ""})
        )
    if method is GrantMethod.R2:
        ended = store.now() - timedelta(minutes=1)
        late, _ = store.credential(method, f"{place}ended/", expires=ended, checksums=False)
        tries["an upload after the grant has expired"] = lambda: accepted(SigV4Sink(late))
    for words, is_accepted in tries.items():
        if is_accepted():
            return Tried(refusal=f"it accepts {words}")
    if store.get(f"{outside}probe", bytes_max=SIZE_MAX) != _OTHERS:
        return Tried(refusal="a temporary credential can change what is another's")
    return Tried()


def _accepted_soon(method: GrantMethod, sink: SigV4Sink) -> bool:
    tries = B2_TRIES if method is GrantMethod.B2 else 1
    for number in range(tries):
        if number:
            time.sleep(B2_PAUSE_S)
        if accepted(sink):
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


def _deletes(store: S3Store, fields: dict[str, Any], key: str) -> bool:
    _works(fields, "DELETE", store.place.prefix + key)
    return store.head(key) is None
