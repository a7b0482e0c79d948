"""Fields, selections and lists of several pages, with labels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Any, Final

from nicegui import ui

from spotd.web.markup import Node
from spotd.web.pages.live import Page
from spotd.web.poller import KnownAnswer
from spotd.web.topics import WatchTopic
from spotd.web.tree import TreeElement
from spotd.web.views.jobs import PAGE, page_of
from spotd.web.views.parts import problem, waiting_for
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


class PagedList:
    """A long list, a page at a time: what was refused, the rows, and the buttons to the pages before and behind."""

    def __init__(
        self,
        page: Page,
        topic: WatchTopic | Callable[[], Sequence[WatchTopic]],
        noun: str,
        rows: Callable[[Any], Sequence[Any]],
        view: Callable[[Sequence[Any], datetime], Node],
        *,
        notices: Callable[[Any], Sequence[str]] = lambda _answer: (),
        picked: Callable[[str, bool], None] | None = None,
    ) -> None:
        self._page, self._noun = page, noun
        self._rows, self._view, self._notices = rows, view, notices
        self._number = 1
        self._tree = TreeElement(waiting_for(f"the {noun}s"))
        if picked is not None:
            self._tree.on_pick(picked)
        with ui.element("nav").classes("pager") as self._nav:
            self._nav.props["aria-label"] = "Pages of the list"
            self._before = ui.button("Back", on_click=lambda: self.turn_to(self._number - 1))
            self._where = TreeElement("")
            self._behind = ui.button("Next", on_click=lambda: self.turn_to(self._number + 1))
        for button in (self._before, self._behind):
            button.props("outline no-caps dense")
        page.part(topic if callable(topic) else [topic], self._draw)

    def redraw(self) -> None:
        self._page.redraw()

    def turn_to(self, number: int) -> None:
        """Show this page; the first where other rows are asked for."""
        self._number = number
        self._page.redraw()

    def _draw(self, answer: KnownAnswer | None) -> None:
        if answer is None:
            self._tree.show(waiting_for(f"the {self._noun}s"))
            self._nav.set_visibility(False)
            return
        found = self._rows(answer.value) if answer.value else ()
        self._number, pages = page_of(self._number, len(found))
        refused = [problem(answer.error, answer.hint)] if answer.error else []
        notices = [problem(text) for text in (self._notices(answer.value) if answer.value else ())]
        shown = found[(self._number - 1) * PAGE : self._number * PAGE]
        self._tree.show(*refused, *notices, self._view(shown, answer.now))
        total = count(len(found), self._noun)
        self._before.set_enabled(self._number > 1)
        self._behind.set_enabled(self._number < pages)
        self._nav.set_visibility(len(found) > 0)
        self._where.show(f"page {self._number} of {pages}, {total}" if pages > 1 else total)
        self._before.set_visibility(pages > 1)
        self._behind.set_visibility(pages > 1)
