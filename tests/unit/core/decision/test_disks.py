"""A machine on whose disk the job's code and newest checkpoint do not fit is no candidate for it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from spotd.core.decide import decide
from spotd.core.domain.intents import JobId
from spotd.core.domain.jobs import DISK_GB_MAX, Checkpoint, Job, disk_gb_after, disk_gb_for, disk_gb_on
from spotd.core.domain.plan import applied
from spotd.core.domain.states import AttemptState, EndReason, JobState
from spotd.core.domain.world import VerdictKind, World
from spotd.core.kernel.reconcile import reconcile
from spotd.core.pricing import needs_of
from spotd_jobs.spec.model import GpuAlternative, Resources
from spotd_providers.contract.values import InstanceState, Offer
from tests.cases import every
from tests.unit.core.builders import NOW, instance, job, listing, market, offer, report, shop_policy, world_with

JOB = JobId("j1")
GB = 10**9
TB = 10**12


def saved(*sizes: int) -> tuple[Checkpoint, ...]:
    """Newest first."""
    return tuple(
        Checkpoint(name=f"c{n}", attempt=1, step=n, bytes=size, at=NOW, manifest_key=f"k{n}", sha256="s")
        for n, size in enumerate(sizes)
    )


def needing(disk_gb: int = 10, *sizes: int, **changes: Any) -> Job:
    wanted = Resources(gpu=(GpuAlternative(name="RTX_4090", count=1),), disk_gb=disk_gb)
    return replace(job(resources=wanted, checkpoints=saved(*sizes)), **changes)


def chosen(owner: Job, *offers: Offer) -> list[str]:
    world = World(policy=shop_policy(), jobs={JOB: owner}, attempts={}, intents={})
    return [a.quote.offer.offer_id for a in decide(world, market(*offers), NOW).attempts.values()]


def test_an_offer_whose_disk_cannot_hold_the_newest_checkpoint_is_passed_over() -> None:
    small, large = offer("small", price=300_000, disk_gb_max=100), offer("large", disk_gb_max=300)
    assert chosen(needing(50, 80 * GB), small, large) == ["small"]
    assert chosen(needing(50, 200 * GB), small, large) == ["large"]
    world = World(policy=shop_policy(), jobs={JOB: needing(50, TB)}, attempts={}, intents={})
    (verdict,) = decide(world, market(small, large), NOW).verdicts.values()
    assert verdict.kind is VerdictKind.NO_MATCH
    assert "too little disk" in verdict.sentence


def test_an_older_checkpoint_is_what_a_machine_must_hold_where_none_can_hold_the_newest() -> None:
    small = offer("small", disk_gb_max=100)
    assert chosen(needing(50, 200 * GB, 60 * GB), small) == ["small"]
    assert chosen(needing(50, 200 * GB, 150 * GB), small) == []
    assert disk_gb_on(needing(50, 200 * GB, 60 * GB), small) == 66
    assert disk_gb_on(needing(50, 80 * GB, 60 * GB), small) == 88
    assert disk_gb_on(needing(50, 200 * GB), offer("any")) == 220


def test_the_disk_that_is_asked_for_holds_code_and_checkpoint_and_is_paid_for() -> None:
    assert disk_gb_for(needing(10)) == 10
    assert disk_gb_for(needing(10, 100 * GB)) == 110
    assert disk_gb_for(needing(500, 100 * GB)) == 500
    assert disk_gb_for(replace(needing(10), code_bytes=10 * GB)) == 22
    assert needs_of(needing(10, 100 * GB), shop_policy()).disk_gb == 110


@every("size", [0, 1, 10**12, 10**14, 10**15, 10**18, 10**30])
def test_no_size_of_a_checkpoint_overflows(size: int) -> None:
    assert 10 <= disk_gb_for(needing(10, size)) <= 2 * DISK_GB_MAX
    chosen(needing(10, size), offer("a"), offer("b", disk_gb_max=100))


def test_a_disk_that_was_full_is_followed_by_a_larger_one() -> None:
    owner = needing(20)
    assert disk_gb_after(owner, EndReason.DISK_FULL) == 30
    assert disk_gb_for(replace(owner, disk_gb_seen=30)) == 30
    assert disk_gb_after(owner, EndReason.HOST_LOST) == 0
    assert disk_gb_after(replace(owner, disk_gb_seen=DISK_GB_MAX), EndReason.DISK_FULL) == DISK_GB_MAX


def test_a_full_disk_is_a_reason_of_its_own_and_blames_no_host() -> None:
    stage = world_with(AttemptState.STARTING)
    told = report(seq=6, phase="done", exit_reason=EndReason.DISK_FULL, exit_detail="80 GB do not fit into 10 GB")
    plan = reconcile(stage, listing(instance(InstanceState.RUNNING)), told, NOW)
    (item,) = plan.attempts.values()
    assert item.end_reason is EndReason.DISK_FULL
    after = applied(stage, plan).jobs[JOB]
    assert (after.state, after.failed_starts, after.disk_gb_seen) == (JobState.RECOVERING, 1, 15)
    assert "80 GB do not fit" in after.reason
    assert plan.cooldowns == ()
