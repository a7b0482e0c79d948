"""One attempt as one Job: what is created, and what the cluster's objects say of it later.

A Job has one pod, or one for each of several machines (`gangs.py`).

The Job's name stands for the key and is unique in the namespace, so that a second creation is refused (409). The Job
must never start a second pod by itself: spotd decides what follows a loss. What runs, and what is billed, is the pod;
a Job that is deleted while its pod still ends is a machine that ends. A loss is read from the pod's conditions, since
the Job's counters follow only once the pod is over.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final

from spotd_providers.contract.values import (
    AttemptKey,
    HostId,
    Instance,
    InstanceId,
    InstanceRef,
    InstanceState,
    LaunchRequest,
    Loss,
    MicroUsdPerHour,
    RegistryLogin,
)
from spotd_providers.kit.text import clean
from spotd_providers.kubernetes.market import USUAL_TOLERATIONS
from spotd_providers.kubernetes.wire import (
    KEY,
    LABEL_INSTALL,
    MARKET,
    NAME_CHARS_MAX,
    PRICE,
    PROVIDER,
    KubernetesSettings,
    Toleration,
    child,
    instant,
    items,
    market_of,
    text,
)

JOB_OF_POD: Final = "batch.kubernetes.io/job-name"
RANK: Final = "batch.kubernetes.io/job-completion-index"
GANG_MAX: Final = 64
"""Pods of one Job that are started at once."""
HOME: Final = "/spotd"
SCRIPT: Final = "/spotd-start/start.sh"
SHARED_MEMORY_SHARE: Final = 4
"""A quarter of the memory: what a DataLoader needs beyond the 64 MB that a container has."""
KEPT_FOR: Final = timedelta(hours=1)
"""How long the cluster keeps a Job that is over, and with it the console."""
HELD_UP: Final = timedelta(minutes=2)
"""How long an image that cannot be pulled is tried again: a registry may be away for a moment."""
OVERDUE: Final = timedelta(minutes=1)
"""How long after its announced end a pod that is still shown counts as one whose node is away."""
RESUMED_AFTER: Final = timedelta(seconds=30)
"""A Job that is suspended later than this after its creation had been started before: Kueue took its place away.

Of one that had a pod while spotd watched, that is known at once."""
_SCRIPT_LINE: Final = f"cd {HOME} && exec /bin/sh {SCRIPT}"
_IMAGE_ERRORS: Final = frozenset({"ErrImagePull", "ImagePullBackOff", "ErrImageNeverPull", "RegistryUnavailable"})
_IMAGE_FAULTS: Final = frozenset({"InvalidImageName"})
_CONTAINER_ERRORS: Final = frozenset({"CreateContainerConfigError", "CreateContainerError", "RunContainerError"})
_LOST_WITH_NODE: Final = frozenset({"TerminationByKubelet", "NodeShutdown", "Terminated", "Evicted", "NodeLost"})


def job_name(key: str, nodes: int = 1) -> str:
    """Return the name that stands for this key; one that is too long is shortened by its hash.

    That of several pods, with a rank behind it, is the host name of each: the cluster refuses one with a dot.
    """
    if nodes == 1 and len(key) <= NAME_CHARS_MAX:
        return key
    label = key if nodes == 1 else re.sub(r"[^a-z0-9-]", "-", key)
    left = NAME_CHARS_MAX - 17 - (0 if nodes == 1 else len(f"-{GANG_MAX}"))
    return f"{label[:left]}-{hashlib.sha256(key.encode()).hexdigest()[:16]}"


Disruption = tuple[Loss | None, str]
"""Why a pod is taken away, `None` where it is not; and in which words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobObjects:
    """The objects of one machine. `job` is empty where only pods of it are left."""

    job: Mapping[str, Any]
    pods: tuple[Mapping[str, Any], ...]

    @property
    def uid(self) -> str:
        if self.job:
            return text(child(self.job, "metadata"), "uid")
        return next((owner for pod in self.pods if (owner := owner_of(pod))), "")

    @property
    def name(self) -> str:
        if self.job:
            return text(child(self.job, "metadata"), "name")
        return next((text(child(pod, "metadata", "labels"), JOB_OF_POD) for pod in self.pods), "")

    @property
    def annotations(self) -> Mapping[str, Any]:
        return child(self.job or next(iter(self.pods), {}), "metadata", "annotations")

    @property
    def nodes(self) -> int:
        """How many pods the Job has, each with a rank; 1 where it is no more."""
        count = child(self.job, "spec").get("completions")
        return min(count, GANG_MAX) if isinstance(count, int) and count > 1 else 1

    @property
    def first(self) -> Mapping[str, Any]:
        """The newest pod of the lowest rank that there is, which speaks for all; an empty one where there is none."""
        return min(reversed(self.pods), key=rank_of, default={})


