"""Plain HTTP to a fake REST cloud, as a client without any of our code would speak."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from typing import Any, NamedTuple, TypeVar

from spotd_providers.testkit.clock import FakeClock
from spotd_providers.testkit.serve import Faults, serving
from tests.fakes.rest import RestApi


class RestReply(NamedTuple):
    """One answer; `json` is `None` where the body is no JSON."""

    status: int
    headers: dict[str, str]
    text: str
    json: Any


class RestClient:
    """Requests to one fake, each with the same `Authorization` header until that is changed."""

    cloud: Any

    def __init__(self, api: RestApi[Any], clock: FakeClock, faults: Faults, port: int) -> None:
        self.cloud = api.cloud
        self.clock = clock
        self.faults = faults
        self.authorization = ""
        self._port, self._base_path = port, api.base_path

    def __call__(self, method: str, path: str, body: Any = None) -> RestReply:
        return self.raw(method, path, None if body is None else json.dumps(body))

    def get(self, path: str) -> Any:
        reply = self("GET", path)
        assert reply.status == 200, reply
        return reply.json

    def raw(self, method: str, path: str, body: str | None) -> RestReply:
        connection = HTTPConnection("127.0.0.1", self._port, timeout=10)
        try:
            headers = {"authorization": self.authorization, "content-type": "application/json"}
            connection.request(method, self._base_path + path, body=body, headers=headers)
            response = connection.getresponse()
            text = response.read().decode()
        finally:
            connection.close()
        try:
            decoded = json.loads(text)
        except ValueError:
            decoded = None
        return RestReply(response.status, {k.lower(): v for k, v in response.getheaders()}, text, decoded)


A = TypeVar("A", bound=RestClient)


@contextmanager
def asking(client: type[A], api: RestApi[Any], clock: FakeClock) -> Iterator[A]:
    """A client of this fake, served until the block ends; no process of its machines is left."""
    faults = Faults(api, classify=api.classify)
    try:
        with serving(faults) as served:
            yield client(api, clock, faults, served.port)
    finally:
        api.cloud.shut_down()
