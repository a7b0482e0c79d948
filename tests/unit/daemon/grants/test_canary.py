"""Which machines are measured before their job starts, by which figures, and what becomes of one that is refused."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from spotd.core.domain.attempts import StopOrder
from spotd.core.domain.cooldowns import CooldownScope
from spotd.core.domain.states import AttemptState, EndReason, JobState
from spotd.core.domain.world import RecordId, RecordKind, World
from spotd.core.kernel.reconcile import reconcile
from spotd.core.pricing import useful_run
from spotd.core.requests import retry
from spotd.daemon.grants.builder import canary_rules
from spotd_jobs.wire.grant import CanaryRules, Grant
from spotd_providers.contract.gpus import GPUS, gpu_info
from spotd_providers.contract.values import AttemptKey, HostId, InstanceState, MicroUsdPerHour
from tests.cases import every
from tests.unit.core.builders import NOW, instance, job, listing, offer, report, shop_policy, world_with

MINUTE = timedelta(minutes=1)
STOP = StopOrder(reason=EndReason.CANCELLED, detail="", ordered_at=NOW, deadline=NOW + MINUTE)


def rules_of(
    *, canary: timedelta = MINUTE, refused: int | None = None, attempt: dict[str, Any] | None = None, **sold: Any
) -> CanaryRules | None:
    world = world_with(AttemptState.STARTING, **(attempt or {}))
    ((_, item),) = world.attempts.items()
    is_own, is_free = sold.pop("is_own", False), sold.pop("is_free", False)
    quote = replace(item.quote, offer=offer(**sold), is_own=is_own)
    if is_free:
        quote = replace(quote, price=replace(quote.price, total=MicroUsdPerHour(0)))
    owner = replace(world.jobs[item.id.job], machines_refused=refused, idle_launches=9)
    return canary_rules(replace(item, quote=quote), owner, shop_policy(canary=canary), timedelta.total_seconds)


def test_a_rented_machine_is_measured_by_what_its_offer_states() -> None:
    rules = rules_of(gpu="H100_SXM", gpu_count=2, gpu_vram_mb=81_559, download_mbps=900.0)
    assert rules is not None
    assert (rules.time_s, rules.may_refuse, rules.gpus, rules.download_mbps) == (60.0, True, 2, 900.0)
    assert (rules.gpu_memory_mb_min, rules.tflops, rules.tflops_min) == (69_325, 989.0, 247.25)


@every(
    "given",
    [
        pytest.param({"canary": timedelta(0)}, id="off, as by default"),
        pytest.param({"is_own": True}, id="an own machine"),
        pytest.param({"is_free": True}, id="for nothing"),
        pytest.param({"nodes": 2, "gpu_count": 4}, id="a gang"),
        pytest.param({"gpu_count": 0, "gpu": "none"}, id="without a GPU"),
        pytest.param({"gpu": "H100_SXM_MIG_1G_10GB"}, id="a slice of a card"),
        pytest.param({"attempt": {"machine_key": AttemptKey("spotd-lab-j0-1")}}, id="taken over"),
        pytest.param({"attempt": {"running_at": NOW}}, id="its command has run"),
        pytest.param({"attempt": {"stop": STOP}}, id="it is to stop"),
    ],
)
def test_some_machines_are_not_measured(given: dict[str, Any]) -> None:
    assert rules_of(**given) is None
    assert shop_policy().canary == timedelta(0)


@every(("refused", "may_refuse"), [(None, True), (2, True), (3, False), (50, False)])
def test_after_three_machines_that_were_refused_the_job_runs_whatever_is_found(
    refused: int | None, *, may_refuse: bool
) -> None:
    rules = rules_of(refused=refused)
    assert rules is not None
    assert rules.may_refuse is may_refuse


@every(
    ("sold", "memory", "speed"),
    [
        pytest.param({"gpu": "RTX_4090", "gpu_vram_mb": 24_564}, 20_879, 165, id="a whole card"),
        pytest.param({"gpu": "RTX_4090"}, 19_454, 165, id="no memory stated"),
        pytest.param({"gpu": "A10", "gpu_vram_mb": 4_096}, 3_481, None, id="a part of a card"),
        pytest.param({"gpu": "GTX_1080", "gpu_vram_mb": 8_192}, 6_963, None, id="no figure in the data sheet"),
        pytest.param({"gpu": "TURBO_9000"}, None, None, id="an unknown card"),
        pytest.param({"gpu": "TURBO_9000", "gpu_vram_mb": 10_000}, 8_500, None, id="an unknown card with its memory"),
    ],
)
def test_the_least_is_what_is_known_of_the_card(sold: dict[str, Any], memory: int | None, speed: int | None) -> None:
    rules = rules_of(**sold)
    assert rules is not None
    assert (rules.gpu_memory_mb_min, rules.tflops) == (memory, speed)
    assert rules.tflops_min == (None if speed is None else speed / 4)


def test_the_figures_of_the_data_sheets_rise_with_the_generation_and_none_is_for_a_card_without_tensor_cores() -> None:
    speeds = [one.tflops for one in map(gpu_info, ("V100_16", "A100_SXM_80", "H100_SXM", "B200_SXM")) if one]
    assert speeds == sorted(speeds, key=lambda speed: speed or 0)
    assert not [one.name for one in GPUS if one.tflops and one.compute_capability and float(one.compute_capability) < 7]


def test_a_grant_of_a_daemon_without_canaries_is_still_read() -> None:
    assert Grant.model_fields["canary"].default is None


def measured(state: AttemptState = AttemptState.STARTING, **changes: Any) -> World:
    """A machine of host `h7` that its canary may refuse, launched ten minutes ago."""
    world = replace(world_with(state, **changes), policy=shop_policy(canary=MINUTE))
    ((identity, item),) = world.attempts.items()
    quote = replace(item.quote, offer=replace(item.quote.offer, host_id=HostId("h7")))
    return replace(world, attempts={identity: replace(item, quote=quote)})


def unfit(world: World, **more: Any) -> World:
    """The world after its machine was refused by its canary."""
    broken: dict[str, Any] = {"exit_reason": EndReason.CONTRACT_BROKEN, "exit_phase": "canary"}
    said = report(**{"seq": 9, "phase": "done", "exit_detail": "its canary found 1 of 2 GPUs", **broken, **more})
    plan = reconcile(world, listing(instance(InstanceState.RUNNING)), said, NOW)
    return replace(
        world,
        experience=plan.experience,
        jobs={**world.jobs, **plan.jobs},
        attempts={**world.attempts, **plan.attempts},
        intents={**world.intents, **plan.intents},
        cooldowns=plan.cooldowns or world.cooldowns,
    )


def test_a_refused_machine_is_ended_its_host_remembered_and_its_job_goes_on_elsewhere() -> None:
    world = measured()
    ((identity, item),) = world.attempts.items()
    after = unfit(world)
    ended, owner = after.attempts[identity], after.jobs[identity.job]
    assert (ended.state, ended.end_reason) == (AttemptState.ENDING, EndReason.CONTRACT_BROKEN)
    assert "1 of 2 GPUs" in EndReason.CONTRACT_BROKEN.sentence(ended.end_detail)
    assert (owner.state, owner.idle_launches, owner.failed_starts, owner.errors) == (JobState.RECOVERING, 1, 0, 0)
    assert [(one.scope, one.subject) for one in after.cooldowns] == [(CooldownScope.HOST, "h7")]
    assert [intent.ref for intent in after.intents.values()] == [item.ref], "its machine is to be ended"


@every(
    ("reason", "state"),
    [(EndReason.CANCELLED, JobState.CANCELLED), (EndReason.BUDGET_PAUSED, JobState.RECOVERING)],
)
def test_a_refusal_while_it_is_to_stop_ends_the_attempt_as_well(reason: EndReason, state: JobState) -> None:
    world = measured(AttemptState.STOPPING, running_at=None, stop=replace(STOP, reason=reason))
    ((identity, _),) = world.attempts.items()
    if reason is not EndReason.CANCELLED:
        owner = replace(world.jobs[identity.job], state=JobState.STARTING, cancel_requested=False)
        world = replace(world, jobs={owner.id: owner})
    after = unfit(world)
    assert not after.attempts[identity].state.counts
    assert after.jobs[identity.job].state is state


def test_a_refused_machine_counts_as_a_failed_start_and_never_as_a_command_that_runs() -> None:
    world = measured()
    ((identity, item),) = world.attempts.items()
    owner = replace(world.jobs[identity.job], image_errors=2)
    world = replace(world, jobs={owner.id: owner})
    said = report(seq=9, phase="done", exit_reason=EndReason.CONTRACT_BROKEN, exit_phase="canary", exit_detail="x")
    plan = reconcile(world, listing(instance(InstanceState.RUNNING)), said, NOW)
    of_host = RecordId(kind=RecordKind.FAILED_STARTS, provider=item.provider, subject="h7")
    assert of_host in plan.experience
    assert not [one for one in plan.experience if one.kind in {RecordKind.STARTS, RecordKind.SLOW_STARTS}]
    assert not {"attempt.running", "job.running"} & {event.kind for event in plan.events}
    assert plan.attempts[identity].running_at is None
    assert plan.jobs[owner.id].started_at is None


@every("phase", ["boot", "canary", "code", "setup", "restore"])
def test_an_end_before_the_command_is_not_shown_as_a_command_that_runs(phase: str) -> None:
    """Its last heartbeat has the phase `done`, also where the read of its end is not complete yet."""
    world = measured()
    ((identity, _),) = world.attempts.items()
    for reason in (EndReason.HOST_LOST, EndReason.INPUT_ERROR, None):
        said = report(seq=9, phase="done", exit_reason=reason, exit_phase=phase, exit_detail="x")
        plan = reconcile(world, listing(instance(InstanceState.RUNNING)), said, NOW)
        assert plan.attempts[identity].running_at is None
        assert "attempt.running" not in {event.kind for event in plan.events}
    said = report(seq=9, phase="done", exit_reason=EndReason.DONE, exit_phase="run")
    plan = reconcile(world, listing(instance(InstanceState.RUNNING)), said, NOW)
    assert plan.attempts[identity].running_at == NOW


@every(
    ("changes", "said"),
    [
        pytest.param({"policy": shop_policy()}, {}, id="no canary"),
        pytest.param({"attempt": {"running_at": NOW - MINUTE}}, {}, id="its command ran"),
        pytest.param({}, {"exit_phase": "run"}, id="not while it was measured"),
        pytest.param({}, {"exit_phase": ""}, id="no phase"),
        pytest.param({"attempt": {"machine_key": AttemptKey("spotd-lab-j0-1")}}, {}, id="taken over"),
        pytest.param({"job": {"machines_refused": 3}}, {}, id="it might not refuse"),
    ],
)
def test_a_host_that_was_not_to_refuse_itself_is_lost(changes: dict[str, Any], said: dict[str, str]) -> None:
    world = measured(**changes.get("attempt", {}))
    ((identity, _),) = world.attempts.items()
    owner = replace(world.jobs[identity.job], **changes.get("job", {}))
    after = unfit(replace(world, jobs={owner.id: owner}, policy=changes.get("policy", world.policy)), **said)
    assert after.attempts[identity].end_reason is EndReason.HOST_LOST


def test_each_refused_machine_counts_for_the_whole_life_of_its_job() -> None:
    """In a market that takes the machine after each checkpoint a figure that is too strict costs three launches."""
    world = measured()
    (identity,) = world.attempts
    assert unfit(world).jobs[identity.job].machines_refused == 1
    assert unfit(world, exit_phase="run").jobs[identity.job].machines_refused is None, "it is not believed"
    assert unfit(world, exit_reason=EndReason.HOST_LOST).jobs[identity.job].machines_refused is None
    owner = replace(world.jobs[identity.job], machines_refused=2, state=JobState.FAILED)
    assert retry(world, owner, NOW).jobs[owner.id].machines_refused == 2


def test_the_money_that_a_launch_keeps_back_is_for_its_canary_as_well() -> None:
    owner, off = job(), shop_policy()
    on = replace(off, canary=4 * MINUTE, useful_run=timedelta(0))
    off = replace(off, useful_run=timedelta(0))
    assert useful_run(owner, offer(), on) == useful_run(owner, offer(), off) + 2 * on.canary
    for other in (offer(gpu_count=0, gpu="none"), offer(nodes=2, gpu_count=2), offer(gpu="H100_SXM_MIG_1G_10GB")):
        assert useful_run(owner, other, on) == useful_run(owner, other, off)


def test_where_hosts_have_no_name_a_refusal_cools_down_its_offer_and_not_all_of_its_pool() -> None:
    world = measured()
    ((identity, item),) = world.attempts.items()
    quote = replace(item.quote, offer=replace(item.quote.offer, host_id=None))
    after = unfit(replace(world, attempts={identity: replace(item, quote=quote)}))
    assert [(one.scope, one.subject) for one in after.cooldowns] == [(CooldownScope.OFFER, "o1")]
