"""How often a job is advised to save, and which spot jobs are refused because they would lose everything."""

from __future__ import annotations

import math
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spotd.core.checkpoints import (
    INTERVAL_MAX,
    SAVE_TIME_MAX,
    advice_words,
    advised_interval,
    hazard_at,
    prior_hazard_ppm,
    states_checkpoints,
    unprotected_words,
    with_save_time,
)
from spotd.core.decide import decide
from spotd.core.domain.jobs import Job
from spotd.core.domain.states import AttemptState
from spotd.core.domain.world import NO_EXPERIENCE, Experience, RecordKind
from spotd.core.experience import PROVED_PPM_MAX, Hazards
from spotd_jobs.spec.model import CheckpointPolicy, MarketChoice, MetricBest, Resources, Work
from spotd_providers.contract.values import HostId, Interruption, Market
from tests.cases import every
from tests.unit.core.builders import NOW, job, market, offer, shop_policy, world_with
from tests.unit.core.experiences import experience, record
from tests.unit.core.ranking.test_expected_cost import one_provider
from tests.unit.core.ranking.test_remaining_work import saved

HOUR, MINUTE, SECOND = timedelta(hours=1), timedelta(minutes=1), timedelta(seconds=1)


@every(
    ("save", "hazard_per_h", "seconds"),
    [
        (60, 1 / 6, 1570),
        (60, 1.0, 1200),
        (5, 1 / 6, 461),
        (60, 0.001, 3600),
        (300, 1 / 6, 3600),
        (0, 1.0, 10),
        (60, 0.0, 3600),
        (3600, 1.0, 3600),
        (10**9, 1.0, 3600),
        (-5, 1.0, 10),
    ],
    ids=[
        "daly", "never below 20 saves", "quick saves", "quiet", "20 saves above an hour", "free", "no losses",
        "an hour", "absurd", "negative",
    ],
)  # fmt: skip
def test_the_interval_is_that_of_daly_within_its_bounds(save: float, hazard_per_h: float, seconds: int) -> None:
    found = advised_interval(timedelta(seconds=save), round(hazard_per_h * 1_000_000))
    assert found is not None
    assert found.total_seconds() == pytest.approx(seconds, abs=1)


def test_dalys_formula_is_youngs_but_for_its_higher_orders() -> None:
    found = advised_interval(20 * SECOND, 200_000)
    assert found is not None
    cost, mean = 20, 5 * 3600
    daly = math.sqrt(2 * cost * mean) * (1 + math.sqrt(cost / (2 * mean)) / 3 + cost / (18 * mean)) - cost
    assert found.total_seconds() == pytest.approx(daly, abs=1)


def test_nothing_is_advised_before_a_save_was_measured() -> None:
    assert advised_interval(None, 200_000) is None


@given(st.floats(-1e6, 1e8), st.integers(0, 10**12))
def test_whatever_is_stated_the_advice_is_a_span_up_to_an_hour(save: float, hazard: int) -> None:
    found = advised_interval(timedelta(seconds=save), hazard)
    assert found is not None
    assert 10 * SECOND <= found <= INTERVAL_MAX


def test_the_hazard_falls_with_age() -> None:
    ages = [timedelta(0), 20 * MINUTE, 40 * MINUTE, 90 * MINUTE, 3 * HOUR, 6 * HOUR, 30 * HOUR]
    found = [hazard_at(100_000, age) for age in ages]
    assert found == sorted(found, reverse=True)
    spans = [advised_interval(20 * SECOND, hazard) for hazard in found]
    assert spans == sorted(spans, key=lambda one: one or HOUR)
    # the mean over the first six hours is the mean
    steps = [hazard_at(1_000_000, n * MINUTE) for n in range(360)]
    assert sum(steps) / 360 == pytest.approx(1_000_000, rel=0.02)


def test_a_save_time_is_smoothed_and_held_to_its_bound() -> None:
    one = with_save_time(job(), 40 * SECOND)
    assert one.save_time == 40 * SECOND
    assert with_save_time(one, 80 * SECOND).save_time == 50 * SECOND
    assert with_save_time(one, None) is one
    assert with_save_time(job(), timedelta(days=9)).save_time == SAVE_TIME_MAX
    assert with_save_time(job(), -MINUTE).save_time == timedelta(0)


