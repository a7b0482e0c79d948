"""Temporary credentials that may only put objects below one prefix, for stores without signed upload forms.

Theory. Three makers of stores have three ways, all hidden behind `Minter`: a token signed here (R2), a call that
narrows a role or a user (AWS STS and what imitates it), an application key with a name prefix (B2). Two of them cost
a call, and B2 counts every key that was ever made, so a credential is handed out again for as long as most of its
life is left: a grant that is renewed every few minutes costs a call every quarter of an hour.

Nothing here logs; no error quotes a key, and no repr shows one.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, Final, Protocol
from urllib.parse import urlsplit

from spotd_jobs.objects.api import StoreError, StoreUnavailable
from spotd_jobs.objects.s3_client import S3Place, sts_client
from spotd_jobs.wire.client import web

STS_LIFE_MIN: Final = timedelta(minutes=15)
STS_LIFE_MAX: Final = timedelta(hours=1)
"""More than this is refused by roles as they are made, and to roles that were assumed by a role in any case."""
REUSED_SHARE: Final = 0.75
HELD_MAX: Final = 10_000
R2_HOST: Final = ".r2.cloudflarestorage.com"
B2_HOST: Final = ".backblazeb2.com"


@dataclass(frozen=True, slots=True, kw_only=True)
class MintedCredential:
    """What one host may sign with.

    Attributes:
        made_at, expires: by our clock.
        id: by which it can be taken back, where the store has a way.
    """

    access_key: str = field(repr=False)
    secret_key: str = field(repr=False)
    session_token: str = field(default="", repr=False)
    made_at: datetime
    expires: datetime
    id: str = field(default="", repr=False)


class Minter(Protocol):
    """Makes credentials of one maker's kind."""

    def mint(self, key_prefix: str, *, now: datetime, expires: datetime, also: str = "") -> MintedCredential:
        """Make a new credential that may put objects below `key_prefix` of the bucket, and `also`, and do nothing else.

        Raises:
            StoreError: the service that makes them refuses or is away.
        """
        ...

    def revoke(self, credential: MintedCredential) -> None:
        """Revoke the credential, where the store has a way to do so.

        Raises:
            StoreError
        """
        ...


class CredentialCache:
    """Hands credentials out, again and again while they are fresh. Safe to use from every thread."""

    def __init__(self, minter: Minter, clock: Callable[[], datetime]) -> None:
        self._minter = minter
        self._clock = clock
        self._held: dict[str, MintedCredential] = {}
        self._lock = threading.Lock()

    def credential(self, key_prefix: str, *, expires: datetime, also: str = "") -> MintedCredential:
        """Return a credential for this prefix that is good until about then, or for as long as its maker allows.

        Args:
            also: the one object beside the prefix that may be put, the same whenever this prefix is asked for.

        Raises:
            StoreError
        """
        now = self._clock()
        with self._lock:
            held = self._held.get(key_prefix)
        if held is not None:
            left = held.expires - now
            if left >= min(expires - now, (held.expires - held.made_at) * REUSED_SHARE):
                return held
        made = self._minter.mint(key_prefix, now=now, expires=expires, also=also)
        with self._lock:
            self._held.pop(key_prefix, None)
            self._held[key_prefix] = made
            while len(self._held) > HELD_MAX:
                del self._held[next(iter(self._held))]
        return made

    def revoke(self, key_prefix: str) -> None:
        """Revoke the newest credential of this prefix; unknown ones expire."""
        with self._lock:
            held = self._held.pop(key_prefix, None)
        if held is not None and held.expires > self._clock():
            self._minter.revoke(held)


