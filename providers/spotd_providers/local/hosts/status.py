"""The status of a machine, in memory and on disk for the next owner."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum


class MachineError(Exception):
    """A machine could not be started, found or ended; the message names it."""


class HostMachineState(StrEnum):
    """The state of a machine, by its processes."""

    RUNNING = "running"
    ENDED = "ended"
    """By itself: the start script ended, or the runner said it is done."""
    KILLED = "killed"
    LOST = "lost"
    """Its processes vanished and left no exit code: killed from outside, or the computer was restarted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineStatus:
    """The status of a machine.

    Attributes:
        boots: how many times its start script was started.
        pid_started: the kernel's word for when its first process started.
        exit_code: of the start script, where it ended by itself.
        done: the runner wrote `machine-done`: whatever still runs there may be killed.
        started_at: virtual time of the last boot.
        ended_at: virtual time of its end, as precise as the file system records.
    """

    machine_id: str
    boots: int
    started_at: datetime
    env: Mapping[str, str] = field(default_factory=dict)
    state: HostMachineState = HostMachineState.RUNNING
    pid: int | None = None
    pid_started: str | None = None
    ended_at: datetime | None = None
    exit_code: int | None = None
    done: bool = False
