"""A real Prometheus scrapes a running daemon and evaluates our alerts: quiet at first, then one for each cause."""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.harness import REPO, host, lab, until

pytestmark = [
    pytest.mark.system,
    pytest.mark.skipif(shutil.which("prometheus") is None, reason="needs prometheus: apt-get install prometheus"),
]
ALERTS = REPO / "docs" / "monitoring" / "alerts.yml"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Prometheus:
    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}/api/v1"

    def ask(self, path: str) -> Any:
        try:
            with urllib.request.urlopen(f"{self.url}/{path}", timeout=5) as answer:  # noqa: S310 - our own address
                return json.load(answer)["data"]
        except OSError:
            return None

    def value(self, query: str) -> float | None:
        found = self.ask(f"query?query={query}")
        return float(found["result"][0]["value"][1]) if found and found["result"] else None

    def firing(self) -> set[str]:
        found = self.ask("alerts")
        return {one["labels"]["alertname"] for one in found["alerts"] if one["state"] == "firing"} if found else set()

    def rules(self) -> list[dict[str, Any]]:
        found = self.ask("rules")
        return [rule for group in found["groups"] for rule in group["rules"]] if found else []


@contextmanager
def prometheus(folder: Path, target: int) -> Iterator[Prometheus]:
    """Prometheus over this daemon, with our alerts as they are but for the time that each must hold."""
    folder.mkdir()
    (folder / "alerts.yml").write_text(re.sub(r"for: \d+m", "for: 1s", ALERTS.read_text(encoding="utf-8")))
    (folder / "prometheus.yml").write_text(
        f"""
global: {{scrape_interval: 500ms, evaluation_interval: 500ms}}
rule_files: [alerts.yml]
scrape_configs: [{{job_name: spotd, static_configs: [{{targets: ["127.0.0.1:{target}"]}}]}}]
"""
    )
    port = free_port()
    arguments = [f"--web.listen-address=127.0.0.1:{port}", f"--storage.tsdb.path={folder / 'data'}"]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            ["prometheus", f"--config.file={folder / 'prometheus.yml'}", *arguments], stdout=log, stderr=log
        )
    try:
        yield Prometheus(port)
    finally:
        process.kill()
        process.wait()


def test_alerts_are_quiet_while_all_is_well_and_fire_for_their_causes(tmp_path: Path) -> None:
    port = free_port()
    settings = f'\n[metrics]\nlisten = "127.0.0.1:{port}"\n[budget]\nday = 1000.0\n'
    with (
        lab(tmp_path / "lab", hosts=host("h1", 0.3) + host("h2", 0.3) + settings) as found,
        prometheus(tmp_path / "p", port) as seen,
    ):
        found.start()
        found.submit("train", "sleep 600", checkpoint={"every": "1h", "settle": "10s", "stop_grace": "10s"})
        until(lambda: seen.value("spotd_job_spent_usd"), what="the cost of a running job", within=60)
        assert seen.value("up") == 1
        assert seen.value('spotd_jobs{state="RUNNING"}') == 1
        until(lambda: all(rule["health"] == "ok" for rule in seen.rules()), what="all rules evaluated", within=30)
        assert len(seen.rules()) == 16
        # While it starts, providers have not answered yet: with so short a time to hold, that is an alert.
        until(lambda: not seen.firing(), what="the alerts of the start to end", within=30)
        quiet_since = seen.value("vector(time())") or 0.0
        until(lambda: (seen.value("vector(time())") or 0.0) > quiet_since + 2, what="four evaluations more", within=30)
        assert seen.firing() == set()

        found.submit("hangs", "sleep 600", checkpoint={"every": "1m", "settle": "10s", "stop_grace": "10s"})
        until(lambda: "SpotdCheckpointLate" in seen.firing(), what="the alert of a late checkpoint", within=60)
        assert seen.firing() == {"SpotdCheckpointLate"}
        found.kill()
        until(lambda: "SpotdDown" in seen.firing(), what="the alert of a dead daemon", within=60)
