"""Nodes as offers: which GPUs a cluster has, how many are free now, and what they count as.

A cluster has no market. Nodes of one kind (GPU, market, zone) are one pool, and a pool is offered once for each size
that some node of it can take now. What the nodes lack (a price, a name) is said of the node, which is then rejected.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any, Final

from spotd_providers.contract.gpus import canonical, matches, resolve
from spotd_providers.contract.values import (
    NO_GPU,
    Interruption,
    Market,
    MicroUsdPerHour,
    Offer,
    OfferId,
    PoolId,
    QuotaId,
    Rejected,
    micro_usd,
)
from spotd_providers.kit.text import clean
from spotd_providers.kubernetes.wire import PROVIDER, KubernetesSettings, Toleration, child, items, quantity, text

GPU_RESOURCES: Final = ("nvidia.com/gpu", "amd.com/gpu")
MIG: Final = "nvidia.com/mig-"
GPU_LABELS: Final = (
    "nvidia.com/gpu.product", "amd.com/gpu.product-name", "cloud.google.com/gke-accelerator",
    "karpenter.k8s.aws/instance-gpu-name", "k8s.amazonaws.com/accelerator",
)  # fmt: skip
"""Where a node says which GPU it has, the most exact first."""
SPOT_LABELS: Final[Mapping[str, frozenset[str]]] = {
    "karpenter.sh/capacity-type": frozenset({"spot"}),
    "eks.amazonaws.com/capacityType": frozenset({"SPOT"}),
    "cloud.google.com/gke-spot": frozenset({"true"}),
    "cloud.google.com/gke-preemptible": frozenset({"true"}),
    "kubernetes.azure.com/scalesetpriority": frozenset({"spot"}),
}
USUAL_TOLERATIONS: Final = (
    Toleration(key="nvidia.com/gpu"), Toleration(key="amd.com/gpu"),
    Toleration(key="cloud.google.com/gke-spot", value="true"), Toleration(key="cloud.google.com/gke-preemptible"),
    Toleration(key="kubernetes.azure.com/scalesetpriority", value="spot"), Toleration(key="karpenter.sh/capacity-type"),
)  # fmt: skip
ZONE: Final = "topology.kubernetes.io/zone"
REGION: Final = "topology.kubernetes.io/region"
SIZES: Final = (1, 2, 3, 4, 6, 8, 10, 12, 16)
ASKED_SHARE: Final = 0.9
"""How much of a node's free processors and memory a job asks for: a pod that starts meanwhile must not keep it out."""
GPUS_MAX: Final = 64
MADE: Final = "pool:"
"""How the name of a pool begins whose nodes are made when they are asked for, so that they cannot be counted."""
_GB: Final = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """What one node can give to one more pod."""

    gpus: int
    cpus: float
    memory: float
    disk: float


@dataclass(slots=True, kw_only=True)
class _Pool:
    """Nodes of one kind: what is offered of them, and `where` as a pod asks for one of them."""

    name: str
    gpu: str
    vram_mb: int | None
    resource: str
    market: Market
    region: str
    where: Sequence[Mapping[str, Any]]
    rooms: list[Room] = field(default_factory=list)


def is_tolerated(taints: Iterable[Mapping[str, Any]], tolerations: Sequence[Toleration]) -> bool:
    """Whether a pod of ours may run on a node with these taints."""
    hard = (taint for taint in taints if text(taint, "effect") in ("NoSchedule", "NoExecute"))
    return all(
        any(
            one.key == text(taint, "key")
            and (one.value is None or one.value == text(taint, "value"))
            and (one.effect is None or one.effect == text(taint, "effect"))
            for one in tolerations
        )
        for taint in hard
    )


def used_by_node(pods: Iterable[Any]) -> dict[str, dict[str, float]]:
    """Add up what the pods of each node ask for; those that are over ask for nothing."""
    used: defaultdict[str, defaultdict[str, float]] = defaultdict(lambda: defaultdict(float))
    for pod in pods:
        node = text(child(pod, "spec"), "nodeName")
        if not node or text(child(pod, "status"), "phase") in ("Succeeded", "Failed"):
            continue
        spec = child(pod, "spec")
        first: defaultdict[str, float] = defaultdict(float)
        for container in items(spec, "initContainers"):
            for name, amount in child(container, "resources", "requests").items():
                first[name] = max(first[name], quantity(amount))
        all_at_once: defaultdict[str, float] = defaultdict(float)
        for container in items(spec, "containers"):
            for name, amount in child(container, "resources", "requests").items():
                all_at_once[name] += quantity(amount)
        for name in {*first, *all_at_once}:
            used[node][name] += max(first[name], all_at_once[name])
        used[node]["pods"] += 1
    return {node: dict(amounts) for node, amounts in used.items()}