def test_an_attempt_is_advised_at_its_launch_where_its_owner_states_nothing() -> None:
    wanted = job(save_time=20 * SECOND)
    [item] = decide(one_provider(wanted), market(offer()), NOW).attempts.values()
    assert item.save_every == advised_interval(20 * SECOND, prior_hazard_ppm(shop_policy()))
    stated = job(save_time=20 * SECOND, spec={"checkpoint": CheckpointPolicy(every=MINUTE)})
    [item] = decide(one_provider(stated), market(offer()), NOW).attempts.values()
    assert item.save_every is None
    [item] = decide(one_provider(job()), market(offer()), NOW).attempts.values()
    assert item.save_every is None


def test_four_losses_in_minutes_outweigh_the_prior() -> None:
    minutes = 7 / 60
    known = experience(record(RecordKind.LOSSES_PROVIDER, "spot", 4, minutes))
    wanted = job(save_time=SECOND)
    [item] = decide(one_provider(wanted, known=known), market(offer()), NOW).attempts.values()
    # 1.4 of four losses are proved with 95 %, which is one in five minutes; a prior of six hours advises 203 s
    assert item.save_every == advised_interval(SECOND, round(1.36 / minutes * 1_000_000))
    assert item.save_every is not None
    assert item.save_every <= 25 * SECOND
    words = advice_words(wanted, item, replace(one_provider(wanted, known=known), attempts={item.id: item}), NOW)
    assert words.startswith("a save takes 1 s and a preemption every 6 min is expected")


@every(("losses", "hours"), [(0, 0.1), (1, 0.01), (2, 0.01)])
def test_one_or_two_losses_prove_nothing(losses: int, hours: float) -> None:
    hazards = Hazards(experience(record(RecordKind.LOSSES_PROVIDER, "spot", losses, hours)), NOW)
    assert hazards.proved_of(offer()) == 0


@every("losses", [3, 4, 30, 10_000, 1_000_000])
@every("hours", [0, 0.0001, 0.1, 10, 10_000])
def test_what_is_proved_is_below_the_rate_that_was_seen_and_bounded(losses: int, hours: float) -> None:
    found = Hazards(experience(record(RecordKind.LOSSES_PROVIDER, "spot", losses, hours)), NOW).proved_of(offer())
    assert 0 <= found <= PROVED_PPM_MAX
    if hours:
        assert found <= losses / hours * 1_000_000


def test_one_bad_host_proves_nothing_of_others() -> None:
    bad = record(RecordKind.LOSSES_HOST, "spot host-bad", 9, 0.2)
    hazards = Hazards(experience(record(RecordKind.LOSSES_PROVIDER, "spot", 9, 0.2), bad), NOW)
    assert hazards.proved_of(offer(host_id=HostId("host-good"))) == 0
    assert hazards.proved_of(offer(host_id=HostId("host-bad"))) > 10_000_000


def often(every: timedelta, **changes: Any) -> Job:
    """A job that was seen to save so often, and of which each upload takes 13 s."""
    points = tuple(saved(4 - n, at=NOW - n * every) for n in range(4))
    return job(checkpoints=points, attempts_made=1, save_time=13 * SECOND, **changes)


def test_a_job_that_saves_every_four_seconds_by_itself_is_not_advised_260() -> None:
    wanted = often(4 * SECOND)
    assert advised_interval(13 * SECOND, 10_000_000) == 260 * SECOND
    [item] = decide(one_provider(wanted), market(offer()), NOW).attempts.values()
    assert item.save_every == 4 * SECOND
    words = advice_words(wanted, item, one_provider(wanted), NOW)
    assert "it saves every 4 s by itself, which is often enough" in words
    assert "260" not in words
    assert "costs least" not in words


@every("every", [2 * HOUR, timedelta(0), -4 * SECOND], ids=["seldom", "clock stands", "clock back"])
def test_a_job_that_saves_seldom_or_by_a_wrong_clock_gets_the_advice(every: timedelta) -> None:
    [item] = decide(one_provider(often(every)), market(offer()), NOW).attempts.values()
    assert item.save_every == advised_interval(13 * SECOND, prior_hazard_ppm(shop_policy()))


def test_an_old_best_checkpoint_does_not_hide_how_often_a_job_saves() -> None:
    wanted = often(4 * SECOND)
    best = saved(0, at=NOW - 5 * HOUR)
    [item] = decide(
        one_provider(replace(wanted, checkpoints=(*wanted.checkpoints, best))), market(offer()), NOW
    ).attempts.values()
    assert item.save_every == 4 * SECOND


