from __future__ import annotations

import hashlib
import http.client
import json
import socket
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest

from spotd.api.edge import QUICK_S
from spotd.api.responses import Ambiguous, ApiRefusal, ApiUnavailable, Invalid, NotFound, OverBudget, StateConflict
from spotd.daemon.commits import Database
from spotd.daemon.object_keys import code_key
from spotd_jobs.spec.problems import Problem
from tests.cases import every
from tests.unit.api import made_responses, worlds
from tests.unit.api.place import Place
from tests.unit.api.place import place as served


class _Unix(http.client.HTTPConnection):
    def __init__(self, path: Path) -> None:
        super().__init__("spotd", timeout=10)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(10)
        self.sock.connect(str(self._path))


@pytest.fixture(scope="module")
def _running() -> Iterator[Place]:
    with served() as running:
        yield running


@pytest.fixture
def place(_running: Place) -> Place:
    """A daemon that holds two jobs."""
    _running.reset()
    _running.write(worlds.running(), worlds.waiting())
    return _running


def ask(place: Place, method: str, target: str, body: Any = None) -> tuple[int, dict[str, Any]]:
    connection = _Unix(place.socket)
    data = body if isinstance(body, bytes) or body is None else json.dumps(body)
    try:
        connection.request(method, target, body=data)
        response = connection.getresponse()
        return response.status, json.loads(response.read())
    finally:
        connection.close()


def test_every_answer_carries_the_schema_and_the_daemons_time(place: Place) -> None:
    for target in ("/v1/status", "/v1/jobs", "/v1/jobs/llama-lora", "/v1/cost", "/v1/providers", "/v1/doctor"):
        status, body = ask(place, "GET", target)
        assert (status, body["schema"], body["now"]) == (200, 1, "2026-11-21T10:00:00.000Z")


