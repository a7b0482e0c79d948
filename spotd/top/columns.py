"""What each table shows of the daemon's answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from rich.style import Style

from spotd.top.feed import Snapshot
from spotd.top.sheet import SheetColumn
from spotd.words import (
    NOTHING,
    STATE_COLOURS,
    age_text,
    gpu_text,
    local_text,
    money,
    price,
    saved_text,
    stage_text,
    stage_word,
    verdict_text,
    where_text,
)

Row = Mapping[str, Any]

STATE_STYLES: Final = {state: Style(color=colour) for state, colour in STATE_COLOURS.items()}
_PLAIN: Final = Style()
_GREEN: Final = Style(color="green")
Now = Callable[[], str]


def job_columns(now: Now) -> Sequence[SheetColumn]:
    """Return the columns of the jobs; `now` is the daemon's clock at the newest answer."""
    return (
        SheetColumn(title="NAME", of=lambda job: job["name"], least=8),
        SheetColumn(title="STATE", of=lambda job: _state_text(job, now()), width=23, style=_state_style),
        SheetColumn(title="GPU", of=gpu_text, width=12, drop=3),
        SheetColumn(title="WHERE", of=where_text, width=18, drop=4),
        SheetColumn(title="$/H", of=lambda job: price(job["effective_usd_h"]), width=7, right=True, drop=1),
        SheetColumn(title="CEILING", of=lambda job: price(job.get("ceiling_usd_gpu_h")), width=7, right=True, drop=5),
        SheetColumn(title="SPENT", of=lambda job: money(job["spent_usd"]), width=7, right=True, drop=2),
        SheetColumn(title="SAVED", of=saved_text, width=7, right=True, drop=7),
        SheetColumn(title="CKPT", of=_checkpoint_text, width=10, drop=6),
        SheetColumn(title="AGE", of=lambda job: age_text(job["submitted_at"], now()), width=4, right=True),
    )


def machine_columns(now: Now) -> Sequence[SheetColumn]:
    """Return the columns of the machines: attempts that have not ended, each with its job."""
    return (
        SheetColumn(title="WHERE", of=lambda row: where_text(row[1]), least=10),
        SheetColumn(title="MARKET", of=lambda row: row[1]["market"], width=9, drop=4),
        SheetColumn(title="GPU", of=lambda row: gpu_text(row[1]), width=12, drop=2),
        SheetColumn(title="$/H", of=lambda row: price(row[1]["effective_usd_h"]), width=7, right=True),
        SheetColumn(title="USE", of=lambda row: _use_text(row[0]), width=4, right=True, drop=3),
        SheetColumn(title="UP", of=lambda row: age_text(row[1]["launched_at"], now()), width=4, right=True, drop=5),
        SheetColumn(title="SPENT", of=lambda row: money(row[1]["spent_usd"]), width=7, right=True, drop=6),
        SheetColumn(title="JOB", of=lambda row: row[0]["name"], width=14),
        SheetColumn(
            title="DOES",
            of=lambda row: _state_text(row[0], now()).removeprefix("STARTING "),
            width=16,
            drop=1,
            style=lambda row: _state_style(row[0]),
        ),
    )


MARKET_COLUMNS: Final = (
    SheetColumn(title="WHERE", of=where_text, least=10),
    SheetColumn(title="REGION", of=lambda quote: quote["region"], width=10, drop=4),
    SheetColumn(title="GPU", of=gpu_text, width=14),
    SheetColumn(title="MARKET", of=lambda quote: quote["market"], width=9, drop=3),
    SheetColumn(
        title="$/GPU-H",
        of=lambda quote: price(quote["effective_usd_gpu_h"]),
        width=7,
        right=True,
        style=lambda quote: _GREEN if quote["fits"] else _PLAIN,
    ),
    SheetColumn(title="$/H", of=lambda quote: price(quote["effective_usd_h"]), width=7, right=True, drop=2),
    SheetColumn(title="CEILING", of=lambda quote: price(quote["ceiling_usd_gpu_h"]), width=7, right=True, drop=1),
    SheetColumn(title="VERDICT", of=verdict_text, width=18, drop=5),
)
EVENT_COLUMNS: Final = (
    SheetColumn(title="AT", of=lambda event: local_text(event["at"])[11:], width=8),
    SheetColumn(title="JOB", of=lambda event: event["job_name"] or event["job"] or NOTHING, width=16, drop=1),
    SheetColumn(title="WHAT", of=lambda event: event["kind"], width=20, drop=2),
    SheetColumn(title="MESSAGE", of=lambda event: event["message"], least=10),
)


def machines(snapshot: Snapshot) -> Sequence[tuple[Row, Row]]:
    """Return each machine with its job."""
    return [(job, attempt) for job in snapshot.jobs for attempt in job["attempts"] if attempt["ended_at"] is None]


def sentence(view: str, item: Any, now: str) -> str:
    """Return what is to be said of the row that has the cursor."""
    if view == "machines":
        item = item[0]
    if view in {"jobs", "machines"}:
        stage = item.get("stage")
        words: str = item["verdict"] if stage is None else stage_text(stage, now)
        late = item.get("checkpoint_late", "")
        return f"{item['name']} ({item['id']}): {words}" + (f"; {late}" if late else "")
    if view == "market":
        return f"{item['offer']} at {item['provider']}: {item['verdict']}"
    return f"{local_text(item['at'])}  {item['message']}"


def _state_text(job: Row, now: str) -> str:
    stage = job.get("stage")
    return job["state"] if stage is None else f"{job['state']} {stage_word(stage, now)}"


def _state_style(job: Row) -> Style:
    return STATE_STYLES.get(job["state"], _PLAIN)


def _checkpoint_text(job: Row) -> str:
    newest = job["checkpoint"]
    if newest is None:
        return NOTHING
    return str(newest["name"]) if newest["step"] is None else str(newest["step"])


def _use_text(job: Row) -> str:
    """Return the use of the busiest GPU."""
    known = [gpu["util_pct"] for gpu in job["gpus"] if gpu["util_pct"] is not None]
    return f"{max(known):.0f}%" if known else NOTHING
