"""`prices`: what can be had now, at its effective price."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from spotd.cli import stderr, stdout
from spotd.cli.commands.jobs import gpu_text, where_text
from spotd.cli.options import ID, JSON, TABLE, output
from spotd.cli.table import Cell, Column, Row
from spotd.cli.table import show as show_table
from spotd.cli.words import local_text, price
from spotd.client.daemon import Daemon

if TYPE_CHECKING:
    from spotd.api.schemas.prices import BoardResponse, QuoteResponse

QUOTE_COLUMNS = (
    Column(title="WHERE", least=10),
    Column(title="REGION", least=6, drop=2),
    Column(title="GPU", least=6),
    Column(title="MARKET", least=4),
    Column(title="$/GPU-H", right=True),
    Column(title="$/H", right=True, drop=1),
    Column(title="ON-DEMAND", right=True, drop=3),
    Column(title="CEILING", right=True),
    Column(title="VERDICT", least=8),
)
EXPLAIN_COLUMNS = (
    Column(title="WHERE", least=8),
    Column(title="GPU", least=6),
    Column(title="GPU$/H", right=True),
    Column(title="+STORAGE", right=True),
    Column(title="+FEE", right=True),
    Column(title="(FEE X)", right=True, drop=1),
    Column(title="+UPLOAD", right=True),
    Column(title="+RESTORE", right=True),
    Column(title="=$/H", right=True),
    Column(title="$/GPU-H", right=True),
    Column(title="BID", right=True, drop=2),
    Column(title="CEILING", right=True),
)
FORMULA = "$/H of the whole machine = fee multiplier x (gpu + disk GB x storage price / 720) + upload + restore traffic"


@click.command()
@click.option("--gpu", metavar="NAME", help="Only this GPU, in any usual spelling.")
@click.option("--provider", metavar="NAME", help="Only this provider.")
@click.option("--explain", is_flag=True, help="Show every term of the effective price.")
@click.option("-n", "--limit", type=click.IntRange(1, 100_000), default=50, show_default=True, help="At most so many.")
@output(TABLE, JSON, ID)
def prices(*, gpu: str | None, provider: str | None, explain: bool, limit: int, output: str) -> None:
    """Effective prices now, the cheapest GPU-hour first. All prices are dollars."""
    answer = Daemon().prices({"gpu": gpu, "provider": provider, "limit": limit})
    quotes: list[QuoteResponse] = answer["quotes"]
    if output == JSON:
        stdout.document(answer)
    elif output == ID:
        stdout.write("".join(f"{quote['provider']}/{quote['offer']}\n" for quote in quotes))
    elif quotes:
        show_quotes(quotes, explain=explain)
    else:
        stderr.note(f"nothing is offered{f' for {gpu}' if gpu else ''} now")
    if output == TABLE:
        show_silent_boards(answer["boards"])
        if answer["more"]:
            stderr.note(f"dearer ones are left out; --limit {limit * 10} shows more")


def show_quotes(quotes: Sequence[QuoteResponse], *, explain: bool) -> None:
    """Print the quotes as a table."""
    if explain:
        stderr.note(FORMULA)
        show_table(EXPLAIN_COLUMNS, [explained_row(quote) for quote in quotes])
    else:
        show_table(QUOTE_COLUMNS, [quote_row(quote) for quote in quotes])


def show_silent_boards(offer_cache: Sequence[BoardResponse]) -> None:
    """Warn of each provider whose prices are missing, so that their absence is not taken for an answer."""
    for provider_offers in offer_cache:
        if provider_offers["error"]:
            since = "" if provider_offers["at"] is None else f" since {local_text(provider_offers['at'])}"
            stderr.warning(f"no prices from {provider_offers['provider']}{since}: {provider_offers['error']}")


def quote_row(quote: QuoteResponse) -> Row:
    return (
        where_text(quote),
        quote["region"],
        gpu_text(quote),
        quote["market"],
        Cell(price(quote["effective_usd_gpu_h"]), "green" if quote["fits"] else ""),
        price(quote["effective_usd_h"]),
        price(quote["on_demand_usd_h"]),
        price(quote["ceiling_usd_gpu_h"]),
        quote["verdict"],
    )


def explained_row(quote: QuoteResponse) -> Row:
    terms = quote["breakdown"]
    return (
        where_text(quote),
        gpu_text(quote),
        price(terms["gpu_usd_h"]),
        price(terms["storage_usd_h"]),
        price(terms["fee_usd_h"]),
        f"{terms['fee_multiplier']:.2f}",
        price(terms["upload_usd_h"]),
        price(terms["restore_usd_h"]),
        price(terms["total_usd_h"]),
        Cell(price(terms["per_gpu_usd_h"]), "green" if quote["fits"] else ""),
        price(quote["bid_usd_gpu_h"]),
        price(quote["ceiling_usd_gpu_h"]),
    )
