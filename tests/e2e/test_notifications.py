"""A running daemon sends what it owes to a webhook, once, also over its own death, and its address is in no log."""

from __future__ import annotations

import json
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.harness import host, lab, until
from tests.e2e.test_prometheus import free_port

pytestmark = pytest.mark.e2e
TOKEN = "T0pSecretTokenOfTheAddress"


@contextmanager
def webhook() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    got: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            got.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
            self.send_response(204)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/{TOKEN}", got
    finally:
        server.shutdown()
        server.server_close()


def test_a_failure_arrives_once_and_its_figures_are_served(tmp_path: Path) -> None:
    port = free_port()
    settings = f'\n[metrics]\nlisten = "127.0.0.1:{port}"\n[notify.hook]\nurl = {{ env = "HOOK" }}\n'
    with webhook() as (url, got), lab(tmp_path / "lab", hosts=host("h1", 0.3) + settings) as found:
        found.environment["HOOK"] = url
        found.start()
        assert found.api.test_notifications(None)["channels"] == [{"channel": "hook", "ok": True, "error": ""}]
        found.submit("train", "exit 3", retry={"errors": 0})
        until(lambda: len(got) == 2, what="the notification of a failure")
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
            figures = answer.read().decode()
        assert 'spotd_jobs{state="FAILED"} 1.0' in figures
        assert 'spotd_notification_channel_up{channel="hook"} 1.0' in figures

        found.kill()
        found.start()
        found.submit("again", "exit 3", retry={"errors": 0})
        until(lambda: len(got) == 3, what="the notification of another failure")
        logs = "".join(log.read_text(encoding="utf-8") for log in found.folder.glob("spotd-*.log"))
    assert [one["title"] for one in got] == ["a test of spotd", "train has failed", "again has failed"]
    assert "exit code 3" in got[1]["text"]
    assert "notify.sent" in logs
    assert TOKEN not in logs
    assert TOKEN not in figures
