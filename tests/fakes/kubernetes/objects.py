"""Objects of the fake cluster as plain documents: what one says of its owner, its rank and its place."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

GPU: Final = "nvidia.com/gpu"
RANK: Final = "batch.kubernetes.io/job-completion-index"
_ANNOTATION: Final = re.compile(r"metadata\.annotations\['([^']+)'\]")
Document = dict[str, Any]


class Refused(Exception):
    """An answer of kind Status."""

    def __init__(self, code: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.reason = reason
        self.message = message


@dataclass(slots=True, kw_only=True)
class Objects:
    """The objects of one kind, by namespace and name."""

    kind: str
    group: str
    plural: str
    rows: dict[tuple[str, str], Document] = field(default_factory=dict)


def owner_of(thing: Mapping[str, Any]) -> str:
    return next((str(one["uid"]) for one in thing["metadata"].get("ownerReferences", []) if one["kind"] == "Job"), "")


def gpus_of(pod: Mapping[str, Any]) -> int:
    return sum(int(one.get("resources", {}).get("limits", {}).get(GPU, 0)) for one in pod["spec"]["containers"])


def is_match(labels: Mapping[str, str], one: Mapping[str, Any]) -> bool:
    value, values = labels.get(one["key"]), one.get("values", [])
    checks = {
        "In": value in values, "NotIn": value not in values, "Exists": value is not None, "DoesNotExist": value is None,
    }  # fmt: skip
    return checks[one["operator"]]


def selected(rows: Iterable[Document], selector: str) -> list[Document]:
    """Return the objects whose labels are as an equality selector asks."""
    wanted = [part.split("=", 1) for part in selector.replace("==", "=").split(",") if part]
    return [row for row in rows if all((row["metadata"].get("labels") or {}).get(k) == v for k, v in wanted)]


# Indexed Jobs, as a real control plane of 1.36 showed them (tests/system/test_kubernetes_gangs.py).


def count_of(job: Mapping[str, Any]) -> int:
    """Return how many pods an Indexed Job has; 0 for a Job of another kind."""
    return int(job["spec"]["completions"]) if job["spec"].get("completionMode") == "Indexed" else 0


def rank_of(pod: Mapping[str, Any]) -> int:
    return int(pod["metadata"].get("annotations", {}).get(RANK, "0"))


def ranks(job: Mapping[str, Any], name: str) -> set[int]:
    """Return the ranks in `failedIndexes` or `completedIndexes`."""
    return {int(one) for one in job["status"].get(name, "").split(",") if one}


def note_rank(job: Document, name: str, rank: int) -> None:
    job["status"][name] = ",".join(str(one) for one in sorted({*ranks(job, name), rank}))


def missing_ranks(job: Mapping[str, Any], pods: Iterable[Mapping[str, Any]]) -> list[int]:
    """Return the ranks for which the Job controller makes a pod: without a bound for each, those that failed, too."""
    over = {*ranks(job, "completedIndexes"), *(rank_of(pod) for pod in pods if _is_counted(job, pod))}
    if "backoffLimitPerIndex" in job["spec"]:
        over |= ranks(job, "failedIndexes")
    return [rank for rank in range(count_of(job)) if rank not in over]


def _is_counted(job: Mapping[str, Any], pod: Mapping[str, Any]) -> bool:
    return "backoffLimitPerIndex" in job["spec"] or pod["status"]["phase"] != "Failed"


def fields_of(pod: Mapping[str, Any]) -> dict[str, str]:
    """Return the variables of a container that are fields of its pod."""
    found = {}
    for one in pod["spec"]["containers"][0].get("env", []):
        path = one.get("valueFrom", {}).get("fieldRef", {}).get("fieldPath", "")
        if named := _ANNOTATION.fullmatch(path):
            found[one["name"]] = pod["metadata"]["annotations"][named[1]]
        elif path == "status.podIP":
            found[one["name"]] = pod["status"]["podIP"]
    return found
