"""`prices`: what can be had now, at its effective price."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from spotd import words
from spotd.cli import stderr, stdout
from spotd.cli.entry import Lazy, LazyGroup
from spotd.cli.inputs.options import CHART, ID, JSON, TABLE, Parsed, output, plot_option, show_data
from spotd.cli.inputs.ranges import SPAN, WHEN, When, instants
from spotd.cli.views.table import Column, per_gpu_cell
from spotd.cli.views.table import show as show_table
from spotd.client.daemon import Daemon
from spotd_jobs.spec.problems import BadValue

if TYPE_CHECKING:
    from spotd.api.schemas.costs import HistoryResponse, PastBucketResponse, PastPricesResponse, QuoteResponse


def ceiling_note(quotes: Sequence[QuoteResponse]) -> str:
    """Return a sentence on the GPUs among the quotes for which no ceiling is set; empty if there are none."""
    names = list(
        dict.fromkeys(words.clean(quote["gpu"]) for quote in quotes if quote["verdict"] == words.WITHOUT_CEILING)
    )
    if not names:
        return ""
    some = ", ".join(names[:GPUS_NAMED_MAX]) + (
        f" and {words.count(len(names) - GPUS_NAMED_MAX, 'other GPU')}" if len(names) > GPUS_NAMED_MAX else ""
    )
    return f"no ceiling applies to {some}: set [ceilings] in the configuration, or give a job a max_price"


QUOTE_COLUMNS: Sequence[Column[QuoteResponse]] = (
    Column("WHERE", words.where_text, least=10),
    Column("REGION", lambda quote: quote["region"], least=6, drop=4),
    Column("GPU", words.gpu_text, least=6),
    Column("MARKET", lambda quote: quote["market"], least=9),
    Column("$/GPU-H", per_gpu_cell, right=True),
    Column("$/H", lambda quote: words.price(quote["effective_usd_h"]), right=True, drop=3),
    Column("ON-DEMAND", lambda quote: words.price(quote["on_demand_usd_h"]), right=True, drop=5),
    Column("CEILING", lambda quote: words.price(quote["ceiling_usd_gpu_h"]), right=True, drop=2),
    Column("VERDICT", words.verdict_text, least=8),
)
EXPLAIN_COLUMNS: Sequence[Column[QuoteResponse]] = (
    Column("WHERE", words.where_text, least=8),
    Column("GPU", words.gpu_text, least=6),
    Column("MARKET", lambda quote: quote["market"], least=4, drop=3),
    Column("GPU$/H", lambda quote: words.price(quote["breakdown"]["gpu_usd_h"]), right=True, drop=2),
    Column("+STORAGE", lambda quote: words.price(quote["breakdown"]["storage_usd_h"]), right=True, drop=4),
    Column("+FEE", lambda quote: words.price(quote["breakdown"]["fee_usd_h"]), right=True, drop=5),
    Column("(FEE X)", lambda quote: f"{quote['breakdown']['fee_multiplier']:.2f}", right=True, drop=9),
    Column("+UPLOAD", lambda quote: words.price(quote["breakdown"]["upload_usd_h"]), right=True, drop=6),
    Column("+RESTORE", lambda quote: words.price(quote["breakdown"]["restore_usd_h"]), right=True, drop=7),
    Column("=$/H", lambda quote: words.price(quote["breakdown"]["total_usd_h"]), right=True),
    Column("$/GPU-H", per_gpu_cell, right=True),
    Column("BID", lambda quote: words.price(quote["bid_usd_gpu_h"]), right=True, drop=8),
    Column("CEILING", lambda quote: words.price(quote["ceiling_usd_gpu_h"]), right=True, drop=1),
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
        stderr.note(words.clean(sentence))
    for sentence in words.silence_texts(answer):
        stderr.warning(sentence)
    if answer["more"]:
        stderr.note(f"more expensive ones are left out; --limit {limit * 10} shows more")


# `history`: what prices were.


COLUMNS: Sequence[Column[tuple[PastPricesResponse, PastBucketResponse]]] = (
    Column("FROM", lambda row: words.local_text(row[1].get("begins", row[1]["at"]))),
    Column("GPU", lambda row: row[0]["gpu"], least=6),
    Column("MARKET", lambda row: row[0]["market"], least=9),
    Column("OFFERS", lambda row: f"{row[1]['offers']:.1f}", right=True, drop=1),
    Column("LOW", lambda row: words.price(row[1]["low_usd_gpu_h"]), right=True),
    Column("P10", lambda row: words.price(row[1]["p10_usd_gpu_h"]), right=True, drop=2),
    Column("P25", lambda row: words.price(row[1]["p25_usd_gpu_h"]), right=True, drop=4),
    Column("MEDIAN", lambda row: words.price(row[1]["median_usd_gpu_h"]), right=True),
    Column("P75", lambda row: words.price(row[1]["p75_usd_gpu_h"]), right=True, drop=4),
    Column("P90", lambda row: words.price(row[1]["p90_usd_gpu_h"]), right=True, drop=2),
    Column("HIGH", lambda row: words.price(row[1]["high_usd_gpu_h"]), right=True, drop=3),
)
MARKETS = ("spot", "on-demand")


def _own_prices(text: str) -> tuple[str, str]:
    """Return provider and id of `PROVIDER/ID`, as `prices -o id` prints it."""
    provider, slash, name = text.partition("/")
    if not (provider and slash and name):
        raise BadValue(f"{text!r} is not PROVIDER/ID as spotctl prices -o id prints it", hint="")
    return provider, name


_OWN_PRICES = Parsed("id", _own_prices)


_IMPORT: Final = Lazy(
    target="spotd.cli.commands.backtest:import_prices",
    help="Take over past prices: a provider's own records, or recorded lists.",
)


@click.group(cls=LazyGroup, lazy={"import": _IMPORT}, invoke_without_command=True)
@click.option("--gpu", metavar="NAME", help="Only this GPU, in any usual spelling.")
@click.option("--provider", metavar="NAME", help="Only this provider.")
@click.option("--market", type=click.Choice(MARKETS), help="Only this market.")
@click.option("--offer", type=_OWN_PRICES, metavar="PROVIDER/ID", help="Only this offer, as prices -o id prints it.")
@click.option(
    "--pool", type=_OWN_PRICES, metavar="PROVIDER/ID", help="Only this machine (vast) or type and zone (aws)."
)
@click.option("--since", type=WHEN, metavar="SPAN|INSTANT", help="From then on.  [default: 7d]")
@click.option("--until", type=WHEN, metavar="SPAN|INSTANT", help="Until then.  [default: now]")
@click.option("--every", type=SPAN, metavar="SPAN", help="One line for each such span.  [default: to suit]")
@plot_option()
@output(TABLE, JSON, CHART)
@click.pass_context
def history(
    ctx: click.Context,
    *,
    gpu: str | None,
    provider: str | None,
    market: str | None,
    offer: tuple[str, str] | None,
    pool: tuple[str, str] | None,
    since: When | None,
    until: When | None,
    every: timedelta | None,
    plot: Path | None,
    output: str,
) -> None:
    """What a GPU-hour cost: lowest, median and percentiles, weighed by how long each price was on offer.

    Effective prices in dollars, with today's fee multipliers. Without a GPU, offer or pool: one line for each GPU.
    With one, a terminal gets a chart, unless --every or -o asks for the table. Imported prices count where nothing was
    polled.
    """
    if ctx.invoked_subcommand is not None:
        return
    named = {name for name, _ in (item for item in (offer, pool) if item is not None)} | ({provider} - {None})
    if len(named) > 1:
        raise click.UsageError(f"these name different providers: {', '.join(sorted(filter(None, named)))}")
    daemon = Daemon()
    begin, end = instants(daemon, since, until)
    answer = daemon.history(
        {
            "gpu": gpu,
            "provider": next(iter(named), None),
            "market": market,
            "offer": None if offer is None else offer[1],
            "pool": None if pool is None else pool[1],
            "since": begin,
            "until": end,
            "every_s": None if every is None else int(every.total_seconds()),
        }
    )
    if plot is not None:
        from spotd.cli.views.pictures import draw_history

        draw_history(answer, plot)
    if output == JSON:
        show_data(answer, output)
        return
    is_chosen = every is not None or _is_given("output")
    spans = max((len(prices["buckets"]) for prices in answer["prices"]), default=0)
    chart = output == CHART or (not is_chosen and stdout.is_terminal() and spans > 1)
    show(answer, asked_s=None if every is None else int(every.total_seconds()), chart=chart)


def _is_given(name: str) -> bool:
    """Whether an option stands on the command line."""
    return click.get_current_context().get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE


def show(answer: HistoryResponse, *, asked_s: int | None, chart: bool) -> None:
    """Print the prices as a table or a chart, and on stderr what keeps them from being the whole answer."""
    rows = [(prices, bucket) for prices in answer["prices"] for bucket in prices["buckets"]]
    if rows and chart:
        from spotd.cli.views.pictures import show_chart

        show_chart(answer)
    elif rows:
        show_table(COLUMNS, rows)
    else:
        since, until = words.local_text(answer["since"]), words.local_text(answer["until"])
        stderr.note(f"no prices of this kind between {since} and {until}")
    if asked_s is not None and answer["bucket_s"] > asked_s:
        stderr.note(
            f"spans of {words.span_text(answer['bucket_s'])}: the older part is rolled up and has no shorter ones"
        )
    shares = [bucket.get("imported", 0) for _, bucket in rows]
    if any(shares):
        stderr.note(f"imported and not polled by this daemon: {sum(shares) / len(shares):.0%} of what is shown")
    if answer["trouble"]:
        stderr.warning(f"not all prices are kept or shown now: {answer['trouble']}")
