"""One job, and what its owner can do with it."""

from __future__ import annotations

from nicegui import ui

from spotd.web.charts import job as figures
from spotd.web.charts.base import Options
from spotd.web.charts.timeline import timeline
from spotd.web.markup import el
from spotd.web.pages.actions import buttons
from spotd.web.pages.controls import select
from spotd.web.pages.live import Chart, Page, drawn, value
from spotd.web.poller import KnownAnswer
from spotd.web.topics import WatchTopic
from spotd.web.tree import TreeElement
from spotd.web.views import job as view
from spotd.web.views.parts import section
from spotd.words import clean


def build(page: Page, ref: str) -> None:
    detail, why = WatchTopic("job", (ref,)), WatchTopic("why", (ref,))
    top = TreeElement()
    body = ui.element("div")

    def draw_top(found: KnownAnswer | None, reason: KnownAnswer | None) -> None:
        top.show(*drawn([found], lambda answer: view.heading(answer, value(reason)), "the job"))
        body.set_visibility(bool(value(found)))
        if found is not None and found.value:
            name = clean(found.value["job"]["name"])
            ui.page_title(f"{name[:60]} - spotd")
            page.title.show(el("h1", name))

    page.part([detail, why], draw_top)
    with body.classes("content-part"):
        _body(page, ref, detail)


def _body(page: Page, ref: str, detail: WatchTopic) -> None:
    """Draw what there is of a job that exists."""
    log, kept, happened = (WatchTopic(name, (ref,)) for name in ("log", "checkpoints", "events"))
    buttons(page, ref)
    page.section([detail], lambda answer, now: view.summary(answer, now), name="the job")
    attempts = Chart("Timeline", height="200px")

    def draw_timeline(found: KnownAnswer | None, events: KnownAnswer | None) -> None:
        if found is not None and found.value:
            attempts.show(*timeline(found.value["job"], value(events) or (), found.now), empty="It had no machine yet.")

    page.part([detail, happened], draw_timeline)
    page.section([detail], lambda answer, now: view.attempts(answer["job"], now), name="the attempts")
    with ui.element("div").classes("pair"):
        gpus = Chart("GPU use and memory")
        _figures(page, log)
    page.part(
        [WatchTopic("gpus", (ref,))], lambda found: gpus.show(*_gpu(found), empty="Its machine states no GPU figures.")
    )
    page.section([log], lambda tail: section("Log", view.log(tail), note="the last lines"), name="the log")
    page.section([WatchTopic("receipt", (ref,))], lambda answer: view.receipt(answer), name="the receipt")
    page.section([kept], lambda answer: view.checkpoints(answer), name="the checkpoints")
    page.section([happened], lambda answer: view.events(answer), name="the events")


def _gpu(found: KnownAnswer | None) -> tuple[Options, str]:
    return figures.gpu_use(found.value) if found is not None and found.value else ({}, "")


def _figures(page: Page, log: WatchTopic) -> None:
    """Add the picture of one figure of the log, and the choice of which."""
    with ui.element("div"):
        chart = Chart("Figures of the log")
        chosen = select("Figure", [], "", lambda _new: page.redraw())

    def draw(found: KnownAnswer | None) -> None:
        tail = value(found)
        keys = [] if tail is None else tail.figures.names()
        chosen.set_visibility(len(keys) > 1)
        wanted = chosen.value if chosen.value in keys else (keys[0] if keys else None)
        if chosen.options != keys or chosen.value != wanted:
            chosen.set_options(keys, value=wanted)
        options, words = ({}, "") if wanted is None else figures.figure(tail.figures, wanted)
        more = [view.figures_table(tail)] if keys else []
        chart.show(
            options,
            words,
            empty='It logs no figures. A line such as {"step": 10, "loss": 2.1} is one.',
            more=more,
            title=f"Logged: {wanted}" if wanted else "Figures of the log",
        )

    page.part([log], draw)
