"""The market: prices over time, the cheapest hours, offers of now."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from nicegui import ui

from spotd.lists import FAMILIES
from spotd.web import charts as chart
from spotd.web import markup as events_view
from spotd.web.charts import spend
from spotd.web.markup import el, problem
from spotd.web.pages.live import ANY, Chart, Page, PagedList, TreeElement, search, select, value
from spotd.web.poller import HEAT_DAYS, KnownAnswer, WatchTopic
from spotd.web.views import market
from spotd.web.views import market as view
from spotd.words import silence_texts

PROVIDERS_MAX = 6
SPANS = {"1 day": "1", "7 days": "7", "28 days": "28"}


@dataclass(slots=True)
class _Chosen:
    gpu: str = ""
    span: str = "7 days"
    kind: str = "lowest"
    offers: view.OfferFilter = field(default_factory=view.OfferFilter)


def market_page(page: Page) -> None:
    chosen = _Chosen()

    def choose(name: str, new: Any) -> None:
        setattr(chosen, name, new)
        page.redraw()

    def narrow(**changes: Any) -> None:
        chosen.offers = replace(chosen.offers, **changes)
        offers.turn_to(1)

    with ui.element("div").classes("controls"):
        gpu = select("GPU", [], "", lambda new: choose("gpu", new))
        select("Time", list(SPANS), chosen.span, lambda new: choose("span", new))
        select("Price", list(chart.FIELDS), chosen.kind, lambda new: choose("kind", new))
    past = Chart("Effective price per GPU-hour", height="320px")
    week = Chart("Cheapest hours of the week", height="300px")
    TreeElement(el("h2", "Offers")).classes("offers-title")
    with ui.element("div").classes("controls"):
        search("Search offers", lambda text: narrow(text=text))
        provider = select("Provider", [ANY], ANY, lambda new: narrow(provider="" if new == ANY else new))
        select("Market", [ANY, "spot", "on-demand"], ANY, lambda new: narrow(market="" if new == ANY else new))
        of_gpu = select("Of GPU", [ANY], ANY, lambda new: narrow(gpu="" if new == ANY else new))
        ui.checkbox("Only what fits", on_change=lambda event: narrow(fits_only=bool(event.value)))
    offers = PagedList(
        page,
        WatchTopic("prices"),
        "offer",
        lambda answer: view.matching(answer["quotes"], chosen.offers),
        lambda shown, _now: view.offers(shown),
        notices=silence_texts,
    )

    def providers() -> list[str]:
        known = value(page.poller.watch(WatchTopic("providers"))) or ()
        return [one["name"] for one in known if one["enabled"]][:PROVIDERS_MAX]

    def choices(quotes: KnownAnswer | None, jobs: KnownAnswer | None) -> None:
        listed = (value(quotes) or {}).get("quotes", ())
        names = view.gpu_names(listed, (value(jobs) or {}).get("jobs", ()))
        _offer(gpu, names, keep=chosen.gpu)
        _offer(of_gpu, [ANY, *names], keep=ANY)
        _offer(provider, [ANY, *providers()], keep=ANY)

    def histories() -> list[WatchTopic]:
        asked = (
            [WatchTopic("history", (chosen.gpu, name, SPANS[chosen.span])) for name in providers()]
            if chosen.gpu
            else []
        )
        return [WatchTopic("jobs"), *asked]

    def draw_past(jobs: KnownAnswer | None, *found: KnownAnswer | None) -> None:
        named = zip(providers(), found, strict=False)
        series = [(name, one.value) for name, one in named if one is not None and one.value]
        ceilings = view.ceilings((value(jobs) or {}).get("jobs", ()), chosen.gpu)
        options, words = chart.prices(series, ceilings, chosen.kind)
        refused = next((one.error for one in found if one is not None and one.error), "")
        waits = any(one is None for one in found) or not chosen.gpu
        empty = refused or (
            "Asking the daemon for prices …" if waits else "No price of this GPU was recorded in this time."
        )
        past.show(options, words, empty=empty, title=f"Effective price per GPU-hour: {chosen.gpu}, {chosen.kind}")

    def draw_week(*found: KnownAnswer | None) -> None:
        answer = found[0] if found else None
        if answer is None:
            week.wait()
            return
        options, words = chart.week(answer.value) if answer.value else ({}, "")
        empty = answer.error if answer.error else "Nothing is recorded yet; it takes some days to show a week."
        title = f"Cheapest hours of the week: {chosen.gpu}, mean lowest price of {HEAT_DAYS} days, this server's clock"
        week.show(options, words, empty=empty, title=title)

    page.part(
        [WatchTopic("prices"), WatchTopic("jobs"), WatchTopic("providers")],
        lambda quotes, jobs, _: choices(quotes, jobs),
    )
    page.part(histories, draw_past)
    page.part(lambda: [WatchTopic("week", (chosen.gpu,))] if chosen.gpu else [], draw_week)


def _offer(field: ui.select, names: list[str], *, keep: str) -> None:
    """Offer these names; the one that is chosen stays while it is among them."""
    wanted = field.value if field.value in names else keep if keep in names else (names[0] if names else None)
    if field.options != names or field.value != wanted:
        field.set_options(names, value=wanted)


# Providers and hosts.


def providers_page(page: Page) -> None:
    page.section([WatchTopic("providers")], lambda answer, now: view.cards(answer, now), name="the providers")
    page.section([WatchTopic("hosts")], lambda answer, now: view.hosts(answer, now), name="the hosts")


# The first page.


def overview_page(page: Page) -> None:
    head = TreeElement()

    def figures(status: KnownAnswer | None, jobs: KnownAnswer | None, cost: KnownAnswer | None) -> None:
        known = value(status)
        refused = [problem(one.error, one.hint) for one in (jobs, cost) if one is not None and one.error]
        listed = (value(jobs) or {}).get("jobs")
        head.show(*refused, market.figures(None if known is None else known["status"], listed, value(cost)))

    page.part([WatchTopic("status"), WatchTopic("jobs"), WatchTopic("cost")], figures)
    page.section([WatchTopic("jobs")], lambda answer, now: market.running(answer["jobs"], now), name="the jobs")
    page.section([WatchTopic("jobs")], lambda answer: market.waiting(answer["jobs"]), name="the jobs")
    page.section([WatchTopic("jobs")], lambda answer, now: market.failed(answer["jobs"], now), name="the jobs")
    past = Chart("Spend and machines by day", height="220px")

    def draw_past(found: KnownAnswer | None) -> None:
        if found is None or (found.value is None and not found.error):
            past.wait()
            return
        options, words = spend(found.value or (), found.now)
        past.show(options, words, empty=found.error or "Nothing was spent in the last 30 days.")

    page.part([WatchTopic("days")], draw_past)
    page.section([WatchTopic("events")], lambda events: market.latest(events), name="the events")
    TreeElement(el("p", "Prices are effective: fee, disk and traffic are in them.", cls="muted"))


# All events.


@dataclass(slots=True)
class _ChosenEvents:
    text: str = ""
    kind: str = ANY
    each: bool = False


def events_page(page: Page) -> None:
    """Draw the events, the newest first."""
    chosen = _ChosenEvents()

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
        lambda events: events_view.matching_events(events, chosen.text, each=chosen.each),
        lambda shown, _now: events_view.event_listing(shown, is_filtered=bool(chosen.text) or chosen.kind != ANY),
    )
