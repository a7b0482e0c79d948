"""The state of the fake: stock, pods and their processes."""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Mapping
from datetime import datetime
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, Final

from spotd_providers.contract.values import MICRO, MicroUsdPerHour, micro_usd
from spotd_providers.local.hosts import HostClock, HostMachineState
from tests.fakes.cloud import FOR_EVER, FakeCloud
from tests.fakes.runpod.belongings import Belongings
from tests.fakes.runpod.clusters import NETWORK_PRICE, Clusters
from tests.fakes.runpod.gpus import Gpu
from tests.fakes.runpod.pods import BILLED, Failure, Phase, Pod
from tests.fakes.runpod.quirks import Quirks
from tests.fakes.runpod.refusal import Refusal, no_such_pod

ACCOUNT_KEY: Final = "fake-runpod-account-key"
DISK_PRICE: Final = 0.10
HOURS_PER_MONTH: Final = 720


class RunpodCloud(FakeCloud):
    """One account at a fake RunPod."""

    def __init__(
        self,
        root: Path,
        *,
        clock: HostClock,
        quirks: Quirks | None = None,
        balance_usd: float = 100.0,
        api_key: str = ACCOUNT_KEY,
    ) -> None:
        super().__init__(root, clock=clock)
        self.quirks = quirks or Quirks()
        self.balance_usd = balance_usd
        self.api_key = api_key
        self.gpus: dict[str, Gpu] = {}
        self.pods: dict[str, Pod] = {}
        self.belongings = Belongings()
        self.clusters = Clusters(self)
        self.logs_open = 0
        self.logs_open_most = 0
        self._failures: dict[str, Failure] = {}
        self._numbers = count(1)

    # --- what the market does -------------------------------------------------------------------------------------

    def stock(self, *gpus: Gpu) -> None:
        """These GPU types are in the catalogue."""
        with self.lock:
            self.gpus.update({gpu.gpu_id: gpu for gpu in gpus})

    def sell_out(self, gpu_id: str) -> None:
        """No data center has any of these left."""
        with self.lock:
            gpu = self.gpus[gpu_id]
            gpu.free = dict.fromkeys(gpu.free, 0)

    def fail_next_start(self, gpu_id: str, failure: Failure) -> None:
        """The next pod of this GPU does not come up."""
        with self.lock:
            self._failures[gpu_id] = failure

    def fail(self, pod_id: str) -> None:
        """The container cannot run."""
        with self.lock:
            self._halt(self.pods[pod_id], Phase.ERROR, self.clock.now(), "container error")

    def lose_host(self, pod_id: str, *, at: datetime | None = None) -> None:
        """The pod's host, or its GPU, is gone: the pod is shown as exited, and nobody says why."""
        with self.lock:
            self._halt(self.pods[pod_id], Phase.EXITED, at or self.clock.now(), "lost its GPU")

    def spend_everything(self) -> None:
        """The account has no money left: pods without a network volume are deleted with their disks."""
        with self.lock:
            self.balance_usd = 0.0
            for pod in list(self.pods.values()):
                if pod.exists:
                    self.end_pod(pod, "no balance")
            for cluster in self.clusters.by_id.values():
                cluster.exists = False

    def add_foreign(self, name: str) -> Pod:
        """Somebody's own pod in the same account, running without a process."""
        with self.lock:
            gpu = next(iter(self.gpus.values()))
            pod = self.pod_of(
                gpu, 1, "SECURE", {"name": name, "image": "foreign", "disk": 20}, MicroUsdPerHour(340_000)
            )
            pod.phase = Phase.RUNNING
            pod.created_at = self.clock.now() - self.quirks.list_lag
            return pod

    # --- what time does -------------------------------------------------------------------------------------------

    def _settle_processes(self, known: set[str], now: datetime) -> None:
        for pod in self.pods.values():
            if pod.phase is not Phase.RUNNING or pod.pod_id not in known:
                continue
            if self.machines.status(pod.pod_id).state is not HostMachineState.RUNNING:
                self._process_ended(pod, now)

    # --- what the customer does -----------------------------------------------------------------------------------

    def create(self, body: Mapping[str, Any]) -> Pod:
        """A new pod.

        Raises:
            Refusal: nothing was made.
        """
        with self.lock:
            quirks = self.quirks
            if quirks.refuses_create is not None:
                raise Refusal(*quirks.refuses_create)
            gpu = self.gpus.get(body["gpu"]["id"])
            number = int(body["gpu"].get("count", 1))
            cloud = str(body.get("cloud") or "SECURE")
            if gpu is None:
                raise Refusal(404, "gpu type not found")
            listed = gpu.price(cloud)
            if listed is None:
                raise Refusal(400, quirks.capacity_text)
            usd = listed * quirks.cost_factor * number
            self.require_money(usd)
            place = gpu.place(self._places(body), number) if _has(gpu, body["gpu"]) else None
            if quirks.sells_nothing or place is None:
                raise Refusal(400, quirks.capacity_text)
            gpu.free[place] -= 1
            pod = self.pod_of(gpu, number, cloud, body, MicroUsdPerHour(micro_usd(round(usd, 9))), place=place)
            pod.deaths_left = quirks.undead
            self.begin(pod, pod.created_at)
            return pod

    def require_money(self, usd: float) -> None:
        """Nothing, if the account can pay so much an hour.

        Raises:
            Refusal: it cannot.
        """
        if self.balance_left() < usd:
            raise Refusal(402, "Your balance is too low to deploy this pod.")
        if self.spend_now() + usd > self.quirks.spend_limit:
            raise Refusal(400, f"This would exceed your spend limit of ${self.quirks.spend_limit:.0f} per hour.")

    def visible(self) -> list[Pod]:
        """The pods a listing shows, oldest first."""
        with self.lock:
            now = self.clock.now()
            return [pod for pod in self.pods.values() if pod.exists and pod.created_at + self.quirks.list_lag <= now]

    def shown(self, pod_id: str) -> Pod:
        """The pod behind its own route.

        Raises:
            Refusal: unknown, deleted, or too young to be seen.
        """
        with self.lock:
            pod = self.pods.get(pod_id)
            if pod is None or pod not in self.visible():
                raise no_such_pod()
            return pod

    def terminate(self, pod_id: str) -> None:
        """The pod, its processes and its bills have ended, unless this cloud forgets to.

        Raises:
            Refusal: there is no such pod.
        """
        with self.lock:
            pod = self.pods.get(pod_id)
            if pod is None or not pod.exists:
                raise no_such_pod()
            if pod.cluster is not None:
                raise Refusal(409, "Pod belongs to a cluster and cannot be terminated via the pod endpoints.")
            if pod.deaths_left > 0:
                pod.deaths_left -= 1
                return
            self.end_pod(pod, "deleted")

    def act(self, pod_id: str, action: str) -> Pod:
        """The pod after a change of its state.

        Raises:
            Refusal: no such pod, or no such change now.
        """
        with self.lock:
            pod = self.shown(pod_id)
            now = self.clock.now()
            if pod.cluster is not None:
                raise Refusal(409, "Pod belongs to a cluster and cannot be modified via the pod endpoints.")
            if action not in pod.row(now)["actions"]:
                raise Refusal(409, f"The Pod cannot be {action}ed while it is {pod.phase.value}.")
            if action == "terminate":
                self.terminate(pod_id)
            elif action == "stop":
                self._halt(pod, Phase.EXITED, now, "stopped by its owner")
            elif action == "restart":
                self.machines.kill(pod_id)
                self._boot(pod, now)
            elif pod.gpu.free.get(pod.data_center, 0) <= 0:
                raise Refusal(400, "There are not enough free GPUs on the host machine to start this pod.")
            else:
                pod.gpu.free[pod.data_center] -= 1
                pod.phase = Phase.STARTING
                pod.start_no += 1
                self._bill(pod, now)
                self.at(now + self.quirks.starting, partial(self._run, pod, pod.start_no))
            return pod

    def balance_left(self) -> float:
        """What the account can still spend, $."""
        return self.balance_usd - self.spent_usd()

    def spend_now(self) -> float:
        """What all pods cost per hour now, $."""
        return sum(pod.price for pod in self.pods.values() if pod.phase in BILLED) / MICRO

    def data_centers(self) -> set[str]:
        """Every place that has ever had a GPU."""
        return {place for gpu in self.gpus.values() for place in gpu.free}

    def drop_registry(self, identity: str) -> None:
        """The registry credential is gone.

        Raises:
            Refusal: there is none, or a pod uses it.
        """
        with self.lock:
            used = any(pod.exists and pod.body.get("registry") == identity for pod in self.pods.values())
            self.belongings.drop_registry(identity, used=used)

    # --- inside ---------------------------------------------------------------------------------------------------

    def _places(self, body: Mapping[str, Any]) -> list[str]:
        """The data centers that will do: those asked for, and a network volume's own only."""
        wanted = list(body.get("dataCenterIds") or [])
        for mount in (body.get("mounts") or {}).get("network") or []:
            home = self.belongings.volume(str(mount.get("volumeId")))["dataCenter"]
            return [home] if not wanted or home in wanted else ["nowhere"]
        return wanted

    def pod_of(
        self,
        gpu: Gpu,
        number: int,
        cloud: str,
        body: Mapping[str, Any],
        price: MicroUsdPerHour,
        *,
        place: str = "",
        cluster: Mapping[str, Any] | None = None,
        own_env: Mapping[str, str] | None = None,
    ) -> Pod:
        """A pod that bills from now on and has not begun."""
        serial = next(self._numbers)
        pod_id = f"{serial:05d}k2m4n6p{serial % 10}"
        pod = Pod(
            pod_id=pod_id,
            name=str(body["name"]),
            image=str(body.get("image") or ""),
            gpu=gpu,
            count=number,
            cloud=cloud,
            data_center=place or next(iter(gpu.free), "US-KS-2"),
            disk=int(body.get("disk") or 20),
            price=price,
            script=_script(body),
            body=dict(body),
            api_key=f"fake-runpod-pod-key-{pod_id}",
            created_at=self.clock.now(),
            failure=self._failures.pop(gpu.gpu_id, None),
            cluster=cluster,
            own_env=own_env or {},
        )
        self.pods[pod_id] = pod
        self._bill(pod, pod.created_at)
        return pod

    def _bill(self, pod: Pod, at: datetime) -> None:
        storage = MicroUsdPerHour(micro_usd(round(DISK_PRICE * pod.disk / HOURS_PER_MONTH, 9)))
        network = 0 if pod.cluster is None else NETWORK_PRICE
        storage = MicroUsdPerHour(storage + network)
        self.ledger.open(pod.pod_id, pod.name, at=at, compute=pod.price, storage=storage)

    def begin(self, pod: Pod, at: datetime) -> None:
        """The pod is being allocated."""
        pod.phase = Phase.PROVISIONING
        self.at(at + self.quirks.provisioning, partial(self._pull, pod, pod.start_no))

    def _pull(self, pod: Pod, start_no: int, at: datetime) -> None:
        if pod.phase is not Phase.PROVISIONING or pod.start_no != start_no:
            return
        if not self._may_pull(pod):
            pod.failure = Failure.LOGIN
        if pod.failure in (Failure.IMAGE, Failure.LOGIN):
            return  # RunPod tries to pull it for ever
        pod.phase = Phase.STARTING
        self.at(at + self.quirks.starting, partial(self._run, pod, start_no))

    def _may_pull(self, pod: Pod) -> bool:
        """Whether the image is public, or the pod names a stored credential that the registry takes."""
        stored = self.belongings.registries.get(str(pod.body.get("registry")), {})
        login = self.private.get(pod.image)
        return login is None or login == (stored.get("username"), stored.get("password"))

    def _run(self, pod: Pod, start_no: int, at: datetime) -> None:
        if pod.phase is not Phase.STARTING or pod.start_no != start_no:
            return
        if pod.failure is not None:
            self._halt(pod, Phase.ERROR, at, "container error")
            return
        self._boot(pod, at)

    def _boot(self, pod: Pod, at: datetime) -> None:
        # The container disk does not survive a restart. What it printed is kept by the host.
        directory = self.machines.directory(pod.pod_id)
        if directory.exists():
            for path in directory.iterdir():
                if path.is_dir():
                    shutil.rmtree(path)
                elif path.name != "console.log":
                    path.unlink()
        own = {str(name): str(value) for name, value in (pod.body.get("env") or {}).items()}
        self.machines.start(
            pod.pod_id,
            pod.script,
            {
                **own,
                **pod.own_env,
                "RUNPOD_POD_ID": pod.pod_id,
                "RUNPOD_API_KEY": pod.api_key,
                "RUNPOD_DC_ID": pod.data_center,
                "RUNPOD_GPU_COUNT": str(pod.count),
            },
        )
        pod.phase = Phase.RUNNING
        pod.started_at = at

    def _process_ended(self, pod: Pod, now: datetime) -> None:
        if not self.quirks.restarts:
            self._halt(pod, Phase.EXITED, now, "its process ended")
            return
        pod.phase = Phase.STARTING
        pod.start_no += 1
        self.at(now + self.quirks.restart_after, partial(self._run, pod, pod.start_no))

    def _halt(self, pod: Pod, phase: Phase, at: datetime, why: str) -> None:
        if pod.phase not in BILLED:
            return
        self.machines.kill(pod.pod_id)
        pod.phase = phase
        pod.start_no += 1
        pod.gpu.free[pod.data_center] = pod.gpu.free.get(pod.data_center, 0) + 1
        # Only a volume disk would bill on; the container disk is wiped.
        self.ledger.end(pod.pod_id, at=at, note=why)

    def end_pod(self, pod: Pod, why: str) -> None:
        """The pod, its processes and its bills have ended."""
        if pod.phase in BILLED:
            pod.gpu.free[pod.data_center] = pod.gpu.free.get(pod.data_center, 0) + 1
        pod.phase = Phase.TERMINATED
        pod.start_no += 1
        self.machines.kill(pod.pod_id)
        self.ledger.end(pod.pod_id, at=self.clock.now(), note=why)


def _has(gpu: Gpu, wanted: Mapping[str, Any]) -> bool:
    """Whether its hosts are as large and as new as asked for; those that are not just seem to be sold out."""
    return (
        gpu.runs_cuda(wanted.get("minCudaVersion"))
        and int(wanted.get("minVcpuCountPerGpu") or 1) <= gpu.vcpus
        and int(wanted.get("minRamPerGpu") or 1) <= gpu.ram
    )


def _script(body: Mapping[str, Any]) -> str:
    """What the container runs: its arguments, for an image whose entrypoint runs what it is given."""
    if body.get("entrypoint"):
        return f"exec {shlex.join([*body['entrypoint'], *(body.get('cmd') or [])])}"
    args = body.get("args") or ""
    try:
        words = shlex.split(args)
    except ValueError:
        raise Refusal(422, "args: unbalanced quotes") from None
    return f"exec {shlex.join(words)}" if words else FOR_EVER
