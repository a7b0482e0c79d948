"""All jobs."""

from __future__ import annotations

from dataclasses import dataclass

from nicegui import ui

from spotd.web.pages.controls import Pager, search, select
from spotd.web.pages.live import Page
from spotd.web.poller import KnownAnswer
from spotd.web.topics import WatchTopic
from spotd.web.tree import TreeElement
from spotd.web.views import jobs as view
from spotd.web.views.parts import problem, waiting_for


@dataclass(slots=True)
class _Chosen:
    group: str
    text: str = ""
    order: str = "newest"
    page: int = 1


def build(page: Page, group: str) -> None:
    """Draw the list of jobs."""
    chosen = _Chosen(group if group in view.GROUPS else "all")

    def choose(name: str, new: str) -> None:
        setattr(chosen, name, new)
        chosen.page = 1
        page.redraw()

    def turn(number: int) -> None:
        chosen.page = number
        page.redraw()

    with ui.element("div").classes("controls"):
        search("Search jobs", lambda text: choose("text", text))
        select("Show", list(view.GROUPS), chosen.group, lambda new: choose("group", new))
        select("Order", list(view.SORTS), chosen.order, lambda new: choose("order", new))
    tree = TreeElement(waiting_for("the jobs"))
    turner = Pager(turn)

    def draw(answer: KnownAnswer | None) -> None:
        if answer is None:
            return
        found = view.matching((answer.value or {}).get("jobs", ()), chosen.group, chosen.text, chosen.order)
        chosen.page, pages = view.page_of(chosen.page, len(found))
        shown = found[(chosen.page - 1) * view.PAGE : chosen.page * view.PAGE]
        refused = [problem(answer.error, answer.hint)] if answer.error else []
        tree.show(*refused, view.listing(shown, answer.now))
        turner.show(chosen.page, pages, len(found), "job")

    page.part([WatchTopic("jobs")], draw)
