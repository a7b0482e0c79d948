"""A recorded market: what was on sale, and every change of it, as columns that many processes can share.

An instant is a whole Unix second; a price is the GPU part of the whole machine before the marketplace's fee, in
micro-dollars per hour, as in `Offer.gpu_price`.
"""

from __future__ import annotations

import gzip
import io
import zlib
from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from functools import lru_cache
from pathlib import Path
from typing import Final

from spotd.core.domain.attempts import Attempt
from spotd_providers.contract.values import InstanceId, InstanceRef, Loss, Market, MicroUsdPerHour, Offer, ProviderName

GONE: Final = -1
"""In place of a price: the offer is not on sale from then on, and a spot machine of it is taken away."""
UNKNOWN: Final = -2
"""In place of a price: nothing was recorded from then on. Nothing can be launched there; what runs goes on."""

Change = tuple[int, int, int]
"""Instant, number of the series, price or one of the two above."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedMarket:
    """Changes in order of time.

    Attributes:
        series: what was on sale, each as an offer whose price is in the changes.
        begins_at, ends_at: from when until when the market is known.
    """

    series: tuple[Offer, ...]
    instants: array[int]
    numbers: array[int]
    prices: array[int]
    begins_at: int
    ends_at: int

    @property
    def providers(self) -> tuple[ProviderName, ...]:
        return tuple(sorted({offer.provider for offer in self.series}))

    def spot_providers(self) -> frozenset[ProviderName]:
        """Return the providers that sold spot at any time."""
        return frozenset(offer.provider for offer in self.series if offer.market is Market.SPOT)

    def bid_providers(self) -> frozenset[ProviderName]:
        """Return the providers of machines for which a bid is paid, and can be changed."""
        return frozenset(offer.provider for offer in self.series if offer.pays_bid)

    def lows(self) -> dict[tuple[str, int], MicroUsdPerHour]:
        """Return the lowest price of each GPU and count in the whole record."""
        found: dict[tuple[str, int], MicroUsdPerHour] = {}
        lowest: dict[int, int] = {}
        for number, price in zip(self.numbers, self.prices, strict=True):
            if 0 <= price < lowest.get(number, price + 1):
                lowest[number] = price
        for number, price in lowest.items():
            offer = self.series[number]
            kind = (offer.gpu, offer.gpu_count)
            found[kind] = MicroUsdPerHour(min(price, found.get(kind, price)))
        return found


# Why a back-test cannot be made, as a sentence with its place and a way out.


class BacktestRefused(Exception):
    """The back-test cannot be made. `hint` is the way out."""

    def __init__(self, message: str, *, hint: str) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


# What a back-test assumes of machines, and one machine as it behaves under that.
#
# Theory. A machine is of no use for a fixed time after its launch (boot, image, restore), then it works at the speed
# of its GPU and saves at a fixed interval. Where it is lost, what it worked since its newest checkpoint is lost too.
# A machine that is outbid is halted and kept by its provider: it comes back as soon as its bid wins, and then takes
# as long as a launch to go on from its newest checkpoint. Spans are whole seconds of machine time; work is counted in
# millionths of a second on a machine of speed 1.


SPEED_ONE: Final = 1_000_000


class VanishedRule(StrEnum):
    """What becomes of a spot machine whose offer leaves the market without another word."""

    LOST = "lost"
    KEPT = "kept"


@dataclass(frozen=True, slots=True, kw_only=True)
class Assumptions:
    """What no record of prices shows.

    Attributes:
        work_s: how long the whole job runs on a machine of speed 1.
        restart_s: from each launch until the command works again.
        every_s: between two checkpoints; what is lost with a machine is what it did since the newest.
        checkpoint_bytes: size of one checkpoint, where its traffic is to be paid.
        step_s: how often the daemon decides.
        fee_ppm: fee multiplier of each provider in parts per million; 1.00 where it is absent.
    """

    work_s: int
    restart_s: int = 360
    every_s: int = 900
    checkpoint_bytes: int = 0
    step_s: int = 60
    vanished: VanishedRule = VanishedRule.LOST
    fee_ppm: Mapping[ProviderName, int] = field(default_factory=dict)
    raise_bids: bool = False
    """`[bids] raise_running`, as the two below are `[bids] hold` and `[moves] most`."""
    hold_max: timedelta = timedelta(0)
    moves_max: int = 0

    @property
    def work(self) -> int:
        return self.work_s * SPEED_ONE


@lru_cache(maxsize=4096)
def instant(seconds: int) -> datetime:
    """Return the aware instant of a Unix second."""
    return datetime.fromtimestamp(seconds, UTC)


def second_after(at: datetime) -> int:
    """Return the first whole Unix second that is not before this instant."""
    return -int(-at.timestamp() // 1)


class ReplayedMachine:
    """One machine of a run, from its launch on.

    Attributes:
        series: number of the recorded series that it was launched from.
        speed: relative to one of speed 1, in millionths; `done` is the work that it begins with.
        price: of the GPU part that its provider states, where that is not the agreed one.
        lost_at, loss: when and why it was taken away.
        halted_at: since when it is outbid and kept.
        floor: the lowest bid that wins it, where bids are paid and its price is known.
        returns, repeated_s: how often it came back, and time whose work was lost whenever it was halted.
        ended_at: when its end was ordered.
        is_saved: it was ordered to save before its end, and did.
    """

    def __init__(self, attempt: Attempt, series: int, now: int, done: int, speed: int, terms: Assumptions) -> None:
        offer = attempt.quote.offer
        self.attempt = attempt.id
        self.key = attempt.key
        self.provider = offer.provider
        self.ref = InstanceRef(provider=offer.provider, instance_id=InstanceId(attempt.key))
        self.market = offer.market
        self.series = series
        self.launched_at = now
        self.works_from = now + terms.restart_s
        self.lost_at: int | None = None
        self.loss: Loss | None = None
        self.ended_at: int | None = None
        self.halted_at: int | None = None
        self.floor: int | None = int(offer.gpu_price) if offer.pays_bid else None
        self.returns = self.repeated_s = 0
        self.is_saved = False
        self.price: int | None = None
        self.reports = 0
        self.reported_saves = 0
        self._bid = int(attempt.price_max) if offer.pays_bid else None
        self._terms = terms
        self._halted_s = 0
        self._stretches = [(0, self.works_from)]
        """How many checkpoints were written before it began to work, and when it did, each time."""
        self._begins_with = done
        self._speed = speed
        self.finishes_at = self.works_from - (-(terms.work - done) // self._speed)

    @property
    def is_gone(self) -> bool:
        return self.lost_at is not None or self.ended_at is not None

    def observe(self, at: int, price: int) -> None:
        """Take in a change of the offer that it was launched from."""
        if self.market is not Market.SPOT or self.is_gone or price == UNKNOWN:
            return
        if self.halted_at is None and self.finishes_at <= at:
            return
        if self._bid is not None:
            self.floor = None if price < 0 else price
        if price < 0:
            if self._terms.vanished is VanishedRule.LOST:
                self.lost_at, self.loss = at, Loss.PREEMPTED
        elif self._bid is None:
            self.price = price
        else:
            self._follow_floor(at)

    def place_bid(self, now: int, bid: int) -> None:
        """Pay this bid from now on."""
        self._bid = bid
        if not self.is_gone:
            self._follow_floor(now)

    def _follow_floor(self, at: int) -> None:
        if self.floor is None or self._bid is None:
            return
        if self.floor > self._bid and self.halted_at is None:
            self.halted_at, self.loss = at, Loss.OUTBID
        elif self.floor <= self._bid and self.halted_at is not None:
            self._come_back(at, self.halted_at)

    def _come_back(self, at: int, halted_at: int) -> None:
        saves, saved = self.saves(at), self.saved(at)
        self.repeated_s += (self.done(at) - saved) // SPEED_ONE
        self._halted_s += at - halted_at
        self.returns += 1
        self._begins_with, self.halted_at, self.loss = saved, None, None
        self.works_from = at + self._terms.restart_s
        self._stretches.append((saves, self.works_from))
        self.finishes_at = self.works_from - (-(self._terms.work - saved) // self._speed)

    def _until(self, now: int) -> int:
        return min(at for at in (now, self.lost_at, self.ended_at, self.halted_at) if at is not None)

    def _worked_s(self, now: int) -> int:
        return max(0, self._until(now) - self.works_from)

    def done(self, now: int) -> int:
        """Return the work of the job that is done at this instant, be it saved or not."""
        return min(self._terms.work, self._begins_with + self._worked_s(now) * self._speed)

    def saves(self, now: int) -> int:
        """Return how many checkpoints it has written."""
        worked = min(self._worked_s(now), self.finishes_at - self.works_from)
        return self._stretches[-1][0] + worked // self._terms.every_s

    def saved(self, now: int) -> int:
        """Return the work that its newest checkpoint holds."""
        saves = self.saves(now) - self._stretches[-1][0]
        return self._begins_with + saves * self._terms.every_s * self._speed

    def saved_at(self, number: int) -> int:
        """Return when it wrote its checkpoint of this number, counted from 1."""
        before, works_from = next(one for one in reversed(self._stretches) if one[0] < number)
        return works_from + (number - before) * self._terms.every_s

    def is_finished(self, now: int) -> bool:
        """Whether the job's command has come to its end, before the machine was lost."""
        return self.finishes_at <= self._until(now)

    def used_s(self, now: int) -> int:
        """Return for how long it has existed, without the time in which it was halted."""
        return max(0, self._until(now) - self.launched_at - self._halted_s)


