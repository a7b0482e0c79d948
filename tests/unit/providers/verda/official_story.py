"""What the official `verda` client makes of the fake; run where that client is installed.

Arguments: the base URL, and `id:secret`. The last line printed is JSON.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

from verda import VerdaClient
from verda.exceptions import APIException

KEY = "spotd-lab-7f3a-1"
TYPE = "1H100.80S.30V"
IMAGE = "ubuntu-24.04-cuda-12.8-open-docker"
SCRIPT = "#!/bin/sh\necho begun\nexec sleep 600\n"


def refusal(call: Callable[[], Any]) -> list[str]:
    try:
        call()
    except APIException as no:
        return [no.code, no.message]
    raise AssertionError("it was not refused")


def wait_for(client: Any, instance_id: str, status: str) -> Any:
    one = None
    for _ in range(400):
        one = client.instances.get_by_id(instance_id)
        if one.status == status:
            return one
        time.sleep(0.05)
    raise AssertionError(f"{one} instead of {status}")


def main(url: str, key: str) -> dict[str, Any]:
    client_id, _, secret = key.partition(":")
    client = VerdaClient(client_id, secret, base_url=url)
    told: dict[str, Any] = {
        "wrong secret": refusal(lambda: VerdaClient(client_id, "wrong", base_url=url)),
        "balance": [client.balance.get().amount, client.balance.get().currency],
        "types": {
            one.instance_type: [one.price_per_hour, one.spot_price_per_hour] for one in client.instance_types.get()
        },
        "images": [one.image_type for one in client.images.get(instance_type="1V100.6V")],
        "spot": [client.instances.is_available(TYPE, is_spot=spot, location_code="FIN-03") for spot in (True, False)],
        "stock": {
            row["location_code"]: row["availabilities"] for row in client.instances.get_availabilities(is_spot=True)
        },
        "places": [row["code"] for row in client.locations.get()],
        "disks": {one.type: one.price_per_month_per_gb for one in client.volume_types.get()},
    }
    script = client.startup_scripts.create(KEY, SCRIPT)
    told["script"] = [
        client.startup_scripts.get_by_id(script.id).script,
        [one.name for one in client.startup_scripts.get()],
    ]
    told["no capacity"] = refusal(
        lambda: client.instances.create(TYPE, IMAGE, KEY, KEY, location="ICE-01", is_spot=True)
    )
    one = client.instances.create(
        TYPE, IMAGE, hostname=KEY, description=KEY, location="FIN-03", is_spot=True, contract="SPOT",
        pricing="FIXED_PRICE", startup_script_id=script.id, wait_for_status=None,
        os_volume={"name": KEY, "size": 60, "on_spot_discontinue": "keep_detached"},
    )  # fmt: skip
    told["ordered"] = [one.status, one.os_volume_id, one.is_spot, one.contract, one.pricing, float(one.price_per_hour)]
    told["too early"] = refusal(lambda: client.instances.action(one.id, "delete"))
    running = wait_for(client, one.id, "running")
    told["running"] = [[row.id for row in client.instances.get("running")] == [one.id], running.ip]
    client.startup_scripts.delete_by_id(script.id)
    told["volume"] = [client.volumes.get_by_id(running.os_volume_id).status, client.volumes.get()[0].name]
    client.instances.action(one.id, "delete", volume_ids=[running.os_volume_id])
    wait_for(client, one.id, "discontinued")
    told["again"] = refusal(lambda: client.instances.action(one.id, "delete"))
    told["left"] = [client.instances.get(), client.volumes.get(), [row.name for row in client.volumes.get_in_trash()]]
    client.volumes.delete_by_id(running.os_volume_id, is_permanent=True)
    told["trash"] = client.volumes.get_in_trash()
    told["unknown"] = refusal(lambda: client.instances.get_by_id("00000000-0000-4000-8000-000000000000"))
    return told


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])))
