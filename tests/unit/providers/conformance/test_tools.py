"""The tools under the conformance suite: the clock, the server, the faults."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from datetime import timedelta

import anyio
import pytest

from spotd_providers.contract.errors import Unavailable
from spotd_providers.kit.http import AnswerLost, Http, HttpAnswer, open_http
from spotd_providers.testkit.clock import START, FakeClock, NoDeadline, outlast, run_virtually, until
from spotd_providers.testkit.serve import (
    GATEWAY_ERROR,
    NOT_JSON,
    Call,
    Canned,
    Faults,
    Message,
    Receive,
    RecordedRequest,
    Scope,
    Send,
    read_body,
    serving,
)
from tests.cases import every


class Counter:
    """A cloud that counts: POST adds one, GET tells."""

    def __init__(self) -> None:
        self.count = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sent = await read_body(receive)
        if scope["method"] == "POST":
            self.count += 1
        body = json.dumps({"count": self.count, "sent": sent.decode(), "padding": "x" * 200}).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        message: Message = {"type": "http.response.body", "body": body}
        await send(message)


def classify(request: RecordedRequest) -> Call:
    return Call.LAUNCH if request.method == "POST" else Call.LIST


def talk(case: Callable[[Http, Faults, Counter], Awaitable[None]]) -> list[RecordedRequest]:
    cloud = Counter()
    faults = Faults(cloud, classify=classify)
    with serving(faults) as served:

        async def main() -> None:
            async with open_http(served.url, timeout_s=30.0) as http:
                await case(http, faults, cloud)

        run_virtually(main)
        return list(served.requests)


def test_without_faults_the_cloud_answers_and_is_recorded() -> None:
    async def case(http: Http, faults: Faults, cloud: Counter) -> None:
        answer = await http.send("POST", "/buy", params={"a": "1"}, json_body="hello", headers={"X-Key": "k"})
        assert answer.json()["sent"] == '"hello"'

    (request,) = talk(case)
    assert (request.method, request.url, request.body, request.status) == ("POST", "/buy?a=1", b'"hello"', 200)
    assert request.headers["x-key"] == "k"


@every("after_effect", [True, False], ids=["after effect", "before effect"])
def test_a_lost_answer_is_lost_and_its_effect_is_as_said(after_effect: bool) -> None:
    async def case(http: Http, faults: Faults, cloud: Counter) -> None:
        faults.lose_answer(Call.LAUNCH, after_effect=after_effect)
        with pytest.raises(AnswerLost):
            await http.send("POST", "/buy")
        assert cloud.count == int(after_effect)
        assert (await http.send("POST", "/buy")).status == 200

    first, second = talk(case)
    assert (first.status, second.status) == (None, 200)


def test_a_cut_body_is_a_lost_answer() -> None:
    async def case(http: Http, faults: Faults, cloud: Counter) -> None:
        faults.cut_body(Call.LAUNCH)
        with pytest.raises(AnswerLost):
            await http.send("POST", "/buy")
        assert cloud.count == 1

    talk(case)


def test_a_truncated_answer_is_whole_http_and_broken_json() -> None:
    async def case(http: Http, faults: Faults, cloud: Counter) -> None:
        faults.truncate(Call.LIST)
        answer = await http.read("GET", "/")
        assert answer.status == 200
        with pytest.raises(Unavailable):
            answer.json()

    talk(case)


def test_canned_answers_come_in_order_and_then_the_truth() -> None:
    async def case(http: Http, faults: Faults, cloud: Counter) -> None:
        faults.answer(Call.LIST, GATEWAY_ERROR, times=2)
        faults.answer(Call.LIST, NOT_JSON)
        assert [(await http.read("GET", "/")).status for _ in range(4)] == [502, 502, 200, 200]
        faults.edit(Call.LAUNCH, lambda true: Canned(status=201, body=b"{}", headers=true.headers))
        assert (await http.send("POST", "/")).status == 201
        assert cloud.count == 1

    talk(case)


def test_a_thirty_second_time_out_passes_in_no_time() -> None:
    async def case(http: Http, faults: Faults, cloud: Counter) -> None:
        faults.hang(Call.LAUNCH)
        outcome, waited = await outlast(lambda: http.send("POST", "/buy"), lambda: faults.hanging)
        assert isinstance(outcome, AnswerLost)
        assert timedelta(seconds=28) <= waited <= timedelta(seconds=35)
        assert cloud.count == 1

    talk(case)


def test_a_call_without_a_deadline_is_found_out() -> None:
    async def case(http: Http, faults: Faults, cloud: Counter) -> None:
        faults.hang(Call.LAUNCH)

        async def patient() -> HttpAnswer:
            return await http.send("POST", "/buy", timeout_s=1e6)

        with pytest.raises(NoDeadline):
            await outlast(patient, lambda: faults.hanging)

    talk(case)


def test_a_released_request_is_cut() -> None:
    async def case(http: Http, faults: Faults, cloud: Counter) -> None:
        faults.hang(Call.LAUNCH, after_effect=False)

        async def let_go() -> None:
            await until(lambda: faults.hanging)
            faults.clear()

        async with anyio.create_task_group() as group:
            group.start_soon(let_go)
            with pytest.raises(AnswerLost):
                await http.send("POST", "/buy")
        assert cloud.count == 0

    talk(case)


def test_a_stopped_cloud_cannot_be_reached() -> None:
    with serving(Counter()) as served:

        async def main() -> None:
            async with open_http(served.url) as http:
                assert (await http.read("GET", "/")).status == 200
                served.stop()
                with pytest.raises((Unavailable, AnswerLost)):
                    await http.send("GET", "/")
                with pytest.raises(Unavailable, match="cannot connect to 127"):
                    await http.send("GET", "/")

        run_virtually(main)


def test_sleepers_wake_in_the_order_they_are_due() -> None:
    async def main() -> None:
        clock = FakeClock()
        woken: list[tuple[str, timedelta]] = []

        async def sleeper(name: str, seconds: int) -> None:
            await clock.sleep(timedelta(seconds=seconds))
            woken.append((name, clock.now() - START))

        async with anyio.create_task_group() as group:
            group.start_soon(sleeper, "late", 60)
            group.start_soon(sleeper, "early", 5)
        assert woken == [("early", timedelta(seconds=5)), ("late", timedelta(seconds=60))]
        assert clock.slept == [timedelta(seconds=60), timedelta(seconds=5)]

    run_virtually(main)
