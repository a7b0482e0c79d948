"""All events."""

from __future__ import annotations

from typing import Any

from nicegui import ui

from spotd.web.pages.controls import Pager, search
from spotd.web.pages.live import Page
from spotd.web.poller import KnownAnswer
from spotd.web.topics import WatchTopic
from spotd.web.tree import TreeElement
from spotd.web.views import events as view
from spotd.web.views.jobs import PAGE, page_of
from spotd.web.views.parts import problem, waiting_for


def build(page: Page) -> None:
    """Draw the events, the newest first."""
    chosen: dict[str, Any] = {"text": "", "page": 1}

    def choose(name: str, new: str | int) -> None:
        chosen.update({"page": 1, name: new})
        page.redraw()

    with ui.element("div").classes("controls"):
        search("Search events", lambda text: choose("text", text))
    tree = TreeElement(waiting_for("the events"))
    turner = Pager(lambda number: choose("page", number))

    def draw(answer: KnownAnswer | None) -> None:
        if answer is None:
            return
        found = view.matching(answer.value or (), chosen["text"])
        number, pages = page_of(chosen["page"], len(found))
        refused = [problem(answer.error, answer.hint)] if answer.error else []
        tree.show(*refused, view.listing(found[(number - 1) * PAGE : number * PAGE]))
        turner.show(number, pages, len(found), "event")

    page.part([WatchTopic("events")], draw)
