"""The state of the fake Verda: types, instances, volumes that outlive them, and the deposit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from spotd_providers.local.hosts import HostClock
from tests.fakes.cloud import NOTHING
from tests.fakes.rest import MONTH_HOURS, RestCloud, RestMachine, usd
from tests.fakes.verda.records import IMAGES, LOCATIONS, TRASH_KEEPS, VerdaQuirks, VerdaType, refusal


@dataclass(slots=True, kw_only=True)
class VerdaVolume:
    """A disk. `left` is the instance that had it until `left_at`; `kept_until` is the end of its stay in the trash."""

    volume_id: str
    name: str
    size: int
    location: str
    made_at: datetime
    kind: str = "NVMe"
    is_os: bool = False
    instance_id: str | None = None
    left: str | None = None
    left_at: datetime | None = None
    deleted_at: datetime | None = None
    kept_until: datetime | None = None


@dataclass(slots=True, kw_only=True)
class VerdaInstance(RestMachine):
    """One virtual machine. `body` is what its create asked for."""

    kind: VerdaType
    location: str
    body: dict[str, Any]
    failure: str | None = None
    os_volume_id: str | None = None
    volume_ids: list[str] = field(default_factory=list)


class VerdaCloud(RestCloud[VerdaQuirks, VerdaInstance]):
    """One account at a fake Verda."""

    client_id: str = "fake-verda-client"
    client_secret: str = "fake-verda-secret-4c1d"
    gb_month_usd: dict[str, float] = {"NVMe": 0.2, "HDD": 0.05}  # noqa: RUF012  # replaced whole, never changed

    def __init__(self, root: Path, *, clock: HostClock, quirks: VerdaQuirks | None = None) -> None:
        super().__init__(root, clock=clock, quirks=quirks or VerdaQuirks())
        self.types: dict[str, VerdaType] = {}
        self.volumes: dict[str, VerdaVolume] = {}
        self.scripts: dict[str, dict[str, str]] = {}
        self.ssh_keys: dict[str, dict[str, str]] = {}
        self.access: dict[str, datetime] = {}
        self.refresh: dict[str, datetime] = {}
        self.deposit_usd = 500.0
        self._failures: dict[str, str] = {}
        self._empty_since: datetime | None = None

    # --- what the market and the faults do ------------------------------------------------------------------------

    def stock(self, *types: VerdaType) -> None:
        with self.lock:
            self.types.update({one.name: one for one in types})

    def sell_out(self, name: str, location: str | None = None) -> None:
        """Use the type up, in both markets, in one location or in all."""
        with self.lock:
            free = self.types[name].free
            free.update({place: 0 for place in free if location in (None, place[0])})

    def set_price(self, name: str, *, spot: float | None = None, price: float | None = None) -> None:
        """Change the prices of new instances, and of those that run at the dynamic price."""
        with self.lock:
            kind = self.types[name]
            kind.spot, kind.price = spot or kind.spot, price or kind.price
            for one in self.rented.values():
                if one.exists and one.kind is kind and one.body.get("pricing") == "DYNAMIC_PRICE":
                    one.price = usd(kind.dynamic)
                    self.ledger.price(one.machine_id, at=self.clock.now(), compute=one.price)

    def fail_next_boot(self, name: str, status: str) -> None:
        """The next instance of the type goes to `no_capacity` or `error`, or stays in `provisioning` for ever."""
        with self.lock:
            self._failures[name] = status

    def break_auth(self) -> None:
        """The client's secret is another one, and its tokens are void."""
        with self.lock:
            self.client_secret = "another-secret"
            self.revoke_tokens(refresh_too=True)

    def revoke_tokens(self, *, refresh_too: bool = False) -> None:
        """Access tokens are void before their time."""
        with self.lock:
            self.access.clear()
            if refresh_too:
                self.refresh.clear()

    def preempt(self, instance_id: str) -> None:
        """The instance is taken away, and its OS volume goes where `on_spot_discontinue` says."""
        with self.lock:
            one, now, shows = self.rented[instance_id], self.clock.now(), self.quirks.preempted_shows
            if shows == "offline":
                self._power_off(one, now)
                return
            self._discontinue(one, now, "preempted")
            one.vanished = shows == "nothing"
            wish = (one.body.get("os_volume") or {}).get("on_spot_discontinue") or "keep_detached"
            for volume_id in list(one.volume_ids):
                kept = wish == "keep_detached" or volume_id != one.os_volume_id
                self._part(self.volumes[volume_id], None if kept else wish == "delete_permanently", now)

    def add_foreign(self, hostname: str, *, tags: Mapping[str, str] | None = None) -> VerdaInstance:
        """Somebody's running instance in the same account, without a process."""
        with self.lock:
            kind = next(one for one in self.types.values() if one.gpus)
            rows = [{"key": key, "value": value} for key, value in (tags or {}).items()]
            body = {"hostname": hostname, "description": hostname, "tags": rows, "image": IMAGES[0]}
            one = self._new(kind, "FIN-03", body, is_spot=False)
            one.is_ours = False
            one.launched_at -= max(self.quirks.list_lag, self.quirks.show_lag)
            self._provision(one, self.clock.now())
            self._come_up(one, self.clock.now())
            return one

    # --- what time does -------------------------------------------------------------------------------------------

    def advance(self) -> None:
        with self.lock:
            super().advance()
            now = self.clock.now()
            for volume in [one for one in self.volumes.values() if one.kept_until and one.kept_until <= now]:
                self._purge(volume, volume.kept_until or now)
            if self.quirks.stops_at_zero and self.balance() <= 0:
                self._empty_since = self._empty_since or now
                for one in [one for one in self.rented.values() if one.exists]:
                    if one.status == "running":
                        self._power_off(one, now)
                    elif now >= self._empty_since + timedelta(days=1):
                        self._discontinue(one, now, "the balance was empty")

    def balance(self) -> float:
        """What is left of the deposit, $."""
        return self.deposit_usd - self.spent_usd()

    def _power_off(self, machine: VerdaInstance, at: datetime) -> None:
        self.machines.kill(machine.machine_id)
        machine.status = "offline"
        machine.boot_no += 1
        if not self.quirks.offline_bills:
            self.ledger.price(machine.machine_id, at=at, compute=NOTHING)

    def _provision(self, one: VerdaInstance, at: datetime) -> None:
        one.status = one.failure if one.failure == "no_capacity" else "provisioning"
        if one.status == "no_capacity":
            self.ledger.price(one.machine_id, at=at, compute=NOTHING)
            return
        wish = one.body.get("os_volume") or {"name": f"OS-{one.machine_id[:8]}", "size": 50}
        attached = self.volumes.get(str(one.body.get("image")))
        system = attached or self._new_volume(wish, one.location, at, is_os=True)
        more = [self._new_volume(row, one.location, at) for row in one.body.get("volumes") or []]
        more += [self.volumes[volume_id] for volume_id in one.body.get("existing_volumes") or []]
        one.os_volume_id = system.volume_id
        for volume in (system, *more):
            volume.instance_id = one.machine_id
            one.volume_ids.append(volume.volume_id)

    def _come_up(self, one: VerdaInstance, at: datetime) -> None:
        if one.failure == "error":
            one.status = "error"
            return
        one.status = "running"
        if self.quirks.script_read_at == "boot" and one.is_ours:
            one.script = self.scripts.get(str(one.body.get("startup_script_id")), {}).get("script")
        self._run(one, at)

    def _discontinue(self, one: VerdaInstance, at: datetime, note: str) -> None:
        if one.exists and one.is_ours:
            one.kind.free[one.location, one.is_spot] = one.kind.free.get((one.location, one.is_spot), 0) + 1
        self._end(one, at, note)
        one.status = "discontinued"

    # --- what the customer does -----------------------------------------------------------------------------------

    def create(self, body: dict[str, Any], *, is_spot: bool) -> VerdaInstance:
        """
        Raises:
            RestRefusal: nothing was ordered, unless the next launch was made to fail after its effect.
        """
        quirks, kind, location = (
            self.quirks,
            self.types[body["instance_type"]],
            body.get("location_code") or LOCATIONS[0],
        )
        if self.balance() < (kind.spot if is_spot else kind.price) / 6:
            raise refusal("insufficient_funds", "Insufficient funds")
        self.require_quota(kind.gpus)
        if kind.free.get((location, is_spot), 0) < 1:
            raise quirks.capacity
        kind.free[location, is_spot] -= 1
        one = self._new(kind, location, body, is_spot=is_spot and quirks.spot_decided_by != "nothing")
        one.failure = self._failures.pop(kind.name, None)
        if quirks.script_read_at == "order":
            one.script = self.scripts.get(str(body.get("startup_script_id")), {}).get("script")
        self._later(one, quirks.boot / 6, self._provision, since=one.launched_at)
        if one.failure in (None, "error"):
            self._later(one, quirks.boot * 5 / 6, self._validate, since=one.launched_at)
            self._later(one, quirks.boot, self._come_up, since=one.launched_at)
        self._raise_after_launch()
        return one

    def delete(self, instance_id: str, named: list[str], *, permanently: bool) -> None:
        """
        Raises:
            RestRefusal: there is no such instance, or it can not be deleted now.
        """
        one, now = self.rented.get(instance_id), self.clock.now()
        if one is None or one.vanished:
            raise refusal("not_found", "Invalid instance id")
        if one.status in self.quirks.undeletable:
            raise refusal("invalid_request", "Can't discontinue a provisioning instance")
        if not one.exists or one.status == "deleting":
            raise refusal("invalid_request", "Can't discontinue a discontinued instance")
        if one.deaths_left > 0:
            one.deaths_left -= 1
            return
        self.machines.kill(instance_id)
        one.status = "deleting"
        one.boot_no += 1
        if not self.quirks.bills_ending:
            self.ledger.end(instance_id, at=now, note="deleted by its owner")

        def finish(machine: VerdaInstance, at: datetime) -> None:
            self._discontinue(machine, at, "deleted by its owner")
            for volume_id in list(machine.volume_ids):
                unnamed = None if self.quirks.unnamed_volumes == "detached" else False
                self._part(self.volumes[volume_id], permanently if volume_id in named else unnamed, at)

        self._later(one, self.quirks.ending, finish, since=now)

    def delete_volume(self, volume_id: str, *, permanently: bool) -> None:
        """
        Raises:
            RestRefusal: there is no such volume, or an instance has it.
        """
        volume = self.volumes.get(volume_id)
        if volume is None:
            raise refusal("not_found", "Invalid volume id")
        if self.owner_of(volume) is not None:
            raise refusal("invalid_request", "Volume is attached to an instance")
        self._part(volume, permanently, self.clock.now())

    def owner_of(self, volume: VerdaVolume) -> str | None:
        """The instance that the volume is attached to, as the cloud sees it by now."""
        left_at = volume.left_at
        is_late = left_at is not None and self.clock.now() < left_at + self.quirks.volume_lag
        return volume.left if is_late else volume.instance_id

    def action(self, instance_id: str, action: str) -> None:
        """
        Raises:
            RestRefusal: the instance is in another state than the action is for.
        """
        one, now = self.rented.get(instance_id), self.clock.now()
        if one is None or one.vanished or not one.exists:
            raise refusal("not_found", "Invalid instance id")
        if action in ("shutdown", "force_shutdown") and one.status == "running":
            self._power_off(one, now)
        elif action in ("start", "boot") and one.status == "offline":
            self._come_up(one, now)
        else:
            raise refusal("forbidden_action", f"Can't {action} an instance that is {one.status}")

    # --- inside ---------------------------------------------------------------------------------------------------

    def _validate(self, one: VerdaInstance, at: datetime) -> None:
        del at
        one.status = "validating"

    def _new(self, kind: VerdaType, location: str, body: dict[str, Any], *, is_spot: bool) -> VerdaInstance:
        dynamic = (body.get("pricing") or self.quirks.default_pricing) == "DYNAMIC_PRICE"
        one = VerdaInstance(
            machine_id=self.uuid(),
            label=body["hostname"],
            status="ordered",
            launched_at=self.clock.now(),
            price=usd(kind.dynamic if dynamic else kind.spot if is_spot else kind.price),
            gpus=kind.gpus,
            is_spot=is_spot,
            kind=kind,
            location=location,
            body={**body, "pricing": "DYNAMIC_PRICE" if dynamic else "FIXED_PRICE"},
        )
        return self._keep(one, bills_now=self.quirks.bills_from == "order")

    def _new_volume(self, wish: Mapping[str, Any], place: str, at: datetime, *, is_os: bool = False) -> VerdaVolume:
        volume = VerdaVolume(
            volume_id=self.uuid(), name=wish["name"], size=wish["size"], location=place, made_at=at, is_os=is_os
        )
        self.volumes[volume.volume_id] = volume
        hourly = usd(self.gb_month_usd[volume.kind] * volume.size / MONTH_HOURS)
        self.ledger.open(volume.volume_id, volume.name, at=at, compute=NOTHING, storage=hourly)
        return volume

    def _part(self, volume: VerdaVolume, permanently: bool | None, at: datetime) -> None:
        """Detach the volume (`None`), and put it into the trash or delete it."""
        owner = self.rented.get(volume.instance_id or "")
        if owner is not None and volume.volume_id in owner.volume_ids:
            owner.volume_ids.remove(volume.volume_id)
        if volume.instance_id is not None:
            volume.left, volume.left_at, volume.instance_id = volume.instance_id, at, None
        if permanently:
            self._purge(volume, at)
        elif permanently is False and volume.deleted_at is None:
            volume.deleted_at, volume.kept_until = at, at + TRASH_KEEPS
            if not self.quirks.trash_bills:
                self.ledger.end(volume.volume_id, at=at, note="in the trash")

    def _purge(self, volume: VerdaVolume, at: datetime) -> None:
        self.ledger.end(volume.volume_id, at=at, note="deleted for good")
        del self.volumes[volume.volume_id]
