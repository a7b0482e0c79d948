"""Writing to S3-compatible stores without any key of the store: a POST policy form, or a prefix-limited credential.

Both send the chunk from memory over a kept connection, with its SHA-256 where the store can verify it.
"""

from __future__ import annotations

import binascii
import hashlib
import os
from typing import Any

from spotd_jobs.wire.client import web
from spotd_jobs.wire.client.clocks import CLOCK
from spotd_jobs.wire.client.sigv4 import UNSIGNED, Credential
from spotd_jobs.wire.client.sinks import Sink, SinkDenied, SinkError, require_name

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
