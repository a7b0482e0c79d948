"""The plan of a job, as a person reads it before money is spent."""

from __future__ import annotations

from typing import TYPE_CHECKING

from spotd.cli.commands.jobs import gpu_text, where_text
from spotd.cli.table import Cell, Column, Row
from spotd.cli.table import text as table_text
from spotd.cli.words import clean, dollars, local_text, price, size_text

if TYPE_CHECKING:
    from spotd.api.schemas.plans import PlanResponse, ResumeSourceResponse
    from spotd.api.schemas.prices import QuoteResponse

_COLUMNS = (
    Column(title="WHERE", least=8),
    Column(title="GPU", least=6),
    Column(title="MARKET", least=4, drop=1),
    Column(title="GPU$/H", right=True),
    Column(title="+DISK", right=True),
    Column(title="+FEE", right=True),
    Column(title="+TRAFFIC", right=True),
    Column(title="=$/H", right=True),
    Column(title="$/GPU-H", right=True),
    Column(title="BID", right=True, drop=2),
    Column(title="CEILING", right=True),
    Column(title="VERDICT", least=8),
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
        ("resume", _origin_text(plan["resume_from"])),
    ]
    lines = [f"{clean(plan['name'])}: {clean(plan['run'])}"]
    lines += [f"  {key:<8}{clean(value)}" for key, value in facts if value]
    lines.append("")
    text = "\n".join(lines) + "\n"
    if plan["candidates"]:
        rows = [_row(quote) for quote in plan["candidates"]]
        text += table_text(_COLUMNS, rows, drawn_for=drawn_for, colour=colour) + "\n"
    tail = [f"{row['offers']} offers passed over: {row['reason']}" for row in plan["passed_over"]]
    for provider_offers in plan["boards"]:
        if provider_offers["error"]:
            since = "" if provider_offers["at"] is None else f" since {local_text(provider_offers['at'])}"
            tail.append(f"no prices from {provider_offers['provider']}{since}: {provider_offers['error']}")
    tail += [f"warning: {sentence}" for sentence in plan["warnings"]]
    tail.append(f"verdict: {plan['verdict']}")
    return text + "".join(f"{clean(line)}\n" for line in tail)


def _origin_text(origin: ResumeSourceResponse | None) -> str:
    return "" if origin is None else f"from {origin['name']} ({size_text(origin['bytes'])}) of job {origin['job']}"


def _row(quote: QuoteResponse) -> Row:
    terms = quote["breakdown"]
    return (
        where_text(quote),
        gpu_text(quote),
        quote["market"],
        price(terms["gpu_usd_h"]),
        price(terms["storage_usd_h"]),
        price(terms["fee_usd_h"]),
        price(terms["upload_usd_h"] + terms["restore_usd_h"]),
        price(terms["total_usd_h"]),
        Cell(price(terms["per_gpu_usd_h"]), "green" if quote["fits"] else ""),
        price(quote["bid_usd_gpu_h"]),
        price(quote["ceiling_usd_gpu_h"]),
        quote["verdict"],
    )