def rank_of(pod: Any) -> int:
    """Return which pod of its Job this is, from 0."""
    rank = text(child(pod, "metadata", "annotations"), RANK)
    return int(rank) if rank.isascii() and rank.isdecimal() and len(rank) < 6 else 0


def owner_of(pod: Any) -> str:
    """Return the uid of the Job that a pod belongs to."""
    owners = items(child(pod, "metadata"), "ownerReferences")
    return next((text(one, "uid") for one in owners if text(one, "kind") == "Job"), "")


def rows_of(jobs: Sequence[Any], pods: Sequence[Any]) -> list[JobObjects | None]:
    """Join Jobs with their pods; `None` stands for an object that cannot be read."""
    found: dict[str, tuple[Mapping[str, Any], list[Mapping[str, Any]]]] = {}
    odd: list[JobObjects | None] = []
    for job in jobs:
        uid = text(child(job, "metadata"), "uid")
        if not uid or not text(child(job, "metadata"), "name"):
            odd.append(None)
        else:
            found[uid] = (job, [])
    for pod in pods:
        owner = owner_of(pod)
        if not owner or not text(child(pod, "metadata"), "uid"):
            odd.append(None)
        else:
            found.setdefault(owner, ({}, []))[1].append(pod)
    return [*(JobObjects(job=job, pods=tuple(mine)) for job, mine in found.values()), *odd]


def ref_of(name: str, uid: str) -> InstanceRef:
    """Return the handle of a Job: its name leads to it, its uid distinguishes it from another one of that name."""
    return InstanceRef(provider=PROVIDER, instance_id=InstanceId(f"{name}:{uid}"))


# What a launch creates.


_PLACE: Final[Mapping[str, str]] = {
    "SPOTD_NODE_RANK": f"metadata.annotations['{RANK}']",
    "SPOTD_NODE_ADDRESS": "status.podIP",
}
_ALONE: Final[Mapping[str, Any]] = {
    "backoffLimit": 0,
    # It ends the Job as backoffLimit does; the Job then says why, for as long as it is there. Its pod is not.
    "podFailurePolicy": {"rules": [{"action": "FailJob", "onPodConditions": [{"type": "DisruptionTarget"}]}]},
}
ONCE_EACH: Final = "backoffLimitPerIndex"
"""Of several pods none is started again, and none is ended for another one's end: the first may save just then."""


