"""One order for several jobs."""

from __future__ import annotations

from typing import Any

import pytest

from spotd.client.transport import DaemonRefused, DaemonUnreachable
from spotd.web.pages import bulk
from spotd.web.pages.bulk import ORDERS, OrderOutcome
from tests.cases import every


class Asked:
    """A daemon that refuses some jobs, and goes away at one of them."""

    def __init__(self, *, refused: tuple[str, ...] = (), away_at: str = "") -> None:
        self.calls: list[tuple[Any, ...]] = []
        self._refused, self._away_at = refused, away_at

    def _answer(self, *call: Any) -> dict[str, Any]:
        if call[1] == self._away_at:
            raise DaemonUnreachable("away")
        self.calls.append(call)
        if call[1] in self._refused:
            raise DaemonRefused(f"{call[1]} has ended already", code="conflict", hint="spotctl ls")
        return {"job": {"id": call[1]}}

    def cancel(self, ref: str) -> dict[str, Any]:
        return self._answer("cancel", ref)

    def retry(self, ref: str, *, start: int = 0) -> dict[str, Any]:
        answer = self._answer("retry", ref, start)
        return {"array": {"next_index": start + 5 if start < 10 else None}} if ref == "array" else answer

    def set_ceiling(self, ref: str, text: str) -> dict[str, Any]:
        return self._answer("ceiling", ref, text)


def perform(daemon: Any, order: str, *jobs: str, text: str = "") -> list[OrderOutcome]:
    return bulk.perform(daemon, ORDERS[order], jobs, text)


def test_each_job_is_asked_for_by_itself_and_a_refusal_stops_none_of_the_others() -> None:
    daemon = Asked(refused=("b",))
    found = perform(daemon, "ceiling", "a", "b", "c", text="0.50")
    assert daemon.calls == [("ceiling", one, "0.50") for one in "abc"]
    assert [one.job for one in found if not one.refusal] == ["a", "c"]
    assert found[1] == OrderOutcome(job="b", refusal="b has ended already", hint="spotctl ls")
    assert bulk.report(ORDERS["ceiling"], found) == "2 jobs changed; 1 refused"
    assert bulk.report(ORDERS["cancel"], found[:1]) == "1 job cancelled"


def test_the_whole_of_an_array_is_retried_though_the_daemon_stops_in_between() -> None:
    daemon = Asked()
    assert perform(daemon, "retry", "array") == [OrderOutcome(job="array")]
    assert [start for _, _, start in daemon.calls] == [0, 5, 10]


def test_a_daemon_that_goes_away_ends_the_order() -> None:
    daemon = Asked(away_at="b")
    with pytest.raises(DaemonUnreachable):
        perform(daemon, "cancel", "a", "b", "c")
    assert daemon.calls == [("cancel", "a")]


@every(("number", "text"), [(1, "n0"), (6, "n0, n1, n2, n3, n4, n5"), (8, "n0, n1, n2, n3, n4, n5 and 2 others")])
def test_of_many_names_the_first_are_shown(number: int, text: str) -> None:
    assert bulk.names_of([f"n{one}" for one in range(number)]) == text
