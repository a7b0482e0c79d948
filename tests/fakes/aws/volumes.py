"""The disks of the fake: made with a machine, and gone with it unless they were told to stay."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from itertools import count
from typing import Any

from tests.fakes.aws.catalog import Zone
from tests.fakes.aws.wire import Refusal, iso


@dataclass(slots=True, kw_only=True)
class FakeVolume:
    """One disk; `instance_id` is empty while it hangs on nothing."""

    volume_id: str
    zone: Zone
    gb: int
    tags: Mapping[str, str]
    created_at: datetime
    instance_id: str
    goes_along: bool

    def row(self) -> dict[str, Any]:
        """The disk as DescribeVolumes tells it."""
        return {
            "volumeId": self.volume_id,
            "size": self.gb,
            "availabilityZone": self.zone.name,
            "status": "in-use" if self.instance_id else "available",
            "createTime": iso(self.created_at),
            "tagSet": [{"key": key, "value": value} for key, value in self.tags.items()],
            "volumeType": "gp3",
        }


class Volumes:
    """All disks of the account, by id."""

    def __init__(self) -> None:
        self.all: dict[str, FakeVolume] = {}
        self._ids = count(0x0D15C0001)

    def add(
        self, zone: Zone, gb: int, tags: Mapping[str, str], at: datetime, *, instance_id: str = "", goes_along: bool
    ) -> FakeVolume:
        volume = FakeVolume(
            volume_id=f"vol-{next(self._ids):017x}",
            zone=zone,
            gb=gb,
            tags=dict(tags),
            created_at=at,
            instance_id=instance_id,
            goes_along=goes_along,
        )
        self.all[volume.volume_id] = volume
        return volume

    def machine_ended(self, instance_id: str) -> None:
        """What was to go along with the machine is gone; the rest hangs on nothing and costs on."""
        for volume in [v for v in self.all.values() if v.instance_id == instance_id]:
            if volume.goes_along:
                del self.all[volume.volume_id]
            else:
                volume.instance_id = ""

    def delete(self, volume_id: str, region: str) -> None:
        """
        Raises:
            Refusal: there is none of this id, or it is in use.
        """
        volume = self.all.get(volume_id)
        if volume is None or volume.zone.region != region:
            raise Refusal("InvalidVolume.NotFound", f"The volume '{volume_id}' does not exist.")
        if volume.instance_id:
            raise Refusal("VolumeInUse", f"Volume {volume_id} is currently attached to {volume.instance_id}")
        del self.all[volume_id]
