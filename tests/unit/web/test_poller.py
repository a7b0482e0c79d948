"""One asker for all pages: bounded, fair, and patient with a daemon that is down."""

from __future__ import annotations

from collections import Counter
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from spotd.client.transport import DaemonRefused, DaemonUnreachable
from spotd.web import poller as module
from spotd.web.poller import GAP_S, RETRIES_S, SHARE, SLOW_S, TOPICS, TOPICS_MAX, WATCHED_S, SharedPoller, WatchTopic

NOW = "2026-11-21T10:00:00.000Z"
AT = datetime(2026, 11, 21, 10, tzinfo=UTC)


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


class Scripted:
    """A daemon that answers or fails as a test says, and takes as long."""

    def __init__(self, clock: Clock) -> None:
        self.clock, self.takes_s = clock, 0.0
        self.calls: list[str] = []
        self.failure: Exception | None = None

    def _answer(self, name: str, value: Any) -> Any:
        self.calls.append(name)
        self.clock.now += self.takes_s
        if self.failure is not None:
            raise self.failure
        return value

    def status(self) -> Any:
        return self._answer("status", {"now": NOW, "status": {"clock_scale": 1.0}})

    def jobs(self, _query: Any) -> Any:
        return self._answer("jobs", {"now": NOW, "jobs": [], "paused": ""})

    def job(self, ref: str) -> Any:
        return self._answer(f"job {ref}", {"now": NOW, "job": {}})

    def cost(self, _ref: Any) -> Any:
        return self._answer("cost", "nonsense")

    def events(self, query: Any) -> Any:
        after = int(query.get("after", 0))
        return self._answer("events", [{"id": number} for number in range(after + 1, after + 3)])


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def daemon(clock: Clock) -> Scripted:
    return Scripted(clock)


@pytest.fixture
def poller(daemon: Scripted, clock: Clock) -> SharedPoller:
    return SharedPoller(daemon, clock=clock, wall=lambda: AT)  # type: ignore[arg-type]  # a stand-in


def go_on(poller: SharedPoller, clock: Clock, seconds: float, *, watching: tuple[WatchTopic, ...]) -> None:
    """What `run` does, with pages that watch these topics all the time."""
    until = clock.now + seconds
    while clock.now < until:
        for topic in watching:
            poller.watch(topic)
        topic_now = poller.next_topic()
        if topic_now is None:
            clock.now += 0.1
        else:
            poller.ask(topic_now)
            clock.now += GAP_S


def test_nothing_is_asked_while_no_page_is_open(poller: SharedPoller, clock: Clock, daemon: Scripted) -> None:
    go_on(poller, clock, 60, watching=())
    assert daemon.calls == []


def test_ten_tabs_cost_no_more_than_one(poller: SharedPoller, clock: Clock, daemon: Scripted) -> None:
    go_on(poller, clock, 60, watching=(WatchTopic("jobs"),) * 10)
    assert 25 <= Counter(daemon.calls)["jobs"] <= 31


def test_however_much_is_watched_the_pace_has_a_bound_and_each_has_its_turn(
    poller: SharedPoller, clock: Clock, daemon: Scripted
) -> None:
    many = tuple(WatchTopic("job", (str(number),)) for number in range(60))
    go_on(poller, clock, 30, watching=many)
    assert len(daemon.calls) <= 30 / GAP_S + 1
    counts = Counter(daemon.calls)
    assert min(counts[f"job {number}"] for number in range(60)) >= 3


def test_a_question_that_takes_long_is_asked_less_often(poller: SharedPoller, clock: Clock, daemon: Scripted) -> None:
    daemon.takes_s = 3.0
    go_on(poller, clock, 300, watching=(WatchTopic("jobs"),))
    assert Counter(daemon.calls)["jobs"] <= 300 / (SHARE * 3.0) + 1


