"""The state of the fake cluster: its objects, and what controllers, scheduler, kubelets and collector make of them."""

from __future__ import annotations

import base64
import copy
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from enum import StrEnum
from itertools import count
from pathlib import Path
from typing import Any, Final

from spotd_providers.contract.values import MicroUsdPerHour
from spotd_providers.local.hosts import HostClock, HostMachineState, read_ledger, segments
from tests.fakes.cloud import FOR_EVER, NOTHING, FakeCloud, path_with_shutdown
from tests.fakes.kubernetes.objects import (
    GPU,
    RANK,
    Document,
    Objects,
    Refused,
    count_of,
    fields_of,
    gpus_of,
    is_match,
    missing_ranks,
    note_rank,
    owner_of,
    rank_of,
    ranks,
)

ADMIN: Final = "admin"
JOB_NAME: Final = "batch.kubernetes.io/job-name"
UNAUTHORIZED: Final = "failed to pull and unpack image: failed to authorize: unexpected status: 401 Unauthorized"
_LETTERS: Final = "bcdfghjklmnpqrstvwxz2456789"


class PodFailure(StrEnum):
    """What keeps the container of a pod from starting."""

    NO_IMAGE = "ImagePullBackOff"
    BAD_NAME = "InvalidImageName"
    NO_CONTAINER = "CreateContainerError"


@dataclass(slots=True)
class KubeQuirks:
    """What this cluster does otherwise. Times are those of the fake's clock."""

    pull: timedelta = timedelta(seconds=5)
    grace_used: timedelta = timedelta(seconds=1)
    """How long a container takes to end after its signal, at most the grace period."""
    list_lag: timedelta = timedelta(0)
    quota_jobs: int | None = None
    quota_pods: int | None = None
    """More pods are not made; their Jobs stay as they are."""
    is_old: bool = False
    """A cluster before 1.29, which drops `backoffLimitPerIndex` and starts pods that failed again."""
    policy: str = ""
    """An admission webhook's refusal of every Job."""
    fail_after_creation: int = 0
    """The status of the next answer to a creation of a Job that took effect."""
    collector_stands_still: bool = False
    tokens_age: bool = False
    """A `continue` token is too old as soon as it is used."""
    page_rows: int = 500
    raw_label: dict[str, Any] = field(default_factory=dict)
    """By node, a label `nvidia.com/gpu.product` of any kind."""
    spoiled: set[str] = field(default_factory=set)
    """Uids of Jobs whose rows cannot be read."""


