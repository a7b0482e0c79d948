"""Pictures: what each of them begins and ends with. matplotlib is loaded only when something is to be drawn."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from spotd.cli import stderr
from spotd.cli.failures import CommandFailed, ExitCode

COLOURS: Final = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#999999")
"""Okabe and Ito's palette, which people who do not see all colours can tell apart."""


@contextmanager
def picture(path: Path, *, width: float, height: float) -> Iterator[Any]:
    """Yield an empty figure of so many inches, and write it into the file at the end, with a note.

    Raises:
        CommandFailed: the file cannot be written.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    # Without `parse_math` a dollar in a name would begin a formula.
    style: dict[Any, Any] = {
        "font.size": 10,
        "svg.hashsalt": "spotd",
        "axes.spines.top": False,
        "axes.spines.right": False,
    }
    with rc_context({**style, "text.parse_math": False}):
        figure = Figure(figsize=(width, height), dpi=120, layout="constrained")
        yield figure
        try:
            figure.savefig(path, metadata={"Date": None} if path.suffix.lower() == ".svg" else {"Software": None})
        except OSError as exc:
            raise CommandFailed(f"{path}: {exc.strerror or exc}", code=ExitCode.LOCAL_IO) from exc
    stderr.note(f"drawn into {path}")


def dated(axes: Any) -> None:
    """Write the time axis in the time of this computer, briefly."""
    from datetime import datetime

    from matplotlib.dates import AutoDateLocator, ConciseDateFormatter

    zone = datetime.now().astimezone().tzinfo
    locator = AutoDateLocator(tz=zone)  # type: ignore[no-untyped-call]  # matplotlib types only a part of itself
    axes.xaxis.set_major_locator(locator)
    axes.xaxis.set_major_formatter(ConciseDateFormatter(locator, tz=zone))  # type: ignore[no-untyped-call]  # as above