# Files of a history, line by line, with bounds: plain or gzip, however large and however broken.


BYTES_MAX: Final = 4_000_000_000
"""Of all files of a history together, unpacked."""
_BLANK_BYTES_MAX: Final = 64
LINE_MAX: Final = 1_000_000
DOCUMENT_MAX: Final = 200_000_000
"""Of one trace, which is a single JSON document."""
EMPTY_LINES_MAX: Final = 100_000
"""Of all files together: two hundred million of them are two hundred kilobytes of gzip and a minute of work."""


class Reader:
    """Opens the files of one history and counts what is read of them."""

    def __init__(self) -> None:
        self.bytes_read = 0
        self.empty_lines = 0

    def lines(self, path: Path) -> Iterator[tuple[int, str]]:
        """Yield number and text of each line.

        Raises:
            BacktestRefused: naming the file, and the line where there is one.
        """
        number = 0
        try:
            with _open(path) as file:
                while True:
                    number += 1
                    line = file.readline(LINE_MAX + 1)
                    if not line:
                        return
                    size = len(line)
                    self.bytes_read += size
                    if self.bytes_read > BYTES_MAX:
                        self._count(path, 0)
                    if size <= _BLANK_BYTES_MAX and not line.strip():
                        self._count_empty(path, number)
                    if size > LINE_MAX:
                        raise BacktestRefused(
                            f"{path}:{number}: the line is longer than {LINE_MAX:,} bytes", hint="check the file"
                        )
                    yield number, line.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as exc:
            raise BacktestRefused(f"{path}:{number}: not UTF-8 text", hint="save the file as UTF-8") from exc
        except (OSError, EOFError, zlib.error) as exc:
            raise _unreadable(path, exc) from exc

    def document(self, path: Path) -> str:
        """Return the whole text of a file.

        Raises:
            BacktestRefused: naming the file.
        """
        try:
            with _open(path) as file:
                data = file.read(DOCUMENT_MAX + 1)
            if len(data) > DOCUMENT_MAX:
                raise BacktestRefused(f"{path} is longer than {DOCUMENT_MAX:,} bytes", hint="cut the trace into parts")
            self._count(path, len(data))
            return data.decode("utf-8-sig")
        except UnicodeDecodeError as exc:
            raise BacktestRefused(f"{path}: not UTF-8 text", hint="save the file as UTF-8") from exc
        except (OSError, EOFError, zlib.error) as exc:
            raise _unreadable(path, exc) from exc

    def _count_empty(self, path: Path, number: int) -> None:
        self.empty_lines += 1
        if self.empty_lines > EMPTY_LINES_MAX:
            raise BacktestRefused(
                f"{path}:{number}: more than {EMPTY_LINES_MAX:,} empty lines", hint="delete the empty lines"
            )

    def _count(self, path: Path, size: int) -> None:
        self.bytes_read += size
        if self.bytes_read > BYTES_MAX:
            raise BacktestRefused(
                f"{path}: the history holds more than {BYTES_MAX // 10**9} GB, which is more than is read",
                hint="give a folder with fewer files, such as the last month",
            )


def _open(path: Path) -> gzip.GzipFile | io.BufferedReader:
    if path.suffix == ".gz":
        return gzip.GzipFile(path, "rb")
    return path.open("rb")


def _unreadable(path: Path, exc: Exception) -> BacktestRefused:
    if isinstance(exc, OSError) and exc.strerror:
        return BacktestRefused(f"{path}: {exc.strerror}", hint="check the file and its permissions")
    return BacktestRefused(f"{path}: the file is damaged or cut off ({exc})", hint="copy it again, or unpack it")
