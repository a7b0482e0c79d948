"""What is sold, what is rented, how it is refused, and the knobs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Any, Final

from spotd_providers.contract.values import MICRO, MicroUsdPerHour
from spotd_providers.testkit.serve import Call

ACCOUNT_KEY: Final = "fake-lambda-account-key"
JUPYTER_TOKEN: Final = "fake-jupyter-token-5d0c"
"""Part of every instance's row; a secret that no adapter may keep."""
REGIONS: Final = {
    "us-east-1": "Virginia, USA",
    "us-west-1": "California, USA",
    "europe-central-1": "Frankfurt, Germany",
}
STATUSES: Final = {
    "instance-operations/launch/insufficient-capacity": 400,
    "instance-operations/launch/file-system-in-wrong-region": 400,
    "global/invalid-parameters": 400,
    "global/duplicate": 400,
    "global/invalid-address": 400,
    "global/quota-exceeded": 400,
    "global/invalid-api-key": 401,
    "global/account-inactive": 403,
    "global/forbidden": 403,
    "global/object-does-not-exist": 404,
    "global/not-found": 404,
    "global/conflict": 409,
    "filesystems/filesystem-in-use": 400,
    "firewall-rulesets/firewall-ruleset-in-use": 400,
    "global/internal-error": 500,
}
"""HTTP status by error code. The reference gives those of capacity, parameters, keys, 403 and 404; the others are
chosen here, and `Quirks.statuses` replaces any of them. A code that is not here (`provider/...`) is a 500."""


class Refusal(Exception):
    """An answer with an error code of Lambda's; `status` is `None` for the one that goes with the code."""

    def __init__(self, code: str, message: str, *, status: int | None = None, retry_after_s: int | None = None) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code
        self.message = message
        self.status = status
        self.retry_after_s = retry_after_s


def no_such(what: str) -> Refusal:
    """The object does not exist, or not any longer."""
    return Refusal("global/object-does-not-exist", f"Specified {what} does not exist.")


class Phase(StrEnum):
    """`status` of an instance."""

    BOOTING = "booting"
    ACTIVE = "active"
    UNHEALTHY = "unhealthy"
    TERMINATING = "terminating"
    TERMINATED = "terminated"
    PREEMPTED = "preempted"

    @property
    def exists(self) -> bool:
        return self in (Phase.BOOTING, Phase.ACTIVE, Phase.UNHEALTHY)


class Failure(StrEnum):
    """How a boot can go wrong; neither bills, as no health check is ever passed."""

    STUCK = "booting for ever"
    UNHEALTHY = "unhealthy at once"


@dataclass(slots=True, kw_only=True)
class Quirks:
    """The knobs of the fake; change one while it runs and the next request sees it. They are listed in the package."""

    boot: timedelta = timedelta(minutes=3)
    boot_eight_gpus: timedelta = timedelta(minutes=20)
    terminating: timedelta = timedelta(minutes=1)
    lingers: timedelta = timedelta(minutes=30)
    list_lag: timedelta = timedelta(0)
    show_lag: timedelta = timedelta(0)
    file_system_release: timedelta = timedelta(minutes=2)
    rate_limits: bool = True
    rate_limit_code: str | None = "global/too-many-requests"
    retry_after_s: int | None = None
    takes_quantity: bool = False
    has_filesystems_route: bool = True
    shows_first_healthy: bool = False
    shows_is_reserved: bool = False
    minute_rounds_up: bool = True
    bills_terminating: bool = False
    bills_preempted: bool = False
    price_follows: bool = False
    after_shutdown: Phase = Phase.ACTIVE
    terminate_again_conflicts: bool = False
    undead: int = 0
    sells_nothing: bool = False
    quota_gpus: int | None = None
    refusals: dict[Call, str] = field(default_factory=dict)
    fail_after_launch: str | None = None
    price_at_next_launch: dict[str, int] = field(default_factory=dict)
    statuses: dict[str, int] = field(default_factory=dict)
    hidden: set[str] = field(default_factory=set)
    edit_instance: dict[str, Any] = field(default_factory=dict)
    edit_types: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class Kind:
    """An instance type.

    Attributes:
        cents: what the whole instance costs per hour.
        free: how many more instances each region can take; a region without any is not listed.
    """

    name: str
    gpu: str
    cents: int
    gpus: int
    vcpus: int = 30
    memory_gib: int = 200
    storage_gib: int = 512
    free: dict[str, int] = field(default_factory=lambda: {"us-west-1": 4, "us-east-1": 2})

    def row(self, cents: int | None = None) -> dict[str, Any]:
        """The type as the price list and an instance's row show it."""
        return {
            "name": self.name,
            "description": f"{self.gpus}x {self.gpu}" if self.gpus else f"{self.vcpus} CPU cores",
            "gpu_description": self.gpu,
            "price_cents_per_hour": self.cents if cents is None else cents,
            "specs": {
                "vcpus": self.vcpus,
                "memory_gib": self.memory_gib,
                "storage_gib": self.storage_gib,
                "gpus": self.gpus,
            },
        }


