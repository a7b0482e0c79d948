"""What a cluster says, in the words of the contract: what is free in its partitions, and its jobs. Pure.

Ages are taken from the clock of the login node, which stands in each answer beside the times of jobs: this computer's
may be another. A row that is not understood is not offered, and makes the list of machines incomplete.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Any, Final

from spotd_providers.contract.gpus import canonical
from spotd_providers.contract.values import (
    NO_GPU,
    AttemptKey,
    Instance,
    InstanceId,
    InstanceRef,
    InstanceState,
    Interruption,
    Loss,
    Market,
    MicroUsdPerHour,
    Offer,
    OfferId,
    PoolId,
    ProviderName,
    Rejected,
)
from spotd_providers.kit.host_gpus import number
from spotd_providers.kit.text import clean
from spotd_providers.slurm.settings import SlurmPartition, SlurmSettings

PROVIDER: Final = ProviderName("slurm")
WHO: Final = "Slurm"
GPUS_MAX: Final = 64
"""In one node."""
NODES_MAX: Final = 20_000
NO_KIND: Final = " "
"""Stands for the type of a GPU in what is said of nodes without any; no GRES is called so."""
GRACE_MAX: Final = timedelta(hours=1)
"""Of a preemption: an end that is later than this is that of the time limit."""
_GRES: Final = re.compile(
    r"(?:^|,)gpu(?::(?P<type>[A-Za-z0-9_.-]*[A-Za-z_.-][A-Za-z0-9_.-]*))?:(?P<count>\d{1,6})(?:\([^()]*\))?(?=,|$)"
)
_PAIR: Final = re.compile(r"(\w+)=(\S*)")
_USABLE: Final = ("idle", "mix", "alloc", "comp", "plnd")
_NOT_USABLE: Final = frozenset("*$!%")
"""Signs behind a state: not responding, in maintenance, about to be switched off."""
_UNLIMITED: Final = ("UNLIMITED", "NONE", "N/A", "")
Rows = Sequence[Sequence[str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """An answer, by what its lines are about. `failures` has what did not run, or ran and was cut."""

    now_s: int
    boot: str
    uptime_s: int
    user: str
    folder: str
    by_tag: Mapping[str, list[tuple[str, ...]]]
    failures: Mapping[str, str]


def answer_of(lines: Rows) -> Said | None:
    """Read an answer; `None` if it does not say who answers."""
    by_tag: defaultdict[str, list[tuple[str, ...]]] = defaultdict(list)
    for tag, *rest in lines:
        by_tag[tag].append(tuple(rest))
    host = next((one for one in by_tag["host"] if len(one) == 5), None)
    now_s, uptime_s = (None, None) if host is None else (number(host[2], digits=11), number(host[1], digits=11))
    if host is None or now_s is None or uptime_s is None:
        return None
    failures = {}
    for words in by_tag["ran"]:
        tag, status, odd, first, *_ = (*words, "", "", "", "")
        if status != "0":
            failures[tag] = clean(first) or f"it ended with {clean(status)}"
        elif odd != "0":
            failures[tag] = f"{clean(odd)} of its rows cannot be read"
    return Said(
        now_s=now_s, boot=host[0], uptime_s=uptime_s, user=host[3], folder=host[4], by_tag=by_tag, failures=failures
    )


# What can be had: of each partition, for each kind of GPU, how many of one node.


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRoom:
    """What one node has of one kind of GPU, and what is free of it."""

    node: str
    gpus: int
    free: int
    cpus: int
    cpus_free: int
    memory_mb: int
    memory_free_mb: int

    def fits(self, count: int, cpus: int, memory_mb: int) -> bool:
        return self.free >= count and self.cpus_free >= cpus and self.memory_free_mb >= memory_mb


def gpus_in(text: str) -> dict[str, int]:
    """Return the GPUs of a GRES text by their type, which may be empty."""
    found: defaultdict[str, int] = defaultdict(int)
    for one in _GRES.finditer(text):
        found[(one["type"] or "").lower()] += int(one["count"])
    return found


def rooms_of(said: Said) -> tuple[Mapping[str, Mapping[str, list[NodeRoom]]], int]:
    """Return the rooms by partition and type of GPU (`NO_KIND` for a node without any), and how many rows are odd."""
    rooms: defaultdict[str, defaultdict[str, list[NodeRoom]]] = defaultdict(lambda: defaultdict(list))
    odd = 0
    for row in said.by_tag.get("node", [])[:NODES_MAX]:
        if len(row) != 8:
            odd += 1
            continue
        node, partition, state, gres, used, cpus, memory, allocated = row
        spoken = state.rstrip("*~#!%$@^-+")
        if spoken not in _USABLE or _NOT_USABLE & set(state[len(spoken) :]):
            continue
        counts = [number(one, digits=6) for one in cpus.split("/")]
        sizes = number(memory, digits=9), number(allocated, digits=9)
        if len(counts) != 4 or counts[1] is None or not counts[3] or not sizes[0] or sizes[1] is None:
            odd += 1
            continue
        has, taken = gpus_in(gres), gpus_in(used)
        if any(not 0 < count <= GPUS_MAX for count in has.values()):
            odd += 1
            continue
        for kind, count in (has or {NO_KIND: 1}).items():
            # The types of what is used may be missing where those of what is there are stated.
            busy = taken.get(kind, 0) + (taken.get("", 0) if kind else 0)
            free = max(0, count - busy) if kind != NO_KIND else int(counts[1] == counts[3])
            rooms[partition.rstrip("*")][kind].append(
                NodeRoom(
                    node=node, gpus=count, free=free, cpus=counts[3], cpus_free=counts[1],
                    memory_mb=sizes[0], memory_free_mb=max(0, sizes[0] - sizes[1]),
                )
            )  # fmt: skip
    return rooms, odd


def partitions_of(said: Said) -> dict[str, dict[str, str]]:
    """Return what `scontrol show partition` says of each."""
    found = {}
    for line in said.by_tag.get("partition", []):
        pairs = dict(_PAIR.findall(line[0]) if line else ())
        if name := pairs.get("PartitionName"):
            found[name] = pairs
    return found


def config_of(said: Said, name: str) -> str:
    """Return one value of the cluster's configuration; empty if it is not said."""
    lines = (one[0] for one in said.by_tag.get("config", []) if one)
    return next((line.partition("=")[2].strip() for line in lines if line.startswith(f"{name} ")), "")


