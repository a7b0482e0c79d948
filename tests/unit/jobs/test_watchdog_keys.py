"""The table `[watchdog]` of a job file."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from spotd_jobs.spec.codec import spec_from_json, spec_to_json
from spotd_jobs.spec.keys import job_file
from spotd_jobs.spec.model import StallAction, WatchdogPolicy
from spotd_jobs.spec.parse import merge, parse_job
from spotd_jobs.spec.problems import SpecError
from tests.cases import every
from tests.unit.jobs.test_spec_parse import LEAST


def parsed(**watchdog: Any) -> WatchdogPolicy:
    return parse_job(merge(LEAST, {"watchdog": watchdog}), "train.toml").watchdog


def test_all_of_it_is_understood_and_shown_and_survives_storage() -> None:
    given = {"min_gpu_util": 5, "window": "20m", "no_progress": "1h", "action": "stop"}
    spec = parse_job(merge(LEAST, {"watchdog": given}), "train.toml")
    assert spec.watchdog == WatchdogPolicy(
        min_gpu_util=5, no_progress=timedelta(hours=1), action=StallAction.STOP, window=timedelta(minutes=20)
    )
    assert job_file(spec)["watchdog"] == given
    assert spec_from_json(spec_to_json(spec)) == spec


def test_without_it_nothing_is_watched_or_shown() -> None:
    spec = parse_job(LEAST, "train.toml")
    assert not spec.watchdog.is_on
    assert "watchdog" not in job_file(spec)
    older = {key: value for key, value in spec_to_json(spec).items() if key != "watchdog"}
    assert spec_from_json(older) == spec


def test_a_stalled_job_moves_unless_its_owner_wants_it_to_stop() -> None:
    assert parsed(no_progress="30m") == WatchdogPolicy(no_progress=timedelta(minutes=30), action=StallAction.MOVE)
    assert parsed(min_gpu_util=1).window == timedelta(minutes=20)


@every(
    ("given", "key", "message"),
    [
        ({"min_gpu_util": 0}, "watchdog.min_gpu_util", "not between 1 and 100"),
        ({"min_gpu_util": 101}, "watchdog.min_gpu_util", "not between 1 and 100"),
        ({"min_gpu_util": True}, "watchdog.min_gpu_util", "must be a whole number"),
        ({"min_gpu_util": 5, "window": "0s"}, "watchdog.window", "not between 1s and 7d"),
        ({"no_progress": "8d"}, "watchdog.no_progress", "not between 1s and 7d"),
        ({"no_progress": float("nan")}, "watchdog.no_progress", ""),
        ({"no_progress": "1h", "action": "kill"}, "watchdog.action", "must be one of move, stop"),
        ({"window": "20m"}, "watchdog.window", "for which no limit is given"),
        ({"action": "stop"}, "watchdog.action", "follows on nothing"),
        ({}, "watchdog", "watches nothing"),
    ],
)
def test_what_cannot_be_obeyed_is_refused(given: dict[str, Any], key: str, message: str) -> None:
    with pytest.raises(SpecError) as caught:
        parse_job({**LEAST, "watchdog": given}, "train.toml")
    [problem] = caught.value.problems
    assert (problem.key, message in problem.message, bool(problem.hint)) == (key, True, True)
