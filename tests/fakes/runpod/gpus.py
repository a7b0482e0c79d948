"""What is for sale: GPU types on two clouds, and how many of them are left."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

LEVELS: Final = ((8, "HIGH"), (3, "MEDIUM"), (1, "LOW"))


@dataclass(slots=True, kw_only=True)
class Gpu:
    """A GPU type. Prices are for one GPU, $ per hour; 0 or `None` means not sold on that cloud.

    Attributes:
        free: how many pods of any size each data center can still take.
        host_gpus: the most GPUs that one host has free; larger pods find no room although the catalogue shows some.
        cluster_price: of one GPU of a cluster; `None` where none is sold.
        vcpus, ram: what comes with each GPU, virtual processors and GB of memory.
        more: further or replaced fields of the row.
    """

    gpu_id: str
    name: str
    memory: int
    secure_price: float | None = None
    community_price: float | None = None
    cluster_price: float | None = None
    manufacturer: str = "NVIDIA"
    max_count: int = 8
    free: dict[str, int] = field(default_factory=lambda: {"US-KS-2": 4, "EU-RO-1": 6})
    host_gpus: int = 8
    vcpus: int = 16
    ram: int = 62
    cuda: tuple[str, ...] = ("12.4", "12.8")
    more: dict[str, Any] = field(default_factory=dict)

    def price(self, cloud: str, product: str = "POD") -> float | None:
        """What one GPU costs on this cloud."""
        if product == "CLUSTER":
            return self.cluster_price if cloud == "SECURE" else None
        return (self.secure_price if cloud == "SECURE" else self.community_price) or None

    def place(self, wanted: list[str], count: int, pods: int = 1) -> str | None:
        """A data center with room for so many such pods."""
        if count > min(self.max_count, self.host_gpus):
            return None
        return next((dc for dc, left in self.free.items() if left >= pods and (not wanted or dc in wanted)), None)

    def runs_cuda(self, least: str | None) -> bool:
        """Whether its hosts have this version or a later one."""
        return least is None or any(_version(found) >= _version(least) for found in self.cuda)

    def availability(self, cloud: str, count: int, cuda: str | None = None, product: str = "POD") -> str:
        """What the catalogue says of pods of this size on this cloud, alone or in clusters."""
        if self.price(cloud, product) is None or count > self.max_count or not self.runs_cuda(cuda):
            return "NONE"
        return _level(sum(self.free.values()))

    def row(
        self, *, cloud: str, count: int, with_stock: bool, cuda: str | None = None, product: str = "POD"
    ) -> dict[str, Any]:
        """Its row in the catalogue."""
        row: dict[str, Any] = {
            "id": self.gpu_id,
            "name": self.name,
            "manufacturer": self.manufacturer,
            "memory": self.memory,
            "pool": None,
            "secure": bool(self.secure_price),
            "community": bool(self.community_price),
            "price": {
                "secure": self.secure_price if product == "POD" else self.cluster_price,
                "community": self.community_price,
                "serverless": None,
            },
            "maxCount": {"secure": self.max_count, "community": self.max_count},
        }
        if with_stock:
            row["availability"] = self.availability(cloud, count, cuda, product)
            if row["availability"] != "NONE":
                row["dataCenters"] = [
                    {"id": dc, "name": dc.title(), "availability": _level(left)} for dc, left in self.free.items()
                ]
            if self.cuda:
                row["cudaVersions"] = [{"version": version, "available": True} for version in self.cuda]
        return {**row, **self.more}


def some_gpus() -> tuple[Gpu, ...]:
    """A small market: four kinds, one of them on one cloud only."""
    return (
        Gpu(
            gpu_id="NVIDIA GeForce RTX 4090",
            name="RTX 4090",
            memory=24,
            secure_price=0.74,
            community_price=0.34,
        ),
        Gpu(
            gpu_id="NVIDIA GeForce RTX 3090",
            name="RTX 3090",
            memory=24,
            secure_price=0.5,
            community_price=0.22,
        ),
        Gpu(gpu_id="NVIDIA H100 80GB HBM3", name="H100 SXM", memory=80, secure_price=2.99, cluster_price=3.29),
        Gpu(
            gpu_id="NVIDIA A100-SXM4-80GB",
            name="A100 SXM",
            memory=80,
            secure_price=1.49,
            community_price=1.39,
            cluster_price=1.79,
        ),
    )


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split("."))


def _level(left: int) -> str:
    return next((word for least, word in LEVELS if left >= least), "NONE")
