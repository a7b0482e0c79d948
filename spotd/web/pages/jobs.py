"""All jobs."""

from __future__ import annotations

from dataclasses import dataclass

from nicegui import ui

from spotd.web.pages.controls import PagedList, search, select
from spotd.web.pages.live import Page
from spotd.web.topics import WatchTopic
from spotd.web.views import jobs as view


@dataclass(slots=True)
class _Chosen:
    group: str
    text: str = ""
    order: str = "newest"


def build(page: Page, group: str) -> None:
    chosen = _Chosen(group if group in view.GROUPS else "all")

    def choose(name: str, new: str) -> None:
        setattr(chosen, name, new)
        found.turn_to(1)

    with ui.element("div").classes("controls"):
        search("Search jobs", lambda text: choose("text", text))
        select("Show", list(view.GROUPS), chosen.group, lambda new: choose("group", new))
        select("Order", list(view.SORTS), chosen.order, lambda new: choose("order", new))
    found = PagedList(
        page,
        WatchTopic("jobs"),
        "job",
        lambda answer: view.matching(answer["jobs"], chosen.group, chosen.text, chosen.order),
        view.listing,
    )
