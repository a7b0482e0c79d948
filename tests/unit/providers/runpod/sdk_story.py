"""Run by an interpreter that has RunPod's own SDK: what it does and understands, as one line of JSON.

    RUNPOD_API_BASE_URL=URL python sdk_story.py URL KEY

Left out is what rents no machine with GPUs: serverless endpoints and their templates, and pods without a GPU.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import runpod
from runpod.api import ctl_commands as sdk

GPU = "NVIDIA GeForce RTX 4090"


def refused(call: Callable[[], Any]) -> str:
    """What the SDK's own exception says of a call that fails."""
    try:
        call()
    except (runpod.error.QueryError, runpod.error.AuthenticationError) as exc:
        return f"{type(exc).__name__}: {exc}"
    return "not refused"


def story(_: str, key: str) -> dict[str, Any]:
    """Everything of the SDK that is about pods, in order."""
    runpod.api_key = key
    told: dict[str, Any] = {"user": sdk.get_user(), "gpus": sdk.get_gpus(), "gpu": sdk.get_gpu(GPU, 2)}
    try:
        sdk.get_gpu("no such GPU")
    except ValueError as exc:
        told["unknown gpu"] = str(exc)
    registry = sdk.create_container_registry_auth("mine", "me", "hush")
    told["registry"] = [registry, sdk.update_container_registry_auth(registry["id"], "you", "hushhush")]
    pod = sdk.create_pod(
        "spotd-lab-7f3a-1", "python:3.12", GPU, cloud_type="COMMUNITY", gpu_count=2, container_disk_in_gb=40,
        docker_args="sh -c 'echo hello from $RUNPOD_POD_ID as $WHO; sleep 600'", env={"WHO": "sdk"},
        ports="22/tcp,8888/http", data_center_id="EU-RO-1", min_vcpu_count=8, min_memory_in_gb=32,
    )  # fmt: skip
    told["made"] = pod
    told["listed"] = sdk.get_pods()
    told["one"] = sdk.get_pod(pod["id"])
    told["stopped"] = sdk.stop_pod(pod["id"])
    told["resumed"] = sdk.resume_pod(pod["id"], 2)
    sdk.terminate_pod(pod["id"])
    told["left"] = sdk.get_pods()
    told["after"] = sdk.get_pod(pod["id"])
    told["registry gone"] = sdk.delete_container_registry_auth(registry["id"])
    told["again"] = refused(lambda: sdk.terminate_pod(pod["id"]))
    told["nothing"] = refused(lambda: sdk.create_pod("x", "y", GPU, gpu_count=16))
    told["no such place"] = refused(lambda: sdk.create_pod("x", "y", GPU, country_code="XX"))
    told["no such registry"] = refused(lambda: sdk.delete_container_registry_auth("reg99"))
    runpod.api_key = "wrong"
    told["refused"] = refused(sdk.get_pods)
    return told


if __name__ == "__main__":
    print(json.dumps(story(*sys.argv[1:])))
