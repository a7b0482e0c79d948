"""`size`: the memory that a model needs, the GPUs that hold it, and where they are cheapest now."""

from __future__ import annotations

import json
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn

import click

from spotd.cli import stderr, stdout
from spotd.cli.entry import CommandFailed, ExitCode
from spotd.cli.inputs.options import JSON, TABLE, F, output, shown_option
from spotd.cli.inputs.ranges import PURCHASE, number
from spotd.cli.views.size_view import MONEY, PARAMS, RENT, Sizing, cheapest_rows, document, show
from spotd.client.daemon import Daemon
from spotd.client.transport import ClientError
from spotd.estimates import machines
from spotd.estimates.memory import TARGETS, WorkloadError, memory_parts
from spotd.estimates.model_config import WAY_OUT, ModelConfigError, architecture_of
from spotd.estimates.workload import (
    Architecture,
    Lora,
    Optimizer,
    Precision,
    Recompute,
    Sharding,
    Workload,
    typical_architecture,
)
from spotd.words import OWN, clean, count, dollars, gpu_text, price, silence_texts, where_text
from spotd_jobs.spec.model import PriceLimit
from spotd_jobs.spec.problems import nearest
from spotd_providers.contract import gpus
from spotd_providers.contract.gpus import GPUS, GpuInfo

if TYPE_CHECKING:
    from spotd.api.schemas.costs import QuoteResponse


# What is offered now, for commands that go on without a daemon.


_LIMIT: Final = 100_000


def current_quotes() -> tuple[list[QuoteResponse], str]:
    """Return all quotes of one machine now, or none and why; providers without prices are named on stderr."""
    try:
        answer = Daemon().prices({"limit": _LIMIT})
    except ClientError as exc:
        return [], exc.message
    for sentence in silence_texts(answer):
        stderr.warning(sentence)
    quotes: list[QuoteResponse] = [quote for quote in answer["quotes"] if quote["nodes"] == 1]
    return quotes, ""


# The `config.json` of a model, from a file of this machine, refused with a sentence instead of a traceback.


NAME: Final = "config.json"
BYTES_MAX: Final = 4_000_000


def read_architecture(path: Path) -> Architecture:
    """Return the architecture that a config describes, or the config of a folder that holds a model.

    Raises:
        CommandFailed: unreadable, not JSON, or a model that cannot be counted; names the file and the key.
    """
    file = path / NAME if path.is_dir() else path
    config = _config(file, _content(file))
    try:
        return architecture_of(config)
    except ModelConfigError as exc:
        place = ": ".join(part for part in (str(file), exc.key) if part)
        raise CommandFailed(f"{place}: {exc}", hint=exc.hint) from exc


def _content(file: Path) -> bytes:
    try:
        if not stat.S_ISREG(file.stat().st_mode):
            raise CommandFailed(f"{file}: this is not a file", hint=f"name a model's {NAME}")
        with file.open("rb") as opened:
            raw = opened.read(BYTES_MAX + 1)
    except FileNotFoundError as exc:
        hint = f"name a model's {NAME}, or the folder it is in"
        raise CommandFailed(f"{file}: no such file", hint=hint) from exc
    except OSError as exc:
        hint = "check the path, the file's owner and mode"
        raise CommandFailed(f"{file}: cannot be read: {exc.strerror}", hint=hint) from exc
    if len(raw) > BYTES_MAX:
        raise CommandFailed(f"{file}: larger than {BYTES_MAX // 10**6} MB", hint=f"name the {NAME}, not the weights")
    return raw


