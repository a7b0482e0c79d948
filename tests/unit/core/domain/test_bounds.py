"""Any number or instant that comes from outside can be judged, added up and written down."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta

from spotd.core.decide import decide
from spotd.core.domain.intents import IntentKind, JobId
from spotd.core.domain.jobs import Checkpoint
from spotd.core.domain.plan import Plan, applied
from spotd.core.domain.states import AttemptState
from spotd.core.domain.world import World
from spotd.core.kernel.outcomes import TERMINATE_RETRY_MAX, LaunchFailure, launch_refused, terminate_failed
from spotd.core.kernel.reconcile import reconcile
from spotd.core.pricing import needs_of, quote
from spotd.store import Store
from spotd_providers.contract.values import InstanceState, MicroUsdPerGb
from tests.cases import every
from tests.unit.core.builders import NOW, instance, job, listing, market, offer, report, shop_policy, world_with

J = JobId("j1")
TB = 10**12
YEAR_9999 = datetime(9999, 12, 31, 23, 59, 59, tzinfo=UTC)


def saved(size: int) -> Checkpoint:
    return Checkpoint(name="c", attempt=1, step=1, bytes=size, at=NOW, manifest_key="k", sha256="0" * 64)


@every("size", [24_500_000_000, 10 * TB, 100 * TB, 10**30], ids=["24.5 GB", "10 TB", "100 TB", "lie"])
def test_a_checkpoint_of_any_size_is_priced_placed_and_stored(size: int) -> None:
    is_expensive = offer(upload_price=MicroUsdPerGb(10_000), download_price=MicroUsdPerGb(10_000))
    owner = job(checkpoints=(saved(size),), ceiling=10**15)
    world = World(policy=shop_policy(), jobs={J: owner}, attempts={}, intents={})
    plan = decide(world, market(is_expensive), NOW)
    assert [t.kind for t in plan.intents.values()] == [IntentKind.LAUNCH]
    if size <= 100 * TB:
        with Store.open(":memory:") as store:
            stored = Plan(jobs={J: job(checkpoints=(saved(size),))}, events=plan.events[:1])
            store.tx(lambda tx: tx.commit(stored))
            store.tx(lambda tx: tx.commit(plan))
            assert store.read(lambda reads: reads.world(shop_policy(), NOW)).jobs[J].checkpoints[0].bytes == size


def test_traffic_grows_with_the_checkpoint_until_the_highest_price_there_is() -> None:
    is_expensive = offer(upload_price=MicroUsdPerGb(10_000))
    totals = [
        quote(is_expensive, needs_of(job(checkpoints=(saved(size),)), shop_policy()), 1_000_000, NOW).price.total
        for size in (1, 24_500_000_000, TB, 100 * TB, 10**40)
    ]
    assert totals == sorted(totals)
    assert totals[2] == 400_000 + TB * 4 * 10_000 // 10**9, "a terabyte every quarter of an hour"
    assert totals[-1] < 2**62


@every("at", [YEAR_9999, datetime(1, 1, 1, tzinfo=UTC)], ids=["9999", "1"])
@every("by_host", [True, False], ids=["host", "listing"])
def test_a_notice_for_any_instant_ends_nothing_and_no_machine_outlives_it(at: datetime, *, by_host: bool) -> None:
    world = world_with(AttemptState.RUNNING, phase="done", over_since=NOW)
    runs = instance(InstanceState.RUNNING)
    shown = listing(runs if by_host else replace(runs, notice_at=at))
    plan = reconcile(world, shown, report(seq=9, notice_at=at if by_host else None), NOW)
    world = applied(world, plan)
    [item] = world.attempts.values()
    assert item.state.counts
    assert item.notice_at is None, "neither holds bids, moves and the watchdog back for a moment"
    later = NOW + timedelta(minutes=1)
    for seconds in (0, 1):
        shown = listing(instance(InstanceState.PAUSED), at=later + timedelta(seconds=seconds))
        world = applied(world, reconcile(world, shown, report(seq=9), later + timedelta(seconds=2)))
    assert world.attempts[item.id].state.counts, "what its host wrote since is still to be read"
    heard = {i: replace(r, read_at=later + timedelta(seconds=3)) for i, r in report(seq=9).items()}
    world = applied(world, reconcile(world, shown, heard, later + timedelta(seconds=3)))
    assert not world.attempts[item.id].state.counts


@every("wait", [timedelta(days=1), timedelta.max, timedelta(0), timedelta(days=-3), None], ids=str)
@every("tries", [0, 1, 10, 10**6])
def test_an_end_is_tried_again_within_minutes_whatever_wait_is_asked_for(wait: timedelta | None, tries: int) -> None:
    world = world_with(AttemptState.RUNNING, over_since=NOW - timedelta(minutes=1))
    ended = reconcile(world, listing(instance(InstanceState.PAUSED)), report(), NOW)
    world = applied(world, ended)
    [intent] = world.intents.values()
    world = replace(world, intents={intent.id: replace(intent, tries=tries)})
    again = terminate_failed(world, intent.id, "429", NOW, wait).intents[intent.id].not_before
    assert again is not None
    assert NOW < again <= NOW + TERMINATE_RETRY_MAX <= NOW + timedelta(minutes=3)


@every("wait", [timedelta.max, timedelta.min], ids=str)
def test_a_cool_down_has_a_bound_whatever_the_provider_asks_for(wait: timedelta) -> None:
    world = world_with(AttemptState.INTENDED)
    [attempt] = world.attempts
    plan = launch_refused(world, attempt, LaunchFailure.RATE_LIMITED, "slow down", NOW, wait)
    assert [NOW <= c.until <= NOW + timedelta(days=1) for c in plan.cooldowns] == [True]
