"""One instance of the fake from launch to oblivion, and the two rows that tell of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import Enum
from typing import Any

from spotd_providers.contract.values import MicroUsdPerHour
from tests.fakes.aws.catalog import Kind, Zone
from tests.fakes.aws.wire import iso


class Phase(Enum):
    """EC2's instance states with their codes."""

    PENDING = ("pending", 0)
    RUNNING = ("running", 16)
    SHUTTING_DOWN = ("shutting-down", 32)
    TERMINATED = ("terminated", 48)
    STOPPED = ("stopped", 80)

    @property
    def exists(self) -> bool:
        return self not in (Phase.SHUTTING_DOWN, Phase.TERMINATED)


@dataclass(slots=True, kw_only=True)
class SpotRequest:
    """The one-time request behind a spot instance; its status tells of an interruption before the instance does."""

    request_id: str
    state: str
    code: str
    message: str
    updated_at: datetime
    tags: Mapping[str, str]


@dataclass(slots=True, kw_only=True)
class FakeInstance:
    """What somebody launched.

    Attributes:
        max_price: of a spot instance, micro-dollars per hour.
        action_at: when the announced interruption happens; the metadata service then tells it.
        rebalance_at: when a rebalance recommendation was given.
        runs: whether it has a process (foreign ones have none).
        reservation: of the launch that made it, perhaps with others.
        launch_index: which of the machines of that launch it is, from 0.
        address: its private one: of this computer's loopback network, so that its processes can bind it.
    """

    instance_id: str
    kind: Kind
    zone: Zone
    image: str
    token: str
    tags: Mapping[str, str]
    user_data: str
    volume_gb: int
    launched_at: datetime
    spot: SpotRequest | None = None
    max_price: MicroUsdPerHour | None = None
    phase: Phase = Phase.PENDING
    running_at: datetime | None = None
    ended_at: datetime | None = None
    interrupted: bool = False
    reason: tuple[str, str] | None = None
    action_at: datetime | None = None
    rebalance_at: datetime | None = None
    metadata: dict[str, str] = field(default_factory=dict)
    runs: bool = True
    reservation: str = ""
    launch_index: int = 0
    address: str = "127.0.0.1"
    placement_group: str = ""
    behaviour: str = "terminate"

    @property
    def pool(self) -> str:
        return f"{self.kind.name}:{self.zone.name}"

    @property
    def label(self) -> str | None:
        return self.tags.get("spotd:key")

    def state(self) -> dict[str, Any]:
        name, code = self.phase.value
        return {"code": code, "name": name}

    def row(self, edits: Mapping[str, Any], *, with_tags: bool = True) -> dict[str, Any]:
        """The instance as DescribeInstances tells it."""
        code, message = self.reason or (None, None)
        row = {
            "instanceId": self.instance_id,
            "imageId": self.image,
            "instanceState": self.state(),
            "reason": f"{message} ({iso(self.ended_at)})" if message and self.ended_at else "",
            "instanceType": self.kind.name,
            "launchTime": iso(self.launched_at),
            "placement": {
                "availabilityZone": self.zone.name,
                "availabilityZoneId": self.zone.zone_id,
                "tenancy": "default",
                "groupName": self.placement_group,
            },
            "amiLaunchIndex": self.launch_index,
            "privateIpAddress": self.address,
            "subnetId": self.zone.subnet,
            "architecture": self.kind.arch,
            "stateReason": {"code": code, "message": message} if code else None,
            "instanceLifecycle": "spot" if self.spot else None,
            "spotInstanceRequestId": self.spot.request_id if self.spot else None,
            "clientToken": self.token or None,
            "tagSet": tag_set(self.tags) if with_tags else [],
        }
        return {**row, **edits}

    def request_row(self) -> dict[str, Any]:
        """Its spot request as DescribeSpotInstanceRequests tells it."""
        spot = self.spot
        if spot is None:
            return {}
        return {
            "spotInstanceRequestId": spot.request_id,
            "state": spot.state,
            "type": "one-time",
            "status": {"code": spot.code, "message": spot.message, "updateTime": iso(spot.updated_at)},
            "instanceId": self.instance_id,
            "createTime": iso(self.launched_at),
            "launchedAvailabilityZone": self.zone.name,
            "tagSet": tag_set(spot.tags),
        }


def tag_set(tags: Mapping[str, str]) -> list[dict[str, str]]:
    return [{"key": key, "value": value} for key, value in tags.items()]