def market_of(partition: SlurmPartition, about: Mapping[str, Mapping[str, str]], preempts_by: str) -> Market:
    """Return whether jobs there can be preempted: by its mode, and whether anything ranks above it."""
    if partition.market is not None:
        return partition.market
    own = about.get(partition.name, {})
    if own.get("PreemptMode", "OFF") in ("OFF", "DISABLED") or preempts_by == "preempt/none":
        return Market.ON_DEMAND
    tiers = {name: number(one.get("PriorityTier", "")) or 0 for name, one in about.items()}
    is_highest = tiers.get(partition.name, 0) >= max(tiers.values(), default=0)
    return Market.ON_DEMAND if is_highest and preempts_by == "preempt/partition_prio" else Market.SPOT


def span_of(text: str) -> timedelta | None:
    """Return a duration as Slurm writes it (`[days-]hours:minutes:seconds`, or minutes); `None` for no limit."""
    days, _, rest = text.rpartition("-")
    parts = [number(one, digits=6) for one in rest.split(":")]
    if text in _UNLIMITED or text.startswith("-") or None in parts or (days and number(days, digits=5) is None):
        return None
    known = [one for one in parts if one is not None]
    if days:
        hours, minutes, seconds = [*known, 0, 0][:3]
    elif len(known) == 1:
        hours, minutes, seconds = 0, known[0], 0
    else:
        hours, minutes, seconds = [0, *known][-3:]
    return timedelta(days=number(days) or 0, hours=hours, minutes=minutes, seconds=seconds)


