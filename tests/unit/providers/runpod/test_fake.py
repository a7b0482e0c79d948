"""The fake RunPod keeps to what is written of the real one, as a container or a stranger would see it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from http.client import HTTPConnection
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from spotd_providers.local.hosts import read_ledger, segments
from spotd_providers.local.hosts.machines import ScaledClock
from spotd_providers.testkit.clock import START, FakeClock
from spotd_providers.testkit.serve import serving
from tests.fakes.ledger_sums import most_at_once
from tests.fakes.runpod import Phase, Quirks, RunpodApi, RunpodCloud, some_gpus, ticking
from tests.unit.providers.local.waiting import until

POD = {
    "name": "spotd-lab-7f3a-1",
    "image": "runpod/pytorch:1.0.2-cu1281-torch280-ubuntu2404",
    "cloud": "SECURE",
    "gpu": {"id": "NVIDIA GeForce RTX 4090", "count": 1, "minCudaVersion": "12.4"},
    "dataCenterIds": ["US-KS-2", "EU-RO-1"],
    "disk": 50,
    "ports": ["22/tcp"],
    "env": {"SPOTD_JOB": "7f3a"},
    "args": "sh -c 'sleep 600'",
    "startSsh": True,
}
LAST_ACT = """
python3 - <<'END'
from spotd_jobs.runner.process import end_machine
end_machine({"method": "runpod", "base_url": "@URL@"}, "succeeded")
END
sleep 600
"""


class Reply(NamedTuple):
    """One answer; `json` is `None` where the body is no JSON."""

    status: int
    headers: dict[str, str]
    json: Any


class Stranger:
    """Plain HTTP requests to one fake."""

    def __init__(self, cloud: RunpodCloud, clock: FakeClock, port: int) -> None:
        self.cloud = cloud
        self.clock = clock
        self._port = port

    def __call__(
        self, method: str, path: str, body: Any = None, *, key: str | None = None, agent: str = "a client"
    ) -> Reply:
        headers = {"authorization": f"Bearer {key or self.cloud.api_key}", "user-agent": agent}
        return self._answer(method, path, body, headers)

    def _answer(self, method: str, path: str, body: Any, headers: dict[str, str]) -> Reply:
        connection = HTTPConnection("127.0.0.1", self._port, timeout=10)
        try:
            connection.request(method, path, body=None if body is None else json.dumps(body), headers=headers)
            response = connection.getresponse()
            text = response.read().decode()
        finally:
            connection.close()
        try:
            decoded = json.loads(text)
        except ValueError:
            decoded = None
        return Reply(response.status, {name.lower(): value for name, value in response.getheaders()}, decoded)


@contextmanager
def stranger(folder: Path, quirks: Quirks | None = None) -> Iterator[Stranger]:
    """Somebody with a key and plain HTTP."""
    clock = FakeClock()
    cloud = RunpodCloud(folder / "cloud", clock=clock, quirks=quirks)
    cloud.stock(*some_gpus())
    try:
        with serving(RunpodApi(cloud)) as served:
            yield Stranger(cloud, clock, served.port)
    finally:
        cloud.shut_down()


def test_the_older_schema_knows_no_entrypoint(tmp_path: Path) -> None:
    with stranger(tmp_path, Quirks(knows_entrypoint=False)) as ask:
        assert ask("POST", "/v2/pods", {**POD, "entrypoint": ["/bin/sh"]}).status == 422


def test_a_pod_is_provisioned_started_and_run_with_its_own_key_in_its_environment(tmp_path: Path) -> None:
    with stranger(tmp_path) as ask:
        script = 'echo $RUNPOD_POD_ID $RUNPOD_DC_ID $RUNPOD_GPU_COUNT $SPOTD_JOB; test -n "$RUNPOD_API_KEY" && echo key'
        made = ask("POST", "/v2/pods", {**POD, "args": f"sh -c '{script}; sleep 600'"})
        assert made.status == 201
        pod = made.json["id"]
        assert (made.json["status"], made.json["cost"]) == ("PROVISIONING", 0.74)
        seen = []
        for seconds in (6, 16):
            ask.clock.advance(timedelta(seconds=seconds))
            seen.append(ask("GET", f"/v2/pods/{pod}").json["status"])
        assert seen == ["STARTING", "RUNNING"]
        until(lambda: len(ask.cloud.machines.console(pod, lines=9)) == 2)
        assert ask.cloud.machines.console(pod, lines=9) == [f"{pod} US-KS-2 1 7f3a", "key"]


@pytest.mark.parametrize(
    ("change", "status"),
    [
        ({"interruptible": True}, 422),
        ({"bidPerGpu": 0.2}, 422),
        ({"entrypoint": "/bin/sh"}, 422),
        ({"gpu": {"id": "NVIDIA GeForce RTX 4090", "type": "x"}}, 422),
        ({"cloud": "ALL"}, 422),
        ({"disk": "50"}, 422),
        ({"env": {"A": 1}}, 422),
        ({"image": None}, 422),
        ({"cpu": {"id": "cpu5c", "vcpuCount": 2}}, 400),
        ({"gpu": {"id": "NVIDIA GeForce RTX 9999", "count": 1}}, 404),
        ({"gpu": {"id": "NVIDIA GeForce RTX 4090", "count": 16}}, 400),
        ({"dataCenterIds": ["XX-YY-1"]}, 400),
        ({"gpu": {"id": "NVIDIA GeForce RTX 4090", "minCudaVersion": "13.9"}}, 400),
        ({"mounts": {"network": [{"volumeId": "vol0000009", "path": "/x"}]}}, 404),
        ({"args": "x" * 110_000}, 413),
        ({"args": "sh -c 'open"}, 422),
    ],
)
def test_a_create_outside_the_closed_schema_or_the_market_is_refused(
    tmp_path: Path, change: dict[str, Any], status: int
) -> None:
    with stranger(tmp_path) as ask:
        reply = ask("POST", "/v2/pods", {**POD, **change})
        assert reply.status == status
        assert set(reply.json) >= {"title", "status", "detail"}
        assert reply.headers["content-type"] == "application/problem+json"
        assert not ask.cloud.pods


def test_the_same_name_twice_is_two_pods(tmp_path: Path) -> None:
    with stranger(tmp_path) as ask:
        ids = {ask("POST", "/v2/pods", POD).json["id"] for _ in range(2)}
        assert len(ids) == 2
        listed = ask("GET", "/v2/pods?desiredStatus=EXITED&name=nothing").json
        assert len(listed["pods"]) == 2, "unknown parameters are ignored"


def test_a_catalogue_without_its_product_is_refused_and_one_without_stock_is_a_price_list(tmp_path: Path) -> None:
    with stranger(tmp_path) as ask:
        assert ask("GET", "/v2/catalog/gpus?include=AVAILABILITY").status == 400
        assert ask("GET", "/v2/catalog/gpus?count=2").status == 400
        rows = ask("GET", "/v2/catalog/gpus").json["gpus"]
        assert all("availability" not in row for row in rows)
        one = ask("GET", "/v2/catalog/gpus/NVIDIA%20GeForce%20RTX%204090?include=AVAILABILITY&product=POD&count=8")
        assert one.json["availability"] in ("LOW", "MEDIUM", "HIGH")


def test_a_window_that_is_used_up_is_429_with_advice_and_told_in_every_answer(tmp_path: Path) -> None:
    with stranger(tmp_path, Quirks(requests_a_minute=3)) as ask:
        for left in (2, 1, 0):
            assert f'"minute";r={left};' in ask("GET", "/v2/pods").headers["ratelimit"]
        refused = ask("GET", "/v2/pods")
        assert refused.status == 429
        assert 0 < int(refused.headers["retry-after"]) <= 61
        ask.clock.advance(timedelta(minutes=2))
        assert ask("GET", "/v2/pods").status == 200


def test_a_pods_key_ends_that_pod_and_nothing_else(tmp_path: Path) -> None:
    with stranger(tmp_path) as ask:
        first, second = (ask("POST", "/v2/pods", POD).json["id"] for _ in range(2))
        key = ask.cloud.pods[first].api_key
        assert ask("GET", "/v2/pods", key=key).status == 403
        assert ask("DELETE", f"/v2/pods/{second}", key=key).status == 403
        assert ask("DELETE", f"/v2/pods/{first}", key="nobody's").status == 401
        assert ask("DELETE", f"/v2/pods/{first}", key=key).status == 204
        assert ask("DELETE", f"/v2/pods/{first}").status == 404
        assert ask.cloud.pods[second].exists


def test_actions_go_by_state_and_a_restart_wants_its_gpu_back(tmp_path: Path) -> None:
    with stranger(tmp_path) as ask:
        pod = ask("POST", "/v2/pods", POD).json["id"]
        ask.clock.advance(timedelta(minutes=1))
        ask("GET", "/v2/pods")
        ask.clock.advance(timedelta(minutes=1))
        assert ask("POST", f"/v2/pods/{pod}/action", {"action": "start"}).status == 409
        stopped = ask("POST", f"/v2/pods/{pod}/action", {"action": "stop"})
        assert (stopped.json["status"], stopped.json["cost"]) == ("EXITED", 0.0)
        ask.cloud.sell_out("NVIDIA GeForce RTX 4090")
        refused = ask("POST", f"/v2/pods/{pod}/action", {"action": "start"})
        assert refused.status == 400
        assert "not enough free GPUs" in refused.json["detail"]
        assert ask("POST", f"/v2/pods/{pod}/action", {"action": "terminate"}).status == 204


def test_the_edge_refuses_the_agents_of_scripts_and_v1_is_gone(tmp_path: Path) -> None:
    with stranger(tmp_path) as ask:
        refused = ask("GET", "/v2/pods", agent="Python-urllib/3.11")
        assert (refused.status, refused.json) == (403, None)
        assert ask("GET", "/v1/pods").status == 410


@pytest.mark.e2e
def test_a_pod_that_is_done_deletes_itself_with_nothing_but_its_environment(tmp_path: Path) -> None:
    cloud = RunpodCloud(tmp_path / "cloud", clock=ScaledClock(real0=START.timestamp(), virtual0=START, scale=60.0))
    cloud.stock(*some_gpus())
    try:
        with serving(RunpodApi(cloud)) as served, ticking(cloud):
            pod = cloud.create({**POD, "entrypoint": ["/bin/sh", "-c"], "cmd": [LAST_ACT.replace("@URL@", served.url)]})
            until(lambda: pod.phase is Phase.TERMINATED, what="the pod to delete itself")
            until(lambda: not cloud.machines.alive(pod.pod_id), what="its processes to be gone")
    finally:
        cloud.shut_down()
    spans = segments(read_ledger(cloud.ledger_path))
    assert most_at_once(spans) == 1
    assert all(span.end is not None for span in spans)
