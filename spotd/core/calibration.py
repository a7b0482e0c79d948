"""The fee multiplier that would have made what was booked equal to what a provider billed.

Theory. What is booked of a machine is its bare cost b (GPU and disk) times the multiplier m, and its traffic, which
bears no fee. The provider's own bill without that traffic is y. Beside the multiplier each start may cost something
that is not booked, c >= 0: the image of the job, where its download is billed. So y = m b + c is fitted in three
steps.

1. A line that one bill in four cannot move: m is the median of the slopes between all pairs of machines, c the median
   of y - m b (Theil and Sen). Bills that lie eight times as far from it as usual (the scaled median distance) are
   left out. If that is more than one in four, nothing is said.
2. Least squares of the others, weighted by 1 / b, as a small machine differs by less. Its interval is Student's for
   19 of 20 samples, from the residuals of the machines (a sandwich estimate, each residual divided by what its
   machine leaves to the others), since large ones differ by more. It must be narrow, with all of them and without the
   one that bears most: machines that all cost the same cannot show which of both it is, nor can one that stands alone
   against those. Then no figure is printed at all.
3. Where c comes out negative it is 0, and m the quotient of the sums. The interval stays that of the free line.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from math import sqrt
from statistics import median
from typing import Final

from spotd.core.bills import CENT
from spotd.core.pricing import PPM, dollar_words
from spotd_providers.contract.values import MicroUsd, ProviderName

MACHINES_MIN: Final = 5
"""So many bills are needed before anything is said of a fee."""
BARE_MIN: Final = MicroUsd(1_000_000)
"""And so much money, or the cents of roundings decide."""
SPREAD_MAX_PPM: Final = 50_000
"""Of a multiplier whose interval reaches further than this to either side nothing is said."""
FAR: Final = 8
"""A bill that lies so many times further from the others' line than usual is left out."""
FAR_LEAST_PPM: Final = 10_000
"""One that lies within this share of its amount never is: bills are rounded."""
LEFT_OUT_MAX: Final = 4
"""At most one bill in so many is left out."""
PAIRED_MAX: Final = 300
"""Of more machines than these, every second, third ... by cost bears the line that bills are held against."""
START_MIN: Final = 1_000
"""Less than a tenth of a cent for each start is rounding."""
ALIKE: Final = 1e-6
"""Bare costs that differ by less than a thousandth of themselves are the same."""
LEAST_LEFT: Final = 1e-3
SCALED: Final = 1.4826
"""The deviation of a normal distribution in units of its median distance."""
_LEAST_PPM: Final = 500_000
_MOST_PPM: Final = 4_900_000
"""What the config takes."""
_STEP_PPM: Final = 10_000
"""A suggestion is rounded up to hundredths: a price that is a little too high breaks no ceiling."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BilledMachine:
    """One machine whose bill is known: its bare cost, its traffic, both as booked, and its bill."""

    provider: ProviderName
    bare: MicroUsd
    traffic: MicroUsd
    booked: MicroUsd
    billed: MicroUsd

    def plus(self, other: BilledMachine) -> BilledMachine:
        """Return the whole machine of two attempts that had it: it was started once."""
        return BilledMachine(
            provider=self.provider,
            bare=MicroUsd(self.bare + other.bare),
            traffic=MicroUsd(self.traffic + other.traffic),
            booked=MicroUsd(self.booked + other.booked),
            billed=MicroUsd(self.billed + other.billed),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """What the bills of one provider say of its fee.

    Attributes:
        measured_ppm: the multiplier that makes the sums equal; `None` where there is too little to say.
        spread_ppm: how far the true one may be from it.
        suggested_ppm: what to write into the config; `None` where the one in force agrees, or nothing can be said.
    """

    machines: int
    booked: MicroUsd
    billed: MicroUsd
    measured_ppm: int | None = None
    spread_ppm: int | None = None
    suggested_ppm: int | None = None
    sentence: str


def calibration(machines: Sequence[BilledMachine], fee_ppm: int) -> Calibration:
    """Compare the bills of one provider with what was booked, beside the multiplier that is in force now."""
    count, bare = len(machines), sum(one.bare for one in machines)
    booked = MicroUsd(sum(one.booked for one in machines))
    billed = MicroUsd(sum(one.billed for one in machines))
    if count < MACHINES_MIN or bare < BARE_MIN:
        few = f"{count} machine{'' if count == 1 else 's'} with a bill, {dollar_words(MicroUsd(bare))} without fee"
        least = f"{MACHINES_MIN} machines and {dollar_words(BARE_MIN)} are the least"
        return Calibration(machines=count, booked=booked, billed=billed, sentence=f"too little to say: {few}; {least}")
    points = [(float(one.bare), float(one.billed - one.traffic)) for one in machines if one.bare > 0]
    near = _without_outliers(points)
    fit = _fit(near)
    left_out = len(points) - len(near)
    why = _what_is_missing(near, fit, left_out, len(points))
    if fit is None or why:
        words = f"the bills of {count} machines cannot tell a fee from a cost of each start: {why} to suggest anything"
        return Calibration(machines=count, booked=booked, billed=billed, sentence=words)
    measured, spread = _ppm(fit.factor), _ppm(fit.factor_spread) + 1
    low, high = measured - spread, measured + spread
    words = f"the bills of {count} machines make it x{_factor(measured)}, between x{_factor(low)} and x{_factor(high)}"
    if left_out:
        words += f" without {left_out} that {'differs' if left_out == 1 else 'differ'} from all others"
    if fit.start > fit.start_spread and fit.start >= START_MIN:
        words += f", and {dollar_words(MicroUsd(round(fit.start)))} more for each start"
    suggested = None
    rounded = -(-measured // _STEP_PPM) * _STEP_PPM
    if not _LEAST_PPM <= measured <= _MOST_PPM:
        words += ": no fee is like that, so something else differs"
    elif low <= fee_ppm <= high or fee_ppm == rounded:
        words += f"; x{_factor(fee_ppm)} is in force and agrees"
    else:
        suggested = rounded
        words += f"; x{_factor(fee_ppm)} is in force"
    return Calibration(
        machines=count,
        booked=booked,
        billed=billed,
        measured_ppm=measured,
        spread_ppm=spread,
        suggested_ppm=suggested,
        sentence=words,
    )


@dataclass(frozen=True, slots=True)
class _Fit:
    """The multiplier, what each start costs beside it in micro-dollars, and how far the true ones may be from both.

    `bears_most` is the index of the machine that the line depends on most.
    """

    factor: float
    factor_spread: float
    start: float
    start_spread: float
    bears_most: int


_Point = tuple[float, float]
"""The bare cost of a machine and its bill without traffic, in micro-dollars."""


def _without_outliers(points: Sequence[_Point]) -> list[_Point]:
    """Return the bills that lie near the line of most; all of them where no two machines differ in cost."""
    ordered = sorted(points)
    bearing = ordered[:: -(-len(ordered) // PAIRED_MAX) or 1]
    slopes = [(y - x) / (b - a) for (a, x), (b, y) in combinations(bearing, 2) if b - a > LEAST_LEFT * a]
    if not slopes:
        return ordered
    factor = median(slopes)
    start = median(y - factor * b for b, y in bearing)
    distances = [abs(y - factor * b - start) / sqrt(b) for b, y in ordered]
    usual = SCALED * median(distances)
    return [
        (b, y)
        for (b, y), distance in zip(ordered, distances, strict=True)
        if distance <= FAR * usual or distance * sqrt(b) <= CENT + abs(y) * FAR_LEAST_PPM / PPM
    ]


def _what_is_missing(near: Sequence[_Point], fit: _Fit | None, left_out: int, count: int) -> str:
    """Return why the bills do not determine both figures, empty where they do: with each of them and without one."""
    if left_out * LEFT_OUT_MAX > count:
        return "too uncertain"
    others = None if fit is None else _fit([point for n, point in enumerate(near) if n != fit.bears_most])
    if fit is None or others is None or len(near) < MACHINES_MIN:
        return "too alike"
    spreads = _ppm(fit.factor_spread), _ppm(others.factor_spread)
    if max(spreads) > SPREAD_MAX_PPM or abs(_ppm(fit.factor - others.factor)) > sum(spreads) + 1:
        return "too uncertain"
    return ""


def _fit(points: Sequence[_Point]) -> _Fit | None:
    """Fit bill = factor x bare + start; `None` where too few machines, or too similar ones, show which is which."""
    count = len(points)
    if count <= 2:
        return None
    bares, inverses = sum(b for b, _ in points), sum(1 / b for b, _ in points)
    room = bares * inverses - count * count
    if room <= ALIKE * count * count:
        return None
    bills, ratios = sum(y for _, y in points), sum(y / b for b, y in points)
    factor, start = (bills * inverses - count * ratios) / room, (bares * ratios - count * bills) / room
    of_factor = of_start = 0.0
    shares: list[float] = []
    for b, y in points:
        to_factor, to_start = (inverses - count / b) / room, (bares / b - count) / room
        shares.append(to_factor * b + to_start)
        error = (y - factor * b - start) / max(LEAST_LEFT, 1 - shares[-1])
        of_factor += (to_factor * error) ** 2
        of_start += (to_start * error) ** 2
    student = _student_thousandths(count - 2) / 1000
    if start < 0:
        factor, start = bills / bares, 0.0
    return _Fit(factor, student * sqrt(of_factor), start, student * sqrt(of_start), shares.index(max(shares)))


def _ppm(value: float) -> int:
    return round(value * PPM)


def _student_thousandths(freedom: int) -> int:
    """Return the 97.5 % point of Student's distribution in thousandths, right to a hundredth from 4 degrees on."""
    return 1960 + 2400 // freedom + 3300 // freedom**2


def _factor(ppm: int) -> str:
    return f"{ppm / PPM:.3f}"
