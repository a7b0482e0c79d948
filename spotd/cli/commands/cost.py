"""`cost`: receipts."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import click

from spotd import words
from spotd.cli import stderr, stdout
from spotd.cli.inputs.options import CSV, JSON, TABLE, complete_job, output, show_data
from spotd.cli.views.table import Column, state_cell
from spotd.cli.views.table import show as show_table
from spotd.client.daemon import Daemon

if TYPE_CHECKING:
    from spotd.api.schemas import costs as schemas


# Tables for a spreadsheet: CSV in which no text is taken for a formula.


_FORMULA: Final = ("=", "+", "-", "@", "\t", "\r", "|", "%", "\uff1d", "\uff0b", "\uff0d", "\uff20")
"""How a spreadsheet's formula may begin, their full-width forms with them."""
_NEXT_CELL: Final = re.compile(r"(;[\s\"']*)(?=[=+\-@\uff1d\uff0b\uff0d\uff20])")
"""Where a formula would begin in a spreadsheet whose list separator is the semicolon, as in much of Europe."""


def show(columns: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> None:
    """Print these keys of the rows, with a line of their names."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\r\n")
    writer.writerow(columns)
    writer.writerows([_cell(key, row.get(key)) for key in columns] for row in rows)
    stdout.write_bytes(text.getvalue().encode("utf-8", errors="replace"))


def _cell(key: str, value: object) -> str:
    """Return a cell: a number as it is, dollars to the micro-dollar, and text that nothing executes."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        return f"{value:.6f}" if "_usd" in key else f"{value:.3f}"
    text = _NEXT_CELL.sub(r"\1'", words.clean(str(value)))
    return f"'{text}" if text.lstrip(" \"'").startswith(_FORMULA) else text


def _attempt_on_demand(line: schemas.AttemptCostResponse) -> str:
    return words.NOTHING if line["on_demand_usd_h"] is None else words.money(line["on_demand_usd"])


_JOB_COLUMNS: Sequence[Column[schemas.ReceiptResponse]] = (
    Column("ID", lambda receipt: receipt["id"]),
    Column("NAME", lambda receipt: receipt["name"], least=8),
    Column("STATE", lambda receipt: state_cell(receipt["state"])),
    Column("SPENT", words.spent_text, right=True),
    Column("ON-DEMAND", words.on_demand_text, right=True),
    Column("SAVED", words.saved_text, right=True),
    Column("PREEMPT", lambda receipt: str(receipt["recoveries"]), right=True),
    Column("LOST", lambda receipt: words.span_text(receipt["lost_s"]), right=True),
)
_ATTEMPT_COLUMNS: Sequence[Column[schemas.AttemptCostResponse]] = (
    Column("TRY", lambda line: str(line["attempt"]), right=True),
    Column("WHERE", words.where_text, least=10),
    Column("GPU", words.gpu_text, least=6, drop=1),
    Column("MARKET", lambda line: line["market"], least=4, drop=3),
    Column("FROM", lambda line: words.local_text(line["started_at"]), drop=4),
    Column("RAN", lambda line: words.span_text(line["seconds"]), right=True),
    Column("$/H", lambda line: words.price(line["effective_usd_h"]), right=True),
    Column("SPENT", words.spent_text, right=True),
    Column("ON-DEMAND", _attempt_on_demand, right=True),
    Column("END", lambda line: line["reason"] or ("runs" if line["ended_at"] is None else words.NOTHING), least=8),
)


_GROUP_COLUMNS: Sequence[Column[schemas.CostGroupResponse]] = (
    Column(
        "MACHINES",
        lambda group: words.NOTHING if group["machines"] is None else str(group["machines"]),
        right=True,
        drop=7,
    ),
    Column("RAN", lambda group: words.span_text(group["seconds"]), right=True, drop=6),
    Column("GPU", lambda group: words.money(group["gpu_usd"]), right=True, drop=5),
    Column("DISK", lambda group: words.money(group["disk_usd"]), right=True, drop=4),
    Column("TRAFFIC", lambda group: words.money(group["traffic_usd"]), right=True, drop=4),
    Column("FEE", lambda group: words.money(group["fee_usd"]), right=True, drop=4),
    Column("FREE", lambda group: words.money(group["free_usd"]), right=True, drop=8),
    Column("BOOKED", lambda group: words.money(group["booked_usd"]), right=True, drop=3),
    Column("BILLS", lambda group: _with_sign(group["corrected_usd"]), right=True, drop=3),
    Column("SPENT", words.spent_text, right=True),
    Column("ON-DEMAND", words.on_demand_text, right=True, drop=2),
    Column("SAVED", lambda group: words.compared_text(group, group["saved_usd"]), right=True, drop=1),
)
_GROUPINGS: Final = ("job", "day", "provider", "gpu", "host")
_SUMS: Final = (
    *("machines", "seconds", "gpu_usd", "disk_usd", "traffic_usd", "fee_usd", "free_usd", "booked_usd"),
    *("corrected_usd", "spent_usd", "estimated", "uncompared_usd", "on_demand_usd", "saved_usd"),
)
_ATTEMPT_KEYS: Final = (
    *("attempt", "provider", "host", "gpu", "gpu_count", "nodes", "market", "effective_usd_h", "on_demand_usd_h"),
    *("started_at", "ended_at", "reason", "seconds", "gpu_usd", "disk_usd", "traffic_usd", "fee_usd", "free_usd"),
    *("egress_usd", "corrected_usd", "spent_usd", "estimated", "on_demand_usd", "uploaded_bytes", "restored_bytes"),
    *("kept_s", "kept_usd"),
)


_CALIBRATION_KEYS: Final = (
    *("provider", "machines", "booked_usd", "billed_usd", "fee_multiplier", "measured", "spread", "suggested"),
    "sentence",
)


@click.command()
@click.argument("ref", metavar="[JOB]", required=False, shell_complete=complete_job)
@click.option("--by", "by", type=click.Choice(_GROUPINGS), help="Add everything up by this.")
@click.option("--calibrate", is_flag=True, help="Compare providers' own bills with what was booked.")
@output(TABLE, JSON, CSV)
@click.pass_context
def cost(ctx: click.Context, *, ref: str | None, by: str | None, calibrate: bool, output: str) -> None:
    """What one job cost, attempt by attempt, or what all of them did; and what on-demand would have cost."""
    if by is not None and ref is not None:
        raise click.UsageError("--by adds all jobs up and takes no JOB", ctx)
    if calibrate:
        if by is not None or ref is not None:
            raise click.UsageError("--calibrate takes neither a JOB nor --by", ctx)
        _show_calibration(Daemon().calibration(), output)
        return
    if by is not None or (output == CSV and ref is None):
        _show_groups(Daemon().cost_by(by or "job"), output)
        return
    shape: schemas.CostResponse = Daemon().cost(ref)
    if output == CSV:
        show(("job", *_ATTEMPT_KEYS), [{"job": r["id"], **line} for r in shape["receipts"] for line in r["attempts"]])
        return
    if show_data(shape, output):
        return
    if ref is not None and len(shape["receipts"]) == 1:
        _show_receipt(shape["receipts"][0])
        return
    if not shape["receipts"]:
        stderr.note("nothing was spent yet")
    else:
        show_table(_JOB_COLUMNS, shape["receipts"])
        stdout.line("")
        if shape.get("more", 0):
            others = words.count(shape["more"], "older job" if ref is None else "job")
            stdout.line(f"{others} not shown, but in the total: spotctl cost JOB")
        stdout.line(
            f"total: spent {words.spent_words(shape)}, {_total_on_demand(shape)}"
            f"{words.count(shape['recoveries'], 'preemption')}, {_minutes(shape['lost_s'])} lost"
        )
    for stray in shape.get("strays", []):
        machines = words.count(stray["machines"], "machine")
        stdout.line(
            words.clean(f"no job: {machines} at {stray['provider']}, about {words.dollars(stray['spent_usd'])}")
        )
    _show_budgets(shape["budgets"])


def _show_groups(shape: schemas.LedgerResponse, output: str) -> None:
    by, groups = shape["by"], shape["groups"]
    if output == CSV:
        keys = (by, "name", *_SUMS) if by == "job" else (by, *_SUMS)
        show(keys, [{**group, by: group["key"]} for group in groups])
        return
    if show_data(shape, output):
        return
    if not groups:
        stderr.note("nothing was spent yet")
        return
    named: list[Column[schemas.CostGroupResponse]] = [Column(by.upper(), lambda group: group["key"], least=8)]
    if by == "job":
        named.append(Column("NAME", lambda group: group["name"], least=8))
    show_table([*named, *_GROUP_COLUMNS], [*groups, shape["total"]])


def _show_calibration(answer: Mapping[str, Any], output: str) -> None:
    """Print what the bills of each provider say of its fee, and what to write into the config."""
    rows: list[schemas.CalibrationResponse] = answer["calibration"]
    if output == CSV:
        show(_CALIBRATION_KEYS, rows)
        return
    if show_data(answer, output):
        return
    if not rows:
        stderr.note("no providers are configured")
    for row in rows:
        both = f"; {words.dollars(row['booked_usd'])} were booked and {words.dollars(row['billed_usd'])} billed"
        stdout.line(words.clean(f"{row['provider']}: {row['sentence']}{both if row['machines'] else ''}"))
    for row in rows:
        if row["suggested"] is not None:
            stdout.line("")
            stdout.line(words.clean(f"[providers.{row['provider']}]"))
            stdout.line(f"fee_multiplier = {row['suggested']:.2f}")


def _with_sign(usd: float) -> str:
    return f"+{words.money(usd)}" if usd > 0 else words.money(usd) if usd else words.NOTHING


def _show_receipt(receipt: schemas.ReceiptResponse) -> None:
    facts = [
        ("job", words.clean(f"{receipt['name']} ({receipt['id']}), {receipt['state']}")),
        ("spent", words.spent_words(receipt)
            + ("" if receipt["budget_usd"] is None else f" of {words.dollars(receipt['budget_usd'])}")),
        *_on_demand_cost(receipt),
        ("preempted", words.count(receipt["recoveries"], "time")),
        ("lost", f"{_minutes(receipt['lost_s'])} of work repeated after preemptions"),
    ]  # fmt: skip
    if receipt.get("summary"):
        facts.insert(1, ("summary", receipt["summary"]))
    facts += [("free", _free_text(line)) for line in receipt["attempts"] if line["free_usd"] > 0]
    facts += [("cost", text) for line in receipt["attempts"] if (text := _split_text(line))]
    facts += [("kept", _kept_text(line)) for line in receipt["attempts"] if line.get("kept_s", 0) > 0]
    facts += [("traffic", _traffic_text(line)) for line in receipt["attempts"] if line.get("traffic_usd", 0) > 0]
    facts += [("bill", words.clean(sentence)) for sentence in receipt.get("corrections", [])]
    facts += [("fallback", _fallback_text(one)) for one in receipt["fallbacks"]]
    stdout.write("".join(f"{key + ':':<12}{value}\n" for key, value in facts))
    if receipt["attempts"]:
        stdout.line("")
        show_table(_ATTEMPT_COLUMNS, receipt["attempts"])


def _kept_text(line: schemas.AttemptCostResponse) -> str:
    """Return how long healthy machines waited for another one, and what that cost."""
    waited, cost = words.span_text(line["kept_s"]), words.dollars(line["kept_usd"])
    return f"{waited} of attempt {line['attempt']} healthy machines waited for a lost one to be replaced, {cost} of it"


def _on_demand_cost(receipt: schemas.ReceiptResponse) -> list[tuple[str, str]]:
    """Return what on-demand would have cost, as far as that price is known."""
    saved, uncompared = receipt["saved_usd"], receipt.get("uncompared_usd", 0)
    on_demand = receipt["on_demand_usd"] - uncompared
    if receipt["state"] == "FAILED":
        return [("saved", "nothing, since it failed")]
    if uncompared and on_demand <= 0:
        return [("on demand", "not known: nothing is said of savings")]
    own, lines = receipt.get("own_saved_usd"), receipt["attempts"]
    hardware = "the same hardware" if own is None else "the same hardware, own machines as the best to rent then"
    known = (
        f"; {words.dollars(uncompared)} more was spent on hosts whose on-demand price is not known"
        if uncompared
        else ""
    )
    return [
        ("on demand", f"{words.dollars(on_demand)} for the same hours on {hardware}{known}"),
        ("saved", f"{words.dollars(saved)}{_percent(saved, on_demand)}"),
        *([] if own is None else [("own", _own_text(own, [line for line in lines if line["market"] == words.OWN]))]),
    ]


def _own_text(saved: float, lines: Sequence[schemas.AttemptCostResponse]) -> str:
    """Return where own machines ran the job, and what that saved against renting."""
    places = ", ".join(dict.fromkeys(words.where_text(line) for line in lines))
    ran = words.span_text(sum(line["seconds"] for line in lines))
    return f"{ran} on {places} saved {words.dollars(saved)} against the best machine to rent at each launch"


def _total_on_demand(shape: schemas.CostResponse) -> str:
    """Return what on-demand would have cost and what was saved, as far as that is known."""
    uncompared = shape.get("uncompared_usd", 0)
    on_demand, saved = shape["on_demand_usd"] - uncompared, shape["saved_usd"]
    if uncompared and on_demand <= 0:
        return ""
    part = f" ({words.dollars(uncompared)} of it failed or has no known on-demand price)" if uncompared else ""
    return f"on demand {words.dollars(on_demand)}, saved {words.dollars(saved)}{_percent(saved, on_demand)}{part}, "


def _free_text(line: schemas.AttemptCostResponse) -> str:
    free = words.dollars(line["free_usd"])
    return words.clean(
        f"{free} of attempt {line['attempt']}: {line['provider']} took the machine soon and bills no time of it"
    )


def _split_text(line: schemas.AttemptCostResponse) -> str:
    """Return what an attempt's cost consists of, where that is more than one thing."""
    costs = {
        "GPU": line.get("gpu_usd", 0),
        "disk while stopped": line.get("disk_usd", 0),
        "traffic": line.get("traffic_usd", 0),
        "fee": line.get("fee_usd", 0),
    }
    parts = [f"{words.dollars(usd)} {what}" for what, usd in costs.items() if usd]
    booked = line["spent_usd"] - line.get("corrected_usd", 0)
    if line.get("corrected_usd"):
        parts.append(f"{words.dollars(booked)} booked and {words.dollars(line['spent_usd'])} billed")
    return f"attempt {line['attempt']}: {', '.join(parts)}" if len(parts) > 1 else ""


def _traffic_text(line: schemas.AttemptCostResponse) -> str:
    moved = (
        f"{words.size_text(line['uploaded_bytes'])} uploaded and {words.size_text(line['restored_bytes'])} downloaded"
    )
    egress = line.get("egress_usd", 0)
    owner = f", {words.dollars(egress)} of it to the owner of the checkpoint store" if egress else ""
    return words.clean(f"{words.dollars(line['traffic_usd'])} of attempt {line['attempt']} for {moved}{owner}")


def _fallback_text(one: schemas.FallbackResponse) -> str:
    began = "afresh" if one["next"] is None else f"from {one['next']}"
    return words.clean(f"attempt {one['attempt']} began {began}: {one['name']} could not be restored ({one['reason']})")


def _minutes(seconds: float) -> str:
    """Return a loss of time in minutes, the unit of a receipt."""
    return f"{seconds / 60:.1f} minutes"


def _percent(saved: float, on_demand: float) -> str:
    return f" ({100 * saved / on_demand:.0f} %)" if on_demand > 0 else ""


def _show_budgets(budgets: Sequence[schemas.BudgetResponse]) -> None:
    for budget in budgets:
        if budget["limit"] is None:
            continue
        if budget["name"] == "machines":
            text = f"{budget['used']:.0f} of {budget['limit']:.0f}"
        else:
            used, limit, committed = (words.dollars(budget[key]) for key in ("used", "limit", "committed"))
            text = f"{used} of {limit}, {committed} more committed"
        stdout.line(words.clean(f"budget {budget['name']}: {text}"))
