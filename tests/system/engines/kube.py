"""A real Kubernetes control plane on loopback: API server, controllers and scheduler are real, nodes are pretended.

The programs are in an archive that no package registry has; without it, or without etcd, a test is skipped with the
reason. A pretended kubelet keeps its nodes ready, sets pods running, and ends those that are deleted.
"""

from __future__ import annotations

import base64
import contextlib
import http.client
import json
import os
import shutil
import signal
import socket
import ssl
import subprocess
import tarfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import pytest

ARCHIVE: Final = Path(__file__).parents[3].parent / "shared" / "engines" / "kubernetes-1.36.2-linux-amd64.tar.xz"
CACHE: Final = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "spotd-tests" / "kubernetes-1.36.2"
READY_S: Final = 90.0
ADMIN: Final = "admin-token"
H100: Final = {
    "nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3",
    "nvidia.com/gpu.memory": "81559",
    "topology.kubernetes.io/zone": "here-a",
    "topology.kubernetes.io/region": "here",
}


def programs() -> Path:
    """Return the folder with the control plane's programs, unpacked once; skip the test where there are none."""
    if shutil.which("etcd") is None:
        pytest.skip("etcd is not installed (apt-get install etcd-server)")
    if not ARCHIVE.is_file():
        pytest.skip(f"no control plane: {ARCHIVE.name} is missing")
    if not (CACHE / "done").is_file():
        fresh = CACHE.with_name(f"{CACHE.name}.{os.getpid()}")
        fresh.mkdir(parents=True)
        with tarfile.open(ARCHIVE) as archive:
            archive.extractall(fresh, filter="data")
        (fresh / "done").touch()
        with contextlib.suppress(OSError):
            fresh.rename(CACHE)
    found = next((path.parent for path in CACHE.rglob("kube-apiserver")), None)
    if found is None:
        pytest.skip(f"no control plane: {ARCHIVE.name} holds no kube-apiserver")
    return found


@dataclass(slots=True, kw_only=True)
class KubeNode:
    """A pretended node. One that is not `alive` says nothing any more, and its pods are not ended."""

    name: str
    labels: dict[str, str] = field(default_factory=dict)
    allocatable: dict[str, str] = field(default_factory=dict)
    alive: bool = True


