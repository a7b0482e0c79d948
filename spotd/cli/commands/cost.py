"""`cost`: receipts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from spotd.cli import stderr, stdout
from spotd.cli.options import JSON, TABLE, output, show_data
from spotd.cli.table import Column, state_cell
from spotd.cli.table import show as show_table
from spotd.cli.words import (
    NOTHING,
    clean,
    count,
    dollars,
    gpu_text,
    local_text,
    money,
    price,
    size_text,
    span_text,
    where_text,
)
from spotd.client.daemon import Daemon

if TYPE_CHECKING:
    from spotd.api.schemas.costs import (
        AttemptCostResponse,
        BudgetResponse,
        CostResponse,
        FallbackResponse,
        ReceiptResponse,
    )

_JOB_COLUMNS: Sequence[Column[ReceiptResponse]] = (
    Column("ID", lambda receipt: receipt["id"]),
    Column("NAME", lambda receipt: receipt["name"], least=8),
    Column("STATE", lambda receipt: state_cell(receipt["state"])),
    Column("SPENT", lambda receipt: money(receipt["spent_usd"]), right=True),
    Column("ON-DEMAND", lambda receipt: money(receipt["on_demand_usd"]), right=True),
    Column("SAVED", lambda receipt: money(receipt["saved_usd"]), right=True),
    Column("RECOV", lambda receipt: str(receipt["recoveries"]), right=True),
    Column("LOST", lambda receipt: span_text(receipt["lost_s"]), right=True),
)
_ATTEMPT_COLUMNS: Sequence[Column[AttemptCostResponse]] = (
    Column("TRY", lambda line: str(line["attempt"]), right=True),
    Column("WHERE", where_text, least=10),
    Column("GPU", gpu_text, least=6, drop=1),
    Column("MARKET", lambda line: line["market"], least=4, drop=3),
    Column("FROM", lambda line: local_text(line["started_at"]), drop=4),
    Column("RAN", lambda line: span_text(line["seconds"]), right=True),
    Column("$/H", lambda line: price(line["effective_usd_h"]), right=True),
    Column("SPENT", lambda line: money(line["spent_usd"]), right=True),
    Column("ON-DEMAND", lambda line: money(line["on_demand_usd"]), right=True),
    Column("END", lambda line: line["reason"] or ("runs" if line["ended_at"] is None else NOTHING), least=8),
)


@click.command()
@click.argument("ref", metavar="[JOB]", required=False)
@output(TABLE, JSON)
def cost(*, ref: str | None, output: str) -> None:
    """What one job cost, attempt by attempt, or what all of them did; and what on-demand would have cost."""
    shape: CostResponse = Daemon().cost(ref)
    if show_data(shape, output):
        return
    if ref is not None and shape["receipts"]:
        _show_receipt(shape["receipts"][0])
        return
    if not shape["receipts"]:
        stderr.note("nothing was spent yet")
    else:
        show_table(_JOB_COLUMNS, shape["receipts"])
        stdout.line("")
        if shape.get("more", 0):
            older = count(shape["more"], "older job")
            stdout.line(f"{older} not shown, but in the total: spotctl cost JOB")
        stdout.line(
            f"total: spent {dollars(shape['spent_usd'])}, on demand {dollars(shape['on_demand_usd'])}, "
            f"saved {dollars(shape['saved_usd'])}{_percent(shape['saved_usd'], shape['on_demand_usd'])}, "
            f"{count(shape['recoveries'], 'recovery')}, {_minutes(shape['lost_s'])} lost"
        )
    for stray in shape.get("strays", []):
        machines = count(stray["machines"], "machine")
        stdout.line(clean(f"no job: {machines} at {stray['provider']}, about {dollars(stray['spent_usd'])}"))
    _show_budgets(shape["budgets"])


def _show_receipt(receipt: ReceiptResponse) -> None:
    """Print the receipt of one job."""
    facts = [
        ("job", clean(f"{receipt['name']} ({receipt['id']}), {receipt['state']}")),
        ("spent", dollars(receipt["spent_usd"])
            + ("" if receipt["budget_usd"] is None else f" of {dollars(receipt['budget_usd'])}")),
        *_compared(receipt),
        ("recoveries", str(receipt["recoveries"])),
        ("lost", f"{_minutes(receipt['lost_s'])} of work repeated after losses"),
    ]  # fmt: skip
    if receipt.get("summary"):
        facts.insert(1, ("summary", receipt["summary"]))
    facts += [("free", _free_text(line)) for line in receipt["attempts"] if line["free_usd"] > 0]
    facts += [("traffic", _traffic_text(line)) for line in receipt["attempts"] if line.get("traffic_usd", 0) > 0]
    facts += [("bill", clean(sentence)) for sentence in receipt.get("corrections", [])]
    facts += [("fallback", _fallback_text(one)) for one in receipt["fallbacks"]]
    stdout.write("".join(f"{key + ':':<12}{value}\n" for key, value in facts))
    if receipt["attempts"]:
        stdout.line("")
        show_table(_ATTEMPT_COLUMNS, receipt["attempts"])


def _compared(receipt: ReceiptResponse) -> list[tuple[str, str]]:
    """Return what on-demand would have cost, as far as that price is known."""
    saved, uncompared = receipt["saved_usd"], receipt.get("uncompared_usd", 0)
    on_demand = receipt["on_demand_usd"] - uncompared
    if uncompared and on_demand <= 0:
        return [("on demand", "not known: nothing is said of savings")]
    known = f"; {dollars(uncompared)} more was spent on hosts whose on-demand price is not known" if uncompared else ""
    return [
        ("on demand", f"{dollars(on_demand)} for the same hours on the same hardware{known}"),
        ("saved", f"{dollars(saved)}{_percent(saved, on_demand)}"),
    ]


def _free_text(line: AttemptCostResponse) -> str:
    free = dollars(line["free_usd"])
    return clean(
        f"{free} of attempt {line['attempt']}: {line['provider']} took the machine soon and bills no time of it"
    )


def _traffic_text(line: AttemptCostResponse) -> str:
    moved = f"{size_text(line['uploaded_bytes'])} uploaded and {size_text(line['restored_bytes'])} restored"
    return clean(f"{dollars(line['traffic_usd'])} of attempt {line['attempt']} for {moved}")


def _fallback_text(one: FallbackResponse) -> str:
    began = "afresh" if one["next"] is None else f"from {one['next']}"
    return clean(f"attempt {one['attempt']} began {began}: {one['name']} could not be restored ({one['reason']})")


def _minutes(seconds: float) -> str:
    """Return a loss of time in minutes, the unit of a receipt."""
    return f"{seconds / 60:.1f} minutes"


def _percent(saved: float, on_demand: float) -> str:
    return f" ({100 * saved / on_demand:.0f} %)" if on_demand > 0 else ""


def _show_budgets(budgets: Sequence[BudgetResponse]) -> None:
    for budget in budgets:
        if budget["limit"] is None:
            continue
        if budget["name"] == "machines":
            text = f"{budget['used']:.0f} of {budget['limit']:.0f}"
        else:
            used, limit, committed = (dollars(budget[key]) for key in ("used", "limit", "committed"))
            text = f"{used} of {limit}, {committed} more committed"
        stdout.line(clean(f"budget {budget['name']}: {text}"))
