"""Deadlines as people write them."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spotd_jobs.spec.fields import LATEST, SPAN_MIN, deadline_words, parse_deadline
from spotd_jobs.spec.keys import job_file
from spotd_jobs.spec.model import Deadline, PolicyName, Schedule
from spotd_jobs.spec.parse import parse_job
from spotd_jobs.spec.problems import BadValue
from tests.cases import every
from tests.unit.jobs.test_spec_windows import LEAST, problems, schedule_of

_EIGHT = datetime(2026, 11, 24, 6, 0, tzinfo=UTC)


@every(
    "value",
    [
        "2026-11-24T08:00:00+02:00",
        "2026-11-24 08:00+02:00",
        "2026-11-24t06:00:00z",
        datetime(2026, 11, 24, 8, 0, tzinfo=timezone(timedelta(hours=2))),
    ],
)
def test_an_instant_has_a_zone_and_is_kept_in_utc(value: object) -> None:
    assert parse_deadline(value) == Deadline(at=_EIGHT)


def test_a_span_counts_from_the_submission() -> None:
    schedule = schedule_of(deadline="36h", max_duration="2d", policy="greedy")
    assert schedule == Schedule(
        deadline=Deadline(span=timedelta(hours=36)), max_duration=timedelta(days=2), policy=PolicyName.GREEDY
    )


@every(
    ("value", "words"),
    [
        ("0s", "shorter than a minute"),
        ("", "not a duration"),
        ("-1h", "not a duration"),
        ("soon", "not a duration"),
        (36, "must be text, not a number"),
        (float("nan"), "must be text"),
        (True, "must be text, not true or false"),
        ("11y", "unknown unit"),
        ("9999d", "longer than ten years"),
        ("2026-11-24T08:00:00", "has no time zone"),
        ("2026-11-24", "has no time zone"),
        ("2026-02-30T08:00:00Z", "no instant that a calendar has"),
        ("9999-12-31T23:59:59-23:00", "no instant that a calendar has"),
        ("9999-12-31T23:59:59Z", "is after 2100"),
        ("2026-11-24T08:00:00Z" * 9, "not a duration"),
    ],
)
def test_what_no_deadline_can_be_is_refused_with_a_way_out(value: object, words: str) -> None:
    with pytest.raises(BadValue, match=words) as caught:
        parse_deadline(value)
    assert caught.value.hint


@given(
    st.builds(Deadline, span=st.timedeltas(SPAN_MIN, timedelta(days=3650)))
    | st.builds(Deadline, at=st.datetimes(max_value=LATEST.replace(tzinfo=None, year=2099), timezones=st.just(UTC)))
)
def test_every_deadline_is_read_back_as_it_is_shown(deadline: Deadline) -> None:
    assert parse_deadline(deadline_words(deadline)) == deadline


def test_a_job_file_shows_it_as_it_was_understood() -> None:
    written: dict[str, Any] = {"deadline": "2026-11-24T06:00:00+00:00", "max_duration": "2d", "policy": "slack-pacing"}
    assert job_file(parse_job({**LEAST, "schedule": written}, ""))["schedule"] == {"priority": 0, **written}


def test_a_policy_that_decides_about_a_deadline_needs_one() -> None:
    assert schedule_of(policy="ceiling").policy is PolicyName.CEILING
    [(key, (message, hint))] = problems(policy="slack-pacing").items()
    assert (key, message) == ("schedule.policy", "slack-pacing decides about a deadline, and there is none")
    assert "36h" in hint


def test_an_unknown_policy_is_refused_with_the_nearest() -> None:
    [(key, (_, hint))] = problems(policy="slack-pace", deadline="1h").items()
    assert (key, hint) == ("schedule.policy", 'did you mean "slack-pacing"?')
