"""`cost`: receipts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from spotd.cli import stderr, stdout
from spotd.cli.commands.jobs import gpu_text, where_text
from spotd.cli.options import JSON, TABLE, output
from spotd.cli.table import Column, Row, state_cell
from spotd.cli.table import show as show_table
from spotd.cli.words import NOTHING, clean, count, dollars, local_text, money, price, size_text, span_text
from spotd.client.daemon import Daemon

if TYPE_CHECKING:
    from spotd.api.schemas.costs import (
        AttemptCostResponse,
        BudgetResponse,
        CostResponse,
        FallbackResponse,
        ReceiptResponse,
    )

_JOB_COLUMNS = (
    Column(title="ID"),
    Column(title="NAME", least=8),
    Column(title="STATE"),
    Column(title="SPENT", right=True),
    Column(title="ON-DEMAND", right=True),
    Column(title="SAVED", right=True),
    Column(title="RECOV", right=True),
    Column(title="LOST", right=True),
)
_ATTEMPT_COLUMNS = (
    Column(title="TRY", right=True),
    Column(title="WHERE", least=10),
    Column(title="GPU", least=6, drop=1),
    Column(title="MARKET", least=4, drop=3),
    Column(title="FROM", drop=4),
    Column(title="RAN", right=True),
    Column(title="$/H", right=True),
    Column(title="SPENT", right=True),
    Column(title="ON-DEMAND", right=True),
    Column(title="END", least=8),
)


@click.command()
@click.argument("ref", metavar="[JOB]", required=False)
@output(TABLE, JSON)
def cost(*, ref: str | None, output: str) -> None:
    """What one job cost, attempt by attempt, or what all of them did; and what on-demand would have cost."""
    answer = Daemon().cost(ref)
    if output == JSON:
        stdout.document(answer)
        return
    shape: CostResponse = answer  # type: ignore[assignment]  # the answer is the shape plus `schema` and `now`
    if ref is not None and shape["receipts"]:
        show_receipt(shape["receipts"][0])
        return
    if not shape["receipts"]:
        stderr.note("nothing was spent yet")
    else:
        show_table(_JOB_COLUMNS, [_job_row(receipt) for receipt in shape["receipts"]])
        stdout.line("")
        if shape.get("more", 0):
            older = count(shape["more"], "older job")
            stdout.line(f"{older} not shown, but in the total: spotctl cost JOB")
        stdout.line(
            f"total: spent {dollars(shape['spent_usd'])}, on demand {dollars(shape['on_demand_usd'])}, "
            f"saved {dollars(shape['saved_usd'])}{_percent(shape['saved_usd'], shape['on_demand_usd'])}, "
            f"{count(shape['recoveries'], 'recovery')}, {minutes(shape['lost_s'])} lost"
        )
    for stray in shape.get("strays", []):
        machines = count(stray["machines"], "machine")
        stdout.line(clean(f"no job: {machines} at {stray['provider']}, about {dollars(stray['spent_usd'])}"))
    _show_budgets(shape["budgets"])


def show_receipt(receipt: ReceiptResponse) -> None:
    """Print the receipt of one job."""
    saved, on_demand = receipt["saved_usd"], receipt["on_demand_usd"]
    facts = [
        ("job", clean(f"{receipt['name']} ({receipt['id']}), {receipt['state']}")),
        ("spent", dollars(receipt["spent_usd"])
            + ("" if receipt["budget_usd"] is None else f" of {dollars(receipt['budget_usd'])}")),
        ("on demand", f"{dollars(on_demand)} for the same hours on the same hardware"),
        ("saved", f"{dollars(saved)}{_percent(saved, on_demand)}"),
        ("recoveries", str(receipt["recoveries"])),
        ("lost", f"{minutes(receipt['lost_s'])} of work repeated after losses"),
    ]  # fmt: skip
    facts += [("free", _free_text(line)) for line in receipt["attempts"] if line["free_usd"] > 0]
    facts += [("traffic", _traffic_text(line)) for line in receipt["attempts"] if line.get("traffic_usd", 0) > 0]
    facts += [("bill", clean(sentence)) for sentence in receipt.get("corrections", [])]
    facts += [("fallback", _fallback_text(one)) for one in receipt["fallbacks"]]
    stdout.write("".join(f"{key + ':':<12}{value}\n" for key, value in facts))
    if receipt["attempts"]:
        stdout.line("")
        show_table(
            _ATTEMPT_COLUMNS,
            [
                (
                    str(line["attempt"]),
                    where_text(line),
                    gpu_text(line),
                    line["market"],
                    local_text(line["started_at"]),
                    _ran(line),
                    price(line["effective_usd_h"]),
                    money(line["spent_usd"]),
                    money(line["on_demand_usd"]),
                    line["reason"] or ("runs" if line["ended_at"] is None else NOTHING),
                )
                for line in receipt["attempts"]
            ],
        )


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


def _ran(line: AttemptCostResponse) -> str:
    return span_text(line["seconds"])


def minutes(seconds: float) -> str:
    """Return a loss of time in minutes, the unit of a receipt."""
    return f"{seconds / 60:.1f} minutes"


def _percent(saved: float, on_demand: float) -> str:
    return f" ({100 * saved / on_demand:.0f} %)" if on_demand > 0 else ""


def _job_row(receipt: ReceiptResponse) -> Row:
    return (
        receipt["id"],
        receipt["name"],
        state_cell(receipt["state"]),
        money(receipt["spent_usd"]),
        money(receipt["on_demand_usd"]),
        money(receipt["saved_usd"]),
        str(receipt["recoveries"]),
        span_text(receipt["lost_s"]),
    )


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
