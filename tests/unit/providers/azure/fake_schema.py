"""Which virtual machines the fake Azure takes, and how it lists sizes."""

from __future__ import annotations

import re
from collections.abc import Container
from datetime import datetime
from typing import Any, Final

from tests.fakes.rest import RestRefusal, is_text
from tests.unit.providers.azure.fake_records import AzureSize, AzureVm

_VM_NAME: Final = re.compile(r"[A-Za-z0-9]([A-Za-z0-9-]{0,62}[A-Za-z0-9])?")
_PARTS: Final = frozenset({"location", "zones", "tags", "properties", "plan", "identity"})
TAGS_MAX: Final = 50
TAG_CHARS_MAX: Final = 256


def require_valid(name: str, body: dict[str, Any], resources: Container[str]) -> None:
    """
    Raises:
        RestRefusal: the body is outside the schema of a virtual machine with Linux.
    """
    faults = [] if _VM_NAME.fullmatch(name) else ["name"]
    faults += [f"{one}: unknown" for one in body if one not in _PARTS]
    properties = body.get("properties")
    tags = body.get("tags") or {}
    if (
        not isinstance(tags, dict)
        or len(tags) > TAGS_MAX
        or not all(isinstance(one, str) and len(one) <= TAG_CHARS_MAX for one in tags.values())
    ):
        faults.append("tags")
    if not is_text(body.get("location")) or not isinstance(properties, dict):
        raise RestRefusal(400, "location and properties are required", code="InvalidParameter")
    if len(body.get("zones") or []) > 1 or not all(one in ("1", "2", "3") for one in body.get("zones") or []):
        faults.append("zones")
    for part in ("hardwareProfile", "storageProfile", "osProfile", "networkProfile"):
        if not isinstance(properties.get(part), dict):
            faults.append(part)
    if faults:
        raise RestRefusal(400, "Invalid: " + "; ".join(faults), code="InvalidParameter")
    _require_valid_parts(properties, resources)


def _require_valid_parts(properties: dict[str, Any], resources: Container[str]) -> None:
    faults = []
    priority, policy = properties.get("priority", "Regular"), properties.get("evictionPolicy")
    if priority not in ("Regular", "Low", "Spot", "SpotPlus") or policy not in (None, "Delete", "Deallocate"):
        faults.append("priority or evictionPolicy")
    if priority == "Regular" and (policy is not None or "billingProfile" in properties):
        faults.append("evictionPolicy and billingProfile are for Spot only")
    cap = properties.get("billingProfile", {}).get("maxPrice", -1)
    if isinstance(cap, bool) or not isinstance(cap, int | float) or not (cap == -1 or 0 < cap < 10_000):
        faults.append("billingProfile.maxPrice")
    system, login = properties["osProfile"], properties["osProfile"].get("linuxConfiguration") or {}
    keys = (login.get("ssh") or {}).get("publicKeys") or []
    if not is_text(system.get("computerName"), 64) or not is_text(system.get("adminUsername"), 64):
        faults.append("osProfile.computerName and adminUsername")
    if not system.get("adminPassword") and not all(str(one.get("keyData")).startswith("ssh-") for one in keys or [{}]):
        faults.append("osProfile: an SSH key or a password is required")
    disk = properties["storageProfile"].get("osDisk") or {}
    if disk.get("createOption") != "FromImage" or not 30 <= disk.get("diskSizeGB", 30) <= 4095:
        faults.append("storageProfile.osDisk")
    network = properties["networkProfile"]
    if not network.get("networkInterfaces") and not network.get("networkApiVersion"):
        faults.append("networkProfile.networkApiVersion")
    for nic in network.get("networkInterfaceConfigurations") or []:
        for ip in nic.get("properties", {}).get("ipConfigurations") or [{}]:
            subnet = str(ip.get("properties", {}).get("subnet", {}).get("id")).lower()
            known = subnet.partition("/providers/")[2]
            if known not in resources:
                raise RestRefusal(404, f"The subnet {subnet} was not found", code="InvalidResourceReference")
    image = properties["storageProfile"].get("imageReference") or {}
    if not image.get("id") and not all(is_text(image.get(one)) for one in ("publisher", "offer", "sku", "version")):
        faults.append("storageProfile.imageReference")
    elif image.get("offer") == "windows":
        raise RestRefusal(404, "The platform image is not available", code="ImageNotFound")
    if faults:
        raise RestRefusal(400, "Invalid: " + "; ".join(faults), code="InvalidParameter")


def sku_row(size: AzureSize, region: str) -> dict[str, Any]:
    capabilities = {
        "vCPUs": size.vcpus,
        "MemoryGB": size.memory_gb,
        "MaxResourceVolumeMB": 131_072,
        "LowPriorityCapable": size.is_spot_capable,
        "CpuArchitectureType": "Arm64" if size.is_arm else "x64",
        "EphemeralOSDiskSupported": True,
        "HyperVGenerations": "V1,V2",
        **({"GPUs": size.gpus} if size.gpus else {}),
    }
    reason = size.restrictions.get(region)
    refused = {"type": "Location", "values": [region], "restrictionInfo": {"locations": [region]}, "reasonCode": reason}
    return {
        "resourceType": "virtualMachines",
        "name": size.name,
        "family": f"standard{size.sku.split()[0]}Family",
        "locations": [region],
        "locationInfo": [{"location": region, "zones": list(size.zones), "zoneDetails": []}],
        "capabilities": [{"name": name, "value": str(value)} for name, value in capabilities.items()],
        "restrictions": [] if reason is None else [refused],
    }


def time_text(at: datetime) -> str:
    return at.strftime("%Y-%m-%dT%H:%M:%S.%f") + "0Z"


def view_of(vm: AzureVm) -> dict[str, Any]:
    """The `instanceView` of a machine."""
    codes = [f"ProvisioningState/{vm.provisioning_state.lower()}", vm.power_state]
    return {"statuses": [{"code": code, "level": "Info", "displayStatus": code} for code in codes if code is not None]}
