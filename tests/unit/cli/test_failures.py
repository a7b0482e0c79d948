"""A failed job: its reason, the meaning of its exit code, what it wrote last and the next step come first."""

from __future__ import annotations

import json

import pytest

from spotd.core.domain.intents import JobId
from spotd.core.domain.states import JobState
from spotd.core.host_reports import explain_exit
from tests.cases import every
from tests.unit.api import worlds
from tests.unit.cli.conftest import Ctl
from tests.unit.store import values as v

OLD = JobId("6j99ffffff")


@pytest.fixture
def failed(ctl: Ctl) -> Ctl:
    """A job failed for want of a command, after three lines of output."""
    host = ctl.place.rig.host(OLD, 1)
    host.log("step 1\nstep 2\n")
    host.log("/bin/sh: 1: trian.py: not found\n")
    host.log("[spotd] ended: failed (exit code 127)\n")
    ctl.place.write(worlds.ended(exit_code=127, reason="the command failed: exit code 127"))
    return ctl


FIRST = (
    "the command failed: exit code 127; the command was not found",
    "| step 1",
    "| step 2",
    "| /bin/sh: 1: trian.py: not found",
    "Try: check the name in `run`, and that `setup` or the image has it",
)


def test_show_begins_with_why_it_failed_and_states_no_savings(failed: Ctl) -> None:
    out = failed("show", "old").out
    assert tuple(out.splitlines()[: len(FIRST)]) == FIRST
    assert "saved" not in out
    assert "instead of" not in out


def test_why_states_why_it_failed_and_why_it_ran_there(failed: Ctl) -> None:
    chosen = worlds.event(
        worlds.attempt(of=OLD), "attempt.intended", "renting 1 x H100 at local, spot: the best that fits now"
    )
    failed.place.write(v.plan(chosen))
    out = failed("why", "old").out.splitlines()
    assert out[0] == "old (6j99ffffff) is FAILED:"
    assert tuple(line.strip() for line in out[1 : 1 + len(FIRST)]) == FIRST
    assert out[1 + len(FIRST)] == "  ran there attempt 1: 1 x H100 at local, spot: the best that fits now"


def test_ls_names_it_its_last_line_and_the_next_step(failed: Ctl) -> None:
    result = failed("ls")
    assert "old (6j99ffffff) failed: the command failed: exit code 127; the command was not found" in result.err
    assert "trian.py: not found" in result.err
    assert "step 2" not in result.err
    assert "Try: check the name" in result.err
    assert result.out.splitlines()[1].split()[6:8] == ["4.62", "-"], "a failure saved nothing"


def test_the_answer_has_all_of_it(failed: Ctl) -> None:
    [job] = json.loads(failed("ls", "-o", "json").out)["jobs"]
    assert job["failure"] == {
        "attempt": 1,
        "reason": "the command failed: exit code 127",
        "exit_code": 127,
        "meaning": "the command was not found",
        "output": ["step 1", "step 2", "/bin/sh: 1: trian.py: not found"],
        "next_step": "check the name in `run`, and that `setup` or the image has it",
    }


def test_a_command_that_failed_and_is_tried_again_shows_its_output_meanwhile(ctl: Ctl) -> None:
    ctl.place.rig.host(OLD, 1).log("big batch\nKilled\n[spotd] ended: failed (exit code 137)\n")
    reason = "the command failed: exit code 137; 1 of 1 retries left"
    ctl.place.write(worlds.ended(JobState.RECOVERING, ended_at=None, exit_code=137, reason=reason))
    for command in ("show", "why"):
        lines = [line.strip() for line in ctl(command, "old").out.splitlines()]
        assert any(line.startswith(f"{reason}; the command was killed") for line in lines), command
        assert "| Killed" in lines
        [step] = [line for line in lines if line.startswith("Try:")]
        assert step.startswith(
            "Try: nothing if it may pass next time; else spotctl cancel old and ask for more: memory"
        )
    assert "old (6j99ffffff) is RECOVERING: " in ctl("why", "old").out
    assert "failed:" not in ctl("ls").err


