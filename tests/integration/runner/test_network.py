"""The network parts against small servers: S3 forms and signatures, metadata services, providers' own ends."""

from __future__ import annotations

import datetime
import email
import hashlib
import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from botocore.auth import S3SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials

from spotd_jobs.runner import process, shutdown
from spotd_jobs.wire.client import web
from spotd_jobs.wire.client.grant_sinks import sink_of
from spotd_jobs.wire.client.sinks import SinkDenied, SinkError
from tests.cases import every
from tests.integration.runner.rig import until
from tests.integration.runner.servers import Answer, Request, Server

FORM = {"key": "store/jobs/j1/attempts/1/${filename}", "policy": "cG9saWN5", "x-amz-signature": "abc"}


def post_sink(server: Server, **form: str) -> Any:
    fields = {"url": server.url + "/bucket", "form": {**FORM, **form}, "key_prefix": "store/jobs/j1/attempts/1/"}
    return sink_of({"method": "post", "fields": fields})


def sigv4_sink(url: str, *, path_style: bool = True) -> Any:
    fields = {
        "endpoint": url,
        "bucket": "bucket",
        "region": "eu-west-1",
        "path_style": path_style,
        "access_key": "AKIDEXAMPLE",
        "secret_key": "a-temporary-secret",
        "session_token": "a/token+with=signs",
        "key_prefix": "store/jobs/j1/attempts/1/",
    }
    return sink_of({"method": "sigv4", "fields": fields})


def parts_of(request: Request) -> list[tuple[str, bytes]]:
    """The fields of a multipart form, in order, as the standard library's own parser sees them."""
    head = f"Content-Type: {request.headers['content-type']}\r\n\r\n".encode()
    message = email.message_from_bytes(head + request.body)
    found = []
    for part in message.walk():
        if not part.is_multipart():
            name = part.get_param("name", header="content-disposition")
            found.append((str(name), part.get_payload(decode=True)))
    return found  # type: ignore[return-value]  # payloads of decoded parts are bytes


def test_a_post_form_carries_the_policy_the_key_and_the_file_last() -> None:
    data = bytes(range(256)) * 40
    with Server(lambda request: Answer(204)) as server:
        post_sink(server, **{"x-amz-checksum-sha256": ""}).put("data/ab", data, hashlib.sha256(data).hexdigest())
        (request,) = server.requests
        parts = parts_of(request)
        fields = dict(parts)
        assert parts[-1][0] == "file"
        assert fields["key"] == b"store/jobs/j1/attempts/1/data/ab"
        assert fields["policy"] == FORM["policy"].encode()
        assert data in request.body
        import base64

        assert base64.b64decode(fields["x-amz-checksum-sha256"]) == hashlib.sha256(data).digest()
        assert int(request.headers["content-length"]) == len(request.body)


def test_puts_share_a_connection_and_survive_one_that_was_closed() -> None:
    with Server(lambda request: Answer(204)) as server:
        sink = post_sink(server)
        for _ in range(5):
            sink.put("data/ab", b"x")
        assert server.connections == 1
        web._local.connections[("http", "127.0.0.1", int(server.url.rsplit(":", 1)[1]))].sock.close()
        sink.put("data/ab", b"x")
        assert len(server.requests) == 6
    web.drop_connections()


@every(("status", "kind"), [(403, SinkDenied), (400, SinkDenied), (503, SinkError), (500, SinkError)])
def test_a_store_s_refusal_is_told_by_its_code_and_nothing_secret(status: int, kind: type[SinkError]) -> None:
    body = b"<Error><Code>AccessDenied</Code><Message>cG9saWN5</Message></Error>"
    with Server(lambda request: Answer(status, body)) as server, pytest.raises(kind) as caught:
        post_sink(server).put("data/ab", b"x")
    assert str(caught.value) == f"the store answers HTTP {status} AccessDenied"
    assert isinstance(caught.value, SinkDenied) is (status < 500)
    web.drop_connections()


def test_a_signature_is_the_one_that_aws_s_own_client_would_make(monkeypatch: pytest.MonkeyPatch) -> None:
    moment = datetime.datetime(2026, 11, 21, 10, 0, 0, tzinfo=datetime.UTC)
    monkeypatch.setattr(web.CLOCK, "now", moment.timestamp)
    with Server(lambda request: Answer(200)) as server:
        data = b"content"
        sigv4_sink(server.url).put("data/a b~c", data)
        (request,) = server.requests
        again = AWSRequest("PUT", server.url + request.path, data=data)
        again.headers["x-amz-content-sha256"] = hashlib.sha256(data).hexdigest()
        auth = S3SigV4Auth(Credentials("AKIDEXAMPLE", "a-temporary-secret", "a/token+with=signs"), "s3", "eu-west-1")
        monkeypatch.setattr("botocore.auth.get_current_datetime", lambda **_: moment.replace(tzinfo=None))
        auth.add_auth(again)
        assert request.headers["authorization"] == again.headers["Authorization"]
        assert request.path == "/bucket/store/jobs/j1/attempts/1/data/a%20b~c"
    web.drop_connections()


