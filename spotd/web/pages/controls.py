"""Fields, selections and page turners, with labels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from nicegui import ui

from spotd.web.tree import TreeElement
from spotd.words import count

_TEXT_MAX: Final = 200


def search(label: str, changed: Callable[[str], None]) -> ui.input:
    """Add a field that filters as it is typed in."""
    field = ui.input(label, on_change=lambda event: changed(str(event.value or "")[:_TEXT_MAX]))
    return field.props("outlined dense clearable debounce=250 type=search maxlength=200").classes("search")


def select(label: str, names: Sequence[str], value: str, changed: Callable[[str], None]) -> ui.select:
    """Add a choice of one."""
    field = ui.select(
        list(names),
        label=label,
        value=value if value in names else None,
        on_change=lambda event: changed(str(event.value or "")),
    )
    return field.props("outlined dense options-dense").classes("select")


class Pager:
    """Buttons to the page before and behind, and which page this is."""

    def __init__(self, turn: Callable[[int], None]) -> None:
        self._number, self._turn = 1, turn
        with ui.element("nav").classes("pager") as self._nav:
            self._nav.props["aria-label"] = "Pages of the list"
            self._before = ui.button("Back", on_click=lambda: turn(self._number - 1)).props("outline no-caps dense")
            self._where = TreeElement("")
            self._behind = ui.button("Next", on_click=lambda: turn(self._number + 1)).props("outline no-caps dense")

    def show(self, number: int, pages: int, total: int, noun: str) -> None:
        """Show where in the list this is."""
        self._number = number
        self._before.set_enabled(number > 1)
        self._behind.set_enabled(number < pages)
        self._nav.set_visibility(total > 0)
        self._where.show(f"page {number} of {pages}, {count(total, noun)}" if pages > 1 else count(total, noun))
        self._before.set_visibility(pages > 1)
        self._behind.set_visibility(pages > 1)
