"""What a channel is sent next: singles, summaries, quiet hours, the pace, and what is dropped."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

from hypothesis import given
from hypothesis import strategies as st

from spotd.core.notifications import (
    GATHERED_FOR,
    KEPT_FOR,
    LINES_SHOWN,
    PACE,
    SENT_MAX,
    SINGLES_MAX,
    ChannelRules,
    Notification,
    Queued,
    Severity,
    Topic,
    fresh,
    next_step,
    notification,
    quiet_left,
)
from spotd_jobs.spec.fields import parse_window
from tests.cases import every

NOW = datetime(2026, 3, 2, 12, tzinfo=UTC)
RULES = ChannelRules(name="phone")
OLD = timedelta(minutes=1)


def one(
    key: str = "a", *, age: timedelta = OLD, severity: Severity = Severity.INFO, topic: Topic = Topic.FAILED
) -> Notification:
    return notification(key, topic, severity, NOW - age, f"title {key}", "text")


def queue(*found: Notification) -> list[Queued]:
    return [Queued(id=number, channel="phone", notification=each) for number, each in enumerate(found, start=1)]


def sent(count: int, *, ago: timedelta) -> list[Queued]:
    return [replace(q, id=-q.id, sent_at=NOW - ago - timedelta(seconds=q.id)) for q in queue(*[one("s")] * count)]


def test_nothing_waits_for_nothing() -> None:
    step = next_step(RULES, [], NOW)
    assert (step.dropped, step.message, step.wait) == ((), None, None)


def test_a_few_are_sent_one_by_one_the_oldest_first() -> None:
    waiting = queue(one("b"), one("a", age=2 * OLD), one("c"))
    step = next_step(RULES, waiting, NOW)
    assert step.message is not None
    assert (step.message.ids, step.message.key, step.message.title, step.message.text) == ((2,), "a", "title a", "text")


def test_what_comes_together_is_judged_together() -> None:
    step = next_step(RULES, queue(one(age=timedelta(seconds=1))), NOW)
    assert (step.message, step.wait) == (None, GATHERED_FOR - timedelta(seconds=1))


def test_a_thousand_failures_are_one_summary_with_the_worst_first() -> None:
    many = [one(str(n)) for n in range(999)]
    step = next_step(RULES, queue(*many, one("worst", severity=Severity.URGENT, topic=Topic.QUARANTINED)), NOW)
    assert step.message is not None
    assert len(step.message.ids) == 1000
    assert step.message.title == "1,000 notifications: 999 failed, 1 quarantined"
    lines = step.message.text.split("\n")
    assert lines[0] == "2026-03-02 11:59 UTC title worst"
    assert (len(lines), lines[-1]) == (LINES_SHOWN + 1, "and 985 more: spotctl events")
    assert step.message.severity is Severity.URGENT


def test_those_that_found_no_room_are_counted() -> None:
    step = next_step(RULES, queue(one("a")), NOW, uncounted=500)
    assert step.message is not None
    assert step.message.title.startswith("501 notifications")
    assert step.message.uncounted == 500


def test_singles_end_where_a_summary_begins() -> None:
    def ids(count: int) -> int:
        message = next_step(RULES, queue(*(one(str(n)) for n in range(count))), NOW).message
        return 0 if message is None else len(message.ids)

    assert [ids(count) for count in (1, SINGLES_MAX, SINGLES_MAX + 1)] == [1, 1, SINGLES_MAX + 1]


def test_more_than_a_person_reads_waits_for_the_pace_but_not_the_urgent() -> None:
    before = sent(SENT_MAX, ago=timedelta(minutes=2))
    step = next_step(RULES, [*before, *queue(one())], NOW)
    assert step.message is None
    assert step.wait is not None
    assert timedelta(0) < step.wait <= PACE - timedelta(minutes=2)
    assert next_step(RULES, [*before[1:], *queue(one())], NOW).message is not None
    assert next_step(RULES, [*before, *queue(one(severity=Severity.URGENT))], NOW).message is not None
    assert next_step(RULES, [*sent(SENT_MAX, ago=PACE), *queue(one())], NOW).message is not None


def test_what_is_too_old_is_dropped() -> None:
    step = next_step(RULES, queue(one("old", age=KEPT_FOR + OLD), one("new", age=KEPT_FOR)), NOW)
    assert step.dropped == (1,)
    assert step.message is not None
    assert step.message.key == "new"


# --- quiet hours ---

NIGHT = replace(
    RULES,
    quiet=(parse_window("22:00-07:30"), parse_window("Sat,Sun")),
    zone=ZoneInfo("Europe/Kyiv"),
    urgent_passes=True,
)


@every(
    ("local", "hours"),
    [
        ("2026-03-02T21:59", None),
        ("2026-03-02T22:00", 9.5),
        ("2026-03-03T07:29", 1 / 60),
        ("2026-03-03T07:30", None),
        ("2026-03-06T22:00", 57.5),
        ("2026-03-28T23:00", 31.5),  # clocks are set forward in this night
    ],
)
def test_quiet_hours_are_those_of_the_zones_clocks(local: str, hours: float | None) -> None:
    at = datetime.fromisoformat(local).replace(tzinfo=ZoneInfo("Europe/Kyiv")).astimezone(UTC)
    found = quiet_left(NIGHT, at)
    assert found == (None if hours is None else timedelta(hours=hours))


def test_in_quiet_hours_only_the_urgent_pass_where_that_is_set() -> None:
    at = datetime(2026, 3, 2, 23, tzinfo=UTC)
    waiting = [
        replace(q, notification=replace(q.notification, at=at - OLD))
        for q in queue(one("a"), one("b", severity=Severity.URGENT))
    ]
    step = next_step(NIGHT, waiting, at)
    assert step.message is not None
    assert step.message.key == "b"
    held = next_step(replace(NIGHT, urgent_passes=False), waiting, at)
    assert (held.message, held.wait) == (None, timedelta(hours=6.5))
    after = next_step(replace(NIGHT, urgent_passes=False), waiting * 2, at + timedelta(hours=6.5))
    assert after.message is not None
    assert after.message.title.startswith("4 notifications")


# --- what is queued ---


@every(
    ("rules", "wanted"),
    [
        (RULES, True),
        (replace(RULES, topics=frozenset({Topic.FAILED})), True),
        (replace(RULES, topics=frozenset({Topic.GPU})), False),
        (replace(RULES, least=Severity.WARNING), False),
    ],
)
def test_a_channel_gets_what_it_wants(rules: ChannelRules, *, wanted: bool) -> None:
    assert bool(fresh([rules], [], [one()], NOW)) is wanted


def test_one_key_waits_once_and_is_repeated_only_after_its_time() -> None:
    said = one("a")
    assert fresh([RULES], [], [said, said], NOW) == [("phone", said)]
    assert fresh([RULES], queue(said), [said], NOW) == []
    day_old = [replace(queue(said)[0], sent_at=NOW - said.repeat_after)]
    just = [replace(queue(said)[0], sent_at=NOW - said.repeat_after + OLD)]
    assert fresh([RULES], just, [said], NOW) == []
    assert fresh([RULES], [*day_old, *just], [said], NOW) == []
    assert fresh([RULES], day_old, [said], NOW) == [("phone", said)]
    assert fresh([RULES, replace(RULES, name="mail")], just, [said], NOW) == [("mail", said)]


def test_old_news_is_not_queued() -> None:
    assert fresh([RULES], [], [one(age=KEPT_FOR + OLD)], NOW) == []


@given(
    st.lists(
        st.tuples(
            st.integers(-(10**6), 10**6),
            st.sampled_from(list(Severity)),
            st.none() | st.integers(-(10**6), 10**6),
        ),
        max_size=12,
    ),
    st.booleans(),
    st.integers(0, 5),
)
def test_whatever_the_clocks_did_a_step_sends_drops_or_waits_for_a_bounded_time(
    rows: list[tuple[int, Severity, int | None]], quiet: bool, uncounted: int
) -> None:
    found = [
        Queued(
            id=number,
            channel="phone",
            notification=one(str(number), age=timedelta(seconds=age), severity=severity),
            sent_at=None if sent_ago is None else NOW - timedelta(seconds=sent_ago),
        )
        for number, (age, severity, sent_ago) in enumerate(rows)
    ]
    step = next_step(NIGHT if quiet else RULES, found, NOW, uncounted=uncounted)
    waiting = {one.id for one in found if one.sent_at is None} - set(step.dropped)
    if step.message is not None:
        assert set(step.message.ids) <= waiting
    elif waiting:
        assert step.wait is not None
        assert timedelta(0) < step.wait <= timedelta(days=15)
