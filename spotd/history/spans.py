"""From changes of a price to how long each price held, and from that to slots, buckets and quantiles. Pure.

Theory. A *point* states that from `at` on an offer cost `price`, or was not on offer (`None`). It holds until the next
point, but only while the provider was polled: a *watch* is a span in which it was polled without a long pause. What
lies between two watches is not known and counts for nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from struct import Struct
from typing import Final

from spotd_providers.contract.money import MicroUsdPerGpuHour

Point = tuple[int, int | None]
Watch = tuple[int, int]
Spell = tuple[int, int, int]
"""From, until, price."""

PPM: Final = 1_000_000
PARTS: Final = 20
"""A kept distribution is so many prices, each standing for an equal share of the time."""
MIDDLES_PERMILLE: Final = tuple(range(500 // PARTS, 1000, 1000 // PARTS))
_PACKED: Final = Struct(f">{PARTS}q")


def spells(points: Sequence[Point], watches: Sequence[Watch], *, since: int, until: int) -> Iterator[Spell]:
    """Yield the spans in which the price is known. Points and watches come in order; watches do not overlap."""
    first = 0
    last = len(points) - 1
    for index, (at, price) in enumerate(points):
        if price is None:
            continue
        start = at if at > since else since
        end = points[index + 1][0] if index < last else until
        if end > until:
            end = until
        while first < len(watches) and watches[first][1] <= start:
            first += 1
        place = first
        while start < end and place < len(watches):
            opens, closes = watches[place]
            begins = start if start > opens else opens
            ends = end if end < closes else closes
            if begins < ends:
                yield begins, ends, price
            start, place = closes, place + 1


def divided(found: Iterable[Spell], length: int) -> Iterator[tuple[int, int, int]]:
    """Yield number of the span of this length, seconds in it, price. Without a length all of time is span 0."""
    for start, end, price in found:
        if not length:
            yield 0, end - start, price
            continue
        number, last = start // length, (end - 1) // length
        if number == last:
            yield number, end - start, price
            continue
        yield number, (number + 1) * length - start, price
        for between in range(number + 1, last):
            yield between, length, price
        yield last, end - last * length, price


@dataclass(frozen=True, slots=True)
class Slot:
    """One offer over one slot; `typical` is its median by time."""

    number: int
    low: int
    typical: int
    high: int
    offered_s: int


def slots(found: Iterable[Spell], length: int) -> list[Slot]:
    """Yield what is kept of an offer's past: one row for each slot in which it was on offer."""
    by_slot: dict[int, dict[int, int]] = {}
    for number, seconds, price in divided(found, length):
        prices = by_slot.setdefault(number, {})
        prices[price] = prices.get(price, 0) + seconds
    return [
        Slot(number, min(prices), quantiles(prices, (50,))[0], max(prices), sum(prices.values()))
        for number, prices in sorted(by_slot.items())
    ]


def quantiles(seconds_by_price: Mapping[int, int], shares: Sequence[int], *, of: int = 100) -> tuple[int, ...]:
    """Return the least price at or under which each share of the time was; there must be a price, shares ascend."""
    total = sum(seconds_by_price.values())
    found: list[int] = []
    passed = 0
    for price, seconds in sorted(seconds_by_price.items()):
        passed += seconds
        while len(found) < len(shares) and passed * of >= shares[len(found)] * total:
            found.append(price)
    return tuple(found)


def packed(prices: Sequence[int]) -> bytes:
    return _PACKED.pack(*prices)


def unpacked(blob: bytes) -> tuple[int, ...]:
    return _PACKED.unpack(blob)


def first_watched(watches: Sequence[Watch], since: int, until: int) -> int:
    """Return when the provider was first polled in this span; its beginning where no poll is on record."""
    return next((max(since, opens) for opens, closes in watches if closes > since and opens < until), since)


def watched_s(watches: Sequence[Watch], start: int, end: int) -> int:
    """Return for how many seconds of the span the provider was polled."""
    return sum(max(0, min(end, until) - max(start, since)) for since, until in watches)


def effective(base: int, fee_ppm: int, gpu_count: int) -> MicroUsdPerGpuHour:
    """Return the price per GPU-hour with the fee, rounded as `spotd.core.pricing` does; `base` is GPU and storage."""
    total = base + -(-base * (fee_ppm - PPM) // PPM)
    return MicroUsdPerGpuHour(-(-total // gpu_count))
