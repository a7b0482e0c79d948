"""Instant clusters of the fake: several equal pods in one data center, made and ended as one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from itertools import count
from typing import TYPE_CHECKING, Any, Final

from spotd_providers.contract.values import MicroUsdPerHour, micro_usd
from tests.fakes.runpod.pods import Pod
from tests.fakes.runpod.refusal import Refusal

if TYPE_CHECKING:
    from tests.fakes.runpod.cloud import RunpodCloud

NETWORK_PRICE: Final = MicroUsdPerHour(120_000)
"""Of each pod, an hour. Its bill names it, and nothing else does."""


@dataclass(slots=True, kw_only=True)
class Cluster:
    """What somebody rented as one.

    Attributes:
        pods: by rank. One that is not placed yet is not among them.
        deaths_left: how many more deletions it survives.
    """

    cluster_id: str
    name: str
    compute: Mapping[str, Any]
    created_at: datetime
    pods: dict[int, Pod] = field(default_factory=dict)
    exists: bool = True
    deaths_left: int = 0

    def row(self) -> dict[str, Any]:
        """Its row in v2: a summary of its pods, without a price."""
        there = {rank: pod for rank, pod in self.pods.items() if pod.exists}
        row: dict[str, Any] = {
            "id": self.cluster_id,
            "name": self.name,
            "type": "TRAINING",
            "compute": dict(self.compute),
            "pods": {"total": len(there), "byStatus": dict(Counter(pod.phase.value for pod in there.values()))},
            "createdAt": self.created_at.isoformat(timespec="seconds").replace("+00:00", "Z"),
        }
        if there:
            row |= {"dataCenterId": next(iter(there.values())).data_center, "network": {"cidr": "127.0.0.0/8"}}
        if 0 in there:
            row["primary"] = {"podId": there[0].pod_id, "status": there[0].phase.value}
        return row


class Clusters:
    """The clusters of one account."""

    def __init__(self, cloud: RunpodCloud) -> None:
        self._cloud = cloud
        self._numbers = count(1)
        self.by_id: dict[str, Cluster] = {}

    def create(self, body: Mapping[str, Any]) -> Cluster:
        """A new cluster, all of whose pods have a place.

        Raises:
            Refusal: nothing was made.
        """
        cloud, compute = self._cloud, body["compute"]
        with cloud.lock:
            quirks, gpu = cloud.quirks, cloud.gpus.get(compute["gpuTypeId"])
            number, nodes = int(compute["gpuCountPerPod"]), int(compute["podCount"])
            if quirks.refuses_create is not None:
                raise Refusal(*quirks.refuses_create)
            if gpu is None:
                raise Refusal(404, "gpu type not found")
            if gpu.cluster_price is None:
                raise Refusal(400, quirks.capacity_text)
            usd = gpu.cluster_price * quirks.cost_factor * number
            cloud.require_money(usd * nodes)
            place = gpu.place(list(body.get("dataCenterIds") or []), number, nodes)
            if quirks.sells_nothing or place is None:
                raise Refusal(400, quirks.capacity_text)
            serial = next(self._numbers)
            made = Cluster(
                cluster_id=f"cluster_{serial:05d}x7",
                name=str(body["name"]),
                compute=dict(compute),
                created_at=cloud.clock.now(),
                deaths_left=quirks.undead,
            )
            self.by_id[made.cluster_id] = made
            price = MicroUsdPerHour(micro_usd(round(usd, 9)))
            for rank in range(nodes):
                gpu.free[place] -= 1

                def add(at: datetime, rank: int = rank) -> None:
                    if made.exists:
                        more = _membership(made, rank)
                        made.pods[rank] = cloud.pod_of(gpu, number, "SECURE", body, price, place=place, **more)
                        made.pods[rank].name = f"{made.name}-pod-{rank}"
                        cloud.begin(made.pods[rank], at)

                if rank in quirks.late_ranks:
                    cloud.at(made.created_at + quirks.late_ranks[rank], add)
                else:
                    add(made.created_at)
            return made

    def visible(self) -> list[Cluster]:
        """The clusters a listing shows, oldest first."""
        now, lag = self._cloud.clock.now(), self._cloud.quirks.list_lag
        return [one for one in self.by_id.values() if one.exists and one.created_at + lag <= now]

    def shown(self, cluster_id: str) -> Cluster:
        """The cluster behind its own route.

        Raises:
            Refusal: unknown, deleted, or too young to be seen.
        """
        found = next((one for one in self.visible() if one.cluster_id == cluster_id), None)
        if found is None:
            raise Refusal(404, "Cluster not found")
        return found

    def delete(self, cluster_id: str) -> None:
        """The cluster and all its pods have ended, unless this cloud forgets to.

        Raises:
            Refusal: there is no such cluster.
        """
        with self._cloud.lock:
            found = self.by_id.get(cluster_id)
            if found is None or not found.exists:
                raise Refusal(404, "Cluster not found")
            if found.deaths_left > 0:
                found.deaths_left -= 1
                return
            found.exists = False
            for rank, pod in found.pods.items():
                if pod.exists and rank not in self._cloud.quirks.surviving_ranks:
                    self._cloud.end_pod(pod, "its cluster was deleted")

    def add_foreign(self, name: str, pods: int = 2) -> Cluster:
        """Somebody's own cluster in the same account, running without a process."""
        with self._cloud.lock:
            serial = next(self._numbers)
            gpu = next(iter(self._cloud.gpus.values()))
            compute = {"gpuTypeId": gpu.gpu_id, "gpuCountPerPod": 1, "podCount": pods}
            now = self._cloud.clock.now() - self._cloud.quirks.list_lag
            made = Cluster(cluster_id=f"cluster_{serial:05d}x7", name=name, compute=compute, created_at=now)
            self.by_id[made.cluster_id] = made
            for rank in range(pods):
                pod = self._cloud.add_foreign(f"{name}-pod-{rank}")
                pod.cluster = {"id": made.cluster_id, "rank": rank}
                made.pods[rank] = pod
            return made


def _membership(cluster: Cluster, rank: int) -> dict[str, Any]:
    """What makes a pod the member of this rank: what its row says, and what RunPod puts into its environment."""
    first, address = "127.0.0.2", f"127.0.0.{rank + 2}"
    per_pod, nodes = int(cluster.compute["gpuCountPerPod"]), int(cluster.compute["podCount"])
    own = {
        "PRIMARY_ADDR": first,
        "MASTER_ADDR": first,
        "PRIMARY_PORT": "29400",
        "MASTER_PORT": "29400",
        "NODE_ADDR": address,
        "NODE_RANK": str(rank),
        "NUM_NODES": str(nodes),
        "NUM_TRAINERS": str(per_pod),
        "HOST_NODE_ADDR": f"{first}:29400",
        "WORLD_SIZE": str(nodes * per_pod),
    }
    return {"cluster": {"id": cluster.cluster_id, "rank": rank, "ip": address}, "own_env": own}
