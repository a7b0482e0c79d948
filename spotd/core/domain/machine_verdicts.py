"""What may be done to a machine that runs; `running.table` says when."""

from __future__ import annotations

from enum import StrEnum


class MachineVerdict(StrEnum):
    """What one decision does to one machine.

    END: it is lost, or its outcome is known. STOP: a limit of its owner. RELEASE: it is outbid,
    and was held for long enough. STALL: its job gets nowhere. LEAVE: it is
    outbid, and not waited for any longer. RAISE, LOWER: its bid. GO_ON_DEMAND, BACK_TO_SPOT: the other market, for a
    deadline. MAKE_ROOM: for a job of higher priority. MOVE: for a cheaper machine. HOLD: it is outbid, and waited for.
    """

    END = "end"
    STOP = "stop and save"
    RELEASE = "release"
    STALL = "give up a stall"
    LEAVE = "leave"
    RAISE = "raise"
    LOWER = "lower"
    MAKE_ROOM = "make room"
    GO_ON_DEMAND = "go on-demand"
    BACK_TO_SPOT = "back to spot"
    MOVE = "move"
    HOLD = "hold"
    KEEP = "keep"
