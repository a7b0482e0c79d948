"""Small worlds for tests of the core."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

from spotd.core.domain.attempts import Attempt, HostStatus, MachineState, StopOrder
from spotd.core.domain.intents import AttemptId, Intent, IntentKind, IntentState, JobId, Meter, launch_intent_id
from spotd.core.domain.jobs import Job, new_job
from spotd.core.domain.market import MarketSnapshot, ProviderOffers, build_offer_index
from spotd.core.domain.policy import Policy, ProviderPolicy, attempt_key
from spotd.core.domain.states import AttemptState, EndReason, JobState
from spotd.core.domain.world import World
from spotd.core.pricing import needs_of, quote
from spotd_jobs.spec.model import GpuAlternative, JobSpec, PriceLimit, Resources
from spotd_providers.contract.values import (
    HostId,
    InstallId,
    Instance,
    InstanceId,
    InstanceRef,
    InstanceState,
    Interruption,
    Listing,
    Loss,
    Market,
    MicroUsdPerGbMonth,
    MicroUsdPerGpuHour,
    MicroUsdPerHour,
    Offer,
    OfferId,
    PoolId,
    ProviderName,
)

NOW = datetime(2026, 3, 2, 12, 0, tzinfo=UTC)
SHOP = ProviderName("shop")
INSTALL = InstallId("lab")
MINUTE = timedelta(minutes=1)


def shop_policy(**changes: Any) -> Policy:
    rules = ProviderPolicy(
        name=SHOP,
        fee_ppm=1_000_000,
        quote_ttl=timedelta(minutes=5),
        reconcile_window=timedelta(minutes=3),
        provision_timeout=timedelta(minutes=20),
    )
    return replace(Policy(install=INSTALL, providers={SHOP: rules}), **changes)


def offer(name: str = "o1", *, price: int = 400_000, **changes: Any) -> Offer:
    base = Offer(
        provider=SHOP,
        offer_id=OfferId(name),
        host_id=HostId(f"host-{name}"),
        pool=PoolId(f"pool-{name}"),
        market=Market.SPOT,
        interruption=Interruption.SUDDEN,
        gpu="RTX_4090",
        gpu_count=1,
        gpu_price=MicroUsdPerHour(price),
        on_demand_price=MicroUsdPerHour(1_000_000),
        storage_price=MicroUsdPerGbMonth(0),
    )
    return replace(base, **changes)


def market(*offers: Offer, at: datetime = NOW, sells_spot: bool = True) -> MarketSnapshot:
    provider_offers = ProviderOffers(provider=SHOP, offer_index=build_offer_index(offers), at=at, sells_spot=sells_spot)
    return MarketSnapshot(by_provider={SHOP: provider_offers})


def job(number: int = 1, *, ceiling: int | None = 500_000, budget: int | None = None, **changes: Any) -> Job:
    resources = changes.pop("resources", Resources(gpu=(GpuAlternative(name="RTX_4090", count=1),)))
    spec_changes = changes.pop("spec", {})
    spec = JobSpec(
        name=f"job{number}",
        run=("true",),
        image="scratch",
        resources=resources,
        price=None if ceiling is None else PriceLimit(per_gpu_hour=ceiling),
        job_budget=budget,
        **spec_changes,
    )
    made = new_job(JobId(f"j{number}"), spec, NOW - timedelta(hours=1))
    made = replace(made, submitted_at=made.submitted_at + timedelta(seconds=number), reason="queued")
    return replace(made, **changes)


_JOB_STATE = {
    AttemptState.INTENDED: JobState.PROVISIONING,
    AttemptState.STARTING: JobState.STARTING,
    AttemptState.RUNNING: JobState.RUNNING,
    AttemptState.STOPPING: JobState.CANCELLING,
    AttemptState.ENDING: JobState.RECOVERING,
}
REF = InstanceRef(provider=SHOP, instance_id=InstanceId("m1"))


def world_with(state: AttemptState, **changes: Any) -> World:
    """One job with one attempt in this state, launched ten minutes ago and listed before."""
    owner = job(attempts_made=1, state=_JOB_STATE[state], cancel_requested=state is AttemptState.STOPPING)
    number = AttemptId(job=owner.id, number=1)
    key = attempt_key(INSTALL, owner.id, 1)
    launched = NOW - timedelta(minutes=10)
    agreed = quote(offer(), needs_of(owner, shop_policy()), 1_000_000, launched)
    known = state is not AttemptState.INTENDED
    running = state in {AttemptState.RUNNING, AttemptState.STOPPING, AttemptState.ENDING}
    item = Attempt(
        id=number,
        key=key,
        state=state,
        quote=agreed,
        ceiling=MicroUsdPerGpuHour(500_000),
        price_max=MicroUsdPerHour(500_000),
        intended_at=launched,
        ref=REF if known else None,
        outcome_unknown=not known,
        launched_at=launched if known else None,
        running_at=launched + MINUTE if running else None,
        heartbeat_seq=5 if running else -1,
        heartbeat_seen_at=NOW - timedelta(seconds=10) if running else None,
        ended_at=NOW - MINUTE if state is AttemptState.ENDING else None,
        end_reason=EndReason.OUTBID if state is AttemptState.ENDING else None,
        ever_listed=known,
        machine=MachineState.LIVE if known else MachineState.EXPECTED,
        meter=Meter(rate=agreed.price.total, on_demand_rate=agreed.on_demand, since=launched) if known else Meter(),
        stop=StopOrder(
            reason=EndReason.CANCELLED, detail="", ordered_at=NOW - MINUTE, deadline=NOW + timedelta(minutes=3)
        )
        if state is AttemptState.STOPPING
        else None,
    )
    item = replace(item, **changes)
    intents = {}
    if state is AttemptState.INTENDED:
        intent = Intent(
            id=launch_intent_id(key),
            kind=IntentKind.LAUNCH,
            provider=SHOP,
            key=key,
            state=IntentState.UNKNOWN,
            created_at=launched,
            attempt=number,
        )
        intents[intent.id] = intent
    if state is AttemptState.ENDING:
        accepted = Intent(
            id=f"terminate:{SHOP}::{REF.instance_id}",  # type: ignore[arg-type]  # spelled out to pin the format
            kind=IntentKind.TERMINATE,
            provider=SHOP,
            key=key,
            state=IntentState.ACCEPTED,
            created_at=NOW - MINUTE,
            attempt=number,
            ref=REF,
            accepted_at=NOW - timedelta(seconds=30),
        )
        intents[accepted.id] = accepted
    return World(policy=shop_policy(), jobs={owner.id: owner}, attempts={number: item}, intents=intents)


def instance(state: InstanceState, *, loss: Loss | None = None, ident: str = "m1", key: str = "") -> Instance:
    return Instance(
        ref=InstanceRef(provider=SHOP, instance_id=InstanceId(ident)),
        key=key or attempt_key(INSTALL, JobId("j1"), 1),  # type: ignore[arg-type]  # foreign keys too
        state=state,
        loss=loss,
        created_at=NOW - timedelta(minutes=10),
    )


def listing(*instances: Instance, complete: bool = True, at: datetime = NOW) -> dict[ProviderName, Listing]:
    return {SHOP: Listing(instances=instances, complete=complete, at=at)}


def report(**changes: Any) -> dict[AttemptId, HostStatus]:
    number = AttemptId(job=JobId("j1"), number=1)
    return {number: HostStatus(attempt=number, read_at=NOW, **changes)}
