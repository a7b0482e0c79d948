"""A model's memory as a person reads it, and as JSON."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from fractions import Fraction
from itertools import groupby
from typing import TYPE_CHECKING, Any, Final

from spotd.cli import stderr, stdout
from spotd.cli.inputs.options import Parsed
from spotd.cli.views.table import Column
from spotd.cli.views.table import show as show_table
from spotd.estimates import machines, workload
from spotd.estimates.memory import MemoryParts, trained_params
from spotd.words import clean, count, gpu_text, price, where_text
from spotd_jobs.spec.units import parse_money, parse_price
from spotd_providers.contract.gpus import GpuInfo, UnknownGpu, gpu_info, resolve

if TYPE_CHECKING:
    from spotd.api.schemas.costs import QuoteResponse


GB: Final = 10**9
SCHEMA: Final = 1
_GPUS_SHOWN: Final = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class CheapMachine:
    """A machine that is offered now and holds the work."""

    quote: QuoteResponse
    needed: int
    usable: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizing:
    """Everything that was found; `silence` is why there are no prices, or empty."""

    source: str
    model: workload.Architecture
    work: workload.Workload
    layout: workload.Layout
    parts: MemoryParts
    rule: machines.RuleOfThumb
    headroom: Fraction
    fits: Sequence[machines.GpuFit]
    cheapest: Sequence[CheapMachine]
    silence: str


def cheapest_rows(
    needs: machines.MemoryNeeds, precision: workload.Precision, quotes: Iterable[QuoteResponse], wanted: Collection[str]
) -> Iterator[CheapMachine]:
    """Yield the machines that hold the work, the cheapest hour of the whole machine first."""
    for quote in sorted(quotes, key=lambda quote: quote["effective_usd_h"]):
        rows = _rows(quote["gpu"])
        if not rows or not all(gpu.name in wanted and machines.can_compute(gpu, precision) for gpu in rows):
            continue
        vram = quote["gpu_vram_gb"]
        usable = min(map(machines.nominal_bytes, rows)) if vram is None else machines.reported_bytes(vram * 1000)
        needed = needs.bytes_for(quote["gpu_count"])
        if needed is not None and needed <= usable:
            yield CheapMachine(quote=quote, needed=needed, usable=usable)


def show(sizing: Sizing) -> None:
    """Print the model, its memory part by part, the GPUs that hold it and the cheapest machines."""
    stdout.write("".join(f"{key:<15}{clean(text)}\n" for key, text in _facts(sizing)) + "\n")
    show_table(_PART_COLUMNS, _part_rows(sizing))
    stdout.write("\n" + "".join(f"{key:<15}{clean(text)}\n" for key, text in _judgement(sizing)) + "\n")
    rows = _fit_rows(sizing.fits)
    if rows:
        show_table(_FIT_COLUMNS, rows)
    else:
        stderr.note(
            f"none of these GPUs holds it on up to {machines.CARDS_MAX} cards of one machine; less is needed with a"
            " smaller --batch or --sequence, --chunked-loss, --qlora, --sharding zero3 or --tp"
        )
    if sizing.cheapest:
        stdout.line("")
        show_table(_CHEAP_COLUMNS, sizing.cheapest)
    elif not sizing.silence:
        stderr.note("no machine that is offered now holds it")


@dataclass(frozen=True, slots=True)
class _Part:
    name: str
    size: int
    meaning: str


_PART_COLUMNS: Sequence[Column[_Part]] = (
    Column("PART", lambda part: part.name),
    Column("BYTES", lambda part: str(part.size), right=True, drop=2),
    Column("GB", lambda part: f"{part.size / GB:.2f}", right=True),
    Column("GiB", lambda part: f"{part.size / machines.GIB:.2f}", right=True),
    Column("WHAT", lambda part: part.meaning, least=8, drop=1),
)


def _part_rows(sizing: Sizing) -> list[_Part]:
    sizes: dict[str, int] = asdict(sizing.parts)
    meanings = _meanings(sizing.work)
    rows = [_Part(name, size, meanings[name]) for name, size in sizes.items() if size]
    where = "one card" if sizing.layout.cards == 1 else f"each of {sizing.layout.cards} cards"
    return [*rows, _Part("total", sizing.parts.total, where)]


def _rows(name: str) -> Sequence[GpuInfo]:
    """Return the cards that a quote's name may be: several where it leaves the form open."""
    try:
        names = resolve(name)
    except UnknownGpu:
        return ()
    return [gpu for gpu in map(gpu_info, names) if gpu is not None]


