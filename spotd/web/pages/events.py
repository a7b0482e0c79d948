"""All events."""

from __future__ import annotations

from nicegui import ui

from spotd.web.pages.controls import PagedList, search
from spotd.web.pages.live import Page
from spotd.web.topics import WatchTopic
from spotd.web.views import events as view


def build(page: Page) -> None:
    """Draw the events, the newest first."""
    wanted = ""

    def choose(text: str) -> None:
        nonlocal wanted
        wanted = text
        found.turn_to(1)

    with ui.element("div").classes("controls"):
        search("Search events", choose)
    found = PagedList(
        page,
        WatchTopic("events"),
        "event",
        lambda events: view.matching(events, wanted),
        lambda shown, _now: view.listing(shown),
    )