@dataclass(slots=True, kw_only=True)
class LambdaInstance:
    """One virtual machine, from launch to oblivion.

    Attributes:
        cents: its price per hour.
        healthy_at: when it first passed its health checks, from which on it bills.
        ended_at: when it stopped existing: `terminate` was accepted, or it was taken away.
        vanished: no route shows it any longer.
        is_off: it was shut down from inside.
        is_ours: it runs its user data as processes; a foreign one has none.
        deaths_left: how many more calls of `terminate` it survives.
    """

    instance_id: str
    kind: Kind
    region: str
    body: Mapping[str, Any]
    cents: int
    launched_at: datetime
    name: str | None
    tags: list[dict[str, str]]
    failure: Failure | None = None
    phase: Phase = Phase.BOOTING
    boot_no: int = 1
    healthy_at: datetime | None = None
    ended_at: datetime | None = None
    vanished: bool = False
    is_off: bool = False
    is_ours: bool = True
    deaths_left: int = 0

    @property
    def label(self) -> str | None:
        """The key it carries, by name or by tag."""
        return self.name or next((tag["value"] for tag in self.tags if tag["key"] == "spotd-key"), None)

    @property
    def price(self) -> MicroUsdPerHour:
        return MicroUsdPerHour(self.cents * MICRO // 100)


@dataclass(slots=True, kw_only=True)
class FileSystem:
    """A disk of the account in one region, which bills what is stored on it until it is deleted."""

    file_system_id: str
    name: str
    region: str
    made_at: datetime
    gib: float = 0.0


def some_kinds() -> tuple[Kind, ...]:
    """A small market: one GPU and eight, an ARM type, one that is sold out, and one without a GPU."""
    return (
        Kind(name="gpu_1x_a10", gpu="A10 (24 GB PCIe)", cents=75, gpus=1, storage_gib=1400),
        Kind(name="gpu_1x_h100_pcie", gpu="H100 (80 GB PCIe)", cents=249, gpus=1, vcpus=26, storage_gib=1024),
        Kind(name="gpu_1x_gh200", gpu="GH200 (96 GB)", cents=149, gpus=1, vcpus=64, free={"us-east-1": 3}),
        Kind(
            name="gpu_8x_h100_sxm5",
            gpu="H100 (80 GB SXM5)",
            cents=3592,
            gpus=8,
            vcpus=208,
            memory_gib=1800,
            storage_gib=24780,
            free={"us-west-1": 1},
        ),
        Kind(name="gpu_8x_a100_80gb_sxm4", gpu="A100 (80 GB SXM4)", cents=1432, gpus=8, vcpus=240, free={}),
        Kind(name="cpu_4x_general", gpu="N/A", cents=8, gpus=0, vcpus=4, memory_gib=16, free={"us-east-1": 9}),
    )
