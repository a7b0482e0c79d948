"""Small worlds behind the API: rows of jobs and attempts, and what providers offer."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final

from spotd.core.domain.attempts import Attempt, MachineState
from spotd.core.domain.intents import Intent, IntentKind, IntentState, JobId, Meter, terminate_intent_id
from spotd.core.domain.jobs import Checkpoint, Job, Outputs
from spotd.core.domain.plan import Event, Plan
from spotd.core.domain.policy import attempt_key
from spotd.core.domain.states import AttemptState, EndReason, JobState
from spotd.core.pricing import Needs, quote
from spotd_jobs.spec.model import GpuAlternative, JobSpec, PriceLimit, Resources
from spotd_jobs.wire.manifest import checkpoint_prefix
from spotd_providers.contract.values import (
    HostId,
    InstanceId,
    InstanceRef,
    MicroUsd,
    MicroUsdPerHour,
    OfferId,
    ProviderName,
)
from tests.unit.core.builders import offer, shop_policy
from tests.unit.daemon.clocks import VirtualClock
from tests.unit.daemon.rig import Rig
from tests.unit.daemon.shop import Shop
from tests.unit.store import values as v

NOW: Final = datetime(2026, 11, 21, 10, 0, tzinfo=UTC)
EARLIER: Final = NOW - timedelta(hours=3)
HOUR: Final = timedelta(hours=1)
LOCAL: Final = ProviderName("local")
RUNNING_ID: Final = "6k0a1b2c3d"


class StillClock(VirtualClock):
    """A clock that only a test moves."""

    def now(self) -> datetime:
        return NOW + self.offset


def h100(name: str = "h3", *, price: int = 2_310_000, provider: ProviderName = LOCAL, **changes: Any) -> Any:
    """An offer of one H100."""
    base = offer(name, price=price, gpu="H100", on_demand_price=MicroUsdPerHour(3_900_000))
    return replace(base, provider=provider, host_id=HostId(name), offer_id=OfferId(f"offer-{name}"), **changes)


def still_rig(folder: Path) -> Rig:
    """A daemon of one provider, `local`, which does nothing by itself."""
    clock = StillClock()
    policy = shop_policy()
    (rules,) = policy.providers.values()
    policy = replace(policy, providers={LOCAL: replace(rules, name=LOCAL)})
    return Rig(folder, clock=clock, shops=[Shop(clock, name=LOCAL, offers=[h100()])], policy=policy)


def spec(name: str, **changes: Any) -> JobSpec:
    base = JobSpec(
        name=name,
        run=("/bin/sh", "-c", "python train.py"),
        image="pytorch/pytorch:2.9.0",
        resources=Resources(gpu=(GpuAlternative(name="H100", count=1),), disk_gb=100),
        price=PriceLimit(per_gpu_hour=2_400_000),
        job_budget=MicroUsd(120_000_000),
        secrets=("TOKEN",),
    )
    return replace(base, **changes)


def job(name: str = "llama-lora", state: JobState = JobState.QUEUED, *, ident: str = RUNNING_ID, **changes: Any) -> Job:
    """A job of three hours ago."""
    base = Job(
        id=JobId(ident),
        name=name,
        spec=changes.pop("spec", spec(name)),
        code_sha256="ab" * 32,
        code_bytes=12_345,
        submitted_at=EARLIER,
        state=state,
        reason="queued",
        state_since=EARLIER,
    )
    return replace(base, **changes)


def checkpoint(name: str = "step-1200", **changes: Any) -> Checkpoint:
    base = Checkpoint(
        name=name,
        attempt=1,
        step=1200,
        bytes=1_500_000,
        at=NOW - timedelta(minutes=30),
        manifest_key=f"jobs/{RUNNING_ID}/{name}.json",
        sha256="ab" * 32,
    )
    return replace(base, **changes)


def attempt(
    number: int = 1,
    state: AttemptState = AttemptState.RUNNING,
    *,
    of: str = RUNNING_ID,
    host: str = "h3",
    **changes: Any,
) -> Attempt:
    """An attempt on `h3`, launched two hours ago and running ever since."""
    launched = NOW - 2 * HOUR
    agreed = quote(
        h100(host), Needs(disk_gb=100, upload_bytes_per_hour=0, restore_bytes_per_hour=0), 1_000_000, launched
    )
    ended = state is AttemptState.ENDED
    settled = Meter(settled=MicroUsd(4_620_000)) if ended else None
    base = v.attempt(
        of,
        number,
        state,
        quote=agreed,
        ref=InstanceRef(provider=LOCAL, instance_id=InstanceId(f"m{number}")),
        price_max=MicroUsdPerHour(2_400_000),
        intended_at=launched,
        launched_at=launched + timedelta(seconds=1),
        running_at=launched + timedelta(minutes=1),
        ended_at=NOW if ended else None,
        end_reason=EndReason.PREEMPTED if ended else None,
        heartbeat_seq=5,
        heartbeat_seen_at=NOW,
        ever_listed=True,
        machine=MachineState.GONE if ended else MachineState.LIVE,
        meter=settled or Meter(rate=agreed.price.total, on_demand_rate=agreed.on_demand, since=launched),
        on_demand_settled=MicroUsd(7_800_000 if ended else 0),
        phase="run",
    )
    return replace(base, **changes)


def running(*, host: str = "h3", **changes: Any) -> Plan:
    """`llama-lora` runs on its first machine."""
    first = attempt(host=host)
    owner = job(
        state=JobState.RUNNING,
        **{
            "reason": "runs on local h3",
            "attempts_made": 1,
            "checkpoints": (checkpoint(),),
            "started_at": first.running_at,
            **changes,
        },
    )
    return v.plan(
        owner, first, v.launch_done(first), event(owner), event(first, "attempt.running", "runs"), silent=True
    )


def ended(state: JobState = JobState.FAILED, *, name: str = "old", ident: str = "6j99ffffff", **changes: Any) -> Plan:
    """A job that is over, after one machine."""
    last = attempt(of=ident, state=AttemptState.ENDED)
    owner = job(
        name,
        state,
        ident=ident,
        **{
            "reason": "the command ended with exit code 1",
            "attempts_made": 1,
            "ended_at": NOW,
            "started_at": last.running_at,
            "spent": MicroUsd(4_620_000),
            "on_demand": MicroUsd(7_800_000),
            "submitted_at": EARLIER - timedelta(minutes=2),
            "checkpoints": (checkpoint(manifest_key=f"jobs/{ident}/step-1200.json"),),
            **changes,
        },
    )
    return v.plan(
        owner,
        last,
        v.launch_done(last),
        event(owner),
        event(last, "attempt.ended", "the provider took it back"),
        silent=True,
    )


def waiting() -> Plan:
    """`prep` was queued and has no machine."""
    owner = job("prep", ident="6k0a9zzzzz", submitted_at=EARLIER - timedelta(minutes=1))
    return v.plan(owner, event(owner), silent=True)


def stray() -> Plan:
    """A machine that no attempt owned ran for an hour and was ended."""
    ref = InstanceRef(provider=LOCAL, instance_id=InstanceId("m9"))
    end = Intent(
        id=terminate_intent_id(ref),
        kind=IntentKind.TERMINATE,
        provider=LOCAL,
        key=attempt_key(v.INSTALL, JobId("6j88888888"), 2),
        state=IntentState.DONE,
        created_at=EARLIER,
        attempt=None,
        ref=ref,
        accepted_at=EARLIER,
        stray_since=EARLIER - HOUR,
        stray_rate=MicroUsdPerHour(1_750_000),
    )
    return v.plan(end)


def event(of: Job | Attempt, kind: str = "job.submitted", message: str = "queued") -> Event:
    if isinstance(of, Job):
        return Event(at=of.submitted_at, kind=kind, message=message, job=of.id)
    return Event(at=of.ended_at or of.intended_at, kind=kind, message=message, job=of.id.job, attempt=of.id.number)


def stored_checkpoint(rig: Rig, name: str, content: bytes, *, of: str, **changes: Any) -> Checkpoint:
    """A checkpoint whose manifest and content are in the object store."""
    rig.host(JobId(of), 1).checkpoint(name, content)
    key = f"{checkpoint_prefix(of, 1)}{name}.json"
    digest = hashlib.sha256(rig.objects.get(key, bytes_max=1_000_000)).hexdigest()
    return checkpoint(name, manifest_key=key, sha256=digest, bytes=len(content), **changes)


def stored_outputs(rig: Rig, files: Sequence[Mapping[str, Any]], *, of: str) -> Outputs:
    """Outputs whose manifest and content are in the object store: rows of it, a file with its content in `data`."""
    host = rig.host(JobId(of), 1)
    content = b"".join(file.get("data", b"") for file in files)
    chunk = f"{hashlib.sha256(content).hexdigest()}-00000000"
    host.raw(f"data/{chunk}", content)
    rows, place = [], 0
    for file in files:
        row = {"type": "file", "mode": 0o644, **file}
        data = row.pop("data", b"")
        if data:
            row |= {"size": len(data), "pieces": [[0, place, len(data)]]}
            place += len(data)
        rows.append(row)
    document = {
        **host.manifest("outputs", b"", kind="outputs"),
        "schema": 2,
        "entry": "outputs",
        "bytes": len(content),
        "chunks": [[chunk, len(content)]],
        "files": rows,
    }
    data = json.dumps(document).encode()
    host.raw("outputs/manifest.json", data)
    return Outputs(attempt=1, sha256=hashlib.sha256(data).hexdigest(), bytes=len(content))