def offers_of(said: Said, settings: SlurmSettings) -> tuple[list[Offer], list[Rejected]]:
    """Return what can be asked for now, and why not what cannot."""
    rooms, odd = rooms_of(said)
    about = partitions_of(said)
    preempts_by = config_of(said, "PreemptType")
    offers: list[Offer] = []
    bad = [Rejected(offer_id="sinfo", reason=f"{odd} rows of nodes cannot be read")] if odd else []
    for partition in settings.partitions:
        own = about.get(partition.name)
        if own is None or own.get("State", "UP") != "UP":
            words = "there is no such partition" if own is None else f"the partition is {clean(own['State'])}"
            bad.append(Rejected(offer_id=partition.name, reason=words))
            continue
        if not rooms.get(partition.name):
            bad.append(Rejected(offer_id=partition.name, reason="none of its nodes can be used now"))
        market = market_of(partition, about, preempts_by)
        limits = [one for one in (partition.time_limit, span_of(own.get("MaxTime", ""))) if one]
        has_grace = bool(number(own.get("GraceTime", "")))
        for kind, nodes in sorted(rooms.get(partition.name, {}).items()):
            made, reason = _offers_of_kind(partition, kind, nodes, settings)
            taken_away = Interruption.NOTICE if has_grace else Interruption.SUDDEN
            offers += [
                replace(
                    one,
                    market=market,
                    interruption=taken_away if market is Market.SPOT else Interruption.NEVER,
                    on_demand_price=one.gpu_price if market is Market.ON_DEMAND else None,
                    duration_max=min(limits, default=None),
                    extra={**one.extra, "limit_s": str(int(min(limits).total_seconds()) if limits else 0)},
                )
                for one in made
            ]
            bad += [Rejected(offer_id=f"{partition.name}:{kind.strip() or 'any'}", reason=reason)] if reason else []
    return offers, bad


def _offers_of_kind(
    partition: SlurmPartition, kind: str, nodes: Sequence[NodeRoom], settings: SlurmSettings
) -> tuple[list[Offer], str]:
    has_gpu = kind != NO_KIND
    gpu = canonical("", partition.gpu or kind) if has_gpu and (partition.gpu or kind) else NO_GPU
    if has_gpu and gpu == NO_GPU:
        return [], "its GRES has no type: name the GPU in providers.slurm.partitions.gpu"
    if settings.price_of(partition, gpu, 1) is None:
        return [], f"no price is stated for {gpu} there: set price or gpu_prices"
    offers: list[Offer] = []
    for count in range(1, (max(one.gpus for one in nodes) if has_gpu else 1) + 1):
        sized = [(one, _share(one, count)) for one in nodes if one.gpus >= count]
        cpus, memory = min(share for _, share in sized)
        free = sum(one.fits(count, cpus, memory) for one, _ in sized)
        price = settings.price_of(partition, gpu, count if has_gpu else 0)
        if price is None or not (free or partition.queue):
            continue
        offers.append(
            Offer(
                provider=PROVIDER,
                offer_id=OfferId(f"{partition.name}:{gpu}:{count}"),
                pool=PoolId(f"{partition.name}:{gpu}"),
                market=Market.ON_DEMAND,
                interruption=Interruption.NEVER,
                gpu=gpu,
                gpu_count=count if has_gpu else 0,
                gpu_price=price,
                region=partition.name,
                cpus=float(cpus),
                memory_mb=memory,
                extra={
                    "partition": partition.name,
                    "gres": (f"gpu:{kind}:{count}" if kind else f"gpu:{count}") if has_gpu else "none",
                    "cpus": str(cpus),
                    "memory_mb": str(memory),
                },
            )
        )
    total, unused = sum(one.gpus for one in nodes), sum(one.free for one in nodes)
    return offers, "" if offers else f"{unused} of {total} are free, and no node has room for a job"