def _config(file: Path, raw: bytes) -> dict[str, Any]:
    hint = f"name a model's {NAME}, as it is on its page; or {WAY_OUT}"
    try:
        config = json.loads(raw.decode("utf-8-sig"), parse_constant=_refuse_constant)
    except UnicodeDecodeError as exc:
        raise CommandFailed(f"{file}: not UTF-8 text", hint=hint) from exc
    except json.JSONDecodeError as exc:
        message = f"{file}:{exc.lineno}: not JSON: {exc.msg}"
        raise CommandFailed(message, hint=hint) from exc
    except ValueError as exc:
        raise CommandFailed(f"{file}: holds a number that none can be: {exc}", hint=hint) from exc
    except RecursionError as exc:
        raise CommandFailed(f"{file}: nested too deeply", hint=hint) from exc
    if not isinstance(config, dict):
        raise CommandFailed(f"{file}: does not hold a table of settings", hint=hint)
    return config


def _refuse_constant(text: str) -> NoReturn:
    raise ValueError(text)


_CACHE_BYTES: Final = {"16-bit": 2, "8-bit": 1}
_SHARDING: Final = {**{kind.value: kind for kind in Sharding}, "ddp": Sharding.NONE, "fsdp": Sharding.ZERO3}
_COUNT: Final = click.IntRange(1, 1_000_000)
_CARDS: Final = click.IntRange(1, 65_536)
_RANK: Final = click.IntRange(1, 65_536)
_TOKENS: Final = click.IntRange(1, 100_000_000)


def _one_of(flag: str, kinds: Iterable[str], default: str, text: str) -> Callable[[F], F]:
    return shown_option(flag, type=click.Choice([*kinds], case_sensitive=False), default=default, help=text)


@click.command()
@click.argument("config", metavar="[CONFIG.json]", type=click.Path(path_type=Path), required=False)
@click.option("--params", type=PARAMS, metavar="7B", help="Number of parameters, instead of a config.")
@click.option("--inference", is_flag=True, help="Inference instead of training.")
@_one_of(
    "--precision",
    map(str, Precision),
    Precision.BF16.value,
    "Of the weights; in training bf16 and fp16 are mixed precision.",
)
@_one_of("--optimizer", map(str, Optimizer), Optimizer.ADAMW.value, "What updates the weights.")
@click.option("--lora", type=_RANK, metavar="RANK", help="Train adapters of this rank, and no weights.")
@click.option("--qlora", type=_RANK, metavar="RANK", help="The same over int4 weights.")
@click.option("--lora-targets", default="all", show_default=True, help="all, attention, mlp, or a list like q,v.")
@_one_of(
    "--checkpointing", map(str, Recompute), Recompute.FULL.value, "Activations that are computed again instead of kept."
)
@click.option("--no-flash", is_flag=True, help="Attention that keeps its matrix of scores.")
@click.option("--chunked-loss", is_flag=True, help="A loss that never holds all logits.")
@click.option("--batch", type=_COUNT, default=1, show_default=True, help="Sequences per step of one replica.")
@click.option("--sequence", type=_TOKENS, default=2048, show_default=True, help="Tokens of one, prompt and answer.")
@_one_of("--kv-cache", _CACHE_BYTES, "16-bit", "Keys and values of inference.")
@click.option("--prefill", type=_TOKENS, help="Tokens of a prompt processed at once.  [default: all]")
@_one_of(
    "--sharding",
    _SHARDING,
    Sharding.AUTO.value,
    "What data-parallel cards share; auto is zero3 (fsdp) on more than one.",
)
@click.option("--tp", type=_CARDS, help="Tensor-parallel cards.  [default: 1; all in inference]")
@click.option("--pp", type=_CARDS, default=1, show_default=True, help="Pipeline stages.")
@click.option("--cards", type=_CARDS, help="Cards of the memory table.  [default: as few as tp and pp need]")
@click.option("--headroom", type=number(unit="%", most=100), default="10", show_default=True, help="Room kept free.")
@click.option("--gpu", metavar="NAME", help="Only this GPU, in any usual spelling.")
@click.option("-n", "--limit", type=click.IntRange(1, 1000), default=5, show_default=True, help="Machines shown.")
@output(TABLE, JSON)
def size(*, config: Path | None, params: int | None, output: str, **given: Any) -> None:
    """The memory that a model needs, the GPUs that hold it, and the cheapest machines that do now.

    \b
    spotctl size --params 7B
    spotctl size config.json --qlora 16 --batch 4 --sequence 4096
    spotctl size config.json --inference --precision int4 --sequence 32768
    """
    model = _model(config, params)
    work = _workload(given)
    spread = machines.Spread(sharding=_SHARDING[given["sharding"]], tensor=given["tp"], pipeline=given["pp"])
    wanted = _gpus_of(given["gpu"])
    cards = given["cards"] or (given["tp"] or 1) * given["pp"]
    layout = machines.layout_for(model, work, spread, cards)
    if layout is None:
        raise CommandFailed(
            f"{cards} cards cannot be divided into {given['tp'] or 1} tensor-parallel x {given['pp']} stages",
            hint=f"--cards {max(1, cards // ((given['tp'] or 1) * given['pp'])) * (given['tp'] or 1) * given['pp']}",
        )
    needs = machines.MemoryNeeds(model, work, spread, headroom=given["headroom"] / 100)
    try:
        parts = memory_parts(model, work, layout)
    except WorkloadError as exc:
        raise CommandFailed(str(exc), hint=exc.hint) from exc
    quotes, silence = current_quotes()
    sizing = Sizing(
        source="--params" if config is None else str(config),
        model=model,
        work=work,
        layout=layout,
        parts=parts,
        rule=machines.rule_of_thumb(model, work),
        headroom=given["headroom"],
        fits=tuple(machines.gpu_fits(needs, work.precision, wanted)),
        cheapest=tuple(cheapest_rows(needs, work.precision, quotes, {gpu.name for gpu in wanted}))[: given["limit"]],
        silence=silence,
    )
    if output == JSON:
        document(sizing)
        return
    show(sizing)
    if silence:
        stderr.note(f"today's prices are left out: {silence}")