def test_a_job_that_recovers_from_a_loss_has_no_failure_although_a_command_failed_before(ctl: Ctl) -> None:
    ctl.place.write(
        worlds.ended(JobState.RECOVERING, ended_at=None, exit_code=137, reason="somebody bid more for the machine")
    )
    assert json.loads(ctl("show", "old", "-o", "json").out)["job"]["failure"] is None


@pytest.mark.parametrize("state", [JobState.SUCCEEDED, JobState.CANCELLED, JobState.EXPIRED])
def test_a_job_that_did_not_fail_has_no_failure(ctl: Ctl, state: JobState) -> None:
    ctl.place.write(worlds.ended(state))
    assert json.loads(ctl("show", "old", "-o", "json").out)["job"]["failure"] is None
    assert "Try:" not in ctl("ls").err


def test_only_the_attempt_that_failed_is_quoted_and_of_much_output_the_end(ctl: Ctl) -> None:
    first, last = ctl.place.rig.host(OLD, 1), ctl.place.rig.host(OLD, 2)
    first.log("of the first machine\n")
    for number in range(40):
        last.log(f"line {number}\x1b[31m\n")
    last.log("x" * 9_000)
    ctl.place.write(worlds.ended(exit_code=1, attempts_made=2))
    output = json.loads(ctl("show", "old", "-o", "json").out)["job"]["failure"]["output"]
    assert len(output) <= 10
    assert output[-2].startswith("line 39")
    assert len(output[-1]) == 300
    assert "\x1b" not in ctl("show", "old").out


def test_a_log_that_cannot_be_read_hides_nothing_else(ctl: Ctl) -> None:
    ctl.place.write(worlds.ended(exit_code=137, reason="the command failed: exit code 137"))
    failure = json.loads(ctl("show", "old", "-o", "json").out)["job"]["failure"]
    assert failure["output"] == []
    assert "memory was full" in failure["meaning"]


@every(
    ("code", "output", "meaning", "step"),
    [
        (
            1,
            ["torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB"],
            "memory of the GPU",
            "spotctl size",
        ),
        (1, ["RuntimeError: CUDA error: out of memory"], "memory of the GPU", "smaller batch"),
        (137, ["CUDA out of memory"], "memory of the GPU", "smaller batch"),
        (1, ["OSError: [Errno 28] No space left on device"], "disk was full", "disk under"),
        (1, ["ModuleNotFoundError: No module named 'torch'"], "package is missing", "setup"),
        (126, [], "cannot be executed", "interpreter"),
        (127, [], "not found", "run"),
        (137, [], "SIGKILL", "memory"),
        (-9, [], "SIGKILL", "memory"),
        (139, [], "SIGSEGV", "spotctl logs train"),
        (143, [], "ended by SIGTERM", "spotctl retry train"),
        (1, [], "", "spotctl logs train"),
        (255, [], "", "spotctl logs train"),
        (None, [], "", "spotctl retry train"),
        (10**9, [], "", "spotctl logs train"),
    ],
)
def test_an_exit_code_has_its_usual_meaning(code: int | None, output: list[str], meaning: str, step: str) -> None:
    found = explain_exit(code, output, "train")
    assert meaning in found.meaning
    assert bool(meaning) == bool(found.meaning)
    assert step in found.step


def test_checkpoints_leave_room_for_what_else_happened(failed: Ctl) -> None:
    began = worlds.event(worlds.attempt(of=OLD), "attempt.intended", "renting 1 x H100 at local")
    saves = [worlds.event(worlds.attempt(of=OLD), "checkpoint.accepted", f"checkpoint step-{n}") for n in range(40)]
    failed.place.write(v.plan(began, *saves))
    events = json.loads(failed("why", "old", "-o", "json").out)["why"]["events"]
    assert any(one["message"] == began.message for one in events)
    assert sum(one["kind"] == "checkpoint.accepted" for one in events) == 30
    assert [one["id"] for one in events] == sorted(one["id"] for one in events)
