"""`spotctl budget`, `spotctl ceiling` and `spotctl forget`."""

from __future__ import annotations

import json

import pytest

from spotd.core.domain.attempts import MachineState
from spotd.core.domain.intents import JobId
from spotd.core.domain.states import JobState
from spotd_jobs.spec.model import PriceLimit
from tests.cases import every
from tests.unit.api import worlds
from tests.unit.cli.conftest import Ctl


@pytest.fixture
def stocked(ctl: Ctl) -> Ctl:
    ctl.place.write(worlds.running(), worlds.ended(JobState.EXPIRED))
    return ctl


def budget(ctl: Ctl) -> int | None:
    """What `llama-lora` may cost; it was submitted with $120."""
    return ctl.rig.job(JobId(worlds.RUNNING_ID)).budget


@pytest.mark.parametrize(
    ("text", "amount"),
    [
        ("+20", 140_000_000),
        ("=140", 140_000_000),
        ("140.50", 140_500_000),
        ("$3", 3_000_000),
        ("+0.000001", 120_000_001),
    ],
)
def test_a_budget_is_set_or_added_to(stocked: Ctl, text: str, amount: int) -> None:
    assert stocked("budget", "llama-lora", text, "-o", "id").out == "6k0a1b2c3d\n"
    assert budget(stocked) == amount


@every(
    "text",
    [
        "-5",
        "-20",
        "--3",
        "",
        "+",
        "=",
        "++20",
        "+-20",
        "1e9",
        "nan",
        "inf",
        "0",
        "+0",
        "0.0000001",
        "1" * 400,
        "20 apples",
        "1,000",
    ],
)
def test_what_is_no_budget_is_refused_with_a_way_out(stocked: Ctl, text: str) -> None:
    result = stocked("budget", "llama-lora", text)
    assert result.code == 2
    assert result.err.startswith("error: the budget ")
    assert "hint:" in result.err
    assert budget(stocked) == 120_000_000


def test_an_expired_job_is_told_to_be_retried(stocked: Ctl) -> None:
    result = stocked("budget", "old", "+20")
    assert (result.code, result.err) == (0, "spotctl retry 6j99ffffff queues it again with this budget\n")
    assert stocked("budget", "llama-lora", "+20").err == ""


def test_the_new_budget_is_told_with_what_is_spent_of_it(stocked: Ctl) -> None:
    out = stocked("budget", "llama-lora", "+20").out
    assert out.startswith("llama-lora (6k0a1b2c3d) may cost $140.00 in all, $")
    assert "of it is spent; it is " in out


@pytest.mark.parametrize(
    ("text", "limit"),
    [
        ("2.40", PriceLimit(per_gpu_hour=2_400_000)),
        ("$3.10/gpu-h", PriceLimit(per_gpu_hour=3_100_000)),
        ("19.20/h", PriceLimit(machine_hour=19_200_000)),
        ("config", None),
    ],
)
def test_a_ceiling_is_set_in_the_units_of_a_job_file(stocked: Ctl, text: str, limit: PriceLimit | None) -> None:
    assert stocked("ceiling", "llama-lora", text, "-o", "id").out == "6k0a1b2c3d\n"
    assert stocked.rig.job(JobId(worlds.RUNNING_ID)).spec.price == limit


@every("text", ["", "0", "-1", "nan", "inf", "1e308", "2.40/day", "=2.40", "+1", "9" * 400, "Config"])
def test_what_is_no_ceiling_is_refused_with_a_way_out(stocked: Ctl, text: str) -> None:
    result = stocked("ceiling", "llama-lora", "--", text)
    assert result.code == 2
    assert result.err.startswith("error: the ceiling ")
    assert "hint: write 2.40 per GPU-hour" in result.err
    assert stocked.rig.job(JobId(worlds.RUNNING_ID)).spec.price == PriceLimit(per_gpu_hour=2_400_000)


def test_the_new_ceiling_is_stated_and_shown(stocked: Ctl) -> None:
    out = stocked("ceiling", "llama-lora", "3.10").out
    assert out == "llama-lora (6k0a1b2c3d) accepts up to $3.100 per GPU-hour; it is RUNNING: runs on local h3\n"
    assert "$3.100 per GPU-hour" in stocked("show", "llama-lora").out
    assert "the job's ceiling was changed from $2.4000/GPU-h to $3.1000/GPU-h" in stocked("why", "6k0a").out
    assert stocked("ceiling", "absent", "3.10").code == 6


def machine_state(ctl: Ctl) -> MachineState:
    (only,) = ctl.rig.attempts(JobId(worlds.RUNNING_ID))
    return only.machine


def test_a_machine_is_not_given_up_where_nobody_can_be_asked(ctl: Ctl) -> None:
    ctl.place.write(worlds.running())
    result = ctl("forget", "m1")
    assert result.code == 2
    assert "only with a confirmation" in result.err
    assert "--yes" in result.err
    assert machine_state(ctl) is MachineState.LIVE


def test_a_machine_is_given_up_with_a_confirmation(ctl: Ctl) -> None:
    ctl.place.write(worlds.running())
    result = ctl("forget", "m1", "-y")
    assert (result.code, result.out) == (0, "m1 at local, attempt 1 of job 6k0a1b2c3d is given up\n")
    assert machine_state(ctl) is MachineState.GONE
    ctl.place.reset()
    ctl.place.write(worlds.running())
    assert json.loads(ctl("forget", "m1", "-y", "-o", "json").out)["forgotten"]["job"] == "6k0a1b2c3d"


def test_an_unknown_machine_is_exit_6(ctl: Ctl) -> None:
    assert ctl("forget", "m2", "--yes").code == 6
    assert ctl("forget", "", "--yes").code == 2
