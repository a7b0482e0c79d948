"""The plan of a job, as a person reads it before money is spent."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from spotd.cli.views.table import Column, per_gpu_cell
from spotd.cli.views.table import text as table_text
from spotd.words import (
    clean,
    count,
    dollars,
    folded,
    gpu_text,
    price,
    silence_texts,
    size_text,
    verdict_text,
    where_text,
)

if TYPE_CHECKING:
    from spotd.api.schemas.plans import PlannedDataResponse, PlanResponse, ResumeSourceResponse
    from spotd.api.schemas.prices import QuoteResponse

_COLUMNS: Sequence[Column[QuoteResponse]] = (
    Column("WHERE", where_text, least=8),
    Column("GPU", gpu_text, least=6),
    Column("MARKET", lambda quote: quote["market"], least=4, drop=3),
    Column("GPU$/H", lambda quote: price(quote["breakdown"]["gpu_usd_h"]), right=True, drop=4),
    Column("+DISK", lambda quote: price(quote["breakdown"]["storage_usd_h"]), right=True, drop=6),
    Column("+FEE", lambda quote: price(quote["breakdown"]["fee_usd_h"]), right=True, drop=7),
    Column("+TRAFFIC", lambda quote: price(_traffic_usd_h(quote)), right=True, drop=8),
    Column("=$/H", lambda quote: price(quote["breakdown"]["total_usd_h"]), right=True, drop=2),
    Column("$/GPU-H", per_gpu_cell, right=True),
    Column("BID", lambda quote: price(quote["bid_usd_gpu_h"]), right=True, drop=9),
    Column("CEILING", lambda quote: price(quote["ceiling_usd_gpu_h"]), right=True, drop=1),
    Column("VERDICT", verdict_text, least=8),
)


def plan_text(plan: PlanResponse, *, drawn_for: int | None, colour: bool) -> str:
    """Return the whole plan, ending in its verdict."""
    ceilings = ", ".join(f"{gpu} ${price(usd)}" for gpu, usd in plan["ceilings"].items())
    facts = [
        ("image", plan["image"]),
        ("code", plan["workdir"] or "none: nothing of this folder travels (--workdir . packs it)"),
        ("ceiling", f"{ceilings} per GPU-hour" if ceilings else "none set"),
        ("budget", "" if plan["budget_usd"] is None else f"{dollars(plan['budget_usd'])} for the whole job"),
        ("secrets", ", ".join(plan["secrets"])),
        *(("data", _data_text(one)) for one in plan.get("data", [])),
        ("", plan.get("data_cost", "")),
        ("resume", _origin_text(plan["resume_from"])),
    ]
    lines = [f"{clean(plan['name'])}: {clean(plan['run'])}"]
    lines += [f"  {key:<8}{clean(value)}" for key, value in facts if value]
    text = _fitted(lines, drawn_for, 10) + "\n"
    if plan["candidates"]:
        text += table_text(_COLUMNS, plan["candidates"], drawn_for=drawn_for, colour=colour) + "\n"
    tail = [f"{count(row['offers'], 'offer')} passed over: {row['reason']}" for row in plan["passed_over"]]
    tail += [f"cost: {sentence}" for sentence in plan.get("costs", [])]
    tail += silence_texts(plan)
    tail += [f"warning: {sentence}" for sentence in plan["warnings"]]
    tail.append(f"verdict: {plan['verdict']}")
    return text + _fitted(map(clean, tail), drawn_for, 2)


def _fitted(lines: Iterable[str], room: int | None, indent: int) -> str:
    return "".join(f"{line if room is None else folded(line, room, indent)}\n" for line in lines)


def _origin_text(origin: ResumeSourceResponse | None) -> str:
    return "" if origin is None else f"from {origin['name']} ({size_text(origin['bytes'])}) of job {origin['job']}"


def _data_text(one: PlannedDataResponse) -> str:
    return f"{one['source']}: {size_text(one['bytes'])}, {count(one['files'], 'file')}, at {one['path']}"


def _traffic_usd_h(quote: QuoteResponse) -> float:
    return quote["breakdown"]["upload_usd_h"] + quote["breakdown"]["restore_usd_h"]
