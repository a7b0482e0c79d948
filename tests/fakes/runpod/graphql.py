"""RunPod's old GraphQL over a `RunpodCloud`: the account, prices, and pods by their old names.

Where clients and the written reference disagree, the clients are served. gpuhunt asks for prices without any key, so
the catalogue is public and everything else is not. dstack's client writes `dockerArgs` as a JSON text with entrypoint
and command, the official SDK as one string: both run. Clusters and CPU pods are asked for by gpuhunt, and there are
none for sale: spotd rents one machine with GPUs per attempt.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, Final

from spotd_providers.contract.money import MICRO
from tests.fakes.runpod.cloud import RunpodCloud
from tests.fakes.runpod.gpus import Gpu, country
from tests.fakes.runpod.pods import BILLED, Phase, Pod
from tests.fakes.runpod.query import parsed, projected
from tests.fakes.runpod.refusal import GraphError, Refusal

NO_SPOT: Final = "There are no instances available with the request specifications. Please try again later."
_DESIRED: Final = {Phase.EXITED: "EXITED", Phase.ERROR: "EXITED", Phase.TERMINATED: "TERMINATED"}


_PUBLIC: Final = frozenset({"gpuTypes", "dataCenters", "countryCodes", "cpuFlavors"})


def answered(cloud: RunpodCloud, body: Any, *, known: bool = True) -> dict[str, Any]:
    """The answer to one request; errors are answers, too.

    Raises:
        Refusal: somebody without a key (`known` is false) asks for more than the catalogue.
    """
    try:
        if not isinstance(body, dict) or not isinstance(body.get("query"), str):
            raise GraphError("Must provide query string.", code="BAD_REQUEST")
        kind, fields = parsed(body["query"], body.get("variables") or {})
        if not known and (kind != "query" or not {one.name for one in fields} <= _PUBLIC):
            raise Refusal(401, "missing bearer token")
        roots = _questions(cloud) if kind == "query" else _orders(cloud)
        return {"data": projected(roots, fields)}
    except GraphError as exc:
        return _error(str(exc), exc.code)
    except Refusal as exc:
        if exc.status == 401:
            raise
        return _error(str(exc.body["detail"]), "RUNPOD")


def _error(message: str, code: str) -> dict[str, Any]:
    return {"errors": [{"message": message, "path": [], "extensions": {"code": code}}], "data": None}


Resolver = Callable[[Mapping[str, Any]], Any]


def _questions(cloud: RunpodCloud) -> dict[str, Resolver]:
    def gpu_types(arguments: Mapping[str, Any]) -> Any:
        values = arguments.get("input") or {}
        wanted = values.get("id")
        if values.get("cluster"):
            return []
        return [_gpu(cloud, gpu) for gpu in cloud.gpus.values() if wanted in (None, gpu.gpu_id)]

    def pod(arguments: Mapping[str, Any]) -> Any:
        try:
            return _pod(cloud, cloud.shown(_input(arguments)["podId"]))
        except Refusal:
            return None

    places = sorted(cloud.data_centers())
    return {
        "myself": lambda _: _myself(cloud),
        "gpuTypes": gpu_types,
        "pod": pod,
        "dataCenters": lambda _: [{"id": place, "name": place.title(), "listed": True} for place in places],
        # The real one lists an empty entry, too.
        "countryCodes": lambda _: [*sorted({country(place) for place in places}), None],
        "cpuFlavors": lambda _: [],
    }


def _orders(cloud: RunpodCloud) -> dict[str, Resolver]:
    def rent(arguments: Mapping[str, Any]) -> Any:
        wanted = _input(arguments)
        if cloud.quirks.spot == "empty":
            raise GraphError(NO_SPOT)
        gpu = cloud.gpus.get(wanted["gpuTypeId"])
        if gpu is None or gpu.spot_price is None or wanted["bidPerGpu"] < gpu.spot_price:
            raise GraphError(NO_SPOT)
        bid = None if cloud.quirks.spot == "on-demand" else float(wanted["bidPerGpu"])
        return _pod(cloud, cloud.create(_as_v2(cloud, wanted), spot_bid=bid))

    def deploy(arguments: Mapping[str, Any]) -> Any:
        return _pod(cloud, cloud.create(_as_v2(cloud, _input(arguments))))

    def change_registry(arguments: Mapping[str, Any]) -> Any:
        wanted = _input(arguments)
        return cloud.belongings.change_registry(str(wanted.get("id")), dict(wanted))

    def resume(arguments: Mapping[str, Any]) -> Any:
        wanted = _input(arguments)
        return _pod(cloud, cloud.rebid(wanted["podId"], float(wanted["bidPerGpu"])))

    def stop(arguments: Mapping[str, Any]) -> Any:
        return _pod(cloud, cloud.act(_input(arguments)["podId"], "stop"))

    def start(arguments: Mapping[str, Any]) -> Any:
        pod = cloud.shown(_input(arguments)["podId"])
        if pod.spot:
            raise GraphError("Cannot resume a spot pod as an on demand pod.")
        return _pod(cloud, cloud.act(pod.pod_id, "start"))

    def terminate(arguments: Mapping[str, Any]) -> Any:
        try:
            cloud.terminate(_input(arguments)["podId"])
        except Refusal:
            raise GraphError("pod not found to terminate") from None

    orders: dict[str, Resolver] = {
        "podFindAndDeployOnDemand": deploy,
        "podResume": start,
        "podStop": stop,
        "podTerminate": terminate,
        "saveRegistryAuth": lambda arguments: cloud.belongings.add_registry(dict(_input(arguments))),
        "updateRegistryAuth": change_registry,
        "deleteRegistryAuth": lambda arguments: cloud.drop_registry(str(arguments.get("registryAuthId"))),
    }
    if cloud.quirks.spot != "removed":
        orders |= {"podRentInterruptable": rent, "podBidResume": resume}
    return orders


def _input(arguments: Mapping[str, Any]) -> Mapping[str, Any]:
    values = arguments.get("input")
    if not isinstance(values, Mapping):
        raise GraphError("Something went wrong. Please try again later.", code="INTERNAL_SERVER_ERROR")
    return values


def _as_v2(cloud: RunpodCloud, wanted: Mapping[str, Any]) -> dict[str, Any]:
    number = int(wanted.get("gpuCount") or 1)
    places = [wanted["dataCenterId"]] if wanted.get("dataCenterId") else []
    if wanted.get("countryCode"):
        gpu = cloud.gpus.get(wanted.get("gpuTypeId") or "")
        places = (gpu.in_country(wanted["countryCode"]) if gpu else []) or ["nowhere"]
    details = {
        "minCudaVersion": wanted.get("minCudaVersion"),
        # Here for the whole pod, in v2 for each GPU.
        "minVcpuCountPerGpu": (wanted.get("minVcpuCount") or 1) // number,
        "minRamPerGpu": (wanted.get("minMemoryInGb") or 1) // number,
    }
    return {
        "name": wanted.get("name"),
        "image": wanted.get("imageName"),
        # `ALL` clouds is a thing of the old API only.
        "cloud": "COMMUNITY" if wanted.get("cloudType") == "ALL" else wanted.get("cloudType"),
        "gpu": {"id": wanted.get("gpuTypeId"), "count": number, **details},
        "disk": wanted.get("containerDiskInGb") or 20,
        **_docker_args(wanted.get("dockerArgs") or ""),
        "env": {pair["key"]: pair["value"] for pair in wanted.get("env") or []},
        "ports": [port for port in (wanted.get("ports") or "").split(",") if port],
        "registry": wanted.get("containerRegistryAuthId"),
        "dataCenterIds": places,
    }


def _docker_args(text: str) -> dict[str, Any]:
    """The arguments of an entrypoint, or the JSON text that also replaces the entrypoint."""
    try:
        fields = json.loads(text)
    except ValueError:
        return {"args": text}
    if not isinstance(fields, dict):
        return {"args": text}
    return {"entrypoint": list(fields.get("entrypoint") or []), "cmd": list(fields.get("cmd") or [])}


def _myself(cloud: RunpodCloud) -> dict[str, Any]:
    return {
        "id": "user_1",
        "email": "someone@example.org",
        "pubKey": "",
        "networkVolumes": [
            {"id": volume["id"], "name": volume["name"], "size": volume["size"], "dataCenterId": volume["dataCenter"]}
            for volume in cloud.belongings.volumes.values()
        ],
        "containerRegistryCreds": [
            {"id": identity, "name": found["name"]} for identity, found in cloud.belongings.registries.items()
        ],
        "clientBalance": cloud.balance_left(),
        "currentSpendPerHr": cloud.spend_now(),
        "spendLimit": cloud.quirks.spend_limit,
        "pods": [_pod(cloud, pod) for pod in cloud.visible()],
    }


def _gpu(cloud: RunpodCloud, gpu: Gpu) -> dict[str, Any]:
    def lowest(arguments: Mapping[str, Any]) -> dict[str, Any]:
        values = arguments.get("input") or {}
        number = int(values.get("gpuCount") or 1)
        secure = values.get("secureCloud")
        prices = [gpu.secure_price if secure else gpu.community_price] if secure is not None else []
        listed = min((price for price in prices or [gpu.secure_price, gpu.community_price] if price), default=None)
        places = [values["dataCenterId"]] if values.get("dataCenterId") else []
        if values.get("countryCode"):
            places = gpu.in_country(values["countryCode"]) or ["nowhere"]
        found = gpu.place(places, number) if gpu.runs_cuda(values.get("minCudaVersion")) else None
        stocked = listed is not None and found is not None
        bid = gpu.spot_price if stocked and cloud.quirks.spot != "removed" else None
        return {
            # For all GPUs of the request together, unlike every other price here.
            "minimumBidPrice": None if bid is None else round(bid * number, 6),
            "uninterruptablePrice": round(listed * number, 6) if listed and stocked else None,
            "stockStatus": "High" if stocked else None,
            # What comes with all GPUs of the request; unknown where nothing is left.
            "minVcpu": gpu.vcpus * number if stocked else None,
            "minMemory": gpu.ram * number if stocked else None,
            "compliance": None,
            "countryCode": country(found) if stocked and found else None,
        }

    return {
        "id": gpu.gpu_id,
        "displayName": gpu.name,
        "manufacturer": gpu.manufacturer,
        "memoryInGb": gpu.memory,
        "cudaCores": 0,
        "secureCloud": bool(gpu.secure_price),
        "communityCloud": bool(gpu.community_price),
        "securePrice": gpu.secure_price or 0,
        "communityPrice": gpu.community_price or 0,
        "secureSpotPrice": gpu.spot_price,
        "communitySpotPrice": gpu.spot_price,
        "oneWeekPrice": None,
        "oneMonthPrice": None,
        "threeMonthPrice": None,
        "sixMonthPrice": None,
        "clusterPrice": None,
        "nodeGroupDatacenters": [],
        "minPodGpuCount": 1,
        "maxGpuCount": gpu.max_count,
        "maxGpuCountSecureCloud": gpu.max_count,
        "maxGpuCountCommunityCloud": gpu.max_count,
        "lowestPrice": lowest,
    }


def _pod(cloud: RunpodCloud, pod: Pod) -> dict[str, Any]:
    up = pod.phase is Phase.RUNNING
    ports = [
        {
            "ip": port["ip"],
            "isIpPublic": True,
            "privatePort": port["private"],
            "publicPort": port["public"],
            "type": port["type"],
        }
        for port in pod.mapped_ports()
    ]
    runtime = {"ports": ports, "uptimeInSeconds": 0, "gpus": [], "container": None} if up else None
    return {
        "id": pod.pod_id,
        "name": pod.name,
        "desiredStatus": _DESIRED.get(pod.phase, "RUNNING"),
        "lastStatusChange": f"{pod.phase.value.title()}: {cloud.clock.now():%a %b %d %Y %H:%M:%S}",
        "imageName": pod.image,
        "costPerHr": pod.price / MICRO if pod.phase in BILLED else 0.0,
        "adjustedCostPerHr": pod.price / MICRO if pod.phase in BILLED else 0.0,
        "lowestBidPriceToResume": pod.gpu.spot_price,
        "podType": "INTERRUPTABLE" if pod.spot else "RESERVED",
        "gpuCount": pod.count,
        "machineId": "m4ch1n3",
        "containerDiskInGb": pod.disk,
        "volumeInGb": 0,
        "volumeMountPath": "",
        "dockerArgs": pod.body.get("args", ""),
        "dockerId": None,
        "env": [f"{name}={value}" for name, value in (pod.body.get("env") or {}).items()],
        "memoryInGb": pod.gpu.ram * pod.count,
        "vcpuCount": pod.gpu.vcpus * pod.count,
        "port": None,
        "ports": ",".join(pod.body.get("ports") or []) or None,
        "uptimeSeconds": 0,
        "runtime": runtime,
        "machine": {"gpuDisplayName": pod.gpu.name, "podHostId": f"{pod.pod_id}-host", "location": "US"},
    }
