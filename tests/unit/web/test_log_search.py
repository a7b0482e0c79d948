"""The search in a job's log."""

from __future__ import annotations

from typing import Any

import pytest

from spotd.web import poller
from spotd.web.poller import search_log
from tests.unit.api import made_responses as made


class Logs:
    def __init__(self, *records: Any) -> None:
        self._records = records
        self.asked: list[Any] = []

    def logs(self, ref: str, query: Any) -> Any:
        self.asked.append((ref, query))
        return iter(self._records)


def found(text: str, *records: Any) -> Any:
    daemon: Any = Logs(*records)
    answer = search_log(daemon, "j", text)
    assert daemon.asked == [("j", {"tail": poller.SEARCHED_MAX})]
    return answer


def test_a_line_that_came_in_pieces_is_found_with_its_attempt() -> None:
    answer = found(
        "LOSS",
        made.log(kind="attempt", cursor=1),
        made.log("step 1\nthe lo", cursor=2),
        made.log("ss is 2\nend", cursor=3),
        made.log("another Loss", cursor=4, attempt=2),
        made.log(kind="end", cursor=5),
    )
    assert answer.hits == ((1, "the loss is 2"), (2, "another Loss"))
    assert (answer.total, answer.lines, answer.is_cut) == (2, 4, False)


@pytest.mark.long
def test_what_a_host_wrote_is_harmless_and_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "\x1b[31mbad\x1b[0m " + "x" * 10_000
    answer = found("bad", *(made.log(f"{text}\n", cursor=number) for number in range(1000)))
    assert (len(answer.hits), answer.total) == (poller.HITS_MAX, 1000)
    assert all(len(line) <= poller.LINE_MAX and "\x1b" not in line for _, line in answer.hits)
    monkeypatch.setattr(poller, "READ_MAX", 100_000)
    answer = found("bad", *(made.log(f"{text}\n", cursor=number) for number in range(1000)))
    assert answer.is_cut
    assert answer.lines < 20


def test_nothing_is_found_in_nothing() -> None:
    answer = found("x")
    assert (answer.hits, answer.total, answer.lines, answer.is_cut) == ((), 0, 0, False)
