"""The state of the fake TensorDock: host nodes, virtual machines and secrets."""

from __future__ import annotations

import base64
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, Final, Literal

from spotd_providers.contract.values import MicroUsdPerHour
from spotd_providers.local.hosts import HostClock
from tests.fakes.cloud import NOTHING
from tests.fakes.rest import RestCloud, RestMachine, RestQuirks, RestRefusal, usd

VCPU_HOUR_USD: Final = 0.003
RAM_GB_HOUR_USD: Final = 0.002
STORAGE_GB_HOUR_USD: Final = 0.00005
BALANCE_USD_MIN: Final = 1.0


@dataclass(slots=True, kw_only=True)
class TensorDockQuirks(RestQuirks):
    """The knobs of this fake; [U] marks a fact that is not certain, and has both behaviours.

    Attributes:
        cloud_init: from `running` to the first command: drivers and Docker start slowly.
        no_locations: `/locations` is an empty list although there is stock: for requests without a token, or for all.
        lists_sold_out: models of which none is left are listed with `max_count` 0 [U].
        prices: numbers, or texts [U].
        gpus_shape: of `resources.gpus` in a create that is accepted [U].
        reply_shape: of a create: `name` and `status` beside the id, or below `attributes` [U].
        create_status: 200 or 201. `create_says`: the status in its answer.
        list_shape: `data.instances[]`, or `data[]`; `show_shape`: a flat object, or one below `data` [U].
        row_gpus: a map or a list in rows [U].
        case: of statuses.
        errors_in_200: a refusal is HTTP 200 with the status in its body; an unknown token is a 401 all the same.
        capacity: the refusal of a create for which no host is left; the reference has no text.
        steps_on_create: vCPUs in steps of 2, RAM of 8 GB, storage of 50 GB, as is documented of `modify` only [U].
        needs_ssh_key: a create without a key is refused [U].
        bills_from: the order, or the first moment of `running` [U].
        stopped_bills: a stopped machine is billed on with its GPU [U].
        stop_gives_back: a stop gives the GPU back, and a start is refused until there is stock [U].
        undeletable: statuses in which a delete is refused [U].
        delete_again: a delete of a machine that is ending is refused [U].
        lingers: so long a machine that has ended is shown as `deleted`; otherwise it is a 404.
    """

    lingers: timedelta = timedelta(0)
    requests_per_minute: int | None = 100
    cloud_init: timedelta = timedelta(minutes=1)
    no_locations: Literal["never", "without token", "always"] = "never"
    lists_sold_out: bool = False
    prices: Literal["number", "text"] = "number"
    gpus_shape: Literal["map", "model", "either"] = "map"
    reply_shape: Literal["flat", "attributes"] = "flat"
    create_status: int = 201
    create_says: Literal["starting", "running"] = "starting"
    list_shape: Literal["instances", "data"] = "instances"
    show_shape: Literal["flat", "data"] = "flat"
    row_gpus: Literal["map", "list"] = "map"
    case: Literal["lower", "title", "upper"] = "lower"
    errors_in_200: bool = True
    capacity: RestRefusal = field(
        default_factory=lambda: RestRefusal(400, "No available nodes found for the requested resources")
    )
    steps_on_create: bool = True
    needs_ssh_key: bool = True
    bills_from: Literal["order", "running"] = "order"
    stopped_bills: bool = True
    stop_gives_back: bool = False
    undeletable: frozenset[str] = frozenset()
    delete_again: bool = False


@dataclass(slots=True, kw_only=True)
class TensorDockNode:
    """One host with one model of GPU. `price` is $/h of one GPU, without processors, memory and storage."""

    node_id: str
    location_id: str
    model: str
    display: str
    price: float
    free: int
    city: str = "Austin"
    vcpus: int = 128
    ram_gb: int = 512
    storage_gb: int = 2000
    ports: list[int] = field(default_factory=lambda: [20000, 20001, 20002])
    dedicated_ip: bool = True


@dataclass(slots=True, kw_only=True)
class TensorDockVm(RestMachine):
    """One virtual machine. `body` holds the attributes that its create asked for."""

    node: TensorDockNode
    body: dict[str, Any]
    storage: MicroUsdPerHour
    ports: dict[str, int] = field(default_factory=dict)
    fails: str | None = None
    has_gpus: bool = True

    @property
    def rate(self) -> MicroUsdPerHour:
        """What it costs per hour in its present state, all together."""
        return MicroUsdPerHour((0 if self.status.startswith("stopped") else self.price) + self.storage)


