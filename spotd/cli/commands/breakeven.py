"""`breakeven`: renting against buying one's own cards."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from fractions import Fraction
from typing import TYPE_CHECKING, Any, Final

import click

from spotd.cli import stdout
from spotd.cli.current_quotes import current_quotes
from spotd.cli.failures import CommandFailed, ExitCode
from spotd.cli.inputs.options import JSON, TABLE, output
from spotd.cli.views.figures import MONEY, PURCHASE, RENT, number
from spotd.estimates.breakeven import HOURS_PER_WEEK, MONTHS_PER_YEAR, BreakEven, Purchase, break_even
from spotd.estimates.card_power import CARD_WATTS
from spotd.words import clean, count, dollars, gpu_text, price, where_text
from spotd_jobs.spec.model import PriceLimit
from spotd_providers.contract import gpus

if TYPE_CHECKING:
    from spotd.api.schemas.prices import QuoteResponse

SCHEMA: Final = 1
_MICRO: Final = 1_000_000
_WATTS: Final = number(unit="W", most=1_000_000)
_PERCENT: Final = number(unit="%", most=100)
_HOURS: Final = number(unit="h", most=HOURS_PER_WEEK, above=True)
_YEARS: Final = number(most=50, above=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rent:
    """What the machine costs per hour in micro-dollars, and where."""

    hour: int
    source: str
    quote: QuoteResponse | None


@click.command()
@click.option("--price", "paid", type=PURCHASE, metavar="DOLLARS", required=True, help="Of everything that is bought.")
@click.option("--hours", type=_HOURS, required=True, help="Hours of use per week.")
@click.option("--gpu", metavar="NAME", help="The card: for its price of today, and its power.")
@click.option("--cards", type=click.IntRange(1, 1024), default=1, show_default=True, help="How many are bought.")
@click.option(
    "--rent", type=RENT, metavar="PRICE", help="Rent per GPU-hour; 2.80/h: of the machine.  [default: today's]"
)
@click.option("--power", type=_WATTS, help="Watts of a busy card.  [default: its maker's]")
@click.option("--other-power", type=_WATTS, default="0", show_default=True, help="Of the rest of the machine, busy.")
@click.option("--idle-power", type=_WATTS, default="0", show_default=True, help="Of the whole machine, idle.")
@click.option("--electricity", type=MONEY, metavar="DOLLARS", default="0.15", show_default=True, help="Per kWh.")
@click.option("--hosting", type=MONEY, metavar="DOLLARS", default="0", show_default=True, help="Per month.")
@click.option("--resale", type=_PERCENT, default="0", show_default=True, help="Share of the price got back in the end.")
@click.option("--years", type=_YEARS, default="3", show_default=True, help="Until it is sold.")
@output(TABLE, JSON)
def breakeven(*, paid: int, gpu: str | None, cards: int, rent: PriceLimit | None, output: str, **given: Any) -> None:
    """When buying cards has cost as much as renting them, in months and in hours of use.

    \b
    months = price x (1 - resale) / (renting per month - electricity and hosting per month)

    \b
    spotctl breakeven --price 1900 --gpu 4090 --hours 40
    spotctl breakeven --price 240000 --gpu h100 --cards 8 --hours 120 --rent 2.10 --hosting 1500 --resale 40%
    """
    names = None if gpu is None else _names(gpu)
    purchase = Purchase(
        price=paid,
        cards=cards,
        busy_watts=_card_watts(given["power"], names) * cards + given["other_power"],
        idle_watts=given["idle_power"],
        electricity=Fraction(given["electricity"]),
        hosting=given["hosting"],
        resale=given["resale"] / 100,
        years=given["years"],
    )
    hours: Fraction = given["hours"]
    rented = _rented(rent, names, cards)
    result = break_even(purchase, rent_hour=rented.hour, hours_per_week=hours)
    if output == JSON:
        stdout.document(_body(purchase, rented, hours, result))
    else:
        stdout.write("".join(f"{key:<12}{clean(text)}\n" for key, text in _lines(purchase, rented, hours, result)))


def _names(gpu: str) -> frozenset[str]:
    try:
        return gpus.resolve(gpu)
    except gpus.UnknownGpu as exc:
        raise CommandFailed(str(exc), hint="give --rent and --power instead of --gpu") from exc


def _card_watts(power: Fraction | None, names: frozenset[str] | None) -> Fraction:
    """Return the watts of a busy card: as given, else the most that its maker states of the cards so named."""
    if power is not None:
        return power
    known = [CARD_WATTS[name] for name in names or () if name in CARD_WATTS]
    if not known:
        raise CommandFailed("what a card draws is not known", hint="give it: --power 450W")
    return Fraction(max(known))


def _rented(rent: PriceLimit | None, names: frozenset[str] | None, cards: int) -> _Rent:
    if rent is not None:
        hour = rent.machine_hour if rent.machine_hour is not None else (rent.per_gpu_hour or 0) * cards
        return _Rent(hour=hour, source="as given", quote=None)
    if names is None:
        raise click.UsageError("give --gpu, whose price of today is asked for, or --rent")
    quotes, silence = current_quotes()
    if silence:
        raise CommandFailed(
            f"today's price is not known: {silence}", code=ExitCode.UNREACHABLE, hint="give --rent 0.35"
        )
    fitting = [quote for quote in quotes if quote["gpu_count"] >= cards and gpus.matches(names, quote["gpu"])]
    if not fitting:
        raise CommandFailed(
            f"nothing with {cards} of this GPU is offered now", code=ExitCode.NOT_FOUND, hint="give --rent 0.35"
        )
    quote = min(fitting, key=lambda quote: quote["effective_usd_h"])
    source = f"{gpu_text(quote)} {quote['market']} at {where_text(quote)}"
    return _Rent(hour=round(quote["effective_usd_h"] * _MICRO), source=source, quote=quote)


def _usd(micro: Fraction | int) -> float:
    return round(float(micro / _MICRO), 6)


def _lines(purchase: Purchase, rented: _Rent, hours: Fraction, result: BreakEven) -> Iterator[tuple[str, str]]:
    months = purchase.years * MONTHS_PER_YEAR
    yield "renting:", f"${price(_usd(rented.hour))} per hour, {rented.source}: {_month(result.renting_month)}"
    yield "owning:", f"{_month(result.owning_month)} for electricity and hosting, at {float(hours):g} hours a week"
    lost = f"{dollars(_usd(result.lost_value))} are lost after {_figure(months)} months"
    yield "purchase:", f"{dollars(_usd(purchase.price))} for {count(purchase.cards, 'card')}, of which {lost}"
    yield "break-even:", _verdict(result)
    yield "owned:", f"${price(_usd(result.owned_gpu_hour))} per GPU-hour with everything in it"
    least = result.hours_per_week_min
    yield (
        "use:",
        (
            "however much it is used, buying does not pay within that time"
            if least is None
            else f"buying pays from {_figure(least)} hours a week"
        ),
    )


def _verdict(result: BreakEven) -> str:
    if result.months is None or result.hours is None:
        return "never: owning costs at least as much per month as renting, even without the purchase"
    when, cheaper = ("before", "buying") if result.pays else ("after", "renting")
    span = f"{_figure(result.months)} months or {float(result.hours):.0f} hours of use"
    return f"{span}, {when} the machine is sold: {cheaper} is cheaper"


def _month(amount: Fraction) -> str:
    return f"{dollars(_usd(amount))} a month"


def _figure(number: Fraction) -> str:
    return f"{float(number):.1f}".removesuffix(".0")


def _body(purchase: Purchase, rented: _Rent, hours: Fraction, result: BreakEven) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "now": datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z"),
        "rent_usd_h": _usd(rented.hour),
        "rent_source": rented.source,
        "quote": rented.quote,
        "price_usd": _usd(purchase.price),
        "cards": purchase.cards,
        "busy_watts": float(purchase.busy_watts),
        "idle_watts": float(purchase.idle_watts),
        "electricity_usd_kwh": _usd(purchase.electricity),
        "hosting_usd_month": _usd(purchase.hosting),
        "resale_percent": float(purchase.resale * 100),
        "years": float(purchase.years),
        "hours_per_week": float(hours),
        "renting_usd_month": _usd(result.renting_month),
        "owning_usd_month": _usd(result.owning_month),
        "lost_usd": _usd(result.lost_value),
        "months": None if result.months is None else round(float(result.months), 3),
        "hours": None if result.hours is None else round(float(result.hours), 1),
        "pays": result.pays,
        "owned_usd_gpu_h": _usd(result.owned_gpu_hour),
        "hours_per_week_min": None if result.hours_per_week_min is None else round(float(result.hours_per_week_min), 2),
    }