# --- without any checkpoint ------------------------------------------------------------------------------------


@every(
    ("spec", "states"),
    [
        ({}, False),
        ({"checkpoint": CheckpointPolicy(keep=9, best=MetricBest.HIGHEST)}, False),
        ({"checkpoint": CheckpointPolicy(every=MINUTE)}, True),
        ({"checkpoint": CheckpointPolicy(path="/ckpt")}, True),
        ({"checkpoint": CheckpointPolicy(metric="loss")}, True),
        ({"setup": "ln -s $SPOTD_CHECKPOINT_DIR out"}, True),
        ({"env": (("OUT", "${SPOTD_CHECKPOINT_DIR}/x"),)}, True),
    ],
)
def test_what_states_that_a_job_saves(spec: dict[str, Any], states: bool) -> None:
    assert states_checkpoints(job(spec=spec).spec) is states


def words(hours: float, *, known: Experience = NO_EXPERIENCE, **changes: Any) -> str:
    spec = {"work": Work(time=hours * HOUR), **changes.pop("spec", {})}
    wanted = job(spec=spec, **changes)
    sold = market(offer(), offer("od", market=Market.ON_DEMAND, interruption=Interruption.NEVER, price=450_000))
    return unprotected_words(wanted, one_provider(wanted, known=known), sold, NOW)


def test_a_spot_job_that_saves_nothing_and_outlasts_the_mean_machine_is_refused_with_figures() -> None:
    assert words(7) == (
        "job1 would run 7.0 h on 1 x RTX_4090 at shop, where a spot machine is preempted every 6.0 h in the mean,"
        " and nothing in the job says that it saves: each preemption would begin it anew"
    )
    assert words(5.9) == words(0.5) == ""


def test_what_was_seen_of_the_market_decides() -> None:
    quiet = experience(record(RecordKind.LOSSES_PROVIDER, "spot", 1, 500))
    assert words(7, known=quiet) == ""
    loud = experience(record(RecordKind.LOSSES_PROVIDER, "spot", 100, 100))
    assert "preempted every 1.2 h in the mean (100.0 preemptions in 100 machine hours" in words(2, known=loud)


def test_no_job_is_refused_that_saves_or_whose_length_is_not_known_or_that_gets_another_machine() -> None:
    assert words(70, spec={"checkpoint": CheckpointPolicy(every=MINUTE)}) == ""
    assert words(70, checkpoints=(saved(1),)) == ""
    assert words(70, resources=replace(job().spec.resources, market=MarketChoice.ON_DEMAND)) == ""
    assert words(70, ceiling=1) == ""
    assert words(70, resources=Resources(min_vram_mb=10**6)) == ""
    wanted = job()
    assert unprotected_words(wanted, one_provider(wanted), market(offer()), NOW) == ""
    resources = replace(job().spec.resources, market=MarketChoice.AUTO)
    kept = offer("od", market=Market.ON_DEMAND, interruption=Interruption.NEVER, hazard_ppm=10**6)
    wanted = job(resources=resources, spec={"work": Work(time=70 * HOUR)})
    assert unprotected_words(wanted, one_provider(wanted), market(kept), NOW) == ""


def test_the_advice_is_stated_with_its_figures() -> None:
    world = world_with(AttemptState.RUNNING)
    [item], [owner] = world.attempts.values(), world.jobs.values()
    owner = replace(owner, save_time=20 * SECOND)
    assert advice_words(job(), None, world, NOW) == ""
    assert advice_words(owner, None, world, NOW) == (
        "a save takes 20 s and a preemption every 6.0 h is expected: saving every 16 min costs least"
    )
    given = replace(item, save_every=timedelta(seconds=919))
    assert advice_words(owner, given, world, NOW) == (
        "a save takes 20 s and a preemption every 6.0 h is expected: saving every 16 min costs least, and every 8 min"
        " while its machine is 10 min old; SPOTD_CHECKPOINT_INTERVAL_S is 919 on this machine"
    )
    stated = replace(owner, spec=replace(owner.spec, checkpoint=CheckpointPolicy(every=15 * MINUTE)))
    assert advice_words(stated, None, world, NOW).endswith("costs least; the job states every 15 min")
