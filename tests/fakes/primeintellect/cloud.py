"""The state of the fake Prime Intellect: configurations for sale, pods, and the wallet."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, Final, Literal

from spotd_providers.local.hosts import HostClock
from tests.fakes.cloud import NOTHING
from tests.fakes.rest import RestCloud, RestMachine, RestQuirks, RestRefusal, usd

JUPYTER_PASSWORD: Final = "fake-prime-jupyter-password-9e3a"
"""Part of every pod's row; a secret that no adapter may keep."""
IMAGES: Final = ("ubuntu_22_cuda_12", "cuda_12_4_pytorch_2_6", "custom_template")
SCOPES: Final = ("availability", "instances", "disks", "wallet")


@dataclass(slots=True, kw_only=True)
class PrimeQuirks(RestQuirks):
    """The knobs of this fake; [U] marks a fact that is not certain, and has both behaviours.

    Attributes:
        installing: from `ACTIVE` to the end of the installation, when the start command runs.
        installation: whether rows say that by `installationStatus`, by `installationProgress`, or by both [U].
        scopes: of the key; a call outside them is a 403.
        sick_answers: so many answers of offers are `{"items": [], "totalCount": 0}` from now on, with status 200.
        fails_from: rows from this index on, of offers and of pods, are on pages that answer 500.
        total_lies: added to `totalCount` of offers and `total_count` of pods.
        disk_in_price: `onDemand` holds the disk of `defaultCount` although the flag says that it does not [U].
        memory_total: `gpuMemory` is that of all GPUs together [U].
        empty_blocks: `null`, or objects full of nulls, for what a configuration does not have.
        stock_words: in turn, of what is for sale; any case. `lists_sold_out` as `Unavailable`.
        enforces_max_price: a create whose `maxPrice` is below the price is refused [U].
        price_at_launch: by GPU type, the base price that holds from the moment of the launch.
        capacity: the refusal of a create for which the upstream cloud has nothing: 409 or 503.
        create_status: 200 or 201.
        address: `sshConnection` and `ip` as a text, a list, or a list of nothing.
        slash: paths of pods end with one (reference), without one (official client), or either way [U]; the other form
            is a redirect with status 307.
        cost_name: the price in rows of `/pods/status/` [U].
        undeletable: statuses in which a delete is refused [U]; `delete_again`: so is one of what is being deleted [U].
        preempted_shows: what a pod becomes that is taken away; `ERROR` bills on by `error_bills` [U].
        bills_from: the order, or the first moment of `ACTIVE` [U].
        billing_rows: one row per pod, or one per hour of a pod [U]; `billing_lag`: bills are known so much later.
    """

    lingers: timedelta = timedelta(0)
    installing: timedelta = timedelta(minutes=1)
    installation: Literal["status", "progress", "both"] = "both"
    scopes: set[str] = field(default_factory=lambda: set(SCOPES))
    sick_answers: int = 0
    fails_from: int | None = None
    total_lies: int = 0
    disk_in_price: bool = True
    memory_total: bool = False
    empty_blocks: Literal["null", "nulls"] = "nulls"
    stock_words: tuple[str, ...] = ("Low", "available", "MEDIUM", "High")
    lists_sold_out: bool = True
    enforces_max_price: bool = False
    price_at_launch: dict[str, float] = field(default_factory=dict)
    capacity: RestRefusal = field(default_factory=lambda: RestRefusal(409, "No capacity: the GPU is not available"))
    create_status: int = 200
    address: Literal["text", "list", "nothing"] = "text"
    slash: Literal["with", "without", "either"] = "with"
    cost_name: Literal["priceHr", "costPerHr"] = "priceHr"
    undeletable: frozenset[str] = frozenset()
    delete_again: bool = False
    preempted_shows: Literal["TERMINATED", "ERROR", "nothing"] = "TERMINATED"
    error_bills: bool = True
    bills_from: Literal["order", "active"] = "order"
    billing_rows: Literal["pod", "hour"] = "pod"
    billing_lag: timedelta = timedelta(0)


