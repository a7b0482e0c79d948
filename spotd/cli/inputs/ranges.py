"""Figures on the command line: numbers, prices, and a range of ceilings such as `1.5..3.0` or `12/h..24/h`."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from fractions import Fraction
from typing import Final

from spotd.cli.inputs.options import Parsed
from spotd.client.daemon import Daemon
from spotd_jobs.spec.model import GpuAlternative, PriceLimit
from spotd_jobs.spec.problems import BadValue
from spotd_jobs.spec.units import parse_money, parse_number, parse_price

LISTED_MAX: Final = 100
_LEAST, _MOST = Fraction(7, 10), Fraction(3, 2)
_GRAIN: Final = 1_000
"""Ceilings between the two ends are whole tenths of a cent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CeilingRange:
    """Ceilings from low to high, all of a GPU-hour or all of a machine.

    Attributes:
        limits: two ends of a range that is not divided yet, or what was listed.
    """

    limits: tuple[PriceLimit, ...]
    is_listed: bool = False

    def divided(self, count: int) -> CeilingRange:
        """Return so many ceilings at equal distances; a list stays as it is."""
        if self.is_listed:
            return self
        low, high = _amount(self.limits[0]), _amount(self.limits[-1])
        step = Fraction(high - low, max(1, count - 1))
        between = (round((low + step * place) / _GRAIN) * _GRAIN for place in range(1, count - 1))
        amounts = {high} if count == 1 else {low, high, *(one for one in between if low < one < high)}
        return CeilingRange(limits=tuple(_like(self.limits[0], one) for one in sorted(amounts)), is_listed=True)


def _amount(limit: PriceLimit) -> int:
    return limit.per_gpu_hour or limit.machine_hour or 0


def _like(limit: PriceLimit, amount: int) -> PriceLimit:
    return PriceLimit(per_gpu_hour=amount) if limit.per_gpu_hour is not None else PriceLimit(machine_hour=amount)


def ceilings_around(limit: PriceLimit) -> CeilingRange:
    """Return a range around a job's own ceiling."""
    return CeilingRange(limits=tuple(_like(limit, round(_amount(limit) * factor)) for factor in (_LEAST, _MOST)))


def parse_range(text: str) -> CeilingRange:
    """Return the range or list that the text names.

    Raises:
        BadValue
    """
    low, dots, high = text.partition("..")
    if dots:
        ends = (parse_price(low), parse_price(high))
        _require_one_unit(ends)
        if _amount(ends[0]) > _amount(ends[1]):
            raise BadValue(f"{text!r} goes from high to low", hint=f"write {high.strip()}..{low.strip()}")
        return CeilingRange(limits=ends)
    listed = tuple(sorted((parse_price(part) for part in text.split(",")), key=_amount))
    _require_one_unit(listed)
    if len(listed) > LISTED_MAX:
        raise BadValue(f"{len(listed)} ceilings are too many", hint=f"write at most {LISTED_MAX}, or a range")
    return CeilingRange(limits=tuple(dict.fromkeys(listed)), is_listed=True)


def _require_one_unit(limits: tuple[PriceLimit, ...]) -> None:
    if len({limit.per_gpu_hour is not None for limit in limits}) > 1:
        raise BadValue("one end is per GPU-hour, the other of the machine", hint="write 12/h..24/h, or 1.5..3.0")


RANGE = Parsed("range", parse_range)


# Spans and instants on the command line, by the daemon's clock.


When = timedelta | datetime


def _when(text: str) -> When:
    from spotd_jobs.spec.problems import BadValue
    from spotd_jobs.spec.units import UnitError, parse_duration

    try:
        return parse_duration(text)
    except UnitError:
        pass
    try:
        return datetime.fromisoformat(text).astimezone(UTC)
    except (ValueError, OverflowError) as exc:
        message = f"{text!r} is neither a span such as 2h nor an instant such as 2026-11-21T10:00"
        raise BadValue(message, hint="") from exc


def _span(text: str) -> timedelta:
    from spotd_jobs.spec.problems import BadValue
    from spotd_jobs.spec.units import parse_duration

    span = parse_duration(text)
    if span < timedelta(minutes=1):
        raise BadValue("the shortest span is 1m", hint="")
    return span


WHEN = Parsed("when", _when)
"""A span before now (`2h`) or an instant; an instant without a zone is local."""
SPAN = Parsed("span", _span)
"""A span such as `6h`, of a minute at least."""


def instants(daemon: Daemon, *moments: When | None) -> list[str | None]:
    """Return the moments as the API reads them; spans count from the daemon's now, which may run ahead of ours."""
    now: datetime | None = None
    found: list[str | None] = []
    for moment in moments:
        if isinstance(moment, timedelta):
            if now is None:
                now = datetime.fromisoformat(daemon.providers()["now"])
            found.append(_before(now, moment).isoformat())
        else:
            found.append(None if moment is None else moment.isoformat())
    return found


def _before(now: datetime, span: timedelta) -> datetime:
    try:
        return now - span
    except OverflowError:
        return datetime(1970, 1, 1, tzinfo=UTC)


def number(*, unit: str = "", most: int, above: bool = False) -> Parsed:
    """Return the type of a number from 0, or `above` it, with or without its unit."""

    def parse(text: str) -> Fraction:
        return parse_number(text, unit=unit, most=most, above=above)

    return Parsed(unit or "number", parse)


def _paid(text: str) -> int:
    amount = parse_money(text)
    if amount == 0:
        raise BadValue("a price must be above 0", hint="write dollars like 1600")
    return amount


PURCHASE: Final = Parsed("dollars", _paid)


def _sells(text: str) -> GpuAlternative:
    name, _, count = text.partition(":")
    if not name or (count and not (count.isdecimal() and 1 <= int(count[:5]) <= 1024)):
        raise BadValue(f"{text!r} is no GPU with a count such as H100:8", hint="")
    return GpuAlternative(name=name, count=int(count or 1))


SELLS: Final = Parsed("gpu", _sells)
"""What a recorded trace sells."""
