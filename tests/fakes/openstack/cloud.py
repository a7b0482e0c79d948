"""The state of the fake: servers and their processes, volumes, images, networks, tokens, and the bill."""

from __future__ import annotations

import base64
import gzip
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from spotd_providers.local.hosts import HostClock
from tests.fakes.cloud import NOTHING
from tests.fakes.openstack.records import (
    ACTIONS,
    NO_HOST,
    REGIONS,
    RUNS_IN,
    VM_STATES,
    Flavor,
    OpenstackImage,
    OpenstackNetwork,
    OpenstackQuirks,
    OpenstackServer,
    OpenstackVolume,
    not_found,
)
from tests.fakes.rest import MONTH_HOURS, RestCloud, RestRefusal, usd


class OpenstackCloud(RestCloud[OpenstackQuirks, OpenstackServer]):
    """One project at a fake OpenStack cloud of two regions."""

    project = "5f705771a8e74c74a1c1f7e0ab1f3c11"
    user_id = "cbb1c2d3e4f5478a9ab0c1d2e3f4a5b6"
    credential_id = "fake-application-credential"
    secret = "fake-openstack-secret-77d0"
    username = "spotd"
    password = "fake-openstack-password-8b21"
    gb_month_usd = 0.05

    def __init__(self, root: Path, *, clock: HostClock, quirks: OpenstackQuirks | None = None) -> None:
        super().__init__(root, clock=clock, quirks=quirks or OpenstackQuirks())
        self.flavors: dict[str, Flavor] = {}
        self.volumes: dict[str, OpenstackVolume] = {}
        self.tokens: dict[str, tuple[datetime, bool]] = {}
        """When each token ends, and whether it is of the project."""
        self.keypairs = ["laptop"]
        self.images: dict[str, OpenstackImage] = {}
        self.networks: dict[str, OpenstackNetwork] = {}
        self._failures: dict[str, str] = {}
        for region in REGIONS:
            for name in ("Ubuntu 24.04", "NVIDIA GPU Cloud (NGC)"):
                self.add_image(name, region)
            for name in ("private", "Ext-Net"):
                self.add_network(name, region, is_external=name == "Ext-Net")

    # --- what the operator, the market and the faults do ------------------------------------------------------------

    def stock(self, *flavors: Flavor) -> None:
        with self.lock:
            self.flavors.update({one.name: one for one in flavors})

    def sell_out(self, name: str, region: str | None = None) -> None:
        """No host has room for the flavour, in one region or in all: servers are ordered, and then fail."""
        with self.lock:
            free = self.flavors[name].free
            free.update({place: 0 for place in free if region in (None, place)})

    def fail_next_boot(self, name: str, fault: str = "") -> None:
        """The next server of the flavour gets this fault once it has a host; without one it stays in `BUILD`."""
        with self.lock:
            self._failures[name] = fault

    def lock_server(self, server_id: str) -> None:
        with self.lock:
            self.rented[server_id].locked = True

    def add_image(self, name: str, region: str, **facts: Any) -> OpenstackImage:
        with self.lock:
            one = OpenstackImage(image_id=self.uuid(), region=region, name=name, made_at=self.clock.now(), **facts)
            self.images[one.image_id] = one
            return one

    def replace_image(self, name: str, region: str) -> OpenstackImage:
        """The images of this name are gone, and a new one has it."""
        with self.lock:
            for image_id in [one.image_id for one in self.images.values() if (one.name, one.region) == (name, region)]:
                del self.images[image_id]
            return self.add_image(name, region)

    def add_network(self, name: str, region: str, *, is_external: bool = False) -> OpenstackNetwork:
        with self.lock:
            one = OpenstackNetwork(network_id=self.uuid(), region=region, name=name, is_external=is_external)
            self.networks[one.network_id] = one
            return one

    def break_auth(self) -> None:
        """The secret is another one, and all tokens are void."""
        with self.lock:
            self.secret = self.password = "another-secret"
            self.tokens.clear()

    def revoke_tokens(self) -> None:
        """Tokens are void before their time."""
        with self.lock:
            self.tokens.clear()

    def preempt(self, server_id: str) -> None:
        """The operator deletes the server and its disk."""
        with self.lock:
            self._end(self.rented[server_id], self.clock.now(), "preempted")

    def fail(self, server_id: str, fault: str) -> None:
        """A server that ran gets into `ERROR`; it is billed on."""
        with self.lock:
            one = self.rented[server_id]
            one.fault = fault
            one.boot_no += 1
            self._become(one, "ERROR", self.clock.now())

    def add_foreign(
        self,
        name: str,
        metadata: Mapping[str, str] | None = None,
        *,
        region: str = REGIONS[0],
        tags: tuple[str, ...] = (),
        **body: Any,
    ) -> OpenstackServer:
        """Somebody's active server in the same project, without a process."""
        with self.lock:
            flavor = next(one for one in self.flavors.values() if one.gpus)
            image, network = self.image("Ubuntu 24.04", region), self.network("private", region)
            body = {"name": name, "metadata": dict(metadata or {}), "tags": list(tags), **body}
            one = self._new(region, flavor, image.image_id, network, body, user_id="0" * 32)
            one.is_ours = False
            one.launched_at -= max(self.quirks.list_lag, self.quirks.show_lag)
            one.has_host = True
            self._come_up(one, self.clock.now())
            return one

    def add_volume(self, region: str, size: int, **facts: Any) -> OpenstackVolume:
        """A volume that is billed from now on."""
        now = self.clock.now()
        one = OpenstackVolume(volume_id=self.uuid(), region=region, size=size, made_at=now, **facts)
        self.volumes[one.volume_id] = one
        hourly = usd(self.gb_month_usd * size / MONTH_HOURS)
        self.ledger.open(one.volume_id, one.name, at=now, compute=NOTHING, storage=hourly)
        return one

    # --- what the customer does -----------------------------------------------------------------------------------

    def flavor(self, region: str, flavor_id: str) -> Flavor | None:
        return next((one for one in self.flavors.values() if one.id_in(region) == flavor_id), None)

    def order(
        self,
        region: str,
        flavor: Flavor,
        body: dict[str, Any],
        image_id: str | None,
        network: OpenstackNetwork | None,
        mapping: dict[str, Any] | None,
    ) -> OpenstackServer:
        """
        Raises:
            RestRefusal: nothing was ordered, unless the next launch was made to fail after its effect.
        """
        mine = [one for one in self.rented.values() if one.exists and one.region == region]
        wants = {"instances": 1, "cores": flavor.vcpus, "ram": flavor.ram}
        used = {
            "instances": len(mine),
            "cores": sum(one.flavor.vcpus for one in mine),
            "ram": sum(one.flavor.ram for one in mine),
        }
        for what, most in self.quirks.quota.items():
            if used[what] + wants[what] > most:
                text = f"Requested {wants[what]}, but already used {used[what]} of {most} {what}"
                raise RestRefusal(403, f"Quota exceeded for {what}: {text}")
        one = self._new(region, flavor, image_id, network, body)
        one.mapping, one.failure = mapping, self._failures.pop(flavor.name, None)
        self._later(one, self.quirks.schedules, self._schedule, since=one.launched_at)
        self._raise_after_launch()
        return one

    def delete(self, server_id: str, *, force: bool = False) -> None:
        """
        Raises:
            RestRefusal: there is no such server, or it may not be deleted now.
        """
        one, now = self.require(server_id), self.clock.now()
        if force and self.quirks.forbids_force:
            raise RestRefusal(403, "Policy doesn't allow os_compute_api:os-deferred-delete:force to be performed.")
        self.require_unlocked(one)
        if server_id in self.quirks.busy:
            raise conflict(one, "delete", "task_state", "image_snapshot")
        if one.deaths_left > 0:
            one.deaths_left -= 1
        elif one.task_state == "deleting":
            if force and self.quirks.force_helps:
                self._end(one, now, "deleted by force")
        elif self.quirks.reclaim and one.active_at and not force:
            if one.status != "SOFT_DELETED":
                self._become(one, "SOFT_DELETED", now)
                self._later(one, self.quirks.reclaim, lambda it, at: self._end(it, at, "reclaimed"), since=now)
        elif not one.has_host:
            self._end(one, now, "deleted without a host")
        else:
            one.task_state, one.updated_at = "deleting", now
            one.boot_no += 1
            self.machines.kill(server_id)
            if not self.quirks.bills_ending:
                self.ledger.price(server_id, at=now, compute=NOTHING)
            if not self.quirks.deletes_hang:
                self._later(
                    one, self.quirks.ending, lambda it, at: self._end(it, at, "deleted by its owner"), since=now
                )

    def act(self, server_id: str, action: str) -> None:
        """
        Raises:
            RestRefusal: the server is locked or in another state than the action is for.
        """
        one = self.require(server_id)
        self.require_unlocked(one)
        statuses, after = ACTIONS[action]
        if one.task_state is not None:
            raise conflict(one, action, "task_state", one.task_state)
        if one.status not in statuses:
            raise conflict(one, action, "vm_state", vm_state(one))
        one.boot_no += 1
        self._become(
            one, "SHELVED_OFFLOADED" if after == "SHELVED" and self.quirks.offloads else after, self.clock.now()
        )

    def require(self, server_id: str) -> OpenstackServer:
        """
        Raises:
            RestRefusal: there is no such server that is not deleted, or its cell is down.
        """
        one = self.known(server_id)
        if one is None:
            raise not_found("Instance", server_id)
        if server_id in self.quirks.down:
            raise RestRefusal(
                500, "Cell 5a1f is not responding or returned an exception, hence instance info is not available."
            )
        return one

    def require_unlocked(self, one: OpenstackServer) -> None:
        """
        Raises:
            RestRefusal: the server is locked.
        """
        if one.locked:
            raise RestRefusal(409, f"Instance {one.machine_id} is locked")

    def delete_volume(self, volume_id: str) -> None:
        """
        Raises:
            RestRefusal: there is no such volume, or a server has it.
        """
        volume = self.volumes.get(volume_id)
        if volume is None:
            raise not_found("Volume", volume_id)
        if volume.status not in ("available", "error"):
            text = "Volume status must be available or error or error_restoring or error_extending or error_managing"
            raise RestRefusal(400, f"Invalid volume: {text} and must not be migrating, attached, belong to a group.")
        self._purge(volume, self.clock.now())

    # --- what time does -------------------------------------------------------------------------------------------

    def _schedule(self, one: OpenstackServer, at: datetime) -> None:
        """A host takes the server and makes its volume, and then what can fail fails."""
        one.has_host = one.flavor.free.get(one.region, 0) > 0
        if one.has_host:
            one.flavor.free[one.region] -= 1
            one.task_state = "block_device_mapping"
        if one.has_host and one.mapping is not None:
            goes = bool(one.mapping.get("delete_on_termination"))
            made = self.add_volume(one.region, int(one.mapping["volume_size"]), server_id=one.machine_id, goes=goes)
            one.volume_ids.append(made.volume_id)
        if one.failure or not one.has_host:
            one.fault = one.failure or NO_HOST
            self._part(one, at)
            self._become(one, "ERROR", at)
        elif one.failure is None:
            self._later(one, self.quirks.boot / 3, self._spawn, since=at)
            self._later(one, self.quirks.boot, self._come_up, since=at)

    def _spawn(self, one: OpenstackServer, at: datetime) -> None:
        one.task_state, one.updated_at = "spawning", at

    def _come_up(self, one: OpenstackServer, at: datetime) -> None:
        one.active_at = at
        self._become(one, "ACTIVE", at)
        self._run(one, at)

    def _become(self, one: OpenstackServer, status: str, at: datetime) -> None:
        """Have this status without a task, and its price from now on."""
        one.status, one.task_state, one.updated_at = status, None, at
        if status not in RUNS_IN:
            self.machines.kill(one.machine_id)
        bills = status not in self.quirks.free_statuses and (status != "ERROR" or one.active_at)
        self.ledger.price(one.machine_id, at=at, compute=one.price if bills else NOTHING)

    def _power_off(self, machine: OpenstackServer, at: datetime) -> None:
        machine.boot_no += 1
        self._become(machine, "SHUTOFF", at)

    def _end(self, machine: OpenstackServer, at: datetime, note: str) -> None:
        if machine.exists and machine.is_ours and machine.has_host:
            machine.flavor.free[machine.region] = machine.flavor.free.get(machine.region, 0) + 1
        super()._end(machine, at, note)
        machine.status, machine.task_state, machine.updated_at = "DELETED", None, at
        self._part(machine, at)

    # --- inside ---------------------------------------------------------------------------------------------------

    def _new(
        self,
        region: str,
        flavor: Flavor,
        image_id: str | None,
        network: OpenstackNetwork | None,
        body: dict[str, Any],
        user_id: str | None = None,
    ) -> OpenstackServer:
        now, left = self.clock.now(), self.quirks.leaves_tags
        one = OpenstackServer(
            machine_id=self.uuid(),
            label=str(body["name"]).strip(),
            status="BUILD",
            launched_at=now,
            updated_at=now,
            price=usd(flavor.price),
            gpus=flavor.gpus,
            is_spot=flavor.is_spot,
            script=shell_script(body.get("user_data")),
            region=region,
            flavor=flavor,
            body=body,
            network=network,
            image_id=image_id,
            metadata={} if left else dict(body.get("metadata") or {}),
            tags=[] if left else list(body.get("tags") or []),
            user_id=user_id or self.user_id,
        )
        return self._keep(one, bills_now=self.quirks.bills_from == "order")

    def image(self, name: str, region: str = REGIONS[0]) -> OpenstackImage:
        """The newest image of this name."""
        return [one for one in self.images.values() if (one.name, one.region) == (name, region)][-1]

    def network(self, name: str, region: str = REGIONS[0]) -> OpenstackNetwork:
        return next(one for one in self.networks.values() if (one.name, one.region) == (name, region))

    def _part(self, one: OpenstackServer, at: datetime) -> None:
        """Delete the volumes of a server that go with it, and leave the others."""
        for volume_id in one.volume_ids:
            volume = self.volumes[volume_id]
            volume.server_id, volume.status = None, "available"
            if volume.goes and not self.quirks.leaks_volumes:
                self._purge(volume, at)
        one.volume_ids.clear()

    def _purge(self, volume: OpenstackVolume, at: datetime) -> None:
        self.ledger.end(volume.volume_id, at=at, note="deleted")
        del self.volumes[volume.volume_id]


def vm_state(one: OpenstackServer) -> str:
    return VM_STATES.get(one.status, one.status.lower())


def conflict(one: OpenstackServer, action: str, attribute: str, state: str) -> RestRefusal:
    """The refusal of an action in this state."""
    return RestRefusal(409, f"Cannot '{action}' instance {one.machine_id} while it is in {attribute} {state}")


def shell_script(user_data: str | None) -> str | None:
    """What cloud-init runs at the first boot: a script, plain or compressed."""
    raw = base64.b64decode(user_data or "")
    if raw[:2] == b"\x1f\x8b":
        raw = gzip.decompress(raw)
    return raw.decode() if raw[:2] == b"#!" else None
