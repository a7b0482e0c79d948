"""Disks that outlived their machines: found by our tags in every region, and deleted.

Every disk of a launch is to go with its machine. One may stay all the same: that was changed on the running
machine, or AWS failed half-way through a launch. It would cost for ever without being noticed. What carries
our tags, hangs on no machine for a while, and whose attempt has no machine any more, is deleted.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, timedelta
from typing import Final

from spotd_providers.aws.answers import contract_errors
from spotd_providers.aws.instances import STATES
from spotd_providers.aws.optional import Optional
from spotd_providers.aws.region import Region
from spotd_providers.aws.sdk import Sdk
from spotd_providers.aws.wire import INSTALL_TAG, KEY_TAG, AwsInstanceRow, VolumeRow
from spotd_providers.contract.provider import Services
from spotd_providers.contract.values import AttemptKey, InstanceState
from spotd_providers.kit.keys import key_of
from spotd_providers.kit.shapes import row_or_none

SWEEP_EVERY: Final = timedelta(hours=1)
AGE_MIN: Final = timedelta(minutes=15)
"""A disk is on no machine for a moment while its machine is being made."""


class Volumes:
    """The disks of one region.

    Attributes:
        left: the last sweep, with the names of what it found and may not judge.
    """

    def __init__(self, region: Region, sdk: Sdk, services: Services) -> None:
        self._region = region
        self._sdk = sdk
        self._services = services
        self.left = Optional[Sequence[str]](services, self._sweep, without=(), fresh=SWEEP_EVERY, kept=SWEEP_EVERY)

    async def sweep(self) -> None:
        """Delete what is left over if a sweep is due; a failure is logged once."""
        before = self.left.last_error
        await self.left.get()
        if self.left.last_error not in ("", before):
            self._services.log.warning("aws.volumes_not_swept", region=self._region.name, detail=self.left.last_error)

    async def strays(self) -> Sequence[VolumeRow]:
        """Return our disks that are attached to no machine.

        Raises:
            ProviderError: AWS does not list them.
        """
        now = self._services.clock.now()
        rows = (row_or_none(VolumeRow, raw) for raw in await self._region.volume_rows())
        return [
            row
            for row in rows
            if row is not None
            and row.State == "available"
            and row.tags.get(INSTALL_TAG) == self._services.install
            and now - row.CreateTime.astimezone(UTC) >= AGE_MIN
        ]

    async def _sweep(self) -> Sequence[str]:
        left = []
        for row in await self.strays():
            key = key_of(row.tags.get(KEY_TAG), self._services.install)
            if key is None or await self._has_machine(key):
                left.append(row.VolumeId)
                continue
            with contract_errors("delete_volume", self._services.rng, unless="InvalidVolume.NotFound"):
                await self._sdk.call("ec2", self._region.name, "delete_volume", VolumeId=row.VolumeId)
            self._services.log.warning(
                "aws.stray_volume_deleted", volume=row.VolumeId, region=self._region.name, gb=row.Size, key=key
            )
        return left

    async def _has_machine(self, key: AttemptKey) -> bool:
        rows = [row_or_none(AwsInstanceRow, raw) for raw in await self._region.machine_rows(f"tag:{KEY_TAG}", str(key))]
        return any(
            row is None or row.State is None or STATES.get(row.State.Name) is not InstanceState.GONE for row in rows
        )


def summary(strays: Sequence[VolumeRow]) -> str:
    shown = ", ".join(row.VolumeId for row in strays[:3]) + (", ..." if len(strays) > 3 else "")
    return f"{len(strays)} disks of ended machines are left ({shown}), {sum(row.Size for row in strays)} GB"
