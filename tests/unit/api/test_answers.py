"""Every answer of the API and every page of `spotctl` over one fixed world, byte for byte.

With RECORD=1 in the environment the tests write what they find to `answers.json` and `pages.txt`.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from spotd.client.daemon import Daemon
from spotd.client.transport import DaemonRefused
from tests.unit.api import worlds
from tests.unit.api.command import spotctl
from tests.unit.api.place import Place, place

TARGETS = (
    "GET /v1/status", "GET /v1/jobs", "GET /v1/jobs?state=FAILED&limit=1", "GET /v1/jobs/llama-lora",
    "GET /v1/jobs/llama-lora/why", "GET /v1/jobs/llama-lora/gpus", "GET /v1/jobs/prep", "GET /v1/jobs/prep/why",
    "GET /v1/jobs/nobody", "GET /v1/jobs/6/why", "GET /v1/jobs/old/cost", "GET /v1/cost",
    "GET /v1/jobs/llama-lora/checkpoints", "GET /v1/jobs/llama-lora/files", "GET /v1/prices",
    "GET /v1/prices?gpu=h100&limit=1", "GET /v1/history", "GET /v1/providers", "GET /v1/doctor",
    "POST /v1/jobs/old/cancel", "POST /v1/jobs/llama-lora/retry", "POST /v1/jobs/prep/cancel",
    "POST /v1/jobs/old/retry",
)  # fmt: skip
STREAMS = ("/v1/events", "/v1/jobs/llama-lora/logs")
COMMANDS = (
    "ls", "show llama-lora", "show prep", "why llama-lora", "why prep", "cost", "cost old", "checkpoints llama-lora",
    "prices", "prices --explain", "history", "providers", "events", "logs llama-lora", "pull llama-lora",
    "budget llama-lora +20", "show nobody", "show 6k", "retry llama-lora", "cancel prep",
)  # fmt: skip


@pytest.fixture
def served() -> Iterator[Place]:
    """One job runs, one waits for its price, one failed, and a machine of no job was ended."""
    with place() as fixed:
        fixed.rig.host(worlds.attempt().id.job, 1).log("step 1\n")
        fixed.write_three_jobs()
        fixed.write(worlds.stray())
        yield fixed


def same_everywhere(text: str, served: Place) -> str:
    """The text without what differs from machine to machine."""
    text = text.replace(str(served.socket.parent), "/tmp/place")
    text = re.sub(r'"pid": \d+', '"pid": 1', text)
    text = re.sub(r'{"area": "daemon", "name": "sqlite".*?}, |\n.*daemon: sqlite(.*\n) .*', "", text)
    return re.sub(r"[\d.]+ of \d+ MB", "... MB", text)


def require_recorded(name: str, text: str) -> None:
    path = Path(__file__).with_name(name)
    if os.environ.get("RECORD"):
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8")


def test_the_answers_of_the_api_are_those_that_were_recorded(served: Place) -> None:
    transport = Daemon(served.socket)._transport
    found: dict[str, Any] = {}
    for target in TARGETS:
        method, path = target.split(" ")
        try:
            found[target] = transport.json(method, path)
        except DaemonRefused as refused:
            found[target] = [refused.code, str(refused), refused.hint]
    with served.deciding():
        found["POST /v1/reconcile"] = transport.json("POST", "/v1/reconcile")
    for path in STREAMS:
        found[path] = list(transport.lines(path, query={}))
    lines = ",\n".join(f"{json.dumps(target)}: {json.dumps(answer)}" for target, answer in found.items())
    require_recorded("answers.json", same_everywhere(f"{{\n{lines}\n}}\n", served))


def test_the_pages_of_spotctl_are_those_that_were_recorded(served: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = []
    for line in COMMANDS:
        result = spotctl(monkeypatch, served.socket, *line.split())
        texts.append(f"$ spotctl {line}\n{result.out}{result.err}exit code {result.code}\n")
    require_recorded("pages.txt", same_everywhere("\n".join(texts), served))
