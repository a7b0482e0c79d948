"""Writing to S3-compatible stores without any key of the store: a POST policy form, or a prefix-limited credential.

Both send the chunk from memory over a kept connection, with its SHA-256 where the store can verify it.
"""

from __future__ import annotations

import binascii
import hashlib
import hmac
import os
import time
from typing import Any
from urllib.parse import quote, urlsplit

from spotd_jobs.wire.client import web
from spotd_jobs.wire.client.sinks import Sink, SinkDenied, SinkError, require_name
from spotd_jobs.wire.client.web import CLOCK

# Signature version 4 with nothing but the standard library, for a credential that came in a grant.


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


_CHECKSUM_FIELD = "x-amz-checksum-sha256"
_ERROR_CODE_MAX = 60


class PostSink(Sink):
    """An S3 POST policy: one signed form that permits objects of a limited size below one prefix."""

    parallel = 4

    def __init__(self, fields: dict[str, Any]) -> None:
        self._url = str(fields["url"])
        self._form = {str(name): str(value) for name, value in fields["form"].items()}
        self._key_prefix = str(fields["key_prefix"])

    def put(self, name: str, data: bytes | memoryview, sha256: str | None = None) -> None:
        boundary = "spotd" + binascii.hexlify(os.urandom(16)).decode()
        head = "".join(
            '--%s\r\nContent-Disposition: form-data; name="%s"\r\n\r\n%s\r\n' % (boundary, field, value)
            for field, value in self._fields_of(name, data, sha256).items()
        )
        # The file part comes last: a store ignores every field after it.
        head += (
            '--%s\r\nContent-Disposition: form-data; name="file"; filename="data"\r\n'
            "Content-Type: application/octet-stream\r\n\r\n" % boundary
        )
        body: list[bytes | memoryview] = [head.encode(), data, ("\r\n--%s--\r\n" % boundary).encode()]
        headers = {"Content-Type": "multipart/form-data; boundary=" + boundary}
        _expect_success(_send("POST", self._url, headers, body))

    def _fields_of(self, name: str, data: bytes | memoryview, sha256: str | None) -> dict[str, str]:
        fields = dict(self._form, key=self._key_prefix + require_name(name))
        if _CHECKSUM_FIELD in {field.lower() for field in fields}:
            # The daemon puts the field into the form where the probe found that this store verifies it.
            fields = {field: value for field, value in fields.items() if field.lower() != _CHECKSUM_FIELD}
            digest = sha256 or hashlib.sha256(data).hexdigest()
            fields[_CHECKSUM_FIELD] = _base64(digest)
        return fields


class SigV4Sink(Sink):
    """A temporary credential that may only put objects below one prefix."""

    parallel = 4

    def __init__(self, fields: dict[str, Any]) -> None:
        self._credential = Credential(fields)
        self._key_prefix = str(fields["key_prefix"])
        self._checksum = bool(fields.get("checksum"))

    def put(self, name: str, data: bytes | memoryview, sha256: str | None = None) -> None:
        private = self._credential.is_private
        digest = sha256 or (hashlib.sha256(data).hexdigest() if self._checksum or not private else "")
        # Over plain HTTP nothing else protects the content, so it is signed; TLS makes that needless work.
        content = UNSIGNED if private else digest
        headers = {_CHECKSUM_FIELD: _base64(digest)} if self._checksum else {}
        key = self._key_prefix + require_name(name)
        url, headers = self._credential.request("PUT", key, CLOCK.now(), content, headers=headers)
        _expect_success(_send("PUT", url, headers, [data]))


def _base64(digest: str) -> str:
    return binascii.b2a_base64(bytes.fromhex(digest), newline=False).decode()


def _send(
    method: str, url: str, headers: dict[str, str], body: list[bytes | memoryview]
) -> tuple[int, dict[str, str], bytes]:
    try:
        return web.request(method, url, headers, body)
    except web.WebError as error:
        raise SinkError("the store does not answer: %s" % error) from None


def _expect_success(answer: tuple[int, dict[str, str], bytes]) -> None:
    status, _, content = answer
    if status in (200, 201, 204):
        return
    code = ""
    if b"<Code>" in content:
        raw = content.split(b"<Code>", 1)[1].split(b"</Code>", 1)[0]
        code = " " + raw.decode("ascii", "replace")[:_ERROR_CODE_MAX]
    kind = SinkDenied if status in (400, 401, 403, 404, 405, 411, 412, 413) else SinkError
    raise kind("the store answers HTTP %d%s" % (status, code))