class TensorDockCloud(RestCloud[TensorDockQuirks, TensorDockVm]):
    """One organisation at a fake TensorDock."""

    token = "fake-tensordock-token-19bd"

    def __init__(self, root: Path, *, clock: HostClock, quirks: TensorDockQuirks | None = None) -> None:
        super().__init__(root, clock=clock, quirks=quirks or TensorDockQuirks())
        self.nodes: dict[str, TensorDockNode] = {}
        self.secrets: dict[str, dict[str, str]] = {}
        self.deposit_usd = 100.0
        self._failures: dict[str, str] = {}

    # --- what the market and the faults do ------------------------------------------------------------------------

    def stock(self, *nodes: TensorDockNode) -> None:
        with self.lock:
            self.nodes.update({one.node_id: one for one in nodes})

    def sell_out(self, model: str, location_id: str | None = None) -> None:
        """Use up the model, in one location or in all."""
        with self.lock:
            for node in self.nodes.values():
                if node.model == model and location_id in (None, node.location_id):
                    node.free = 0

    def set_price(self, model: str, price: float) -> None:
        """Change the price of one GPU for new machines."""
        with self.lock:
            for node in self.nodes.values():
                node.price = price if node.model == model else node.price

    def fail_next_boot(self, model: str, status: str) -> None:
        """The next machine with this model goes to `error`, or stays in `starting` for ever."""
        with self.lock:
            self._failures[model] = status

    def stop(self, vm_id: str) -> None:
        """The machine stops although no customer asked for it."""
        with self.lock:
            self._power_off(self.rented[vm_id], self.clock.now())

    def add_foreign(self, name: str) -> TensorDockVm:
        """Somebody's running machine in the same organisation, without a process."""
        with self.lock:
            node = next(iter(self.nodes.values()))
            resources = {"vcpu_count": 2, "ram_gb": 8, "storage_gb": 100, "gpus": {node.model: {"count": 1}}}
            vm = self._new(node, {"name": name, "image": "ubuntu2204", "resources": resources}, gpus=1)
            vm.is_ours = False
            vm.launched_at -= max(self.quirks.list_lag, self.quirks.show_lag)
            self._come_up(vm, self.clock.now())
            return vm

    # --- what time does -------------------------------------------------------------------------------------------

    def _power_off(self, machine: TensorDockVm, at: datetime) -> None:
        self.machines.kill(machine.machine_id)
        machine.boot_no += 1
        machine.status = "stopped"
        if self.quirks.stop_gives_back:
            machine.status = "stoppeddisassociated"
            self._give_back(machine)
        if self.quirks.stop_gives_back or not self.quirks.stopped_bills:
            self.ledger.price(machine.machine_id, at=at, compute=NOTHING)

    def _come_up(self, vm: TensorDockVm, at: datetime) -> None:
        if vm.fails == "error":
            vm.status = "error"
            return
        vm.status = "running"
        self.ledger.price(vm.machine_id, at=at, compute=vm.price)
        self._later(vm, self.quirks.cloud_init, self._run, since=at)

    def _give_back(self, vm: TensorDockVm) -> None:
        if vm.has_gpus and vm.is_ours:
            vm.node.free += vm.gpus
        vm.has_gpus = False

    # --- what the customer does -----------------------------------------------------------------------------------

    def create(self, body: dict[str, Any], model: str, count: int) -> TensorDockVm:
        """
        Raises:
            RestRefusal: nothing was ordered, unless the next launch was made to fail after its effect.
        """
        if self.deposit_usd - self.spent_usd() < BALANCE_USD_MIN:
            raise RestRefusal(402, "Insufficient balance: at least $1.00 is needed")
        self.require_quota(count)
        place, wanted = body.get("location_id"), body["resources"]
        nodes = [
            node
            for node in self.nodes.values()
            if place in (None, node.location_id) and body.get("hostnode_id") in (None, node.node_id)
        ]
        if not nodes:
            raise RestRefusal(404, "Location or hostnode not found")
        fits = [
            node
            for node in nodes
            if node.model == model
            and node.free >= count
            and node.vcpus >= wanted["vcpu_count"]
            and node.ram_gb >= wanted["ram_gb"]
            and node.storage_gb >= wanted["storage_gb"]
        ]
        if not fits:
            raise self.quirks.capacity
        node, forwards = fits[0], body.get("port_forwards") or []
        if any(row["external_port"] not in node.ports for row in forwards):
            raise RestRefusal(409, "A port is not available on this hostnode")
        if body.get("useDedicatedIp") and not node.dedicated_ip:
            raise RestRefusal(400, "Dedicated IP is not available at this location")
        node.free -= count
        vm = self._new(node, body, gpus=count)
        vm.fails = self._failures.pop(model, None)
        for row in forwards:
            node.ports.remove(row["external_port"])
            vm.ports[str(row["internal_port"])] = row["external_port"]
        if vm.fails in (None, "error"):
            self._later(vm, self.quirks.boot, self._come_up, since=vm.launched_at)
        self._raise_after_launch()
        return vm

    def require(self, vm_id: str) -> TensorDockVm:
        """
        Raises:
            RestRefusal: there is no such machine.
        """
        vm = self.rented.get(vm_id)
        if vm is None or vm.vanished or not vm.exists:
            raise RestRefusal(404, "Instance not found")
        return vm

    def delete(self, vm_id: str) -> None:
        """
        Raises:
            RestRefusal: there is no such machine, or it can not be deleted now.
        """
        vm, now = self.require(vm_id), self.clock.now()
        if vm.status in self.quirks.undeletable or (vm.status == "deleting" and self.quirks.delete_again):
            raise RestRefusal(409, f"Instance can not be deleted while it is {vm.status}")
        if vm.deaths_left > 0:
            vm.deaths_left -= 1
            return
        if vm.status == "deleting":
            return
        self.machines.kill(vm_id)
        vm.status = "deleting"
        vm.boot_no += 1
        if not self.quirks.bills_ending:
            self.ledger.end(vm_id, at=now, note="deleted by its owner")

        def finish(machine: TensorDockVm, at: datetime) -> None:
            machine.status = "deleted"
            self._give_back(machine)
            machine.node.ports += machine.ports.values()
            self._end(machine, at, "deleted by its owner")

        self._later(vm, self.quirks.ending, finish, since=now)

    def start(self, vm_id: str) -> None:
        """
        Raises:
            RestRefusal: it is not stopped, or its GPU is gone.
        """
        vm, now = self.require(vm_id), self.clock.now()
        if not vm.status.startswith("stopped"):
            raise RestRefusal(400, f"Instance is {vm.status}")
        if not vm.has_gpus:
            if vm.node.free < vm.gpus:
                raise RestRefusal(400, "The GPUs of this instance are not available")
            vm.node.free -= vm.gpus
            vm.has_gpus = True
        self._come_up(vm, now)

    def halt(self, vm_id: str) -> None:
        """
        Raises:
            RestRefusal: it does not run.
        """
        vm = self.require(vm_id)
        if vm.status != "running":
            raise RestRefusal(400, f"Instance is {vm.status}")
        self._power_off(vm, self.clock.now())

    # --- inside ---------------------------------------------------------------------------------------------------

    def _new(self, node: TensorDockNode, body: dict[str, Any], *, gpus: int) -> TensorDockVm:
        wanted = body["resources"]
        hourly = gpus * node.price + wanted["vcpu_count"] * VCPU_HOUR_USD + wanted["ram_gb"] * RAM_GB_HOUR_USD
        vm = TensorDockVm(
            machine_id=self.uuid(),
            label=body["name"],
            status="starting",
            launched_at=self.clock.now(),
            price=usd(hourly),
            gpus=gpus,
            script=_script(body.get("cloud_init") or {}),
            node=node,
            body=body,
            storage=usd(wanted["storage_gb"] * STORAGE_GB_HOUR_USD),
        )
        self._keep(vm, bills_now=self.quirks.bills_from == "order", storage=vm.storage)
        return vm


