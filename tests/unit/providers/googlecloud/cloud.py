"""The state of a fake Google Cloud project: instances, disks, operations, and what time and its owner do to them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from itertools import count
from pathlib import Path
from typing import Any, Final
from uuid import UUID

from spotd_providers.contract.values import MicroUsdPerHour, cost
from spotd_providers.local.hosts import HostClock, read_ledger
from tests.fakes.cloud import NOTHING
from tests.fakes.rest import MONTH_HOURS, RestCloud, RestMachine, RestRefusal
from tests.unit.providers.googlecloud.catalog import (
    DISK_MONTH_NANOS,
    IP_HOUR_NANOS,
    ZONES,
    Family,
    GoogleQuirks,
    Kind,
    families,
    hourly,
    region_of,
    unit_nanos,
)

SYSTEM: Final = "system"
MINUTE: Final = timedelta(minutes=1)
REQUEST_IDS_LIVE: Final = timedelta(minutes=60)
OFF: Final = ("TERMINATED", "STOPPED", "SUSPENDED")


@dataclass(slots=True, kw_only=True)
class Operation:
    """One change, ours or the system's. `finish` makes it happen; until then `error` is not shown."""

    name: str
    number: int
    type: str
    zone: str
    target: str
    target_number: str
    user: str
    made_at: datetime
    done_at: datetime | None = None
    errors: list[dict[str, str]] = field(default_factory=list)
    finish: Callable[[datetime], None] | None = None


@dataclass(slots=True, kw_only=True)
class GoogleInstance(RestMachine):
    """One instance; its `machine_id` is the numeric id, as a name may come again."""

    zone: str
    name: str
    kind: Kind
    body: dict[str, Any]
    disks: list[str] = field(default_factory=list)
    started_at: datetime | None = None
    is_free: bool = False
    has_notice: bool = False

    @property
    def deletes(self) -> bool:
        return bool(self.body.get("scheduling", {}).get("instanceTerminationAction") == "DELETE")


@dataclass(slots=True, kw_only=True)
class Disk:
    """A persistent disk; it bills until it is deleted."""

    number: str
    name: str
    zone: str
    size_gb: int
    kind: str
    made_at: datetime
    labels: dict[str, str]
    dies_with: str | None
    user: str | None = None