def job_of(request: LaunchRequest, settings: KubernetesSettings) -> dict[str, Any]:
    """Build the Job. The start script is not in it: everybody who may read pods would read the URL of the grant."""
    offer, nodes = request.offer, request.offer.nodes
    name, gpus = job_name(request.key, nodes), offer.gpu_count // nodes
    labels = {LABEL_INSTALL: request.install}
    notes = {KEY: request.key, PRICE: str(request.offer.gpu_price), MARKET: offer.market.value}
    asked: dict[str, str] = json.loads(offer.extra["asked"])
    limits = {"memory": asked["memory"], "ephemeral-storage": f"{request.disk_gb}G"}
    if gpus:
        limits[offer.extra["resource"]] = str(gpus)
    environment: list[dict[str, Any]] = [{"name": "SPOTD_HOME", "value": f"{HOME}/{name}"}]
    if nodes > 1:
        environment += [
            {"name": variable, "valueFrom": {"fieldRef": {"fieldPath": path}}} for variable, path in _PLACE.items()
        ]
    if not gpus:
        environment.append({"name": "NVIDIA_VISIBLE_DEVICES", "value": "void"})
    where = json.loads(offer.extra["where"])
    shared_memory = f"{max(64, int(asked['memory'].removesuffix('Mi')) // SHARED_MEMORY_SHARE)}Mi"
    pod: dict[str, Any] = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": int(settings.grace.total_seconds()),
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "tolerations": [_toleration(one) for one in (*USUAL_TOLERATIONS, *settings.tolerations)],
        "containers": [
            {
                "name": "job",
                "image": request.image,
                "command": ["/bin/sh", "-c", _SCRIPT_LINE],
                "workingDir": HOME,
                "env": environment,
                "resources": {
                    "requests": {**asked, "ephemeral-storage": limits["ephemeral-storage"]},
                    "limits": limits,
                },
                "volumeMounts": [
                    {"name": "shm", "mountPath": "/dev/shm"},  # noqa: S108 - the container's own
                    {"name": "home", "mountPath": HOME},
                    {"name": "start", "mountPath": SCRIPT.rpartition("/")[0], "readOnly": True},
                ],
            }
        ],
        "volumes": [
            {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": shared_memory}},
            {"name": "home", "emptyDir": {"sizeLimit": limits["ephemeral-storage"]}},
            {"name": "start", "secret": {"secretName": name}},
        ],
    }
    if where:
        terms = {"nodeSelectorTerms": [{"matchExpressions": where}]}
        pod["affinity"] = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": terms}}
    if request.login is not None:
        pod["imagePullSecrets"] = [{"name": login_name(name)}]
    own = {
        "priorityClassName": settings.priority_class,
        "runtimeClassName": settings.runtime_class,
        "serviceAccountName": settings.service_account,
    }
    pod.update({key: value for key, value in own.items() if value is not None})
    kept = {"karpenter.sh/do-not-disrupt": "true", "cluster-autoscaler.kubernetes.io/safe-to-evict": "false"}
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {
            "name": name,
            "labels": {**labels, **({"kueue.x-k8s.io/queue-name": settings.queue} if settings.queue else {})},
            "annotations": notes,
        },
        "spec": {
            **(_ALONE if nodes == 1 else {"completionMode": "Indexed", ONCE_EACH: 0}),
            "completions": nodes,
            "parallelism": nodes,
            "podReplacementPolicy": "Failed",
            "suspend": settings.queue is not None,
            "ttlSecondsAfterFinished": int(KEPT_FOR.total_seconds()),
            "template": {"metadata": {"labels": labels, "annotations": {**notes, **kept}}, "spec": pod},
        },
    }


def _toleration(one: Toleration) -> dict[str, str]:
    said = {"key": one.key, "operator": "Exists" if one.value is None else "Equal"}
    return {
        **said,
        **({} if one.value is None else {"value": one.value}),
        **({"effect": one.effect} if one.effect else {}),
    }


def login_name(name: str) -> str:
    return f"{name}-login"


def secrets_of(request: LaunchRequest, uid: str) -> list[dict[str, Any]]:
    """Build the Secrets of a Job, which the cluster deletes with it."""
    name = job_name(request.key, request.offer.nodes)
    owner = {"apiVersion": "batch/v1", "kind": "Job", "name": name, "uid": uid, "blockOwnerDeletion": False}
    labels = {LABEL_INSTALL: request.install}
    found = [_secret(name, labels, owner, "Opaque", SCRIPT.rpartition("/")[2], request.start_script)]
    if request.login is not None:
        kind, file = "kubernetes.io/dockerconfigjson", ".dockerconfigjson"
        found.append(_secret(login_name(name), labels, owner, kind, file, _docker_config(request.login)))
    return found


def _secret(name: str, labels: Mapping[str, str], owner: Any, kind: str, file: str, content: str) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "type": kind,
        "metadata": {"name": name, "labels": labels, "ownerReferences": [owner]},
        "data": {file: base64.b64encode(content.encode()).decode()},
    }


def _docker_config(login: RegistryLogin) -> str:
    password = login.password.reveal()
    auth = base64.b64encode(f"{login.username}:{password}".encode()).decode()
    return json.dumps({"auths": {login.server: {"username": login.username, "password": password, "auth": auth}}})


# What the cluster says of it.


@dataclass(frozen=True, slots=True, kw_only=True)
class _Seen:
    """What the objects of a machine say; the fields are those of `Instance`."""

    state: InstanceState
    loss: Loss | None = None
    detail: str = ""
    notice_at: datetime | None = None
    ended_at: datetime | None = None


