"""The client's calls are the routes of the API, and what they are said to return is what the routes answer."""

from __future__ import annotations

import asyncio
import io
import re
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing
from inspect import Parameter, signature
from pathlib import Path
from typing import Any

import pytest

from spotd.api.app import api_routes
from spotd.api.responses import ByteStream
from spotd.api.routes import ApiRoute
from spotd.client.asynchronous import AsyncDaemon
from spotd.client.daemon import Daemon
from spotd.client.transport import DaemonRefused, Transport, refused
from tests.cases import every
from tests.unit.api import made_responses, worlds
from tests.unit.api.place import Place, place

NOT_CALLS = {"place", "close_streams"}
CALLS = sorted(name for name in vars(Daemon) if not name.startswith("_") and name not in NOT_CALLS)
GIVEN: dict[str, Any] = {
    "ref": "llama", "sha256": "ab" * 32, "content": io.BytesIO(), "size": 0, "query": {}, "names": ["a"], "host": "h",
    "manifest": "ab" * 32, "spans": [(0, 1)], "checkpoint": None, "path": "a", "machine": "m", "what": "job",
    "budget": "1", "ceiling": "1", "draft": {}, "code_sha256": None, "secrets": {}, "pinned": True, "channel": None,
    "name": "imagenet", "root": "{}", "port": 6006,
    "body": {}, "provider": "aws", "since_s": 0,
}  # fmt: skip
ALSO: dict[str, dict[str, Any]] = {"cost": {"ref": "llama"}}
"""Calls that have another target with other arguments."""


class Noting(Transport):
    """What would be asked; nothing is sent."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str]] = []

    def json(self, method: str, target: str, **_: Any) -> Any:
        self.asked.append((method, target))
        return {}

    def json_bytes(self, method: str, target: str, **_: Any) -> bytes:
        self.asked.append((method, target))
        return b""

    def upload(self, target: str, *_: Any) -> Any:
        self.asked.append(("PUT", target))

    def lines(self, target: str, **_: Any) -> Iterator[Any]:
        self.asked.append(("GET", target))
        return iter(())

    chunks = lines


def route_of(name: str, **given: Any) -> ApiRoute:
    """The route that a call of the client asks."""
    daemon, noting = Daemon(), Noting()
    daemon._transport = noting
    wanted = {**GIVEN, **given}
    required = [p.name for p in signature(getattr(Daemon, name)).parameters.values() if p.default is Parameter.empty]
    answer = getattr(daemon, name)(**{one: wanted[one] for one in (*required, *given) if one != "self"})
    if not isinstance(answer, (dict, bool, bytes, type(None))):
        list(answer)
    ((method, target),) = noting.asked
    fitting = [r for r in api_routes() if r.method == method and re.fullmatch(re.sub("{.*?}", "[^/]+", r.path), target)]
    return min(fitting, key=lambda route: route.path.count("{"))


def names_of(kind: Any) -> set[str]:
    """The classes in a type, by name."""
    return set(re.findall(r"[A-Z]\w+", kind if isinstance(kind, str) else getattr(kind, "__name__", str(kind))))


@every(("name", "given"), [*((name, {}) for name in CALLS), *ALSO.items()])
def test_a_call_returns_the_type_that_its_route_answers(name: str, given: dict[str, Any]) -> None:
    route, said = route_of(name, **given), getattr(Daemon, name).__annotations__["return"]
    if said in {"bytes", "bool"}:
        return  # an answer that is not parsed, or of which one value is wanted
    if route.answer is ByteStream:
        assert said == "Iterator[bytes]"
        return
    answered = {word.rpartition(".")[2] for word in re.findall(r"[\w.]+", str(route.answer))} | names_of(route.answer)
    assert names_of(said) - {"Iterator"} <= answered, (said, route.answer)
    assert ("Iterator" in said) == ("RecordStream" in str(route.answer))


def test_every_route_can_be_asked_by_the_client() -> None:
    asked = {route_of(name).name for name in CALLS} | {route_of(name, **given).name for name, given in ALSO.items()}
    assert {route.name for route in api_routes()} - asked == {"openapi"}


def test_the_asynchronous_client_has_every_call() -> None:
    assert {name for name in vars(AsyncDaemon) if not name.startswith("_")} == set(CALLS) - {"jobs_bytes"}


@pytest.fixture(scope="module")
def served() -> Iterator[Place]:
    with place() as running:
        running.write(worlds.running(), worlds.waiting())
        yield running


def test_calls_can_be_awaited_side_by_side(served: Place) -> None:
    async def ask() -> None:
        daemon = AsyncDaemon(served.socket)
        page, detail = await asyncio.gather(daemon.jobs({"active": 1}), daemon.job("llama-lora"))
        assert detail["job"]["id"] in {job["id"] for job in page["jobs"]}
        assert page["now"] == "2026-11-21T10:00:00.000Z"
        assert await daemon.has_code("ab" * 32) is False
        with pytest.raises(DaemonRefused) as refused:
            await daemon.why("absent")
        assert refused.value.code == "not_found"

    asyncio.run(ask())


def test_a_stream_is_read_in_an_async_for_and_ends_with_it(served: Place) -> None:
    async def endless(_query: object) -> AsyncIterator[Any]:
        while True:
            yield made_responses.event()
            await asyncio.sleep(0.01)

    async def ask() -> list[str]:
        found = []
        async with aclosing(AsyncDaemon(served.socket).events({"follow": 1})) as records:
            async for record in records:
                found.append(record["kind"])
                if len(found) == 3:
                    break
        return found

    served.replace("events.stream", endless)
    assert asyncio.run(ask()) == ["job.submitted"] * 3
    require_no_thread()


def test_a_wait_for_a_record_that_is_given_up_leaves_no_thread(served: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    async def silent(_query: object) -> AsyncIterator[Any]:
        yield made_responses.event()
        await asyncio.sleep(3600)

    async def ask() -> None:
        async with aclosing(AsyncDaemon(served.socket).events({"follow": 1})) as records:
            await anext(records)
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(anext(records), 0.1)

    monkeypatch.setattr("spotd.api.responses.IDLE_LINE_S", 0.05)
    served.replace("events.stream", silent)
    asyncio.run(ask())
    require_no_thread()


def require_no_thread() -> None:
    deadline = time.monotonic() + 5.0
    while any(thread.name.startswith("events") for thread in threading.enumerate()):
        assert time.monotonic() < deadline, "the thread of the stream is still there"
        time.sleep(0.01)


def test_a_submit_sends_only_what_is_used_and_says_that_a_daemon_without_it_is_older(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sent: list[dict[str, Any]] = []

    def answered(_method: str, _target: str, *, body: dict[str, Any]) -> dict[str, Any]:
        sent.append(body)
        return {}

    daemon = Daemon(Path("/nowhere"))
    monkeypatch.setattr(daemon._transport, "json", answered)
    daemon.submit({"data": {}})
    daemon.submit({"data": {}}, array="0-3")
    plain: dict[str, Any] = {"draft": {"data": {}}, "code_sha256": None, "secrets": {}}
    assert sent == [plain, {**plain, "array": "0-3"}]
    refusal = refused({"code": "invalid", "message": "the request holds the unknown key 'array'"})
    assert refusal.hint.startswith("the daemon is older than this client: restart it")
