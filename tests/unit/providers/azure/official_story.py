"""What the official `azure-mgmt-compute` client makes of the fake, and of what the adapter sends; run where it is.

Arguments: the base URL, and as JSON the subscription, a token, a machine's name and the body of its launch. The last
line printed is JSON.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from azure.core.pipeline.policies import SansIOHTTPPolicy
from azure.mgmt.compute import ComputeManagementClient
from azure.mgmt.compute.models import VirtualMachine


class Bearer(SansIOHTTPPolicy[Any, Any]):  # type: ignore[misc] # untyped where the client is not installed
    """The client's own policy refuses plain http, which is all that a fake speaks."""

    def __init__(self, token: str) -> None:
        self._token = token

    def on_request(self, request: Any) -> None:
        request.http_request.headers["Authorization"] = f"Bearer {self._token}"


class NoCredential:
    def get_token(self, *scopes: str, **_: Any) -> Any:
        raise AssertionError("the policy has the token")


def main(url: str, text: str) -> dict[str, Any]:
    given = json.loads(text)
    client = ComputeManagementClient(
        NoCredential(), given["subscription"], base_url=url, authentication_policy=Bearer(given["token"])
    )
    body = VirtualMachine(given["body"])
    one = body.properties
    nic = one.network_profile.network_interface_configurations[0]
    ip = nic.properties.ip_configurations[0].properties
    disk, login = one.storage_profile.os_disk, one.os_profile.linux_configuration
    shown = client.virtual_machines.get("spotd", given["name"], expand="instanceView")
    return {
        "sent": {
            "identity": body.identity,
            "place": [body.location, body.zones, body.tags["spotd-key"]],
            "market": [one.priority, one.eviction_policy, one.billing_profile.max_price],
            "size": one.hardware_profile.vm_size,
            "disk": [disk.name, disk.create_option, disk.delete_option, disk.disk_size_gb],
            "storage": disk.managed_disk.storage_account_type,
            "image": one.storage_profile.image_reference.offer,
            "login": [login.disable_password_authentication, login.ssh.public_keys[0].key_data.partition(" ")[0]],
            "script": len(one.os_profile.custom_data) > 100,
            "interface": [nic.name, nic.properties.delete_option, nic.properties.primary, nic.tags["spotd-key"]],
            "address": [
                ip.public_ip_address_configuration.properties.delete_option,
                ip.public_ip_address_configuration.sku.name,
                ip.public_ip_address_configuration.tags["spotd-key"],
            ],
            "console": one.diagnostics_profile.boot_diagnostics.enabled,
        },
        "listed": [vm.name for vm in client.virtual_machines.list("spotd")],
        "state": [shown.properties.provisioning_state, [row.code for row in shown.properties.instance_view.statuses]],
        "sizes": sorted(
            row.name
            for row in client.resource_skus.list(filter="location eq 'westeurope'")
            if any(one.name == "GPUs" for one in row.capabilities or [])
        ),
        "quota": [row.limit for row in client.usage.list("westeurope") if row.name.value == "lowPriorityCores"],
        "console": client.virtual_machines.retrieve_boot_diagnostics_data("spotd", given["name"])[
            "serialConsoleLogBlobUri"
        ].partition("?")[0],
        "end": client.virtual_machines.begin_delete(
            "spotd", given["name"], force_deletion=True, polling=False
        ).status(),
    }


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:]), default=str))
