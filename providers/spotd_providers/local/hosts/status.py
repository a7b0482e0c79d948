"""The status of a machine, in memory and on disk for the next owner."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
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
        exit_code: of the start script, where it ended by itself.
        done: the runner wrote `machine-done`: whatever still runs there may be killed.
        started_at: virtual time of the last boot.
        ended_at: virtual time of its end, as precise as the file system records.
    """

    machine_id: str
    state: HostMachineState
    boots: int
    pid: int | None
    exit_code: int | None
    done: bool
    started_at: datetime
    ended_at: datetime | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """The record of a machine on disk."""

    machine_id: str
    boots: int
    started_at: str
    pid: int | None = None
    pid_started: str | None = None
    env: Mapping[str, str] | None = None
    ended: str | None = None
    ended_at: str | None = None
    exit_code: int | None = None
    done: bool = False
