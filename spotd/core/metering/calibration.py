"""The fee multiplier that would have made what was booked equal to what a provider billed.

Theory. What is booked of a machine is its bare cost b (GPU and disk) times the multiplier m, and its traffic, which
bears no fee. The provider's own bill without that traffic is y. Beside the multiplier each start may cost something
that is not booked, c: the image of the job, where its download is billed. So y = m b + c is fitted, weighted by 1 /
b, as a small machine differs by less. Machines that all cost the same cannot show which of both it is; then the
interval of m is wide, and nothing is suggested. The interval is Student's for 19 of 20 samples, from the residuals of
the machines (a sandwich estimate, each residual divided by what its machine leaves to the others), since large ones
differ by more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt
from typing import Final

from spotd.core.pricing.effective_price import PPM
from spotd.core.pricing.words import dollar_words
from spotd_providers.contract.money import MicroUsd
from spotd_providers.contract.values import ProviderName

MACHINES_MIN: Final = 5
"""So many bills are needed before anything is said of a fee."""
BARE_MIN: Final = MicroUsd(1_000_000)
"""And so much money, or the cents of roundings decide."""
SPREAD_MAX_PPM: Final = 100_000
"""A multiplier whose interval reaches further than this to either side is no suggestion."""
START_MIN: Final = 1_000
"""Less than a tenth of a cent for each start is rounding."""
ALIKE: Final = 1e-6
"""Bare costs that differ by less than a thousandth of themselves are the same."""
LEAST_LEFT: Final = 1e-3
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
    fit = _fit(machines)
    if fit is None:
        words = (
            f"the bills of {count} machines cannot tell a fee from a cost of each start: too alike to suggest anything"
        )
        return Calibration(machines=count, booked=booked, billed=billed, sentence=words)
    measured, spread = _ppm(fit.factor), _ppm(fit.factor_spread) + 1
    low, high = measured - spread, measured + spread
    words = f"the bills of {count} machines make it x{_factor(measured)}, between x{_factor(low)} and x{_factor(high)}"
    if abs(fit.start) > fit.start_spread and abs(fit.start) >= START_MIN:
        start = dollar_words(MicroUsd(round(abs(fit.start))))
        words += f", and {start} {'more' if fit.start > 0 else 'less'} for each start"
    suggested = None
    rounded = -(-measured // _STEP_PPM) * _STEP_PPM
    if spread > SPREAD_MAX_PPM:
        words += ": too uncertain to suggest anything"
    elif not _LEAST_PPM <= measured <= _MOST_PPM:
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
    """The multiplier, what each start costs beside it in micro-dollars, and how far the true ones may be from both."""

    factor: float
    factor_spread: float
    start: float
    start_spread: float


def _fit(machines: Sequence[BilledMachine]) -> _Fit | None:
    """Fit bill = factor x bare + start; `None` where too few machines, or too similar ones, show which is which."""
    points = [(float(one.bare), float(one.billed - one.traffic)) for one in machines if one.bare > 0]
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
    for b, y in points:
        to_factor, to_start = (inverses - count / b) / room, (bares / b - count) / room
        left = max(LEAST_LEFT, 1 - to_factor * b - to_start)
        error = (y - factor * b - start) / left
        of_factor += (to_factor * error) ** 2
        of_start += (to_start * error) ** 2
    student = _student_thousandths(count - 2) / 1000
    return _Fit(factor, student * sqrt(of_factor), start, student * sqrt(of_start))


def _ppm(value: float) -> int:
    return round(value * PPM)


def _student_thousandths(freedom: int) -> int:
    """Return the 97.5 % point of Student's distribution in thousandths, right to a hundredth from 4 degrees on."""
    return 1960 + 2400 // freedom + 3300 // freedom**2


def _factor(ppm: int) -> str:
    return f"{ppm / PPM:.3f}"
