"""The fee multiplier that would have made what was booked equal to what a provider billed.

Theory. What is booked of a machine is its bare cost b (GPU and disk) times the multiplier, and its traffic, which bears
no fee. The provider's own bill without that traffic is y. The multiplier that makes the sums equal is sum(y) / sum(b),
the ratio estimator; how far the machines differ from it says how sure it is: its standard error is
sqrt(n / (n - 1) * sum((y - m b)^2)) / sum(b), and its interval is Student's for 19 of 20 samples. Whole numbers only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isqrt
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
    measured = sum(one.billed - one.traffic for one in machines) * PPM // bare
    spread = _spread_ppm(machines, measured, bare)
    low, high = measured - spread, measured + spread
    words = f"the bills of {count} machines make it x{_factor(measured)}, between x{_factor(low)} and x{_factor(high)}"
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


def _spread_ppm(machines: Sequence[BilledMachine], measured: int, bare: int) -> int:
    """Return half the width of the interval, rounded up."""
    count = len(machines)
    squares = sum(((one.billed - one.traffic) * PPM - measured * one.bare) ** 2 for one in machines)
    error = isqrt(count * squares // (count - 1)) // bare + 1
    return error * _student_thousandths(count - 1) // 1000 + 1


def _student_thousandths(freedom: int) -> int:
    """Return the 97.5 % point of Student's distribution in thousandths, right to a hundredth from 4 degrees on."""
    return 1960 + 2400 // freedom + 3300 // freedom**2


def _factor(ppm: int) -> str:
    return f"{ppm / PPM:.3f}"