def _model(config: Path | None, params: int | None) -> Architecture:
    if config is not None and params is not None:
        raise click.UsageError("a config and --params exclude each other")
    if config is not None:
        return read_architecture(config)
    if params is None:
        raise click.UsageError("give a model: --params 7B, or the path of its config.json")
    return typical_architecture(params)


def _workload(given: dict[str, Any]) -> Workload:
    if given["lora"] and given["qlora"]:
        raise click.UsageError("--lora and --qlora exclude each other")
    rank = given["lora"] or given["qlora"]
    precision = Precision.INT4 if given["qlora"] else Precision(given["precision"])
    return Workload(
        training=not given["inference"],
        precision=precision,
        optimizer=Optimizer(given["optimizer"]),
        lora=None if rank is None else Lora(rank=rank, targets=_targets(given["lora_targets"])),
        recompute=Recompute(given["checkpointing"]),
        flash=not given["no_flash"],
        chunked_loss=given["chunked_loss"],
        batch=given["batch"],
        sequence=given["sequence"],
        cache_bytes=_CACHE_BYTES[given["kv_cache"]],
        prefill=given["prefill"],
    )


def _targets(text: str) -> frozenset[str]:
    found: set[str] = set()
    for name in (part.strip().lower() for part in text.split(",")):
        if name not in TARGETS:
            match = nearest(name, TARGETS)
            known = f"did you mean {match}?" if match else f"known: {', '.join(TARGETS)}"
            raise click.BadParameter(f"{name!r} is no matrix of a layer; {known}", param_hint="'--lora-targets'")
        found |= TARGETS[name]
    return frozenset(found)


def _gpus_of(name: str | None) -> Sequence[GpuInfo]:
    if name is None:
        return GPUS
    try:
        names = gpus.resolve(name)
    except gpus.UnknownGpu as exc:
        raise CommandFailed(str(exc), hint="spotctl size without --gpu shows all") from exc
    return [gpu for gpu in GPUS if gpu.name in names]


