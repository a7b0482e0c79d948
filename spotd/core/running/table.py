"""The verdicts on a machine that runs, as one table: what each needs, what it yields to, what it costs, how often.

Theory. A machine gets one verdict in each decision. Rules of other modules propose; `author` alone gives a verdict, by
the row of it, and orders what follows. Verdicts are proposed in the order of this table, so an earlier one is given
first, and a later one that yields to it is not given in the same decision.

A stop that no limit of its owner demands is *voluntary*: the machine is healthy, and everything it needs to go on is
there. It is worth an interruption only when all of this holds:

* two readings of every list that it rests on say so: the prices of the provider of the other machine, and the list of
  our own machines at this one. A price that leaps is more likely a wrong row than a bargain;
* the other machine is not known to refuse. Every such stop is a *claim* of the job that is to gain; where the job does
  not get that machine, the claim has failed. Then no other job is stopped for the same machine for a while, and no
  healthy machine at all for this job, each time for twice as long (`PATIENCE_FIRST`, `patience_max`);
* the checkpoint store takes the order, or nothing would be saved;
* the provider of the machine answers, or the machine could not be ended and another one not be begun.

A change of a bid and a stop exclude each other: while the answer to one is open, or waits for its second reading, the
other is not proposed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from enum import StrEnum
from typing import Final

from spotd.core.domain.machine_verdicts import MachineVerdict
from spotd.core.domain.states import EndReason, InvariantBroken

PATIENCE_FIRST: Final = timedelta(minutes=75)
"""After a first claim that failed; doubled with each one in a row."""


class Need(StrEnum):
    """What must hold for a verdict."""

    READINGS = "two readings of each list"
    TARGET = "another machine that is not known to refuse"
    STORE = "a store that takes the order"
    PROVIDER = "a provider that can end the machine"
    ANSWER = "no other change of its bid without an answer"


VOLUNTARY: Final = frozenset({Need.READINGS, Need.TARGET, Need.STORE, Need.PROVIDER})


@dataclass(frozen=True, slots=True, kw_only=True)
class VerdictRow:
    """What is to be known of one verdict.

    Attributes:
        does: what follows, as a part of a sentence.
        seen: what must be seen before it.
        costs: what it costs the job.
        reason: with which the attempt ends; `None` where it does not end, or by what its owner limits.
        needs: what must hold; empty for what no rule may hold back.
        yields_to: it is not given in a decision that gives one of these, nor while one of them is open.
        every: least time since the machine began, or since the same was done to it.
        patience_max: how long at most the job waits after a claim that failed.
        lapses: after so long, what only the machine's own provider can give is not waited for any longer.
    """

    does: str
    seen: str
    costs: str
    reason: EndReason | None = None
    needs: frozenset[Need] = frozenset()
    yields_to: frozenset[MachineVerdict] = frozenset()
    every: timedelta | None = None
    patience_max: timedelta = timedelta(hours=12)
    lapses: timedelta | None = None


_OVER: Final = frozenset({MachineVerdict.END, MachineVerdict.STOP})
_ENDED: Final = _OVER | {MachineVerdict.RELEASE}
_BIDS: Final = frozenset({MachineVerdict.RAISE, MachineVerdict.LOWER})
_LEAVES: Final = frozenset(
    {
        MachineVerdict.STALL,
        MachineVerdict.LEAVE,
        MachineVerdict.MAKE_ROOM,
        MachineVerdict.GO_ON_DEMAND,
        MachineVerdict.BACK_TO_SPOT,
        MachineVerdict.MOVE,
    }
)
_RESTART: Final = "a save, a start and a restore"

VERDICTS: Final[Mapping[MachineVerdict, VerdictRow]] = {
    MachineVerdict.END: VerdictRow(
        does="its attempt ends, and the machine is ended until its provider says that it is gone",
        seen="what is observed of it, as above",
        costs="what was not saved",
    ),
    MachineVerdict.STOP: VerdictRow(
        does="it saves and stops, for a limit that its owner set: budget, ceiling, window, deadline, cancel",
        seen="the limit is reached; a price that leaps, in two lists",
        costs="a save",
        yields_to=frozenset({MachineVerdict.END}),
    ),
    MachineVerdict.RELEASE: VerdictRow(
        does="an outbid machine was waited for as long as `[bids] hold` allows, and saves and stops if it runs",
        seen="that time is over",
        costs="a start and a restore",
        reason=EndReason.OUTBID,
        yields_to=_OVER,
    ),
    MachineVerdict.STALL: VerdictRow(
        does="it saves and stops, since its job gets nowhere there",
        seen="the limit of `[watchdog]` in two heartbeats",
        costs=_RESTART,
        reason=EndReason.STALLED,
        needs=VOLUNTARY - {Need.TARGET},
        yields_to=_ENDED | _BIDS,
    ),
    MachineVerdict.LEAVE: VerdictRow(
        does="an outbid machine is not waited for any longer",
        seen="another machine as cheap, a bid out of reach, or that it woke and stays silent",
        costs=_RESTART,
        reason=EndReason.OUTBID,
        needs=VOLUNTARY,
        yields_to=_ENDED | _BIDS | {MachineVerdict.STALL},
    ),
    MachineVerdict.RAISE: VerdictRow(
        does="more is bid for it, within every limit",
        seen="a lowest bid that uses up half of the headroom, and no cheaper machine",
        costs="the difference, per hour",
        needs=frozenset({Need.ANSWER}),
        yields_to=_ENDED | _LEAVES | _BIDS,
        every=timedelta(minutes=5),
    ),
    MachineVerdict.LOWER: VerdictRow(
        does="less is bid for it",
        seen="a saving that a preemption would not use up",
        costs="an earlier preemption",
        needs=frozenset({Need.ANSWER}),
        yields_to=_ENDED | _LEAVES | _BIDS,
        every=timedelta(hours=1),
    ),
    MachineVerdict.MAKE_ROOM: VerdictRow(
        does="it saves and stops for a job of higher priority that asks for it",
        seen="a machine that this job would get at once",
        costs="a save, and a wait",
        reason=EndReason.MADE_ROOM,
        needs=VOLUNTARY,
        yields_to=_ENDED | _BIDS | {MachineVerdict.STALL, MachineVerdict.LEAVE},
        every=timedelta(minutes=15),
    ),
    MachineVerdict.GO_ON_DEMAND: VerdictRow(
        does="it saves and stops, and the job goes on on-demand",
        seen="no time is left to lose before the deadline",
        costs=f"{_RESTART}, and the price of on-demand",
        reason=EndReason.MIGRATED,
        needs=VOLUNTARY,
        yields_to=_ENDED | _BIDS | {MachineVerdict.STALL, MachineVerdict.LEAVE, MachineVerdict.MAKE_ROOM},
        patience_max=timedelta(hours=5),
        lapses=timedelta(minutes=20),
    ),
    MachineVerdict.BACK_TO_SPOT: VerdictRow(
        does="it saves and stops, and the job goes on on a spot machine",
        seen="spot that costs less and seems to last",
        costs=_RESTART,
        reason=EndReason.MIGRATED,
        needs=VOLUNTARY,
        yields_to=_ENDED | _BIDS | {MachineVerdict.STALL, MachineVerdict.LEAVE, MachineVerdict.MAKE_ROOM},
        every=timedelta(minutes=15),
    ),
    MachineVerdict.MOVE: VerdictRow(
        does="it saves and stops, and the job goes on on a cheaper machine",
        seen="a saving of 15 % over what is left, with all that the move costs",
        costs=_RESTART,
        reason=EndReason.MIGRATED,
        needs=VOLUNTARY,
        yields_to=_ENDED | _BIDS | (_LEAVES - {MachineVerdict.MOVE}),
        every=timedelta(hours=1),
    ),
    MachineVerdict.HOLD: VerdictRow(
        does="an outbid machine is waited for",
        seen="a list that shows it as outbid and paused, and a checkpoint",
        costs="its disk, per hour",
        yields_to=_ENDED | _LEAVES,
    ),
    MachineVerdict.KEEP: VerdictRow(
        does="nothing",
        seen="nothing of the above",
        costs="its price, per hour",
        yields_to=frozenset(MachineVerdict) - {MachineVerdict.KEEP},
    ),
}
RANK: Final[Mapping[MachineVerdict, int]] = {verdict: rank for rank, verdict in enumerate(VERDICTS)}
BID_CHANGES: Final = _BIDS
VOLUNTARY_STOPS: Final = _LEAVES


def pause_of(verdict: MachineVerdict) -> timedelta:
    """Return the least time between two of the same verdict on one machine."""
    every = VERDICTS[verdict].every
    if every is None:
        raise InvariantBroken(f"no pause is stated for {verdict.value}")
    return every
