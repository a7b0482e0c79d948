"""Upload forms and URLs that read one object, signed here (signature version 4) by a clock that is given.

boto3 can make both, but only by the clock of the process: the instant of a signature could not be chosen, and
a test of an expiry would have to wait for it. What is sent to the store at once, boto3 goes on signing itself.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Final
from urllib.parse import quote, urlsplit

from spotd_jobs.objects.s3_client import Keys, S3Place
from spotd_jobs.wire.client import sigv4

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
        signature = sigv4.signature(keys.secret, scope, policy)
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
        canonical = "\n".join(["GET", path, query, f"host:{host}\n", "host", sigv4.UNSIGNED])
        return f"{where}?{query}&X-Amz-Signature={sigv4.signature_of(keys.secret, stamp, scope, canonical)}"

    def _stamp(self) -> str:
        return self.clock().astimezone(UTC).strftime("%Y%m%dT%H%M%SZ")

    def _scope(self, stamp: str) -> str:
        return f"{stamp[:8]}/{self.region}/s3/aws4_request"