@dataclass(slots=True, kw_only=True)
class PrimeConfiguration:
    """A row of the market. `price` is $/h without the disk, `unit` that of a GB of disk."""

    cloud_id: str
    gpu: str
    provider: str
    price: float
    free: int = 2
    socket: str = "PCIe"
    region: str = "united_states"
    data_center: str = "US-KS-2"
    country: str = "US"
    gpus: int = 1
    memory_gb: int = 80
    disk_gb: int = 120
    disk_gb_max: int = 3000
    unit: float = 0.00014
    is_spot: bool | None = None
    is_variable: bool | None = None
    prepaid_hours: int | None = None
    community: bool = False
    currency: str = "USD"
    images: tuple[str, ...] = IMAGES


@dataclass(slots=True, kw_only=True)
class PrimePod(RestMachine):
    """One pod. `base` is its price in $/h without the disk; `body` is `pod` of its create."""

    sold: PrimeConfiguration
    body: dict[str, Any]
    base: float
    fails: str | None = None
    progress: int = 0
    terminated_at: datetime | None = None

    @property
    def disk_gb(self) -> int:
        return int(self.body.get("diskSize") or self.sold.disk_gb)


class PrimeCloud(RestCloud[PrimeQuirks, PrimePod]):
    """One account at a fake Prime Intellect."""

    api_key = "pit_fake-7a31c0"

    def __init__(self, root: Path, *, clock: HostClock, quirks: PrimeQuirks | None = None) -> None:
        super().__init__(root, clock=clock, quirks=quirks or PrimeQuirks())
        self.configurations: list[PrimeConfiguration] = []
        self.templates: dict[str, str] = {"template-1": 'eval "$SPOTD_START"'}
        self.ssh_address: Callable[[PrimePod], str] = lambda pod: "root@203.0.113.77 -p 22"
        self.deposit_usd = 200.0
        self._failures: dict[str, str] = {}

    # --- what the market and the faults do ------------------------------------------------------------------------

    def stock(self, *configurations: PrimeConfiguration) -> None:
        with self.lock:
            self.configurations += configurations

    def sell_out(self, cloud_id: str, data_center: str | None = None) -> None:
        """Use the configuration up, in one data centre or in all."""
        with self.lock:
            for one in self.configurations:
                if one.cloud_id == cloud_id and data_center in (None, one.data_center):
                    one.free = 0

    def set_price(self, cloud_id: str, price: float) -> None:
        """Change the base price of new pods, and of those whose price is variable."""
        with self.lock:
            for one in self.configurations:
                one.price = price if one.cloud_id == cloud_id else one.price
            for pod in self.rented.values():
                if pod.exists and pod.sold.cloud_id == cloud_id and pod.sold.is_variable:
                    self._price(pod, price)
                    self.ledger.price(pod.machine_id, at=self.clock.now(), compute=pod.price)

    def rename_cloud_ids(self) -> None:
        """Every configuration is sold under another `cloudId`; the old ones are unknown."""
        with self.lock:
            for one in self.configurations:
                one.cloud_id = f"{one.cloud_id}-b"

    def fail_next_boot(self, gpu: str, status: str) -> None:
        """The next pod of this GPU type goes to `ERROR`, stays in `PROVISIONING`, or in `INSTALLING`, for ever."""
        with self.lock:
            self._failures[gpu] = status

    def preempt(self, pod_id: str) -> None:
        """The pod is taken away; one with `autoRestart` comes back and runs its start command anew."""
        with self.lock:
            pod, now, shows = self.rented[pod_id], self.clock.now(), self.quirks.preempted_shows
            self.machines.kill(pod_id)
            pod.boot_no += 1
            if pod.body.get("autoRestart") is True:
                pod.status, pod.progress = "PROVISIONING", 0
                self._boot(pod, now)
            elif shows == "ERROR":
                pod.status = "ERROR"
                if not self.quirks.error_bills:
                    self.ledger.price(pod_id, at=now, compute=NOTHING)
            else:
                self._terminate(pod, now)
                pod.vanished = shows == "nothing"

    def run_there(self, pod_id: str, script: str) -> None:
        """Run this on the pod, as somebody who logged in by SSH would."""
        with self.lock:
            self.machines.start(pod_id, script)

    def add_foreign(self, name: str) -> PrimePod:
        """Somebody's active pod in the same account, without a process."""
        with self.lock:
            pod = self._new(self.configurations[0], {"name": name, "image": IMAGES[0]})
            pod.is_ours = False
            pod.launched_at -= max(self.quirks.list_lag, self.quirks.show_lag)
            self._activate(pod, self.clock.now())
            self._install(pod, self.clock.now())
            return pod

    def balance(self) -> float:
        """What is left in the wallet, $."""
        return self.deposit_usd - self.spent_usd()

    # --- what time does -------------------------------------------------------------------------------------------

    def _power_off(self, machine: PrimePod, at: datetime) -> None:
        machine.status = "STOPPED"
        self.ledger.price(machine.machine_id, at=at, compute=usd(self._disk_usd(machine)))

    def _boot(self, pod: PrimePod, at: datetime) -> None:
        if pod.fails == "PROVISIONING":
            return
        self._later(pod, self.quirks.boot, self._activate, since=at)
        if pod.fails is None:
            self._later(pod, self.quirks.boot + self.quirks.installing, self._install, since=at)

    def _activate(self, pod: PrimePod, at: datetime) -> None:
        pod.status = "ERROR" if pod.fails == "ERROR" else "ACTIVE"
        pod.progress = 40
        if pod.status == "ACTIVE":
            self.ledger.price(pod.machine_id, at=at, compute=pod.price)

    def _install(self, pod: PrimePod, at: datetime) -> None:
        pod.progress = 100
        if pod.machine_id in self.machines.ids() and pod.script is not None:
            self.machines.restart(pod.machine_id)
        self._run(pod, at)

    def _terminate(self, pod: PrimePod, at: datetime) -> None:
        if pod.exists and pod.is_ours:
            pod.sold.free += 1
        pod.status, pod.terminated_at = "TERMINATED", at
        self._end(pod, at, "terminated")

    # --- what the customer does -----------------------------------------------------------------------------------

    def create(self, body: dict[str, Any], provider: str) -> PrimePod:
        """
        Raises:
            RestRefusal: nothing was ordered, unless the next launch was made to fail after its effect.
        """
        names = {"gpuType": "gpu", "socket": "socket", "gpuCount": "gpus", "dataCenterId": "data_center"}
        matching = [
            one
            for one in self.configurations
            if (one.cloud_id, one.provider) == (body["cloudId"], provider)
            and all(body.get(name) in (None, getattr(one, own)) for name, own in names.items())
            and body.get("security") in (None, "community_cloud" if one.community else "secure_cloud")
        ]
        if not matching:
            raise RestRefusal(404, "No such configuration: cloudId, provider or data center is unknown")
        if self.balance() <= 0:
            raise RestRefusal(402, "Insufficient funds in wallet")
        sold = next((one for one in matching if one.free > 0), None)
        if sold is None:
            raise self.quirks.capacity
        self.require_quota(sold.gpus)
        self._require_fitting(body, sold)
        sold.price = self.quirks.price_at_launch.pop(sold.gpu, sold.price)
        ceiling = body.get("maxPrice")
        if self.quirks.enforces_max_price and ceiling is not None and ceiling < sold.price:
            raise RestRefusal(409, f"The price of {sold.price} is above maxPrice")
        sold.free -= 1
        pod = self._new(sold, body)
        pod.fails = self._failures.pop(sold.gpu, None)
        self._boot(pod, pod.launched_at)
        self._raise_after_launch()
        return pod

    def delete(self, pod_id: str) -> PrimePod:
        """
        Raises:
            RestRefusal: there is no such pod, or it can not be deleted now.
        """
        pod, now = self.rented.get(pod_id), self.clock.now()
        if pod is None or pod.vanished or not pod.exists:
            raise RestRefusal(404, "Pod not found")
        if pod.status in self.quirks.undeletable or (pod.status == "DELETING" and self.quirks.delete_again):
            raise RestRefusal(409, f"A pod that is {pod.status} can not be deleted")
        if pod.deaths_left > 0:
            pod.deaths_left -= 1
        elif pod.status != "DELETING":
            self.machines.kill(pod_id)
            pod.status = "DELETING"
            pod.boot_no += 1
            if not self.quirks.bills_ending:
                self.ledger.end(pod_id, at=now, note="deleted by its owner")
            self._later(pod, self.quirks.ending, self._terminate, since=now)
        return pod

    # --- inside ---------------------------------------------------------------------------------------------------

    @staticmethod
    def _require_fitting(body: dict[str, Any], sold: PrimeConfiguration) -> None:
        """
        Raises:
            RestRefusal: the disk or the prepayment is outside what the configuration allows.
        """
        size = body.get("diskSize")
        if size is not None and not sold.disk_gb <= size <= sold.disk_gb_max:
            text = f"diskSize must be between {sold.disk_gb} and {sold.disk_gb_max}"
            raise RestRefusal(
                422, text, detail=[{"loc": ["body", "pod", "diskSize"], "msg": text, "type": "value_error"}]
            )
        if sold.prepaid_hours and body.get("prepaidForHr") is None:
            raise RestRefusal(422, "This configuration has to be paid ahead: prepaidForHr is required")
        if body.get("image") not in (None, *sold.images):
            raise RestRefusal(422, "The image is not available for this configuration")

    @staticmethod
    def _disk_usd(pod: PrimePod) -> float:
        return pod.disk_gb * pod.sold.unit

    def _price(self, pod: PrimePod, base: float) -> None:
        pod.base, pod.price = base, usd(base + self._disk_usd(pod))

    def _new(self, sold: PrimeConfiguration, body: dict[str, Any]) -> PrimePod:
        start = (
            self.templates.get(str(body.get("customTemplateId"))) if body.get("image") == "custom_template" else None
        )
        exports = [f"export {row['key']}={shlex.quote(row['value'])}" for row in body.get("envVars") or []]
        pod = PrimePod(
            machine_id=self.uuid().replace("-", ""),
            label=body.get("name"),
            status="PROVISIONING",
            launched_at=self.clock.now(),
            price=NOTHING,
            gpus=sold.gpus,
            is_spot=bool(sold.is_spot),
            script=None if start is None else "\n".join(["#!/bin/sh", *exports, start, ""]),
            sold=sold,
            body=body,
            base=sold.price,
        )
        self._price(pod, sold.price)
        return self._keep(pod, bills_now=self.quirks.bills_from == "order")


