"""What differs from seed to seed: markets, faults, jobs, limits, and how the user behaves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from random import Random

from spotd.core.model import Job, JobId, Policy, ProviderPolicy
from spotd.core.states import JobState
from spotd_jobs.spec.model import GpuAlternative, JobSpec, PriceLimit, Resources
from spotd_providers.contract.values import InstallId
from tests.sim.cloud import Cloud
from tests.sim.daemon import EPOCH, Work
from tests.sim.machines import Faults

INSTALL = InstallId("lab")
WINDOW = timedelta(minutes=3)


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The size and the character of a world; everything else comes from its seed."""

    jobs: int = 6
    hosts: int = 5
    storm: timedelta = timedelta(hours=12)
    crash_rate: float = 0.02
    """At each named point."""
    kills_per_hour: float = 0.1
    outages_per_hour: float = 0.05
    """Of each provider, of the store, and how often a killed daemon stays away for hours instead of seconds."""
    faults: bool = True
    user: bool = True
    reachable: bool = False
    """Hosts and stores answer, and machines end when told: what budgets can be held to."""
    job_budget: int | None = None
    limits: Mapping[str, object] = field(default_factory=dict)


QUIET = Shape(faults=False, user=False, crash_rate=0.0, kills_per_hour=0.0, outages_per_hour=0.0)


def policy(clouds: list[Cloud], pace: timedelta, **limits: object) -> Policy:
    rules = {
        c.name: ProviderPolicy(
            name=c.name,
            fee_ppm=c.fee_ppm,
            quote_ttl=max(timedelta(minutes=5), 3 * pace),
            reconcile_window=WINDOW,
            provision_timeout=timedelta(minutes=20),
        )
        for c in clouds
    }
    base = Policy(install=INSTALL, providers=rules, silence_max=max(timedelta(minutes=2), 3 * pace), machines_max=64)
    return replace(base, **limits)


def job(
    number: int, *, ceiling: int, at: datetime = EPOCH, budget: int | None = None, priority: int = 0, retries: int = 1
) -> Job:
    spec = JobSpec(
        name=f"job{number}",
        run=("true",),
        image="scratch",
        resources=Resources(gpu=(GpuAlternative(name="RTX_4090", count=1),)),
        price=PriceLimit(per_gpu_hour=ceiling),
        job_budget=budget,
        priority=priority,
        retry_errors=retries,
    )
    return Job(
        id=JobId(f"j{number:03d}"),
        name=spec.name,
        spec=spec,
        code_sha256=None,
        code_bytes=0,
        submitted_at=at,
        state=JobState.QUEUED,
        reason="queued",
        state_since=at,
    )


def stormy(rng: Random) -> Faults:
    return Faults(
        lose_launch_after=rng.choice([0.0, 0.1, 0.3]),
        lose_launch_before=rng.choice([0.0, 0.1]),
        refuse_launch=rng.choice([0.0, 0.2]),
        slow_launch=rng.choice([0.0, 0.1, 0.8]),
        fail_listing=rng.choice([0.0, 0.1, 0.4]),
        cut_listing=rng.choice([0.0, 0.1, 0.3]),
        lie_listing=rng.choice([0.0, 0.05]),
        bad_price=rng.choice([0.0, 0.1]),
        fail_terminate=rng.choice([0.0, 0.2, 0.5, 0.9]),
        forget_terminate=rng.choice([0.0, 0.1]),
        preempt_per_hour=rng.choice([0.0, 0.1, 0.6]),
        silence_per_hour=rng.choice([0.0, 0.1]),
        list_lag=timedelta(seconds=rng.choice([0, 30, 120])),
        store_down=rng.choice([0.0, 0.05]),
        bad_manifest=rng.choice([0.0, 0.05]),
        market_moves=True,
    )


def reachable(faults: Faults) -> Faults:
    return replace(
        faults,
        fail_terminate=0.0,
        forget_terminate=0.0,
        store_down=0.0,
        silence_per_hour=0.0,
        fail_listing=0.0,
        lie_listing=0.0,
    )


def some_job(rng: Random, number: int, shape: Shape, at: datetime) -> tuple[Job, Work]:
    errors = rng.choice([0, 0, 0, 1, 2]) if shape.faults else 0
    made = job(
        number,
        ceiling=rng.randint(500_000, 1_500_000),
        at=at,
        budget=shape.job_budget,
        priority=rng.choice([-1, 0, 0, 5]),
        retries=rng.choice([1, 2]),
    )
    return made, Work(need=timedelta(minutes=rng.randint(20, 400)), errors=errors)
