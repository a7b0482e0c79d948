"""RunPod's HTTP API over a `RunpodCloud`, as a Starlette application.

Where clients and the written reference disagree, the clients are served: dstack sends the agent of `requests` and is
let in, creates carry `entrypoint` and `cmd`, an unknown registry credential is a 400.
"""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Callable, Mapping
from datetime import datetime, timedelta
from email.utils import format_datetime
from typing import Any, Final

import anyio
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route as Path

from spotd_providers.testkit.serve import Call, RecordedRequest
from tests.fakes.cloud import FakeApi
from tests.fakes.runpod.billing import billed
from tests.fakes.runpod.cloud import RunpodCloud
from tests.fakes.runpod.clusters import Cluster
from tests.fakes.runpod.pods import Pod
from tests.fakes.runpod.refusal import Refusal
from tests.fakes.runpod.schema import check_cluster, check_create

Handler = Callable[[Request, Any], tuple[int, Any]]
_SCRIPTING_AGENTS: Final = ("python-urllib", "python-httpx")
_OPEN_FOR_S: Final = 30.0
_CUDA_FILTER: Final = re.compile(r"\d+(\.\d+)?")


def classify(request: RecordedRequest) -> Call:
    """What a request to RunPod is for."""
    path, method = request.path, request.method
    if path.startswith("/v2/catalog"):
        return Call.OFFERS
    if path.startswith("/v2/billing"):
        return Call.ACCOUNT
    if path in ("/v2/pods", "/v2/clusters") and method == "POST":
        return Call.LAUNCH
    if path.startswith(("/v2/pods", "/v2/clusters")) and method == "DELETE":
        return Call.TERMINATE
    if path.startswith(("/v2/pods", "/v2/clusters")) and method == "GET" and not path.endswith("/logs"):
        return Call.LIST
    return Call.OTHER


