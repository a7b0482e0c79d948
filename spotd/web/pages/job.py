"""One job, and what its owner can do with it."""

from __future__ import annotations

from typing import Final

from nicegui import ui

from spotd.client.errors import ClientError
from spotd.web.charts import job as figures
from spotd.web.charts.base import Options
from spotd.web.charts.prices import prices
from spotd.web.charts.timeline import timeline
from spotd.web.log_search import search_log
from spotd.web.markup import el
from spotd.web.pages.actions import buttons
from spotd.web.pages.controls import select
from spotd.web.pages.live import Chart, Page, drawn, value
from spotd.web.poller import KnownAnswer
from spotd.web.topics import WatchTopic
from spotd.web.tree import TreeElement
from spotd.web.views import job as view
from spotd.web.views.market import CeilingLine
from spotd.web.views.parts import WAITING, problem, section, waiting_for
from spotd.words import clean

WAITED_GPUS_MAX: Final = 3


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
    _waiting_price(page, detail)
    attempts = Chart("Timeline", height="200px")

    def draw_timeline(found: KnownAnswer | None, events: KnownAnswer | None) -> None:
        if found is not None and found.value:
            attempts.show(*timeline(found.value["job"], value(events) or (), found.now), empty="It had no machine yet.")

    page.part([detail, happened], draw_timeline)
    page.section([detail], lambda answer, now: view.attempts(answer["job"], now), name="the attempts")
    with ui.element("div").classes("pair"):
        gpus = Chart("GPU use and memory")
        _figures(page, log)

    def draw_gpus(found: KnownAnswer | None) -> None:
        if found is None or (found.value is None and not found.error):
            gpus.wait()
            return
        gpus.show(*_gpu(found), empty=found.error or "Its machine states no GPU figures.")

    page.part([WatchTopic("gpus", (ref,))], draw_gpus)
    page.section([log], lambda tail: section("Log", view.log(tail), note="the last lines"), name="the log")
    _log_search(page, ref)
    page.section([WatchTopic("receipt", (ref,))], lambda answer: view.receipt(answer), name="the receipt")
    page.section([kept], lambda answer: view.checkpoints(answer), name="the checkpoints")
    page.section([happened], lambda answer: view.events(answer), name="the events")


def _log_search(page: Page, ref: str) -> None:
    """Add a field whose text is searched for in the log once it is sent."""
    with ui.element("div").classes("controls"):
        field = ui.input("Search the log").props("outlined dense clearable type=search maxlength=200").classes("search")
        button = ui.button("Search").props("outline no-caps")
    answer = TreeElement()
    answer.props["aria-live"] = "polite"

    async def search() -> None:
        text = str(field.value or "").strip()
        if not text:
            answer.show()
            return
        button.disable()
        answer.show(waiting_for("the log"))
        try:
            found = await page.poller.act(lambda daemon: search_log(daemon, ref, text))
        except ClientError as exc:
            answer.show(problem(exc.message, exc.hint))
        else:
            answer.show(view.log_hits(found, clean(text)))
        finally:
            button.enable()

    button.on_click(search)
    field.on("keydown.enter", search)
    field.on("clear", answer.show)


def _waiting_price(page: Page, detail: WatchTopic) -> None:
    """Add the price of what the job waits for over the last day, against its ceiling, while it has no machine."""
    with ui.element("div").classes("boxed") as box:
        chart = Chart("Price against the ceiling, last 24 hours", height="240px")

    def limits() -> list[tuple[str, float]]:
        known = value(page.poller.watch(detail))
        if not known or known["job"]["state"] not in WAITING:
            return []
        return [*known["ceilings"].items()][:WAITED_GPUS_MAX]

    def topics() -> list[WatchTopic]:
        return [detail, *(WatchTopic("history", (gpu, "", "1")) for gpu, _ in limits())]

    def draw(_detail: KnownAnswer | None, *found: KnownAnswer | None) -> None:
        known = limits()
        box.set_visibility(bool(known))
        if any(one is None for one in found):
            chart.wait()
            return
        series = [("lowest", one.value) for one in found if one is not None and one.value]
        lines = [CeilingLine(usd_gpu_h=limit, name=f"ceiling {clean(gpu)}") for gpu, limit in known]
        refused = next((one.error for one in found if one is not None and one.error), "")
        options, words = prices(series, lines, "lowest")
        chart.show(options, words, empty=refused or "No price of these GPUs was recorded in this time.")

    page.part(topics, draw)


def _gpu(found: KnownAnswer | None) -> tuple[Options, str]:
    return figures.gpu_use(found.value) if found is not None and found.value else ({}, "")


def _figures(page: Page, log: WatchTopic) -> None:
    """Add the picture of one figure of the log, and the choice of which."""
    with ui.element("div"):
        chart = Chart("Figures of the log")
        chosen = select("Figure", [], "", lambda _new: page.redraw())

    def draw(found: KnownAnswer | None) -> None:
        tail = value(found)
        if tail is None and (found is None or not found.error):
            chosen.set_visibility(False)
            chart.wait()
            return
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
