"""All events."""

from __future__ import annotations

from dataclasses import dataclass

from nicegui import ui

from spotd.event_steps import FAMILIES
from spotd.web.pages.controls import PagedList, search, select
from spotd.web.pages.live import Page
from spotd.web.topics import WatchTopic
from spotd.web.views import events as view

ANY = "any"


@dataclass(slots=True)
class _Chosen:
    text: str = ""
    kind: str = ANY
    each: bool = False


def build(page: Page) -> None:
    """Draw the events, the newest first."""
    chosen = _Chosen()

    def choose(name: str, new: object) -> None:
        setattr(chosen, name, new)
        found.turn_to(1)

    def topics() -> list[WatchTopic]:
        return [WatchTopic("events", () if chosen.kind == ANY else ("", chosen.kind))]

    with ui.element("div").classes("controls"):
        search("Search events", lambda text: choose("text", text))
        select("Kind", [ANY, *FAMILIES], ANY, lambda new: choose("kind", new))
        ui.checkbox("Each event on a line", on_change=lambda event: choose("each", bool(event.value)))
    found = PagedList(
        page,
        topics,
        "step",
        lambda events: view.matching(events, chosen.text, each=chosen.each),
        lambda shown, _now: view.listing(shown),
    )
