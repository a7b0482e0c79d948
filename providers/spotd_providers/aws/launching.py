"""The request that buys one machine, and its answer."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any, Final

from spotd_providers.aws.region import MachineImage
from spotd_providers.aws.settings import AwsSettings
from spotd_providers.aws.userdata import SCRIPT_BYTES_MAX, user_data
from spotd_providers.aws.wire import INSTALL_TAG, KEY_TAG
from spotd_providers.contract.errors import PriceMoved
from spotd_providers.contract.money import MICRO
from spotd_providers.contract.values import AttemptKey, InstallId, LaunchRequest, Market
from spotd_providers.kit.answers import rejected

WHO: Final = "AWS"
TOKEN_CHARS_MAX: Final = 64
TAG_CHARS_MAX: Final = 256
TAGGED: Final = ("instance", "volume", "network-interface")
MAX_PRICE_MICRO_USD_MIN: Final = 1_001


def client_token(key: AttemptKey) -> str:
    """Return the idempotency token of a launch: the key, or its hash if the key is too long."""
    if len(key) <= TOKEN_CHARS_MAX:
        return str(key)
    return hashlib.sha256(key.encode()).hexdigest()


def run_parameters(request: LaunchRequest, image: MachineImage, subnet: str, settings: AwsSettings) -> dict[str, Any]:
    """Return the parameters of RunInstances for this request.

    Tags are given with the launch, so that no moment exists in which the machine is orphaned. The root disk is the
    job's disk on top of what the machine image itself takes.

    Raises:
        PriceMoved: the offer is above what may be paid.
        RequestRejected: it can not be asked for.
    """
    offer = request.offer
    if len(request.start_script.encode()) > SCRIPT_BYTES_MAX:
        raise rejected(WHO, "start_script", f"it has {len(request.start_script.encode())} of {SCRIPT_BYTES_MAX} bytes")
    if len(request.key) > TAG_CHARS_MAX:
        raise rejected(WHO, "key", f"a tag has at most {TAG_CHARS_MAX} characters")
    try:
        script = user_data(
            image=request.image,
            start_script=request.start_script,
            container=settings.container,
            has_gpu=offer.gpu_count > 0,
        )
    except ValueError as exc:
        raise rejected(WHO, "image" if "image" in str(exc) else "start_script", str(exc)) from exc
    disk = {
        "VolumeSize": image.disk_gb + request.disk_gb,
        "VolumeType": "gp3",
        "Throughput": settings.volume_mb_per_s,
        "DeleteOnTermination": True,
    }
    spot = offer.market is Market.SPOT
    parameters: dict[str, Any] = {
        "ImageId": image.image_id,
        "InstanceType": offer.extra["type"],
        "MinCount": 1,
        "MaxCount": 1,
        "ClientToken": client_token(request.key),
        "SubnetId": subnet,
        "UserData": script,
        "InstanceInitiatedShutdownBehavior": "terminate",
        # A container on a bridge network is one hop further from the metadata service.
        "MetadataOptions": {
            "HttpTokens": "required",
            "HttpPutResponseHopLimit": 2,
            "InstanceMetadataTags": "disabled",
        },
        "BlockDeviceMappings": [
            {"DeviceName": image.root_device, "Ebs": disk},
            # The image may say that its other disks outlive the machine, and cost for ever.
            *({"DeviceName": name, "Ebs": {"DeleteOnTermination": True}} for name in image.other_devices),
        ],
        "TagSpecifications": tag_specifications(request.install, str(request.key), spot=spot),
    }
    if settings.security_groups:
        parameters["SecurityGroupIds"] = list(settings.security_groups)
    if spot:
        if request.price_max < MAX_PRICE_MICRO_USD_MIN:
            raise rejected(WHO, "price_max", "AWS takes no spot price of $0.001 or less")
        capped = {"MaxPrice": f"{request.price_max / MICRO:.6f}"} if settings.max_price == "ceiling" else {}
        parameters["InstanceMarketOptions"] = {
            "MarketType": "spot",
            "SpotOptions": {
                "SpotInstanceType": "one-time",
                "InstanceInterruptionBehavior": "terminate",
                **capped,
            },
        }
    elif offer.gpu_price > request.price_max:
        raise PriceMoved(f"{offer.pool} costs ${offer.gpu_price / MICRO:.4f}/h, agreed were less")
    return parameters


def tag_specifications(install: InstallId, key: str, *, spot: bool) -> list[dict[str, Any]]:
    """Build our tags for everything that a launch makes; the least policy allows no launch without them."""
    tags = [{"Key": INSTALL_TAG, "Value": str(install)}, {"Key": KEY_TAG, "Value": key}]
    kinds = (*TAGGED, "spot-instances-request") if spot else TAGGED
    return [{"ResourceType": kind, "Tags": tags} for kind in kinds]


def launched_row(answer: Mapping[str, Any]) -> Any | None:
    """Return the row of the launched machine, or `None` if the answer does not hold exactly one."""
    rows = answer.get("Instances")
    return rows[0] if isinstance(rows, list) and len(rows) == 1 else None
