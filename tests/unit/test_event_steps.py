"""Events as lines: one for each step, and the routine of checkpoints as one."""

from __future__ import annotations

from typing import Any

from spotd.lists import steps
from tests.cases import every
from tests.unit.api import made_responses as made

J, K = "6j00000001", "6j00000002"


def event(minute: int, kind: str, message: str = "", **given: Any) -> Any:
    at = f"2026-03-02T{12 + minute // 60:02}:{minute % 60:02}:00.000Z"
    return made.event(at=at, kind=kind, message=message or kind, **{"job": J, **given})


def saved(minute: int, step: int | None, **given: Any) -> Any:
    data = {"name": f"step-{step}", "step": step, "bytes": 1}
    return event(minute, "checkpoint.accepted", f"checkpoint step-{step} is complete", data=data, attempt=1, **given)


def shown(*events: Any) -> list[tuple[str, str]]:
    return [(one.event["kind"], one.message) for one in steps(events)]


def test_a_change_of_job_and_attempt_and_machine_for_one_reason_is_one_step() -> None:
    found = steps(
        [
            event(1, "job.provisioning", "renting h1"),
            event(1, "attempt.intended", "renting h1: best", attempt=1),
            event(2, "machine.launched", "the machine exists", attempt=1),
            event(2, "job.starting", "the machine starts"),
            event(3, "attempt.running", "the command runs", attempt=1),
            event(3, "job.running", "runs on h1"),
            event(4, "attempt.user_error", "the command failed: exit code 1", attempt=1),
            event(4, "job.failed", "the command failed: exit code 1; no retry is left"),
            event(4, "machine.ending", "its attempt ended: the command failed: exit code 1", attempt=1),
            event(5, "machine.gone", "machine ended; it cost $0.01", attempt=1),
        ]
    )
    assert [(one.event["kind"], one.event["attempt"], one.message) for one in found] == [
        ("attempt.intended", 1, "renting h1: best"),
        ("job.starting", 1, "the machine starts"),
        ("job.running", 1, "runs on h1"),
        ("job.failed", 1, "the command failed: exit code 1; no retry is left"),
        ("machine.gone", 1, "machine ended; it cost $0.01"),
    ]


@every(
    "second",
    [
        event(1, "job.failed", "the command failed", job=K),
        event(2, "job.failed", "the command failed"),
        event(1, "checkpoint.damaged", "the command failed"),
        event(1, "job.budget", "another thing"),
        event(1, "provider.away", "the command failed", job=None),
    ],
    ids=["another job", "later", "another family", "another reason", "no job"],
)
def test_what_is_another_step_stays_on_its_own_line(second: Any) -> None:
    assert len(shown(event(1, "attempt.user_error", "the command failed", attempt=1), second)) == 2


def test_checkpoints_between_two_steps_are_one_line_with_the_newest_and_their_time() -> None:
    events = [event(0, "job.running", "runs")]
    for number in range(37):
        events.append(saved(3 + 3 * number, 100 * number))
        events.append(event(4 + 3 * number, "checkpoint.dropped", "deleted old checkpoint", data={}))
    events.append(event(200, "attempt.preempted", "taken", attempt=1))
    first, folded, last = steps(events)
    assert (first.message, last.message, folded.number, folded.stored) == ("runs", "taken", 74, 37)
    assert folded.message == "37 checkpoints, newest step 3600"
    assert (folded.since, folded.event["at"]) == ("2026-03-02T12:03:00.000Z", "2026-03-02T13:52:00.000Z")
    assert folded.local_span.count("-") == 1


def test_the_checkpoints_of_jobs_that_take_turns_are_a_line_for_each_job() -> None:
    events = [saved(number, number, job=(J, K)[number % 2]) for number in range(10)]
    assert [(one.event["job"], one.message) for one in steps(events)] == [
        (J, "5 checkpoints, newest step 8"),
        (K, "5 checkpoints, newest step 9"),
    ]


def test_one_checkpoint_is_as_it_was_and_deletions_alone_are_counted() -> None:
    assert shown(saved(1, 5)) == [("checkpoint.accepted", "checkpoint step-5 is complete")]
    dropped = [event(number, "checkpoint.dropped", "deleted old checkpoint a", data={}) for number in range(3)]
    assert shown(*dropped) == [("checkpoint.dropped", "deleted 3 old checkpoints")]


@every("data", [{}, {"name": None, "step": None}, {"name": "\x1b[31mred", "step": None}])
def test_a_checkpoint_without_a_step_is_named_harmlessly(data: dict[str, Any]) -> None:
    found = steps([saved(1, 1), event(2, "checkpoint.accepted", "x", data=data)])
    assert [one.message for one in found] in (["2 checkpoints"], ["2 checkpoints, newest red"])


def test_a_hundred_thousand_events_are_one_pass() -> None:
    events = [saved(1, number) for number in range(100_000)]
    assert shown(*events) == [("checkpoint.accepted", "100000 checkpoints, newest step 99999")]