def free_nodes(said: Said, offer: Offer) -> int:
    """Return how many nodes could each take one of the offer's machines now."""
    extra = offer.extra
    kind, count = next(iter(gpus_in(extra["gres"]).items()), (NO_KIND, 1))
    rooms = rooms_of(said)[0].get(extra["partition"], {}).get(kind, [])
    return sum(one.fits(count, int(extra["cpus"]), int(extra["memory_mb"])) for one in rooms)


def _share(room: NodeRoom, count: int) -> tuple[int, int]:
    """Return the part of a node's processors and memory that goes with so many of its GPUs."""
    return max(1, room.cpus * count // room.gpus), max(1, room.memory_mb * count // room.gpus)


# Jobs.


@dataclass(frozen=True, slots=True)
class JobRow:
    """One job: the answer that shows it, what its folder says of it, and the fields of `squeue` in their order."""

    said: Said = field(repr=False)
    meta: tuple[str, ...]
    id: str
    name: str
    comment: str
    user: str
    state: str
    reason: str
    submitted: str
    started: str
    ends: str
    preempted: str
    restarts: str
    node: str
    exit: str
    array: str


def jobs_of(said: Said) -> list[JobRow | None]:
    """Return the jobs of an answer; `None` stands for a row that cannot be read."""
    metas = {one[0]: one[1:] for one in said.by_tag.get("meta", []) if len(one) == 4}
    rows = said.by_tag.get("job", [])
    return [JobRow(said, metas.get(row[1], ()), *row) if len(row) == 14 else None for row in rows]


def ref_of(number_: str, key: str) -> InstanceRef:
    """Return the handle of a job: numbers are given away again, so the key is in it."""
    return InstanceRef(provider=PROVIDER, instance_id=InstanceId(f"{number_}:{key}"))


def as_instance(row: JobRow, key: AttemptKey, settings: SlurmSettings, now: datetime) -> Instance | None:
    """Return a job as a machine; `None` if it is none that spotd starts."""
    if number(row.id, digits=18) is None or row.array not in (row.id, "") or number(row.restarts) is None:
        return None

    def at(text: str) -> datetime | None:
        seconds = number(text, digits=11)
        return None if not seconds else now - timedelta(seconds=row.said.now_s - seconds)

    price, market = (*(row.meta[0].split(" ") if row.meta else ()), "", "")[:2]
    amount = number(price, digits=13)
    seen = _state_of(row, settings, at, now)
    return Instance(
        ref=ref_of(row.id, key),
        key=key,
        market=Market(market) if market in [one.value for one in Market] else None,
        price=None if amount is None else MicroUsdPerHour(amount),
        created_at=at(row.submitted),
        **{**seen, "detail": clean(seen["detail"])},
    )


def _state_of(row: JobRow, settings: SlurmSettings, at: Any, now: datetime) -> dict[str, Any]:
    """Return state, loss, notice, end and words of a job."""
    _, ended, code = row.meta if row.meta else ("", "0", "")
    state = row.state.partition(" ")[0].rstrip("+")
    is_final = state in _OVER
    if number(row.restarts) and not is_final:
        words = "the cluster queued it again under its number, so this attempt is over"
        return _stop_of(InstanceState.PAUSED, Loss.PREEMPTED, words)
    if is_final:
        loss, words = _OVER[state]
        if state == "CANCELLED" and ended != "1":
            loss = Loss.PREEMPTED if at(row.started) else Loss.PROVISION_FAILED
            words = "it was cancelled, and not by spotd" + (f" ({row.reason})" if row.reason not in _NO_REASON else "")
        elif state in ("COMPLETED", "FAILED"):
            words = f"its start script ended with {code or row.exit or 'no code'}"
            if row.reason not in (*_NO_REASON, "NonZeroExitCode") and not code:
                is_new = not at(row.started) or row.started == row.ends
                loss = Loss.PROVISION_FAILED if is_new else Loss.HOST_LOST
                words = f"it could not be run: {row.reason}" if is_new else f"its first process ended: {row.reason}"
        return {**_stop_of(InstanceState.GONE, loss, words), "ended_at": at(row.ends)}
    if state == "COMPLETING":
        return {**_stop_of(InstanceState.ENDING, None, "it ends"), "ended_at": at(row.ends)}
    if state in ("PENDING", "CONFIGURING", "REQUEUED", "RESIZING", "REQUEUE_FED"):
        return _waiting(row, settings, at, now)
    if state in ("SUSPENDED", "STOPPED", "SIGNALING", "STAGE_OUT", "REQUEUE_HOLD", "SPECIAL_EXIT"):
        return _stop_of(InstanceState.PAUSED, Loss.PREEMPTED, f"the cluster holds it: {row.state}")
    if state != "RUNNING":
        return _stop_of(InstanceState.UNKNOWN, None, f"its state is {row.state}")
    ends, preempted = at(row.ends), at(row.preempted)
    if preempted is not None:
        is_grace = ends is not None and preempted <= ends <= preempted + GRACE_MAX
        notice, words = (ends if is_grace else preempted), "it is to be preempted"
    elif ends is not None and ends - now <= settings.grace:
        notice, words = ends, "its time limit comes"
    else:
        notice, words = None, f"on {row.node}"
    return {"state": InstanceState.RUNNING, "notice_at": notice, "detail": words}


_NO_REASON: Final = ("None", "")
_NEVER: Final = frozenset(
    {
        "AccountNotAllowed", "BadConstraints", "DependencyNeverSatisfied", "InvalidAccount", "InvalidQOS",
        "PartitionNodeLimit", "PartitionTimeLimit", "QOSNotAllowed", "ReservationDeleted",
    }
)  # fmt: skip
"""Reasons to wait that do not pass by themselves."""
_OVER: Final[Mapping[str, tuple[Loss, str]]] = {
    "COMPLETED": (Loss.SELF, ""),
    "FAILED": (Loss.SELF, ""),
    "CANCELLED": (Loss.SELF, "its end was ordered"),
    "PREEMPTED": (Loss.PREEMPTED, "a job with a higher priority took its place"),
    "REVOKED": (Loss.PREEMPTED, "another cluster of the federation took it"),
    "TIMEOUT": (Loss.EXPIRED, "its time limit has passed"),
    "DEADLINE": (Loss.EXPIRED, "its deadline has passed"),
    "OUT_OF_MEMORY": (Loss.SELF, "the memory of its node was used up"),
    "NODE_FAIL": (Loss.HOST_LOST, "its node failed"),
    "BOOT_FAIL": (Loss.HOST_LOST, "its node did not start"),
    "LAUNCH_FAILED": (Loss.PROVISION_FAILED, "its node could not start it"),
    "RECONFIG_FAIL": (Loss.PROVISION_FAILED, "its node could not start it"),
}
"""States after which a job uses nothing any more, and does not come back under its number."""


def _stop_of(state: InstanceState, loss: Loss | None, words: str) -> dict[str, Any]:
    return {"state": state, "loss": loss, "detail": words}


def _waiting(row: JobRow, settings: SlurmSettings, at: Any, now: datetime) -> dict[str, Any]:
    waited = now - (at(row.submitted) or now)
    words = f"it waits in Slurm's queue: {row.reason}"
    if row.reason in _NEVER:
        return _stop_of(InstanceState.PAUSED, Loss.PROVISION_FAILED, words)
    if waited > settings.queue_wait:
        minutes = int(settings.queue_wait.total_seconds() // 60)
        return _stop_of(InstanceState.PAUSED, Loss.NO_CAPACITY, f"{words}, for more than {minutes} min")
    return {"state": InstanceState.PENDING, "detail": words}
