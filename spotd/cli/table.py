"""Tables: drawn by rich on a terminal, aligned plain text anywhere else.

rich costs more to import than a whole `ls` takes, so nothing imports it but the function that draws.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from spotd.cli import stdout
from spotd.cli.words import clean

_GAP: Final = "  "
_WIDE: Final = 100
"""From so many columns on there is room for a wider gap."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """A column; one that `shrinks` gives up width when the terminal is narrow, but not below `least`."""

    title: str
    right: bool = False
    shrinks: bool = False
    least: int = 6


@dataclass(frozen=True, slots=True)
class Cell:
    """Text with a style of rich's, used on a terminal only."""

    text: str
    style: str = ""


Row = Sequence[str | Cell]

STATE_STYLE: Final = {
    "RUNNING": "green",
    "SUCCEEDED": "green",
    "STARTING": "cyan",
    "PROVISIONING": "cyan",
    "RECOVERING": "yellow",
    "WAITING_PRICE": "yellow",
    "FAILED": "red",
    "EXPIRED": "red",
    "CANCELLED": "dim",
    "CANCELLING": "dim",
}


def state_cell(state: str) -> Cell:
    return Cell(state, STATE_STYLE.get(state, ""))


def show(columns: Sequence[Column], rows: Sequence[Row]) -> None:
    """The table is on stdout."""
    drawn_for = stdout.width() if stdout.is_terminal() else None
    stdout.write(text(columns, rows, drawn_for=drawn_for, colour=stdout.colour()))


def text(columns: Sequence[Column], rows: Sequence[Row], *, drawn_for: int | None, colour: bool = False) -> str:
    """The table for a terminal of so many columns, or plain where that is `None`."""
    return plain(columns, rows) if drawn_for is None else _drawn(columns, rows, width=drawn_for, colour=colour)


def plain(columns: Sequence[Column], rows: Sequence[Row]) -> str:
    """The table as aligned text, never cut, so that a program can read it too."""
    texts = [[clean(cell.text if isinstance(cell, Cell) else cell) or "-" for cell in row] for row in rows]
    widths = [max([len(column.title), *(len(row[place]) for row in texts)]) for place, column in enumerate(columns)]
    lines = []
    for row in [[column.title for column in columns], *texts]:
        parts = [
            text.rjust(width) if column.right else text.ljust(width)
            for text, width, column in zip(row, widths, columns, strict=True)
        ]
        lines.append(_GAP.join(parts).rstrip())
    return "\n".join(lines) + "\n"


def _drawn(columns: Sequence[Column], rows: Sequence[Row], *, width: int, colour: bool) -> str:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, padding=(0, 2 if width >= _WIDE else 1, 0, 0), pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(
            column.title,
            justify="right" if column.right else "left",
            no_wrap=True,
            overflow="ellipsis" if column.shrinks else "ignore",
            min_width=column.least if column.shrinks else _natural(columns, rows, column),
        )
    for row in rows:
        cells = [cell if isinstance(cell, Cell) else Cell(cell) for cell in row]
        table.add_row(*(Text(clean(cell.text) or "-", style=cell.style, end="") for cell in cells))
    # Drawn into memory: every byte leaves through the module that owns its stream and handles closed pipes.
    console = Console(width=width, force_terminal=True, no_color=not colour, highlight=False)
    with console.capture() as capture:
        console.print(table)
    return capture.get()


def _natural(columns: Sequence[Column], rows: Sequence[Row], column: Column) -> int:
    place = columns.index(column)
    cells = [row[place] for row in rows]
    return max([len(column.title), *(len(clean(cell.text if isinstance(cell, Cell) else cell)) for cell in cells)])
