"""A small S3 server that means what it says, and the three services that make temporary credentials for one.

It verifies every signature itself, from the published rules and not with the code under test, and decides each
request by what the key that signed it may do: everything for the account's own keys; for a Cloudflare R2 token what
its claims say; for a Backblaze B2 application key its capabilities and name prefix; for an STS session its policy. It
has no upload forms, as R2 and B2 have none.
"""

from __future__ import annotations

import base64
import fnmatch
import hashlib
import hmac
import json
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qsl, quote, unquote, urlsplit
from xml.sax.saxutils import escape

SKEW_MAX = timedelta(minutes=15)
BUCKET = "ckpt"
KEY = "account-key"
SECRET = "canary-of-the-account-secret"
ACCOUNT = "0123456789abcdef"
_ACTIONS = {"PUT": "PutObject", "GET": "GetObject", "HEAD": "GetObject", "DELETE": "DeleteObject"}
_B2_NEEDS = {"PutObject": "writeFiles", "GetObject": "readFiles", "DeleteObject": "deleteFiles", "ListBucket": "list"}


class Refused(Exception):
    """HTTP status and code of an answer."""

    def __init__(self, status: int, code: str) -> None:
        super().__init__(code)
        self.status = status
        self.code = code


@dataclass
class Key:
    """A secret, and what it may do: `(action, key) -> whether`."""

    secret: str
    may: Callable[[str, str], bool]
    token: str = ""
    expires: datetime | None = None


@dataclass
class Honest:
    """The server's whole state."""

    url: str = ""
    objects: dict[str, bytes] = field(default_factory=dict)
    keys: dict[str, Key] = field(default_factory=lambda: {KEY: Key(SECRET, lambda _action, _key: True)})
    made: list[dict[str, Any]] = field(default_factory=list)
    """Every request for a credential, as it came."""
    lies: set[str] = field(default_factory=set)
    """What it does not enforce, for a test that wants it refused: `prefix`, `expiry`, `signature`."""

    def now(self) -> datetime:
        return datetime.now(UTC)


def _hmac(key: bytes, text: str) -> bytes:
    return hmac.new(key, text.encode(), hashlib.sha256).digest()


def _signature(secret: str, scope: list[str], stamp: str, canonical: str) -> str:
    to_sign = "\n".join(["AWS4-HMAC-SHA256", stamp, "/".join(scope), hashlib.sha256(canonical.encode()).hexdigest()])
    key = ("AWS4" + secret).encode()
    for part in scope:
        key = _hmac(key, part)
    return _hmac(key, to_sign).hex()


def _several(found: str | list[str]) -> list[str]:
    return [found] if isinstance(found, str) else found


def _query_of(pairs: list[tuple[str, str]]) -> str:
    return "&".join(f"{quote(k, safe='-_.~')}={quote(v, safe='-_.~')}" for k, v in sorted(pairs))