@pytest.mark.parametrize(
    ("refusal", "status", "code"),
    [
        (NotFound("no"), 404, "not_found"),
        (Ambiguous("two"), 409, "ambiguous"),
        (Invalid("bad"), 422, "invalid"),
        (StateConflict("ended"), 409, "conflict"),
        (OverBudget("spent"), 402, "budget"),
        (ApiUnavailable("later"), 503, "unavailable"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, ApiRefusal) else None,
)
def test_each_refusal_has_its_status_and_code(place: Place, refusal: ApiRefusal, status: int, code: str) -> None:
    place.answers("jobs.page", refusal)
    found, body = ask(place, "GET", "/v1/jobs")
    assert (found, body["error"]["code"], body["error"]["message"]) == (status, code, refusal.message)


def test_a_refusal_carries_its_hint_and_every_problem(place: Place) -> None:
    problem = Problem(key="a.b", message="m", hint="h")
    place.answers("jobs.page", Invalid("bad", hint="look", problems=(problem,)))
    _, body = ask(place, "GET", "/v1/jobs")
    assert body["error"]["hint"] == "look"
    assert body["error"]["problems"] == [{"key": "a.b", "message": "m", "hint": "h"}]


def test_a_defect_is_logged_and_answered_without_its_details(place: Place) -> None:
    place.answers("jobs.page", RuntimeError("the password is hunter2"))
    status, body = ask(place, "GET", "/v1/jobs")
    assert (status, body["error"]["code"]) == (500, "internal")
    assert "hunter2" not in json.dumps(body)
    assert [(route, str(exc)) for route, exc in place.failures] == [("/v1/jobs", "the password is hunter2")]


def test_a_number_that_json_cannot_hold_is_a_defect_and_not_an_answer(place: Place) -> None:
    row = made_responses.job(spent_usd=float("nan"))
    place.answers("jobs.page", {"jobs": [row], "more": False, "paused": ""})
    status, body = ask(place, "GET", "/v1/jobs")
    assert (status, body["error"]["code"]) == (500, "internal")


def store_down(monkeypatch: pytest.MonkeyPatch, sentence: str) -> None:
    monkeypatch.setattr(Database, "last_error", sentence)


def test_a_store_that_is_down_is_answered_at_once(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    store_down(monkeypatch, "the state database does not answer")
    status, body = ask(place, "GET", "/v1/jobs")
    assert (status, body["error"]["code"]) == (503, "unavailable")
    assert body["error"]["message"] == "the state database does not answer"


def test_a_store_that_goes_down_during_a_call_is_answered_and_not_waited_for(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def hang(_: object) -> None:
        await anyio.sleep_forever()

    place.replace("jobs.page", hang)
    connection = _Unix(place.socket)
    connection.request("GET", "/v1/jobs")
    began = time.monotonic()
    store_down(monkeypatch, "the disk is gone")
    response = connection.getresponse()
    assert response.status == 503
    # The aim is a second; the rest is for a busy machine. Without the watch it would be the limit of a call.
    assert time.monotonic() - began < 5.0 < QUICK_S
    connection.close()


@pytest.mark.parametrize("target", ["/v1/providers", "/v1/doctor"])
def test_health_can_be_asked_for_while_the_store_is_down(
    place: Place, monkeypatch: pytest.MonkeyPatch, target: str
) -> None:
    store_down(monkeypatch, "down")
    assert ask(place, "GET", target)[0] == 200


@every(
    ("method", "target", "body", "status"),
    [
        ("GET", "/v1/nothing", None, 404),
        ("DELETE", "/v1/jobs", None, 405),
        ("GET", "/v1/jobs?limit=x", None, 422),
        ("GET", "/v1/jobs?limit=0", None, 422),
        ("GET", "/v1/jobs?limit=99999999999999999999", None, 422),
        ("GET", "/v1/jobs?limit=%C2%B2", None, 422),
        ("GET", "/v1/jobs?active=yes", None, 422),
        ("GET", "/v1/jobs?colour=red", None, 422),
        ("GET", "/v1/events?since=yesterday", None, 422),
        ("GET", "/v1/history?since=yesterday", None, 422),
        ("GET", "/v1/history?every_s=1", None, 422),
        ("GET", "/v1/history?market=reserved", None, 422),
        ("GET", "/v1/history?colour=red", None, 422),
        ("GET", "/v1/events?since=2026-11-21T10:00:00", None, 422),
        ("GET", "/v1/events?since=0001-01-01T00:00:00%2B23:00", None, 422),
        ("GET", "/v1/events?after=-1", None, 422),
        ("GET", "/v1/jobs/llama-lora/logs?tail=-1", None, 422),
        ("GET", "/v1/jobs/llama-lora/files/content", None, 422),
        ("POST", "/v1/plan", b"", 422),
        ("POST", "/v1/plan", b"{", 422),
        ("POST", "/v1/plan", b"[1]", 422),
        ("POST", "/v1/plan", b"\xff\xfe", 422),
        ("POST", "/v1/plan", b'{"draft": 3}', 422),
        ("POST", "/v1/plan", b'{"draft": {}, "extra": 1}', 422),
        ("POST", "/v1/plan", b'{"draft": {"wrong": 1}}', 422),
        ("POST", "/v1/plan", b'{"draft": {"data": []}}', 422),
        ("POST", "/v1/plan", b'{"draft": {"data": {"name": "\\ud800"}}}', 422),
        ("POST", "/v1/plan", b"[" * 100_000, 422),
        ("POST", "/v1/plan", b" " * (2 * 2**20 + 1), 413),
        ("POST", "/v1/jobs", b'{"draft": {}, "secrets": {"A": 1}}', 422),
        ("POST", "/v1/jobs", b'{"draft": {}, "code_sha256": "../../x"}', 422),
        ("PUT", "/v1/code/xyz", b"data", 422),
        ("PUT", "/v1/code/" + "0" * 64, b"data", 422),
        ("PUT", "/v1/code/" + "0" * 64, b"x" * 1_000_001, 413),
    ],
)
def test_a_bad_request_is_refused_in_words(
    place: Place, method: str, target: str, body: bytes | None, status: int
) -> None:
    found, answer = ask(place, method, target, body)
    assert found == status
    assert answer["schema"] == 1
    assert answer["error"]["message"]
    assert "Traceback" not in json.dumps(answer)
    assert place.failures == []


def test_a_secret_that_is_too_large_is_named_and_not_shown(place: Place) -> None:
    body = {"draft": {}, "secrets": {"TOKEN": "hunter2" * 10_000}}
    status, answer = ask(place, "POST", "/v1/jobs", body)
    assert status == 422
    assert "TOKEN" in answer["error"]["message"]
    assert "hunter2" not in json.dumps(answer)


@pytest.mark.parametrize(
    ("secrets", "words"),
    [
        pytest.param({"TOKEN": "hunter2\0x"}, "the secret TOKEN holds a NUL character", id="NUL"),
        pytest.param({"TOKEN": "\0"}, "the secret TOKEN holds a NUL character", id="only NUL"),
        pytest.param({f"T{n}": "hunter2" * 9000 for n in range(17)}, "larger than 1 MiB together", id="too much"),
    ],
)
def test_a_secret_that_no_environment_can_hold_is_refused_and_not_shown(
    place: Place, secrets: dict[str, str], words: str
) -> None:
    asked = place.asked("submissions.submit")
    status, answer = ask(place, "POST", "/v1/jobs", {"draft": {}, "secrets": secrets})
    assert status == 422
    assert words in answer["error"]["message"]
    assert "hunter2" not in json.dumps(answer)
    assert asked == []


def test_code_is_stored_under_its_hash_and_found_again(place: Place) -> None:
    data = b"archive" * 10_000
    sha256 = hashlib.sha256(data).hexdigest()
    assert ask(place, "GET", f"/v1/code/{sha256}")[1]["present"] is False
    assert ask(place, "PUT", f"/v1/code/{sha256}", data)[1]["code"] == {"sha256": sha256, "bytes": len(data)}
    assert ask(place, "GET", f"/v1/code/{sha256}")[1]["present"] is True
    assert place.rig.objects.get(code_key(sha256), bytes_max=len(data)) == data


def test_a_log_of_an_unknown_job_is_refused_before_the_stream_begins(place: Place) -> None:
    status, body = ask(place, "GET", "/v1/jobs/nobody/logs?follow=1")
    assert (status, body["error"]["code"]) == (404, "not_found")


@pytest.mark.parametrize(
    ("target", "status"),
    [
        ("/v1/jobs/llama-lora/logs?follow=1", 200),
        ("/v1/jobs/llama-lora/logs?follow=1&after=x", 422),
        ("/v1/jobs/llama-lora/logs?follow=1&attempt=7", 404),
        ("/v1/events?follow=1&after=999", 200),
        ("/v1/events?follow=1&job=absent", 404),
    ],
)
def test_a_stream_that_is_followed_is_answered_before_its_first_record(place: Place, target: str, status: int) -> None:
    connection = _Unix(place.socket)
    began = time.monotonic()
    connection.request("GET", target)
    assert connection.getresponse().status == status
    assert time.monotonic() - began < 5.0
    connection.close()


def test_records_come_one_a_line(place: Place) -> None:
    end = made_responses.log(kind="end", cursor=2, state="SUCCEEDED")
    place.streams("logs.stream", [made_responses.log("a\n", cursor=1), end])
    connection = _Unix(place.socket)
    connection.request("GET", "/v1/jobs/llama-lora/logs")
    response = connection.getresponse()
    lines = [json.loads(line) for line in response.read().splitlines()]
    assert response.headers["content-type"] == "application/x-ndjson"
    assert [(line["schema"], line["kind"], line["text"]) for line in lines] == [(1, "log", "a\n"), (1, "end", "")]
    connection.close()


def test_a_reader_who_leaves_ends_the_handlers_stream(place: Place) -> None:
    ended = []

    async def endless(query: object) -> Any:
        try:
            yield made_responses.event()
            await anyio.sleep_forever()
        finally:
            ended.append(True)

    place.replace("events.stream", endless)
    connection = _Unix(place.socket)
    connection.request("GET", "/v1/events?follow=1")
    assert json.loads(connection.getresponse().readline())["kind"] == "job.submitted"
    connection.close()
    deadline = time.monotonic() + 5
    while not ended and time.monotonic() < deadline:
        ask(place, "GET", "/v1/status")
    assert ended


def test_a_file_whose_bytes_end_early_is_never_taken_for_whole(place: Place) -> None:
    async def cut(*_: object) -> AsyncIterator[bytes]:
        yield b"012345"
        raise OSError("a chunk is corrupt")

    place.replace("files.content", cut)
    connection = _Unix(place.socket)
    connection.request("GET", "/v1/jobs/llama-lora/files/content?path=a")
    response = connection.getresponse()
    with pytest.raises(http.client.IncompleteRead):
        response.read()
    assert [str(exc) for _, exc in place.failures] == ["a chunk is corrupt"]
    connection.close()
