"""The checks of a create of a server, as Nova makes them before it orders anything."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Mapping
from typing import Any, Final

from tests.fakes.openstack.cloud import OpenstackCloud
from tests.fakes.openstack.records import Flavor, OpenstackNetwork, OpenstackServer
from tests.fakes.rest import RestRefusal, is_text

VERSION_MIN: Final = (2, 1)
_METADATA_KEY: Final = re.compile(r"[a-zA-Z0-9-_:. ]{1,255}")
# fmt: off
_FIELDS: Final = {
    **dict.fromkeys((
        "name", "imageRef", "flavorRef", "adminPass", "metadata", "networks", "OS-DCF:diskConfig", "accessIPv4",
        "accessIPv6", "availability_zone", "block_device_mapping", "block_device_mapping_v2", "config_drive",
        "key_name", "min_count", "max_count", "return_reservation_id", "security_groups", "user_data",
    ), VERSION_MIN),
    "description": (2, 19), "tags": (2, 52), "trusted_image_certificates": (2, 63), "host": (2, 74),
    "hypervisor_hostname": (2, 74), "hostname": (2, 90),
}
"""The fields of a server and the version that each came with; any other is refused."""
_MAPPING: Final = {
    "volume_id", "snapshot_id", "volume_size", "device_name", "delete_on_termination", "no_device", "connection_info",
    "source_type", "uuid", "image_id", "destination_type", "guest_format", "device_type", "disk_bus", "boot_index",
    "tag", "volume_type",
}
# fmt: on


class Orders:
    """Creates of servers under one microversion."""

    def __init__(self, cloud: OpenstackCloud, version: tuple[int, int]) -> None:
        self.cloud, self.version = cloud, version

    def order(self, region: str, wish: Any) -> OpenstackServer:
        """
        Raises:
            RestRefusal: nothing was ordered, unless the next launch was made to fail after its effect.
        """
        if not isinstance(wish, dict):
            raise RestRefusal(400, "Invalid input for field/attribute server. 'server' is a required property")
        self._require_fields(wish)
        flavor = self.cloud.flavor(region, str(wish["flavorRef"]))
        mapping = self._mapping(wish)
        image_id = wish.get("imageRef") or None
        if image_id is None and mapping is None:
            raise RestRefusal(400, "Invalid imageRef provided.")
        network = self._network(region, wish.get("networks"))
        if flavor is None or flavor.disabled:
            raise RestRefusal(400, f"Flavor {wish['flavorRef']} could not be found.")
        self._require_image(region, str(image_id or (mapping or {})["uuid"]), flavor, mapping)
        if wish.get("key_name") is not None and wish["key_name"] not in self.cloud.keypairs:
            raise RestRefusal(400, "Invalid key_name provided.")
        if wish.get("availability_zone", "nova") != "nova":
            raise RestRefusal(400, "The requested availability zone is not available")
        for group in wish.get("security_groups") or []:
            if group.get("name") != "default":
                text = f"not found for project {self.cloud.project}."
                raise RestRefusal(400, f"Security group {group.get('name')} {text}")
        return self.cloud.order(region, flavor, wish, image_id, network, mapping)

    def _require_fields(self, wish: dict[str, Any]) -> None:
        odd = [key for key in wish if key not in _FIELDS or self.version < _FIELDS[key]]
        if odd:
            text = f"Additional properties are not allowed ({odd[0]!r} was unexpected)"
            raise RestRefusal(400, f"Invalid input for field/attribute server. Value: {text}")
        for key in ("name", "flavorRef", *(("networks",) if self.version >= (2, 37) else ())):
            if key not in wish:
                raise RestRefusal(400, f"Invalid input for field/attribute server. {key!r} is a required property")
        if not is_text(wish["name"]) or wish["name"] != wish["name"].strip():
            raise RestRefusal(400, "Invalid input for field/attribute name.")
        for key in ("key_name", "availability_zone", "user_data", "imageRef"):
            if key in wish and not isinstance(wish[key], str):
                raise RestRefusal(
                    400, f"Invalid input for field/attribute {key}. {wish[key]!r} is not of type 'string'"
                )
        if "host" in wish or "hypervisor_hostname" in wish:
            raise RestRefusal(403, "Policy doesn't allow compute:servers:create:requested_destination to be performed.")
        self._require_metadata(wish.get("metadata", {}))
        _require_tags(wish.get("tags", []))
        user_data = wish.get("user_data", "")
        try:
            base64.b64decode(user_data, validate=True)
        except (ValueError, binascii.Error):
            raise RestRefusal(400, "Invalid input for field/attribute user_data. It is not a 'base64'") from None
        if len(user_data) > 65535:
            raise RestRefusal(400, "Invalid input for field/attribute user_data. It is too long")

    def _require_metadata(self, value: Any) -> None:
        if not isinstance(value, dict) or not all(
            _METADATA_KEY.fullmatch(key) and isinstance(one, str) and len(one) <= 255 for key, one in value.items()
        ):
            raise RestRefusal(400, "Invalid input for field/attribute metadata.")
        if len(value) > self.cloud.quirks.metadata_max:
            raise RestRefusal(403, f"Maximum number of metadata items exceeds {self.cloud.quirks.metadata_max}")

    def _mapping(self, wish: dict[str, Any]) -> dict[str, Any] | None:
        rows = wish.get("block_device_mapping_v2") or []
        if not isinstance(rows, list) or not all(isinstance(row, dict) and set(row) <= _MAPPING for row in rows):
            raise RestRefusal(400, "Invalid input for field/attribute block_device_mapping_v2.")
        if any("volume_type" in row for row in rows) and not self.version >= (2, 67):
            raise RestRefusal(400, "Additional properties are not allowed ('volume_type' was unexpected)")
        roots = [row for row in rows if row.get("boot_index") in (0, "0")]
        if rows and (len(roots) != 1 or wish.get("imageRef")):
            text = "Boot sequence for the instance and image/block device mapping combination is not valid."
            raise RestRefusal(400, f"Block Device Mapping is Invalid: {text}")
        if not roots:
            return None
        if (roots[0].get("source_type"), roots[0].get("destination_type")) != ("image", "volume"):
            raise RestRefusal(
                400, "Block Device Mapping is Invalid: the fake boots from volumes that are made of images"
            )
        if not str(roots[0].get("volume_size", "")).isdecimal() or int(roots[0]["volume_size"]) < 1:
            raise RestRefusal(400, "Images with destination_type 'volume' need to have a non-zero size specified")
        root: dict[str, Any] = roots[0]
        return root

    def _require_image(self, region: str, image_id: str, flavor: Flavor, mapping: Mapping[str, Any] | None) -> None:
        image = self.cloud.images.get(image_id)
        if image is None or image.region != region:
            raise RestRefusal(400, "Can not find requested image")
        if image.status != "active":
            raise RestRefusal(400, f"Image {image_id} is not active.")
        size = int(mapping["volume_size"]) if mapping else flavor.disk
        if not size:
            raise RestRefusal(403, "Only volume-backed servers are allowed for flavors with zero disk.")
        if size < image.min_disk:
            text = "Flavor's disk is smaller than the minimum size specified in image metadata."
            raise RestRefusal(
                400, f"{text} Flavor disk is {size << 30} bytes, minimum size is {image.min_disk << 30} bytes."
            )

    def _network(self, region: str, wish: Any) -> OpenstackNetwork | None:
        own = [one for one in self.cloud.networks.values() if one.region == region and not one.is_external]
        if isinstance(wish, str) and wish in ("auto", "none") and self.version >= (2, 37):
            if wish == "none":
                return None
        elif isinstance(wish, list) and all(isinstance(row, dict) for row in wish):
            nets = [self.cloud.networks.get(str(row.get("uuid"))) for row in wish]
            for row, net in zip(wish, nets, strict=True):
                if net is None or net.region != region:
                    raise RestRefusal(400, f"Network {row.get('uuid')} could not be found.")
                if net.is_external and not self.cloud.quirks.external_ports:
                    raise RestRefusal(
                        403, f"It is not allowed to create an interface on external network {net.network_id}"
                    )
            if nets:
                return nets[0]
        elif wish is not None:
            raise RestRefusal(400, f"Invalid input for field/attribute networks. Value: {wish}.")
        if len(own) > 1:
            raise RestRefusal(409, "Multiple possible networks found, use a Network ID to be more specific.")
        return own[0] if own else None


def _require_tags(value: Any) -> None:
    if not isinstance(value, list) or len(value) > 50 or len(set(map(str, value))) != len(value):
        raise RestRefusal(400, "Invalid input for field/attribute tags.")
    if not all(is_text(one, 60) and not set(one) & set("/,") for one in value):
        raise RestRefusal(400, "Invalid input for field/attribute tags.")
