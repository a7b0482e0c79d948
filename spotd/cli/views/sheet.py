"""Tables for a spreadsheet: CSV in which no text is taken for a formula."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from spotd.cli import stdout
from spotd.words import clean

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
    text = _NEXT_CELL.sub(r"\1'", clean(str(value)))
    return f"'{text}" if text.lstrip(" \"'").startswith(_FORMULA) else text