class Handler(BaseHTTPRequestHandler):
    """One request: who asks, may they, and then what is asked."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    honest: Honest

    def log_message(self, *args: Any) -> None:
        """Nothing is printed."""

    def _answer(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _serve(self) -> None:
        self.sent = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        place = urlsplit(self.path)
        self.pairs = parse_qsl(place.query, keep_blank_values=True)
        try:
            if place.path.startswith("/b2api/v4/"):
                self._b2(place.path.rpartition("/")[2])
            elif self.command == "POST" and place.path == "/":
                self._sts()
            else:
                self._s3(unquote(place.path), dict(self.pairs))
        except Refused as refused:
            code = f"<Error><Code>{refused.code}</Code></Error>"
            self._answer(
                refused.status, json.dumps({"code": refused.code}).encode() if "b2api" in self.path else code.encode()
            )

    def do_GET(self) -> None:
        self._serve()

    def do_PUT(self) -> None:
        self._serve()

    def do_HEAD(self) -> None:
        self._serve()

    def do_DELETE(self) -> None:
        self._serve()

    def do_POST(self) -> None:
        self._serve()

    # --- who asks ---------------------------------------------------------------------------------------------------

    def _signer(self) -> Key:
        """The key that signed this very request, now."""
        query = dict(self.pairs)
        if "X-Amz-Signature" in query:
            names, given, stamp = query["X-Amz-SignedHeaders"], query["X-Amz-Signature"], query["X-Amz-Date"]
            access, *scope = query["X-Amz-Credential"].split("/")
            content, token = "UNSIGNED-PAYLOAD", query.get("X-Amz-Security-Token", "")
            pairs = [pair for pair in self.pairs if pair[0] != "X-Amz-Signature"]
            until = _instant(stamp) + timedelta(seconds=int(query["X-Amz-Expires"]))
        else:
            kind, _, rest = (self.headers.get("Authorization") or "").partition(" ")
            if kind != "AWS4-HMAC-SHA256":
                raise Refused(403, "AccessDenied")
            parts = dict(part.strip().split("=", 1) for part in rest.split(","))
            names, given, stamp = parts["SignedHeaders"], parts["Signature"], self.headers["x-amz-date"]
            access, *scope = parts["Credential"].split("/")
            content = self.headers.get("x-amz-content-sha256") or hashlib.sha256(self.sent).hexdigest()
            token, pairs, until = self.headers.get("x-amz-security-token") or "", self.pairs, _instant(stamp) + SKEW_MAX
        if content not in ("UNSIGNED-PAYLOAD", hashlib.sha256(self.sent).hexdigest()):
            raise Refused(400, "XAmzContentSHA256Mismatch")
        if not _instant(stamp) - SKEW_MAX <= self.honest.now() <= until and "expiry" not in self.honest.lies:
            raise Refused(403, "RequestTimeTooSkewed")
        if "host" not in names.split(";") or scope[0] != stamp[:8]:
            raise Refused(403, "AccessDenied")
        key = self._key(access, token)
        headers = "".join(f"{name}:{' '.join((self.headers[name] or '').split())}\n" for name in names.split(";"))
        path = urlsplit(self.path).path
        canonical = "\n".join([self.command, path, _query_of(pairs), headers, names, content])
        right = _signature(key.secret, scope, stamp, canonical)
        if not hmac.compare_digest(right, given) and "signature" not in self.honest.lies:
            raise Refused(403, "SignatureDoesNotMatch")
        if key.expires is not None and key.expires <= self.honest.now() and "expiry" not in self.honest.lies:
            raise Refused(403, "ExpiredToken")
        return key

    def _key(self, access: str, token: str) -> Key:
        if token and (jwt := base64.b64decode(token)).startswith(b"jwt/"):
            return self._r2_key(access, jwt[4:].decode())
        key = self.honest.keys.get(access)
        if key is None or key.token != token:
            raise Refused(403, "InvalidAccessKeyId")
        return key

    def _r2_key(self, access: str, jwt: str) -> Key:
        """A token that the account's key signed, and what its claims allow."""
        signed, _, signature = jwt.rpartition(".")
        parent = self.honest.keys.get(access)
        if parent is None or not hmac.compare_digest(_unpadded(signature), _hmac(parent.secret.encode(), signed)):
            raise Refused(403, "InvalidToken")
        header, claims = (json.loads(_unpadded(part)) for part in signed.split("."))
        if header != {"alg": "HS256", "typ": "JWT"} or claims["iss"] != access or claims["sub"] != ACCOUNT:
            raise Refused(403, "InvalidToken")
        if claims["aud"] != self.headers["Host"] or claims["bucket"] != BUCKET:
            raise Refused(403, "InvalidToken")

        def may(action: str, key: str) -> bool:
            paths = claims["paths"]
            inside = key in paths["objectPaths"] or any(key.startswith(prefix) for prefix in paths["prefixPaths"])
            return action in claims["actions"] and (inside or "prefix" in self.honest.lies)

        secret = hashlib.sha256(jwt.encode()).hexdigest()
        return Key(secret, may, expires=datetime.fromtimestamp(claims["exp"], UTC))

    # --- the bucket -------------------------------------------------------------------------------------------------

    def _s3(self, path: str, query: dict[str, str]) -> None:
        _, bucket, key = [*path.split("/", 2), ""][:3]
        signer = self._signer()
        if bucket != BUCKET:
            raise Refused(404, "NoSuchBucket")
        objects = self.honest.objects
        if self.command == "POST" and "delete" in query:
            self._delete_many(signer)
            return
        if self.command == "POST":
            raise Refused(501, "NotImplemented")
        action = "ListBucket" if not key and self.command == "GET" else _ACTIONS[self.command]
        if not signer.may(action, query.get("prefix", "") if action == "ListBucket" else key):
            raise Refused(403, "AccessDenied")
        if action == "ListBucket":
            self._list(query.get("prefix", ""))
        elif self.command == "PUT":
            checksum = self.headers.get("x-amz-checksum-sha256")
            if checksum and base64.b64decode(checksum) != hashlib.sha256(self.sent).digest():
                raise Refused(400, "BadDigest")
            objects[key] = self.sent
            self._answer(200, ETag=f'"{hashlib.md5(self.sent, usedforsecurity=False).hexdigest()}"')
        elif self.command == "DELETE":
            objects.pop(key, None)
            self._answer(204)
        elif key not in objects:
            raise Refused(404, "NoSuchKey")
        else:
            self._give(objects[key])

    def _give(self, content: bytes) -> None:
        digest = hashlib.sha256(content)
        asked = self.headers.get("Range")
        status, more = 200, {}
        if asked:
            first, _, last = asked.removeprefix("bytes=").partition("-")
            if int(first) >= len(content):
                raise Refused(416, "InvalidRange")
            part = content[int(first) : int(last) + 1]
            status, more = 206, {"Content_Range": f"bytes {first}-{int(first) + len(part) - 1}/{len(content)}"}
            content = part
        self._answer(
            status,
            content,
            ETag='"e"',
            Last_Modified="Thu, 01 Jan 2026 00:00:00 GMT",
            x_amz_checksum_sha256=base64.b64encode(digest.digest()).decode(),
            **more,
        )

    def _delete_many(self, signer: Key) -> None:
        for part in self.sent.decode().split("<Key>")[1:]:
            key = part.partition("</Key>")[0]
            if not signer.may("DeleteObject", key):
                raise Refused(403, "AccessDenied")
            self.honest.objects.pop(key, None)
        self._answer(200, b"<DeleteResult/>")

    def _list(self, prefix: str) -> None:
        found = "".join(
            f"<Contents><Key>{escape(key)}</Key><Size>{len(content)}</Size><ETag>e</ETag>"
            "<LastModified>2026-01-01T00:00:00.000Z</LastModified></Contents>"
            for key, content in sorted(self.honest.objects.items())
            if key.startswith(prefix)
        )
        self._answer(200, f"<ListBucketResult>{found}</ListBucketResult>".encode())

    # --- who makes credentials --------------------------------------------------------------------------------------

    def _b2(self, name: str) -> None:
        sent = json.loads(self.sent or b"{}")
        given = self.headers.get("Authorization") or ""
        if name == "b2_authorize_account":
            key, _, secret = base64.b64decode(given.removeprefix("Basic ")).decode().partition(":")
            if key not in self.honest.keys or self.honest.keys[key].secret != secret:
                raise Refused(401, "unauthorized")
            self._json(
                accountId=ACCOUNT,
                authorizationToken="session-of-the-account",
                apiInfo={"storageApi": {"apiUrl": self.honest.url}},
            )
            return
        if given != "session-of-the-account":
            raise Refused(401, "bad_auth_token")
        if name == "b2_list_buckets":
            named = sent["bucketName"] == BUCKET
            self._json(buckets=[{"bucketId": "b-1", "bucketName": BUCKET}] if named else [])
        elif name == "b2_create_key":
            self.honest.made.append(sent)
            self._json(**self._b2_key(sent))
        elif name == "b2_delete_key":
            del self.honest.keys[sent["applicationKeyId"]]
            self._json(applicationKeyId=sent["applicationKeyId"])

    def _b2_key(self, sent: dict[str, Any]) -> dict[str, str]:
        if sent["bucketIds"] != ["b-1"] or sent["accountId"] != ACCOUNT:
            raise Refused(400, "bad_request")

        def may(action: str, key: str) -> bool:
            inside = key.startswith(sent["namePrefix"]) or "prefix" in self.honest.lies
            return _B2_NEEDS[action] in sent["capabilities"] and inside

        access, secret = f"00{uuid.uuid4().hex[:20]}", uuid.uuid4().hex
        expires = self.honest.now() + timedelta(seconds=sent["validDurationInSeconds"])
        self.honest.keys[access] = Key(secret, may, expires=expires)
        return {"applicationKeyId": access, "applicationKey": secret}

    def _json(self, **document: Any) -> None:
        self._answer(200, json.dumps(document).encode(), Content_Type="application/json")

    def _sts(self) -> None:
        """AssumeRole and GetFederationToken; without a policy a session may do nothing."""
        self._signer()
        asked = dict(parse_qsl(self.sent.decode()))
        if asked["Action"] not in ("AssumeRole", "GetFederationToken") or not int(asked["DurationSeconds"]) >= 900:
            raise Refused(400, "ValidationError")
        self.honest.made.append(asked)
        statements = json.loads(asked.get("Policy") or '{"Statement": []}')["Statement"]

        def may(action: str, key: str) -> bool:
            wanted = f"arn:aws:s3:::{BUCKET}/{key}"
            return any(
                f"s3:{action}" in one["Action"]
                and (
                    "prefix" in self.honest.lies
                    or any(fnmatch.fnmatchcase(wanted, r) for r in _several(one["Resource"]))
                )
                for one in statements
                if one["Effect"] == "Allow"
            )

        access, secret, token = f"ASIA{uuid.uuid4().hex[:16]}", uuid.uuid4().hex, uuid.uuid4().hex
        expires = self.honest.now() + timedelta(seconds=int(asked["DurationSeconds"]))
        self.honest.keys[access] = Key(secret, may, token, expires)
        name = asked["Action"]
        self._answer(
            200,
            f"<{name}Response xmlns='https://sts.amazonaws.com/doc/2011-06-15/'><{name}Result><Credentials>"
            f"<AccessKeyId>{access}</AccessKeyId><SecretAccessKey>{secret}</SecretAccessKey>"
            f"<SessionToken>{token}</SessionToken><Expiration>{expires:%Y-%m-%dT%H:%M:%SZ}</Expiration>"
            f"</Credentials></{name}Result></{name}Response>".encode(),
        )


def _unpadded(text: str) -> bytes:
    return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))


def _instant(stamp: str) -> datetime:
    return datetime.strptime(stamp, "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC)


@contextmanager
def running() -> Iterator[Honest]:
    """A server, until the block ends."""
    honest = Honest()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Bound", (Handler,), {"honest": honest}))
    server.daemon_threads = True
    honest.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield honest
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
