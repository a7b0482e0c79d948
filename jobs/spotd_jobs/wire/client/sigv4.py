"""Signature version 4 with nothing but the standard library, for a credential that came in a grant."""

from __future__ import annotations

import hashlib
import hmac
import time
from typing import Any
from urllib.parse import quote, urlsplit

UNSIGNED = "UNSIGNED-PAYLOAD"


class Credential:
    """A credential of a bucket, and where that bucket is. Its repr shows none of it."""

    def __init__(self, fields: dict[str, Any]) -> None:
        self.endpoint = str(fields["endpoint"]).rstrip("/")
        self.bucket = str(fields["bucket"])
        self.region = str(fields["region"])
        self.path_style = bool(fields.get("path_style", True))
        self.access_key = str(fields["access_key"])
        self._secret_key = str(fields["secret_key"])
        self.session_token = str(fields.get("session_token") or "")

    @property
    def is_private(self) -> bool:
        """Whether the way to the store protects what is sent."""
        return self.endpoint.startswith("https://")

    def request(
        self,
        method: str,
        key: str,
        now: float,
        content_sha256: str = UNSIGNED,
        query: dict[str, str] | None = None,
        headers: dict[str, str] | None = None,
    ) -> tuple[str, dict[str, str]]:
        """Return the URL and the headers of a request that the store accepts, with every header in `headers` signed."""
        place = urlsplit(self.endpoint)
        host, path = place.netloc, "/" + quote(key, safe="/-_.~")
        if self.path_style:
            path = "/" + quote(self.bucket, safe="-_.~") + path
        else:
            host = self.bucket + "." + host
        moment = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(now))
        signed = dict(headers or {}, host=host)
        signed.update({"x-amz-content-sha256": content_sha256, "x-amz-date": moment})
        if self.session_token:
            signed["x-amz-security-token"] = self.session_token
        asked = "&".join(
            "%s=%s" % (quote(name, safe="-_.~"), quote(value, safe="-_.~"))
            for name, value in sorted((query or {}).items())
        )
        names = ";".join(sorted(signed))
        lines = "".join("%s:%s\n" % (name, signed[name].strip()) for name in sorted(signed))
        canonical = "\n".join([method, path, asked, lines, names, content_sha256])
        scope = "/".join([moment[:8], self.region, "s3", "aws4_request"])
        signed["authorization"] = "AWS4-HMAC-SHA256 Credential=%s/%s, SignedHeaders=%s, Signature=%s" % (
            self.access_key,
            scope,
            names,
            signature_of(self._secret_key, moment, scope, canonical),
        )
        del signed["host"]  # http.client writes it, from the same URL
        return "%s://%s%s%s" % (place.scheme, host, path, "?" + asked if asked else ""), signed


def signature_of(secret_key: str, moment: str, scope: str, canonical: str) -> str:
    """Return the signature of a request in its canonical form."""
    to_sign = "\n".join(["AWS4-HMAC-SHA256", moment, scope, hashlib.sha256(canonical.encode()).hexdigest()])
    return signature(secret_key, scope, to_sign)


def signature(secret_key: str, scope: str, text: str) -> str:
    """Return the signature of a text by the key of that day, region and service."""
    key = ("AWS4" + secret_key).encode()
    for part in scope.split("/"):
        key = hmac.new(key, part.encode(), hashlib.sha256).digest()
    return hmac.new(key, text.encode(), hashlib.sha256).hexdigest()
