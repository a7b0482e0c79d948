"""What hosts are given in place of a bucket's keys: signed forms, or credentials that reach one prefix.

The probe decides which of them a store can be trusted with; here they are only made.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any, Final, assert_never
from urllib.parse import quote, urlsplit

from spotd_jobs.objects.credentials import B2_HOST, R2_HOST, B2Minter, CredentialCache, Minter, R2Minter, StsMinter
from spotd_jobs.objects.s3_client import Keys, S3Place
from spotd_jobs.wire.client import sinks_s3

# Upload forms and URLs that read one object, signed here (signature version 4) by a clock that is given.
#
# boto3 can make both, but only by the clock of the process: the instant of a signature could not be chosen, and
# a test of an expiry would have to wait for it. What is sent to the store at once, boto3 goes on signing itself.


ALGORITHM: Final = "AWS4-HMAC-SHA256"
_UNRESERVED: Final = "-_.~"


@dataclass(frozen=True, slots=True, kw_only=True)
class Signer:
    """Signs for one bucket.

    Attributes:
        endpoint, region: as boto3 understood them.
        keys: the signing key as it is now; a role's changes every few hours.
    """

    place: S3Place
    endpoint: str
    region: str
    keys: Callable[[], Keys] = field(repr=False)
    clock: Callable[[], datetime]

    @property
    def path_style(self) -> bool:
        """Whether the bucket stands in the path: no certificate covers a host name with its dots."""
        return self.place.endpoint_url is not None or "." in self.place.bucket

    @property
    def bucket_url(self) -> str:
        """Where the bucket is; a key follows after a `/`."""
        if self.path_style:
            return f"{self.endpoint.rstrip('/')}/{self.place.bucket}"
        scheme, _, host = self.endpoint.rstrip("/").partition("://")
        return f"{scheme}://{self.place.bucket}.{host}"

    def form(
        self, key_prefix: str, *, expires: datetime, conditions: Sequence[Any] = (), exact: bool = False
    ) -> tuple[str, dict[str, str]]:
        """Return a URL and the fields of a form that uploads below the prefix until then, under those conditions too.

        Args:
            exact: the prefix is one whole key.

        Raises:
            StoreError: there is no key to sign with.
        """
        keys, stamp = self.keys(), self._stamp()
        scope = self._scope(stamp)
        signed = {
            "x-amz-algorithm": ALGORITHM,
            "x-amz-credential": f"{keys.access}/{scope}",
            "x-amz-date": stamp,
            **({"x-amz-security-token": keys.token} if keys.token else {}),
        }
        every = [
            *conditions,
            {"bucket": self.place.bucket},
            {"key": key_prefix} if exact else ["starts-with", "$key", key_prefix],
            *({name: value} for name, value in signed.items()),
        ]
        ends = expires.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        policy = base64.b64encode(json.dumps({"expiration": ends, "conditions": every}).encode()).decode()
        signature = sinks_s3.signature(keys.secret, scope, policy)
        key = key_prefix if exact else key_prefix + "${filename}"
        fields = {"key": key, **signed, "policy": policy, "x-amz-signature": signature}
        return self.bucket_url if self.path_style else f"{self.bucket_url}/", fields

    def url(self, key: str, *, seconds: int, version: str | None = None) -> str:
        """Return a URL that reads the object with exactly this key, from now on for so long.

        Raises:
            StoreError: there is no key to sign with.
        """
        keys, stamp = self.keys(), self._stamp()
        scope = self._scope(stamp)
        where = f"{self.bucket_url}/{quote(key, safe='/' + _UNRESERVED)}"
        host, path = urlsplit(where)[1:3]
        asked = {
            **({} if version is None else {"versionId": version}),
            "X-Amz-Algorithm": ALGORITHM,
            "X-Amz-Credential": f"{keys.access}/{scope}",
            "X-Amz-Date": stamp,
            "X-Amz-Expires": str(seconds),
            "X-Amz-SignedHeaders": "host",
            **({"X-Amz-Security-Token": keys.token} if keys.token else {}),
        }
        query = "&".join(f"{name}={quote(value, safe=_UNRESERVED)}" for name, value in sorted(asked.items()))
        canonical = "\n".join(["GET", path, query, f"host:{host}\n", "host", sinks_s3.UNSIGNED])
        return f"{where}?{query}&X-Amz-Signature={sinks_s3.signature_of(keys.secret, stamp, scope, canonical)}"

    def _stamp(self) -> str:
        return self.clock().astimezone(UTC).strftime("%Y%m%dT%H%M%SZ")

    def _scope(self, stamp: str) -> str:
        return f"{stamp[:8]}/{self.region}/s3/aws4_request"


CHECKSUM_FIELD: Final = "x-amz-checksum-sha256"
AUTO: Final = "auto"


class GrantMethod(StrEnum):
    """How hosts get write permission. The values are those of `grants` in the config."""

    FORM = "form"
    STS = "sts"
    R2 = "r2"
    B2 = "b2"


def methods_for(place: S3Place) -> tuple[GrantMethod, ...]:
    """Return what is worth trying with this store, best first.

    A form is best: it limits the size of each object, and cannot read, list or delete whatever the store thinks.
    """
    if place.grants != AUTO:
        return (GrantMethod(place.grants),)
    host = (urlsplit(place.endpoint_url or "").hostname or "").lower()
    if host.endswith(R2_HOST):
        return (GrantMethod.R2,)
    if host.endswith(B2_HOST):
        return (GrantMethod.B2,)
    if place.role_arn is not None or place.endpoint_url is None:
        return (GrantMethod.FORM, GrantMethod.STS)
    return (GrantMethod.FORM,)


def folder_of(key: str) -> str:
    """All of the key before its last part."""
    return key[: key.rfind("/") + 1]


class S3Grants:
    """Makes forms and credentials for one place, by a clock that is given."""

    def __init__(
        self,
        place: S3Place,
        signer: Signer,
        clock: Callable[[], datetime],
        store_errors: Callable[[str], AbstractContextManager[None]],
    ) -> None:
        self._place = place
        self._signer = signer
        self._clock = clock
        self._store_errors = store_errors
        self._caches: dict[GrantMethod, CredentialCache] = {}

    def form(self, prefix: str, *, expires: datetime, size_max: int, checksums: bool) -> dict[str, Any]:
        """Return a signed POST policy, as `UploadGrant.fields`."""
        key_prefix = self._place.prefix + prefix
        conditions: list[Any] = [["content-length-range", 0, size_max]]
        if checksums:
            conditions.append(["starts-with", f"${CHECKSUM_FIELD}", ""])
        with self._store_errors(prefix):
            url, form = self._signer.form(key_prefix, expires=expires, conditions=conditions)
        if checksums:
            form[CHECKSUM_FIELD] = ""
        return {"url": url, "form": form, "key_prefix": key_prefix}

    def form_of(self, key: str, *, expires: datetime, size_max: int) -> dict[str, Any]:
        """Return a signed POST policy that names the one key it is good for."""
        full = self._place.prefix + key
        with self._store_errors(key):
            conditions = [["content-length-range", 0, size_max]]
            url, form = self._signer.form(full, expires=expires, conditions=conditions, exact=True)
        return {"url": url, "form": form, "key_prefix": folder_of(full)}

    def credential(
        self, method: GrantMethod, prefix: str, *, expires: datetime, checksums: bool, also: str = ""
    ) -> tuple[dict[str, Any], datetime]:
        """Return a credential as `UploadGrant.fields`, and its end, which may be another instant than asked for.

        Args:
            also: one object outside the prefix that may be put, too.

        Raises:
            StoreError: the service that makes them refuses or is away.
        """
        key_prefix = self._place.prefix + prefix
        made = self._credential_cache(method).credential(
            key_prefix, expires=expires, also=self._place.prefix + also if also else ""
        )
        fields = {
            "endpoint": self._signer.endpoint,
            "bucket": self._place.bucket,
            "region": self._signer.region,
            "path_style": self._signer.path_style,
            "access_key": made.access_key,
            "secret_key": made.secret_key,
            "session_token": made.session_token,
            "key_prefix": key_prefix,
            "checksum": checksums,
        }
        return fields, made.expires

    def revoke(self, method: GrantMethod, prefix: str) -> None:
        """Revoke what can be revoked of a prefix's newest credential."""
        if method is not GrantMethod.FORM:
            self._credential_cache(method).revoke(self._place.prefix + prefix)

    def _credential_cache(self, method: GrantMethod) -> CredentialCache:
        if method not in self._caches:
            self._caches[method] = CredentialCache(self._minter(method), self._clock)
        return self._caches[method]

    def _minter(self, method: GrantMethod) -> Minter:
        match method:
            case GrantMethod.R2:
                return R2Minter(self._place)
            case GrantMethod.B2:
                return B2Minter(self._place)
            case GrantMethod.STS:
                return StsMinter(self._place)
            case GrantMethod.FORM:
                raise ValueError("a form needs no credential")
            case _:
                assert_never(method)
