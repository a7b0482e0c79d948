"""Core values for these tests: plain ones with sensible defaults, and arbitrary ones for properties."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, date, datetime, timedelta
from enum import StrEnum
from typing import Any, Final, NewType, Union, get_args, get_origin, get_type_hints

from hypothesis import strategies as st

from spotd.core.domain.attempts import Attempt
from spotd.core.domain.cooldowns import Cooldown, CooldownScope
from spotd.core.domain.intents import AttemptId, Charge, Intent, IntentKind, IntentState, JobId, Meter, launch_intent_id
from spotd.core.domain.jobs import Checkpoint, Job
from spotd.core.domain.market import PriceBreakdown, Quote
from spotd.core.domain.plan import Event, Plan
from spotd.core.domain.policy import Policy, attempt_key
from spotd.core.domain.states import AttemptState, JobState
from spotd_jobs.spec.model import GpuAlternative, JobSpec, Resources
from spotd_providers.contract.values import (
    InstallId,
    InstanceId,
    InstanceRef,
    Interruption,
    Market,
    MicroUsd,
    MicroUsdPerGpuHour,
    MicroUsdPerHour,
    Offer,
    OfferId,
    PoolId,
    ProviderName,
)

NOW: Final = datetime(2026, 11, 21, 10, 30, tzinfo=UTC)
INSTALL: Final = InstallId("lab")
VAST: Final = ProviderName("vast")
POLICY: Final = Policy(install=INSTALL, providers={})


def job_id(text: str) -> JobId:
    return JobId(text)


def spec(name: str = "train") -> JobSpec:
    return JobSpec(
        name=name,
        run=("python", "train.py"),
        image="image:1",
        resources=Resources(gpu=(GpuAlternative(name="H100", count=1), GpuAlternative(name="A100-80GB", count=2))),
    )


def job(text: str = "j1", state: JobState = JobState.QUEUED, **changes: Any) -> Job:
    name = changes.pop("name", "train")
    plain = Job(
        id=JobId(text),
        name=name,
        spec=spec(name),
        code_sha256=None,
        code_bytes=0,
        submitted_at=NOW,
        state=state,
        reason="because",
        state_since=NOW,
    )
    return replace(plain, **changes)


def quote(provider: ProviderName = VAST, total: int = 2_000_000) -> Quote:
    offer = Offer(
        provider=provider,
        offer_id=OfferId("offer-1"),
        pool=PoolId("pool-1"),
        market=Market.SPOT,
        interruption=Interruption.SUDDEN,
        gpu="H100",
        gpu_count=1,
        gpu_price=MicroUsdPerHour(1_500_000),
        extra={"zone": "a"},
    )
    price = PriceBreakdown(
        gpu=MicroUsdPerHour(1_500_000),
        storage=MicroUsdPerHour(100_000),
        fee=MicroUsdPerHour(300_000),
        upload=MicroUsdPerHour(60_000),
        restore=MicroUsdPerHour(40_000),
        total=MicroUsdPerHour(total),
        per_gpu=MicroUsdPerGpuHour(total),
        fee_ppm=1_200_000,
    )
    return Quote(offer=offer, price=price, on_demand=MicroUsdPerHour(3_000_000), at=NOW)


def attempt_id(text: str = "j1", number: int = 1) -> AttemptId:
    return AttemptId(job=JobId(text), number=number)


def attempt(text: str = "j1", number: int = 1, state: AttemptState = AttemptState.INTENDED, **changes: Any) -> Attempt:
    plain = Attempt(
        id=attempt_id(text, number),
        key=attempt_key(INSTALL, JobId(text), number),
        state=state,
        quote=quote(),
        ceiling=MicroUsdPerGpuHour(2_400_000),
        price_max=MicroUsdPerHour(1_500_000),
        intended_at=NOW,
    )
    return replace(plain, **changes)


def launch_of(item: Attempt, **changes: Any) -> Intent:
    plain = Intent(
        id=launch_intent_id(item.key),
        kind=IntentKind.LAUNCH,
        provider=item.provider,
        key=item.key,
        state=IntentState.OPEN,
        created_at=NOW,
        attempt=item.id,
    )
    return replace(plain, **changes)


def ref(text: str = "i-1", provider: ProviderName = VAST) -> InstanceRef:
    return InstanceRef(provider=provider, instance_id=InstanceId(text), scope="us-east-1")


def checkpoint(name: str = "step-1", **changes: Any) -> Checkpoint:
    plain = Checkpoint(
        name=name, attempt=1, step=1, bytes=10, at=NOW, manifest_key=f"jobs/j1/{name}.json", sha256="ab" * 32
    )
    return replace(plain, **changes)


def charge(
    text: str = "j1",
    number: int = 1,
    *,
    at: datetime = NOW,
    amount: int = 1_000,
    on_demand: int | None = 3_000,
    provider: ProviderName = VAST,
) -> Charge:
    return Charge(
        attempt=attempt_id(text, number),
        provider=provider,
        day=at.date(),
        start=at,
        end=at + timedelta(minutes=5),
        amount=MicroUsd(amount),
        on_demand=None if on_demand is None else MicroUsd(on_demand),
    )


def cooldown(
    subject: str = "host-1", *, until: datetime = NOW + timedelta(minutes=5), reason: str = "lost"
) -> Cooldown:
    return Cooldown(provider=VAST, scope=CooldownScope.HOST, subject=subject, until=until, reason=reason)


def told(*values: Job | Attempt, kind: str = "changed") -> tuple[Event, ...]:
    """An event for each of these."""
    return tuple(
        Event(at=NOW, kind=kind, message="it changed", job=v.id)
        if isinstance(v, Job)
        else Event(at=NOW, kind=kind, message="it changed", job=v.id.job, attempt=v.id.number)
        for v in values
    )


def plan(*values: Job | Attempt | Intent | Cooldown | Charge | Event, silent: bool = False) -> Plan:
    """A plan that writes these, with an event for each job and attempt unless it is to be silent."""
    jobs = [v for v in values if isinstance(v, Job)]
    attempts = [v for v in values if isinstance(v, Attempt)]
    events = tuple(v for v in values if isinstance(v, Event))
    return Plan(
        jobs={v.id: v for v in jobs},
        attempts={v.id: v for v in attempts},
        intents={v.id: v for v in values if isinstance(v, Intent)},
        cooldowns=tuple(v for v in values if isinstance(v, Cooldown)),
        charges=tuple(v for v in values if isinstance(v, Charge)),
        events=events if silent else events + told(*jobs, *attempts),
    )


def running_job(text: str = "j1") -> Plan:
    """A job with its first attempt, both running."""
    item = attempt(text, state=AttemptState.RUNNING, ref=ref(f"i-{text}"), launched_at=NOW, running_at=NOW)
    return plan(job(text, JobState.RUNNING, attempts_made=1), item, launch_done(item))


def launch_done(item: Attempt) -> Intent:
    return launch_of(item, state=IntentState.DONE)


def intended_job(text: str = "j1") -> Plan:
    """A job whose first machine is owed but not bought yet."""
    item = attempt(text)
    return plan(job(text, JobState.PROVISIONING, attempts_made=1), item, launch_of(item))


# --- arbitrary values, every field of every value filled ---

_BIG: Final = 2**53
_WORDS: Final = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=12)
INSTANTS: Final = st.timedeltas(min_value=timedelta(days=-700_000), max_value=timedelta(days=2_900_000)).map(
    lambda since_1970: datetime(1970, 1, 1, tzinfo=UTC) + since_1970
)
_LEAVES: Final[Mapping[Any, st.SearchStrategy[Any]]] = {
    str: _WORDS,
    int: st.integers(-_BIG, _BIG),
    float: st.floats(allow_nan=False, allow_infinity=False),
    bool: st.booleans(),
    datetime: INSTANTS,
    date: st.dates(min_value=date(1000, 1, 1)),
    timedelta: st.timedeltas(min_value=timedelta(0), max_value=timedelta(days=3650)),
}


def arbitrary(hint: Any) -> st.SearchStrategy[Any]:
    """Any value of a type of the model; of a dataclass, with no field left at its default."""
    if isinstance(hint, NewType):
        return arbitrary(hint.__supertype__)
    if hint in _LEAVES:
        return _LEAVES[hint]
    if isinstance(hint, type) and issubclass(hint, StrEnum):
        return st.sampled_from(list(hint))
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        hints = get_type_hints(hint)
        return st.builds(hint, **{f.name: arbitrary(hints[f.name]) for f in dataclasses.fields(hint)})
    origin, args = get_origin(hint), get_args(hint)
    if origin in {Union, types.UnionType} and type(None) in args:
        return st.none() | st.one_of(*[arbitrary(arg) for arg in args if arg is not type(None)])
    if origin in {Union, types.UnionType}:
        return st.one_of(*[arbitrary(arg) for arg in args if arg is not type(None)])
    if origin is tuple and args[-1] is Ellipsis:
        return st.lists(arbitrary(args[0]), max_size=3).map(tuple)
    if origin is tuple:
        return st.tuples(*map(arbitrary, args))
    if origin is Mapping:
        return st.dictionaries(arbitrary(args[0]), arbitrary(args[1]), max_size=3)
    raise TypeError(f"no strategy for {hint!r}")


@st.composite
def arbitrary_attempts(draw: st.DrawFn) -> Attempt:
    """An attempt whose machine is at the provider it was bought from."""
    item: Attempt = draw(arbitrary(Attempt))
    if item.ref is None:
        return item
    return replace(item, ref=replace(item.ref, provider=item.provider))


def with_meter(item: Attempt, meter: Meter) -> Attempt:
    return replace(item, meter=meter)
