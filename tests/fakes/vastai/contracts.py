"""One rented machine, from purchase to destruction, and the four status words it shows on the way."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Any, Final

from spotd_providers.contract.values import MicroUsdPerHour
from tests.fakes.vastai.asks import Ask


class Phase(StrEnum):
    """Where a contract is. Only `RUNNING` and `FROZEN` bill the GPU; all but `GONE` bill the disk."""

    BOOTING = "booting"
    RUNNING = "running"
    OUTBID = "outbid"
    STOPPED = "stopped"
    EXITED = "exited"
    FAILED = "failed"
    FROZEN = "frozen"
    GONE = "gone"


class Failure(StrEnum):
    """How a boot can go wrong, and what `status_msg` then says."""

    OCI = "failed to create task for container: OCI runtime create failed: runc create failed: exec format error"
    PULL = "Error response from daemon: manifest for image:tag not found: manifest unknown"
    LOGIN = "Error response from daemon: Head of the manifest: unauthorized: authentication required"
    STUCK = "pulling layer 3/9"


HOLDS_GPU: Final = frozenset({Phase.BOOTING, Phase.RUNNING, Phase.EXITED, Phase.FAILED, Phase.FROZEN})


@dataclass(slots=True, kw_only=True)
class Contract:
    """What somebody rented.

    Attributes:
        price: what the GPU part costs per hour while it runs: the bid, or the on-demand price.
        script: what the container runs, as one shell script.
        shows_left: how many times its own route still answers 404.
        lost_contact: `offline` or `unknown` while the host does not answer.
    """

    contract_id: int
    ask: Ask
    label: str | None
    image: str
    disk_gb: float
    is_bid: bool
    price: MicroUsdPerHour
    runtype: str
    onstart: str | None
    args: list[str]
    env: Mapping[str, str]
    script: str
    api_key: str
    created_at: datetime
    end_at: datetime
    phase: Phase = Phase.BOOTING
    boot_no: int = 1
    boots_at: datetime | None = None
    failure: Failure | None = None
    shows_left: int = 0
    lost_contact: str | None = None
    log_tokens: dict[str, int] = field(default_factory=dict)

    @property
    def machine(self) -> str:
        """Its name in the engine and in the ledger."""
        return str(self.contract_id)

    @property
    def holds_gpu(self) -> bool:
        return self.phase in HOLDS_GPU


def status_words(contract: Contract, *, silent: bool, scheduling: bool) -> dict[str, Any]:
    """The row's four opinions. `silent`: the host has not reported yet; `scheduling`: outbid, but still wanted."""
    actual: str | None
    message: str | None = None
    contract_word, wanted = "running", "running"
    match contract.phase:
        case Phase.BOOTING:
            actual = None if silent else "loading"
            message = contract.failure.value if contract.failure else f"pulling {contract.image}"
        case Phase.RUNNING:
            actual, message = "running", f"success, running {contract.image}"
        case Phase.OUTBID:
            actual, contract_word, wanted = "exited", "stopped", "running" if scheduling else "stopped"
        case Phase.STOPPED:
            actual, contract_word, wanted = "exited", "stopped", "stopped"
        case Phase.EXITED:
            actual, message = "exited", "container exited"
        case Phase.FAILED:
            actual = "created" if contract.failure is Failure.OCI else "loading"
            message = contract.failure.value if contract.failure else None
            if contract.failure is Failure.OCI:
                contract_word, wanted = "stopped", "stopped"  # the service gives up by itself, as recorded
        case Phase.FROZEN:
            actual, wanted = "frozen", "frozen"
        case Phase.GONE:
            actual, contract_word, wanted = "destroyed", "unloaded", "destroyed"
    if contract.lost_contact is not None:
        actual = contract.lost_contact
    return {
        "actual_status": actual,
        "cur_state": contract_word,
        "next_state": contract_word,
        "intended_status": wanted,
        "status_msg": message,
    }
