"""The closed schema of a create: what is not in it is refused, as is what has the wrong kind."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, Final

from tests.fakes.runpod.refusal import Refusal

BODY_BYTES_MAX: Final = 102_400
_CUDA: Final = re.compile(r"\d+\.\d+")


def _text(value: Any) -> bool:
    return isinstance(value, str)


def _named(value: Any) -> bool:
    return isinstance(value, str) and bool(value)


def _number(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _flag(value: Any) -> bool:
    return isinstance(value, bool)


def _texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def _map(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(item, str) for item in value.values())


def _object(value: Any) -> bool:
    return isinstance(value, dict)


_POD: Final[Mapping[str, Callable[[Any], bool]]] = {
    "name": _named,
    "image": _named,
    "gpu": _object,
    "cpu": _object,
    "cloud": lambda value: value in ("SECURE", "COMMUNITY"),
    "dataCenterIds": _texts,
    "disk": _number,
    "mounts": _object,
    "env": _map,
    "ports": _texts,
    "args": _text,
    "registry": lambda value: value is None or _text(value),
    "startSsh": _flag,
    "startJupyter": _flag,
    "globalNetworking": _flag,
    "templateId": _named,
}
_LATER: Final[Mapping[str, Callable[[Any], bool]]] = {"entrypoint": _texts, "cmd": _texts}
_GPU: Final[Mapping[str, Callable[[Any], bool]]] = {
    "id": _named,
    "count": _number,
    "allowedCudaVersions": _texts,
    "minCudaVersion": lambda value: isinstance(value, str) and _CUDA.fullmatch(value) is not None,
    "minRamPerGpu": _number,
    "minVcpuCountPerGpu": _number,
}


_CLUSTER: Final[Mapping[str, Callable[[Any], bool]]] = {
    "name": _named,
    "type": lambda value: value in ("APPLICATION", "TRAINING", "SLURM", "RAY"),
    "compute": _object,
    "dataCenterIds": _texts,
    **{name: _POD[name] for name in ("image", "disk", "mounts", "env", "ports", "args", "startSsh", "startJupyter")},
}
_COMPUTE: Final[Mapping[str, Callable[[Any], bool]]] = {
    "gpuTypeId": _named,
    "gpuCountPerPod": _number,
    "podCount": lambda value: _number(value) and 2 <= value <= 250,
}


def check_cluster(body: Any, *, size: int) -> Mapping[str, Any]:
    """The body, if it is one of a cluster's create: no registry, no cloud, no CUDA version.

    Raises:
        Refusal: 413, 422 or 400.
    """
    if size > BODY_BYTES_MAX:
        raise Refusal(413, f"request body exceeds {BODY_BYTES_MAX} bytes")
    if not isinstance(body, dict):
        raise Refusal(422, "Request validation failed.", errors=["$: expected an object"])
    compute = body.get("compute")
    faults = _faults("$", body, _CLUSTER)
    faults += [f"$: missing property '{name}'" for name in ("name", "type", "compute", "image") if name not in body]
    if isinstance(compute, dict):
        faults += _faults("$.compute", compute, _COMPUTE)
        faults += [f"$.compute: missing property '{name}'" for name in _COMPUTE if name not in compute]
    if faults:
        raise Refusal(422, "Request validation failed.", errors=faults)
    if "disk" not in body:
        raise Refusal(400, "You must either provide a template id or pod configuration parameters")
    return body


def check_create(body: Any, *, size: int, knows_entrypoint: bool) -> Mapping[str, Any]:
    """The body, if it is one of a create.

    Raises:
        Refusal: 413, 422 or 400.
    """
    if size > BODY_BYTES_MAX:
        raise Refusal(413, f"request body exceeds {BODY_BYTES_MAX} bytes")
    if not isinstance(body, dict):
        raise Refusal(422, "Request validation failed.", errors=["$: expected an object"])
    faults = _faults("$", body, {**_POD, **(_LATER if knows_entrypoint else {})})
    if isinstance(body.get("gpu"), dict):
        faults += _faults("$.gpu", body["gpu"], _GPU)
        if "id" not in body["gpu"]:
            faults.append("$.gpu: missing property 'id'")
    faults += [f"$: missing property '{name}'" for name in ("name",) if name not in body]
    if "image" not in body and "templateId" not in body:
        faults.append("$: missing property 'image'")
    if faults:
        raise Refusal(422, "Request validation failed.", errors=faults)
    if ("gpu" in body) == ("cpu" in body):
        raise Refusal(400, "exactly one of gpu or cpu must be set")
    if "disk" not in body and "templateId" not in body:
        # The schema calls it optional; once a host is chosen, a create without it fails.
        raise Refusal(400, "You must either provide a template id or pod configuration parameters")
    if "cpu" in body:
        raise Refusal(400, "this fake sells no CPU pods")
    return body


def _faults(where: str, fields: Mapping[str, Any], known: Mapping[str, Callable[[Any], bool]]) -> list[str]:
    faults = [f"{where}: additional properties '{name}' not allowed" for name in fields if name not in known]
    wrong = (name for name, fits in known.items() if name in fields and not fits(fields[name]))
    return faults + [f"{where}.{name}: invalid value" for name in wrong]