class RunpodApi(FakeApi[RunpodCloud]):
    """The ASGI application."""

    def __init__(self, cloud: RunpodCloud) -> None:
        self._asked: list[datetime] = []
        super().__init__(cloud)

    def _built(self) -> Starlette:
        routes = [
            self._path("GET", "/v2/catalog/gpus", self._gpus),
            self._path("GET", "/v2/catalog/gpus/{id}", self._gpu),
            self._path("GET", "/v2/pods", self._list),
            self._path("POST", "/v2/pods", self._create),
            self._path("GET", "/v2/pods/{id}", self._show, pod_key=True),
            self._path("DELETE", "/v2/pods/{id}", self._delete, pod_key=True),
            self._path("POST", "/v2/pods/{id}/action", self._act, pod_key=True),
            self._path("GET", "/v2/clusters", self._clusters),
            self._path("POST", "/v2/clusters", self._create_cluster),
            self._path("GET", "/v2/clusters/{id}", self._cluster),
            self._path("GET", "/v2/clusters/{id}/pods", self._members),
            self._path("DELETE", "/v2/clusters/{id}", self._delete_cluster, pod_key=True),
            self._path("GET", "/v2/billing/pods", self._billing),
            self._path("GET", "/v2/billing/clusters", self._cluster_billing),
            self._path("GET", "/v2/account/ssh-keys", self._ssh_keys),
            self._path("PUT", "/v2/account/ssh-keys", self._replace_ssh_keys),
            self._path("GET", "/v2/registries", self._registries),
            self._path("POST", "/v2/registries", self._add_registry),
            self._path("DELETE", "/v2/registries/{id}", self._drop_registry),
            self._path("GET", "/v2/network-volumes", self._volumes),
            self._path("POST", "/v2/network-volumes", self._add_volume),
            self._path("GET", "/v2/network-volumes/{id}", self._volume),
            self._path("DELETE", "/v2/network-volumes/{id}", self._drop_volume),
            Path("/v2/pods/{id}/logs", self._logs, methods=["GET"]),
            Path("/v1/{rest:path}", self._retired, methods=["GET", "POST", "DELETE", "PATCH"]),
        ]
        return Starlette(routes=routes)

    # --- every request --------------------------------------------------------------------------------------------

    def _path(self, method: str, path: str, handler: Handler, *, pod_key: bool = False) -> Path:
        def answer(request: Request, content: bytes) -> Response:
            agent = request.headers.get("user-agent", "").lower()
            if self.cloud.quirks.refuses_agents and (not agent or agent.startswith(_SCRIPTING_AGENTS)):
                return Response("error code: 1010", status_code=403, media_type="text/plain")
            try:
                self._admit(request, pod_key=pod_key)
                return self._json(*handler(request, content))
            except Refusal as refusal:
                return self._json(refusal.status, refusal.body, refusal.headers)

        return Path(path, self.endpoint(answer), methods=[method])

    def _admit(self, request: Request, *, pod_key: bool) -> None:
        found = re.fullmatch(r"Bearer\s+(\S+)", request.headers.get("authorization", ""))
        if found is None:
            raise Refusal(401, "missing bearer token")
        if found[1] != self.cloud.api_key:
            pod = next((pod for pod in self.cloud.pods.values() if pod.api_key == found[1]), None)
            if pod is None:
                raise Refusal(401, "invalid api key")
            ends = pod.cluster["id"] if pod.cluster is not None and self.cloud.quirks.pod_key_ends_cluster else ""
            if not pod_key or request.path_params.get("id") not in (pod.pod_id, ends):
                raise Refusal(403, "access denied")
        if self.cloud.quirks.refuses_clusters and "clusters" in request.url.path:
            raise Refusal(self.cloud.quirks.refuses_clusters, "access denied")
        now = self.cloud.clock.now()
        self._asked = [at for at in self._asked if now - at < timedelta(minutes=1)]
        if self.cloud.quirks.rate_limits and len(self._asked) >= self.cloud.quirks.requests_a_minute:
            wait = int((self._asked[0] + timedelta(minutes=1) - now).total_seconds()) + 1
            raise Refusal(429, "rate limit exceeded for the minute window", headers={"retry-after": str(wait)})
        self._asked.append(now)

    def _json(self, status: int, body: Any, headers: Mapping[str, str] | None = None) -> Response:
        now, quirks = self.cloud.clock.now(), self.cloud.quirks
        left = max(0, quirks.requests_a_minute - len(self._asked))
        reset = int((self._asked[0] + timedelta(minutes=1) - now).total_seconds()) + 1 if self._asked else 60
        own = {
            "content-type": "application/json" if status < 400 else "application/problem+json",
            "date": format_datetime(now, usegmt=True),
        }
        if quirks.rate_limits:
            own["ratelimit"] = f'"minute";r={left};t={reset}, "hour";r=2800;t=1812, "day";r=49500;t=45012'
            own["ratelimit-policy"] = f'"minute";q={quirks.requests_a_minute};w=60, "hour";q=3000;w=3600'
        content = b"" if status == 204 else json.dumps(body).encode()
        return Response(content, status_code=status, headers={**own, **(headers or {})})

    async def _retired(self, _: Request) -> Response:
        return Response('{"error":"this API has been retired","status":410}', status_code=410)

    # --- catalogue ------------------------------------------------------------------------------------------------

    def _gpus(self, request: Request, _: Any) -> tuple[int, Any]:
        cloud, count, stock = _asked_stock(request.query_params)
        cuda, product = request.query_params.get("minCudaVersion"), request.query_params.get("product", "POD")
        rows: list[Any] = [
            gpu.row(cloud=cloud, count=count, with_stock=stock, cuda=cuda, product=product)
            for gpu in list(self.cloud.gpus.values())
        ]
        edit = self.cloud.quirks.edit_gpus
        return 200, {"gpus": edit(rows) if edit else rows}

    def _gpu(self, request: Request, _: Any) -> tuple[int, Any]:
        cloud, count, stock = _asked_stock(request.query_params)
        gpu = self.cloud.gpus.get(request.path_params["id"])
        if gpu is None:
            raise Refusal(404, "resource not found")
        return 200, gpu.row(cloud=cloud, count=count, with_stock=stock)

    # --- pods -----------------------------------------------------------------------------------------------------

    def _row(self, pod: Pod) -> Any:
        edit = self.cloud.quirks.edit_pod.get(pod.pod_id, {})
        return {**pod.row(self.cloud.clock.now()), **edit} if isinstance(edit, dict) else edit

    def _list(self, request: Request, _: Any) -> tuple[int, Any]:
        quirks = self.cloud.quirks
        members = request.query_params.get("includeClusterPods") == "true"
        rows = [self._row(pod) for pod in self.cloud.visible() if members or pod.cluster is None]
        if quirks.page_rows is None:
            return 200, {"pods": rows}
        start = _position(request.query_params.get("cursor"))
        end = start + min(quirks.page_rows, _limit(request.query_params.get("limit")))
        more = end < len(rows)
        if quirks.last_page_fails and not more and start:
            raise Refusal(500, "internal error")
        cursor = f"after-{end}" if more and not quirks.cursor_missing else None
        return 200, {"pods": rows[start:end], "pagination": {"hasNextPage": more, "nextCursor": cursor}}

    def _create(self, _: Request, content: Any) -> tuple[int, Any]:
        if self.cloud.quirks.read_only_key:
            raise Refusal(403, "access denied")
        body = check_create(_decoded(content), size=len(content), knows_entrypoint=self.cloud.quirks.knows_entrypoint)
        gpu = body["gpu"]["id"]
        if gpu in self.cloud.quirks.unknown_to_create:
            raise Refusal(422, "Request validation failed.", errors=[f"$.gpu.id: unknown GPU type {gpu}"])
        return 201, self._row(self.cloud.create(body))

    def _show(self, request: Request, _: Any) -> tuple[int, Any]:
        return 200, self._row(self.cloud.shown(request.path_params["id"]))

    def _delete(self, request: Request, _: Any) -> tuple[int, Any]:
        self.cloud.terminate(request.path_params["id"])
        return 204, None

    def _act(self, request: Request, content: Any) -> tuple[int, Any]:
        body = _decoded(content)
        action = body.get("action") if isinstance(body, dict) else None
        if action not in ("start", "stop", "restart", "terminate"):
            raise Refusal(422, "Request validation failed.", errors=["$.action: invalid value"])
        pod = self.cloud.act(request.path_params["id"], action)
        return (204, None) if action == "terminate" else (200, self._row(pod))

    # --- clusters -------------------------------------------------------------------------------------------------

    def _cluster_row(self, cluster: Cluster) -> Any:
        edit = self.cloud.quirks.edit_cluster.get(cluster.cluster_id, {})
        return {**cluster.row(), **edit} if isinstance(edit, dict) else edit

    def _clusters(self, _: Request, __: Any) -> tuple[int, Any]:
        return 200, {"clusters": [self._cluster_row(one) for one in self.cloud.clusters.visible()]}

    def _create_cluster(self, _: Request, content: Any) -> tuple[int, Any]:
        if self.cloud.quirks.read_only_key:
            raise Refusal(403, "access denied")
        body = check_cluster(_decoded(content), size=len(content))
        return 201, self._cluster_row(self.cloud.clusters.create(body))

    def _cluster(self, request: Request, _: Any) -> tuple[int, Any]:
        return 200, self._cluster_row(self.cloud.clusters.shown(request.path_params["id"]))

    def _members(self, request: Request, _: Any) -> tuple[int, Any]:
        pods = self.cloud.clusters.shown(request.path_params["id"]).pods.values()
        return 200, {"pods": [self._row(pod) for pod in pods if pod.exists]}

    def _delete_cluster(self, request: Request, _: Any) -> tuple[int, Any]:
        self.cloud.clusters.delete(request.path_params["id"])
        return 204, None

    def _cluster_billing(self, request: Request, _: Any) -> tuple[int, Any]:
        return 200, billed(self.cloud, request.query_params, of_clusters=True)

    async def _logs(self, request: Request) -> Response:
        def lines() -> list[str]:
            with self.cloud.lock:
                self.cloud.advance()
                self._admit(request, pod_key=False)
                pod = self.cloud.shown(request.path_params["id"])
                if request.query_params.get("source") == "system":
                    return [f"pulling {pod.image}", *([pod.failure.value] if pod.failure else [])]
                tail = int(request.query_params.get("tail") or 100)
                return self.cloud.machines.console(pod.pod_id, lines=tail)

        try:
            told = await run_in_threadpool(lines)
        except Refusal as refusal:
            return self._json(refusal.status, refusal.body, refusal.headers)

        async def events() -> AsyncIterator[str]:
            self.cloud.logs_open += 1
            self.cloud.logs_open_most = max(self.cloud.logs_open_most, self.cloud.logs_open)
            try:
                async for event in told_and_more():
                    yield event
            finally:
                self.cloud.logs_open -= 1

        async def told_and_more() -> AsyncIterator[str]:
            for number, line in enumerate(told):
                event = {"ts": self.cloud.clock.now().isoformat(), "source": "container", "line": line}
                yield f"id: {number}\ndata: {json.dumps(event)}\n\n"
            if self.cloud.quirks.log_stays_open:
                until = anyio.current_time() + _OPEN_FOR_S
                yield ": waiting\n\n"
                while anyio.current_time() < until:
                    await anyio.sleep(0.2 if self.cloud.quirks.log_never_rests else _OPEN_FOR_S)
                    yield ": waiting\n\n"

        return StreamingResponse(events(), media_type="text/event-stream")

    # --- account --------------------------------------------------------------------------------------------------

    def _billing(self, request: Request, _: Any) -> tuple[int, Any]:
        return 200, billed(self.cloud, request.query_params)

    def _ssh_keys(self, _: Request, __: Any) -> tuple[int, Any]:
        return 200, {"keys": list(self.cloud.belongings.ssh_keys)}

    def _replace_ssh_keys(self, _: Request, content: Any) -> tuple[int, Any]:
        body = _decoded(content)
        if not isinstance(body, dict) or not isinstance(body.get("keys"), list):
            raise Refusal(422, "Request validation failed.", errors=["$: missing property 'keys'"])
        self.cloud.belongings.ssh_keys = [str(key) for key in body["keys"]]
        return 200, {"keys": list(self.cloud.belongings.ssh_keys)}

    def _registries(self, _: Request, __: Any) -> tuple[int, Any]:
        if not self.cloud.belongings.lists_registries:
            raise Refusal(503, "Try again later.")
        known = self.cloud.belongings.registries
        return 200, {"registries": [{"id": identity, "name": found["name"]} for identity, found in known.items()]}

    def _add_registry(self, _: Request, content: Any) -> tuple[int, Any]:
        return 201, self.cloud.belongings.add_registry(_decoded(content))

    def _drop_registry(self, request: Request, _: Any) -> tuple[int, Any]:
        self.cloud.drop_registry(request.path_params["id"])
        return 204, None

    def _volumes(self, _: Request, __: Any) -> tuple[int, Any]:
        return 200, {"networkVolumes": list(self.cloud.belongings.volumes.values())}

    def _add_volume(self, _: Request, content: Any) -> tuple[int, Any]:
        return 201, self.cloud.belongings.add_volume(_decoded(content), data_centers=self.cloud.data_centers())

    def _volume(self, request: Request, _: Any) -> tuple[int, Any]:
        return 200, self.cloud.belongings.volume(request.path_params["id"])

    def _drop_volume(self, request: Request, _: Any) -> tuple[int, Any]:
        self.cloud.belongings.drop_volume(request.path_params["id"])
        return 204, None


