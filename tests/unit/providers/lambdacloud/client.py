"""Plain HTTP to a fake Lambda Cloud, as a client without any of our code would speak."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from http.client import HTTPConnection
from pathlib import Path
from typing import Any, NamedTuple

from spotd_providers.contract.values import MICRO
from spotd_providers.testkit.clock import FakeClock
from spotd_providers.testkit.serve import Faults, serving
from tests.fakes.lambdacloud import (
    BASE_PATH,
    LambdaApi,
    LambdaCloud,
    Quirks,
    classify,
    some_kinds,
)

KEY = "spotd-lab-7f3a-1"
OPERATIONS = "/instance-operations"
LAUNCH: dict[str, Any] = {
    "region_name": "us-west-1",
    "instance_type_name": "gpu_1x_a10",
    "ssh_key_names": ["spotd-lab"],
    "name": KEY,
    "tags": [{"key": "spotd-key", "value": KEY}],
    "user_data": "#!/bin/sh\necho begun\nexec sleep 600\n",
}
PUBLIC = f"ssh-ed25519 {base64.b64encode(b'a public key').decode()} spotd-lab"
CENT = MICRO // 100


class Reply(NamedTuple):
    """One answer; `json` is `None` where the body is no JSON."""

    status: int
    headers: dict[str, str]
    json: Any

    @property
    def data(self) -> Any:
        assert self.status == 200, self
        assert set(self.json) == {"data"}
        return self.json["data"]

    @property
    def error(self) -> tuple[int, str]:
        assert set(self.json) == {"error"}, self
        assert set(self.json["error"]) == {"code", "message", "suggestion"}
        return self.status, self.json["error"]["code"]


class Client:
    """Plain HTTP requests to one fake, each long enough after the one before."""

    def __init__(self, cloud: LambdaCloud, clock: FakeClock, faults: Faults, port: int) -> None:
        self.cloud = cloud
        self.clock = clock
        self.faults = faults
        self.pause = timedelta(seconds=12)
        self._port = port

    def __call__(self, method: str, path: str, body: Any = None, *, key: str | None = None) -> Reply:
        self.clock.advance(self.pause)
        return self.raw(method, path, None if body is None else json.dumps(body), key or f"Bearer {self.cloud.api_key}")

    def raw(self, method: str, path: str, body: str | None, authorization: str) -> Reply:
        connection = HTTPConnection("127.0.0.1", self._port, timeout=10)
        try:
            connection.request(method, BASE_PATH + path, body=body, headers={"authorization": authorization})
            response = connection.getresponse()
            text = response.read().decode()
        finally:
            connection.close()
        try:
            decoded = json.loads(text)
        except ValueError:
            decoded = None
        return Reply(response.status, {name.lower(): value for name, value in response.getheaders()}, decoded)

    def launch(self, **changes: Any) -> str:
        found = self("POST", f"{OPERATIONS}/launch", {**LAUNCH, **changes}).data["instance_ids"]
        assert len(found) == 1
        return str(found[0])

    def refused(self, **changes: Any) -> tuple[int, str]:
        return self("POST", f"{OPERATIONS}/launch", {**LAUNCH, **changes}).error

    def terminate(self, *ids: str) -> Reply:
        return self("POST", f"{OPERATIONS}/terminate", {"instance_ids": list(ids)})

    def status(self, instance_id: str) -> str:
        return str(self("GET", f"/instances/{instance_id}").data["status"])

    def listed(self) -> dict[str, Any]:
        return {row["id"]: row for row in self("GET", "/instances").data}


@contextmanager
def account(folder: Path, **quirks: Any) -> Iterator[Client]:
    """An account with a registered SSH key; instances boot in a minute."""
    clock = FakeClock()
    cloud = LambdaCloud(folder / "cloud", clock=clock, quirks=Quirks(**{"boot": timedelta(minutes=1), **quirks}))
    cloud.stock(*some_kinds())
    cloud.ssh_keys["k1"] = {"id": "k1", "name": "spotd-lab", "public_key": PUBLIC}
    faults = Faults(LambdaApi(cloud), classify=classify)
    try:
        with serving(faults) as served:
            yield Client(cloud, clock, faults, served.port)
    finally:
        cloud.shut_down()
