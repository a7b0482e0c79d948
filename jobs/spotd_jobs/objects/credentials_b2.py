"""Backblaze B2: an application key that may only write files below one name prefix, and runs out by itself."""

from __future__ import annotations

import base64
import json
import threading
from datetime import datetime
from typing import Any, Final

from spotd_jobs.objects.api import StoreError, StoreUnavailable
from spotd_jobs.objects.credentials import MintedCredential
from spotd_jobs.objects.s3_client import S3Place
from spotd_jobs.wire.client import web

API: Final = "https://api.backblazeb2.com"
_VERSION: Final = "/b2api/v4/"
_EXPIRED: Final = frozenset({"expired_auth_token", "bad_auth_token"})


class _Expired(StoreError):
    """The authorization has run out; a new one will do."""


class B2Minter:
    """Makes and deletes application keys with a key that has `writeKeys` and `deleteKeys`."""

    def __init__(self, place: S3Place) -> None:
        key, secret = place.signing_keys
        if key is None or secret is None:
            raise StoreError("B2 makes keys from another one; write access_key and secret_key in [store]")
        self._bucket = place.bucket
        self._basic = "Basic " + base64.b64encode(f"{key}:{secret}".encode()).decode()
        self._api = (place.grants_endpoint_url or API).rstrip("/")
        self._session: dict[str, str] | None = None
        self._lock = threading.Lock()

    def mint(
        self,
        key_prefix: str,
        *,
        now: datetime,
        expires: datetime,
        also: str = "",  # noqa: ARG002  # a key has one name prefix, so this is always empty here
    ) -> MintedCredential:
        """Make a key that may write below the prefix.

        Raises:
            StoreError: B2 refuses or is away.
        """
        made = self._call(
            "b2_create_key",
            lambda session: {
                "accountId": session["account"],
                "capabilities": ["writeFiles"],
                "keyName": "spotd-attempt",
                "validDurationInSeconds": max(1, int((expires - now).total_seconds())),
                "bucketIds": [session["bucket"]],
                "namePrefix": key_prefix,
            },
        )
        return MintedCredential(
            access_key=_text(made, "applicationKeyId"),
            secret_key=_text(made, "applicationKey"),
            made_at=now,
            expires=expires,
            id=_text(made, "applicationKeyId"),
        )

    def revoke(self, credential: MintedCredential) -> None:
        """Delete the key.

        Raises:
            StoreError: B2 refuses or is away.
        """
        self._call("b2_delete_key", lambda _session: {"applicationKeyId": credential.id})

    def _call(self, name: str, body: Any) -> dict[str, Any]:
        with self._lock:
            try:
                session = self._session = self._session or self._authorized()
                return self._ask(name, session, body(session))
            except _Expired:
                session = self._session = self._authorized()
                return self._ask(name, session, body(session))

    def _authorized(self) -> dict[str, str]:
        found = _answer("b2_authorize_account", "GET", self._api + _VERSION + "b2_authorize_account", self._basic)
        api = found.get("apiInfo", {}).get("storageApi", {})
        session = {
            "url": _text(api, "apiUrl"),
            "token": _text(found, "authorizationToken"),
            "account": _text(found, "accountId"),
        }
        listed = self._ask("b2_list_buckets", session, {"accountId": session["account"], "bucketName": self._bucket})
        buckets = listed.get("buckets") or []
        if not buckets:
            raise StoreError(f"B2 shows no bucket {self._bucket} to this key; it needs listBuckets")
        return {**session, "bucket": _text(buckets[0], "bucketId")}

    def _ask(self, name: str, session: dict[str, str], body: dict[str, Any]) -> dict[str, Any]:
        return _answer(name, "POST", session["url"] + _VERSION + name, session["token"], json.dumps(body).encode())


def _answer(name: str, method: str, url: str, authorization: str, body: bytes | None = None) -> dict[str, Any]:
    headers = {"Authorization": authorization, "Content-Type": "application/json"}
    try:
        status, _, content = web.request(method, url, headers, None if body is None else [body])
    except web.WebError as exc:
        raise StoreUnavailable(f"B2 does not answer {name}: {exc}") from None
    finally:
        web.drop_connections()
    try:
        document = json.loads(content)
    except ValueError:
        document = {}
    if not isinstance(document, dict):
        document = {}
    if status == 200:
        return document
    code = str(document.get("code", ""))[:60]
    if code in _EXPIRED and name != "b2_authorize_account":
        raise _Expired(f"B2 no longer knows this session: HTTP {status} {code}")
    kind = StoreUnavailable if status >= 500 or status == 429 else StoreError
    raise kind(f"B2 refuses {name}: HTTP {status} {code}; check the rights of the key, see docs/stores.md")


def _text(document: Any, name: str) -> str:
    found = document.get(name) if isinstance(document, dict) else None
    if not isinstance(found, str) or not found:
        raise StoreUnavailable(f"B2's answer has no {name}")
    return found