def _asked_stock(params: Mapping[str, str]) -> tuple[str, int, bool]:
    """Cloud, count and whether stock is asked for.

    Raises:
        Refusal: a combination that the service refuses.
    """
    stock = params.get("include") == "AVAILABILITY"
    product = params.get("product")
    filters = {"count", "cloud", "countryCodes", "cudaVersions", "minCudaVersion"} & set(params)
    if stock != (product is not None) or (filters and not stock):
        raise Refusal(400, "product, count, cloud and CUDA filters go with include=AVAILABILITY, and product always")
    if product not in (None, "POD", "CLUSTER", "SERVERLESS") or params.get("cloud", "SECURE") not in (
        "SECURE",
        "COMMUNITY",
    ):
        raise Refusal(422, "Request validation failed.")
    if "minCudaVersion" in params and _CUDA_FILTER.fullmatch(params["minCudaVersion"]) is None:
        raise Refusal(422, "Request validation failed.")
    return params.get("cloud", "SECURE"), int(params.get("count", 1)), stock


def _position(cursor: str | None) -> int:
    if not cursor:
        return 0
    found = re.fullmatch(r"after-(\d{1,6})", cursor)
    if found is None:
        raise Refusal(400, "invalid cursor")
    return int(found[1])


def _limit(text: str | None) -> int:
    if text is None:
        return 1000
    if not text.isdecimal() or not 1 <= int(text) <= 1000:
        raise Refusal(422, "Request validation failed.", errors=["$.limit: invalid value"])
    return int(text)


def _decoded(content: bytes) -> Any:
    try:
        return json.loads(content) if content else None
    except ValueError:
        raise Refusal(400, "request body is not valid JSON") from None