def test_what_no_page_watches_any_more_is_left_alone(poller: SharedPoller, clock: Clock, daemon: Scripted) -> None:
    go_on(poller, clock, 5, watching=(WatchTopic("jobs"),))
    daemon.calls.clear()
    go_on(poller, clock, WATCHED_S + 60, watching=())
    assert len(daemon.calls) <= WATCHED_S / 2 + 1


def test_the_number_of_topics_has_a_bound(poller: SharedPoller) -> None:
    for number in range(3 * TOPICS_MAX):
        poller.watch(WatchTopic("job", (str(number),)))
    assert len(poller._watches) == TOPICS_MAX


def test_a_daemon_that_is_down_is_asked_ever_more_seldom_and_its_last_answers_stay(
    poller: SharedPoller, clock: Clock, daemon: Scripted
) -> None:
    go_on(poller, clock, 5, watching=(WatchTopic("jobs"),))
    daemon.failure = DaemonUnreachable("the daemon is not running")
    daemon.calls.clear()
    go_on(poller, clock, 120, watching=(WatchTopic("jobs"),))
    assert Counter(daemon.calls)["status"] <= 120 / RETRIES_S[-1] + len(RETRIES_S)
    assert Counter(daemon.calls)["jobs"] == 1
    assert not poller.state().is_up
    assert poller.state().seen_at == AT
    kept = poller.watch(WatchTopic("jobs"))
    assert kept is not None
    assert kept.value["jobs"] == []
    daemon.failure = None
    go_on(poller, clock, RETRIES_S[-1] + 2, watching=(WatchTopic("jobs"),))
    assert poller.state().is_up


def test_a_daemon_that_hangs_is_called_down_before_the_question_times_out(poller: SharedPoller, clock: Clock) -> None:
    poller.watch(WatchTopic("jobs"))
    poller._asked_at = clock.now
    assert poller.state().is_up
    clock.now += SLOW_S + 1
    assert not poller.state().is_up
    assert "has not answered for 11 s" in poller.state().reason


def test_a_refusal_and_a_nonsensical_answer_cost_only_their_own_part(
    poller: SharedPoller, clock: Clock, daemon: Scripted, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on(poller, clock, 5, watching=(WatchTopic("jobs"),))
    daemon.failure = DaemonRefused("the state is away", code="unavailable", hint="spotctl doctor")
    go_on(poller, clock, 5, watching=(WatchTopic("jobs"),))
    answer = poller.watch(WatchTopic("jobs"))
    assert answer is not None
    assert (answer.value["jobs"], answer.error, answer.hint) == ([], "the state is away", "spotctl doctor")
    assert poller.state().is_up
    daemon.failure = None
    broken = {**TOPICS, "cost": (1.0, lambda d, _a, _b, _n: d.cost(None)["spent"])}
    monkeypatch.setattr(module, "TOPICS", broken)
    go_on(poller, clock, 5, watching=(WatchTopic("cost"),))
    odd = poller.watch(WatchTopic("cost"))
    assert odd is not None
    assert "cannot be understood" in odd.error


def test_events_are_read_on_from_the_last_one(poller: SharedPoller, clock: Clock, daemon: Scripted) -> None:
    go_on(poller, clock, 4.5, watching=(WatchTopic("events"),))
    answer = poller.watch(WatchTopic("events"))
    assert answer is not None
    ids = [event["id"] for event in answer.value]
    assert ids == list(range(1, len(ids) + 1))
    assert len(ids) > 2


def test_a_change_is_shown_at_the_next_turn(poller: SharedPoller, clock: Clock, daemon: Scripted) -> None:
    go_on(poller, clock, 3, watching=(WatchTopic("jobs"), WatchTopic("status")))
    poller._watches[WatchTopic("jobs")].due = clock.now + 100
    poller.refresh("jobs")
    assert poller._watches[WatchTopic("jobs")].due == clock.now


def test_the_daemons_time_goes_on_between_answers(poller: SharedPoller, clock: Clock) -> None:
    go_on(poller, clock, 1, watching=(WatchTopic("status"),))
    before = poller.now()
    clock.now += 60
    assert poller.now() - before == timedelta(seconds=60)