class Kube:
    """A running control plane and its pretended kubelets."""

    def __init__(self, folder: Path, port: int) -> None:
        self.folder = folder
        self.url = f"https://127.0.0.1:{port}"
        self.nodes: dict[str, KubeNode] = {}
        self.etcd_url = ""
        self.api_arguments: list[str] = []
        self._stopped = threading.Event()
        self._tls = ssl.create_default_context()
        self._tls.check_hostname, self._tls.verify_mode = False, ssl.CERT_NONE
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def ask(self, method: str, path: str, body: Any = None, *, kind: str = "application/json") -> Any:
        """Send one request as the administrator; return the decoded answer, also of a refusal."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data=data, method=method)  # noqa: S310 - loopback
        request.add_header("authorization", f"Bearer {ADMIN}")
        request.add_header("content-type", kind)
        try:
            with urllib.request.urlopen(request, timeout=10, context=self._tls) as answer:  # noqa: S310 - loopback
                return json.loads(answer.read() or b"{}")
        except urllib.error.HTTPError as exc:
            return json.loads(exc.read() or b"{}")

    def add_node(self, node: KubeNode) -> None:
        """Register a node and keep it ready."""
        self.ask("POST", "/api/v1/nodes", {"metadata": {"name": node.name, "labels": node.labels}, "spec": {}})
        self.nodes[node.name] = node
        self._beat(node)
        self.wait_until(lambda: not self.ask("GET", f"/api/v1/nodes/{node.name}")["spec"].get("taints"))

    def wait_until(self, what: Callable[[], bool], within_s: float = READY_S) -> None:
        """Wait until the cluster's own controllers have done what is expected of them."""
        deadline = time.monotonic() + within_s
        while not what():
            ended = [name for name, process in self.processes.items() if process.poll() is not None]
            if ended or time.monotonic() > deadline:
                log = (self.folder / f"{(ended or ['kube-controller-manager'])[0]}.log").read_text(errors="replace")
                pytest.fail(f"the cluster did not get there in {within_s:.0f} s, {ended} ended: {log[-2000:]}")
            time.sleep(0.1)

    def pods(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.ask("GET", "/api/v1/pods").get("items", [])
        return found

    def secrets(self) -> list[str]:
        """Return the names of the Secrets of all attempts."""
        found = self.ask("GET", "/api/v1/namespaces/spotd/secrets").get("items", [])
        return [one["metadata"]["name"] for one in found if one["metadata"].get("labels", {}).get("spotd.dev/install")]

    def empty(self, *nodes: str) -> None:
        """End all jobs and pods, and leave only these nodes, so that the next test begins with an empty cluster."""
        if "kube-apiserver" not in self.processes:
            self.restart_api()
        for name in [one for one in self.nodes if one not in nodes]:
            del self.nodes[name]
            self.ask("DELETE", f"/api/v1/nodes/{name}")
        for node in self.nodes.values():
            node.alive = True
        space = "namespaces/spotd"
        for kind in (f"/apis/batch/v1/{space}/jobs", f"/api/v1/{space}/pods", f"/api/v1/{space}/resourcequotas"):
            self.ask("DELETE", kind, {"propagationPolicy": "Background", "gracePeriodSeconds": 0})
        self.wait_until(lambda: not self.pods() and all(self._is_ready(name) for name in nodes))

    def _is_ready(self, name: str) -> bool:
        return not self.ask("GET", f"/api/v1/nodes/{name}")["spec"].get("taints")

    def run_kubelets(self) -> None:
        """Do what kubelets do, until the control plane is stopped."""
        while not self._stopped.wait(0.2):
            with contextlib.suppress(OSError, ValueError, KeyError, http.client.HTTPException):
                for node in list(self.nodes.values()):
                    if node.alive:
                        self._beat(node)
                for pod in self.pods():
                    one = self.nodes.get(pod["spec"].get("nodeName", ""))
                    if one is not None and one.alive:
                        self._carry(pod)

    def stop(self) -> None:
        self._stopped.set()

    def _beat(self, node: KubeNode) -> None:
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        ready = {"type": "Ready", "status": "True", "reason": "KubeletReady", "lastHeartbeatTime": now}
        status = {"capacity": node.allocatable, "allocatable": node.allocatable, "conditions": [ready]}
        path = f"/api/v1/nodes/{node.name}/status"
        self.ask("PATCH", path, {"status": status}, kind="application/strategic-merge-patch+json")

    def _carry(self, pod: dict[str, Any]) -> None:
        meta, status = pod["metadata"], pod["status"]
        path = f"/api/v1/namespaces/{meta['namespace']}/pods/{meta['name']}"
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        if meta.get("deletionTimestamp"):
            if status["phase"] not in ("Failed", "Succeeded"):
                self._say(path, "Failed", {"terminated": {"exitCode": 143, "reason": "Error", "finishedAt": now}})
            self.ask("DELETE", path, {"gracePeriodSeconds": 0})
        elif status["phase"] == "Pending":
            self._say(path, "Running", {"running": {"startedAt": now}})

    def _say(self, path: str, phase: str, state: dict[str, Any]) -> None:
        one = {"name": "job", "image": "x", "imageID": "", "ready": True, "restartCount": 0, "state": state}
        body = {"status": {"phase": phase, "containerStatuses": [one]}}
        self.ask("PATCH", f"{path}/status", body, kind="application/strategic-merge-patch+json")

    def end_pod(self, name: str, code: int) -> None:
        """End the container of a pod by itself."""
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        phase, reason = ("Succeeded", "Completed") if code == 0 else ("Failed", "Error")
        state = {"terminated": {"exitCode": code, "reason": reason, "finishedAt": now, "startedAt": now}}
        self._say(f"/api/v1/namespaces/spotd/pods/{name}", phase, state)

    def forget_the_past(self) -> None:
        """Compact etcd, so that a list that began earlier cannot be continued."""
        body = json.dumps({"key": base64.b64encode(b"/").decode()}).encode()
        with urllib.request.urlopen(f"{self.etcd_url}/v3/kv/range", body, timeout=10) as answer:  # noqa: S310 - loopback
            revision = json.loads(answer.read())["header"]["revision"]
        body = json.dumps({"revision": revision, "physical": True}).encode()
        urllib.request.urlopen(f"{self.etcd_url}/v3/kv/compaction", body, timeout=10).close()  # noqa: S310 - loopback

    def kubeconfig(self, token: str = ADMIN) -> Path:
        """Write a kubeconfig that leads into this control plane with this token."""
        path = self.folder / f"kubeconfig-{token}"
        authority = base64.b64encode((self.folder / "certs" / "apiserver.crt").read_bytes()).decode()
        server = {"server": self.url, "certificate-authority-data": authority}
        config = {
            "apiVersion": "v1", "kind": "Config", "current-context": "here",
            "clusters": [{"name": "here", "cluster": server}],
            "users": [{"name": "me", "user": {"token": token}}],
            "contexts": [{"name": "here", "context": {"cluster": "here", "user": "me", "namespace": "spotd"}}],
        }  # fmt: skip
        path.write_text(json.dumps(config))
        return path

    def start(self, name: str, arguments: list[str], where: Path) -> None:
        with (self.folder / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                [str(where / name), *arguments], stdout=log, stderr=log, cwd=self.folder, start_new_session=True
            )

    def end(self, name: str, how: signal.Signals = signal.SIGKILL) -> None:
        process = self.processes.pop(name, None)
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, how)
            process.wait(20)

    def restart_api(self) -> None:
        """Start the API server again."""
        self.start("kube-apiserver", self.api_arguments, programs())
        self.wait_ready()

    def wait_ready(self) -> None:
        deadline = time.monotonic() + READY_S
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError, ValueError):
                if self._says_ready() and self.ask("GET", "/api/v1/namespaces/default").get("metadata"):
                    return
            time.sleep(0.2)
        log = (self.folder / "kube-apiserver.log").read_text(errors="replace")[-2000:]
        pytest.fail(f"the API server was not ready in {READY_S:.0f} s: {log}")

    def _says_ready(self) -> bool:
        """Whether all its parts are: the controllers give up after ten seconds beside one that is not."""
        request = urllib.request.Request(self.url + "/readyz")  # noqa: S310 - loopback
        request.add_header("authorization", f"Bearer {ADMIN}")
        with urllib.request.urlopen(request, timeout=10, context=self._tls) as answer:  # noqa: S310 - loopback
            return bool(answer.status == 200)


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port