def _meanings(work: workload.Workload) -> Mapping[str, str]:
    training = work.training
    return {
        "weights": "of the model" if work.lora is None else "of the model and its adapters",
        "gradients": "of what is trained",
        "master": "32-bit copy of what is trained",
        "optimizer": f"states of {work.optimizer}",
        "activations": "kept for the backward pass" if training else "of one layer, while a prompt is read",
        "logits": "scores of the vocabulary, and their loss" if training else "scores of the vocabulary",
        "cache": "keys and values of all tokens",
        "gathered": "layers gathered from other cards, and buffers",
        "runtime": "CUDA's context, NCCL, and what the allocator wastes",
    }


def _facts(sizing: Sizing) -> Iterator[tuple[str, str]]:
    model, work, layout = sizing.model, sizing.work, sizing.layout
    active = "" if model.active_params == model.params else f", {_number(model.active_params)} of them active"
    yield "model:", f"{_number(model.params)} parameters{active}; {_shape(model)}"
    yield "work:", _work_text(model, work)
    yield "batch:", f"{work.batch} x {work.sequence} tokens, {_layout_text(layout)}"


def _shape(model: workload.Architecture) -> str:
    shape = f"{count(model.layers, 'layer')} of {model.hidden}"
    return f"assumed: {shape}" if model.family == "typical" else f"{model.family}, {shape}"


def _work_text(model: workload.Architecture, work: workload.Workload) -> str:
    if not work.training:
        return f"inference, {work.precision}"
    what = "training of all weights"
    if work.lora is not None:
        what = f"adapters of rank {work.lora.rank} ({_number(trained_params(model, work))} parameters)"
    return f"{what}, {work.precision}, {work.optimizer}, checkpointing {work.recompute}"


def _layout_text(layout: workload.Layout) -> str:
    if layout.cards == 1:
        return "1 card"
    parts = [f"{layout.data} replicas" if layout.data > 1 else ""]
    parts += [f"tensor parallel {layout.tensor}" if layout.tensor > 1 else ""]
    parts += [f"{layout.pipeline} stages" if layout.pipeline > 1 else ""]
    parts += [f"zero{layout.stage}" if layout.stage and layout.data > 1 else ""]
    return f"{layout.cards} cards: {', '.join(part for part in parts if part)}"


def _judgement(sizing: Sizing) -> Iterator[tuple[str, str]]:
    yield "rule of thumb:", f"{sizing.rule.total / GB:.1f} GB for all cards together ({sizing.rule.rule})"
    kind = workload.work_kind(sizing.work, sizing.layout)
    known = workload.KNOWN_ERRORS.get(kind)
    if known is None:
        yield "known error:", f"none: no published measurements of {kind}"
    else:
        span = f"from {_side(known.low)} to {_side(known.high)} what was measured"
        yield "known error:", f"{span}, {known.mean} % on average (the rule of thumb: {known.rule_mean} %)"
        yield "", f"over {known.figures} published figures of {kind}"
    yield "needs/card:", f"with {float(sizing.headroom):g} % of headroom; GB are 10^9 bytes"


def _side(percent: int) -> str:
    return f"{abs(percent)} % {'below' if percent < 0 else 'above'}"


@dataclass(frozen=True, slots=True)
class _FitRow:
    vram_gb: int
    cards: int
    needed: int
    usable: int
    names: tuple[str, ...]


_FIT_COLUMNS: Sequence[Column[_FitRow]] = (
    Column("CARDS", lambda row: str(row.cards), right=True),
    Column("OF", lambda row: f"{row.vram_gb} GB", right=True),
    Column("NEEDS/CARD", lambda row: f"{row.needed / GB:.1f} GB", right=True),
    Column("USABLE", lambda row: f"{row.usable / GB:.1f} GB", right=True),
    Column("GPUS", lambda row: _names(row.names), least=12),
)


