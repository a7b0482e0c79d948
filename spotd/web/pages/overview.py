"""The first page."""

from __future__ import annotations

from spotd.web.charts.spend import spend
from spotd.web.markup import el
from spotd.web.pages.live import Chart, Page, value
from spotd.web.poller import KnownAnswer
from spotd.web.topics import WatchTopic
from spotd.web.tree import TreeElement
from spotd.web.views import overview
from spotd.web.views.parts import problem


def build(page: Page) -> None:
    head = TreeElement()

    def figures(status: KnownAnswer | None, jobs: KnownAnswer | None, cost: KnownAnswer | None) -> None:
        known = value(status)
        refused = [problem(one.error, one.hint) for one in (jobs, cost) if one is not None and one.error]
        listed = (value(jobs) or {}).get("jobs", ())
        head.show(*refused, overview.figures(None if known is None else known["status"], listed, value(cost)))

    page.part([WatchTopic("status"), WatchTopic("jobs"), WatchTopic("cost")], figures)
    page.section([WatchTopic("jobs")], lambda answer, now: overview.running(answer["jobs"], now), name="the jobs")
    page.section([WatchTopic("jobs")], lambda answer: overview.waiting(answer["jobs"]), name="the jobs")
    past = Chart("Spend and machines by day", height="220px")

    def draw_past(found: KnownAnswer | None) -> None:
        if found is None or (found.value is None and not found.error):
            past.wait()
            return
        options, words = spend(found.value or (), found.now)
        past.show(options, words, empty=found.error or "Nothing was spent in the last 30 days.")

    page.part([WatchTopic("days")], draw_past)
    page.section([WatchTopic("events")], lambda events: overview.latest(events), name="the events")
    TreeElement(el("p", "Prices are effective: fee, disk and traffic are in them.", cls="muted"))
