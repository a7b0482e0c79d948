"""Several pods of one Job that carry one attempt: what they are together. Pure.

The Job controller gives each pod a rank, and starts none of them again (`ONCE_EACH`). A pod that is taken away is soon
no more; the Job then names its rank among those that failed.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime
from typing import Any, Final

from spotd_providers.contract.values import AttemptKey, Billing, Instance, InstanceState, Loss
from spotd_providers.kit import gangs
from spotd_providers.kubernetes.machines import Disruption, JobObjects, as_instance, rank_of
from spotd_providers.kubernetes.wire import KubernetesSettings, child, instant, text

_SPAN: Final = re.compile(r"([0-9]{1,5})(?:-([0-9]{1,5}))?")
_RANKS_CHARS_MAX: Final = 1000


def as_one(
    row: JobObjects, key: AttemptKey, settings: KubernetesSettings, now: datetime, *, had_pod: Disruption | None = None
) -> Instance | None:
    """Return what all pods of a Job are together; `had_pod` as in `as_instance`.

    Several that cannot begin together do not wait for each other. A runner that ended well is no loss while the first
    one runs, which ends last.
    """
    bare = as_instance(replace(row, pods=()), key, settings, now, had_pod=had_pod)
    if row.nodes == 1 or not row.pods or bare is None:
        return as_instance(row, key, settings, now, had_pod=had_pod)
    parts = _parts(row, key, settings, now)
    runs = any(one.state is InstanceState.RUNNING for one in parts.values())
    billing = Billing.FULL if runs else Billing.UNKNOWN
    loss = bare.loss or (had_pod or (None, ""))[0] or Loss.HOST_LOST
    failed, succeeded = (ranks_of(child(row.job, "status"), name, row.nodes) for name in ("failed", "completed"))
    for rank in range(row.nodes):
        if rank not in parts and (rank in failed | succeeded or bare.state is not InstanceState.PENDING):
            parts[rank] = replace(bare, state=InstanceState.GONE, loss=Loss.SELF if rank in succeeded else loss)
    absent = [rank for rank in range(row.nodes) if rank not in parts]
    begun_at = instant(child(row.job, "status").get("startTime")) or bare.created_at or now
    if absent and now - begun_at > settings.schedule_within:
        detail = "it got no pod, as where a quota is used up"
        parts[absent[0]] = replace(bare, state=InstanceState.PAUSED, loss=Loss.NO_CAPACITY, detail=detail)
    succeeded |= {rank_of(pod) for pod in row.pods if text(child(pod, "status"), "phase") == "Succeeded"}
    own_ends = {rank for rank in succeeded if rank in parts and parts[rank].loss is Loss.SELF}
    over = [rank for rank, one in sorted(parts.items()) if one.state in gangs.ENDED]
    waiting = [rank for rank in range(row.nodes) if rank in absent or parts[rank].state is InstanceState.PENDING]
    halted = [rank for rank, one in sorted(parts.items()) if one.state is InstanceState.PAUSED]
    if waiting:
        halted += [rank for rank in over if rank == 0 or rank not in own_ends]

    def words(rank: int, what: str) -> str:
        detail = parts[rank].detail if rank in parts else ""
        return f"machine {rank + 1} of {row.nodes} {what}" + (f": {detail}" if detail else "")

    if halted:
        one = parts[halted[0]]
        detail = words(halted[0], "cannot run")
        return replace(one, state=InstanceState.PAUSED, ended_at=None, detail=detail, billing=billing)
    if waiting:
        one = parts.get(0) or parts[min(parts)]
        return replace(one, state=InstanceState.PENDING, loss=None, detail=words(waiting[0], "has not begun"))
    if parts[0].state is InstanceState.RUNNING:
        parts |= {rank: replace(parts[rank], state=InstanceState.RUNNING) for rank in own_ends}
    names = [f"on {parts[rank].host_id or 'a node'}" for rank in range(row.nodes)]
    return replace(gangs.as_one(parts, names, bare.ref, now), billing=billing)


def _parts(row: JobObjects, key: AttemptKey, settings: KubernetesSettings, now: datetime) -> dict[int, Instance]:
    """Return by rank what the pods of this rank are alone."""
    pods: defaultdict[int, list[Mapping[str, Any]]] = defaultdict(list)
    for pod in row.pods:
        pods[min(rank_of(pod), row.nodes - 1)].append(pod)
    found = {}
    for rank, mine in sorted(pods.items()):
        part = as_instance(JobObjects(job=row.job, pods=tuple(mine)), key, settings, now)
        if part is not None:
            found[rank] = part
    return found


def ranks_of(status: Mapping[str, Any], name: str, nodes: int) -> set[int]:
    """Return the ranks that the Job counts as failed or completed, written as `0,2-4`."""
    found: set[int] = set()
    for low, high in _SPAN.findall(text(status, f"{name}Indexes")[:_RANKS_CHARS_MAX]):
        found.update(range(int(low), min(int(high or low), nodes - 1) + 1))
    return found
