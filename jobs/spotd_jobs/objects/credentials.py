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
