"""A GPU has one ceiling, however it is spelled: in the config, a job file, flags, `[speed]` and every answer."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pytest

from spotd.api.handlers.plans import read_spec
from spotd.api.requests import JobDraft, Submission
from spotd.config.load import load
from spotd.core.decide import decide
from spotd.core.domain.intents import JobId
from spotd.core.domain.jobs import new_job
from spotd.core.domain.market import MarketSnapshot
from spotd.core.domain.policy import Policy
from spotd.core.domain.world import World
from spotd.core.ranking.candidates import ceiling_for, ceilings_of
from spotd.core.ranking.remaining_work import Speeds
from spotd.core.requests import within_limits
from spotd.words import gpu_text
from spotd_jobs.spec.model import JobSpec, PriceLimit
from spotd_providers.contract import gpus
from spotd_providers.contract.gpus import GPUS
from spotd_providers.contract.values import MicroUsd, MicroUsdPerGpuHour
from tests.unit.core.builders import NOW, SHOP, market, offer, shop_policy
from tests.unit.daemon.rig import Rig

DEFAULT: Final = MicroUsdPerGpuHour(1_000_000)
OWN: Final = MicroUsdPerGpuHour(2_200_000)


def _is_known(name: str) -> bool:
    try:
        return bool(gpus.resolve(name))
    except gpus.UnknownGpu:
        return False


def _spellings() -> list[str]:
    names = {name for row in GPUS for name in (row.name, *row.aliases, *row.families, *row.vast, *row.runpod)}
    spelled = {form for name in names for form in (name, name.lower(), name.replace("_", " "), name.replace("_", "-"))}
    return sorted(name for name in spelled if _is_known(name))


SPELLINGS: Final = _spellings()


def policy_of(name: str, folder: Path) -> Policy:
    """The policy of a config that has a ceiling for this name and a lower one for all others."""
    path = folder / "config.toml"
    path.write_text(f'[ceilings]\ndefault = 1.00\n"{name}" = 2.20\n')
    config = load(path, environ={"STATE_DIRECTORY": str(folder)}).config
    known = {gpu: MicroUsdPerGpuHour(price) for gpu, price in config.ceilings.items()}
    return replace(shop_policy(), ceilings=known, ceiling_default=DEFAULT)


def request(gpu: str, *, as_flag: bool = False, **more: Any) -> JobDraft:
    data: dict[str, Any] = {"name": "train", "run": "true", "image": "scratch", **more}
    if not as_flag:
        data["resources"] = {"gpu": f"{gpu}:1"}
    return JobDraft(data=data, flags={"resources": {"gpu": [f"{gpu}:1"]}} if as_flag else {}, source="train.toml")


@pytest.mark.long
def test_every_spelling_has_the_ceiling_of_the_config_in_every_place(tmp_path: Path) -> None:
    assert len(SPELLINGS) > 500
    wrong = []
    decided: dict[tuple[JobSpec, str], MicroUsdPerGpuHour | None] = {}
    """`decide` is a function of values: what two spellings become alike is decided once."""
    for name in SPELLINGS:
        policy, meant = policy_of(name, tmp_path), gpus.resolve(name)
        for as_flag in (False, True):
            spec = read_spec(request(name, as_flag=as_flag), MarketSnapshot(by_provider={}), frozenset())
            become = (spec, str(sorted(policy.ceilings.items())))
            if become not in decided:
                decided[become] = ceiling_of_the_decision(spec, policy, meant)
            facts = {
                "typed": ceiling_for(name, 1, None, policy),
                "listed": set(ceilings_of(spec.resources, spec.price, policy).values()),
                "names": set(ceilings_of(spec.resources, spec.price, policy)),
                "decision": decided[become],
                "spelling": gpus.resolve(spec.resources.gpu[0].name),
            }
            if facts != {"typed": OWN, "listed": {OWN}, "names": set(meant), "decision": OWN, "spelling": meant}:
                wrong.append((name, facts))
    assert wrong == []
    assert len(decided) > 100


def ceiling_of_the_decision(spec: JobSpec, policy: Policy, meant: frozenset[str]) -> MicroUsdPerGpuHour | None:
    sold = [offer(f"o{n}", price=1_900_000, gpu=gpu) for n, gpu in enumerate(sorted(meant))]
    job = new_job(JobId("j1"), spec, NOW)
    world = World(policy=policy, jobs={job.id: job}, attempts={}, intents={})
    return decide(world, market(*sold), NOW).verdicts[job.id].ceiling


def test_every_spelling_in_speed_is_that_of_the_machine() -> None:
    for name in SPELLINGS:
        table = {name: 0.5, "T4" if gpus.resolve(name) != gpus.resolve("T4") else "L4": 1.0}
        spec = read_spec(request("T4", speed=table), MarketSnapshot(by_provider={}), frozenset())
        for gpu in gpus.resolve(name):
            assert Speeds(per_gpu=spec.speed).of(gpu, 1) == 500_000, name


@pytest.mark.parametrize("name", ["H100", "h100", "H100-SXM", "NVIDIA H100 80GB HBM3"])
def test_an_agent_is_held_to_the_same_ceiling(name: str, tmp_path: Path) -> None:
    policy = replace(
        policy_of("h100", tmp_path), agent_job_budget=MicroUsd(9_000_000), agent_day_budget=MicroUsd(9_000_000)
    )
    spec = read_spec(request(name), MarketSnapshot(by_provider={}), frozenset({SHOP}))
    assert not isinstance(within_limits(replace(spec, price=PriceLimit(per_gpu_hour=OWN)), policy), str)
    assert "above the $2.2000/GPU-h" in str(
        within_limits(replace(spec, price=PriceLimit(per_gpu_hour=OWN + 1)), policy)
    )


def test_a_machine_whose_form_is_left_open_has_the_lowest_ceiling_of_what_it_may_be() -> None:
    policy = replace(shop_policy(), ceilings={"H100_SXM": OWN}, ceiling_default=DEFAULT)
    assert ceiling_for("H100", 1, None, policy) == DEFAULT
    assert ceiling_for("H100", 1, None, replace(policy, ceiling_default=None)) is None


@pytest.mark.anyio
@pytest.mark.parametrize("name", ["H100", "h100", "h100 sxm", "H100-PCIE"])
async def test_show_plan_and_verdict_state_the_ceiling_of_the_decision(name: str, tmp_path: Path) -> None:
    policy = replace(shop_policy(), ceilings=policy_of("H100", tmp_path).ceilings, ceiling_default=DEFAULT)
    rig = Rig(tmp_path / "rig", policy=policy)
    rig.shop.offer_index = [offer("h1", price=2_900_000, gpu=min(gpus.resolve(name)))]
    async with rig.ready():
        handlers = rig.handlers()
        plan = await handlers.submissions.plan(request(name))
        assert set(plan["ceilings"].values()) == {2.2}
        made = await handlers.submissions.submit(Submission(draft=request(name)))
        ident = JobId(made["job"]["id"])
        await rig.until(lambda: rig.control_loop.state is not None and ident in rig.control_loop.state.verdicts)
        detail, why = await handlers.jobs.detail("train"), await handlers.jobs.why("train")
        assert (detail["ceiling_usd_gpu_h"], set(detail["ceilings"])) == (2.2, set(gpus.resolve(name)))
        assert (why["kind"], why["ceiling_usd_gpu_h"]) == ("above_ceiling", 2.2)
        assert detail["job"]["ceiling_usd_gpu_h"] == 2.2


@pytest.mark.anyio
async def test_a_waiting_job_shows_every_machine_that_it_would_take(rig: Rig) -> None:
    async with rig.ready():
        handlers = rig.handlers()
        draft = JobDraft(
            data={"name": "train", "run": "true", "image": "scratch", "resources": {"gpu": ["rtx4090:4", "l40s:4"]}},
            source="train.toml",
        )
        await handlers.submissions.submit(Submission(draft=draft))
        job = (await handlers.jobs.detail("train"))["job"]
        assert (job["gpu"], job["gpu_count"], job["gpu_wanted"]) == ("RTX_4090", 4, "RTX_4090:4, L40S:4")
        assert gpu_text(job) == "RTX_4090:4, L40S:4"


@pytest.mark.anyio
async def test_a_plan_says_what_would_happen_and_not_that_it_does(rig: Rig) -> None:
    async with rig.ready():
        plan = await rig.handlers().submissions.plan(request("RTX_4090", price={"max_price": 1.0}))
        assert plan["verdict"].startswith("would rent 1 x RTX_4090 at ")