# `breakeven`: renting against buying one's own cards.


SCHEMA: Final = 1
_MICRO: Final = 1_000_000
_WATTS: Final = number(unit="W", most=1_000_000)
_PERCENT: Final = number(unit="%", most=100)
_HOURS: Final = number(unit="h", most=machines.HOURS_PER_WEEK, above=True)
MEASURED_LEAST_H: Final = 10
"""Rented GPU-hours of this daemon's jobs before their price counts in place of today's."""
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
    purchase = machines.Purchase(
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
    rented = _rent_of(rent, names, cards)
    result = machines.break_even(purchase, rent_hour=rented.hour, hours_per_week=hours)
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
    known = [machines.CARD_WATTS[name] for name in names or () if name in machines.CARD_WATTS]
    if not known:
        raise CommandFailed("what a card draws is not known", hint="give it: --power 450W")
    return Fraction(max(known))


def _rent_of(rent: PriceLimit | None, names: frozenset[str] | None, cards: int) -> _Rent:
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
    if (measured := _measured_rent(names)) is not None:
        return replace(measured, hour=measured.hour * cards)
    rented = (quote for quote in quotes if quote["market"] != OWN)
    fitting = [quote for quote in rented if quote["gpu_count"] >= cards and gpus.matches(names, quote["gpu"])]
    if not fitting:
        raise CommandFailed(
            f"nothing with {cards} of this GPU is offered now", code=ExitCode.NOT_FOUND, hint="give --rent 0.35"
        )
    quote = min(fitting, key=lambda quote: quote["effective_usd_h"])
    source = f"{gpu_text(quote)} {quote['market']} at {where_text(quote)}"
    return _Rent(hour=round(quote["effective_usd_h"] * _MICRO), source=source, quote=quote)


def _measured_rent(names: frozenset[str]) -> _Rent | None:
    """Return what a rented card of this name has cost this daemon's jobs per hour; `None` below `MEASURED_LEAST_H`."""
    receipts = Daemon().cost()["receipts"]
    lines = [
        line
        for receipt in receipts
        for line in receipt["attempts"]
        if line["market"] != OWN and line["gpu_count"] and gpus.matches(names, line["gpu"])
    ]
    hours = sum(line["seconds"] * line["gpu_count"] for line in lines) / 3600
    if hours < MEASURED_LEAST_H:
        return None
    spent = sum(line["spent_usd"] for line in lines)
    source = f"as {count(round(hours), 'rented GPU-hour')} of your jobs cost"
    return _Rent(hour=round(spent / hours * _MICRO), source=source, quote=None)


def _usd(micro: Fraction | int) -> float:
    return round(float(micro / _MICRO), 6)


def _lines(
    purchase: machines.Purchase, rented: _Rent, hours: Fraction, result: machines.BreakEven
) -> Iterator[tuple[str, str]]:
    months = purchase.years * machines.MONTHS_PER_YEAR
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
            else f"buying pays from {_figure(least)} hours a week, {_figure(least * machines.WEEKS_PER_MONTH)} a month"
        ),
    )


def _verdict(result: machines.BreakEven) -> str:
    if result.months is None or result.hours is None:
        return "never: owning costs at least as much per month as renting, even without the purchase"
    when, cheaper = ("before", "buying") if result.pays else ("after", "renting")
    span = f"{_figure(result.months)} months or {float(result.hours):.0f} hours of use"
    return f"{span}, {when} the machine is sold: {cheaper} is cheaper"


def _month(amount: Fraction) -> str:
    return f"{dollars(_usd(amount))} a month"


def _figure(number: Fraction) -> str:
    return f"{float(number):.1f}".removesuffix(".0")


def _body(purchase: machines.Purchase, rented: _Rent, hours: Fraction, result: machines.BreakEven) -> dict[str, Any]:
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
