"""All jobs, or those of an array."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from nicegui import ui

from spotd.client.daemon import Daemon
from spotd.client.transport import ClientError
from spotd.lists import FAMILIES
from spotd.web import charts as figures
from spotd.web.charts import Options, prices, timeline
from spotd.web.markup import WAITING, el, problem, section, waiting_for
from spotd.web.pages.bulk import Selected
from spotd.web.pages.live import ANY, Chart, Page, PagedList, TreeElement, drawn, search, select, value
from spotd.web.poller import KnownAnswer, WatchTopic, search_log
from spotd.web.views import jobs as view
from spotd.words import FINAL_STATES, clean, dollars, price


@dataclass(slots=True)
class _Chosen:
    group: str
    text: str = ""
    order: str = "newest"


def jobs_page(page: Page, group: str, array: str = "") -> None:
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
        lambda shown, now: view.listing(
            shown, now, selected.names, is_filtered=bool(array or chosen.text) or chosen.group != "all"
        ),
        picked=pick,
    )


# What a user orders: each is confirmed, done by the daemon, and answered with its own sentence.


_CHANGED: Final = ("status", "jobs", "job", "why", "cost", "receipt", "events")


def buttons(page: Page, ref: str) -> None:
    """Add what can be done with a job; what cannot be done now is disabled."""
    shown: dict[str, Any] = {}

    def detail() -> dict[str, Any]:
        found: dict[str, Any] = shown["detail"]
        return found

    with ui.element("div").classes("actions"):
        cancel = ui.button("Cancel", on_click=lambda: _cancel(page, detail()))
        retry = ui.button("Retry", on_click=lambda: _retry(page, detail()))
        ceiling = ui.button("Change ceiling", on_click=lambda: _ceiling(page, detail()))
        budget = ui.button("Change budget", on_click=lambda: _budget(page, detail()))
    for button in (cancel, retry, ceiling, budget):
        button.props("outline no-caps dense").disable()

    def draw(answer: KnownAnswer | None) -> None:
        found = value(answer)
        if not found:
            return
        shown["detail"] = found
        is_final = found["job"]["state"] in FINAL_STATES
        cancel.set_enabled(not is_final and found["job"]["state"] != "CANCELLING")
        retry.set_enabled(is_final)
        ceiling.set_enabled(not is_final)
        budget.enable()

    page.part([WatchTopic("job", (ref,))], draw)


def _cancel(page: Page, detail: dict[str, Any]) -> None:
    job = detail["job"]
    at = f" Its machine at {clean(str(job['provider']))} is destroyed." if job["provider"] else ""
    sentence = (
        f"Cancel {clean(job['name'])}?{at} {dollars(job['spent_usd'])} is spent; checkpoints are kept for a retry."
    )
    _confirm(page, "Cancel the job", sentence, "Cancel the job", lambda daemon, _text: daemon.cancel(job["id"]))


def _retry(page: Page, detail: dict[str, Any]) -> None:
    job = detail["job"]
    succeeded = job["state"] == "SUCCEEDED"
    sentence = f"Queue {clean(job['name'])} again? It goes on from its newest checkpoint."
    if succeeded:
        sentence += " It has succeeded: this runs it once more all the same."
    _confirm(page, "Retry the job", sentence, "Retry", lambda daemon, _text: daemon.retry(job["id"], anyway=succeeded))


def _ceiling(page: Page, detail: dict[str, Any]) -> None:
    job, limit = detail["job"], detail["ceiling_usd_gpu_h"]
    before = "" if limit is None else f" It is ${price(limit)} per GPU-hour now."
    sentence = (
        f"The highest effective price for {clean(job['name'])}.{before} Write 2.40 per GPU-hour, 19.20/h for the "
        "machine, or config for the ceiling of the configuration."
    )
    _confirm(
        page,
        "Change the ceiling",
        sentence,
        "Change",
        lambda daemon, text: daemon.set_ceiling(job["id"], text),
        field="New ceiling",
    )


def _budget(page: Page, detail: dict[str, Any]) -> None:
    job, limit = detail["job"], detail["budget_usd"]
    before = "It has no budget now." if limit is None else f"It is {dollars(limit)} now."
    sentence = (
        f"What {clean(job['name'])} may cost in all; {dollars(job['spent_usd'])} is spent. {before} "
        "Write +20 to add dollars, or 140 to set them."
    )
    _confirm(
        page,
        "Change the budget",
        sentence,
        "Change",
        lambda daemon, text: daemon.set_budget(job["id"], text),
        field="New budget",
    )


def _confirm(
    page: Page, title: str, sentence: str, order: str, call: Callable[[Daemon, str], Any], *, field: str = ""
) -> None:
    """Ask, order it, and show what the daemon answers; the dialog stays open where it refuses."""
    with ui.dialog() as dialog, ui.card().classes("dialog"):
        dialog.props["aria-label"] = title
        TreeElement(el("h2", title), el("p", sentence))
        text = ui.input(field).props("outlined dense autofocus maxlength=40") if field else None
        refused = TreeElement().classes("refused")
        refused.props["aria-live"] = "assertive"

        async def perform() -> None:
            if not do.enabled:
                return  # it is on its way: a second Enter would add the dollars twice
            given = str(text.value or "").strip() if text is not None else ""
            if text is not None and not given:
                refused.show(problem("nothing is written in the field"))
                return
            do.disable()
            try:
                await page.poller.act(lambda daemon: call(daemon, given))
            except ClientError as exc:
                refused.show(problem(exc.message, exc.hint))
                do.enable()
                return
            dialog.close()
            page.poller.refresh(*_CHANGED)
            ui.notify(f"{title}: done", type="positive", position="top")

        with ui.element("div").classes("actions"):
            do = ui.button(order, on_click=perform).props("unelevated no-caps")
            ui.button("Leave it", on_click=dialog.close).props("flat no-caps")
        if text is not None:
            text.on("keydown.enter", perform)
    dialog.on("hide", dialog.delete)
    dialog.open()


# One job, and what its owner can do with it.


WAITED_GPUS_MAX: Final = 3


def job_page(page: Page, ref: str) -> None:
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
        has_machine = bool(found.value) and found.value["attempt"] is not None
        states_nothing = "Its machine states no GPU figures." if has_machine else "It has no machine now."
        gpus.show(*_gpu(found), empty=found.error or states_nothing)

    page.part([WatchTopic("gpus", (ref,))], draw_gpus)
    page.section([log], lambda tail: section("Log", view.log(tail), note="the last lines"), name="the log")
    _log_search(page, ref)
    page.section([WatchTopic("receipt", (ref,))], lambda answer: view.receipt(answer), name="the receipt")
    page.section([kept], lambda answer: view.checkpoints(answer), name="the checkpoints")
    _events(page, ref, _ChosenEvents())


@dataclass(slots=True)
class _ChosenEvents:
    kind: str = ANY
    each: bool = False


def _events(page: Page, ref: str, chosen: _ChosenEvents) -> None:
    """Add what happened to the job: all of it, or the kinds that the user chose."""

    def choose(name: str, new: object) -> None:
        setattr(chosen, name, new)
        page.redraw()

    with ui.element("div").classes("controls"):
        select("Kind of event", [ANY, *FAMILIES], ANY, lambda new: choose("kind", new))
        ui.checkbox("Each event on a line", on_change=lambda event: choose("each", bool(event.value)))
    tree = TreeElement(waiting_for("the events"))

    def draw(found: KnownAnswer | None) -> None:
        kind = "" if chosen.kind == ANY else chosen.kind
        tree.show(*drawn([found], lambda answer: view.events(answer, kind=kind, each=chosen.each), "the events"))

    page.part(lambda: [WatchTopic("events", (ref,) if chosen.kind == ANY else (ref, chosen.kind))], draw)


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
        lines = view.ceilings_waited_for(dict(known))
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