def _script(cloud_init: Mapping[str, Any]) -> str | None:
    """What cloud-init does, as a script: its files lie below the machine's own directory instead of at the root."""
    lines = []
    files = cloud_init.get("write_files") or []
    for row in files:
        place = shlex.quote(f"root{row['path']}")
        content = base64.b64encode(row["content"].encode()).decode()
        lines += [f"mkdir -p $(dirname {place})", f"echo {content} | base64 -d >{place}"]
        lines += [f"chmod {shlex.quote(row.get('permissions', '0644'))} {place}"]
    for command in cloud_init.get("runcmd") or []:
        text = command if isinstance(command, str) else shlex.join(command)
        for row in files:
            text = text.replace(row["path"], f"root{row['path']}")
        lines.append(text)
    return "\n".join(["#!/bin/sh", *lines, ""]) if lines else None


def some_nodes() -> tuple[TensorDockNode, ...]:
    """A small market: a model in two places, eight GPUs, a host without own addresses, one unheard of, one sold out."""
    h100, rtx = ("h100-sxm5-80gb", "H100 SXM5 80GB"), ("geforcertx4090-pcie-24gb", "NVIDIA GeForce RTX 4090 PCIe 24GB")
    rows = [
        ("1", "loc-1", *h100, 2.2, 8, "Austin"),
        ("2", "loc-2", *rtx, 0.37, 2, "Manassas"),
        ("3", "loc-3", *rtx, 0.41, 4, "Dallas"),
        ("4", "loc-3", "rtxa4000-pcie-16gb", "NVIDIA RTX A4000 PCIe 16GB", 0.105, 1, "Dallas"),
        ("5", "loc-5", "quantum9000-pcie-1gb", "Quantum 9000", 0.01, 1, "Nowhere"),
        ("6", "loc-6", "v100-sxm2-16gb", "NVIDIA V100 SXM2 16GB", 0.22, 0, "Oslo"),
    ]
    return tuple(
        TensorDockNode(
            node_id=f"node-{no}", location_id=place, model=model, display=display, price=price, free=free,
            city=city, dedicated_ip=no != "4",
        )
        for no, place, model, display, price, free, city in rows
    )  # fmt: skip