@pytest.mark.parametrize("name", ["../x", "/x", "a//b", "a/./b", "a\\b", "a\0b"])
def test_no_name_leaves_the_prefix_by_any_method(name: str, tmp_path: Path) -> None:
    sinks = [
        sink_of({"method": "folder", "fields": {"directory": str(tmp_path)}}),
        sink_of({"method": "post", "fields": {"url": "http://x", "form": FORM, "key_prefix": "p/"}}),
        sigv4_sink("http://x"),
    ]
    for sink in sinks:
        with pytest.raises(ValueError, match="below the prefix"):
            sink.put(name, b"x")


def test_an_answer_that_is_cut_short_is_never_taken_for_the_whole() -> None:
    with Server(lambda request: Answer(200, b'{"schema": 1}', cut=5)) as server, pytest.raises(web.WebError):
        web.read(server.url + "/grant.json", 1000)


@every(
    ("size", "block", "taken"),
    [(9, 4, [4, 4, 1]), (8, 4, [4, 4]), (0, 4, []), (10, 4, [4, 4, 2]), (11, 4, web.TooLarge), (99, 4, web.TooLarge)],
)
def test_blocks_come_in_order_and_never_more_than_allowed(
    size: int, block: int, taken: list[int] | type[web.WebError]
) -> None:
    body = bytes(range(size))
    found: list[bytes] = []
    with Server(lambda request: Answer(200, body)) as server:
        place = memoryview(bytearray(block))
        try:
            web.read_blocks(server.url, 10, place, lambda data: found.append(bytes(data)))
        except web.TooLarge:
            assert taken is web.TooLarge
        else:
            assert [len(one) for one in found] == taken
    assert b"".join(found) == body[:10]
    web.drop_connections()


def test_blocks_of_an_answer_that_is_cut_short_are_an_error_in_the_end() -> None:
    found: list[bytes] = []
    with Server(lambda request: Answer(200, b"0123456789", cut=3)) as server, pytest.raises(web.WebError):
        web.read_blocks(server.url, 10, memoryview(bytearray(4)), lambda data: found.append(bytes(data)))
    assert b"".join(found) == b"0123456"


@every(("status", "kind"), [(404, web.Missing), (403, web.Denied), (503, web.WebError)])
def test_reading_tells_gone_from_refused_from_later(status: int, kind: type[web.WebError]) -> None:
    with Server(lambda request: Answer(status)) as server, pytest.raises(kind) as caught:
        web.read(server.url + "/x?X-Amz-Signature=s3cret", 1000)
    assert type(caught.value) is kind
    assert "s3cret" not in str(caught.value)


def test_reading_follows_a_redirect_and_stops_at_the_limit() -> None:
    def answer(request: Request) -> Answer:
        if request.path == "/a":
            return Answer(307, headers=(("Location", "/b"),))
        return Answer(200, b"x" * 100)

    with Server(answer) as server:
        assert web.read(server.url + "/a", 100) == b"x" * 100
        with pytest.raises(web.TooLarge):
            web.read(server.url + "/b", 99)
    web.drop_connections()


def test_the_clock_follows_the_store_s_date(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = web._StoreClock()
    clock.learn("Sat, 21 Nov 2020 10:00:00 GMT")
    assert abs(clock.now() - 1605952800) < 5
    clock.learn("nonsense")
    for year in (1970, 2019, 2100, 9999):  # a stamp of the year 10000 would have a digit too many to sign by
        clock.learn(f"Thu, 01 Jan {year} 10:00:00 GMT")
    assert abs(clock.now() - 1605952800) < 5


class Imds:
    """AWS's metadata service: a token first, then what it announces."""

    def __init__(self) -> None:
        self.action: dict[str, str] | None = None
        self.rebalance = False
        self.tokens = 0

    def answer(self, request: Request) -> Answer:
        if request.path == "/latest/api/token":
            self.tokens += 1
            ok = request.method == "PUT" and "x-aws-ec2-metadata-token-ttl-seconds" in request.headers
            return Answer(200 if ok else 400, f"token-{self.tokens}".encode())
        # Every second question comes with a token that has run out.
        if request.headers.get("x-aws-ec2-metadata-token") != f"token-{self.tokens}" or self.tokens < 2:
            return Answer(401)
        if request.path.endswith("/spot/instance-action") and self.action is not None:
            return Answer(200, json.dumps(self.action).encode())
        if request.path.endswith("/recommendations/rebalance") and self.rebalance:
            return Answer(200, b'{"noticeTime": "2026-11-21T08:20:00Z"}')
        return Answer(404)


def test_a_spot_interruption_is_read_with_a_token_and_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutdown, "_IMDS_EVERY_S", 0.02)
    imds = Imds()
    seen: list[shutdown.Notice] = []
    advised = threading.Event()
    with Server(imds.answer) as server:
        shutdown.ImdsWatch(server.url + "/", seen.append, lambda reason: advised.set()).start()
        until(lambda: len(server.requests) > 5, "a few questions")
        assert seen == []
        imds.rebalance = True
        until(advised.is_set, "the recommendation")
        imds.action = {"action": "terminate", "time": web.as_text(time.time() + 120)}
        until(lambda: seen, "the interruption")
        assert seen[0].source == "imds"
        assert seen[0].at is not None
        assert 60 < seen[0].at - time.time() < 121


