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

from spotd_jobs.runner import web
from spotd_jobs.runner.clocks import CLOCK
from spotd_jobs.runner.sinks import Sink, SinkDenied, SinkError, checked_name

_CHECKSUM_FIELD = "x-amz-checksum-sha256"
_UNSIGNED = "UNSIGNED-PAYLOAD"
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
        fields = dict(self._form, key=self._key_prefix + checked_name(name))
        if _CHECKSUM_FIELD in {field.lower() for field in fields}:
            # The daemon puts the field into the form where the probe found that this store verifies it.
            fields = {field: value for field, value in fields.items() if field.lower() != _CHECKSUM_FIELD}
            digest = sha256 or hashlib.sha256(data).hexdigest()
            fields[_CHECKSUM_FIELD] = binascii.b2a_base64(bytes.fromhex(digest), newline=False).decode()
        return fields


class SigV4Sink(Sink):
    """A temporary credential that may only put objects below one prefix."""

    parallel = 4

    def __init__(self, fields: dict[str, Any]) -> None:
        self._endpoint = str(fields["endpoint"]).rstrip("/")
        self._bucket = str(fields["bucket"])
        self._region = str(fields["region"])
        self._path_style = bool(fields.get("path_style", True))
        self._access_key = str(fields["access_key"])
        self._secret_key = str(fields["secret_key"])
        self._session_token = str(fields.get("session_token") or "")
        self._key_prefix = str(fields["key_prefix"])

    def put(self, name: str, data: bytes | memoryview, sha256: str | None = None) -> None:
        place = urlsplit(self._endpoint)
        path = "/" + quote(self._key_prefix + checked_name(name), safe="/-_.~")
        host = place.netloc
        if self._path_style:
            path = "/" + quote(self._bucket, safe="-_.~") + path
        else:
            host = self._bucket + "." + host
        # Over plain HTTP nothing else protects the content, so it is signed; TLS makes that needless work.
        content = _UNSIGNED if place.scheme == "https" else sha256 or hashlib.sha256(data).hexdigest()
        headers = self._signed("PUT", host, path, content)
        _expect_success(_send("PUT", "%s://%s%s" % (place.scheme, host, path), headers, [data]))

    def _signed(self, method: str, host: str, path: str, content: str) -> dict[str, str]:
        moment = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(CLOCK.now()))
        headers = {"host": host, "x-amz-content-sha256": content, "x-amz-date": moment}
        if self._session_token:
            headers["x-amz-security-token"] = self._session_token
        names = ";".join(sorted(headers))
        lines = "".join("%s:%s\n" % (name, headers[name]) for name in sorted(headers))
        canonical = "\n".join([method, path, "", lines, names, content])
        scope = "/".join([moment[:8], self._region, "s3", "aws4_request"])
        to_sign = "\n".join(["AWS4-HMAC-SHA256", moment, scope, hashlib.sha256(canonical.encode()).hexdigest()])
        key = ("AWS4" + self._secret_key).encode()
        for part in scope.split("/"):
            key = hmac.new(key, part.encode(), hashlib.sha256).digest()
        signature = hmac.new(key, to_sign.encode(), hashlib.sha256).hexdigest()
        headers["authorization"] = "AWS4-HMAC-SHA256 Credential=%s/%s, SignedHeaders=%s, Signature=%s" % (
            self._access_key,
            scope,
            names,
            signature,
        )
        del headers["host"]  # http.client writes it, from the same URL
        return headers


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
