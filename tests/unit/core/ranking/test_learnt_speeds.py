"""What other jobs and the markets measured becomes the speed of GPUs for a job that states only its work."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from datetime import timedelta

from hypothesis import given
from hypothesis import strategies as st

from spotd.core.domain.jobs import Job, PaceSample
from spotd.core.domain.market import MarketSnapshot
from spotd.core.ranking.cost_words import cost_words
from spotd.core.ranking.remaining_work import (
    HOSTS_MIN,
    PPM,
    SPEEDS_MAX,
    SPREAD,
    is_asked,
    learnt_speeds,
    machine_speed_ppm,
    speeds_of,
)
from spotd_jobs.spec.model import GpuAlternative, GpuSpeed, JobSpec, Resources, Work
from spotd_providers.contract.values import Benchmark, HostId
from tests.cases import every
from tests.unit.core.builders import NOW, SHOP, job, market, offer
from tests.unit.core.ranking.test_expected_cost import FAST_DEAR, SLOW_CHEAP, one_provider, two_kinds
from tests.unit.core.ranking.test_remaining_work import sample

HOUR = timedelta(hours=1)
NOTHING = MarketSnapshot()
H100, A100, T4 = "H100_SXM", "A100_SXM_80", "T4"
LEARNT = (GpuSpeed(name=A100, ppm=PPM // 4), GpuSpeed(name=H100, ppm=PPM))


def spec_of(*names: str, count: int = 1) -> JobSpec:
    gpus = tuple(GpuAlternative(name=name, count=count) for name in names or ("H100", "A100", "T4"))
    return job(resources=Resources(gpu=gpus), spec={"work": Work(time=96 * HOUR)}).spec


def ran_on(**paces: int) -> tuple[PaceSample, ...]:
    """The steps per hour of one job on one GPU of each kind."""
    return tuple(sample(n, per_hour, gpu=gpu) for n, (gpu, per_hour) in enumerate(paces.items(), 1))


def scored(hosts: int = HOSTS_MIN, **scores: float) -> MarketSnapshot:
    """A market whose machines state these scores of one GPU, each of them with two."""
    offers = [
        offer(f"{gpu}-{n}", gpu=gpu, gpu_count=2, speed_score=2 * score, host_id=HostId(f"{gpu}-{n}"))
        for gpu, score in scores.items()
        for n in range(hosts)
    ]
    return market(*offers)


def found(
    spec: JobSpec, jobs: Iterable[tuple[PaceSample, ...]] = (), known: MarketSnapshot = NOTHING
) -> dict[str, int]:
    return {one.name: one.ppm for one in learnt_speeds(spec, jobs, known)}


def test_only_a_job_with_work_and_without_speeds_is_ranked_by_what_others_measured() -> None:
    assert is_asked(spec_of())
    assert is_asked(replace(spec_of(), work=Work(steps=10)))
    assert not is_asked(replace(spec_of(), work=Work()))
    assert not is_asked(replace(spec_of(), speed=(GpuSpeed(name="H100", ppm=PPM),)))


def test_the_ratio_counts_that_two_jobs_showed() -> None:
    one, other = ran_on(H100_SXM=900, A100_SXM_80=300), ran_on(H100_SXM=40, A100_SXM_80=20)
    assert found(spec_of(), [one]) == {}
    assert found(spec_of(), [one, other]) == {H100: PPM, A100: PPM // 2}  # of two the one nearer to 1


def test_machines_of_several_gpus_count_per_gpu() -> None:
    both = (sample(1, 800, gpu=H100, count=4), sample(2, 100, gpu=A100, count=1))
    assert found(spec_of(), [both, both]) == {H100: PPM, A100: PPM // 2}


def test_the_first_gpu_that_the_job_names_is_the_unit_of_work() -> None:
    jobs = [ran_on(H100_SXM=300, A100_SXM_80=100)] * 2
    assert found(spec_of("A100", "H100"), jobs) == {H100: 3 * PPM, A100: PPM}
    assert found(spec_of("L4", "A100", "H100"), jobs) == {H100: 3 * PPM, A100: PPM}
    eight = spec_of("A100", "H100", count=8)
    assert found(eight, jobs) == {H100: 3 * PPM // 8, A100: PPM // 8}
    assert machine_speed_ppm(replace(job(), spec=eight, learnt=learnt_speeds(eight, jobs, NOTHING)), A100, 8) == PPM


@every("names", [("L4",), ("L4", "A100"), ("A100",)])
def test_a_job_that_admits_fewer_than_two_compared_kinds_has_no_learnt_speeds(names: tuple[str, ...]) -> None:
    assert found(spec_of(*names), [ran_on(H100_SXM=300, A100_SXM_80=100)] * 2) == {}


def test_kinds_are_compared_over_others() -> None:
    jobs = [ran_on(H100_SXM=300, A100_SXM_80=100), ran_on(A100_SXM_80=10, T4=5)] * 2
    assert found(spec_of(), jobs) == {H100: PPM, A100: round(PPM / 3), T4: round(PPM / 6)}


def test_scores_of_a_market_count_where_no_job_compared() -> None:
    scores = scored(H100_SXM=90.0, A100_SXM_80=60.0, T4=9.0)
    assert found(spec_of(), known=scores) == {H100: PPM, A100: round(PPM * 2 / 3), T4: PPM // 10}
    jobs = [ran_on(H100_SXM=300, A100_SXM_80=100)] * 2
    # H100 stands at 1.0 and A100 at a third: T4 is a tenth of the one and 0.05 by the other, the nearer to 1 counts
    assert found(spec_of(), jobs, scores) == {H100: PPM, A100: round(PPM / 3), T4: PPM // 10}


def test_a_score_that_few_machines_state_counts_nothing() -> None:
    assert found(spec_of(), known=scored(HOSTS_MIN - 1, H100_SXM=90.0, A100_SXM_80=60.0)) == {}
    one_host = [offer(f"o{n}", gpu=g, speed_score=9.0, host_id=HostId("m")) for n, g in enumerate([H100, A100] * 9)]
    assert found(spec_of(), known=market(*one_host)) == {}


def test_each_test_of_a_market_is_a_comparison_of_its_own() -> None:
    tests = [("llm", H100, 900.0), ("llm", A100, 300.0), ("image", A100, 8.0), ("image", T4, 2.0), ("odd", H100, 1.0)]
    known = tuple(Benchmark(test=test, gpu=gpu, score=score) for test, gpu, score in tests)
    sold = replace(market().by_provider[SHOP], benchmarks=known)
    assert found(spec_of(), known=MarketSnapshot(by_provider={SHOP: sold})) == {
        H100: PPM, A100: round(PPM / 3), T4: round(PPM / 12),
    }  # fmt: skip


@every("score", [0.0, -1.0, float("nan"), float("inf")])
def test_a_score_that_is_none_is_none(score: float) -> None:
    assert found(spec_of(), known=scored(H100_SXM=score, A100_SXM_80=60.0, T4=9.0)) == {A100: PPM, T4: 150_000}


def test_hosts_that_lie_make_a_kind_faster_by_the_spread_at_most() -> None:
    lie, honest = ran_on(H100_SXM=1, T4=10**9), ran_on(H100_SXM=30, T4=10)
    assert found(spec_of(), [lie] * 9) == {H100: PPM, T4: SPREAD * PPM}
    assert found(spec_of(), [lie, honest]) == {H100: PPM, T4: round(PPM / 3)}, "one lie against one word moves nothing"


@given(
    st.lists(
        st.dictionaries(st.sampled_from([f"G{n}" for n in range(90)]), st.integers(1, 10**15), max_size=12), max_size=40
    ),
    st.randoms(use_true_random=False),
)
def test_whatever_was_measured_the_speeds_are_bounded_and_the_order_changes_nothing(
    jobs: list[dict[str, int]], random: object
) -> None:
    paced, all_of_them = [ran_on(**one) for one in jobs], spec_of(*(f"G{n}" for n in range(90)))
    speeds = found(all_of_them, paced)
    assert speeds == found(all_of_them, paced[::-1])
    assert len(speeds) != 1
    assert len(speeds) <= SPEEDS_MAX
    assert all(ppm >= 1 for ppm in speeds.values())


# --- as a job has them -----------------------------------------------------------------------------------------


def learnt_job(*paces: PaceSample, **spec: object) -> Job:
    return replace(two_kinds(work=Work(time=96 * HOUR), **spec), learnt=LEARNT, paces=paces)


def test_what_the_job_states_goes_before_what_was_learnt() -> None:
    stated = (GpuSpeed(name="H100", ppm=PPM), GpuSpeed(name="A100", ppm=PPM // 2))
    assert machine_speed_ppm(learnt_job(speed=stated), A100, 4) == 2 * PPM
    assert machine_speed_ppm(learnt_job(), A100, 4) == PPM
    assert machine_speed_ppm(learnt_job(), H100, 4) == 4 * PPM
    assert machine_speed_ppm(learnt_job(), T4, 4) == PPM, "not known: as slow as the slowest"
    assert not speeds_of(learnt_job()).knows(T4, 4)


def test_the_own_pace_goes_before_what_was_learnt_in_the_same_unit() -> None:
    both = learnt_job(sample(1, 100, gpu=A100, count=4), sample(2, 300, gpu=H100, count=4))
    assert machine_speed_ppm(both, A100, 4) == PPM, "a quarter of an H100, four times: as it was before"
    assert machine_speed_ppm(both, H100, 4) == 3 * PPM, "three times that, by its own steps"
    assert machine_speed_ppm(both, H100, 1) == PPM, "has not run on it: as it was learnt"
    assert speeds_of(both).knows(H100, 1)
    assert machine_speed_ppm(both, T4, 1) == PPM, "known to neither: like the slowest that was measured"


@every("stated", [1, 10**12])
def test_a_host_that_misstates_its_steps_moves_no_kind_further_than_the_spread(stated: int) -> None:
    for liar, other in ((A100, H100), (H100, A100)):
        lied = learnt_job(sample(1, 1_000, gpu=other, count=1), sample(2, stated, gpu=liar, count=1))
        for gpu in (A100, H100):
            known = machine_speed_ppm(learnt_job(), gpu, 1)
            assert known // SPREAD <= machine_speed_ppm(lied, gpu, 1) <= known * SPREAD


def test_a_kind_that_was_only_learnt_is_no_faster_than_the_fastest_that_the_job_ran_on() -> None:
    own = learnt_job(sample(1, 100, gpu=A100, count=1), sample(2, 500, gpu=H100, count=8))
    fastest = machine_speed_ppm(own, H100, 8)
    assert machine_speed_ppm(own, H100, 16) == fastest < machine_speed_ppm(learnt_job(), H100, 16)
    assert machine_speed_ppm(own, H100, 4) <= fastest


def test_a_job_with_what_was_learnt_is_ranked_by_the_whole_cost_and_says_so() -> None:
    wanted = learnt_job()
    words = cost_words(wanted, one_provider(wanted), market(SLOW_CHEAP, FAST_DEAR), NOW)
    assert words[0].startswith(
        "4 x H100_SXM at $14.00/h finishes in 24 h for about $336; 4 x A100_SXM_80 at $5.20/h in"
    )
    assert words[1] == "the speed of machines is that which earlier jobs and the markets' own benchmarks measured"