class R2Minter:
    """Cloudflare R2: the parent key signs a token here, without any call. The parent must outlive its children."""

    def __init__(self, place: S3Place) -> None:
        self._bucket = place.bucket
        self._parent, self._secret = _parent(place)
        self._audience = str(urlsplit(place.endpoint_url or "").netloc)
        self._account = place.account or self._audience.partition(".")[0]

    def mint(self, key_prefix: str, *, now: datetime, expires: datetime, also: str = "") -> MintedCredential:
        claims = {
            "bucket": self._bucket,
            "scope": "object-read-write",
            "actions": ["PutObject"],
            "paths": {"prefixPaths": [key_prefix], "objectPaths": [also] if also else []},
            "sub": self._account,
            "iss": self._parent,
            "aud": self._audience,
            "iat": int(now.timestamp()),
            "exp": int(expires.timestamp()),
        }
        signed = _url_base64(b'{"alg":"HS256","typ":"JWT"}') + "." + _url_base64(json.dumps(claims).encode())
        signature = hmac.new(self._secret.encode(), signed.encode(), hashlib.sha256).digest()
        token = f"{signed}.{_url_base64(signature)}"
        return MintedCredential(
            access_key=self._parent,
            secret_key=hashlib.sha256(token.encode()).hexdigest(),
            session_token=base64.b64encode(b"jwt/" + token.encode()).decode(),
            made_at=now,
            expires=expires,
        )

    def revoke(self, credential: MintedCredential) -> None:
        """Nothing: only the parent key can be revoked, and all its children with it."""


class StsMinter:
    """AWS and what imitates its STS: a role, or a user, narrowed by an inline policy to one prefix."""

    def __init__(self, place: S3Place) -> None:
        self._place = place
        self._client = sts_client(place)

    def mint(self, key_prefix: str, *, now: datetime, expires: datetime, also: str = "") -> MintedCredential:
        from botocore.exceptions import BotoCoreError, ClientError

        life = min(STS_LIFE_MAX, max(STS_LIFE_MIN, expires - now))
        seconds = int(life.total_seconds())
        policy = json.dumps(put_policy(self._place.bucket, key_prefix, also), separators=(",", ":"))
        try:
            if self._place.role_arn is not None:
                answer: Any = self._client.assume_role(
                    RoleArn=self._place.role_arn, RoleSessionName="spotd", Policy=policy, DurationSeconds=seconds
                )
            else:
                answer = self._client.get_federation_token(Name="spotd", Policy=policy, DurationSeconds=seconds)
        except ClientError as exc:
            code = exc.response.get("Error", {}).get("Code", "")
            status = exc.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
            kind = StoreUnavailable if status >= 500 or code.startswith("Throttl") else StoreError
            raise kind(f"STS refuses a temporary credential: HTTP {status} {code}; see docs/stores.md") from exc
        except BotoCoreError as exc:
            raise StoreUnavailable(f"STS does not answer ({type(exc).__name__}); check the network") from exc
        made = answer["Credentials"]
        return MintedCredential(
            access_key=made["AccessKeyId"],
            secret_key=made["SecretAccessKey"],
            session_token=made["SessionToken"],
            made_at=now,
            expires=now + life,
        )

    def revoke(self, credential: MintedCredential) -> None:
        """Nothing: a session runs out, which is why it lives an hour at most."""


def put_policy(bucket: str, key_prefix: str, also: str = "") -> dict[str, Any]:
    """Return the inline policy of one attempt: put objects below its prefix, which it need not be able to read."""
    below, one = (f"arn:aws:s3:::{bucket}/{place}" for place in (f"{key_prefix}*", also))
    statement = {"Effect": "Allow", "Action": ["s3:PutObject"], "Resource": [below, one] if also else below}
    return {"Version": "2012-10-17", "Statement": [statement]}


def _parent(place: S3Place) -> tuple[str, str]:
    key, secret = place.signing_keys
    if key is None or secret is None:
        raise StoreError("temporary credentials need a key to be made from; write access_key and secret_key in [store]")
    return key, secret


def _url_base64(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


# Backblaze B2: an application key that may only write files below one name prefix, and runs out by itself.


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
                session = self._session = self._session or self._authorize()
                return self._ask(name, session, body(session))
            except _Expired:
                session = self._session = self._authorize()
                return self._ask(name, session, body(session))

    def _authorize(self) -> dict[str, str]:
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
