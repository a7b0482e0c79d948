"""The official `runpod` SDK judges the fake, as far as it still applies: it speaks GraphQL only, and knows no v2."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any, Final

import pytest

from spotd_providers.kit.hosts.clock import ScaledClock
from spotd_providers.testkit.clock import START
from spotd_providers.testkit.fakes.runpod import Phase, Quirks, RunpodApi, RunpodCloud, some_gpus, ticking
from spotd_providers.testkit.serve import serving
from tests.official_clients import CannotInstall, environment_with

pytestmark = pytest.mark.e2e

VERSION: Final = "1.12.0"
_CALL_SECONDS_MAX: Final = 100
_STORY: Final = """
import json, os
import runpod
from runpod.api import ctl_commands as runpod_api
runpod.api_key = os.environ["KEY"]
told = {"gpus": runpod_api.get_gpus(), "gpu": runpod_api.get_gpu("NVIDIA GeForce RTX 4090", 2)}
pod = runpod_api.create_pod(
    "spotd-lab-7f3a-1", "python:3.12", "NVIDIA GeForce RTX 4090", cloud_type="COMMUNITY", gpu_count=2,
    docker_args="sh -c 'echo hello; sleep 600'", env={"A": "b"},
)
told["made"] = pod
told["listed"] = runpod_api.get_pods()
told["one"] = runpod_api.get_pod(pod["id"])
told["stopped"] = runpod_api.stop_pod(pod["id"])
told["resumed"] = runpod_api.resume_pod(pod["id"], 2)
runpod_api.terminate_pod(pod["id"])
told["left"] = runpod_api.get_pods()
for name, wrong in {
    "again": lambda: runpod_api.terminate_pod(pod["id"]),
    "nothing": lambda: runpod_api.create_pod("x", "y", "NVIDIA GeForce RTX 4090", gpu_count=16),
}.items():
    try:
        wrong()
    except runpod.error.QueryError as exc:
        told[name] = str(exc)
runpod.api_key = "wrong"
try:
    runpod_api.get_pods()
except runpod.error.AuthenticationError as exc:
    told["refused"] = str(exc)
print(json.dumps(told))
"""


def told_by_client(url: str, key: str, home: Path) -> dict[str, Any]:
    """What the official client understood of the fake's answers."""
    try:
        python = environment_with("runpod", VERSION) / "bin" / "python"
    except CannotInstall as exc:
        pytest.skip(str(exc))
    home.mkdir()
    done = subprocess.run(
        [str(python), "-c", _STORY],
        capture_output=True,
        text=True,
        timeout=_CALL_SECONDS_MAX,
        env={"PATH": os.environ.get("PATH", os.defpath), "HOME": str(home), "RUNPOD_API_BASE_URL": url, "KEY": key},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    assert isinstance(told, dict)
    return told


def test_the_official_client_rents_lists_stops_and_ends_a_pod(tmp_path: Path) -> None:
    clock = ScaledClock(real0=START.timestamp(), virtual0=START, scale=60.0)
    cloud = RunpodCloud(tmp_path / "cloud", clock=clock, quirks=Quirks(requests_a_minute=1000))
    cloud.stock(*some_gpus())
    try:
        with serving(RunpodApi(cloud)) as served, ticking(cloud):
            told = told_by_client(served.url, cloud.api_key, tmp_path / "home")
    finally:
        cloud.shut_down()
    assert {gpu["id"] for gpu in told["gpus"]} == set(cloud.gpus)
    assert told["gpu"]["lowestPrice"]["uninterruptablePrice"] == pytest.approx(2 * told["gpu"]["communityPrice"])
    pod = told["made"]["id"]
    assert [(row["id"], row["desiredStatus"], row["costPerHr"]) for row in told["listed"]] == [(pod, "RUNNING", 0.68)]
    assert told["one"]["imageName"] == "python:3.12"
    assert (told["stopped"]["desiredStatus"], told["resumed"]["desiredStatus"]) == ("EXITED", "RUNNING")
    assert told["left"] == []
    assert told["again"] == "pod not found to terminate"
    assert "no longer any instances available" in told["nothing"]
    assert "Unauthorized" in told["refused"]
    assert cloud.pods[pod].phase is Phase.TERMINATED
