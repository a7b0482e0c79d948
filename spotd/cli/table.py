"""Tables: drawn by rich on a terminal, aligned plain text anywhere else.

rich costs more to import than a whole `ls` takes, so nothing imports it but the function that draws. How wide each
column may be is decided here: rich shares a narrow terminal out in proportion, which cuts the last columns away to show
the whole of a long name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from spotd.cli import stderr, stdout
from spotd.cli.words import clean

_GAP: Final = 2
_GAP_NARROW: Final = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """A column of a table.

    Attributes:
        least: on a narrow terminal it shrinks down to so many characters; 0 never shrinks.
        drop: on a still narrower one it is left out, those with the greatest figure first; 0 is never left out.
    """

    title: str
    right: bool = False
    least: int = 0
    drop: int = 0


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
    """The table is on stdout; columns that found no room are named on stderr."""
    if not stdout.is_terminal():
        stdout.write(plain(columns, rows))
        return
    drawn, left_out = fitted(columns, rows, width=stdout.width(), colour=stdout.colour())
    stdout.write(drawn)
    if left_out:
        stderr.note(f"left out for want of room: {', '.join(left_out)}; a wider terminal or -o json shows it")


def text(columns: Sequence[Column], rows: Sequence[Row], *, drawn_for: int | None, colour: bool = False) -> str:
    """The table for a terminal of so many columns, or plain where that is `None`."""
    if drawn_for is None:
        return plain(columns, rows)
    return fitted(columns, rows, width=drawn_for, colour=colour)[0]


def _words(cell: str | Cell) -> str:
    return clean(cell.text if isinstance(cell, Cell) else cell) or "-"


def plain(columns: Sequence[Column], rows: Sequence[Row]) -> str:
    """The table as aligned text, never cut, so that a program can read it too."""
    texts = [[column.title for column in columns], *([_words(cell) for cell in row] for row in rows)]
    widths = [max(len(row[place]) for row in texts) for place in range(len(columns))]
    lines = []
    for row in texts:
        parts = [
            word.rjust(width) if column.right else word.ljust(width)
            for word, width, column in zip(row, widths, columns, strict=True)
        ]
        lines.append((" " * _GAP).join(parts).rstrip())
    return "\n".join(lines) + "\n"


def widths_for(columns: Sequence[Column], natural: Sequence[int], *, room: int) -> Mapping[int, int]:
    """The width of each column that is shown, by its place."""
    widths = dict(enumerate(natural))
    while True:
        excess = sum(widths.values()) + _gap(widths, room) * (len(widths) - 1) - room
        for _ in range(excess):
            wide = [place for place, width in widths.items() if 0 < columns[place].least < width]
            if not wide:
                break
            widths[max(wide, key=lambda place: widths[place])] -= 1
        else:
            return widths
        droppable = [place for place in widths if columns[place].drop]
        if not droppable:
            return widths
        del widths[max(droppable, key=lambda place: columns[place].drop)]
        widths = {place: natural[place] for place in widths}


def _gap(widths: Mapping[int, int], room: int) -> int:
    return _GAP if sum(widths.values()) + _GAP * (len(widths) - 1) <= room else _GAP_NARROW


def fitted(columns: Sequence[Column], rows: Sequence[Row], *, width: int, colour: bool) -> tuple[str, tuple[str, ...]]:
    """The table drawn for a terminal, and the titles of the columns that were left out."""
    from rich.cells import cell_len
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    natural = [
        max([len(column.title), *(cell_len(_words(row[place])) for row in rows)])
        for place, column in enumerate(columns)
    ]
    widths = widths_for(columns, natural, room=width)
    table = Table(box=None, padding=(0, _gap(widths, width), 0, 0), pad_edge=False, header_style="bold")
    for place, shown in widths.items():
        justify = "right" if columns[place].right else "left"
        table.add_column(columns[place].title, justify=justify, no_wrap=True, overflow="ellipsis", width=shown)  # type: ignore[arg-type]  # one of rich's literals
    for row in rows:
        cells = [(_words(row[place]), row[place]) for place in widths]
        table.add_row(*(Text(words, style=cell.style if isinstance(cell, Cell) else "") for words, cell in cells))
    # Drawn into memory: every byte leaves through the module that owns its stream and handles closed pipes.
    console = Console(width=width, force_terminal=True, no_color=not colour, highlight=False)
    with console.capture() as capture:
        console.print(table)
    left_out = tuple(column.title for place, column in enumerate(columns) if place not in widths)
    return capture.get(), left_out