def test_a_preemption_at_google_is_read_with_its_header_and_is_half_a_minute_away(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shutdown, "_IMDS_EVERY_S", 0.02)
    said = {"/instance/preempted": b"FALSE", "/instance/maintenance-event": b"NONE"}
    seen: list[shutdown.Notice] = []
    advised: list[str] = []

    def answer(request: Request) -> Answer:
        if request.headers.get("metadata-flavor") != "Google":
            return Answer(403)
        path = request.path.removeprefix("/computeMetadata/v1")
        # Every now and then the service is not there.
        return Answer(503) if len(server.requests) % 5 == 0 else Answer(200, said[path])

    with Server(answer) as server:
        shutdown.metadata_watch(server.url + "/computeMetadata/v1/", seen.append, advised.append).start()
        until(lambda: len(server.requests) > 6, "a few questions")
        assert (seen, advised) == ([], [])
        said["/instance/maintenance-event"] = b"TERMINATE_ON_HOST_MAINTENANCE\n"
        until(lambda: advised, "the maintenance")
        said["/instance/preempted"] = b"TRUE"
        until(lambda: seen, "the preemption")
    assert advised == ["maintenance of the host in about an hour"]
    assert seen[0].source == "imds"
    assert seen[0].at is not None
    assert 10 < seen[0].at - time.time() < 31


@pytest.mark.parametrize("when", [{"time": "soon"}, {"time": ""}, {"time": "99999-99-99"}, {}], ids=str)
def test_an_interruption_without_a_legible_time_is_two_minutes_away(
    when: dict[str, str], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    imds = Imds()
    imds.action = {"action": "terminate", **when}
    seen: list[shutdown.Notice] = []
    before = time.time()
    with Server(imds.answer) as server:
        monkeypatch.setattr(shutdown, "_IMDS_EVERY_S", 0.02)
        shutdown.ImdsWatch(server.url, seen.append, lambda reason: None).start()
        until(lambda: seen, "the interruption")
    (notice,) = seen
    assert notice.at is not None
    assert before + 120 <= notice.at <= time.time() + 120
    assert "no time that can be read" in "".join(capfd.readouterr())


def test_an_interruption_that_passed_long_ago_is_no_notice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutdown, "_IMDS_EVERY_S", 0.02)
    imds = Imds()
    imds.action = {"action": "terminate", "time": "2020-01-01T00:00:00Z"}
    seen: list[shutdown.Notice] = []
    with Server(imds.answer) as server:
        shutdown.ImdsWatch(server.url, seen.append, lambda reason: None).start()
        until(lambda: len(server.requests) > 10, "a few questions")
        assert seen == []
        imds.action = {"action": "terminate", "time": web.as_text(time.time() + 120)}
        until(lambda: seen, "a new announcement")


@pytest.mark.parametrize(
    ("method", "env", "path"),
    [
        ("vast", {"CONTAINER_ID": "123", "CONTAINER_API_KEY": "instance-key"}, "/api/v0/instances/123/"),
        ("runpod", {"RUNPOD_POD_ID": "pod1", "RUNPOD_API_KEY": "instance-key"}, "/v2/pods/pod1"),
    ],
)
def test_a_machine_ends_itself_by_its_own_key_and_asks_again_when_refused(
    method: str, env: dict[str, str], path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(process, "_FETCH_PAUSE_S", 0.01)
    monkeypatch.setattr(process, "_LINGER_S", 0.0)
    statuses = iter([500, 429])
    with Server(lambda request: Answer(next(statuses, 200), b"{}")) as server:
        assert process.end_machine({"method": method, "base_url": server.url}, "succeeded")
        assert [(one.method, one.path) for one in server.requests] == [("DELETE", path)] * 3
        assert {one.headers["authorization"] for one in server.requests} == {"Bearer instance-key"}
    web.drop_connections()


def test_a_machine_that_can_not_be_ended_says_so_after_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "_FETCH_PAUSE_S", 0.01)
    monkeypatch.delenv("CONTAINER_ID", raising=False)
    assert not process.end_machine({"method": "vast", "base_url": "http://127.0.0.1:1"}, "failed", try_for_s=0.05)
