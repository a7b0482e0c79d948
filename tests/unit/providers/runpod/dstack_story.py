"""Run by an interpreter that has dstack: what its RunPod client does and understands, as one line of JSON.

    python dstack_story.py URL KEY

Only the address is changed; what is sent and how answers are read is dstack's own.
"""

from __future__ import annotations

import json
import sys
import time
from types import SimpleNamespace
from typing import Any

import dstack._internal.core.backends.runpod.api_client as api
from dstack._internal.core.backends.runpod.compute import RunpodCompute
from dstack._internal.core.backends.runpod.models import RunpodConfig, RunpodCreds
from dstack._internal.core.consts import DSTACK_RUNNER_SSH_PORT

GPU = "NVIDIA GeForce RTX 4090"
DEADLINE_S = 60.0


def running(compute: RunpodCompute, pod_id: str) -> dict[str, Any]:
    """Where dstack finds the pod, once it believes that it runs."""
    found = SimpleNamespace(instance_id=pod_id, hostname=None, ssh_port=None, internal_ip=None)
    deadline = time.monotonic() + DEADLINE_S
    while found.hostname is None and time.monotonic() < deadline:
        compute.update_provisioning_data(found, "", "")
        time.sleep(0.05)
    return {"host": found.hostname, "port": found.ssh_port}


def refused(call: Any) -> str:
    """What dstack's own exception says of a call that fails."""
    try:
        call()
    except api.BackendError as exc:
        return f"{type(exc).__name__} {exc}"
    return "not refused"


def story(url: str, key: str) -> dict[str, Any]:
    """Everything that dstack's client can do for one machine, in order."""
    api.API_V2_URL = f"{url}/v2"
    compute = RunpodCompute(RunpodConfig(creds=RunpodCreds(api_key=key)))
    client = compute.api_client
    told: dict[str, Any] = {"key": client.validate_api_key(), "bad key": api.RunpodApiClient("x").validate_api_key()}
    command = {"entrypoint": ["/bin/sh"], "cmd": ["-c", "echo hello from $RUNPOD_POD_ID as $WHO; sleep 600"]}
    ports = [f"{DSTACK_RUNNER_SSH_PORT}/tcp"]

    credentials = client.create_container_registry_credentials(name="mine", username="me", password="hush")
    volume = client.create_network_volume(name="data", data_center_id="EU-RO-1", size=20)
    told["volume"] = client.get_network_volume(volume["id"])
    pod = client.create_pod(
        name="spotd-lab-7f3a-1",
        cloud="SECURE",
        data_center_ids=["EU-RO-1"],
        gpu_type_id=GPU,
        gpu_count=2,
        min_cpu_count_per_gpu=16,
        min_memory_in_gb_per_gpu=62,
        container_disk_in_gb=100,
        network_volume_id=volume["id"],
        volume_mount_path="/data",
        image_name="python:3.12",
        container_registry_credentials_id=credentials["id"],
        ports=ports,
        env={"WHO": "dstack"},
        **command,
    )
    told["made"] = pod
    told["reached"] = running(compute, pod["id"])
    told["one"] = client.get_pod(pod["id"])
    told["credentials"] = client.list_container_registry_credentials()
    told["credentials in use"] = refused(lambda: client.delete_container_registry_credentials(credentials["id"]))

    compute.terminate_instance(pod["id"], "EU-RO-1")
    told["again"] = client.terminate_pod(pod["id"])
    told["after"] = client.get_pod(pod["id"])
    client.delete_container_registry_credentials(credentials["id"])
    told["credentials again"] = refused(lambda: client.delete_container_registry_credentials(credentials["id"]))
    told["volume gone"] = [client.delete_network_volume(volume["id"]), client.delete_network_volume(volume["id"])]

    small = {"name": "x", "cloud": "SECURE", "container_disk_in_gb": 20, "image_name": "x"}
    told["nowhere"] = refused(
        lambda: client.create_pod(gpu_type_id=GPU, data_center_ids=["EU-SE-1"], **small, **command)
    )
    told["too large"] = refused(
        lambda: client.create_pod(gpu_type_id=GPU, min_memory_in_gb_per_gpu=999, **small, **command)
    )
    return told


if __name__ == "__main__":
    print(json.dumps(story(*sys.argv[1:])))