def as_instance(
    row: JobObjects, key: AttemptKey, settings: KubernetesSettings, now: datetime, *, had_pod: Disruption | None = None
) -> Instance | None:
    """Translate the objects of one machine; `None` where they do not even name one.

    `had_pod` is what was seen of its pods before (`disruption_of`), as a pod that is evicted may soon be no more.
    """
    if not row.uid or not row.name:
        return None
    pod = next((one for one in reversed(row.pods) if not _is_over(one)), row.pods[-1] if row.pods else None)
    seen = _seen(row, pod, settings, now, had_pod=had_pod)
    notes = row.annotations
    price = text(notes, PRICE)
    host = "" if pod is None else text(child(pod, "spec"), "nodeName")
    return Instance(
        ref=ref_of(row.name, row.uid),
        key=key,
        state=seen.state,
        market=market_of(text(notes, MARKET)),
        host_id=HostId(host) if host else None,
        price=MicroUsdPerHour(int(price)) if price.isascii() and price.isdecimal() and len(price) < 14 else None,
        created_at=instant(child(row.job or pod or {}, "metadata").get("creationTimestamp")),
        notice_at=seen.notice_at,
        loss=seen.loss,
        detail=clean(seen.detail),
        ended_at=seen.ended_at,
    )


def _seen(
    row: JobObjects,
    pod: Mapping[str, Any] | None,
    settings: KubernetesSettings,
    now: datetime,
    *,
    had_pod: Disruption | None,
) -> _Seen:
    is_deleted = not row.job or bool(text(child(row.job, "metadata"), "deletionTimestamp"))
    if pod is None:
        return _without_pod(row.job, now, is_deleted=is_deleted, had_pod=had_pod)
    if _is_over(pod):
        return _over(pod)
    if is_deleted:
        return _Seen(state=InstanceState.ENDING)
    alive = [one for one in row.pods if not _is_over(one)]
    if len(row.pods) > 1:
        detail = f"the cluster started {len(row.pods)} pods for it, of which {len(alive)} run"
        return _Seen(state=InstanceState.PAUSED, loss=Loss.PREEMPTED, detail=detail)
    leaving = instant(child(pod, "metadata").get("deletionTimestamp"))
    if leaving is not None:
        loss, detail = _disruption(pod)
        if now - leaving > OVERDUE:
            detail = f"the pod should have ended at {leaving:%H:%M:%S} UTC: {detail or 'its node is away'}"
            return _Seen(state=InstanceState.ENDING, loss=loss or Loss.HOST_LOST, detail=detail)
        state = _waiting(pod, settings, now).state
        return _Seen(state=state, notice_at=leaving, detail=detail or "the pod is being evicted")
    if _is_suspended_again(row.job, had_pod=True):
        return _Seen(state=InstanceState.PAUSED, loss=Loss.PREEMPTED, detail="its queue took the place away")
    return _waiting(pod, settings, now)


def _without_pod(job: Mapping[str, Any], now: datetime, *, is_deleted: bool, had_pod: Disruption | None) -> _Seen:
    """Judge a Job that has no pod: not yet, not any more, or taken out of its queue."""
    if final := _condition(job, "Complete", "Failed"):
        loss, detail = had_pod or (None, "")
        if loss is None:
            by_its_type = Loss.SELF if text(final, "type") == "Complete" else Loss.HOST_LOST
            loss = Loss.PREEMPTED if text(final, "reason") == "PodFailurePolicy" else by_its_type
            detail = text(final, "message")
        ended_at = instant(final.get("lastTransitionTime"))
        return _Seen(state=InstanceState.GONE, loss=loss, detail=detail, ended_at=ended_at)
    deleted_at = instant(child(job, "metadata").get("deletionTimestamp"))
    if deleted_at is not None and now - deleted_at > OVERDUE:
        # A finalizer keeps it. Nothing starts a pod for it any more, and the last one is no longer shown.
        loss, detail = had_pod or (None, "")
        return _Seen(state=InstanceState.GONE, loss=loss or Loss.PREEMPTED, detail=detail or "its Job was deleted")
    if is_deleted:
        return _Seen(state=InstanceState.ENDING)
    if _is_suspended_again(job, had_pod=had_pod is not None):
        return _Seen(state=InstanceState.PAUSED, loss=Loss.PREEMPTED, detail="its queue took the place away")
    waits = "waits in its queue" if child(job, "spec").get("suspend") is True else "has no pod yet"
    return _Seen(state=InstanceState.PENDING, detail=f"the Job {waits}")


