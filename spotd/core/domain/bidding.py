"""What is known of the bid for one machine: what was bid, and what wins there.

Theory. The lowest winning bid that a marketplace states for a machine that we rent *echoes our own bid*, up to an hour
late. A loop that raised its bid because of that figure would outbid itself until the ceiling. So a figure that equals
any bid that was ever placed on this machine, within a tolerance for how a provider rounds, says nothing and is ignored.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import datetime
from typing import Final

from spotd_providers.contract.money import MicroUsdPerHour

ECHO_TOLERANCE: Final = 100
"""A figure that differs from a bid by one part in so many is its echo."""
PLACED_MAX: Final = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class Bidding:
    """The bids for the GPU part of one machine.

    Attributes:
        placed: all of them, oldest first, those that a provider may not have taken too; the newest `PLACED_MAX`.
        changed_at: when the newest change was decided.
        before: what was bid before it, while it is not known whether the provider took it.
        refused: how many changes in a row the provider refused.
        floor: the lowest bid that wins, as the newest listing stated it that was no echo.
        held_since: it was outbid then, and is kept.
        woke_at: the first listing since in which it ran.
    """

    placed: tuple[MicroUsdPerHour, ...] = ()
    changed_at: datetime | None = None
    before: MicroUsdPerHour | None = None
    refused: int = 0
    floor: MicroUsdPerHour | None = None
    held_since: datetime | None = None
    woke_at: datetime | None = None


def is_echo(floor: int, placed: tuple[MicroUsdPerHour, ...]) -> bool:
    """Whether the figure is no more than one of our own bids."""
    return any(abs(floor - bid) * ECHO_TOLERANCE <= bid for bid in placed)


def with_floor(known: Bidding, floor: MicroUsdPerHour) -> Bidding:
    """Return what is known after a listing that states this as the lowest winning bid."""
    return known if is_echo(floor, known.placed) else replace(known, floor=floor)


def with_bid(known: Bidding, before: MicroUsdPerHour, bid: MicroUsdPerHour, now: datetime) -> Bidding:
    """Return what is known once this bid is to be placed; the figure that led to it is used up."""
    placed = known.placed if before in known.placed else (*known.placed, before)
    return replace(known, placed=(*placed, bid)[-PLACED_MAX:], changed_at=now, before=before, floor=None)