def _fit_rows(fits: Sequence[machines.GpuFit]) -> list[_FitRow]:
    """Return one row for each size of card."""
    rows = []
    by_size = sorted(fits, key=lambda fit: (fit.cards * fit.usable, fit.gpu.vram_gb[0], fit.cards))
    for (vram, cards, needed, usable), group in groupby(
        by_size, key=lambda fit: (fit.gpu.vram_gb[0], fit.cards, fit.needed, fit.usable)
    ):
        rows.append(_FitRow(vram, cards, needed, usable, tuple(fit.gpu.name for fit in group)))
    return rows


def _names(names: Sequence[str]) -> str:
    more = len(names) - _GPUS_SHOWN
    return ", ".join(names[:_GPUS_SHOWN]) + (f" and {more} more" if more > 0 else "")


_CHEAP_COLUMNS: Sequence[Column[CheapMachine]] = (
    Column("WHERE", lambda row: where_text(row.quote), least=10),
    Column("GPU", lambda row: gpu_text(row.quote), least=6),
    Column("MARKET", lambda row: row.quote["market"], least=4, drop=2),
    Column("NEEDS/CARD", lambda row: f"{row.needed / GB:.1f} GB", right=True, drop=3),
    Column("USABLE", lambda row: f"{row.usable / GB:.1f} GB", right=True, drop=4),
    Column("$/GPU-H", lambda row: price(row.quote["effective_usd_gpu_h"]), right=True),
    Column("$/H", lambda row: price(row.quote["effective_usd_h"]), right=True),
    Column("VERDICT", lambda row: row.quote["verdict"], least=8),
)


def _number(params: int) -> str:
    for factor, word in ((10**12, "T"), (10**9, "B"), (10**6, "M")):
        if params >= factor:
            return f"{params / factor:.3g}{word}" if params < 1000 * factor else f"{params / factor:.0f}{word}"
    return str(params)


def document(sizing: Sizing) -> None:
    """Print everything as JSON; sizes are whole bytes."""
    work, layout, model = sizing.work, sizing.layout, sizing.model
    kind = workload.work_kind(work, layout)
    known = workload.KNOWN_ERRORS.get(kind)
    body: dict[str, Any] = {
        "schema": SCHEMA,
        "now": datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z"),
        "model": {
            "source": sizing.source,
            "family": model.family,
            "assumed": model.family == "typical",
            "params": model.params,
            "active_params": model.active_params,
            "trained_params": trained_params(model, work),
            "layers": model.layers,
            "hidden": model.hidden,
        },
        "work": {
            "training": work.training,
            "precision": work.precision.value,
            "optimizer": work.optimizer.value if work.training else None,
            "lora_rank": None if work.lora is None else work.lora.rank,
            "checkpointing": work.recompute.value if work.training else None,
            "batch": work.batch,
            "sequence": work.sequence,
        },
        "layout": {
            "cards": layout.cards,
            "data": layout.data,
            "tensor": layout.tensor,
            "pipeline": layout.pipeline,
            "zero_stage": layout.stage,
        },
        "card_bytes": {**asdict(sizing.parts), "total": sizing.parts.total},
        "all_cards_bytes": sizing.parts.total * layout.cards,
        "rule_of_thumb": {"all_cards_bytes": sizing.rule.total, "rule": sizing.rule.rule},
        "known_error": {"kind": kind.value, **({} if known is None else asdict(known))},
        "headroom_percent": float(sizing.headroom),
        "gpus": [
            {
                "gpu": fit.gpu.name,
                "vram_gb": fit.gpu.vram_gb[0],
                "cards": fit.cards,
                "needed_bytes": fit.needed,
                "usable_bytes": fit.usable,
            }
            for fit in sizing.fits
        ],
        "cheapest": [
            {"quote": row.quote, "needed_bytes": row.needed, "usable_bytes": row.usable} for row in sizing.cheapest
        ],
        "prices_error": sizing.silence,
    }
    stdout.document(body)


# Figures on the command line: parameters, watts, money, shares.


PARAMS = Parsed("params", workload.parse_params)
MONEY = Parsed("dollars", parse_money)
RENT = Parsed("price", parse_price)