def offers_of(
    nodes: Iterable[Any], used: Mapping[str, Mapping[str, float]] | None, settings: KubernetesSettings
) -> tuple[list[Offer], list[Rejected]]:
    """Translate nodes and configured pools to offers, or reject them with the reason.

    Args:
        used: what is asked for on each node; `None` where that may not be read, so that every GPU counts as free.
    """
    pools, bad = _pools(nodes, used, settings)
    offers: list[Offer] = []
    for pool in pools:
        price = _price(pool.gpu, pool.market, settings)
        if price is None:
            name = f"{pool.gpu} {pool.market}"
            bad.append(Rejected(offer_id=name, reason=f"no price for {name}: add it to providers.kubernetes.prices"))
        else:
            offers.extend(_sizes(pool, price, settings))
    offers.extend(_configured(settings))
    return offers, bad


def places_of(
    nodes: Iterable[Any],
    used: Mapping[str, Mapping[str, float]] | None,
    settings: KubernetesSettings,
    offer: Offer,
    disk_gb: int,
) -> int:
    """Return for how many of the pods that an offer of several is for there is room at once."""
    asked: dict[str, str] = json.loads(offer.extra["asked"])
    each = (offer.gpu_count // offer.nodes, quantity(asked["cpu"]), quantity(asked["memory"]), disk_gb * _GB)
    pools = (one for one in _pools(nodes, used, settings)[0] if json.dumps(one.where) == offer.extra["where"])
    rooms = ((room.gpus, room.cpus, room.memory, room.disk) for pool in pools for room in pool.rooms)
    return sum(min(int(has // needs) for has, needs in zip(room, each, strict=True) if needs) for room in rooms)


def _pools(
    nodes: Iterable[Any], used: Mapping[str, Mapping[str, float]] | None, settings: KubernetesSettings
) -> tuple[list[_Pool], list[Rejected]]:
    pools: dict[tuple[str, ...], _Pool] = {}
    bad: list[Rejected] = []
    for node in nodes:
        reason = _add(node, used, settings, pools)
        if reason:
            bad.append(Rejected(offer_id=clean(text(child(node, "metadata"), "name"))[:64] or "node", reason=reason))
    return list(pools.values()), bad


def _add(
    node: Any,
    used: Mapping[str, Mapping[str, float]] | None,
    settings: KubernetesSettings,
    pools: dict[tuple[str, ...], _Pool],
) -> str:
    """Add a node to its pool; return why it has none, empty for a node that is simply not meant."""
    labels, allocatable = child(node, "metadata", "labels"), child(node, "status", "allocatable")
    if any(labels.get(name) != value for name, value in settings.node_selector.items()):
        return ""
    known = (*GPU_RESOURCES, *sorted(name for name in allocatable if name.startswith(MIG)))
    found = next((one for one in known if quantity(allocatable.get(one))), "")
    if not found:
        return ""
    if child(node, "spec").get("unschedulable") is True:
        return "the node takes no new pods"
    ready = [one for one in items(child(node, "status"), "conditions") if text(one, "type") == "Ready"]
    if not any(text(one, "status") == "True" for one in ready):
        return "the node is not ready"
    if not is_tolerated(items(child(node, "spec"), "taints"), (*USUAL_TOLERATIONS, *settings.tolerations)):
        return "the node has a taint that is not in providers.kubernetes.tolerations"
    label = next((one for one in GPU_LABELS if text(labels, one)), "")
    if not label:
        return "no label of the node names its GPU"
    product = text(labels, label)
    if product.endswith("-SHARED") or text(labels, "nvidia.com/gpu.sharing-strategy") in ("time-slicing", "mps"):
        return "its GPUs are shared by several pods"
    vram_mb = int(quantity(labels.get("nvidia.com/gpu.memory"))) or None
    spoken = product if label != "cloud.google.com/gke-accelerator" else product.removeprefix("nvidia-")
    if found.startswith(MIG) and "MIG" not in spoken:
        spoken, vram_mb = f"{spoken} MIG {found.removeprefix(MIG)}", None
    gpu = canonical(PROVIDER, spoken, vram_mb if vram_mb is None or vram_mb < 10**7 else None)
    spot = next((one for one, values in SPOT_LABELS.items() if text(labels, one) in values), "")
    market = Market.SPOT if spot else Market.ON_DEMAND
    own = {name: text(labels, name) for name in (label, spot, ZONE) if text(labels, name)}
    where = [*_selector(own), *_selector(settings.node_selector)]
    if not spot:
        where += [{"key": one, "operator": "NotIn", "values": sorted(values)} for one, values in SPOT_LABELS.items()]
    zone, region = (clean(text(labels, name))[:64] for name in (ZONE, REGION))
    key = (gpu, found, market.value, text(labels, ZONE), text(labels, REGION), product, text(labels, spot))
    if key not in pools:
        name = ":".join(part for part in (gpu, market.value, zone or region) if part)
        pools[key] = _Pool(
            name=name, gpu=gpu, vram_mb=vram_mb, resource=found, market=market, region=region or zone, where=where
        )
    taken = None if used is None else used.get(text(child(node, "metadata"), "name"), {})
    pools[key].rooms.append(_room(allocatable, taken, found))
    return ""


def _selector(labels: Mapping[str, str]) -> list[Mapping[str, Any]]:
    return [{"key": name, "operator": "In", "values": [value]} for name, value in sorted(labels.items())]


def _room(allocatable: Mapping[str, Any], taken: Mapping[str, float] | None, resource: str) -> Room:
    def left(name: str) -> float:
        whole = quantity(allocatable.get(name))
        return whole if taken is None else max(0.0, whole - taken.get(name, 0.0))

    of_all = min(GPUS_MAX, int(quantity(allocatable.get(resource))))
    gpus = of_all if taken is None else max(0, of_all - int(taken.get(resource, 0.0)))
    return Room(gpus=gpus, cpus=left("cpu"), memory=left("memory"), disk=left("ephemeral-storage"))


def _price(gpu: str, market: Market, settings: KubernetesSettings) -> Decimal | None:
    """Return what an hour of this GPU counts as: the first entry that means it, of this market before of any."""
    meant = [one for one in settings.prices if one.gpu != NO_GPU and _is_meant(one.gpu, gpu)]
    own = [one for one in meant if one.market == market.value] or [one for one in meant if one.market is None]
    return own[0].price if own else None


def _is_meant(asked: str, gpu: str) -> bool:
    try:
        return matches(resolve(asked, sold=(gpu,)), gpu)
    except ValueError:
        return asked == gpu


def _sizes(pool: _Pool, price: Decimal, settings: KubernetesSettings) -> list[Offer]:
    """Return one offer for each size that some node of the pool has room for."""
    free = max((room.gpus for room in pool.rooms), default=0)
    own = _price(pool.gpu, Market.ON_DEMAND, settings)
    offers = []
    for count in sorted({*(one for one in SIZES if one <= free), *([free] if free else [])}):
        asked = [
            tuple(part * count / room.gpus * ASKED_SHARE for part in (room.cpus, room.memory, room.disk))
            for room in pool.rooms
            if room.gpus >= count
        ]
        cpus, memory, disk = max(asked)
        disk_gb, on_demand = int(disk / _GB) or None, None if own is None else own * count
        offers.append(_offer(pool, count, price * count, on_demand, cpus=cpus, memory=memory, disk_gb=disk_gb))
    return offers


def _configured(settings: KubernetesSettings) -> list[Offer]:
    offers = []
    for one in settings.pools:
        vram_mb = None if one.vram_gb is None or not one.count else one.vram_gb * 1024
        pool = _Pool(
            name=f"{MADE}{one.name}",
            gpu=canonical(PROVIDER, one.gpu, vram_mb) if one.count else NO_GPU,
            vram_mb=vram_mb,
            resource=one.resource if one.count else "none",
            market=Market(one.market),
            region=one.region,
            where=_selector({**settings.node_selector, **one.node_selector}),
        )
        own = one.price if pool.market is Market.ON_DEMAND else None
        size = {"cpus": one.cpus, "memory": one.memory_gb * _GB}
        offers.append(_offer(pool, one.count, one.price, own, **size, disk_gb=one.disk_gb))
    return offers


def _offer(
    pool: _Pool,
    count: int,
    price: Decimal,
    on_demand: Decimal | None,
    *,
    cpus: float,
    memory: float,
    disk_gb: int | None,
) -> Offer:
    asked = {"cpu": f"{max(1, int(cpus * 1000))}m", "memory": f"{max(1, int(memory / 2**20))}Mi"}
    return Offer(
        provider=PROVIDER,
        offer_id=OfferId(f"{pool.name}:{count}"),
        pool=PoolId(pool.name),
        quotas=(QuotaId("namespace"),),
        market=pool.market,
        interruption=Interruption.NOTICE if pool.market is Market.SPOT else Interruption.NEVER,
        gpu=pool.gpu,
        gpu_count=count,
        gpu_vram_mb=pool.vram_mb,
        gpu_price=MicroUsdPerHour(micro_usd(price)),
        on_demand_price=None if on_demand is None else MicroUsdPerHour(micro_usd(on_demand)),
        region=pool.region,
        cpus=round(cpus, 2),
        memory_mb=int(memory / 2**20),
        disk_gb_max=disk_gb,
        extra={"where": json.dumps(pool.where), "asked": json.dumps(asked), "resource": pool.resource},
    )
