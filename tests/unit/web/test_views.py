"""What the pages show, as trees of plain values: complete, and harmless whatever the answers hold."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from spotd import web
from spotd.web import charts, markup
from spotd.web import charts as job_charts
from spotd.web.charts import spend, timeline
from spotd.web.markup import _STATES, TEXT_MAX, LogTail, Node, el, state, table
from spotd.web.pages.submit import DraftRefused, draft_of
from spotd.web.views import jobs, market
from spotd.web.views import jobs as job_view
from tests.cases import every
from tests.unit.api import made_responses as made

NOW = datetime(2026, 11, 21, 10, tzinfo=UTC)
HOSTILE = "<img src=x onerror=alert(1)>\x1b[31m\u202e" + "w" * 5_000


def text_of(node: Node) -> str:
    """Return all text of a tree."""
    if isinstance(node, str):
        return node
    return " ".join(part for part in (text_of(child) for child in node[2:]) if part)


def status(**given: Any) -> dict[str, Any]:
    base = {"jobs": {"RUNNING": 1, "WAITING_PRICE": 2, "SUCCEEDED": 3}, "machines": 1, "spent_day_usd": 8.0}
    return {**base, "spent_month_usd": 9.0, "install": "lab", "clock_scale": 1.0, "paused": "", **given}


def nodes(node: Node) -> Iterator[Node]:
    yield node
    if not isinstance(node, str):
        for child in node[2:]:
            yield from nodes(child)


def test_the_overview_states_machines_money_and_what_waits() -> None:
    cost = {**made.cost(), "on_demand_usd": 20.0, "saved_usd": 11.0, "uncompared_usd": 0.0}
    cost["budgets"] = [{"name": "day", "used": 8.0, "committed": 1.0, "limit": 10.0}]
    text = text_of(market.figures(status(), [made.job(effective_usd_h=2.5)], cost))
    for words in (
        "Machines now 1",
        "$/h now $2.50",
        "Spent today $8.00",
        "of $10.00, $1.00 more",
        "Saved so far $11.00",
    ):
        assert words in text
    assert "55 % of what on-demand costs" in text
    assert "Waiting 2" in text


def test_the_overview_of_a_daemon_that_has_not_answered_shows_nothing_made_up() -> None:
    assert "$" not in text_of(market.figures(None, None, None)).replace("$/h", "")


def test_jobs_that_wait_for_the_same_share_a_sentence() -> None:
    waiting = [made.waiting_job(id=f"j{n}", name=f"n{n}", verdict="too expensive") for n in range(40)]
    text = text_of(market.waiting(waiting))
    assert text.count("too expensive") == 1
    assert "and 34 others" in text


@every(
    ("group", "text", "order", "names"),
    [
        ("all", "", "newest", ["b", "a", "c"]),
        ("all", "", "name", ["a", "b", "c"]),
        ("waiting", "", "newest", ["b"]),
        ("running", "", "newest", ["a"]),
        ("ended", "", "newest", ["c"]),
        ("failed", "", "newest", ["c"]),
        ("no such group", "", "newest", ["b", "a", "c"]),
        ("all", "H100 B", "newest", ["b"]),
        ("all", "nothing like it", "newest", []),
        ("all", "", "spent", ["a", "b", "c"]),
    ],
)
def test_jobs_are_filtered_and_ordered(group: str, text: str, order: str, names: list[str]) -> None:
    listed = [
        made.waiting_job(name="b", id="1", gpu="H100", spent_usd=1.0),
        made.job(name="a", id="2", gpu="L40S", spent_usd=5.0, state="RUNNING", host="x", verdict="", provider="x"),
        made.job(name="c", id="3", gpu="L40S", spent_usd=0.5, state="FAILED", host=None, verdict="", provider=None),
    ]
    assert [job["name"] for job in jobs.matching(listed, group, text, order)] == names


@every(("asked", "total", "shown"), [(1, 0, (1, 1)), (9, 51, (2, 2)), (-5, 500, (1, 10))])
def test_a_page_that_is_not_there_is_the_nearest(asked: int, total: int, shown: tuple[int, int]) -> None:
    assert jobs.page_of(asked, total) == shown


def of_array(index: int, **given: Any) -> Any:
    task = {"id": "6a00000000", "name": "sweep", "index": index, "count": 12, "at_once": None}
    return made.job(**{"id": f"6j0000000{index}", "name": f"sweep-{index}", "array": task, **given})


def test_an_array_is_one_row_that_counts_its_states_and_leads_to_its_jobs() -> None:
    states = ["RUNNING", "RUNNING", "FAILED", "QUEUED"]
    listed = [of_array(index, state=name) for index, name in enumerate(states)]
    answer = {"jobs": [made.job(id="6j00000099", name="alone"), *listed], "arrays": []}
    alone, line = jobs.lines(answer, "all", "", "newest")
    assert (alone["name"], line["id"]) == ("alone", "6a00000000")
    tree = jobs.listing([alone, line], NOW, {"6a00000000"})
    text = text_of(tree)
    assert all(words in text for words in ("2 running", "1 queued", "1 failed", "12 jobs", "alone"))
    assert "/jobs?array=6a00000000" in [node[1].get("href") for node in nodes(tree) if not isinstance(node, str)]
    boxes = [node[1] for node in nodes(tree) if not isinstance(node, str) and node[0] == "input"]
    assert [(box["data-pick"], box["checked"]) for box in boxes] == [("6j00000099", False), ("6a00000000", True)]
    assert len(jobs.lines(answer, "all", "", "newest", folds=False)) == 5
    [only] = jobs.lines(answer, "failed", "", "newest")
    assert (only["id"], only["state"]) == ("6a00000000", "FAILED")


def test_no_field_but_a_checkbox_is_drawn() -> None:
    for kind in ("text", "password", "image", None):
        with pytest.raises(ValueError, match="but a checkbox"):
            el("input", type=kind)


def test_offers_are_filtered_by_gpu_provider_market_text_and_fit() -> None:
    quotes = [made.quote(gpu="H100", provider="aws", fits=True), made.quote(gpu="L40S", provider="vast", fits=False)]
    fits = market.OfferFilter(fits_only=True)
    assert [one["gpu"] for one in market.matching(quotes, fits)] == ["H100"]
    assert [one["gpu"] for one in market.matching(quotes, market.OfferFilter(gpu="L40S", text="VAST"))] == ["L40S"]
    assert market.matching(quotes, market.OfferFilter(provider="aws", gpu="L40S")) == []


def test_the_ceilings_of_open_jobs_are_lines_and_equal_ones_are_one() -> None:
    listed = [made.waiting_job(name=f"j{n}", gpu="H100", ceiling_usd_gpu_h=2.0) for n in range(3)]
    listed += [made.waiting_job(name="own", gpu="H100_SXM", ceiling_usd_gpu_h=1.5)]
    listed += [made.job(state="SUCCEEDED", gpu="H100", ceiling_usd_gpu_h=9.0), made.job(gpu="L40S")]
    assert [(one.usd_gpu_h, one.name) for one in market.ceilings(listed, "H100_SXM")] == [(1.5, "own"), (2.0, "3 jobs")]


def hostile(value: Any) -> Any:
    """The answer with every text in it replaced, but for instants, states and what the API takes from closed sets."""
    closed = {"state", "market", "kind", "code", "id", "reason", "job"}
    if isinstance(value, dict):
        return {
            key: one if key in closed or key.endswith("_at") or key == "at" else hostile(one)
            for key, one in value.items()
        }
    if isinstance(value, list):
        return [hostile(one) for one in value]
    return HOSTILE if isinstance(value, str) else value


VIEWS: dict[str, Callable[[], Node]] = {
    "running": lambda: market.running(hostile([made.job()]), NOW),
    "waiting": lambda: market.waiting(hostile([made.waiting_job()])),
    "events": lambda: markup.event_listing(markup.matching_events(hostile([made.event()]), "")),
    "jobs": lambda: jobs.listing(hostile([made.job(), made.waiting_job()]), NOW),
    "offers": lambda: market.offers(hostile([made.quote()])),
    "providers": lambda: market.cards(hostile([made.provider()]), NOW),
    "heading": lambda: job_view.heading(hostile(made.detail(made.job())), hostile(made.why())),
    "summary": lambda: job_view.summary(hostile(made.detail(made.job(transfer=made.transfer()))), NOW),
    "attempts": lambda: job_view.attempts(hostile(made.job(attempts=[made.attempt()])), NOW),
    "checkpoints": lambda: job_view.checkpoints(hostile([made.kept_checkpoint()])),
    "receipt": lambda: job_view.receipt(hostile(made.cost(made.receipt()))),
    "plan": lambda: market.plan(hostile(made.plan())),
}


@every("view", VIEWS.values(), ids=VIEWS)
def test_every_view_bounds_and_cleans_what_others_wrote(view: Callable[[], Node]) -> None:
    tree = view()
    assert "alert(1)" in text_of(tree)
    for node in nodes(tree):
        if isinstance(node, str):
            assert len(node) <= TEXT_MAX
            assert "\x1b" not in node
            assert "\u202e" not in node
        else:
            assert node[1].get("href", "/").startswith(("/", "#"))
            assert "<" not in str(node[1].get("href"))


def test_an_element_shows_nothing_that_is_hidden_whichever_view_made_it() -> None:
    name = "a\u200bb\u2060c\u00add\u3164e\u202e" + "o" + "\u0300" * 50 + "\n  k"
    node = el("pre", name, title=name, data_label=name, aria_label=name)
    expected = "abcdeo\u0300\u0300\u0300\n  k"
    assert node == ["pre", {"title": expected, "data-label": expected, "aria-label": expected}, expected]


@every("columns", ["", "Job | ", "Job | :n | Why"])
def test_a_table_has_no_column_without_a_title(columns: str) -> None:
    with pytest.raises(ValueError, match="no title"):
        table("Jobs", columns, [])


@every(
    "attributes", [{"onclick": "x"}, {"innerHTML": "x"}, {"style": "x"}, {"href": "javascript:alert(1)"}, {"src": "x"}]
)
def test_no_element_runs_or_loads_anything(attributes: dict[str, str]) -> None:
    with pytest.raises(ValueError, match=r"element|link"):
        el("a", "x", **attributes)
    with pytest.raises(ValueError, match="no element"):
        el("script", "x")


@every("name", [*_STATES, "SOMETHING_NEW"])
def test_a_state_is_a_word_and_a_sign_besides_its_colour(name: str) -> None:
    tree = state(name)
    assert len(tree[2:]) == 2
    assert tree[3].strip()


def day_sums(key: str, usd: float, hours: float) -> Any:
    return {"key": key, "spent_usd": usd, "seconds": hours * 3600}


def test_spend_and_machines_are_drawn_for_each_day_also_for_those_without() -> None:
    now = datetime(2026, 11, 21, 6, tzinfo=UTC)
    groups = [day_sums("2026-11-18", 4.0, 48), day_sums("2026-11-21", 1.0, 12), day_sums("2020-01-01", 99.0, 1)]
    chart, words = spend(groups, now)
    assert chart["xAxis"]["data"] == ["11-18", "11-19", "11-20", "11-21"]
    assert chart["series"][0]["data"] == [4.0, 0.0, 0.0, 1.0]
    assert chart["series"][1]["data"] == [2.0, 0.0, 0.0, 2.0]
    assert words.startswith("$5.00 in 4 days, most on 2026-11-18 with $4.00; today $1.00 by 2 machines")
    assert spend([], now) == ({}, "")
    assert spend([day_sums("2020-01-01", 1.0, 1)], now) == ({}, "")


def past(market_name: str, *values: float, bucket_s: int = 3600) -> Any:
    at = [(NOW + timedelta(hours=n)).isoformat() for n in range(len(values))]
    buckets = [made.past_bucket(at=a, low_usd_gpu_h=v, median_usd_gpu_h=v) for a, v in zip(at, values, strict=True)]
    group = {"gpu": "H100", "market": market_name, "buckets": buckets}
    return {**made.history(), "bucket_s": bucket_s, "prices": [group]}


def test_a_picture_of_prices_has_a_line_for_each_provider_and_each_ceiling() -> None:
    lines = [market.CeilingLine(usd_gpu_h=1.5, name="own")]
    chart, words = charts.prices([("aws", past("spot", 2.0, 1.0)), ("vast", past("spot", 3.0))], lines, "lowest")
    assert [one["name"] for one in chart["series"]] == ["aws spot", "vast spot"]
    other = past("spot", 0.3)
    other["prices"][0]["gpu"] = "L40S"
    of_two, _ = charts.prices([("aws", past("spot", 2.0)), ("vast", other)], lines, "lowest")
    assert [one["name"] for one in of_two["series"]] == ["aws H100 spot", "vast L40S spot"]
    assert chart["series"][0]["markLine"]["data"][0]["yAxis"] == 1.5
    assert chart["yAxis"]["max"] >= 3.0
    assert "aws H100 spot: from $1.000 to $2.000, now $1.000" in words
    assert "ceiling of own: $1.500" in words
    assert charts.prices([], [], "lowest") == ({}, "")


def test_the_cheapest_hours_are_those_of_the_week_in_a_time_zone() -> None:
    chart, words = charts.week(past("spot", 2.0, 1.0, 3.0), UTC)
    assert chart["series"][0]["data"] == [[10, 5, 2.0], [11, 5, 1.0], [12, 5, 3.0]]
    assert words.startswith("Cheapest hours: Sat 11:00 at $1.000")
    wide, _ = charts.week(past("spot", 2.0, bucket_s=6 * 3600), UTC)
    assert len(wide["series"][0]["data"]) == 6


def test_a_timeline_has_a_row_for_each_attempt_and_marks_losses_and_checkpoints() -> None:
    lost = made.attempt(attempt=1, reason="preempted", ended_at=made.NOW)
    job = made.job(attempts=[lost, made.attempt(attempt=2)])
    saved = [made.event(kind="checkpoint.accepted", attempt=1), made.event(kind="job.running", attempt=1)]
    chart, words = timeline(job, saved, NOW)
    assert len(chart["yAxis"]["data"]) == 2
    named = {one["name"]: one["data"] for one in chart["series"]}
    assert len(named["checkpoint"]) == 1
    assert len(named["lost"]) == 1
    assert "preempted" in words


def test_a_timeline_states_the_first_and_the_last_price_of_a_changed_bid() -> None:
    raised = made.event(id=8, kind="bid.raised", attempt=1, data={"before_usd_h": 0.2, "usd_h": 0.3})
    again = made.event(id=9, kind="bid.raised", attempt=1, data={"before_usd_h": 0.3, "usd_h": 0.35})
    job = made.job(attempts=[made.attempt(attempt=1, effective_usd_h=0.35), made.attempt(attempt=2)])
    chart, _ = timeline(job, [again, raised], NOW)
    first, second = chart["yAxis"]["data"]
    assert first.endswith("$0.2000 to $0.3500")
    assert second.count("$") == 1


def test_gpus_with_the_same_ceiling_share_its_line() -> None:
    def lines(**known: float) -> list[tuple[str, float]]:
        return [(one.name, one.usd_gpu_h) for one in jobs.ceilings_waited_for(known)]

    assert lines(H100_SXM=1.0, H100_PCIE=1.0, H100_NVL=1.0) == [("ceiling", 1.0)]
    assert lines(H100_SXM=2.0, H100_PCIE=2.0, L4=0.5) == [("ceiling L4", 0.5), ("ceiling 2 GPUs", 2.0)]
    assert lines() == []


def test_a_queue_that_is_empty_says_how_a_job_is_queued_and_a_filter_that_nothing_matches() -> None:
    empty = jobs.listing([], NOW)
    assert "spotctl submit job.toml" in text_of(empty)
    assert [one[1]["href"] for one in nodes(empty) if not isinstance(one, str) and one[0] == "a"] == ["/submit"]
    assert text_of(jobs.listing([], NOW, is_filtered=True)) == "No job matches."
    assert text_of(markup.event_listing([])) == "Nothing has happened yet."
    assert text_of(markup.event_listing([], is_filtered=True)) == "No event matches."
    assert timeline(made.job(attempts=[]), [], NOW) == ({}, "")


def test_gpu_use_and_logged_figures_are_drawn_where_there_are_any() -> None:
    sample = {"at": made.NOW, "util_pct": 90.0, "mem_used_mb": 10.0, "mem_total_mb": 40.0}
    chart, words = job_charts.gpu_use({"attempt": 2, "samples": [sample, {**sample, "mem_used_mb": None}]})
    assert chart["series"][1]["data"] == [[made.NOW, 25.0], [made.NOW, None]]
    assert words == "GPUs of attempt 2 now: use 90 %."
    assert job_charts.gpu_use({"attempt": None, "samples": []}) == ({}, "")
    tail = LogTail()
    tail.take({"kind": "log", "text": '{"step": 5, "loss": 2}\n'})
    _, words = job_charts.figure(tail.figures, "loss")
    assert words == "loss by step: 2 at step 5, lowest 2, 1 points."


def test_no_option_of_a_chart_is_named_by_what_a_host_wrote() -> None:
    """A key that begins with a colon would be run by the browser."""
    job = hostile(made.job(attempts=[{**made.attempt(), "host": ":x", "intended_at": made.NOW}]))
    chart, _ = timeline({**job, "submitted_at": made.NOW}, [], NOW)
    text = json.dumps(chart)
    assert '":' not in text.replace('": ', "")


@every(
    ("text", "words"),
    [
        ("name = ", "cannot be used"),
        ("\ud800", "cannot be used"),
        ("[" * 5000, "cannot be used"),
    ],
)
def test_a_text_that_is_no_job_for_a_browser_is_refused_with_a_way_out(text: str, words: str) -> None:
    with pytest.raises(DraftRefused, match=words) as caught:
        draft_of(text)
    assert caught.value.rows
    assert all(hint for _, hint in caught.value.rows)


def test_a_job_file_becomes_a_draft_with_dates_as_text() -> None:
    draft = draft_of('name = "x"\n[schedule]\ndeadline = 2026-11-22T10:00:00Z')
    assert draft["data"] == {"name": "x", "schedule": {"deadline": "2026-11-22T10:00:00+00:00"}}


@every(
    ("used", "computing", "limit", "shown"),
    [
        (14, 11, 14, ("14", "of 14 allowed at once, 3 of them being rented or ended")),
        (2, 2, 8, ("2", "of 8 allowed at once")),
        (0, 1, 8, ("1", "of 8 allowed at once")),
    ],
    ids=["some on their way", "all compute", "one that is left to its provider"],
)
def test_the_machines_shown_are_those_that_count_against_their_limit(
    used: int, computing: int, limit: int, shown: tuple[str, str]
) -> None:
    cost = {**made.cost(), "budgets": [{"name": "machines", "used": used, "committed": 0, "limit": limit}]}
    assert " ".join(("Machines now", *shown, "$/h now")) in text_of(
        market.figures(status(machines=computing), (), cost)
    )


def test_the_page_of_a_failed_job_begins_with_reason_output_and_next_step() -> None:
    failure = {
        "attempt": 2, "reason": "the command failed: exit code 137", "exit_code": 137, "meaning": "it was killed",
        "output": ["step 7", "Killed"], "next_step": "ask for more memory",
    }  # fmt: skip
    row = made.job(state="FAILED", provider=None, host=None, failure=failure, summary="ran 2 h")
    head = text_of(job_view.heading(made.detail(row), None))
    order = ["the command failed: exit code 137; it was killed", "step 7\nKilled", "Try: ask for more memory"]
    assert sorted(order, key=head.index) == order
    assert "ran 2 h" not in head
    assert "Saved" not in text_of(job_view.summary(made.detail(row), NOW))
    assert "it was killed" in text_of(jobs.listing([row], NOW))


def test_a_traceback_keeps_its_indentation_and_nothing_else_that_steers() -> None:
    failure = {
        "attempt": 1, "reason": "r", "exit_code": 1, "meaning": "", "next_step": "s",
        "output": ["  File \x1b[31ma.py", "\tx =  1", "   ^"],
    }  # fmt: skip
    row = made.job(state="FAILED", failure=failure)
    assert "  File a.py\n    x = 1\n   ^" in text_of(job_view.heading(made.detail(row), None))


def test_the_overview_names_what_failed_within_a_day_with_its_reason() -> None:
    failure = {"attempt": 1, "reason": "exit code 127", "exit_code": 127, "meaning": "", "output": [], "next_step": ""}

    def ended(hours: float, name: str, **given: Any) -> Any:
        at = (NOW - timedelta(hours=hours)).isoformat()
        return made.job(**{"state": "FAILED", "name": name, "ended_at": at, "failure": failure, **given})

    shown = text_of(market.failed([ended(23, "late"), ended(25, "old"), ended(1, "won", state="SUCCEEDED")], NOW))
    assert "late" in shown
    assert "exit code 127" in shown
    assert "old" not in shown
    assert "won" not in shown
    assert text_of(market.failed([ended(25, "old")], NOW)) == ""
    many = text_of(market.failed([ended(1, f"job-{number}") for number in range(1000)], NOW))
    assert many.count("exit code 127") == market.FAILED_MAX
    assert "All 1000" in many


def test_the_events_of_a_job_say_how_many_are_shown_and_of_which_kind_there_are_none() -> None:
    found = [made.event(id=n, kind="job.budget", message=f"m{n:03}", at=NOW.isoformat()) for n in range(100)]
    shown = text_of(job_view.events(found))
    assert f"the newest {job_view.EVENTS_SHOWN} of 100" in shown
    assert "m099" in shown
    assert "m003" not in shown
    assert "No event of the kind bid." in text_of(job_view.events([], kind="bid"))
    assert "Nothing has happened yet." in text_of(job_view.events([]))


def test_the_script_of_each_element_lies_beside_the_module_that_names_it() -> None:
    modules = Path(web.__file__).parent.rglob("*.py")
    scripts = [(one.parent, name) for one in modules for name in re.findall(r'component="(.+?)"', one.read_text())]
    assert scripts, "no element has a script of its own"
    assert [name for folder, name in scripts if not (folder / name).is_file()] == []
