"""What the official `openstacksdk` makes of the fake; run where that client is installed.

Arguments: the base URL, and `id:secret`. The last line printed is JSON.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import openstack
from openstack.exceptions import HttpException

KEY = "spotd-lab-7f3a-1"


def refusal(call: Callable[[], Any]) -> list[Any]:
    try:
        call()
    except HttpException as no:
        return [no.status_code, no.details or str(no)]
    raise AssertionError("it was not refused")


def wait_for(client: Any, server_id: str, status: str) -> Any:
    one = None
    for _ in range(400):
        one = client.compute.get_server(server_id)
        if one.status == status:
            return one
        time.sleep(0.05)
    raise AssertionError(f"{one} instead of {status}")


def main(url: str, key: str) -> dict[str, Any]:
    credential_id, _, secret = key.partition(":")
    client = openstack.connect(
        load_yaml_config=False,
        load_envvars=False,
        auth_type="v3applicationcredential",
        auth={"auth_url": url, "application_credential_id": credential_id, "application_credential_secret": secret},
        region_name="GRA11",
        compute_default_microversion="2.74",
    )
    compute = client.compute
    flavors = {one.name: one for one in compute.flavors(details=True, limit=2)}
    image = max(client.image.images(name="Ubuntu 24.04"), key=lambda one: one.created_at)
    networks = [one.name for one in client.network.networks()]
    limits = compute.get_limits().absolute
    body = {
        "name": KEY,
        "flavor_id": flavors["l4-90"].id,
        "image_id": image.id,
        "networks": "auto",
        "user_data": "IyEvYmluL3NoCmVjaG8gYmVndW4KZXhlYyBzbGVlcCA2MDAK",
        "has_config_drive": True,
        "metadata": {"spotd-key": KEY},
    }
    one = compute.create_server(**body)
    running = wait_for(client, one.id, "ACTIVE")
    seen = {
        "project": client.current_project_id,
        "flavors": {name: [one.vcpus, one.ram, one.disk] for name, one in flavors.items()},
        "specs": flavors["gpu.a100.spot"].extra_specs,
        "image": image.id,
        "networks": networks,
        "limits": [limits.instances, limits.instances_used],
        "made": [one.status, bool(one.admin_password)],
        "running": [running.flavor["original_name"], running.metadata, running.task_state, running.fault],
        "address": [row["addr"] for rows in running.addresses.values() for row in rows],
        "found": [row.id == one.id for row in compute.servers(name=f"^{KEY}$")],
        "missed": list(compute.servers(name="^nothing$")),
        "no flavour": refusal(lambda: compute.create_server(**{**body, "flavor_id": "f-none"})),
        "no image": refusal(lambda: compute.create_server(**{**body, "image_id": "i-none"})),
    }
    for _ in range(200):
        seen["console"] = compute.get_server_console_output(one.id, length=9)["output"]
        if seen["console"]:
            break
        time.sleep(0.05)
    compute.delete_server(one.id)
    compute.wait_for_delete(running, interval=0.05, wait=20)
    seen["gone"] = refusal(lambda: compute.get_server(one.id))
    disk = {"boot_index": 0, "uuid": image.id, "source_type": "image", "destination_type": "volume"}
    disks = [{**disk, "volume_size": 20, "delete_on_termination": False}]
    big = compute.create_server(
        name=KEY, flavor_id=flavors["hm.v100s"].id, networks="auto", block_device_mapping=disks, metadata={}
    )
    wait_for(client, big.id, "ACTIVE")
    seen["volumes"] = [[row.name, row.size, row.status] for row in client.block_storage.volumes(details=True)]
    compute.delete_server(big.id, force=True)
    compute.wait_for_delete(big, interval=0.05, wait=20)
    for row in client.block_storage.volumes(details=True):
        client.block_storage.delete_volume(row)
    seen["left"] = [row.id for row in client.block_storage.volumes(details=True)]
    return seen


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])))
