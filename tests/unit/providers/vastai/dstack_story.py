"""Run by an interpreter that has dstack: what its vast.ai client does and understands, as one line of JSON.

    python dstack_story.py URL KEY

Only the address is changed; what is sent and how answers are read is dstack's own.
"""

from __future__ import annotations

import json
import sys
import time
from types import SimpleNamespace
from typing import Any

import gpuhunt.providers.vastai
from dstack._internal.core.backends.vastai import compute as backend
from dstack._internal.core.backends.vastai.models import VastAIConfig, VastAICreds
from dstack._internal.core.backends.vastai.profile_options import VastAIOfferOrder, VastAIProfileOptions
from dstack._internal.core.consts import DSTACK_RUNNER_SSH_PORT
from dstack._internal.core.errors import ProvisioningError

DEADLINE_S = 60.0


def seen(compute: backend.VastAICompute, contract: int) -> dict[str, Any]:
    """Where dstack finds the machine once it believes that it runs, or why it gives it up."""
    found = SimpleNamespace(instance_id=str(contract), hostname=None, ssh_port=None)
    deadline = time.monotonic() + DEADLINE_S
    while found.hostname is None and time.monotonic() < deadline:
        try:
            compute.update_provisioning_data(found, "", "")
        except ProvisioningError as exc:
            return {"given up": str(exc)}
        time.sleep(0.1)  # the account's pace is a minute per second in the test
    return {"host": found.hostname, "port": found.ssh_port}


def bought(compute: backend.VastAICompute, offer: Any, name: str, script: str, **terms: Any) -> int:
    """One machine, bought as dstack does it."""
    contract: int = compute.api_client.create_instance(
        instance_name=name,
        bundle_id=offer.instance_name,
        image_name="python:3.12",
        onstart=script,
        disk_size=50,
        **terms,
    )
    return contract


def story(url: str, key: str) -> dict[str, Any]:
    """Everything that dstack's client can do for one machine, in order."""
    gpuhunt.providers.vastai.bundles_url = f"{url}/api/v0/bundles/"
    compute = backend.VastAICompute(VastAIConfig(creds=VastAICreds(api_key=key)))
    client = compute.api_client
    client.s.base_url = f"{url}/api/"
    told: dict[str, Any] = {"key": client.auth_test()}
    options = VastAIProfileOptions(offer_order=VastAIOfferOrder.PRICE)
    offers = compute._make_catalog(options).query(provider="vastai", gpu_name="RTX3090", min_gpu_count=1)
    told["offers"] = [[o.instance_name, o.spot, o.price, o.gpu_name, o.gpu_count, o.location] for o in offers]
    spot = next(offer for offer in offers if offer.spot)
    bid = spot.provider_data["min_bid"]

    script = f"echo hello from $CONTAINER_ID; sleep 600 # ssh is behind {DSTACK_RUNNER_SSH_PORT}"
    first = bought(compute, spot, "spotd-lab-7f3a-1", script, bid=bid)
    told["first"] = {"contract": first, "bid": bid, "reached": seen(compute, first)}
    told["row"] = {name: value for name, value in client.get_instance(first).items() if name in ("label", "is_bid")}

    try:
        bought(compute, spot, "spotd-lab-7f3b-1", script)
    except backend.VastAICreateInstanceError as exc:
        told["taken"] = [exc.resp, exc.created_instance_id]
    compute.terminate_instance(str(first), "")
    time.sleep(0.1)
    compute.terminate_instance(str(first), "")
    told["gone"] = client.get_instance(first)
    time.sleep(0.1)

    try:
        bought(compute, spot, "spotd-lab-7f3c-1", script, bid=bid / 2)
    except backend.VastAICreateInstanceError as exc:
        told["low"] = {"left": exc.created_instance_id, "reached": seen(compute, exc.created_instance_id)}
        told["low"]["ended"] = backend._terminate_instance_with_rate_limit_retry(client, exc.created_instance_id, 4)
    time.sleep(0.1)
    told["on demand"] = bought(compute, spot, "spotd-lab-7f3d-1", script)
    client.s.headers["Authorization"] = "Bearer wrong"
    told["bad key"] = client.auth_test()
    return told


if __name__ == "__main__":
    print(json.dumps(story(*sys.argv[1:])))
