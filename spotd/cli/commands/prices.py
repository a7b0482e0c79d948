"""`prices`: what can be had now, at its effective price."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from spotd.cli import stderr
from spotd.cli.inputs.options import ID, JSON, TABLE, output, show_data
from spotd.cli.views.table import Column, per_gpu_cell
from spotd.cli.views.table import show as show_table
from spotd.client.daemon import Daemon
from spotd.words import WITHOUT_CEILING, clean, count, gpu_text, price, silence_texts, verdict_text, where_text

if TYPE_CHECKING:
    from spotd.api.schemas.prices import QuoteResponse


def ceiling_note(quotes: Sequence[QuoteResponse]) -> str:
    """Return a sentence on the GPUs among the quotes for which no ceiling is set; empty if there are none."""
    names = list(dict.fromkeys(clean(quote["gpu"]) for quote in quotes if quote["verdict"] == WITHOUT_CEILING))
    if not names:
        return ""
    some = ", ".join(names[:GPUS_NAMED_MAX]) + (
        f" and {count(len(names) - GPUS_NAMED_MAX, 'other GPU')}" if len(names) > GPUS_NAMED_MAX else ""
    )
    return f"no ceiling applies to {some}: set [ceilings] in the configuration, or give a job a max_price"


QUOTE_COLUMNS: Sequence[Column[QuoteResponse]] = (
    Column("WHERE", where_text, least=10),
    Column("REGION", lambda quote: quote["region"], least=6, drop=4),
    Column("GPU", gpu_text, least=6),
    Column("MARKET", lambda quote: quote["market"], least=9),
    Column("$/GPU-H", per_gpu_cell, right=True),
    Column("$/H", lambda quote: price(quote["effective_usd_h"]), right=True, drop=3),
    Column("ON-DEMAND", lambda quote: price(quote["on_demand_usd_h"]), right=True, drop=5),
    Column("CEILING", lambda quote: price(quote["ceiling_usd_gpu_h"]), right=True, drop=2),
    Column("VERDICT", verdict_text, least=8),
)
EXPLAIN_COLUMNS: Sequence[Column[QuoteResponse]] = (
    Column("WHERE", where_text, least=8),
    Column("GPU", gpu_text, least=6),
    Column("MARKET", lambda quote: quote["market"], least=4, drop=3),
    Column("GPU$/H", lambda quote: price(quote["breakdown"]["gpu_usd_h"]), right=True, drop=2),
    Column("+STORAGE", lambda quote: price(quote["breakdown"]["storage_usd_h"]), right=True, drop=4),
    Column("+FEE", lambda quote: price(quote["breakdown"]["fee_usd_h"]), right=True, drop=5),
    Column("(FEE X)", lambda quote: f"{quote['breakdown']['fee_multiplier']:.2f}", right=True, drop=9),
    Column("+UPLOAD", lambda quote: price(quote["breakdown"]["upload_usd_h"]), right=True, drop=6),
    Column("+RESTORE", lambda quote: price(quote["breakdown"]["restore_usd_h"]), right=True, drop=7),
    Column("=$/H", lambda quote: price(quote["breakdown"]["total_usd_h"]), right=True),
    Column("$/GPU-H", per_gpu_cell, right=True),
    Column("BID", lambda quote: price(quote["bid_usd_gpu_h"]), right=True, drop=8),
    Column("CEILING", lambda quote: price(quote["ceiling_usd_gpu_h"]), right=True, drop=1),
)
GPUS_NAMED_MAX = 5
FORMULA = "$/H of the whole machine = fee multiplier x (gpu + disk GB x storage price / 720) + upload + restore traffic"

RANKING = (
    "a job takes the machine with the lowest $/H x (1 + preemptions per hour x hours that one costs) / speed for it;"
    " --job JOB states that with figures"
)


@click.command()
@click.option("--gpu", metavar="NAME", help="Only this GPU, in any usual spelling.")
@click.option("--provider", metavar="NAME", help="Only this provider.")
@click.option("--explain", is_flag=True, help="Show every term of the effective price.")
@click.option("--job", metavar="JOB", help="With what finishing this job is expected to cost.")
@click.option("-n", "--limit", type=click.IntRange(1, 100_000), default=50, show_default=True, help="At most so many.")
@output(TABLE, JSON, ID)
def prices(*, gpu: str | None, provider: str | None, explain: bool, job: str | None, limit: int, output: str) -> None:
    """Effective prices now, the cheapest GPU-hour first. All prices are dollars."""
    answer = Daemon().prices({"gpu": gpu, "provider": provider, "job": job, "limit": limit})
    quotes: list[QuoteResponse] = answer["quotes"]
    if show_data(answer, output, [f"{quote['provider']}/{quote['offer']}" for quote in quotes]):
        return
    if not quotes:
        stderr.note(f"nothing is offered{f' for {gpu}' if gpu else ''} now")
    elif explain:
        stderr.note(FORMULA)
        if job is None:
            stderr.note(RANKING)
        show_table(EXPLAIN_COLUMNS, quotes)
    else:
        show_table(QUOTE_COLUMNS, quotes)
    if missing := ceiling_note(quotes):
        stderr.note(missing)
    for sentence in answer.get("costs", []):
        stderr.note(clean(sentence))
    for sentence in silence_texts(answer):
        stderr.warning(sentence)
    if answer["more"]:
        stderr.note(f"more expensive ones are left out; --limit {limit * 10} shows more")
