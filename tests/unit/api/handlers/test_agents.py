"""What agents may queue: within two budgets and the ceilings of the config, counted by the daemon."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from spotd.api.requests import Submission
from spotd.api.responses import Invalid, OverBudget
from spotd.core.domain.intents import JobId
from spotd.core.domain.states import JobState
from spotd.core.requests import AGENT
from spotd_providers.contract.values import MicroUsd, MicroUsdPerGpuHour
from tests.unit.api.handlers.test_handlers import draft
from tests.unit.daemon.rig import Rig

pytestmark = pytest.mark.anyio
USD = 1_000_000


def allowed(rig: Rig, *, job: float | None = 10.0, day: float | None = 25.0, ceiling: float = 2.0) -> Rig:
    """A daemon whose owner allows agents this."""
    rig.policy.reload(
        replace(
            rig.policy.current,
            agent_job_budget=None if job is None else MicroUsd(round(job * USD)),
            agent_day_budget=None if day is None else MicroUsd(round(day * USD)),
            ceilings={"RTX_4090": MicroUsdPerGpuHour(round(ceiling * USD))},
        )
    )
    return rig


async def submitted(rig: Rig, *, array: str = "", i_know: bool = False, **changes: Any) -> JobId:
    found = await rig.handlers().submissions.submit(
        Submission(draft=draft(**changes), agent=True, array=array, i_know=i_know)
    )
    return JobId(found["job"]["id"])


@pytest.mark.parametrize("limits", [{"job": None}, {"day": None}], ids=["no budget of a job", "no budget of a day"])
async def test_an_agent_only_watches_until_a_person_sets_both_budgets(rig: Rig, limits: dict[str, Any]) -> None:
    async with allowed(rig, **limits).ready():
        with pytest.raises(OverBudget, match="not both set") as refused:
            await submitted(rig)
        assert "[mcp]" in refused.value.hint


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"budget": {"job": 10.01}}, r"\$10.01 is more than the \$10.00"),
        ({"price": {"max_price": 2.01}}, r"above the \$2.0000/GPU-h that \[ceilings\] accepts for RTX_4090"),
        ({"price": {"max_price": "2.01/h"}}, "above the"),
        ({"resources": {"gpu": "H100:1"}}, "must set a ceiling for H100_NVL"),
        ({"resources": {"min_vram": "10GB"}}, "leave max_price out"),
        ({"schedule": {"priority": 1}}, "before other jobs"),
        ({"schedule": {"preempt": True}}, "before other jobs"),
        ({"secrets": ["TOKEN"]}, "no secrets"),
    ],
)
async def test_what_goes_beyond_what_a_person_set_is_refused(rig: Rig, changes: dict[str, Any], words: str) -> None:
    async with allowed(rig).ready():
        with pytest.raises(OverBudget, match=words):
            await submitted(rig, **changes)
        assert rig.store.read(lambda reads: reads.jobs()) == ()


async def test_a_job_of_an_agent_comes_after_jobs_of_agents_only(rig: Rig) -> None:
    async with allowed(rig).ready():
        person = await rig.handlers().submissions.submit(Submission(draft=draft(name="prep")))
        for ref in ("prep", person["job"]["id"]):
            with pytest.raises(Invalid) as refused:
                await submitted(rig, name="b", schedule={"after": [ref]})
            [problem] = refused.value.problems
            assert (problem.key, problem.message) == ("schedule.after[0]", f'"{ref}" was queued by a person')
        await submitted(rig, name="own")
        later = await submitted(rig, name="c", schedule={"after": ["own"]})
        assert rig.job(later).chain is not None


@pytest.mark.parametrize("spelled", ["RTX_4090:1", "RTX 4090:1", "rtx4090:1", "4090:1"])
async def test_no_spelling_of_a_gpu_escapes_its_ceiling(rig: Rig, spelled: str) -> None:
    async with allowed(rig).ready():
        rig.policy.reload(replace(rig.policy.current, ceiling_default=MicroUsdPerGpuHour(9 * USD)))
        with pytest.raises(OverBudget, match=r"accepts for RTX_4090"):
            await submitted(rig, resources={"gpu": spelled}, price={"max_price": 5.0})
        assert await submitted(rig, resources={"gpu": spelled}, price={"max_price": 2.0})


async def test_a_family_of_gpus_may_cost_what_each_of_them_may(rig: Rig) -> None:
    async with allowed(rig).ready():
        limits = {"H100_SXM": MicroUsdPerGpuHour(2 * USD), "H100_PCIE": MicroUsdPerGpuHour(3 * USD)}
        policy = replace(rig.policy.current, ceilings=limits, ceiling_default=MicroUsdPerGpuHour(4 * USD))
        rig.policy.reload(policy)
        with pytest.raises(OverBudget, match=r"accepts for H100_SXM"):
            await submitted(rig, resources={"gpu": "H100:1"}, price={"max_price": 2.5})
        assert await submitted(rig, resources={"gpu": "H100:1"}, price={"max_price": 2.0})


async def test_an_agents_job_is_marked_and_has_a_budget_always(rig: Rig) -> None:
    async with allowed(rig).ready():
        name = await submitted(rig)
        assert (rig.job(name).submitted_by, rig.job(name).budget) == (AGENT, 10 * USD)
        assert (await rig.handlers().jobs.detail(name))["job"]["submitted_by"] == AGENT
        other = await rig.handlers().submissions.submit(Submission(draft=draft(name="mine")))
        assert other["job"]["submitted_by"] == ""


async def test_what_agents_hold_is_counted_over_restarts_and_freed_as_jobs_end(rig: Rig) -> None:
    async with allowed(rig).ready():
        first = await submitted(rig, name="a", price={"max_price": 0.01})
        await submitted(rig, name="b", price={"max_price": 0.01})
        with pytest.raises(OverBudget, match=r"of \$25.00, agents' jobs hold \$20.00 already"):
            await submitted(rig, name="c")
    rig = allowed(rig.reborn())
    async with rig.ready():
        with pytest.raises(OverBudget, match=r"hold \$20.00"):
            await submitted(rig, name="c")
        await submitted(rig, name="c", budget={"job": 5})
        await rig.cancel(first)
        await rig.until_state(first, JobState.CANCELLED)
        await submitted(rig, name="d", price={"max_price": 0.01})


async def test_an_array_of_an_agent_counts_each_of_its_jobs(rig: Rig) -> None:
    async with allowed(rig).ready():
        with pytest.raises(OverBudget, match=r"\$30.00 more is beyond"):
            await submitted(rig, array="0-2")
        await submitted(rig, array="0-1", price={"max_price": 0.01})


async def test_tiny_budgets_bound_the_number_of_jobs_all_the_same(rig: Rig) -> None:
    async with allowed(rig, day=1000.0).ready():
        with pytest.raises(OverBudget, match="0 jobs that have not ended, and may have 100"):
            await submitted(rig, array="0-100", budget={"job": 0.5})


@pytest.mark.long
async def test_what_ended_jobs_of_agents_cost_counts_until_midnight(rig: Rig) -> None:
    async with allowed(rig).ready():
        name = await submitted(rig)
        host = await rig.until_running(name, 1)
        for _ in range(5):
            host.beat("run")
            await rig.clock.sleep(timedelta(minutes=1))
        await rig.cancel(name)
        host.exit()
        await rig.until(lambda: rig.job(name).state.is_final and rig.job(name).spent > 0)
        now, spent = rig.clock.now(), rig.job(name).spent

        def of_day(days: int) -> MicroUsd:
            midnight = now.replace(hour=0, minute=0, second=0, microsecond=0) + timedelta(days=days)
            return rig.store.read(lambda reads: reads.spent_by(AGENT, ended_since=midnight))

        assert (of_day(0), of_day(1)) == (spent, 0)
