"""Hosts that are processes on this computer: the engine under the local market and under every fake cloud."""

from spotd_providers.local.hosts.ledger import (
    Ledger,
    LedgerError,
    LedgerEvent,
    LedgerLine,
    Segment,
    read_ledger,
    segments,
)
from spotd_providers.local.hosts.machines import (
    REAL_TIME,
    HostClock,
    Machines,
    ScaledClock,
    measure,
    read_clock,
    write_clock,
)
from spotd_providers.local.hosts.processes import HostMachineState, MachineError, MachineStatus

__all__ = [
    "REAL_TIME",
    "HostClock",
    "HostMachineState",
    "Ledger",
    "LedgerError",
    "LedgerEvent",
    "LedgerLine",
    "MachineError",
    "MachineStatus",
    "Machines",
    "ScaledClock",
    "Segment",
    "measure",
    "read_clock",
    "read_ledger",
    "segments",
    "write_clock",
]