def some_configurations() -> tuple[PrimeConfiguration, ...]:
    """A small market: containers and virtual machines, spot rows, and rows that nobody should take at their word."""
    row, a100 = PrimeConfiguration, "A100_80GB"
    finland: dict[str, Any] = {
        "data_center": "FIN-02",
        "country": "FI",
        "region": "eu_north",
        "provider": "datacrunch",
        "disk_gb": 50,
    }
    return (
        row(cloud_id="NVIDIA A100 80GB PCIe", gpu=a100, provider="runpod", price=1.64),
        row(cloud_id="NVIDIA A100 80GB PCIe", gpu=a100, provider="runpod", price=1.64, data_center="US-MO-1", free=1),
        row(
            cloud_id="n3-H100x1",
            gpu="H100_80GB",
            provider="hyperstack",
            price=1.9,
            data_center="CANADA-1",
            country="CA",
        ),
        row(cloud_id="n3-H100x8", gpu="H100_80GB", provider="hyperstack", price=15.2, gpus=8, free=1, unit=0.0),
        row(cloud_id="1A100.22V", gpu=a100, price=0.5748, is_spot=True, socket="SXM4", **finland),
        row(cloud_id="2A100.44V", gpu=a100, price=1.1496, is_spot=True, gpus=2, socket="SXM4", **finland),
        row(
            cloud_id="moving",
            gpu="RTX4090_24GB",
            provider="dc_roan",
            price=0.3,
            is_spot=True,
            is_variable=True,
            memory_gb=24,
        ),
        row(
            cloud_id="shared",
            gpu="RTX4090_24GB",
            provider="dc_roan",
            price=0.25,
            community=True,
            is_spot=False,
            memory_gb=24,
        ),
        row(cloud_id="ahead", gpu="B200_180GB", provider="primecompute", price=3.0, prepaid_hours=24, memory_gb=180),
        row(cloud_id="euros", gpu="H100_80GB", provider="nebius", price=1.2, currency="EUR"),
        row(cloud_id="gone", gpu="H200_141GB", provider="nebius", price=2.2, free=0, memory_gb=141),
    )
