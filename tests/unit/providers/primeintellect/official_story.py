"""What the official `prime` client makes of the fake; run where that client is installed.

Arguments: the base URL, and the API key. The last line printed is JSON.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

KEY = "spotd-lab-7f3a-1"


def main(url: str, key: str) -> dict[str, Any]:
    os.environ["PRIME_API_BASE_URL"] = url
    from prime_cli.api.availability import AvailabilityClient
    from prime_cli.api.pods import PodsClient
    from prime_cli.api.wallet import WalletClient
    from prime_cli.core import APIClient, APIError

    client = APIClient(api_key=key)
    market, pods, wallet = AvailabilityClient(client), PodsClient(client), WalletClient(client)
    rows = [row for found in market.get().values() for row in found]
    (row,) = market.get(regions=["eu_north"], gpu_count=1)["A100_80GB"]
    told: dict[str, Any] = {
        "rows": len(rows),
        "types": market.get_available_gpu_types(),
        "row": [row.cloud_id, row.prices.price, row.is_spot, row.stock_status, row.disk.default_count],
    }
    wish = {
        "name": KEY, "cloudId": row.cloud_id, "gpuType": row.gpu_type, "socket": row.socket, "gpuCount": row.gpu_count,
        "diskSize": 100, "vcpus": None, "memory": None, "image": "custom_template", "customTemplateId": "template-1",
        "dataCenterId": row.data_center, "country": row.country, "security": row.security, "maxPrice": None,
        "envVars": [{"key": "SPOTD_START", "value": "echo begun; exec sleep 600"}], "jupyterPassword": None,
        "sshKeyId": None, "autoRestart": False, "prepaidForHr": None,
    }  # fmt: skip
    order: dict[str, Any] = {"pod": wish, "provider": {"type": row.provider}, "disks": [], "team": None}
    pod = pods.create(order)
    told["ordered"] = [pod.status, pod.name, pod.price_hr, pod.is_spot]
    status = None
    for _ in range(400):
        (status,) = pods.get_status([pod.id])
        if status.status == "ACTIVE" and status.installation_progress == 100:
            break
        time.sleep(0.05)
    assert status is not None
    told["active"] = [
        status.status,
        status.ssh_connection,
        status.ip,
        status.cost_per_hr,
        len(status.prime_port_mapping),
    ]
    told["listed"] = [[one.id for one in pods.list().data] == [pod.id], pods.get(pod.id).installation_status]
    pods.delete(pod.id)
    for _ in range(400):
        if not pods.list().data:
            break
        time.sleep(0.05)
    (past,) = pods.history().data
    told["past"] = [past.id == pod.id, past.total_billed_price]
    purse = wallet.get()
    told["wallet"] = [purse.balance_usd, [[one.resource_id == pod.id, one.amount_usd] for one in purse.recent_billings]]
    try:
        pods.create({**order, "pod": {**wish, "cloudId": "old"}})
    except APIError as no:
        told["old id"] = str(no)
    return told


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])))
