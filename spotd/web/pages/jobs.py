"""All jobs, or those of an array."""

from __future__ import annotations

from dataclasses import dataclass

from nicegui import ui

from spotd.web.markup import el
from spotd.web.pages.bulk import Selected
from spotd.web.pages.controls import PagedList, search, select
from spotd.web.pages.live import Page, value
from spotd.web.poller import KnownAnswer
from spotd.web.topics import WatchTopic
from spotd.web.tree import TreeElement
from spotd.web.views import jobs as view
from spotd.words import clean


@dataclass(slots=True)
class _Chosen:
    group: str
    text: str = ""
    order: str = "newest"


def build(page: Page, group: str, array: str = "") -> None:
    """Draw the jobs, each array as one line; or the jobs of one array."""
    chosen = _Chosen(group if group in view.GROUPS else "all")
    topic = WatchTopic("array", (array,)) if array else WatchTopic("jobs")

    def choose(name: str, new: str) -> None:
        setattr(chosen, name, new)
        found.turn_to(1)

    def pick(ref: str, is_selected: bool) -> None:  # noqa: FBT001 - as the element calls it
        listed = (value(page.poller.watch(topic)) or {}).get("jobs", ())
        names = {job["id"]: job["name"] for job in listed}
        names |= {job["array"]["id"]: job["array"]["name"] for job in listed if job["array"] is not None}
        if ref in names:
            selected.select(ref, clean(names[ref]), is_selected=is_selected)

    if array:
        TreeElement(el("p", el("a", "All jobs", href="/jobs")))

        def draw_head(answer: KnownAnswer | None) -> None:
            listed = (value(answer) or {}).get("jobs", ())
            if listed:
                page.title.show(el("h1", f"Array {clean(listed[0]['array']['name'])}"))

        page.part([topic], draw_head)
    with ui.element("div").classes("controls"):
        search("Search jobs", lambda text: choose("text", text))
        select("Show", list(view.GROUPS), chosen.group, lambda new: choose("group", new))
        select("Order", list(view.SORTS), chosen.order, lambda new: choose("order", new))
    selected = Selected(page, lambda: found.redraw())
    found = PagedList(
        page,
        topic,
        "job" if array else "row",
        lambda answer: view.lines(answer, chosen.group, chosen.text, chosen.order, folds=not array),
        lambda shown, now: view.listing(shown, now, selected.names),
        picked=pick,
    )