def _over(pod: Mapping[str, Any]) -> _Seen:
    """Judge a pod that uses nothing any more."""
    ended = [child(one, "state", "terminated") for one in items(child(pod, "status"), "containerStatuses")]
    terminated = next((one for one in ended if one), {})
    at = instant(terminated.get("finishedAt"))
    loss, detail = _disruption(pod)
    why = text(child(pod, "status"), "reason")
    if loss is None and why in ("UnexpectedAdmissionError", "OutOfcpu", "OutOfmemory", "NodeAffinity"):
        loss, detail = Loss.PROVISION_FAILED, text(child(pod, "status"), "message") or why
    if loss is None and (why in _LOST_WITH_NODE or not terminated):
        loss, detail = Loss.HOST_LOST, text(child(pod, "status"), "message") or why or "the pod ended with its node"
    if loss is None and text(terminated, "reason") in ("ContainerCannotRun", "StartError"):
        loss, detail = Loss.IMAGE_ERROR, text(terminated, "message") or text(terminated, "reason")
    if loss is None:
        code = terminated.get("exitCode")
        said = f"the container ended with {code}" if isinstance(code, int) else "the container ended"
        loss, detail = Loss.SELF, f"{said} ({text(terminated, 'reason') or 'no reason given'})"
    return _Seen(state=InstanceState.GONE, loss=loss, detail=detail, ended_at=at)


def disruption_of(pods: Sequence[Mapping[str, Any]]) -> Disruption:
    """Return why the newest pod that is taken away is, as far as its conditions say so."""
    return next((found for pod in reversed(pods) if (found := _disruption(pod))[0]), (None, ""))


def _disruption(pod: Mapping[str, Any]) -> Disruption:
    found = _condition(pod, "DisruptionTarget")
    if not found:
        return None, ""
    return Loss.HOST_LOST if text(found, "reason") in _LOST_WITH_NODE else Loss.PREEMPTED, _words(found)


def _waiting(pod: Mapping[str, Any], settings: KubernetesSettings, now: datetime) -> _Seen:
    """Judge a pod that is not over: it waits for a node, for its image, or runs."""
    states = [child(one, "state") for one in items(child(pod, "status"), "containerStatuses")]
    phase = text(child(pod, "status"), "phase")
    if any(child(one, "running") for one in states) or (phase == "Running" and not states):
        return _Seen(state=InstanceState.RUNNING)
    since = instant(child(pod, "metadata").get("creationTimestamp")) or now
    for one in (child(state, "waiting") for state in states):
        reason, detail = text(one, "reason"), _words(one)
        started = instant(child(pod, "status").get("startTime")) or since
        if reason in _IMAGE_FAULTS or (reason in _IMAGE_ERRORS and now - started > HELD_UP):
            return _Seen(state=InstanceState.PAUSED, loss=Loss.IMAGE_ERROR, detail=detail)
        if reason in _CONTAINER_ERRORS and now - started > HELD_UP:
            return _Seen(state=InstanceState.PAUSED, loss=Loss.PROVISION_FAILED, detail=detail)
        if reason and reason not in ("ContainerCreating", "PodInitializing"):
            return _Seen(state=InstanceState.PENDING, detail=detail)
    unplaced = _condition(pod, "PodScheduled", holds=False)
    if text(unplaced, "reason") == "Unschedulable":
        waited, detail = now - (instant(unplaced.get("lastTransitionTime")) or since), text(unplaced, "message")
        if waited > settings.schedule_within:
            return _Seen(state=InstanceState.PAUSED, loss=Loss.NO_CAPACITY, detail=detail)
        return _Seen(state=InstanceState.PENDING, detail=detail)
    return _Seen(state=InstanceState.PENDING if phase == "Pending" else InstanceState.UNKNOWN)


def _is_over(pod: Mapping[str, Any]) -> bool:
    return text(child(pod, "status"), "phase") in ("Succeeded", "Failed")


def _is_suspended_again(job: Mapping[str, Any], *, had_pod: bool) -> bool:
    """Whether a Job that had been started is suspended: Kueue preempts so, and would start it later by itself."""
    if child(job, "spec").get("suspend") is not True:
        return False
    if had_pod:
        return True
    made = instant(child(job, "metadata").get("creationTimestamp"))
    since = instant(_condition(job, "Suspended").get("lastTransitionTime"))
    return made is not None and since is not None and since - made > RESUMED_AFTER


def _condition(thing: Mapping[str, Any], *kinds: str, holds: bool = True) -> Mapping[str, Any]:
    """Return the first condition of these kinds that holds, or does not; an empty one where there is none."""
    found = (one for one in items(child(thing, "status"), "conditions") if text(one, "type") in kinds)
    return next((one for one in found if (text(one, "status") == "True") is holds), {})


def _words(said: Mapping[str, Any]) -> str:
    return ": ".join(part for part in (text(said, "reason"), text(said, "message")) if part)
