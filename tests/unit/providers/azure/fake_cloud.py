"""The state of the fake Azure: what is sold, one subscription with its virtual machines, and what those leave.

Written from the reference of the API alone. Where that is silent the usual behaviour of Azure Resource Manager is
taken: the refusals of another body for a known name and of an unknown subscription, and the shape of price histories.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, Final

from spotd_providers.contract.values import MICRO, MicroUsdPerHour
from spotd_providers.local.hosts import HostClock
from tests.fakes.cloud import NOTHING
from tests.fakes.rest import RestCloud, RestRefusal, usd
from tests.unit.providers.azure.fake_records import AzureOperation, AzureQuirks, AzureResource, AzureSize, AzureVm

DISK_GB_HOUR_USD: Final = 0.027 / 128
IP_HOUR_USD: Final = 0.005
NOTICE: Final = timedelta(seconds=30)
FREE: Final = 1000
"""Machines of a size in a zone, where nothing else was said."""
CUSTOM_DATA_BYTES_MAX: Final = 65_536
DISK: Final = "Microsoft.Compute/disks"
NIC: Final = "Microsoft.Network/networkInterfaces"
ADDRESS: Final = "Microsoft.Network/publicIPAddresses"


class AzureCloud(RestCloud[AzureQuirks, AzureVm]):
    """One subscription at a fake Azure.

    Attributes:
        sizes: what is sold, by name. `groups`: resource groups and their region, in lower case.
        resources: by group-less id `kind/name` in lower case.
        log: when, which operation and whose, as the activity log will show it.
    """

    def __init__(self, root: Path, *, clock: HostClock, quirks: AzureQuirks | None = None) -> None:
        super().__init__(root, clock=clock, quirks=quirks or AzureQuirks())
        self.tenant, self.subscription = "11111111-2222-3333-4444-555555555555", "66666666-7777-8888-9999-aaaaaaaaaaaa"
        self.client_id, self.client_secret = "bbbbbbbb-cccc-dddd-eeee-ffffffffffff", "fake-client-secret"
        self.tokens: dict[str, datetime] = {}
        self.sizes: dict[str, AzureSize] = {}
        self.groups: dict[str, str] = {}
        self.resources: dict[str, AzureResource] = {}
        self.operations: dict[str, AzureOperation] = {}
        self.log: list[tuple[datetime, str, str, str]] = []
        self._failures: dict[str, RestRefusal] = {}

    # --- what a test orders ---------------------------------------------------------------------------------------

    def stock(self, *sizes: AzureSize) -> None:
        self.sizes.update((size.name, size) for size in sizes)

    def issue_token(self) -> str:
        """A new access token, as a login gives it."""
        token = f"fake-azure-token-{self.uuid()}"
        self.tokens[token] = self.clock.now() + self.quirks.token_lives
        return token

    def sell_out(self, size: str, region: str) -> None:
        """No machine of this size is left in the region; those that run stay."""
        with self.lock:
            self.sizes[size].free.update({(region, zone): 0 for zone in ("", *self.sizes[size].zones)})

    def set_price(self, size: str, region: str, *, on_demand: float | None = None, spot: float | None = None) -> None:
        """Change prices; Spot machines pay the new one, and those whose cap it passes are evicted."""
        with self.lock:
            now, kind = self.clock.now(), self.sizes[size]
            before = kind.prices[region]
            kind.prices[region] = (on_demand or before[0], spot or before[1])
            for vm in [one for one in self.rented.values() if one.exists and one.is_ours]:
                if (vm.size.name, vm.region) == (size, region):
                    vm.price = self.price_of(kind, region, is_spot=vm.is_spot)
                    if vm.is_spot and 0 <= vm.max_price * MICRO < vm.price:
                        self._evict(vm, now)
                    elif vm.status == "running":
                        self.ledger.price(vm.machine_id, at=now, compute=vm.price)

    def fail_next_boot(self, size: str, refusal: RestRefusal) -> None:
        """The operation of the next launch of this size fails so, and its machine stays in the state Failed."""
        self._failures[size] = refusal

    def evict(self, machine_id: str) -> None:
        """Take the machine away without notice."""
        with self.lock:
            self._evict(self.rented[machine_id], self.clock.now())

    def give_notice(self, machine_id: str, ahead: timedelta = NOTICE) -> None:
        """Announce an eviction, which then comes."""
        with self.lock:
            vm = self.rented[machine_id]
            vm.notice_at = self.clock.now() + ahead
            self._later(vm, ahead, self._evict, since=self.clock.now())

    def end_by_itself(self, machine_id: str) -> None:
        """The machine is gone although neither we asked for it nor was it evicted."""
        with self.lock:
            self._note(self.rented[machine_id], "Microsoft.Compute/virtualMachines/delete", "somebody@example.org")
            self._end(self.rented[machine_id], self.clock.now(), "deleted by somebody")

    def add_foreign(self, name: str, tags: Mapping[str, str] | None = None) -> AzureVm:
        """Somebody's running machine in the same group, without a process."""
        with self.lock:
            size = next(iter(self.sizes.values()))
            region = next(iter(size.prices))
            body = {"location": region, "tags": dict(tags or {}), "properties": {"priority": "Spot"}}
            vm = self._new(name, body, size, region, "1", is_spot=True)
            vm.is_ours = False
            vm.launched_at -= max(self.quirks.list_lag, self.quirks.show_lag)
            vm.status = "running"
            self.ledger.price(vm.machine_id, at=self.clock.now(), compute=vm.price)
            return vm

    # --- reading --------------------------------------------------------------------------------------------------

    def price_of(self, size: AzureSize, region: str, *, is_spot: bool) -> MicroUsdPerHour:
        on_demand, spot = size.prices[region]
        return usd(spot if is_spot and spot is not None else on_demand)

    def named(self, name: str) -> AzureVm | None:
        """The machine of this name, in any case, that has not ended."""
        found = (one for one in self.rented.values() if one.name.lower() == name.lower() and one.exists)
        return next(found, None)

    def shown(self, name: str) -> AzureVm | None:
        vm = self.named(name)
        return None if vm is None else self.known(vm.machine_id)

    def vcpus_in_use(self, region: str, *, is_spot: bool) -> int:
        used = [one for one in self.rented.values() if one.exists and one.is_ours and one.region == region]
        return sum(one.size.vcpus for one in used if one.is_spot is is_spot and one.status != "Failed")

    # --- what the customer does -----------------------------------------------------------------------------------

    def put(self, name: str, body: dict[str, Any], *, is_new_only: bool) -> tuple[AzureVm, str | None]:
        """Create a machine, or return the one that has this name and body; the second is the operation.

        Raises:
            RestRefusal: nothing was ordered, unless the next launch was made to fail after its effect.
        """
        known = self.named(name)
        if known is not None and is_new_only:
            raise RestRefusal(412, "The condition If-None-Match is not met", code="PreconditionFailed")
        if known is not None and known.status == "Deleting":
            raise RestRefusal(409, "The resource is being deleted", code="Conflict")
        if known is not None:
            return self._put_again(known, body)
        properties, region = body["properties"], body["location"].lower().replace(" ", "")
        size = self.sizes.get(properties["hardwareProfile"]["vmSize"])
        if size is None:
            raise RestRefusal(400, "The value of parameter vmSize is invalid", code="InvalidParameter")
        if region not in size.prices or region in size.restrictions:
            raise RestRefusal(409, f"The requested size {size.name} is not available here", code="SkuNotAvailable")
        is_spot = properties.get("priority", "Regular") != "Regular"
        if is_spot and not size.is_spot_capable:
            raise RestRefusal(400, f"{size.name} is not supported for Spot", code="InvalidParameter")
        cap = properties.get("billingProfile", {}).get("maxPrice", -1)
        if is_spot and 0 <= cap * MICRO < self.price_of(size, region, is_spot=True):
            message = "The specified max price is lower than the current price of Spot"
            raise RestRefusal(409, message, code="OperationNotAllowed")
        limit, quota = (self.quirks.cores_spot, "LowPriorityCores") if is_spot else (self.quirks.cores, "cores")
        if self.vcpus_in_use(region, is_spot=is_spot) + size.vcpus > limit:
            message = f"Operation could not be completed as it results in exceeding approved {quota} quota"
            raise RestRefusal(409, message, code="OperationNotAllowed")
        zone = (body.get("zones") or [""])[0]
        if self.quirks.capacity_at_once and not self._has_place(size, region, zone):
            raise self.quirks.capacity
        vm = self._new(name, body, size, region, zone, is_spot=is_spot and not self.quirks.sells_regular)
        vm.fails = self._failures.pop(size.name, None)
        self._note(vm, "Microsoft.Compute/virtualMachines/write", "spotd")
        operation = self._begin_allocation(vm)
        self._raise_after_launch()
        return vm, operation

    def delete(self, name: str) -> str | None:
        """Ask for the end of a machine; `None` if there is none."""
        vm, now = self.named(name), self.clock.now()
        if vm is None:
            return None
        number = self.uuid()
        self.operations[number] = operation = AzureOperation()
        if vm.deaths_left > 0:
            vm.deaths_left -= 1
            operation.status = "Succeeded"
            return number
        if vm.status != "Deleting":
            self.machines.kill(vm.machine_id)
            vm.status = "Deleting"
            vm.boot_no += 1
            self._note(vm, "Microsoft.Compute/virtualMachines/delete", "spotd")
            if not self.quirks.bills_ending:
                self.ledger.price(vm.machine_id, at=now, compute=NOTHING)

        def finish(machine: AzureVm, at: datetime) -> None:
            operation.status = "Succeeded"
            self._end(machine, at, "deleted by its owner")

        self._later(vm, self.quirks.ending, finish, since=now)
        return number

    def drop(self, resource_id: str) -> bool:
        """Delete a resource that is no machine; an interface, disk or address in use is refused.

        Raises:
            RestRefusal: it is in use.
        """
        found = self.resources.get(resource_id)
        if found is None:
            return False
        if found.vm_id is not None and self.rented[found.vm_id].exists:
            raise RestRefusal(409, "The resource is attached to a virtual machine", code="OperationNotAllowed")
        self._drop(resource_id, self.clock.now())
        return True

    def simulate_eviction(self, vm: AzureVm) -> None:
        self._later(vm, NOTICE, self._evict, since=self.clock.now())
        vm.notice_at = self.clock.now() + NOTICE

    # --- inside ---------------------------------------------------------------------------------------------------

    def _put_again(self, vm: AzureVm, body: dict[str, Any]) -> tuple[AzureVm, str | None]:
        if {**body, "tags": None} != {**vm.body, "tags": None}:
            raise RestRefusal(409, "Changing this property is not allowed", code="PropertyChangeNotAllowed")
        vm.tags = dict(body.get("tags") or {})
        if vm.status != "Failed":
            return vm, None
        vm.status = "Creating"
        return vm, self._begin_allocation(vm)

    def _new(
        self, name: str, body: dict[str, Any], size: AzureSize, region: str, zone: str, *, is_spot: bool
    ) -> AzureVm:
        properties, tags = body["properties"], dict(body.get("tags") or {})
        disk = properties.get("storageProfile", {}).get("osDisk", {})
        has_address = '"publicIPAddressConfiguration"' in repr(properties).replace("'", '"')
        hourly = disk.get("diskSizeGB", 30) * DISK_GB_HOUR_USD
        vm = AzureVm(
            machine_id=self.uuid(),
            label=tags.get("spotd-key") or name,
            status="Creating",
            launched_at=self.clock.now(),
            price=self.price_of(size, region, is_spot=is_spot),
            gpus=size.gpus,
            is_spot=is_spot,
            script=script_of(properties.get("osProfile", {}).get("customData")),
            name=name,
            body=body,
            size=size,
            region=region,
            zone=zone,
            storage=usd(hourly + (IP_HOUR_USD if has_address else 0)),
            max_price=properties.get("billingProfile", {}).get("maxPrice", -1),
            tags=tags,
        )
        self._keep(vm, bills_now=False)
        nics = properties.get("networkProfile", {}).get("networkInterfaceConfigurations") or []
        self._belong(
            vm,
            DISK,
            disk.get("name") or f"{name}_OsDisk_1",
            body=tags,
            price=usd(hourly),
            dies=disk.get("deleteOption"),
        )
        for nic in nics:
            own = nic["properties"]
            self._belong(vm, NIC, f"{name}-{nic['name']}", body=nic.get("tags"), dies=own.get("deleteOption"))
            for ip in own.get("ipConfigurations", ()):
                public = ip["properties"].get("publicIPAddressConfiguration")
                if public is not None:
                    dies = public.get("properties", {}).get("deleteOption")
                    address, price = f"{name}-{public['name']}", usd(IP_HOUR_USD)
                    self._belong(vm, ADDRESS, address, body=public.get("tags"), price=price, dies=dies)
        return vm

    def _belong(
        self, vm: AzureVm, kind: str, name: str, *, body: Any, dies: Any, price: MicroUsdPerHour = NOTHING
    ) -> None:
        resource_id = f"{kind}/{name}".lower()
        self.resources[resource_id] = AzureResource(
            kind=kind,
            name=name,
            region=vm.region,
            body={"tags": dict(body or {})},
            vm_id=vm.machine_id,
            dies_with_vm=dies == "Delete" and kind not in self.quirks.leaves,
            price=price,
        )

    def _drop(self, resource_id: str, at: datetime) -> None:
        del self.resources[resource_id]
        bill = resource_id.replace("/", "-")
        if self.ledger.is_open(bill):
            self.ledger.end(bill, at=at, note="deleted")

    def _has_place(self, size: AzureSize, region: str, zone: str) -> bool:
        return size.free.get((region, zone), FREE) > 0

    def _begin_allocation(self, vm: AzureVm) -> str:
        number, now = self.uuid(), self.clock.now()
        self.operations[number] = operation = AzureOperation()

        def allocate(machine: AzureVm, at: datetime) -> None:
            place = (machine.region, machine.zone)
            refusal = machine.fails
            if refusal is None and not self._has_place(machine.size, *place):
                refusal = self.quirks.capacity
            if refusal is not None:
                machine.fails = None
                machine.status = "Failed"
                operation.status, operation.error = "Failed", {"code": refusal.code, "message": refusal.message}
                return
            machine.size.free[place] = machine.size.free.get(place, FREE) - 1
            machine.holds_place = True
            machine.status = "starting"
            self.ledger.price(machine.machine_id, at=at, compute=machine.price, storage=machine.storage)
            self._later(machine, max(self.quirks.boot - self.quirks.allocates, timedelta(0)), come_up, since=at)

        def come_up(machine: AzureVm, at: datetime) -> None:
            operation.status = "Succeeded"
            machine.status = "running"
            self._run(machine, at)

        self._later(vm, self.quirks.allocates, allocate, since=now)
        return number

    def _power_off(self, machine: AzureVm, at: datetime) -> None:
        self.machines.kill(machine.machine_id)
        machine.boot_no += 1
        machine.status = "stopped"

    def _evict(self, vm: AzureVm, at: datetime) -> None:
        self._note(vm, "Microsoft.Compute/virtualMachines/evictSpotVM/action", "Azure", at)
        if vm.body["properties"].get("evictionPolicy", "Deallocate") == "Delete" or not vm.is_ours:
            self._end(vm, at, "evicted")
            return
        self.machines.kill(vm.machine_id)
        vm.boot_no += 1
        vm.status = "deallocated"
        self._give_back(vm)
        self.ledger.price(vm.machine_id, at=at, compute=NOTHING)

    def _end(self, machine: AzureVm, at: datetime, note: str) -> None:
        super()._end(machine, at, note)
        self._give_back(machine)
        for resource_id, one in list(self.resources.items()):
            if one.vm_id != machine.machine_id:
                continue
            if one.dies_with_vm:
                del self.resources[resource_id]
            elif one.price:
                bill = resource_id.replace("/", "-")
                self.ledger.open(bill, machine.label or "", at=at, compute=NOTHING, storage=one.price)

    def _give_back(self, vm: AzureVm) -> None:
        if vm.holds_place:
            vm.size.free[vm.region, vm.zone] += 1
            vm.holds_place = False

    def _note(self, vm: AzureVm, operation: str, caller: str, at: datetime | None = None) -> None:
        self.log.append((at or self.clock.now(), operation, vm.name, caller))


def script_of(custom_data: Any) -> str | None:
    """The script that cloud-init runs; other forms of user data run nothing here.

    Raises:
        RestRefusal: it is no base64, or too much.
    """
    if custom_data is None:
        return None
    try:
        text = base64.b64decode(custom_data, validate=True)
    except (binascii.Error, TypeError, ValueError):
        raise RestRefusal(400, "customData is no base64", code="InvalidParameter") from None
    if len(text) > CUSTOM_DATA_BYTES_MAX:
        raise RestRefusal(400, "customData is too long", code="InvalidParameter")
    return text.decode("utf-8", "replace") if text.startswith(b"#!") else None
