"""How much of a job is left: by stated time, by steps, on which machine, and what wrong figures can do."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spotd.core.domain.attempts import Attempt
from spotd.core.domain.intents import AttemptId, JobId
from spotd.core.domain.jobs import Checkpoint, Job, PaceSample
from spotd.core.domain.states import AttemptState
from spotd.core.kernel.reconcile import reconcile
from spotd.core.ranking.remaining_work import (
    BELIEVED,
    LEFT_MAX,
    PPM,
    SPREAD,
    RemainingWork,
    WorkSource,
    machine_speed_ppm,
    remaining_on,
    remaining_work,
    saved_work,
    speeds_of,
    unsaved_work,
    with_pace,
    with_work,
)
from spotd_jobs.spec.model import GpuSpeed, Work
from tests.cases import every
from tests.unit.core import builders as b

HOUR = timedelta(hours=1)
SPEEDS = (GpuSpeed(name="H100", ppm=1_000_000), GpuSpeed(name="A100-80GB", ppm=420_000))


def saved(step: int | None = None, *, attempt: int = 1, at: datetime = b.NOW, **changes: Any) -> Checkpoint:
    name = f"c{attempt}-{step}-{at.timestamp()}"
    base = Checkpoint(name=name, attempt=attempt, step=step, bytes=1, at=at, manifest_key=f"m-{name}", sha256="0" * 64)
    return replace(base, **changes)


def work_job(time: timedelta | None = None, steps: int | None = None, **changes: Any) -> Job:
    spec = {"work": Work(time=time, steps=steps), "speed": changes.pop("speed", ())}
    return b.job(spec=spec, **changes)


def running(number: int = 1, *, hours: float = 2.0, gpu: str = "RTX_4090", count: int = 1, **changes: Any) -> Attempt:
    """An attempt whose command began to run so long ago."""
    [item] = b.world_with(AttemptState.RUNNING).attempts.values()
    since = b.NOW - hours * HOUR
    quote = replace(item.quote, offer=replace(item.quote.offer, gpu=gpu, gpu_count=count))
    return replace(
        item, id=AttemptId(job=JobId("j1"), number=number), quote=quote, launched_at=since, running_at=since, **changes
    )


def sample(attempt: int, per_hour: int, *, gpu: str = "RTX_4090", count: int = 1, hours: float = 1.0) -> PaceSample:
    return PaceSample(attempt=attempt, gpu=gpu, gpu_count=count, steps=round(per_hour * hours), span=hours * HOUR)


# --- time ------------------------------------------------------------------------------------------------------


def test_nothing_is_known_of_a_job_that_states_nothing() -> None:
    job = b.job(checkpoints=(saved(500),), paces=(sample(1, 500),))
    assert remaining_work(job) is None
    assert remaining_on(job, "RTX_4090", 1) is None


@every(
    ("gpu", "count", "hours"),
    [("H100_SXM", 1, 24.0), ("H100_PCIE", 4, 6.0), ("A100_SXM_80", 2, 24 / 0.84), ("RTX_4090", 1, 24 / 0.42)],
    ids=["reference", "four of them", "slower", "not named: as slow as the slowest"],
)
def test_stated_time_is_that_of_one_gpu_of_speed_one(gpu: str, count: int, hours: float) -> None:
    left = remaining_on(work_job(24 * HOUR, speed=SPEEDS), gpu, count)
    assert left is not None
    assert left / HOUR == pytest.approx(hours)


def test_without_speeds_every_machine_counts_as_one_of_speed_one() -> None:
    job = work_job(24 * HOUR)
    assert {remaining_on(job, gpu, n) for gpu in ("H100_SXM", "RTX_4090") for n in (1, 8)} == {24 * HOUR}


def test_a_machine_without_a_gpu_counts_as_one_of_speed_one() -> None:
    assert remaining_on(work_job(24 * HOUR, speed=SPEEDS), "", 0) == 24 * HOUR


def test_the_more_exact_of_two_names_counts() -> None:
    speeds = (GpuSpeed(name="H100", ppm=1_000_000), GpuSpeed(name="H100_PCIE", ppm=700_000))
    job = work_job(speed=speeds)
    assert machine_speed_ppm(job, "H100_PCIE", 1) == 700_000
    assert machine_speed_ppm(job, "H100_SXM", 2) == 2_000_000


def test_only_what_a_checkpoint_holds_is_done() -> None:
    job, item = work_job(24 * HOUR), running(hours=5)
    assert remaining_work(job) == RemainingWork(time=24 * HOUR, source=WorkSource.STATED_TIME)
    fresh = with_work(job, item, [saved(at=b.NOW - HOUR)], b.NOW)
    job = replace(job, checkpoints=fresh)
    assert saved_work(job) == 4 * HOUR
    assert remaining_work(job) == RemainingWork(time=20 * HOUR, source=WorkSource.STATED_TIME)
    assert unsaved_work(job, item, b.NOW) == HOUR


def test_the_work_of_an_attempt_adds_to_that_of_the_checkpoint_from_which_it_resumed() -> None:
    first = saved(at=b.NOW - 9 * HOUR, worked=3 * HOUR)
    older = saved(at=b.NOW - 10 * HOUR, worked=2 * HOUR)
    job = work_job(24 * HOUR, speed=SPEEDS, checkpoints=(first, older))
    item = running(2, hours=2, gpu="A100_SXM_80", count=2, resumed_from=older.name)
    [fresh] = with_work(job, item, [saved(attempt=2)], b.NOW)
    assert fresh.worked == 2 * HOUR + 2 * HOUR * 0.84


def test_a_host_whose_clock_is_wrong_has_not_worked_longer_than_its_command_ran() -> None:
    job, item = work_job(24 * HOUR), running(hours=2)
    early, late = with_work(job, item, [saved(at=b.NOW - 99 * HOUR), saved(at=b.NOW + 9999 * HOUR)], b.NOW)
    assert (early.worked, late.worked) == (timedelta(0), 2 * HOUR)


def test_a_clock_that_leaps_ahead_counts_no_longer_than_the_machine_is_proved() -> None:
    item = running(hours=2)
    item = replace(item, meter=replace(item.meter, until=b.NOW))
    later = b.NOW + timedelta(days=365)
    [fresh] = with_work(work_job(24 * HOUR), item, [saved(at=later)], later)
    assert fresh.worked == 2 * HOUR


def test_an_estimate_that_is_used_up_reads_nothing_left() -> None:
    job = work_job(HOUR, checkpoints=(saved(worked=5 * HOUR),))
    assert remaining_on(job, "RTX_4090", 1) == timedelta(0)


# --- steps -----------------------------------------------------------------------------------------------------


def test_steps_alone_say_nothing_before_the_first_pace() -> None:
    assert remaining_work(work_job(steps=1000, checkpoints=(saved(10),))) is None


def test_steps_and_time_together_state_a_pace() -> None:
    job = work_job(10 * HOUR, 1000, checkpoints=(saved(250),))
    assert remaining_work(job) == RemainingWork(time=7.5 * HOUR, source=WorkSource.STATED_PACE)


def test_the_pace_is_learnt_from_the_jobs_own_steps_and_gives_what_is_left() -> None:
    job, item = work_job(steps=1000), running(hours=2)
    fresh = [saved(100, at=b.NOW - HOUR), saved(200)]
    job = with_pace(replace(job, checkpoints=(fresh[1], fresh[0])), item, fresh, b.NOW)
    assert job.paces == (sample(1, 100, hours=2),)
    assert remaining_work(job) == RemainingWork(time=8 * HOUR, source=WorkSource.STEPS)


def test_an_attempt_that_resumed_made_only_the_steps_since() -> None:
    source = saved(900, at=b.NOW - 5 * HOUR)
    job = work_job(steps=1000, checkpoints=(source,), paces=(sample(1, 90, hours=10),))
    job = with_pace(job, running(2, resumed_from=source.name, hours=1), [saved(950, attempt=2)], b.NOW)
    assert [one.steps for one in job.paces] == [900, 50]


@every("step", [0, -5, None, 10**18], ids=["none", "backwards", "no step", "beyond bounds"])
def test_figures_that_show_no_pace_are_passed_over(step: int | None) -> None:
    job = work_job(steps=1000)
    assert with_pace(job, running(), [saved(step)], b.NOW) is job


def test_a_run_of_seconds_shows_no_pace() -> None:
    job = work_job(steps=1000)
    assert with_pace(job, running(hours=0.01), [saved(10)], b.NOW) is job


def test_with_stated_speeds_the_pace_of_one_gpu_is_that_of_the_others() -> None:
    job = work_job(
        steps=1000, speed=SPEEDS, checkpoints=(saved(420),), paces=(sample(1, 42, gpu="A100_SXM_80", hours=10),)
    )
    left = remaining_on(job, "H100_SXM", 1)
    assert left is not None
    assert left / HOUR == pytest.approx(5.8)


def test_measured_speeds_need_two_kinds_and_what_was_not_measured_counts_as_the_slowest() -> None:
    job = b.job(paces=(sample(1, 100, gpu="A100_SXM_80"),))
    assert not speeds_of(job).is_known
    job = b.job(paces=(sample(1, 100, gpu="A100_SXM_80"), sample(2, 250, gpu="H100_SXM")))
    speeds = speeds_of(job)
    assert [speeds.of("A100_SXM_80", 1), speeds.of("H100_SXM", 1), speeds.of("L40S", 8)] == [PPM, 5 * PPM // 2, PPM]
    assert [speeds.knows("H100_SXM", 1), speeds.knows("H100_SXM", 2)] == [True, False]


# --- what a host can do ----------------------------------------------------------------------------------------


def test_one_host_that_states_wild_steps_is_believed_a_few_times_the_others() -> None:
    honest = (sample(1, 100), sample(2, 100))
    lie = PaceSample(attempt=3, gpu="RTX_4090", gpu_count=1, steps=99_900, span=HOUR)
    job = work_job(steps=100_000, paces=(*honest, lie), checkpoints=(saved(100_100, attempt=3),))
    left = remaining_work(job)
    assert left is not None
    # 200 honest steps, and the liar's hour at no more than BELIEVED times 100 an hour
    assert left.time == (100_000 - 200 - BELIEVED * 100) / 100 * HOUR


def test_a_kind_of_machine_counts_only_so_much_faster_whatever_its_hosts_state() -> None:
    job = b.job(paces=(sample(1, 100), sample(2, 10**9, gpu="H100_SXM")))
    assert machine_speed_ppm(job, "H100_SXM", 1) == SPREAD * PPM
    assert machine_speed_ppm(job, "RTX_4090", 1) == PPM


SAMPLES = st.builds(
    PaceSample,
    attempt=st.integers(0, 40),
    gpu=st.sampled_from(["RTX_4090", "H100_SXM", "A100_SXM_80", "?"]),
    gpu_count=st.integers(1, 16),
    steps=st.integers(1, 10**15),
    span=st.timedeltas(min_value=timedelta(minutes=1), max_value=timedelta(days=4000)),
)
STEPS = st.none() | st.integers(-(10**18), 10**18)


@given(
    paces=st.lists(SAMPLES, max_size=6).map(tuple),
    steps=st.lists(STEPS, max_size=4),
    total=st.none() | st.integers(1, 10**12),
    time=st.none() | st.timedeltas(min_value=timedelta(seconds=1), max_value=timedelta(days=3650)),
    speed=st.sampled_from([(), SPEEDS, (GpuSpeed(name="?", ppm=1000),), (GpuSpeed(name="H100", ppm=10**9),)]),
)
def test_whatever_hosts_state_what_is_left_is_within_bounds(
    paces: tuple[PaceSample, ...],
    steps: list[int | None],
    total: int | None,
    time: timedelta | None,
    speed: tuple[GpuSpeed, ...],
) -> None:
    checkpoints = tuple(saved(step, attempt=n + 1) for n, step in enumerate(steps))
    job = work_job(time, total, speed=speed, paces=paces, checkpoints=checkpoints)
    left = remaining_work(job)
    assert (left is None) == (time is None and (total is None or not paces))
    for gpu in ("RTX_4090", "H100_SXM"):
        on = remaining_on(job, gpu, 8)
        assert on is None or timedelta(0) <= on <= LEFT_MAX
    if left is not None:
        assert left.time >= timedelta(0)


def test_reports_stamp_checkpoints_and_teach_the_pace() -> None:
    world = b.world_with(AttemptState.RUNNING)
    [job], [item] = world.jobs.values(), world.attempts.values()
    job = replace(job, spec=replace(job.spec, work=Work(time=10 * HOUR, steps=None)))
    report = b.report(phase="run", seq=item.heartbeat_seq + 1, checkpoints=(saved(900, at=b.NOW),))
    plan = reconcile(replace(world, jobs={job.id: job}), {}, report, b.NOW)
    after = plan.jobs[job.id]
    assert after.checkpoints[0].worked == timedelta(minutes=9)
    assert after.paces == (PaceSample(attempt=1, gpu="RTX_4090", gpu_count=1, steps=900, span=timedelta(minutes=9)),)
