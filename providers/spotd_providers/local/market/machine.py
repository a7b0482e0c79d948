"""A machine of the market, and the file with the market's state."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Final

from pydantic import TypeAdapter

from spotd_providers.contract.money import MicroUsdPerHour
from spotd_providers.contract.values import InstanceState, Loss, Market
from spotd_providers.kit.files import write_atomically
from spotd_providers.kit.keys import begins_like_ours


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
        host_number: which launch on its host, from 1.
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
    state: InstanceState = InstanceState.PENDING
    doomed_at: datetime | None = None
    loss: Loss | None = None
    detail: str = ""
    gone_at: datetime | None = None
    host_number: int = 0

    @property
    def exists(self) -> bool:
        return self.state is not InstanceState.GONE

    def belongs_to(self, install: str) -> bool:
        """Whether it carries this install's label and a key of its."""
        return self.install == install and begins_like_ours(self.key, install)

    @property
    def occupies(self) -> bool:
        """Whether it takes one of its host's slots."""
        return self.state in (InstanceState.PENDING, InstanceState.RUNNING)


@dataclass(slots=True, kw_only=True)
class Disturbance:
    """A temporary change of a host's price or stock.

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
    """The market's state, kept for the next server.

    Attributes:
        opened_at: when the market was opened first; scripted events and price files count from it.
        reached: up to when everything due has happened.
        fired: scripted events (by index) that have happened, or can no more.
    """

    opened_at: datetime
    reached: datetime
    launches: int = 0
    launches_by_host: dict[str, int] = field(default_factory=dict)
    machines: dict[str, Machine] = field(default_factory=dict)
    disturbances: list[Disturbance] = field(default_factory=list)
    fired: list[int] = field(default_factory=list)


_MEMORY: Final = TypeAdapter(MachineMemory)


def save(memory: MachineMemory, path: Path) -> None:
    write_atomically(path, _MEMORY.dump_json(memory).decode())


def load(path: Path) -> MachineMemory | None:
    try:
        return _MEMORY.validate_json(path.read_bytes())
    except FileNotFoundError:
        return None
