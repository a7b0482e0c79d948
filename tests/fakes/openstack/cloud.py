"""The state of the fake OpenStack cloud: servers and their processes, volumes, images, networks and the bill."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from spotd_providers.local.hosts import HostClock
from tests.fakes.cloud import NOTHING
from tests.fakes.openstack.records import NO_HOST, Flavor, OpenstackQuirks, refusal
from tests.fakes.rest import MONTH_HOURS, RestCloud, RestMachine, usd

GB_MONTH_USD = 0.1
SOFT_KEPT = timedelta(hours=1)


@dataclass(slots=True, kw_only=True)
class OpenstackServer(RestMachine):
    """One server. `name` may be another's, too."""

    name: str
    metadata: dict[str, str]
    flavor: Flavor
    body: Mapping[str, Any]
    task_state: str | None = "scheduling"
    active_at: datetime | None = None
    fault: dict[str, Any] | None = None
    locked: bool = False
    volume_ids: list[str] = field(default_factory=list)
    updated_at: datetime | None = None


@dataclass(slots=True, kw_only=True)
class OpenstackVolume:
    """One volume of Cinder; what Nova makes has no name."""

    volume_id: str
    size: int
    made_at: datetime
    name: str = ""
    status: str = "creating"
    server_id: str | None = None
    dies_with_server: bool = True
    metadata: dict[str, str] = field(default_factory=dict)


