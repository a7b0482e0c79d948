"""One pod, from create to deletion, and its row."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Any, Final

from spotd_providers.contract.values import MICRO, MicroUsdPerHour
from tests.fakes.runpod.gpus import Gpu


class Phase(StrEnum):
    """`status`, as v2 observes it."""

    PROVISIONING = "PROVISIONING"
    STARTING = "STARTING"
    RUNNING = "RUNNING"
    EXITED = "EXITED"
    ERROR = "ERROR"
    TERMINATED = "TERMINATED"


class Failure(StrEnum):
    """How a start can go wrong, and what the host's log then says."""

    IMAGE = "error pulling image: layer does not exist"
    LOGIN = "error pulling image: unauthorized: authentication required"
    CONTAINER = "failed to create container: exec format error"


ACTIONS: Final = {
    Phase.PROVISIONING: ["stop", "terminate"],
    Phase.STARTING: ["stop", "terminate"],
    Phase.RUNNING: ["stop", "restart", "terminate"],
    Phase.EXITED: ["start", "terminate"],
    Phase.ERROR: ["start", "terminate"],
    Phase.TERMINATED: [],
}
PUBLIC_IP: Final = "203.0.113.5"
SSH_PORT: Final = 22
PROXY: Final = "ssh.runpod.io"
BILLED: Final = frozenset({Phase.PROVISIONING, Phase.STARTING, Phase.RUNNING})


@dataclass(slots=True, kw_only=True)
class Pod:
    """What somebody rented.

    Attributes:
        price: what all its GPUs cost per hour while it runs.
        deaths_left: how many more deletions it survives.
        cluster: its membership of one, as rows show it.
        own_env: what RunPod itself puts into its environment.
    """

    pod_id: str
    name: str
    image: str
    gpu: Gpu
    count: int
    cloud: str
    data_center: str
    disk: int
    price: MicroUsdPerHour
    script: str
    body: Mapping[str, Any]
    api_key: str
    created_at: datetime
    phase: Phase = Phase.PROVISIONING
    start_no: int = 1
    started_at: datetime | None = None
    failure: Failure | None = None
    deaths_left: int = 0
    cluster: Mapping[str, Any] | None = None
    own_env: Mapping[str, str] = field(default_factory=dict)

    @property
    def exists(self) -> bool:
        return self.phase is not Phase.TERMINATED

    def mapped_ports(self) -> list[dict[str, Any]]:
        """Where its TCP ports can be reached, once it runs; another place after each start."""
        if self.phase is not Phase.RUNNING:
            return []
        wanted = [port.partition("/") for port in self.body.get("ports") or []]
        return [
            {"private": int(port), "public": 30_000 + self.start_no * 10 + number, "type": kind, "ip": PUBLIC_IP}
            for number, (port, _, kind) in enumerate(wanted)
            if kind == "tcp"
        ]

    def _ssh(self) -> dict[str, Any] | None:
        found = next((port for port in self.mapped_ports() if port["private"] == SSH_PORT), None)
        if found is None:
            return None
        command = f"ssh root@{PUBLIC_IP} -p {found['public']}"
        return {"host": PUBLIC_IP, "port": found["public"], "username": "root", "command": command}

    def _proxy(self) -> dict[str, Any] | None:
        """RunPod's own door to the container, for keys of the account; it needs no port."""
        if self.phase is not Phase.RUNNING:
            return None
        user = f"{self.pod_id}-64411eb2"
        return {"host": PROXY, "port": SSH_PORT, "username": user, "command": f"ssh {user}@{PROXY}"}

    def row(self, now: datetime) -> dict[str, Any]:
        """Its row in v2."""
        running = self.phase is Phase.RUNNING
        uptime = int((now - self.started_at).total_seconds()) if running and self.started_at else 0
        member = {} if self.cluster is None else {"cluster": dict(self.cluster)}
        return {
            **member,
            "id": self.pod_id,
            "name": self.name,
            "image": self.image,
            "args": self.body.get("args", ""),
            "disk": self.disk,
            "ports": list(self.body.get("ports") or []),
            "env": dict(self.body.get("env") or {}),
            "registry": self.body.get("registry"),
            "status": self.phase.value,
            "actions": ACTIONS[self.phase],
            "mounts": self.body.get("mounts") or {},
            "gpu": {
                "id": self.gpu.gpu_id,
                "count": self.count,
                "vcpuCount": float(self.gpu.vcpus * self.count),
                "memory": float(self.gpu.ram * self.count),
            },
            "cloud": self.cloud,
            "dataCenterId": None if self.phase is Phase.PROVISIONING else self.data_center,
            "cudaVersion": self.gpu.cuda[-1] if self.gpu.cuda else None,
            "ssh": {"proxy": self._proxy(), "direct": self._ssh()},
            "template": None,
            "cost": self.price / MICRO if self.phase in BILLED else 0.0,
            "locked": False,
            "globalNetworking": None,
            "runtime": {
                "uptime": uptime,
                "gpus": [{"util": 94, "memoryUtil": 78}] * self.count,
                "ports": self.mapped_ports(),
            }
            if running
            else None,
            "createdAt": _zulu(self.created_at),
            "startedAt": None if self.started_at is None else _zulu(self.started_at),
        }


def _zulu(instant: datetime) -> str:
    return instant.isoformat(timespec="seconds").replace("+00:00", "Z")
