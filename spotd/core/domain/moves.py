"""What a job's moves to cheaper machines came to; kept with the job."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from spotd.core.domain.charges import FREE
from spotd.core.domain.quotes import Quote
from spotd_providers.contract.money import MicroUsdPerHour, as_usd


@dataclass(frozen=True, slots=True, kw_only=True)
class Moves:
    """How often a job was moved, and what the newest move was for.

    Attributes:
        at: when its machine was ordered to stop for it.
        attempt: that was ordered to stop.
        provider, offer, host: of the machine that it is to get.
        rate: what that machine was to cost per hour.
    """

    count: int = 0
    at: datetime | None = None
    attempt: int = 0
    provider: str = ""
    offer: str = ""
    host: str = ""
    rate: MicroUsdPerHour = FREE


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
