"""What a machine uploads and restores is paid for, and uploading at more than the ceiling ends the machine."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

import pytest

from spotd.core.billing import meter_traffic
from spotd.core.budgets import BudgetGuard
from spotd.core.domain.attempts import Attempt, HostStatus
from spotd.core.domain.intents import JobId, Meter
from spotd.core.domain.jobs import MOVED_MAX, Checkpoint
from spotd.core.domain.plan import applied
from spotd.core.domain.states import AttemptState, EndReason
from spotd.core.domain.world import World
from spotd.core.kernel.reconcile import reconcile
from spotd.core.metering import job_spent, spent, spent_on_day
from spotd.core.plan_builder import PlanBuilder
from spotd.core.pricing import needs_of, quote
from spotd_providers.contract.values import InstanceState, MicroUsdPerGb, MicroUsdPerHour, cost
from tests.cases import every
from tests.unit.core.builders import MINUTE, NOW, instance, job, listing, offer, report, shop_policy, world_with

JOB = JobId("j1")
GB = 1_000_000_000
CENT = MicroUsdPerGb(10_000)
RATE = MicroUsdPerHour(400_000)


def the(world: World) -> Attempt:
    (item,) = world.attempts.values()
    return item


def uploading(upload: int = 10_000, **changes: Any) -> World:
    """A machine at $0.40 under a ceiling of $0.50, at a host that takes a price for each gigabyte."""
    sold = offer(upload_price=MicroUsdPerGb(upload), download_price=CENT, **changes)
    return world_with(AttemptState.RUNNING, quote=quote(sold, needs_of(job(), shop_policy()), 1_000_000, NOW))


def saved(number: int, gigabytes: float, at: datetime) -> Checkpoint:
    return Checkpoint(
        name=f"step-{number}",
        attempt=1,
        step=number,
        bytes=int(gigabytes * GB),
        at=at,
        manifest_key=f"manifest-{number}",
        sha256="0" * 64,
    )


def after_saving(world: World, gigabytes: float, at: datetime, **heard: Any) -> World:
    number = the(world).heartbeat_seq + 1
    told = report(seq=number, phase="run", checkpoints=(saved(number, gigabytes, at),), **heard)
    told = {i: replace(r, read_at=at) for i, r in told.items()}
    return applied(world, reconcile(world, listing(instance(InstanceState.RUNNING), at=at), told, at))


def test_uploaded_bytes_are_in_what_the_job_and_the_day_have_cost() -> None:
    before = uploading()
    world = after_saving(before, 50, NOW)
    assert spent(the(world), NOW) - spent(the(before), NOW) == 500_000
    assert job_spent(world, world.jobs[JOB], NOW) - job_spent(before, before.jobs[JOB], NOW) == 500_000
    assert spent_on_day(world, NOW) - spent_on_day(before, NOW) == 500_000
    assert the(world).uploaded_bytes == 50 * GB


@every(
    ("heard", "fetched"),
    [
        ({"phase": "canary"}, 0),
        ({"phase": "done", "exit_reason": EndReason.CONTRACT_BROKEN, "exit_phase": "canary", "exit_at": NOW}, 0),
        ({"phase": "code"}, 2 * GB),
        ({"phase": "done", "exit_reason": EndReason.HOST_LOST, "exit_phase": "code", "exit_at": NOW}, 2 * GB),
    ],
    ids=["it measures itself", "it refused itself", "it fetches its code", "it was lost then"],
)
def test_a_machine_fetches_nothing_of_its_job_before_it_has_measured_itself(
    heard: dict[str, Any], fetched: int
) -> None:
    world = replace(uploading(), jobs={JOB: replace(uploading().jobs[JOB], code_bytes=2 * GB)})
    for seq, phase in enumerate([{"phase": "canary"}, heard], start=1):
        at = NOW + seq * MINUTE
        told = {i: replace(r, read_at=at) for i, r in report(seq=seq, **phase).items()}
        world = applied(world, reconcile(world, listing(instance(InstanceState.RUNNING), at=at), told, at))
    at = NOW + 3 * MINUTE
    alive = {the(world).id: HostStatus(attempt=the(world).id, read_at=at, liveness_check=True)}
    world = applied(world, reconcile(world, listing(instance(InstanceState.RUNNING), at=at), alive, at))
    assert the(world).restored_bytes == fetched


def test_less_than_a_cent_counts_at_once_and_becomes_a_charge_with_the_next() -> None:
    world, began = uploading(), spent(the(uploading()), NOW)
    for number in range(1, 11):
        at = NOW + number * MINUTE / 10
        world = after_saving(world, 0.25, at)
        due = began + cost(RATE, at - NOW) + number * 2_500
        assert due - 2 <= spent(the(world), at) <= due + 2
    assert the(world).meter.settled > 0
    assert the(world).meter.traffic < 10_000


def test_chunks_that_the_store_had_already_cost_nothing() -> None:
    world = after_saving(uploading(), 50, NOW, uploads={"manifest-6": 2 * GB})
    assert the(world).uploaded_bytes == 2 * GB


def test_what_was_restored_is_paid_for_once() -> None:
    world = uploading()
    old = replace(saved(1, 80, NOW), attempt=0)
    world = replace(world, jobs={JOB: replace(world.jobs[JOB], checkpoints=(old,))})
    words: list[dict[str, Any]] = [
        {"restored_bytes": 30 * GB},
        {"restored_bytes": 10**18},
        {"resumed_from": "step-1"},
    ]
    for minutes, heard in enumerate(words):
        at = NOW + minutes * MINUTE
        told = {i: replace(r, read_at=at) for i, r in report(seq=6 + minutes, **heard).items()}
        world = applied(world, reconcile(world, {}, told, at))
        assert the(world).restored_bytes == (30 if minutes == 0 else 80) * GB
    assert the(world).meter.settled > 800_000


def pace(gigabytes: float, every: timedelta, count: int) -> tuple[World, int]:
    """How many checkpoints it takes until the machine is told to stop, of so many at the most."""
    world = uploading()
    for number in range(1, count + 1):
        world = after_saving(world, gigabytes, NOW + number * every)
        if the(world).stop is not None:
            return world, number
    return world, 0


def test_a_pace_that_costs_four_times_the_ceiling_ends_the_machine_in_order() -> None:
    world, number = pace(40, 15 * MINUTE, 10)
    assert number in {2, 3}
    item = the(world)
    assert item.state is AttemptState.STOPPING
    assert item.stop is not None
    assert item.stop.reason is EndReason.PRICE_ROSE
    assert "uploads have cost" in item.stop.detail


@every(
    ("gigabytes", "every"),
    [
        pytest.param(2.4, 15 * MINUTE, id="what the ceiling leaves"),
        pytest.param(60, 6 * 60 * MINUTE, id="one large checkpoint in six hours"),
        pytest.param(0.001, MINUTE, id="small ones all the time"),
    ],
)
def test_a_pace_within_the_ceiling_ends_nothing(gigabytes: float, every: timedelta) -> None:
    assert pace(gigabytes, every, 200)[1] == 0


def test_a_burst_after_a_quiet_time_ends_nothing() -> None:
    world = uploading()
    for number in range(4):
        world = after_saving(world, 2.5, NOW + number * MINUTE)
    assert the(world).stop is None


def test_a_machine_that_costs_its_whole_ceiling_may_save() -> None:
    world = uploading(price=500_000)
    for number in range(1, 40):
        world = after_saving(world, 0.5, NOW + number * 15 * MINUTE)
    assert the(world).stop is None


def test_a_hundred_terabytes_are_a_sum_like_any_other() -> None:
    world = after_saving(uploading(), 100_000, NOW)
    world = after_saving(world, 100_000, NOW + MINUTE)
    assert the(world).stop is not None
    assert spent(the(world), NOW) > 2_000_000_000
    BudgetGuard(world, NOW + MINUTE)


def test_traffic_that_is_free_ends_nothing() -> None:
    world = uploading(0)
    for number in range(1, 20):
        world = after_saving(world, 1000, NOW + number * 15 * MINUTE)
    assert the(world).stop is None
    assert spent(the(world), NOW) <= cost(RATE, timedelta(hours=5))


@every(
    ("every", "counted"),
    [
        pytest.param(5 * MINUTE, 12, id="oftener than it said"),
        pytest.param(60 * MINUTE, 4, id="less often"),
        pytest.param(0 * MINUTE, 16, id="all at once"),
        pytest.param(-5 * MINUTE, 16, id="backwards"),
    ],
)
def test_a_job_that_saves_oftener_than_it_said_is_priced_by_what_it_does(every: timedelta, counted: int) -> None:
    spec = replace(job().spec, checkpoint=replace(job().spec.checkpoint, every=15 * MINUTE))
    kept = tuple(saved(n, 1, NOW + n * every) for n in (3, 2, 1))
    needs = needs_of(job(checkpoints=kept, spec={"checkpoint": spec.checkpoint}), shop_policy())
    assert needs.upload_bytes_per_hour == counted * GB


def test_what_a_job_leaves_at_its_end_was_uploaded_as_well() -> None:
    before = uploading()
    told = report(seq=9, phase="done", exit_reason=EndReason.DONE, exit_code=0, outputs_bytes=30 * GB)
    world = applied(before, reconcile(before, listing(instance(InstanceState.RUNNING)), told, NOW))
    assert the(world).uploaded_bytes == 30 * GB
    assert spent(the(world), NOW) - spent(the(before), NOW) == 300_000


def test_uploads_that_never_became_a_checkpoint_are_paid_for_and_end_the_machine() -> None:
    world = uploading()
    for number in range(1, 10):
        at = NOW + number * 10 * MINUTE
        told = report(seq=5 + number, phase="run", stored_bytes=number * 40 * GB)
        told = {i: replace(r, read_at=at) for i, r in told.items()}
        world = applied(world, reconcile(world, listing(instance(InstanceState.RUNNING), at=at), told, at))
        assert the(world).uploaded_bytes == number * 40 * GB
        if the(world).stop is not None:
            break
    assert the(world).stop is not None
    assert number <= 3


def test_what_is_stored_of_counted_checkpoints_is_not_counted_again() -> None:
    world = after_saving(uploading(), 50, NOW)
    world = after_saving(world, 1, NOW + MINUTE, stored_bytes=40 * GB)
    assert the(world).uploaded_bytes == 51 * GB


def test_what_a_machine_uploads_after_its_attempt_is_over_is_paid_for_and_changes_nothing_else() -> None:
    sold = offer(upload_price=CENT)
    agreed = quote(sold, needs_of(job(), shop_policy()), 1_000_000, NOW)
    world = world_with(AttemptState.ENDING, quote=agreed)
    told = report(seq=9, phase="run", stored_bytes=30 * GB, exit_reason=EndReason.DONE, exit_code=0)
    after = applied(world, reconcile(world, listing(instance(InstanceState.RUNNING)), told, NOW))
    assert spent(the(after), NOW) - spent(the(world), NOW) == 300_000
    before, item = the(world), the(after)
    assert (item.state, item.stop, item.exit_code) == (before.state, None, None)
    assert item.heartbeat_seq == before.heartbeat_seq
    assert after.jobs == world.jobs


def test_traffic_that_is_booked_does_not_stand_for_the_time_of_a_machine_that_no_list_shows() -> None:
    sold = offer(upload_price=CENT)
    agreed = quote(sold, needs_of(job(), shop_policy()), 1_000_000, NOW)
    heard = {"heartbeat_seq": 3, "heartbeat_seen_at": NOW - MINUTE, "meter": Meter()}
    world = world_with(AttemptState.INTENDED, quote=agreed, ref=None, outcome_unknown=True, **heard)
    told = report(seq=5, phase="run", stored_bytes=30 * GB)
    world = applied(world, reconcile(world, {}, told, NOW))
    assert the(world).meter.settled == 300_000
    ended = report(seq=6, phase="done", stored_bytes=30 * GB, exit_reason=EndReason.DONE, exit_code=0)
    world = applied(world, reconcile(world, {}, ended, NOW))
    assert the(world).meter.settled > 300_000 + cost(RATE, 9 * MINUTE)


def test_what_was_restored_is_never_less_than_before_and_what_is_uploaded_has_a_bound() -> None:
    world = uploading()
    item = replace(the(world), restored_bytes=7 * GB, uploaded_bytes=MOVED_MAX - GB)
    [heard] = report(seq=9, phase="run", checkpoints=(saved(9, 50, NOW),), restored_bytes=0).values()
    builder = PlanBuilder(replace(world, attempts={item.id: item}), NOW)
    meter_traffic(builder, item.id, heard)
    after = builder.attempt(item.id)
    assert (after.restored_bytes, after.uploaded_bytes) == (7 * GB, MOVED_MAX)