class KubeCloud(FakeCloud):
    """One cluster."""

    def __init__(self, root: Path, *, clock: HostClock, quirks: KubeQuirks | None = None) -> None:
        super().__init__(root, clock=clock, path=path_with_shutdown(root))
        self.quirks = quirks or KubeQuirks()
        self.tokens: dict[str, str] = {}
        self.rights: dict[str, set[str]] = {}
        """By user, `verb resource` in every namespace; a user who is not here may do everything."""
        self.price: Callable[[Document], MicroUsdPerHour] = lambda _pod: NOTHING
        """What a running pod counts as, for the ledger."""
        self.objects = {
            one.plural: one
            for one in (
                Objects(kind="Node", group="", plural="nodes"), Objects(kind="Pod", group="", plural="pods"),
                Objects(kind="Job", group="batch", plural="jobs"), Objects(kind="Secret", group="", plural="secrets"),
                Objects(kind="Event", group="", plural="events"),
                Objects(kind="Namespace", group="", plural="namespaces"),
            )
        }  # fmt: skip
        self.dead_nodes: set[str] = set()
        self.over: dict[str, Document] = {}
        """The last words about Jobs that are deleted, by uid."""
        self._failures: list[PodFailure] = []
        self._numbers = count(1)
        self.create("namespaces", "", {"metadata": {"name": "spotd"}})

    # --- what a cluster's owner and its faults do -----------------------------------------------------------------

    def add_node(self, name: str, *, gpus: int, product: str = "NVIDIA-H100-80GB-HBM3", **labels: str) -> None:
        """Register a ready node."""
        own = {"nvidia.com/gpu.product": product} if gpus else {}
        room = {"cpu": "64", "memory": "512Gi", "ephemeral-storage": "1000Gi", **({GPU: str(gpus)} if gpus else {})}
        ready = {
            "type": "Ready",
            "status": "True",
            "reason": "KubeletReady",
            "message": "",
            "lastTransitionTime": self.stamp(),
        }
        self.create("nodes", "", {
            "metadata": {"name": name, "labels": {**own, **labels}}, "spec": {},
            "status": {"allocatable": room, "capacity": room, "conditions": [ready]},
        })  # fmt: skip

    def lose_node(self, name: str) -> None:
        """The node says nothing any more; its pods stay as they are, and their processes are gone."""
        with self.lock:
            self.dead_nodes.add(name)
            self.node(name)["status"]["conditions"][0].update(status="Unknown", reason="NodeStatusUnknown")
            self.node(name)["spec"]["taints"] = [{"key": "node.kubernetes.io/unreachable", "effect": "NoExecute"}]
            for pod in self._on(name):
                self.machines.kill(pod["metadata"]["uid"])

    def node(self, name: str) -> Document:
        return self.objects["nodes"].rows["", name]

    def evict(self, pod: Document, reason: str = "EvictionByEvictionAPI", *, grace: timedelta | None = None) -> None:
        """Take a pod away as the scheduler, a taint or the eviction API does."""
        with self.lock:
            self._condition(pod, "DisruptionTarget", "True", reason, f"taken away by {reason}")
            self._delete_pod(pod, grace)

    def end_by_itself(self, pod: Document) -> None:
        """The container's process ends with success."""
        with self.lock:
            self.machines.kill(pod["metadata"]["uid"])
            self._end(pod, 0, self.clock.now())

    def suspend(self, job: Document, *, value: bool) -> None:
        """Let a queue stop a Job, or admit it."""
        with self.lock:
            job["spec"]["suspend"] = value
            reason = "JobSuspended" if value else "JobResumed"
            self._condition(job, "Suspended", str(value), reason, "")
            for pod in self.pods_of(job) if value else []:
                self._delete_pod(pod, None)

    def add_second_pod(self, job: Document) -> None:
        """Let the cluster start another pod for a Job by itself."""
        with self.lock:
            self._add_pod(job)

    def fail_next_pod(self, failure: PodFailure) -> None:
        self._failures.append(failure)

    def add_running_job(self, name: str, annotations: Mapping[str, str], labels: Mapping[str, str]) -> Document:
        """Somebody's Job with a running pod and no process."""
        with self.lock:
            meta = {"labels": dict(labels), "annotations": dict(annotations)}
            spec = {"containers": [{"name": "job", "image": "x", "command": ["sleep"]}], "restartPolicy": "Never"}
            template = {"metadata": meta, "spec": spec}
            body = {"metadata": {"name": name, **meta}, "spec": {"template": template, "suspend": True}}
            job = self.create("jobs", "spotd", body)
            job["spec"]["suspend"] = False
            pod = self._add_pod(job)
            pod["spec"]["nodeName"] = next(iter(self.objects["nodes"].rows))[1]
            self._running(pod, self.clock.now())
            return job

    # --- objects --------------------------------------------------------------------------------------------------

    def stamp(self, at: datetime | None = None) -> str:
        return (at or self.clock.now()).strftime("%Y-%m-%dT%H:%M:%SZ")

    def create(self, plural: str, namespace: str, body: Document) -> Document:
        """Store a new object; raises `Refused` if the name is taken or the object is not valid."""
        with self.lock:
            kind = self.objects[plural]
            document = copy.deepcopy(body)
            meta = document.setdefault("metadata", {})
            name = meta.get("name")
            if not isinstance(name, str) or not name or len(name) > 63:
                raise Refused(422, "Invalid", f'{kind.kind} "{name}" is invalid: metadata.name: Required value')
            if plural == "jobs":
                self._check_job(name, document)
                if self.quirks.is_old:
                    document["spec"].pop("backoffLimitPerIndex", None)
            if (namespace, name) in kind.rows:
                raise Refused(409, "AlreadyExists", f'{self._words(kind)} "{name}" already exists')
            number = next(self._numbers)
            meta.update(
                uid=f"{number:08x}-0000-4000-8000-{number:012x}", creationTimestamp=self.stamp(), generation=1,
                resourceVersion=str(number), **({"namespace": namespace} if namespace else {}),
            )  # fmt: skip
            document.update(apiVersion="batch/v1" if kind.group else "v1", kind=kind.kind)
            document.setdefault("status", {})
            kind.rows[namespace, name] = document
            if plural == "jobs" and document["spec"].get("suspend"):
                self._condition(document, "Suspended", "True", "JobSuspended", "Job suspended")
            return document

    def _check_job(self, name: str, document: Document) -> None:
        quota = self.quirks.quota_jobs
        if self.quirks.policy:
            raise Refused(403, "Forbidden", f'jobs.batch "{name}" is forbidden: {self.quirks.policy}')
        if quota is not None and len(self.objects["jobs"].rows) >= quota:
            text = f"exceeded quota: few, requested: count/jobs.batch=1, used: {quota}, limited: {quota}"
            raise Refused(403, "Forbidden", f'jobs.batch "{name}" is forbidden: {text}')
        host_name = f"{name}-{count_of(document) - 1}"
        if count_of(document) and not re.fullmatch(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?", host_name):
            text = f'"{name}": will not able to create pod with invalid DNS label: {host_name}'
            raise Refused(422, "Invalid", f'Job.batch "{name}" is invalid: metadata.name: Invalid value: {text}')
        containers = document["spec"]["template"]["spec"]["containers"]
        if not all(one.get("image") for one in containers):
            text = "spec.template.spec.containers[0].image: Required value"
            raise Refused(422, "Invalid", f'Job.batch "{name}" is invalid: {text}')

    def get(self, plural: str, namespace: str, name: str) -> Document:
        with self.lock:
            kind = self.objects[plural]
            found = kind.rows.get((namespace, name))
            if found is None:
                raise Refused(404, "NotFound", f'{self._words(kind)} "{name}" not found')
            return found

    def delete(self, plural: str, namespace: str, name: str, options: Document) -> Document:
        """Delete an object as its kind is deleted."""
        with self.lock:
            found = self.get(plural, namespace, name)
            asked = (options.get("preconditions") or {}).get("uid")
            if asked is not None and asked != found["metadata"]["uid"]:
                text = f"the UID in the precondition ({asked}) does not match the UID in record"
                raise Refused(409, "Conflict", f'Operation cannot be fulfilled on {plural} "{name}": {text}')
            grace = options.get("gracePeriodSeconds")
            if plural == "pods":
                self._delete_pod(found, None if grace is None else timedelta(seconds=grace))
                return found
            del self.objects[plural].rows[namespace, name]
            self.over[found["metadata"]["uid"]] = found
            if plural == "jobs" and options.get("propagationPolicy", "Orphan") == "Orphan":
                for pod in self.pods_of(found):
                    pod["metadata"]["ownerReferences"] = []
            return found

    def pods_of(self, job: Document) -> list[Document]:
        return [pod for pod in self.objects["pods"].rows.values() if owner_of(pod) == job["metadata"]["uid"]]

    def _words(self, kind: Objects) -> str:
        return f"{kind.plural}.{kind.group}" if kind.group else kind.plural

    def _condition(self, thing: Document, kind: str, status: str, reason: str, message: str) -> None:
        rows = [one for one in thing["status"].get("conditions", []) if one["type"] != kind]
        old = next((one for one in thing["status"].get("conditions", []) if one["type"] == kind), None)
        since = old["lastTransitionTime"] if old is not None and old["status"] == status else self.stamp()
        rows.append({"type": kind, "status": status, "reason": reason, "message": message, "lastTransitionTime": since})
        thing["status"]["conditions"] = rows

    # --- what controllers do --------------------------------------------------------------------------------------

    def _settle_processes(self, known: set[str], now: datetime) -> None:
        for job in list(self.objects["jobs"].rows.values()):
            if job["spec"].get("suspend") or job["status"].get("conditions_final"):
                continue
            if count_of(job):
                for rank in missing_ranks(job, self.pods_of(job)):
                    if len(self.objects["pods"].rows) != self.quirks.quota_pods:
                        self._add_pod(job, rank)
            elif not self.pods_of(job):
                self._add_pod(job)
        for pod in list(self.objects["pods"].rows.values()):
            owner = owner_of(pod)
            is_owned = any(one["metadata"]["uid"] == owner for one in self.objects["jobs"].rows.values())
            if owner and not is_owned and not self.quirks.collector_stands_still:
                self._delete_pod(pod, None)
            self._place(pod)
            self._start(pod, now)
            if pod["metadata"]["uid"] in known:
                self._settle_pod(pod, now)
        for key, secret in list(self.objects["secrets"].rows.items()):
            owner = owner_of(secret)
            if owner and all(one["metadata"]["uid"] != owner for one in self.objects["jobs"].rows.values()):
                del self.objects["secrets"].rows[key]

    def _add_pod(self, job: Document, rank: int = 0) -> Document:
        number = next(self._numbers)
        letters = "".join(_LETTERS[(number // 27**place) % 27] for place in range(5))
        template, name = job["spec"]["template"], job["metadata"]["name"]
        owner = {
            "apiVersion": "batch/v1",
            "kind": "Job",
            "name": name,
            "uid": job["metadata"]["uid"],
            "controller": True,
        }
        meta = copy.deepcopy(template.get("metadata") or {})
        meta.update(name=f"{name[:57]}-{letters}", ownerReferences=[owner])
        meta["labels"] = {**meta.get("labels", {}), JOB_NAME: name, "job-name": name}
        if count_of(job):
            meta["name"] = f"{name}-{rank}-{letters}"
            meta["annotations"] = {**meta.get("annotations", {}), RANK: str(rank)}
        pod = self.create(
            "pods", job["metadata"]["namespace"], {"metadata": meta, "spec": copy.deepcopy(template["spec"])}
        )
        pod["status"] = {"phase": "Pending", "conditions": []}
        if self._failures:
            pod["status"]["fails"] = self._failures.pop(0).value
        job["status"]["active"] = len(self.pods_of(job))
        return pod

    def _place(self, pod: Document) -> None:
        if pod["spec"].get("nodeName") or pod["metadata"].get("deletionTimestamp"):
            return
        fitting = [name for (_, name), node in self.objects["nodes"].rows.items() if self._fits(pod, node)]
        if not fitting:
            text = f"0/{len(self.objects['nodes'].rows)} nodes are available: Insufficient {GPU}."
            self._condition(pod, "PodScheduled", "False", "Unschedulable", text)
            return
        pod["spec"]["nodeName"] = fitting[0]
        pod["status"]["startTime"] = self.stamp()
        self._condition(pod, "PodScheduled", "True", "", "")
        self._say(pod, {"waiting": {"reason": "ContainerCreating"}})
        pod["status"]["ready_at"] = (self.clock.now() + self.quirks.pull).isoformat()

    def _fits(self, pod: Document, node: Document) -> bool:
        name, spec = node["metadata"]["name"], pod["spec"]
        tolerated = {one.get("key") for one in spec.get("tolerations", [])}
        taints = node["spec"].get("taints", [])
        if (
            name in self.dead_nodes
            or node["spec"].get("unschedulable")
            or any(t["key"] not in tolerated for t in taints)
        ):
            return False
        labels = node["metadata"]["labels"]
        required = (spec.get("affinity", {}).get("nodeAffinity", {})).get(
            "requiredDuringSchedulingIgnoredDuringExecution"
        )
        terms = (required or {}).get("nodeSelectorTerms", [{}])
        if not any(all(is_match(labels, one) for one in term.get("matchExpressions", [])) for term in terms):
            return False
        if any(labels.get(key) != value for key, value in spec.get("nodeSelector", {}).items()):
            return False
        return gpus_of(pod) <= self.free_gpus(name)

    def free_gpus(self, name: str) -> int:
        """Return what no pod has taken; none of a node that takes no new pods."""
        node = self.node(name)
        if name in self.dead_nodes or node["spec"].get("unschedulable"):
            return 0
        return int(node["status"]["allocatable"].get(GPU, 0)) - sum(gpus_of(one) for one in self._on(name))

    def _on(self, name: str) -> list[Document]:
        pods = self.objects["pods"].rows.values()
        return [p for p in pods if p["spec"].get("nodeName") == name and p["status"]["phase"] in ("Pending", "Running")]

    def _start(self, pod: Document, now: datetime) -> None:
        ready = pod["status"].get("ready_at")
        if ready is None or pod["status"]["phase"] != "Pending" or pod["metadata"].get("deletionTimestamp"):
            return
        if pod["status"].get("fails"):
            self._say(pod, {"waiting": {"reason": pod["status"]["fails"], "message": "Back-off pulling image"}})
            return
        private = self.private.get(pod["spec"]["containers"][0]["image"])
        if private is not None and not self._has_login(pod, private):
            self._say(pod, {"waiting": {"reason": "ErrImagePull", "message": UNAUTHORIZED}})
            return
        script = self.script_of(pod)
        if script is None or datetime.fromisoformat(ready) > now:
            return
        self._running(pod, datetime.fromisoformat(ready))
        self.machines.start(pod["metadata"]["uid"], script, fields_of(pod))

    def _has_login(self, pod: Document, private: tuple[str, str]) -> bool:
        for one in pod["spec"].get("imagePullSecrets", []):
            secret = self.objects["secrets"].rows.get((pod["metadata"]["namespace"], one["name"]))
            if secret is not None:
                config = json.loads(base64.b64decode(secret["data"][".dockerconfigjson"]))
                return any((row["username"], row["password"]) == private for row in config["auths"].values())
        return False

    def script_of(self, pod: Document) -> str | None:
        """Return what the container runs: the Secret that is mounted; `None` while a Secret is missing."""
        for volume in pod["spec"].get("volumes", []):
            if "secret" in volume:
                name = volume["secret"]["secretName"]
                secret = self.objects["secrets"].rows.get((pod["metadata"]["namespace"], name))
                return None if secret is None else base64.b64decode(next(iter(secret["data"].values()))).decode()
        return FOR_EVER

    def _running(self, pod: Document, at: datetime) -> None:
        pod["status"].update(phase="Running", podIP="127.0.0.1")
        self._say(pod, {"running": {"startedAt": self.stamp(at)}})
        owner = owner_of(pod)
        if not self.ledger.is_open(owner):
            self.ledger.open(owner, pod["metadata"]["uid"], at=at, compute=self.price(pod))

    def _settle_pod(self, pod: Document, now: datetime) -> None:
        if pod["status"]["phase"] != "Running" or pod["spec"].get("nodeName") in self.dead_nodes:
            return
        status = self.machines.status(pod["metadata"]["uid"])
        if status.state is not HostMachineState.RUNNING:
            self._end(pod, 137 if status.exit_code is None else status.exit_code, status.ended_at or now)

    def _end(self, pod: Document, code: int, at: datetime, reason: str = "") -> None:
        """Write that the container has ended, and what the Job controller makes of it."""
        if pod["status"]["phase"] in ("Succeeded", "Failed"):
            return
        was_running = pod["status"]["phase"] == "Running"
        pod["status"]["phase"] = "Failed" if code else "Succeeded"
        why = reason or ("Error" if code else "Completed")
        if was_running:
            self._say(
                pod,
                {
                    "terminated": {
                        "exitCode": code,
                        "reason": why,
                        "finishedAt": self.stamp(at),
                        "startedAt": self.stamp(at),
                    }
                },
            )
            if not any(one["status"]["phase"] == "Running" for one in self._beside(pod)):
                self.ledger.end(owner_of(pod), at=at, note=why)
        job = self._job_of(pod)
        if job is not None and not job["spec"].get("suspend"):
            self._count_end(job, pod, code)

    def _count_end(self, job: Document, pod: Document, code: int) -> None:
        kind, word = ("Failed", "BackoffLimitExceeded") if code else ("Complete", "CompletionsReached")
        if nodes := count_of(job):
            note_rank(job, "failedIndexes" if code else "completedIndexes", rank_of(pod))
            failed = ranks(job, "failedIndexes")
            if len(failed | ranks(job, "completedIndexes")) < nodes or ("backoffLimitPerIndex" not in job["spec"]):
                return
            kind, word = ("Failed", "FailedIndexes") if failed else (kind, word)
        self._condition(job, kind, "True", word, "" if kind == "Complete" else "Job has failed")
        job["status"]["conditions_final"] = True

    def _job_of(self, pod: Document) -> Document | None:
        jobs = self.objects["jobs"].rows.values()
        return next((one for one in jobs if one["metadata"]["uid"] == owner_of(pod)), None)

    def _beside(self, pod: Document) -> list[Document]:
        pods = self.objects["pods"].rows.values()
        return [one for one in pods if owner_of(one) == owner_of(pod) and one is not pod]

    def _say(self, pod: Document, state: Document) -> None:
        image = pod["spec"]["containers"][0]["image"]
        one = {
            "name": "job",
            "image": image,
            "imageID": "",
            "ready": "running" in state,
            "restartCount": 0,
            "state": state,
        }
        pod["status"]["containerStatuses"] = [one]

    def _delete_pod(self, pod: Document, grace: timedelta | None) -> None:
        meta, now = pod["metadata"], self.clock.now()
        given = timedelta(seconds=pod["spec"].get("terminationGracePeriodSeconds", 30)) if grace is None else grace
        if not meta.get("deletionTimestamp"):
            meta.update(
                deletionTimestamp=self.stamp(now + given), deletionGracePeriodSeconds=int(given.total_seconds())
            )
        elif grace is None or grace:
            return
        is_forced = grace is not None and not grace
        if pod["spec"].get("nodeName") in self.dead_nodes and not is_forced:
            return  # nobody ends it
        takes = min(given, self.quirks.grace_used) if pod["status"]["phase"] == "Running" else timedelta(0)
        self.at(now + takes, lambda at: self._remove(pod, at))

    def _remove(self, pod: Document, at: datetime) -> None:
        key = (pod["metadata"]["namespace"], pod["metadata"]["name"])
        if self.objects["pods"].rows.get(key) is pod:
            self.machines.kill(pod["metadata"]["uid"])
            self._end(pod, 143, at)
            job = self._job_of(pod)
            if job is None or job["spec"].get("suspend") or count_of(job):
                del self.objects["pods"].rows[key]

    def billed(self, uid: str) -> int:
        """Micro-dollars of one Job, for the time in which its container ran."""
        spans = segments(read_ledger(self.ledger_path))
        return sum(one.amount(self.clock.now()) for one in spans if one.machine_id == uid)
