"""Tables: fitted to the terminal, or aligned plain text anywhere else.

Only rich's measure of characters is used. Its tables share a narrow terminal out in proportion, which cuts the last
columns away to show the whole of a long name, and take two seconds for a thousand rows, since every cell may wrap; a
cell here is one line that is padded or cut.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

from spotd.cli import stderr, stdout
from spotd.words import STATE_COLOURS, clean, price, sized

T = TypeVar("T")
_GAP: Final = 2
_GAP_NARROW: Final = 1


@dataclass(frozen=True, slots=True)
class Cell:
    """Text with a colour, seen on a terminal only."""

    text: str
    style: str = ""
    """A key of SGR, or nothing."""


Row = Sequence[str | Cell]


@dataclass(frozen=True, slots=True)
class Column(Generic[T]):
    """A column of a table.

    Attributes:
        of: what it shows of an item.
        least: on a narrow terminal it shrinks down to so many characters; 0 never shrinks.
        drop: on a still narrower one it is left out, those with the greatest figure first; 0 is never left out.
    """

    title: str
    of: Callable[[T], str | Cell]
    right: bool = False
    least: int = 0
    drop: int = 0


Columns = Sequence[Column[Any]]

SGR: Final = {"bold": "1", "dim": "2", "red": "31", "green": "32", "yellow": "33", "cyan": "36"}
"""The terminal's code of each style: "select graphic rendition" of ECMA-48."""


def state_cell(state: str) -> Cell:
    return Cell(state, "dim" if state in {"CANCELLED", "CANCELLING"} else STATE_COLOURS.get(state, ""))


def per_gpu_cell(quote: Mapping[str, Any]) -> Cell:
    """Return the price of a GPU-hour of a quote, green where the quote fits."""
    return Cell(price(quote["effective_usd_gpu_h"]), "green" if quote["fits"] else "")


def rows_of(columns: Sequence[Column[T]], items: Sequence[T]) -> list[Row]:
    """Return what the columns show of each item."""
    return [[column.of(item) for column in columns] for item in items]


def show(columns: Sequence[Column[T]], items: Sequence[T]) -> None:
    """Print the table of the items; columns that found no room are named on stderr."""
    rows = rows_of(columns, items)
    if not stdout.is_terminal():
        stdout.write(plain(columns, rows))
        return
    drawn, left_out = fitted(columns, rows, width=stdout.width(), colour=stdout.colour())
    stdout.write(drawn)
    if left_out:
        stderr.note(f"left out for want of room: {', '.join(left_out)}; a wider terminal or -o json shows it")


def text(columns: Sequence[Column[T]], items: Sequence[T], *, drawn_for: int | None, colour: bool = False) -> str:
    """Return the table of the items for a terminal of so many columns, or plain where that is `None`."""
    rows = rows_of(columns, items)
    if drawn_for is None:
        return plain(columns, rows)
    return fitted(columns, rows, width=drawn_for, colour=colour)[0]


def _words(cell: str | Cell) -> str:
    return clean(cell.text if isinstance(cell, Cell) else cell) or "-"


def plain(columns: Columns, rows: Sequence[Row]) -> str:
    """Return the table as aligned text, never cut, so that a program can read it too."""
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


def widths_for(columns: Columns, natural: Sequence[int], *, room: int) -> Mapping[int, int]:
    """Return the width of each column that is shown, by its place."""
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
            return _squeeze(widths, room)
        del widths[max(droppable, key=lambda place: columns[place].drop)]
        widths = {place: natural[place] for place in widths}


def _squeeze(widths: Mapping[int, int], room: int) -> Mapping[int, int]:
    """Cut what must be shown where nothing else is left: a line that wraps is worse."""
    squeezed = dict(widths)
    while sum(squeezed.values()) + _GAP_NARROW * (len(squeezed) - 1) > room and max(squeezed.values()) > 1:
        squeezed[max(squeezed, key=lambda place: squeezed[place])] -= 1
    return squeezed


def _gap(widths: Mapping[int, int], room: int) -> int:
    return _GAP if sum(widths.values()) + _GAP * (len(widths) - 1) <= room else _GAP_NARROW


def fitted(columns: Columns, rows: Sequence[Row], *, width: int, colour: bool) -> tuple[str, tuple[str, ...]]:
    """Return the table drawn for a terminal, and the titles of the columns that were left out."""
    from rich.cells import cell_len

    header = [Cell(column.title, "bold") for column in columns]
    body = [[Cell(_words(cell), cell.style if isinstance(cell, Cell) else "") for cell in row] for row in rows]
    natural = [max(cell_len(row[place].text) for row in (header, *body)) for place in range(len(columns))]
    widths = widths_for(columns, natural, room=width)
    gap = " " * _gap(widths, width)
    lines = []
    for row in (header, *body):
        cells = [(sized(row[place].text, room, right=columns[place].right), place) for place, room in widths.items()]
        if not columns[cells[-1][1]].right:
            cells[-1] = (cells[-1][0].rstrip(), cells[-1][1])
        lines.append(gap.join(_with_colour(words, row[place].style if colour else "") for words, place in cells) + "\n")
    return "".join(lines), tuple(column.title for place, column in enumerate(columns) if place not in widths)


def _with_colour(words: str, style: str) -> str:
    return f"\x1b[{SGR[style]}m{words}\x1b[0m" if style else words
