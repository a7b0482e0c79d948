"""vast.ai's HTTP API over a `VastCloud`, as a Starlette application.

Where the official client and the written reference disagree, the client is served: it reads `offers` only from an
answer whose content type is exactly `application/json`, `start_date` as a number, `extra_env` as a list of pairs.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from email.utils import format_datetime
from secrets import token_hex
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route as Path

from spotd_providers.testkit.serve import Call, Receive, RecordedRequest, Scope, Send
from tests.fakes.cloud import FakeApi
from tests.fakes.vastai.accounts import charges_page, instances_page, user_row
from tests.fakes.vastai.asks import selected, unknown_columns
from tests.fakes.vastai.cloud import VastCloud
from tests.fakes.vastai.contracts import Contract
from tests.fakes.vastai.limits import Limits, Route, key_of
from tests.fakes.vastai.refusal import Refusal, said
from tests.fakes.vastai.rows import ask_row, contract_row

Handler = Callable[[Request, Any], Any]
_LOG_LINES = 1000
INCREASES = "/api/v0/instances/pending-price-increases/"


def classify(request: RecordedRequest) -> Call:
    """What a request to vast.ai is for."""
    path = request.path
    if path.startswith(("/api/v0/bundles", "/api/v0/search/asks")):
        return Call.OFFERS
    if path.startswith("/api/v0/asks/"):
        return Call.LAUNCH
    if path.startswith(("/api/v0/users/", "/api/v0/charges")):
        return Call.ACCOUNT
    if path == INCREASES:
        return Call.OTHER
    if path.startswith(("/api/v1/instances", "/api/v0/instances")) and request.method == "GET":
        return Call.LIST
    if path.startswith("/api/v0/instances/") and request.method == "DELETE":
        return Call.TERMINATE
    return Call.OTHER


class VastApi(FakeApi[VastCloud]):
    """The ASGI application."""

    def __init__(self, cloud: VastCloud) -> None:
        self._limits = Limits(cloud.quirks)
        super().__init__(cloud)

    def _built(self) -> Starlette:
        routes = [
            self._path("POST", "/api/v0/bundles/", self._search, Route.SEARCH, public=True),
            self._path("PUT", "/api/v0/search/asks/", self._search_asks, Route.SEARCH, public=True),
            self._path("PUT", "/api/v0/asks/{ask:int}/", self._create, Route.CREATE),
            self._path("GET", "/api/v1/instances/", self._list, Route.LIST),
            self._path("GET", "/api/v0/instances/", self._old_list, Route.LIST),
            self._path("GET", INCREASES, self._price_increases, Route.INCREASES),
            self._path("GET", "/api/v0/benchmarks/", self._benchmarks, Route.BENCHMARKS),
            self._path("DELETE", "/api/v0/instances/", self._destroy_many, Route.DESTROY),
            self._path("GET", "/api/v0/instances/{id:int}/", self._show, Route.SHOW),
            self._path("PUT", "/api/v0/instances/{id:int}/", self._manage, Route.MANAGE, instance_key=True),
            self._path("DELETE", "/api/v0/instances/{id:int}/", self._destroy, Route.DESTROY, instance_key=True),
            self._path("PUT", "/api/v0/instances/bid_price/{id:int}/", self._change_bid, Route.BID),
            self._path("PUT", "/api/v0/instances/request_logs/{id:int}/", self._request_logs, Route.LOGS),
            self._path("GET", "/api/v0/users/current/", self._user, Route.USER),
            self._path("GET", "/api/v0/charges/", self._charges, Route.CHARGES),
            self._path("GET", "/api/v0/gpu_names/unique/", self._gpu_names, Route.CATALOG, public=True),
            self._path("GET", "/api/v0/metrics/gpu/history/", self._price_history, Route.METRICS),
            Path("/logs/{token}.log", self._log, methods=["GET"]),
        ]
        app = Starlette(routes=routes)
        app.router.redirect_slashes = False
        app.router.default = self._elsewhere
        self._paths = routes
        return app

    # --- every request --------------------------------------------------------------------------------------------

    def _path(
        self,
        method: str,
        path: str,
        handler: Handler,
        route: Route,
        *,
        public: bool = False,
        instance_key: bool = False,
    ) -> Path:
        def answer(request: Request, content: bytes) -> Response:
            try:
                who = self._who(request, public=public, instance_key=instance_key)
                self._limits.admit(route, who, self.cloud.clock.now())
                return self._json(200, handler(request, _decoded(content)))
            except Refusal as refusal:
                if isinstance(refusal.body, str):
                    return Response(
                        refusal.body, status_code=refusal.status, headers=refusal.headers, media_type="text/plain"
                    )
                return self._json(refusal.status, refusal.body, refusal.headers)

        return Path(path, self.endpoint(answer), methods=[method])

    def _who(self, request: Request, *, public: bool, instance_key: bool) -> str:
        key = key_of(request.headers, request.query_params)
        if key == self.cloud.api_key:
            return "account"
        if public:
            return "anybody"
        if key is None:
            raise said(403, "", "This action requires login.")
        contract = next((c for c in self.cloud.contracts.values() if c.api_key == key), None)
        if contract is None:
            raise said(self.cloud.quirks.auth_status, "auth_error", "Invalid user key")
        if not instance_key or request.path_params.get("id") != contract.contract_id:
            raise said(403, "forbidden", "This key may start, stop and destroy its own instance only.")
        return f"instance {contract.contract_id}"

    def _json(self, status: int, body: Any, headers: Mapping[str, str] | None = None) -> Response:
        # Starlette would add a charset, which the official client refuses.
        own = {
            "content-type": self.cloud.quirks.content_type,
            "date": format_datetime(self.cloud.clock.now(), usegmt=True),
        }
        return Response(json.dumps(body), status_code=status, headers={**own, **(headers or {})})

    async def _elsewhere(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = str(scope["path"])
        slashed = {**scope, "path": path + "/"}
        known = not path.endswith("/") and any(route.matches(slashed)[0].value for route in self._paths)
        if known and self.cloud.quirks.trailing_slash_redirects:
            location = path + "/" + (f"?{scope['query_string'].decode()}" if scope["query_string"] else "")
            response = Response(status_code=301, headers={"location": location})
        else:
            response = Response("<html><h1>404 Not Found</h1></html>", status_code=404, media_type="text/html")
        await response(scope, receive, send)

    # --- market ---------------------------------------------------------------------------------------------------

    def _search(self, _: Request, query: Any) -> Any:
        if not isinstance(query, dict):
            raise said(400, "invalid_args", "error 400/3400: the query must be an object")
        if isinstance(query.get("q"), dict):
            raise said(400, "invalid_args", "error 400/3402: no such column: q")
        kind = str(query.get("type") or "on-demand")
        now, quirks = self.cloud.clock.now(), self.cloud.quirks
        allocated = float(query.get("allocated_storage") or 8.0)
        rows = [
            ask_row(ask, kind=kind, allocated_gb=allocated, now=now, quirks=quirks)
            for ask in self.cloud.asks.values()
            if self.cloud.is_for_sale(ask)
        ]
        unknown = unknown_columns(query, rows[:1])
        if unknown:
            raise said(400, "invalid_args", f"error 400/3402: no such column: {unknown[0]}")
        found: list[Any] = list(selected(rows, query))[: quirks.search_rows_max]
        return {"offers": quirks.edit_offers(found) if quirks.edit_offers else found}

    def _search_asks(self, request: Request, body: Any) -> Any:
        return self._search(request, body.get("q") if isinstance(body, dict) else None)

    def _create(self, request: Request, body: Any) -> Any:
        if not isinstance(body, dict):
            raise said(400, "invalid_args", "error 400/3467: the body must be an object")
        return self.cloud.buy(request.path_params["ask"], body)

    def _gpu_names(self, _: Request, __: Any) -> Any:
        return {"success": True, "gpu_names": sorted({ask.gpu_name for ask in self.cloud.asks.values()})}

    # --- instances ------------------------------------------------------------------------------------------------

    def _row(self, contract: Contract) -> Any:
        return contract_row(contract, now=self.cloud.clock.now(), quirks=self.cloud.quirks)

    def _list(self, request: Request, _: Any) -> Any:
        contracts = self.cloud.visible()
        return instances_page(
            [(contract, self._row(contract)) for contract in contracts], request.query_params, self.cloud.quirks
        )

    def _price_increases(self, _: Request, __: Any) -> Any:
        rows = self.cloud.price_increases
        return {"success": True, "count": len(rows), "truncated": False, "pending_price_increases": rows}

    def _benchmarks(self, request: Request, _: Any) -> Any:
        limit, order = (json.loads(request.query_params[key]) for key in ("limit", "order_by"))
        assert json.loads(request.query_params["select_filters"]) == {}
        return sorted(self.cloud.benchmarks, key=lambda row: row[order[0]["col"]], reverse=True)[:limit]

    def _old_list(self, _: Request, __: Any) -> Any:
        raise said(410, "deprecated_endpoint", "This endpoint is deprecated, use /api/v1/instances/.")

    def _show(self, request: Request, _: Any) -> Any:
        contract = self.cloud.shown(request.path_params["id"])
        # One object, or null, under the plural key.
        return {"instances": None if contract is None else self._row(contract)}

    def _manage(self, request: Request, body: Any) -> Any:
        contract_id = request.path_params["id"]
        fields = body if isinstance(body, dict) else {}
        if fields.get("state") == "stopped":
            self.cloud.stop(contract_id)
        elif fields.get("state") == "running":
            self.cloud.start(contract_id)
            if not self.cloud.existing(contract_id).holds_gpu:
                # It may start later by itself, and bill.
                return {"success": True, "msg": "Required resources are currently unavailable, state change queued."}
        elif isinstance(fields.get("label"), str):
            self.cloud.existing(contract_id).label = fields["label"]
        else:
            raise said(400, "invalid_args", "error 400/3620: nothing to do")
        return {"success": True}

    def _destroy(self, request: Request, _: Any) -> Any:
        self.cloud.destroy(request.path_params["id"])
        return {"success": True}

    def _destroy_many(self, _: Request, body: Any) -> Any:
        wanted = body.get("instance_ids") if isinstance(body, dict) else None
        if not isinstance(wanted, list):
            raise said(400, "invalid_args", "error 400/3622: instance_ids is required")
        for contract_id in wanted:
            self.cloud.destroy(int(contract_id))
        return {"success": True}

    def _change_bid(self, request: Request, body: Any) -> Any:
        self.cloud.change_bid(request.path_params["id"], body.get("price") if isinstance(body, dict) else None)
        return {"success": True}

    def _request_logs(self, request: Request, body: Any) -> Any:
        contract = self.cloud.existing(request.path_params["id"])
        tail = int((body or {}).get("tail") or _LOG_LINES)
        token = f"{token_hex(8)}-{contract.contract_id}-{tail}"
        contract.log_tokens[token] = self.cloud.quirks.log_tries
        return {"success": True, "result_url": f"{self.cloud.base_url}/logs/{token}.log"}

    async def _log(self, request: Request) -> Response:
        token = str(request.path_params["token"])
        with self.cloud.lock:
            contract = next((c for c in self.cloud.contracts.values() if token in c.log_tokens), None)
            if contract is None or contract.log_tokens[token] > 0:
                if contract is not None:
                    contract.log_tokens[token] -= 1
                return Response("<Error><Code>NoSuchKey</Code></Error>", status_code=404, media_type="application/xml")
            lines = self.cloud.machines.console(contract.machine, lines=int(token.rpartition("-")[2]))
        return Response("\n".join(lines) + "\n", media_type="text/plain")

    def _price_history(self, request: Request, _: Any) -> Any:
        """Hourly percentiles of each GPU asked for; an account without a machine of its own is shown none."""
        if self.cloud.quirks.metrics_need_machine:
            return {"needs_machine": True, "gpus": []}
        start, end, step = (int(request.query_params[key]) for key in ("start", "end", "step"))
        gpus = {}
        for name in request.query_params["gpu_name"].split(","):
            if (usd := self.cloud.past_usd.get(name)) is not None:
                times = list(range(start - start % step, end, step))
                pricing = {
                    f"{kind}_{share}": [usd * factor for _ in times]
                    for kind in ("rented", "avail")
                    for share, factor in (("p10", 0.8), ("median", 1.0), ("p90", 1.5))
                }
                gpus[name] = {"supply_demand": {}, "stats": {}, "pricing": {"timestamps": times, **pricing}}
        return {"gpus": gpus}

    # --- account --------------------------------------------------------------------------------------------------

    def _user(self, _: Request, __: Any) -> Any:
        return user_row(self.cloud)

    def _charges(self, request: Request, _: Any) -> Any:
        return charges_page(self.cloud, request.query_params)


def _decoded(content: bytes) -> Any:
    if not content:
        return None
    try:
        return json.loads(content)
    except ValueError:
        raise said(400, "invalid_args", "error 400/3401: the body is not JSON") from None
