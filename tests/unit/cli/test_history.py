from __future__ import annotations

import json

import pytest

from tests.unit.api import made_responses
from tests.unit.cli.conftest import Ctl


def test_history_shows_percentiles_of_each_span(ctl: Ctl) -> None:
    ctl.place.answers("prices.history", made_responses.history())
    result = ctl("history", "--gpu", "h100")
    assert result.out == (
        "FROM                 GPU       MARKET  OFFERS    LOW    P10    P25  MEDIAN    P75    P90   HIGH\n"
        "2026-11-21 07:00:00  H100_SXM  spot      12.2  1.900  2.000  2.100   2.310  2.600  2.900  3.400\n"
    )
    assert result.err == ""


def test_history_json_is_the_answer_itself(ctl: Ctl) -> None:
    ctl.place.answers("prices.history", made_responses.history())
    body = json.loads(ctl("history", "-o", "json").out)
    assert (body["schema"], body["bucket_s"]) == (1, 21_600)
    assert body["prices"] == made_responses.history()["prices"]


def test_flags_reach_the_daemon_with_spans_counted_from_its_clock(ctl: Ctl) -> None:
    asked = ctl.place.answers("prices.history", made_responses.history())
    ctl("history", "--offer", "vast/771:spot", "--market", "spot", "--since", "2d", "--until", "1d", "--every", "1h")
    ((query,),) = asked
    assert (query.provider, query.offer, query.market, query.every_s) == ("vast", "771:spot", "spot", 3_600)
    assert query.since is not None
    assert query.until is not None
    assert [query.since.isoformat(), query.until.isoformat()] == [
        "2026-11-19T10:00:00+00:00", "2026-11-20T10:00:00+00:00",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "flags",
    [
        ("--offer", "771"),
        ("--offer", "vast/771", "--provider", "aws"),
        ("--market", "reserved"),
        ("--every", "5s"),
        ("--every", "soon"),
        ("--since", "someday"),
    ],
    ids=" ".join,
)
def test_flags_that_mean_nothing_are_refused(ctl: Ctl, flags: tuple[str, ...]) -> None:
    asked = ctl.place.answers("prices.history", made_responses.history())
    result = ctl("history", *flags)
    assert (result.code, result.out, asked) == (2, "", [])


def test_no_prices_are_said_and_not_left_blank(ctl: Ctl) -> None:
    result = ctl("history")
    assert (result.code, result.out) == (0, "")
    assert result.err == "no prices of this kind between 2026-11-14 10:00:00 and 2026-11-21 10:00:00\n"


def test_longer_spans_than_asked_for_and_trouble_are_told(ctl: Ctl) -> None:
    ctl.place.answers("prices.history", made_responses.history(trouble="only 3 MB are free"))
    result = ctl("history", "--gpu", "h100", "--every", "1h")
    assert "spans of 6 h 0 min: the older part is rolled up" in result.err
    assert "warning: not all prices are kept or shown now: only 3 MB are free" in result.err
