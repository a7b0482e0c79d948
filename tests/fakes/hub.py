"""A hub of models and datasets on loopback, written from its public documentation.

Large files (`lfs`) are served by a redirection to a signed URL of a second server, which takes no token; small ones at
once, with no ranges. The list of files comes in pages with a `Link` header. A private repository answers 401 without
the token; a gated one lists its files to everybody and serves them to the token alone.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, quote, unquote, urlsplit

TOKEN = "hf_canary-of-the-token"
LARGE = 4_096
PAGE = 3
SIGNATURE = "signature"


@dataclass
class FakeRepository:
    """The newest commit of a repository; `access` is public, gated or private."""

    files: dict[str, bytes]
    access: str = "public"

    @property
    def commit(self) -> str:
        names = b"".join(name.encode() + content for name, content in sorted(self.files.items()))
        return hashlib.sha1(names, usedforsecurity=False).hexdigest()


@dataclass
class FakeHub:
    """Repositories by kind and name, as in `models/org/name`. `asked` are paths, with who asked."""

    repositories: dict[str, FakeRepository] = field(default_factory=dict)
    asked: list[tuple[str, bool]] = field(default_factory=list)
    tokens_elsewhere: int = 0
    status: int = 0
    url: str = ""
    cdn: str = ""

    def answer(self, path: str, headers: Any) -> tuple[int, dict[str, str], bytes]:
        """Answer as the hub's own address."""
        is_owner = headers["Authorization"] == f"Bearer {TOKEN}"
        self.asked.append((path, is_owner))
        if self.status:
            return self.status, {}, b""
        parts = urlsplit(path)
        names = [unquote(name) for name in parts.path.strip("/").split("/")]
        if names[0] == "api":
            return self._api(names[1:], parse_qs(parts.query), is_owner)
        kind = "models"
        if names[0] == "datasets":
            kind, names = "datasets", names[1:]
        found = self.repositories.get(f"{kind}/{names[0]}/{names[1]}")
        if found is None or (found.access != "public" and not is_owner):
            return 401, {}, b""
        name = "/".join(names[4:])
        if names[2] != "resolve" or names[3] != found.commit or name not in found.files:
            return 404, {}, b""
        content = found.files[name]
        if len(content) < LARGE:
            return 200, {}, content
        query = f"?{SIGNATURE}=1" if found.access != "public" else ""
        return 302, {"Location": f"{self.cdn}/{kind}/{names[0]}/{names[1]}/{quote(name)}{query}"}, b""

    def _api(self, names: list[str], query: dict[str, list[str]], is_owner: bool) -> tuple[int, dict[str, str], bytes]:
        key = "/".join(names[:3])
        found = self.repositories.get(key)
        if found is None or (found.access == "private" and not is_owner):
            return 401, {}, b""
        if names[3] == "revision":
            known = names[4] in {"main", "v1", "refs/pr/1", found.commit}
            return (200, {}, json.dumps({"id": key, "sha": found.commit}).encode()) if known else (404, {}, b"")
        first = int(query.get("cursor", ["0"])[0])
        rows = [{"type": "directory", "oid": "0" * 40, "size": 0, "path": "sub"}, *self._rows(found)]
        more = {}
        if first + PAGE < len(rows):
            following = f"{self.url}/api/{key}/tree/{found.commit}?recursive=true&cursor={first + PAGE}"
            more = {"Link": f'<{following}>; rel="next"'}
        return 200, more, json.dumps(rows[first : first + PAGE]).encode()

    def _rows(self, found: FakeRepository) -> Iterator[dict[str, Any]]:
        for name, content in sorted(found.files.items()):
            git = hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()
            row: dict[str, Any] = {"type": "file", "oid": git, "size": len(content), "path": name}
            if len(content) >= LARGE:
                large = {"oid": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 134}
                row |= {"lfs": large, "oid": "1" * 40}
            yield row

    def answer_elsewhere(self, path: str, headers: Any) -> tuple[int, dict[str, str], bytes]:
        """Answer as the server that large files are on."""
        self.tokens_elsewhere += headers["Authorization"] is not None
        parts = urlsplit(path)
        kind, owner, name, *rest = unquote(parts.path).strip("/").split("/")
        found = self.repositories[f"{kind}/{owner}/{name}"]
        if found.access != "public" and SIGNATURE not in parts.query:
            return 403, {}, b""
        content = found.files["/".join(rest)]
        first, last = (int(figure) for figure in headers["Range"].removeprefix("bytes=").split("-"))
        return 206, {"Content-Range": f"bytes {first}-{last}/{len(content)}"}, content[first : last + 1]


@contextmanager
def running() -> Iterator[FakeHub]:
    """Serve a hub without repositories."""
    hub = FakeHub()
    own, elsewhere = _server(lambda: hub.answer), _server(lambda: hub.answer_elsewhere)
    hub.url, hub.cdn = (f"http://127.0.0.1:{one.server_port}" for one in (own, elsewhere))
    threads = [
        threading.Thread(target=one.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        for one in (own, elsewhere)
    ]
    for thread in threads:
        thread.start()
    try:
        yield hub
    finally:
        for one in (own, elsewhere):
            one.shutdown()
            one.server_close()
        for thread in threads:
            thread.join()


def _server(answers: Any) -> ThreadingHTTPServer:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def log_message(self, *words: Any) -> None:
            """Stay silent."""

        def do_GET(self) -> None:
            status, headers, body = answers()(self.path, self.headers)
            self.send_response(status)
            for name, value in {"Content-Length": str(len(body)), **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

    return ThreadingHTTPServer(("127.0.0.1", 0), Handler)
