"""Prime Intellect's HTTP API over a `PrimeCloud`; paths begin with `/api/v1`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import Response

from spotd_providers.contract.values import MICRO
from spotd_providers.testkit.serve import Call, RecordedRequest
from tests.fakes.primeintellect.cloud import JUPYTER_PASSWORD, PrimeCloud, PrimeConfiguration, PrimePod
from tests.fakes.rest import Handler, RestApi, RestRefusal, as_json, bearer, edited, is_count, is_text

PAGE_MAX: Final = 100
_SPEC: Final = (
    "minCount",
    "defaultCount",
    "maxCount",
    "pricePerUnit",
    "step",
    "defaultIncludedInPrice",
    "additionalInfo",
)
_HOUR: Final = timedelta(hours=1)


class PrimeApi(RestApi[PrimeCloud]):
    """The ASGI application."""

    base_path = "/api/v1"

    @staticmethod
    def classify(request: RecordedRequest) -> Call:
        path = request.path.removeprefix(PrimeApi.base_path)
        if path.startswith("/availability"):
            return Call.OFFERS
        if path.startswith(("/billing", "/pods/history")):
            return Call.ACCOUNT
        by_method = {"GET": Call.LIST, "POST": Call.LAUNCH, "DELETE": Call.TERMINATE}
        return by_method.get(request.method, Call.OTHER) if path.startswith("/pods") else Call.OTHER

    def _routes(self) -> Mapping[str, Mapping[str, Handler]]:
        nothing: Mapping[str, Handler] = {"GET": lambda *_: {"items": [], "totalCount": 0}}
        return {
            "/availability/gpus": {"GET": self._offers},
            "/availability/gpu-summary": {"GET": self._summary},
            "/availability/multi-node": nothing,
            "/availability/disks": nothing,
            **self._either_slash("/pods", {"GET": self._list, "POST": self._create}),
            **self._either_slash("/pods/status", {"GET": self._statuses}),
            "/pods/history": {"GET": self._history},
            "/pods/{id}": {"GET": self._show, "DELETE": self._delete},
            "/billing/wallet": {"GET": self._wallet},
        }

    def _authenticate(self, request: Request) -> None:
        if bearer(request) != self.cloud.api_key:
            raise RestRefusal(401, "Invalid or expired API key")
        path = request.url.path.removeprefix(self.base_path)
        scopes = {"/availability": "availability", "/pods": "instances", "/billing": "wallet"}
        for start, scope in scopes.items():
            if path.startswith(start) and scope not in self.cloud.quirks.scopes:
                raise RestRefusal(403, f"The API key lacks the scope {scope}")

    def _refused(self, refusal: RestRefusal) -> Response:
        status = 422 if refusal.code == "invalid_request" else refusal.status
        return as_json({"detail": refusal.detail or refusal.message}, status, refusal.headers)

    def _either_slash(self, path: str, methods: Mapping[str, Handler]) -> Mapping[str, Mapping[str, Handler]]:
        """The path with and without a slash at its end; one of them may be elsewhere."""

        def handler(handle: Handler, form: str) -> Handler:
            def answer(request: Request, body: dict[str, Any]) -> Any:
                if self.cloud.quirks.slash in (form, "either"):
                    return handle(request, body)
                other = request.url.path.rstrip("/") + ("" if form == "with" else "/")
                query = f"?{request.url.query}" if request.url.query else ""
                return Response(status_code=307, headers={"location": other + query})

            return answer

        forms = {path: "without", f"{path}/": "with"}
        return {place: {name: handler(one, form) for name, one in methods.items()} for place, form in forms.items()}

    def _require_whole(self, end: int) -> None:
        """
        Raises:
            RestRefusal: a row of this page is on one that fails.
        """
        fails_from = self.cloud.quirks.fails_from
        if fails_from is not None and end > fails_from:
            raise RestRefusal(500, "Internal Server Error")

    # --- offers ---------------------------------------------------------------------------------------------------

    def _offers(self, request: Request, _: dict[str, Any]) -> Any:
        quirks, query = self.cloud.quirks, request.query_params
        page, size = _number(query.get("page"), 1, "page"), _number(query.get("page_size"), PAGE_MAX, "page_size")
        if not 1 <= size <= PAGE_MAX or page < 1:
            raise _unprocessable(("query", "page_size"), f"Input should be between 1 and {PAGE_MAX}")
        if quirks.sick_answers > 0:
            quirks.sick_answers -= 1
            return {"items": [], "totalCount": 0}
        own = {"gpu_type": "gpu", "socket": "socket", "data_center_id": "data_center", "cloud_id": "cloud_id"}
        rows = [
            self._offer(one, number)
            for number, one in enumerate(self.cloud.configurations)
            if (one.free > 0 or quirks.lists_sold_out)
            and all(query.get(name) in (None, getattr(one, field)) for name, field in own.items())
            and query.get("gpu_count") in (None, str(one.gpus))
            and query.get("security") in (None, _security(one))
            and (one.region in query.getlist("regions") or not query.getlist("regions"))
        ]
        start = (page - 1) * size
        found = rows[start : start + size]
        self._require_whole(start + len(found))
        return {"items": found, "totalCount": len(rows) + quirks.total_lies}

    def _offer(self, one: PrimeConfiguration, number: int) -> Any:
        quirks = self.cloud.quirks
        nothing = None if quirks.empty_blocks == "null" else dict.fromkeys(_SPEC)
        disk = dict(zip(_SPEC, (one.disk_gb, one.disk_gb, one.disk_gb_max, one.unit, 1, False, None), strict=True))
        price = one.price + (one.disk_gb * one.unit if quirks.disk_in_price else 0)
        row = {
            "cloudId": one.cloud_id,
            "gpuType": one.gpu,
            "socket": one.socket,
            "provider": one.provider,
            "region": one.region,
            "dataCenter": one.data_center,
            "country": one.country,
            "gpuCount": one.gpus,
            "gpuMemory": one.memory_gb * (one.gpus if quirks.memory_total else 1),
            "disk": disk,
            "sharedDisk": nothing,
            "vcpu": {**dict.fromkeys(_SPEC), "defaultCount": 16},
            "memory": {**dict.fromkeys(_SPEC), "defaultCount": 251},
            "internetSpeed": None,
            "interconnect": None,
            "interconnectType": None,
            "provisioningTime": None,
            "stockStatus": quirks.stock_words[number % len(quirks.stock_words)] if one.free > 0 else "Unavailable",
            "security": _security(one),
            "prices": {
                "onDemand": None if one.community else price,
                "communityPrice": price if one.community else None,
                "isVariable": one.is_variable,
                "currency": one.currency,
            },
            "images": list(one.images),
            "isSpot": one.is_spot,
            "prepaidTime": one.prepaid_hours,
        }
        return edited(row, quirks.edit_offer.get(one.cloud_id, {}))

    def _summary(self, _: Request, __: dict[str, Any]) -> Any:
        found: dict[str, dict[str, dict[str, dict[str, float | None]]]] = {}
        for one in [one for one in self.cloud.configurations if one.free > 0]:
            kind = "spotPrice" if one.is_spot else "communityPrice" if one.community else "onDemand"
            places = found.setdefault(one.gpu, {}).setdefault(str(one.gpus), {})
            for place in ("cheapest", one.region):
                cell = places.setdefault(place, dict.fromkeys(("onDemand", "communityPrice", "spotPrice")))
                cell[kind] = min(one.price, cell[kind] or one.price)
        return found

    # --- pods -----------------------------------------------------------------------------------------------------

    def _list(self, request: Request, _: dict[str, Any]) -> Any:
        pods = [one for one in self.cloud.listed() if one.exists or self.cloud.quirks.lists_ended]
        return self._page(request, [self._row(one) for one in pods])

    def _page(self, request: Request, rows: Sequence[Any], limit: int = PAGE_MAX) -> Any:
        query = request.query_params
        offset, limit = _number(query.get("offset"), 0, "offset"), _number(query.get("limit"), limit, "limit")
        if not 1 <= limit <= PAGE_MAX or offset < 0:
            raise _unprocessable(("query", "limit"), f"Input should be between 1 and {PAGE_MAX}")
        found = rows[offset : offset + limit]
        self._require_whole(offset + len(found))
        total = len(rows) + self.cloud.quirks.total_lies
        return {"total_count": total, "offset": offset, "limit": limit, "data": found}

    def _statuses(self, request: Request, _: dict[str, Any]) -> Any:
        pods = [pod for pod in map(self.cloud.known, request.query_params.getlist("pod_ids")) if pod is not None]
        return {
            "data": [
                {
                    "podId": pod.machine_id,
                    "providerType": pod.sold.provider,
                    "status": pod.status,
                    self.cloud.quirks.cost_name: pod.price / MICRO,
                    **self._reach(pod),
                    **self._installation(pod),
                }
                for pod in pods
            ]
        }

    def _show(self, request: Request, _: dict[str, Any]) -> Any:
        pod = self.cloud.known(request.path_params["id"])
        if pod is None:
            raise RestRefusal(404, "Pod not found")
        return self._row(pod)

    def _history(self, request: Request, _: dict[str, Any]) -> Any:
        ended = [pod for pod in self.cloud.rented.values() if not pod.exists]
        return self._page(
            request,
            [
                {**_plain(self._row(pod)), "totalBilledPrice": self.cloud.billed(pod.machine_id) / MICRO}
                for pod in ended
            ],
        )

    def _delete(self, request: Request, _: dict[str, Any]) -> Any:
        return self._row(self.cloud.delete(request.path_params["id"]))

    def _create(self, _: Request, body: dict[str, Any]) -> Response:
        wish, upstream = body.get("pod"), body.get("provider")
        if not isinstance(wish, dict) or not isinstance(upstream, dict) or not is_text(upstream.get("type")):
            raise _unprocessable(("body", "pod"), "Field required")
        for name in body:
            if name not in ("pod", "provider", "disks", "team"):
                raise _unprocessable(("body", name), "Extra inputs are not permitted")
        for name in wish:
            if name not in _POD:
                raise _unprocessable(("body", "pod", name), "Extra inputs are not permitted")
        for name, fits in _POD.items():
            if (wish.get(name) is None and name in _REQUIRED) or (wish.get(name) is not None and not fits(wish[name])):
                raise _unprocessable(("body", "pod", name), "Input is invalid")
        if wish.get("image") == "custom_template" and wish.get("customTemplateId") not in self.cloud.templates:
            raise RestRefusal(404, "Template not found")
        pod = self.cloud.create(wish, upstream["type"])
        return as_json(self._row(pod), self.cloud.quirks.create_status)

    def _row(self, pod: PrimePod) -> Any:
        disk = pod.price / MICRO - pod.base
        row = {
            "id": pod.machine_id,
            "userId": "user-1",
            "name": pod.label,
            "providerType": pod.sold.provider,
            "gpuName": pod.sold.gpu,
            "gpuCount": pod.gpus,
            "socket": pod.sold.socket,
            "priceHr": pod.price / MICRO,
            "basePriceHr": pod.base,
            "stoppedPriceHr": disk,
            "provisioningPriceHr": pod.price / MICRO if self.cloud.quirks.bills_from == "order" else 0.0,
            "baseCurrency": pod.sold.currency,
            "status": pod.status,
            "createdAt": _instant(pod.launched_at),
            "updatedAt": _instant(self.cloud.clock.now()),
            "terminatedAt": _instant(pod.terminated_at),
            "teamId": None,
            "walletId": "wallet-1",
            "type": "HOSTED",
            "resources": {"disk": {"size": str(pod.disk_gb)}, "vcpus": None, "memory": None},
            "attachedResources": [],
            "environmentType": pod.body.get("image"),
            "jupyterPassword": JUPYTER_PASSWORD,
            "customTemplateId": pod.body.get("customTemplateId"),
            "isSpot": pod.is_spot,
            "autoRestart": pod.body.get("autoRestart"),
            **self._reach(pod),
            **self._installation(pod),
        }
        return edited(row, self.cloud.quirks.edit_row.get(pod.machine_id, {}))

    def _installation(self, pod: PrimePod) -> dict[str, Any]:
        says, is_done = self.cloud.quirks.installation, pod.progress == 100
        return {
            "installationStatus": ("FINISHED" if is_done else "PENDING") if says != "progress" else None,
            "installationProgress": pod.progress if says != "status" else None,
            "installationFailure": "upstream failed" if pod.status == "ERROR" else None,
        }

    def _reach(self, pod: PrimePod) -> dict[str, Any]:
        login = self.cloud.ssh_address(pod) if pod.status == "ACTIVE" else None
        ip = login.partition("@")[2].partition(" ")[0] if login else None
        forms: dict[str, Callable[[str | None], Any]] = {
            "text": lambda one: one,
            "list": lambda one: [one] if one else [],
            "nothing": lambda one: [None],
        }
        form = forms[self.cloud.quirks.address]
        ports = [{"internal": "22", "external": "22", "protocol": "TCP", "usedBy": "SSH", "description": "SSH"}]
        return {"sshConnection": form(login), "ip": form(ip), "primePortMapping": ports if login else []}

    # --- money ----------------------------------------------------------------------------------------------------

    def _wallet(self, request: Request, _: dict[str, Any]) -> Any:
        quirks, known_until = self.cloud.quirks, self.cloud.clock.now() - self.cloud.quirks.billing_lag
        rows: list[dict[str, Any]] = []
        for pod in self.cloud.rented.values():
            hours = [known_until]
            while quirks.billing_rows == "hour" and hours[0] - _HOUR > pod.launched_at:
                hours.insert(0, hours[0] - _HOUR)
            before = 0
            for until in hours:
                amount = self.cloud.billed(pod.machine_id, until)
                if amount > before:
                    rows.append(_billing(pod, len(rows), until, (amount - before) / MICRO))
                before = amount
        page = self._page(request, rows[::-1], limit=20)
        return {
            "wallet_id": "wallet-1",
            "team_id": None,
            "balance_usd": self.cloud.balance(),
            "currency": "USD",
            "total_billings": page["total_count"],
            "recent_billings": page["data"],
        }


def _billing(pod: PrimePod, number: int, at: datetime, amount: float) -> dict[str, Any]:
    return {
        "id": f"billing-{number}",
        "created_at": _instant(pod.launched_at),
        "updated_at": _instant(at),
        "last_billed_at": _instant(at),
        "amount_usd": amount,
        "currency": "USD",
        "resource_type": "pod",
        "resource_id": pod.machine_id,
    }


def _plain(row: Any) -> dict[str, Any]:
    return row if isinstance(row, dict) else {}


def _security(one: PrimeConfiguration) -> str:
    return "community_cloud" if one.community else "secure_cloud"


def _instant(at: datetime | None) -> str | None:
    return at.strftime("%Y-%m-%dT%H:%M:%S.%fZ") if at else None


def _number(text: str | None, default: int, name: str) -> int:
    try:
        return default if text is None else int(text)
    except ValueError:
        raise _unprocessable(("query", name), "Input should be a valid integer") from None


def _unprocessable(place: tuple[str, ...], text: str) -> RestRefusal:
    return RestRefusal(422, text, detail=[{"type": "value_error", "loc": list(place), "msg": text}])


def _variables(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(row, dict) and is_text(row.get("key")) and isinstance(row.get("value"), str) for row in value
    )


def _amount(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value >= 0


_REQUIRED: Final = ("cloudId", "gpuType", "socket", "gpuCount")
_POD: Final[Mapping[str, Callable[[Any], bool]]] = {
    **dict.fromkeys(("name", "cloudId", "gpuType", "socket", "image", "customTemplateId"), is_text),
    **dict.fromkeys(("dataCenterId", "country", "security", "sshKeyId", "jupyterPassword"), is_text),
    **dict.fromkeys(("gpuCount", "diskSize", "vcpus", "memory", "prepaidForHr"), lambda value: is_count(value, 1)),
    "maxPrice": _amount,
    "envVars": _variables,
    "autoRestart": lambda value: isinstance(value, bool),
}
