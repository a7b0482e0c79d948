"""One machine of the market, and the file in which the market remembers what it sold."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, fields
from datetime import datetime
from enum import StrEnum
from pathlib import Path
from typing import Any

from spotd_providers.contract.money import MicroUsdPerHour
from spotd_providers.contract.values import Loss, Market
from spotd_providers.kit.files import write_atomically


class State(StrEnum):
    """Where a machine is, in the market's own ledger."""

    PENDING = "pending"
    RUNNING = "running"
    PAUSED = "paused"
    GONE = "gone"


@dataclass(slots=True, kw_only=True)
class Machine:
    """One machine.

    Attributes:
        price_max: the bid in a bid market; else the most it may cost.
        price: what an hour costs now while it runs, without its disk.
        ready_at: when its start script runs.
        visible_at: when it shows up in lists.
        doomed_at: when it will be taken away, once that is certain.
        number: which launch of the market this was, from 1.
    """

    machine_id: str
    number: int
    key: str
    install: str
    host: str
    market: Market
    image: str
    disk_gb: int
    start_script: str
    price_max: MicroUsdPerHour
    price: MicroUsdPerHour
    storage: MicroUsdPerHour
    created_at: datetime
    ready_at: datetime
    visible_at: datetime
    state: State = State.PENDING
    doomed_at: datetime | None = None
    loss: Loss | None = None
    detail: str = ""
    gone_at: datetime | None = None

    @property
    def exists(self) -> bool:
        return self.state is not State.GONE

    @property
    def occupies(self) -> bool:
        """Whether it takes one of its host's slots."""
        return self.state in (State.PENDING, State.RUNNING)


@dataclass(slots=True, kw_only=True)
class Disturbance:
    """Something that changes what a host would do by itself, for a while.

    Attributes:
        price: what a spot machine costs at least meanwhile; `None`: there are none to be had.
        exact: the price is this and not merely at least this.
    """

    host: str
    start: datetime
    end: datetime
    price: MicroUsdPerHour | None = None
    exact: bool = False

    def is_on(self, now: datetime) -> bool:
        return self.start <= now < self.end


@dataclass(slots=True, kw_only=True)
class MachineMemory:
    """What the market must know after its server was killed.

    Attributes:
        opened_at: when the market was opened first; scripted events and price files count from it.
        reached: up to when everything due has happened.
        fired: scripted events (by index) that have happened, or can no more.
    """

    opened_at: datetime
    reached: datetime
    launches: int = 0
    machines: dict[str, Machine] = field(default_factory=dict)
    disturbances: list[Disturbance] = field(default_factory=list)
    fired: list[int] = field(default_factory=list)


def save(memory: MachineMemory, path: Path) -> None:
    """Write the memory to disk, whole."""
    write_atomically(path, json.dumps(asdict(memory), default=_encode))


def load(path: Path) -> MachineMemory | None:
    """Read the memory from disk, if there is one."""
    try:
        content: dict[str, Any] = json.loads(path.read_text())
    except FileNotFoundError:
        return None
    machines = {name: _machine(row) for name, row in content["machines"].items()}
    return MachineMemory(
        opened_at=datetime.fromisoformat(content["opened_at"]),
        reached=datetime.fromisoformat(content["reached"]),
        launches=content["launches"],
        machines=machines,
        disturbances=[Disturbance(**_with_times(row, "start", "end")) for row in content["disturbances"]],
        fired=content["fired"],
    )


def _machine(row: dict[str, Any]) -> Machine:
    known = {item.name for item in fields(Machine)}
    row = _with_times(row, "created_at", "ready_at", "visible_at", "doomed_at", "gone_at")
    row["market"] = Market(row["market"])
    row["state"] = State(row["state"])
    row["loss"] = Loss(row["loss"]) if row["loss"] else None
    return Machine(**{name: value for name, value in row.items() if name in known})


def _with_times(row: dict[str, Any], *names: str) -> dict[str, Any]:
    times = {name: datetime.fromisoformat(row[name]) for name in names if row.get(name) is not None}
    return {**row, **times}


def _encode(value: object) -> str:
    if isinstance(value, datetime):
        return value.isoformat()
    raise TypeError(f"{value!r} has no place in the market's memory")
