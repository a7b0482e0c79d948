"""What a job's changes to other machines came to; kept with the job."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from spotd.core.domain.charges import FREE
from spotd.core.domain.machine_verdicts import MachineVerdict
from spotd.core.domain.quotes import Quote
from spotd_providers.contract.money import MicroUsdPerHour, as_usd
from spotd_providers.contract.values import Market


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """A stop of a healthy machine that every decision since has proposed, and that waits for a second reading.

    Attributes:
        attempt: the newest of the job that is to get another machine.
        readings: what the proposal rests on, each with the instant of the first reading that said so.
    """

    verdict: MachineVerdict
    attempt: int
    since: datetime
    readings: tuple[tuple[str, datetime], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """A healthy machine was stopped so that this job gets another one, which it does not have yet.

    Attributes:
        attempt: the newest of the job at that time.
        provider, subject, market: of the machine that it is to get; see `running.claims`.
        rate: per hour of the machine that was left, 0 where that was another job's.
    """

    verdict: MachineVerdict
    at: datetime
    attempt: int
    provider: str = ""
    subject: str = ""
    market: Market | None = None
    rate: MicroUsdPerHour = FREE


@dataclass(frozen=True, slots=True, kw_only=True)
class Moves:
    """How often a job was moved, what the newest move was for, and what came of stops of healthy machines for it.

    Attributes:
        at: when its machine was ordered to stop for the newest move.
        attempt: that was ordered to stop.
        provider, offer, host: of the machine that it is to get.
        rate: what that machine was to cost per hour.
        proposed: what the newest decision proposed.
        claim: the newest stop whose outcome is not known.
        refusals: how many such stops in a row got the job no other machine.
        not_before: no healthy machine is stopped for this job earlier.
    """

    count: int = 0
    at: datetime | None = None
    attempt: int = 0
    provider: str = ""
    offer: str = ""
    host: str = ""
    rate: MicroUsdPerHour = FREE
    proposed: Proposal | None = None
    claim: Claim | None = None
    refusals: int = 0
    not_before: datetime | None = None


def target_words(moves: Moves, attempts_made: int, chosen: Quote) -> str:
    """Return that the machine which the job moved for is gone; empty where it is the one that it gets now."""
    if not moves.offer or moves.attempt != attempts_made:
        return ""
    offer = chosen.offer
    same_host = bool(moves.host) and (offer.provider, offer.host_id or "") == (moves.provider, moves.host)
    if same_host or (offer.provider, offer.offer_id) == (moves.provider, moves.offer):
        return ""
    return (
        f"; the one at {moves.provider}/{moves.host or moves.offer} for ${as_usd(moves.rate):.4f} per hour,"
        " for which it was moved, is gone"
    )
