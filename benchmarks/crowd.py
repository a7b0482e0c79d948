"""A daemon's folder with many jobs in its state, for the benchmarks that start one over it.

Every job was brought to where it is by the core's own functions, so the state is one that a daemon may leave behind.
"""

from __future__ import annotations

import sys
from datetime import UTC, datetime, timedelta
from functools import partial, reduce
from pathlib import Path

REPO = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPO))

from spotd.core.decide import decide
from spotd.core.domain.attempts import HostStatus
from spotd.core.domain.intents import JobId
from spotd.core.domain.jobs import Job, new_job
from spotd.core.domain.market import MarketSnapshot, ProviderOffers, build_offer_index
from spotd.core.domain.plan import Plan, applied, combine
from spotd.core.domain.policy import Policy, ProviderPolicy
from spotd.core.domain.world import World
from spotd.core.kernel import outcomes
from spotd.core.kernel.reconcile import reconcile
from spotd.core.requests import submit_all
from spotd.store import Store, Tx
from spotd_jobs.spec.model import GpuAlternative, JobSpec, PriceLimit, Resources
from spotd_providers.contract.values import (
    HostId,
    InstallId,
    Instance,
    InstanceId,
    InstanceRef,
    InstanceState,
    Interruption,
    Market,
    MicroUsdPerHour,
    Offer,
    OfferId,
    PoolId,
    ProviderName,
)
from tests.e2e.harness import Lab, host

LOCAL = ProviderName("local")
POLICY = Policy(
    install=InstallId("lab"),
    providers={
        LOCAL: ProviderPolicy(
            name=LOCAL,
            fee_ppm=1_000_000,
            quote_ttl=timedelta(minutes=5),
            reconcile_window=timedelta(seconds=5),
            provision_timeout=timedelta(minutes=5),
        )
    },
    machines_max=100_000,
    launches_per_cycle_max=100_000,
)
EXPENSIVE = host("expensive", 5.0, on_demand=9.0)
"""A market in which every job's ceiling is too low: nothing is bought while something is measured."""


def crowded_lab(folder: Path, *, jobs: int, running: int, poll_s: float = 60.0) -> Lab:
    """A lab whose daemon, once started, finds so many jobs, some of them on machines that its market does not know."""
    found = Lab(folder, hosts=EXPENSIVE, scale=1.0, virtual0=datetime.now(UTC), poll_s=poll_s)
    found.fresh = True
    with Store.open(found.folder / "state" / "state.sqlite") as store:
        for plan in history(datetime.now(UTC) - timedelta(hours=1), jobs=jobs, running=running):
            store.tx(partial(commit, plan=plan))
    return found


def commit(tx: Tx, *, plan: Plan) -> None:
    tx.commit(plan)


def history(at: datetime, *, jobs: int, running: int) -> list[Plan]:
    world = World(policy=POLICY, jobs={}, attempts={}, intents={})
    plans: list[Plan] = []

    def happens(plan: Plan) -> Plan:
        nonlocal world
        world = applied(world, plan)
        plans.append(plan)
        return plan

    happens(submit_all(world, [job_of(n, 1_000_000 if n < running else 10_000, at) for n in range(jobs)], at))
    offers = build_offer_index(tuple(_offer(number) for number in range(running)))
    happens(
        decide(
            world, MarketSnapshot(by_provider={LOCAL: ProviderOffers(provider=LOCAL, offer_index=offers, at=at)}), at
        )
    )
    launched = []
    for attempt in world.attempts.values():
        ref = InstanceRef(provider=LOCAL, instance_id=InstanceId(f"m-{attempt.id.job}"))
        machine = Instance(ref=ref, key=attempt.key, state=InstanceState.RUNNING, created_at=at)
        launched.append(outcomes.launched(world, attempt.id, machine, at))
    while len(launched) > 1:  # by halves: one after the other copies them all again and again
        launched = [reduce(combine, launched[n : n + 2]) for n in range(0, len(launched), 2)]
    for plan in launched:
        happens(plan)
    reports = {i: HostStatus(attempt=i, read_at=at, seq=1, phase="run") for i in world.attempts}
    happens(reconcile(world, {}, reports, at))
    return plans


def job_of(number: int, ceiling: int, at: datetime) -> Job:
    spec = JobSpec(
        name=f"job-{number:04d}",
        run=("python", "train.py", "--config", f"experiment-{number}.toml"),
        image="pytorch/pytorch:2.9.0-cuda12.8-cudnn9-runtime",
        resources=Resources(gpu=(GpuAlternative(name="RTX_4090", count=1),)),
        price=PriceLimit(per_gpu_hour=ceiling),
    )
    return new_job(JobId(f"j{number:05d}"), spec, at)


def _offer(number: int) -> Offer:
    return Offer(
        provider=LOCAL,
        offer_id=OfferId(f"o{number}:spot"),
        host_id=HostId(f"host-{number}"),
        pool=PoolId(f"pool-{number}"),
        market=Market.SPOT,
        interruption=Interruption.SUDDEN,
        gpu="RTX_4090",
        gpu_count=1,
        gpu_price=MicroUsdPerHour(400_000),
    )