@contextmanager
def running_kube(folder: Path) -> Iterator[Kube]:
    """A fresh control plane with the namespace `spotd`; nothing of it is left afterwards."""
    where = programs()
    folder.mkdir(parents=True, exist_ok=True)
    port, etcd, peers = _free_port(), _free_port(), _free_port()
    kube = Kube(folder, port)
    subprocess.run(["openssl", "genrsa", "-out", str(folder / "sa.key"), "2048"], check=True, capture_output=True)
    public = ["openssl", "rsa", "-in", str(folder / "sa.key"), "-pubout", "-out", str(folder / "sa.pub")]
    subprocess.run(public, check=True, capture_output=True)
    tokens = f'{ADMIN},admin,admin,"system:masters"\nleast-token,least,least,\n'
    (folder / "tokens.csv").write_text(tokens)
    kube.etcd_url = f"http://127.0.0.1:{etcd}"
    kube.api_arguments = [
        f"--etcd-servers=http://127.0.0.1:{etcd}", f"--secure-port={port}", "--bind-address=127.0.0.1",
        f"--cert-dir={folder / 'certs'}", "--service-account-issuer=https://kubernetes.default.svc",
        f"--service-account-key-file={folder / 'sa.pub'}", f"--service-account-signing-key-file={folder / 'sa.key'}",
        f"--token-auth-file={folder / 'tokens.csv'}", "--authorization-mode=RBAC",
        "--service-cluster-ip-range=10.0.0.0/24", "--disable-admission-plugins=ServiceAccount",
    ]  # fmt: skip
    try:
        etcd_path = Path(shutil.which("etcd") or "etcd").parent
        kube.start("etcd", [
            f"--data-dir={folder / 'etcd'}", f"--listen-client-urls=http://127.0.0.1:{etcd}",
            f"--advertise-client-urls=http://127.0.0.1:{etcd}", f"--listen-peer-urls=http://127.0.0.1:{peers}",
            f"--initial-advertise-peer-urls=http://127.0.0.1:{peers}", f"--initial-cluster=default=http://127.0.0.1:{peers}",
            "--unsafe-no-fsync",
        ], etcd_path)  # fmt: skip
        kube.start("kube-apiserver", kube.api_arguments, where)
        kube.wait_ready()
        config = str(kube.kubeconfig())
        kube.start("kube-controller-manager", [
            f"--kubeconfig={config}", f"--service-account-private-key-file={folder / 'sa.key'}", "--leader-elect=false",
            "--node-monitor-grace-period=20s", f"--secure-port={_free_port()}",
            "--controllers=*,-serviceaccount-token,-nodeipam,-route,-cloud-node-lifecycle",
        ], where)  # fmt: skip
        kube.start(
            "kube-scheduler", [f"--kubeconfig={config}", "--leader-elect=false", f"--secure-port={_free_port()}"], where
        )
        kube.ask("POST", "/api/v1/namespaces", {"metadata": {"name": "spotd"}})
        threading.Thread(target=kube.run_kubelets, daemon=True).start()
        yield kube
    finally:
        kube.stop()
        for name in list(kube.processes):
            kube.end(name)
