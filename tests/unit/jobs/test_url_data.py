"""Data that a URL serves: measured by the daemon, read by a host in spans, and believed by its hash alone."""

from __future__ import annotations

import hashlib
import random
import shutil
import ssl
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from spotd.daemon.remote_data import UrlRefused, measure_url, require_public
from spotd_jobs.runner import elsewhere as runner_data
from spotd_jobs.runner.data import DataRun, DataUnusable, fetch_data
from spotd_jobs.runner.elsewhere import UrlRun, data_run
from spotd_jobs.runner.restore import Cancelled
from spotd_jobs.wire.client import web
from spotd_jobs.wire.client.sinks import DiskFull
from tests.cases import every

CONTENT = random.Random(11).randbytes(10_500)
SPAN = 1000
YEAR_9999 = "Fri, 31 Dec 9999 23:59:59 GMT"


class Server:
    """Serves one content at /file in spans; /moved leads there, the other paths fail as they are named."""

    def __init__(self) -> None:
        self.content = CONTENT
        self.asked: list[str] = []
        self.cut_at = 10**9
        self.one_at_a_time = threading.Lock()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True

            def log_message(self, *words: Any) -> None:
                """Stay silent."""

            def date_time_string(self, timestamp: float | None = None) -> str:
                return YEAR_9999

            def do_GET(self) -> None:
                outer.answer(self)

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.scheme = "http"

    def url(self, path: str = "file") -> str:
        return f"{self.scheme}://localhost:{self.http.server_port}/{path}"

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        span = request.headers["Range"] or ""
        with self.one_at_a_time:
            self.asked.append(span)
            is_cut = len(self.asked) == self.cut_at
        path = request.path.strip("/")
        if path.startswith("moved"):
            target = {"moved": "/file", "moved-in-circles": request.path, "moved-to-http": "http://localhost/file"}
            self.send(request, 302, b"", {"Location": target[path]})
        elif path.isdecimal():
            self.send(request, int(path), b"", {})
        elif path == "whole":
            self.send(request, 200, self.content, {})
        else:
            first, last = (int(figure) for figure in span.removeprefix("bytes=").split("-"))
            stated = f"bytes {first}-{last}/{len(self.content)}"
            self.send(request, 206, self.content[first : last + 1], {"Content-Range": stated}, is_cut=is_cut)

    def send(
        self,
        request: BaseHTTPRequestHandler,
        status: int,
        body: bytes,
        headers: dict[str, str],
        *,
        is_cut: bool = False,
    ) -> None:
        request.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            request.send_header(name, value)
        request.end_headers()
        request.wfile.write(body[: len(body) // 2] if is_cut else body)
        if is_cut:
            request.close_connection = True


@contextmanager
def serving(found: Server) -> Iterator[Server]:
    thread = threading.Thread(target=found.http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield found
    finally:
        found.http.shutdown()
        found.http.server_close()
        thread.join()


@pytest.fixture
def server() -> Iterator[Server]:
    with serving(Server()) as found:
        yield found


class Host:
    def __init__(self, folder: Path) -> None:
        self.work = folder / "work"
        self.work.mkdir()
        self.folder = folder
        self.said: list[str] = []

    @property
    def file(self) -> Path:
        return self.work / "data" / "file.bin"

    def run(
        self,
        url: str,
        *,
        sha256: str = hashlib.sha256(CONTENT).hexdigest(),
        size: int = len(CONTENT),
        stopped: Callable[[], bool] = lambda: False,
        kind: Callable[..., DataRun] = UrlRun,
    ) -> DataRun:
        grant = {"source": url, "path": "data/file.bin", "sha256": sha256, "bytes": size}
        rest = (str(self.folder), str(self.work), 2, lambda _: stopped(), stopped, lambda: True, self.said.append)
        run = kind(lambda: [grant], 0, *rest)
        fetch_data([run], str(self.folder))
        run.put_in_place()
        return run


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Host:
    monkeypatch.setattr(runner_data, "CHUNK_BYTES", SPAN)
    return Host(tmp_path)


@pytest.mark.parametrize("path", ["file", "moved"])
def test_a_file_arrives_in_spans(host: Host, server: Server, path: str) -> None:
    before = web.CLOCK._offset_s
    run = host.run(server.url(path))
    assert host.file.read_bytes() == CONTENT
    assert run.done == run.total == len(CONTENT)
    assert len(set(server.asked)) == 11
    assert web.CLOCK._offset_s == before  # the clock of another server decides nothing about a lease


def test_a_cut_answer_is_asked_for_again(host: Host, server: Server) -> None:
    server.cut_at = 4
    host.run(server.url())
    assert host.file.read_bytes() == CONTENT
    assert len(server.asked) == 12


def cut_after(host: Host, server: Server, spans: int) -> None:
    """Begin a download that ends after so many spans."""
    with pytest.raises(Cancelled):
        host.run(server.url(), stopped=lambda: len(server.asked) >= spans)
    assert not host.file.exists()


def test_a_download_that_was_cut_goes_on(host: Host, server: Server) -> None:
    cut_after(host, server, 6)
    server.asked.clear()
    host.run(server.url())
    assert host.file.read_bytes() == CONTENT
    assert len(server.asked) <= 11 - 5


def test_what_was_damaged_on_the_disk_meanwhile_is_read_again(host: Host, server: Server) -> None:
    cut_after(host, server, 6)
    (grown,) = host.folder.glob("datasets/*/tree")
    content = bytearray(grown.read_bytes())
    content[10] ^= 1
    grown.write_bytes(content)
    host.run(server.url())
    assert host.file.read_bytes() == CONTENT


def test_a_machine_that_starts_again_has_it_already(host: Host, server: Server) -> None:
    host.run(server.url())
    server.asked.clear()
    assert host.run(server.url()).is_kept
    assert server.asked == []
    host.file.write_bytes(b"the job wrote over it")
    host.run(server.url())
    assert host.file.read_bytes() == CONTENT


@pytest.mark.parametrize("changed", [CONTENT[:-1] + b"?", CONTENT + b"?", CONTENT[:-1], b""])
def test_another_content_than_was_stated_is_refused(host: Host, server: Server, changed: bytes) -> None:
    server.content = changed
    with pytest.raises(DataUnusable):
        host.run(server.url())
    assert not host.file.exists()


@pytest.mark.parametrize("path", ["404", "410", "403", "whole", "416"])
def test_a_server_that_refuses_ends_the_attempt(host: Host, server: Server, path: str) -> None:
    with pytest.raises(DataUnusable, match=f"{path}: "):
        host.run(server.url(path))


def test_a_disk_that_is_too_small_is_noticed_first(host: Host, server: Server) -> None:
    with pytest.raises(DiskFull):
        host.run(server.url(), size=10**18)
    assert server.asked == []


def test_the_size_is_known_from_one_byte(server: Server) -> None:
    asked: list[str] = []
    assert measure_url(server.url("moved"), require=asked.append) == len(CONTENT)
    assert asked == [server.url("moved"), server.url("file")]
    assert server.asked == ["bytes=0-0"] * 2


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("404", "is not there"),
        ("403", "not served to everybody"),
        ("500", "serves no size"),
        ("whole", "not served in parts"),
        ("moved-in-circles", "redirects too often"),
    ],
)
def test_a_url_that_serves_nothing_is_refused_with_a_way_out(server: Server, path: str, message: str) -> None:
    with pytest.raises(UrlRefused, match=message) as refused:
        measure_url(server.url(path), require=lambda url: None)
    assert refused.value.hint


@every(
    "url",
    [
        "https://127.0.0.1/x",
        "https://localhost/x",
        "https://[::1]/x",
        "https://10.1.2.3/x",
        "https://169.254.169.254/latest",
        "https://[::ffff:10.0.0.1]/x",
        "https://0/x",
        "http://1.1.1.1/x",
        "file:///etc/passwd",
    ],
)
def test_nothing_private_is_asked(url: str) -> None:
    with pytest.raises(UrlRefused):
        require_public(url)


def test_a_redirect_is_judged_as_the_url_itself(server: Server) -> None:
    def require(url: str) -> None:
        if url.endswith("/file"):
            raise UrlRefused("leads to a private address")

    with pytest.raises(UrlRefused, match="private"):
        measure_url(server.url("moved"), require=require)
    assert len(server.asked) == 1


@pytest.mark.process
@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificate of this test")
def test_over_https_no_redirect_leads_away_from_it(host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    made = "openssl req -x509 -newkey rsa:2048 -nodes -subj /CN=localhost -days 2 -addext subjectAltName=DNS:localhost"
    subprocess.run([*made.split(), "-keyout", key, "-out", cert], check=True, capture_output=True, timeout=60)
    monkeypatch.setenv("SSL_CERT_FILE", str(cert))
    found = Server()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)
    found.http.socket = context.wrap_socket(found.http.socket, server_side=True)
    found.scheme = "https"
    with serving(found):
        host.run(found.url(), kind=data_run)
        assert host.file.read_bytes() == CONTENT
        with pytest.raises(web.WebError, match="another protocol"):
            web.read(found.url("moved-to-http"), 100)
        web.drop_connections()