class GoogleCloud(RestCloud[GoogleQuirks, GoogleInstance]):
    """One project. `access` holds the tokens that are taken, with the end of their life."""

    def __init__(self, root: Path, *, clock: HostClock, quirks: GoogleQuirks | None = None) -> None:
        super().__init__(root, clock=clock, quirks=quirks or GoogleQuirks())
        self.project = "lab-4711"
        self.client_email = "spotd@lab-4711.iam.gserviceaccount.com"
        self.api_key = "fake-api-key"
        self.access: dict[str, datetime] = {}
        self.takes_assertions = True
        self.kinds: dict[str, Kind] = {}
        self.families: dict[str, Family] = families()
        self.attached = {"nvidia-tesla-t4": 350_000_000, "nvidia-tesla-v100": 2_480_000_000}
        self.free_gpus = {(name, zone): 9 for name in self.attached for zones in ZONES.values() for zone in zones}
        self.quotas: dict[str, dict[str, float]] = {region: {"PREEMPTIBLE_NVIDIA_L4_GPUS": 16.0} for region in ZONES}
        self.disks: dict[str, Disk] = {}
        self.operations: dict[str, Operation] = {}
        self._requests: dict[str, tuple[datetime, str]] = {}
        self._numbers = count(7_000_000_000_000_000_001)

    # --- what the market and the faults do ------------------------------------------------------------------------

    def stock(self, *kinds: Kind) -> None:
        with self.lock:
            self.kinds.update({one.name: one for one in kinds})

    def sell_out(self, name: str, zone: str | None = None) -> None:
        """Use the type up, in both markets, in one zone or in all. Google lists it all the same."""
        with self.lock:
            free = self.kinds[name].free
            free.update({place: 0 for place in free if zone in (None, place[0])})

    def raise_price(self, name: str, factor: float) -> None:
        """Change what all types of this type's family cost."""
        with self.lock:
            family = self.families[self.kinds[name].family]
            family.core, family.ram, family.gpu = (round(x * factor) for x in (family.core, family.ram, family.gpu))

    def price(self, kind: Kind, zone: str, *, is_spot: bool, more: Mapping[str, int] | None = None) -> MicroUsdPerHour:
        """What a machine costs per hour now, without its disk and address."""
        return hourly(self.families, self.attached, kind, zone, is_spot=is_spot, more=dict(more or {}))

    def grant_token(self, lives: timedelta = timedelta(hours=1)) -> str:
        token = f"ya29.fake-{self.uuid()}"
        self.access[token] = self.clock.now() + lives
        return token

    def break_auth(self) -> None:
        """The key of the service account was deleted, and its tokens are void."""
        with self.lock:
            self.takes_assertions = False
            self.access.clear()

    def named(self, name: str, zone: str | None = None) -> GoogleInstance:
        """The newest instance of this name.

        Raises:
            KeyError: there never was one.
        """
        for one in reversed(self.rented.values()):
            if one.name == name and zone in (None, one.zone):
                return one
        raise KeyError(name)

    def preempt(self, machine_id: str) -> None:
        """Google takes the instance back: a soft-off, and after half a minute it is deleted or stopped."""
        with self.lock:
            one, now = self.rented[machine_id], self.clock.now()
            one.is_free = one.started_at is not None and now - one.started_at < MINUTE
            self.log(one, "compute.instances.preempted", SYSTEM, at=now)
            self._stop(one, now, "preempted", deletes=one.deletes)

    def give_notice(self, machine_id: str) -> None:
        """The instance's metadata says `preempted`; it is stopped after the time that its launch asked for."""
        with self.lock:
            one = self.rented[machine_id]
            asked = one.body.get("scheduling", {}).get("preemptionNoticeDuration") or {}
            one.has_notice = True
            after = timedelta(seconds=int(asked.get("seconds", 0)))
            self._later(one, after, lambda machine, _: self.preempt(machine.machine_id), since=self.clock.now())

    def fail_host(self, machine_id: str) -> None:
        """The host fails; without an automatic restart the instance stays stopped."""
        with self.lock:
            one, now = self.rented[machine_id], self.clock.now()
            self.log(one, "compute.instances.hostError", SYSTEM, at=now)
            self._turn_off(one, now)

    def add_foreign(self, name: str, *, labels: Mapping[str, str] | None = None) -> GoogleInstance:
        """Somebody's running instance in the same project, without a process."""
        with self.lock:
            zone = next(iter(ZONES.values()))[0]
            kind = next(one for one in self.kinds.values() if one.gpus)
            body = {"name": name, "labels": dict(labels or {}), "scheduling": {"provisioningModel": "STANDARD"}}
            one = self._new(zone, kind, body, {})
            one.is_ours = False
            one.launched_at -= max(self.quirks.list_lag, self.quirks.show_lag)
            self._come_up(one, self.clock.now())
            return one

    # --- the bill -------------------------------------------------------------------------------------------------

    def billed(self, machine_id: str, until: datetime | None = None) -> int:
        """Micro-dollars of one instance or disk: a minute at least, nothing if it was taken back within the first."""
        one = self.rented.get(machine_id)
        if one is not None and one.is_free:
            return 0
        found = super().billed(machine_id, until)
        ran = one is not None and one.started_at is not None and one.started_at <= self._until(until)
        return max(found, cost(one.price, MINUTE)) if ran and one else found

    def spent_usd(self) -> float:
        owners = {line.machine_id for line in read_ledger(self.ledger_path)}
        return sum(self.billed(one) for one in owners) / 1_000_000

    # --- what the customer does -----------------------------------------------------------------------------------

    def insert(self, zone: str, body: dict[str, Any], more: dict[str, int], request_id: str | None) -> Operation:
        """Order an instance.

        Raises:
            RestRefusal: nothing was ordered, unless the next launch was made to fail after its effect.
        """
        known = self._repeated(request_id)
        if known is not None:
            return known
        now, quirks, kind, name = self.clock.now(), self.quirks, self._kind(body), body["name"]
        if any(one.exists and (one.zone, one.name) == (zone, name) for one in self.rented.values()):
            where = f"projects/{self.project}/zones/{zone}/instances/{name}"
            raise RestRefusal(409, f"The resource '{where}' already exists", code="alreadyExists")
        is_spot = body.get("scheduling", {}).get("provisioningModel") == "SPOT"
        gpus = kind.gpus + sum(more.values())
        failure = self._shortage(kind, zone, is_spot, more)
        if failure and quirks.capacity_by == "insert":
            raise RestRefusal(503, failure[1], code="UNSUPPORTED_OPERATION")
        try:
            self.require_quota(gpus)
        except RestRefusal:
            text = f"Quota 'GPUS_ALL_REGIONS' exceeded.  Limit: {quirks.quota_gpus:.1f} globally."
            if quirks.quota_by == "insert":
                raise RestRefusal(403, text, code="quotaExceeded") from None
            failure = ("QUOTA_EXCEEDED", text)
        if not failure:
            kind.free[zone, is_spot] -= 1
            for gpu in more:
                self.free_gpus[gpu, zone] -= more[gpu]
        one = self._new(zone, kind, body, more)
        one.is_ours = not failure  # whose stock was never taken
        operation = self.log(one, "insert", self.client_email, at=now, request_id=request_id)
        self._run_operation(operation, lambda at: self._made(one, operation, failure, at), quirks.insert_takes)
        self._raise_after_launch()
        return operation

    def delete(self, zone: str, name: str, request_id: str | None) -> Operation:
        """
        Raises:
            RestRefusal: there is no such instance.
        """
        known = self._repeated(request_id)
        if known is not None:
            return known
        one, now = self.shown(zone, name), self.clock.now()
        operation = self.log(one, "delete", self.client_email, at=now, request_id=request_id)
        if one.deaths_left > 0:
            one.deaths_left -= 1
            self._run_operation(operation, lambda _: None, timedelta(0))
            return operation
        self._run_operation(operation, lambda at: self._gone(one, at, "deleted by its owner"), self.quirks.ending)
        self.machines.kill(one.machine_id)
        one.status = "STOPPING"
        one.boot_no += 1
        if not self.quirks.bills_ending:
            self.ledger.price(one.machine_id, at=now, compute=NOTHING)
        return operation

    def delete_disk(self, zone: str, name: str) -> Operation:
        """
        Raises:
            RestRefusal: there is no such disk, or an instance has it.
        """
        disk = next((one for one in self.disks.values() if (one.zone, one.name) == (zone, name)), None)
        if disk is None:
            raise missing(f"projects/{self.project}/zones/{zone}/disks/{name}")
        if disk.user is not None:
            text = f"The disk resource '{name}' is already being used by '{self.rented[disk.user].name}'"
            raise RestRefusal(400, text, code="resourceInUseByAnotherResource")
        self._drop_disk(disk, self.clock.now())
        target = (f"zones/{zone}/disks/{name}", disk.number)
        return self._operation("delete", zone, target, self.client_email, self.clock.now(), None)

    def shown(self, zone: str, name: str) -> GoogleInstance:
        """
        Raises:
            RestRefusal: there is no such instance, or it is not shown yet.
        """
        for one in reversed(self.rented.values()):
            if (one.zone, one.name) == (zone, name) and self.known(one.machine_id) is not None:
                return one
        raise missing(f"projects/{self.project}/zones/{zone}/instances/{name}")

    # --- operations -----------------------------------------------------------------------------------------------

    def log(
        self, one: GoogleInstance, kind: str, user: str, *, at: datetime, request_id: str | None = None
    ) -> Operation:
        """Record an operation about an instance; the system's are done at once."""
        target = (f"zones/{one.zone}/instances/{one.name}", one.machine_id)
        return self._operation(kind, one.zone, target, user, at, request_id)

    def wait(self, operation: Operation) -> None:
        """Hold the request until the operation is done, which costs the fake no time, or until the wait is cut."""
        if operation.done_at is None and self.quirks.waits_cut > 0:
            self.quirks.waits_cut -= 1
        elif operation.done_at is None and operation.finish is not None:
            operation.finish(self.clock.now())

    def _operation(
        self, kind: str, zone: str, target: tuple[str, str], user: str, at: datetime, request_id: str | None
    ) -> Operation:
        number = next(self._numbers)
        made = Operation(
            name=f"operation-{number}", number=number, type=kind, zone=zone, target=target[0],
            target_number=target[1], user=user, made_at=at, done_at=at,
        )  # fmt: skip
        self.operations[made.name] = made
        if request_id is not None:
            self._requests[request_id] = (at, made.name)
        return made

    def _run_operation(self, operation: Operation, happens: Callable[[datetime], None], after: timedelta) -> None:
        def finish(at: datetime) -> None:
            if operation.done_at is None:
                operation.done_at = at
                happens(at)

        operation.done_at, operation.finish = None, finish
        self.at(operation.made_at + after, finish)

    def _repeated(self, request_id: str | None) -> Operation | None:
        if request_id is None:
            return None
        try:
            is_valid = UUID(request_id).int != 0
        except ValueError:
            is_valid = False
        if not is_valid:
            text = f"Invalid value for field 'requestId': '{request_id}'. Must be a valid UUID."
            raise RestRefusal(400, text, code="invalid")
        at, name = self._requests.get(request_id, (None, ""))
        return self.operations[name] if at is not None and self.clock.now() < at + REQUEST_IDS_LIVE else None

    # --- inside ---------------------------------------------------------------------------------------------------

    def _kind(self, body: dict[str, Any]) -> Kind:
        return self.kinds[str(body["machineType"]).rpartition("/")[2]]

    def _shortage(self, kind: Kind, zone: str, is_spot: bool, more: Mapping[str, int]) -> tuple[str, str] | None:
        lacks = kind.free.get((zone, is_spot), 0) < 1 or any(self.free_gpus[gpu, zone] < n for gpu, n in more.items())
        text = f"The zone 'projects/{self.project}/zones/{zone}' does not have enough resources available"
        return (self.quirks.capacity_code, f"{text} to fulfill the request.") if lacks else None

    def _new(self, zone: str, kind: Kind, body: dict[str, Any], more: dict[str, int]) -> GoogleInstance:
        is_spot = body.get("scheduling", {}).get("provisioningModel") == "SPOT"
        items = {one["key"]: one.get("value") for one in body.get("metadata", {}).get("items", [])}
        one = GoogleInstance(
            machine_id=str(next(self._numbers)),
            label=body.get("labels", {}).get("spotd-key") or body["name"],
            status="PROVISIONING",
            launched_at=self.clock.now(),
            price=self.price(kind, zone, is_spot=is_spot, more=more),
            gpus=kind.gpus + sum(more.values()),
            is_spot=is_spot,
            script=items.get("startup-script"),
            zone=zone,
            name=body["name"],
            kind=kind,
            body=body,
        )
        return self._keep(one, bills_now=False)

    def _made(self, one: GoogleInstance, operation: Operation, failure: tuple[str, str] | None, at: datetime) -> None:
        if failure is not None:
            operation.errors = [{"code": failure[0], "message": failure[1]}]
            self._end(one, at, failure[0])
        elif one.exists and one.status == "PROVISIONING":
            for number, wish in enumerate(one.body.get("disks", [])):
                self._new_disk(one, number, wish, at)
            one.status = "STAGING"
            self._later(one, self.quirks.boot, self._come_up, since=one.launched_at)

    def _new_disk(self, one: GoogleInstance, number: int, wish: dict[str, Any], at: datetime) -> None:
        params = wish.get("initializeParams") or {}
        name = params.get("diskName") or (one.name if number == 0 else f"{one.name}-{number}")
        disk = Disk(
            number=str(next(self._numbers)),
            name=name,
            zone=one.zone,
            size_gb=int(params.get("diskSizeGb") or 50),
            kind=str(params.get("diskType") or "pd-balanced").rpartition("/")[2],
            made_at=at,
            labels=dict(params.get("labels") or {}),
            dies_with=one.machine_id if wish.get("autoDelete") else None,
            user=one.machine_id,
        )
        one.disks.append(disk.number)
        self.disks[disk.number] = disk
        nanos = disk.size_gb * unit_nanos(DISK_MONTH_NANOS[disk.kind], region_of(one.zone), is_spot=False)
        storage = MicroUsdPerHour(nanos // MONTH_HOURS // 1000)
        self.ledger.open(disk.number, name, at=at, compute=NOTHING, storage=storage)

    def _drop_disk(self, disk: Disk, at: datetime) -> None:
        self.ledger.end(disk.number, at=at, note="deleted")
        del self.disks[disk.number]

    def _come_up(self, one: GoogleInstance, at: datetime) -> None:
        one.status, one.started_at = "RUNNING", at
        self._run(one, at)
        if one.is_ours and any(row.get("accessConfigs") for row in one.body.get("networkInterfaces", [])):
            ip = MicroUsdPerHour(IP_HOUR_NANOS[one.is_spot] // 1000)
            self.ledger.price(one.machine_id, at=at, compute=MicroUsdPerHour(one.price + ip))
        lasts = one.body.get("scheduling", {}).get("maxRunDuration")
        if lasts:
            after = timedelta(seconds=int(lasts["seconds"]))
            self._later(one, after, lambda m, when: self._stop(m, when, "too long", deletes=m.deletes), since=at)

    def _stop(self, one: GoogleInstance, at: datetime, note: str, *, deletes: bool) -> None:
        one.status = "STOPPING"
        one.boot_no += 1
        self.machines.kill(one.machine_id)
        if deletes:
            self._later(one, self.quirks.ending, lambda m, when: self._gone(m, when, note), since=at)
        else:
            self._later(one, self.quirks.ending, self._turn_off, since=at)

    def _turn_off(self, one: GoogleInstance, at: datetime) -> None:
        self.machines.kill(one.machine_id)
        one.status = "TERMINATED"
        one.boot_no += 1
        self.ledger.price(one.machine_id, at=at, compute=NOTHING)

    def _gone(self, one: GoogleInstance, at: datetime, note: str) -> None:
        if one.exists and one.is_ours:
            place = (one.zone, one.is_spot)
            one.kind.free[place] = one.kind.free.get(place, 0) + 1
        self._end(one, at, note)
        for disk in [self.disks[number] for number in one.disks if number in self.disks]:
            disk.user = None
            if disk.dies_with == one.machine_id and not self.quirks.leaves_disk:
                self._drop_disk(disk, at)

    def _power_off(self, machine: GoogleInstance, at: datetime) -> None:
        """A shut-down from inside only stops the instance, whatever its termination action is."""
        self.log(machine, "compute.instances.guestTerminate", SYSTEM, at=at)
        self._turn_off(machine, at)


def missing(what: str) -> RestRefusal:
    return RestRefusal(404, f"The resource '{what}' was not found", code="notFound")