class OpenstackCloud(RestCloud[OpenstackQuirks, OpenstackServer]):
    """One project in one region."""

    def __init__(self, root: Path, *, clock: HostClock, quirks: OpenstackQuirks | None = None) -> None:
        super().__init__(root, clock=clock, quirks=quirks or OpenstackQuirks())
        self.project = "9f2c4a1be6d84c0f9d3a55aa01c7e6b2"
        self.credential_id, self.secret = "fake-app-cred-0001", "fake-app-secret"
        self.username, self.password = "user-x7", "fake-password"
        self.tokens: dict[str, datetime] = {}
        self.flavors: dict[str, Flavor] = {}
        self.volumes: dict[str, OpenstackVolume] = {}
        self.images = {
            "i-0001": {"name": "Ubuntu 24.04 - NVIDIA docker", "min_disk": 20, "created_at": "2026-05-01T00:00:00Z"},
            "i-0002": {"name": "Ubuntu 24.04 - NVIDIA docker", "min_disk": 20, "created_at": "2026-09-01T00:00:00Z"},
            "i-0003": {"name": "Debian 13", "min_disk": 2, "created_at": "2026-09-01T00:00:00Z"},
        }
        self.networks = {"n-0001": "Ext-Net"}
        self.keypairs = {"laptop"}

    # What the market and the faults do.

    def stock(self, *flavors: Flavor) -> None:
        with self.lock:
            self.flavors.update({one.flavor_id: one for one in flavors})

    def flavor(self, name: str) -> Flavor:
        return next(one for one in self.flavors.values() if one.name == name)

    def sell_out(self, name: str) -> None:
        """No host takes a server of this flavour any more."""
        with self.lock:
            self.flavor(name).free = 0

    def break_auth(self) -> None:
        """Secrets are others, and tokens are void."""
        with self.lock:
            self.secret = self.password = "another-secret"
            self.tokens.clear()

    def revoke_tokens(self) -> None:
        with self.lock:
            self.tokens.clear()

    def preempt(self, machine_id: str) -> None:
        """The operator deletes the server with its disk, without a word."""
        with self.lock:
            self._finish(self.rented[machine_id], self.clock.now(), "preempted")

    def fail(self, machine_id: str, message: str) -> None:
        """The server goes to ERROR with this fault."""
        with self.lock:
            one = self.rented[machine_id]
            one.boot_no += 1
            self._err(one, self.clock.now(), message)

    def lock_server(self, machine_id: str) -> None:
        with self.lock:
            self.rented[machine_id].locked = True

    def add_foreign(self, name: str, metadata: Mapping[str, str] | None = None) -> OpenstackServer:
        """Somebody's running server in the same project, without a process."""
        with self.lock:
            one = self._new({"name": name, "metadata": dict(metadata or {})}, next(iter(self.flavors.values())))
            one.is_ours = False
            one.launched_at -= max(self.quirks.list_lag, self.quirks.show_lag)
            self._come_up(one, self.clock.now())
            return one

    # What the customer does.

    def create(self, body: Mapping[str, Any], flavor: Flavor) -> OpenstackServer:
        """Take the launch of a checked body; whether there is a host for it is known later."""
        one = self._new(body, flavor)
        if "user_data" in body:
            one.script = base64.b64decode(body["user_data"]).decode()
        if flavor.free <= 0:
            self._later(one, self.quirks.schedules, lambda it, at: self._err(it, at, NO_HOST), since=one.launched_at)
        else:
            flavor.free -= 1
            self._later(one, self.quirks.schedules, self._spawn, since=one.launched_at)
            self._later(one, self.quirks.boot, self._come_up, since=one.launched_at)
        self._raise_after_launch()
        return one

    def delete(self, one: OpenstackServer, *, force: bool = False) -> None:
        """
        Raises:
            RestRefusal: the server is locked, or the policy forbids it.
        """
        if force and self.quirks.forbids_force:
            raise refusal(403, "Policy doesn't allow os_compute_api:os-deferred-delete:force to be performed.")
        if one.locked:
            raise refusal(409, f"Instance {one.machine_id} is locked")
        if one.deaths_left > 0:
            one.deaths_left -= 1
            return
        if one.task_state == "deleting" and not force:
            return
        now = self.clock.now()
        self.machines.kill(one.machine_id)
        one.task_state = "deleting"
        one.boot_no += 1
        if not self.quirks.deletes_hang or force:
            self._later(one, self.quirks.ending, lambda it, at: self._deleted(it, at, force=force), since=now)

    def delete_volume(self, volume: OpenstackVolume) -> None:
        """
        Raises:
            RestRefusal: a server has it.
        """
        if volume.status != "available":
            raise refusal(400, "Invalid volume: Volume status must be available or error")
        self._purge(volume, self.clock.now())

    # Inside.

    def _new(self, body: Mapping[str, Any], flavor: Flavor) -> OpenstackServer:
        metadata = dict(body.get("metadata") or {})
        one = OpenstackServer(
            machine_id=self.uuid(),
            label=metadata.get("spotd-key", body["name"]),
            status="BUILD",
            launched_at=self.clock.now(),
            price=usd(flavor.usd),
            gpus=flavor.gpus,
            is_spot=flavor.is_spot,
            name=body["name"],
            metadata=metadata,
            flavor=flavor,
            body=body,
        )
        return self._keep(one, bills_now=False)

    def _spawn(self, one: OpenstackServer, at: datetime) -> None:
        one.task_state = "spawning"
        for disk in one.body.get("block_device_mapping_v2") or []:
            volume = OpenstackVolume(
                volume_id=self.uuid(), size=disk["volume_size"], made_at=at, status="in-use",
                server_id=one.machine_id, dies_with_server=disk.get("delete_on_termination", False),
            )  # fmt: skip
            self.volumes[volume.volume_id] = volume
            one.volume_ids.append(volume.volume_id)
            hourly = usd(GB_MONTH_USD * volume.size / MONTH_HOURS)
            self.ledger.open(volume.volume_id, one.name, at=at, compute=NOTHING, storage=hourly)

    def _come_up(self, one: OpenstackServer, at: datetime) -> None:
        one.status, one.task_state, one.active_at = "ACTIVE", None, at
        self._run(one, at)

    def _err(self, one: OpenstackServer, at: datetime, message: str) -> None:
        self.machines.kill(one.machine_id)
        one.status, one.task_state = "ERROR", None
        one.fault = {"code": 500, "message": message, "created": f"{at:%Y-%m-%dT%H:%M:%SZ}"}

    def _deleted(self, one: OpenstackServer, at: datetime, *, force: bool) -> None:
        if self.quirks.soft_deletes and not force:
            one.status, one.task_state = "SOFT_DELETED", None
            self.ledger.price(one.machine_id, at=at, compute=NOTHING)
            self._later(one, SOFT_KEPT, lambda it, when: self._finish(it, when, "reclaimed"), since=at)
            return
        self._finish(one, at, "deleted by its owner")

    def _finish(self, one: OpenstackServer, at: datetime, note: str) -> None:
        self._end(one, at, note)
        one.status, one.task_state, one.updated_at = "DELETED", None, at
        for volume_id in one.volume_ids:
            volume = self.volumes.get(volume_id)
            if volume is None:
                continue
            volume.server_id, volume.status = None, "available"
            if volume.dies_with_server and not self.quirks.leaks_volumes:
                self._purge(volume, at)

    def _purge(self, volume: OpenstackVolume, at: datetime) -> None:
        self.ledger.end(volume.volume_id, at=at, note="deleted")
        del self.volumes[volume.volume_id]

    def _power_off(self, machine: OpenstackServer, at: datetime) -> None:
        del at  # it is billed on
        self.machines.kill(machine.machine_id)
        machine.status = "SHUTOFF"
        machine.boot_no += 1
