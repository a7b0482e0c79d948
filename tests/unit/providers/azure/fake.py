"""An Azure on loopback: the login, the price list, Azure Resource Manager and the metadata service at one address.

cloud = AzureCloud(root, clock=clock)
cloud.stock(*some_sizes())
with serving(Faults(AzureApi(cloud), classify=AzureApi.classify)) as served:
    ...     # served.url stands for management.azure.com, login.microsoftonline.com and prices.azure.com

`cloud` has `tenant`, `client_id`, `client_secret` and `subscription`; `issue_token` is a login without a request. A
resource group, network and subnet have to be made first, by requests. Methods: `stock`, `sell_out`, `set_price`,
`fail_next_boot`, `evict`, `give_notice`, `end_by_itself`, `vanish`, `rename`, `add_foreign`; `billed` and `spent_usd`
are the bill. The knobs are those of `RestQuirks` and `AzureQuirks`. Scheduled Events of a machine are at
`/imds/NAME/metadata/scheduledevents`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any, Final
from urllib.parse import parse_qs, urlencode

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from spotd_providers.testkit.serve import Call, RecordedRequest
from tests.fakes.rest import Handler, RestApi, RestRefusal, as_json, bearer, edited, is_text
from tests.unit.providers.azure.fake_cloud import AzureCloud
from tests.unit.providers.azure.fake_queries import graph_rows, price_rows, row_filter, score_rows
from tests.unit.providers.azure.fake_records import AzureQuirks, AzureResource, AzureSize, AzureVm, some_sizes
from tests.unit.providers.azure.fake_schema import require_valid, sku_row, time_text, view_of

__all__ = ["BLOB_SECRET", "AzureApi", "AzureCloud", "AzureQuirks", "AzureSize", "AzureVm", "some_sizes"]

BLOB_SECRET: Final = "fake-azure-sas-3c1d"
"""Part of the addresses of console logs: they are credentials."""
COMPUTE_VERSIONS: Final = frozenset({"2026-04-01", "2026-03-03", "2022-11-01", "2021-07-01"})
_SUB: Final = "/subscriptions/(?P<sub>[^/]+)"
_GROUP: Final = f"{_SUB}/resourcegroups/(?P<group>[^/]+)"
_COMPUTE: Final = "/providers/microsoft.compute"
_VMS: Final = f"{_GROUP}{_COMPUTE}/virtualmachines"
_KINDS: Final = {
    "microsoft.compute/disks": "Microsoft.Compute/disks",
    "microsoft.network/virtualnetworks": "Microsoft.Network/virtualNetworks",
    "microsoft.network/networksecuritygroups": "Microsoft.Network/networkSecurityGroups",
    "microsoft.network/networkinterfaces": "Microsoft.Network/networkInterfaces",
    "microsoft.network/publicipaddresses": "Microsoft.Network/publicIPAddresses",
}
_NETWORK: Final = "(?P<kind>microsoft.network/virtualnetworks)"
_LOGIN: Final = re.compile(r"/(?P<tenant>[^/]+)/oauth2/v2.0/token")
_IMDS: Final = re.compile(r"/imds/(?P<name>[^/]+)/metadata/scheduledevents")
_PRICES: Final = "/api/retail/prices"
_BLOB: Final = re.compile(r"/blob/(?P<id>[^/]+)/console.log")


class AzureApi(RestApi[AzureCloud]):
    """The ASGI application."""

    base_path = ""

    @staticmethod
    def classify(request: RecordedRequest) -> Call:
        path = request.path.lower()
        if path == _PRICES or path.endswith(
            (f"{_COMPUTE}/skus", "/placementscores/spot/generate", ".resourcegraph/resources")
        ):
            return Call.OFFERS
        if path.endswith("/usages"):
            return Call.ACCOUNT
        if path.endswith(f"{_COMPUTE}/virtualmachines"):
            return Call.LIST
        if re.fullmatch(f"{_VMS}/[^/]+", path) is None:
            return Call.OTHER
        return {"GET": Call.LIST, "PUT": Call.LAUNCH, "DELETE": Call.TERMINATE}.get(request.method, Call.OTHER)

    def _routes(self) -> Mapping[str, Mapping[str, Handler]]:
        """By pattern: Azure compares paths without regard to case."""
        kinds = "|".join(_KINDS).replace(".", r"\.")
        return {
            _SUB: {"GET": self._subscription},
            _GROUP: {"GET": self._group, "PUT": self._put_group},
            f"{_GROUP}/resources": {"GET": self._resources},
            f"{_GROUP}/providers/(?P<kind>{kinds})": {"GET": self._resources},
            f"{_GROUP}/providers/(?P<kind>{kinds})/(?P<name>[^/]+)": {
                "GET": self._resource, "PUT": self._put_resource, "DELETE": self._drop_resource,
            },
            f"{_GROUP}/providers/{_NETWORK}/(?P<name>[^/]+)/subnets/(?P<subnet>[^/]+)": {
                "GET": self._resource, "PUT": self._put_resource,
            },
            f"{_SUB}{_COMPUTE}/skus": {"GET": self._skus},
            f"{_SUB}{_COMPUTE}/virtualmachines": {"GET": self._list},
            f"{_SUB}{_COMPUTE}/locations/(?P<region>[^/]+)/usages": {"GET": self._usages},
            f"{_SUB}{_COMPUTE}/locations/(?P<region>[^/]+)/operations/(?P<id>[^/]+)": {"GET": self._operation},
            f"{_SUB}{_COMPUTE}/locations/(?P<region>[^/]+)/placementscores/spot/generate": {"POST": self._scores},
            "/providers/microsoft.resourcegraph/resources": {"POST": self._graph},
            f"{_SUB}/providers/microsoft.insights/eventtypes/management/values": {"GET": self._activity},
            _VMS: {"GET": self._list},
            f"{_VMS}/(?P<name>[^/]+)": {"GET": self._show, "PUT": self._put, "DELETE": self._delete},
            f"{_VMS}/(?P<name>[^/]+)/retrievebootdiagnosticsdata": {"POST": self._console},
            f"{_VMS}/(?P<name>[^/]+)/simulateeviction": {"POST": self._simulate},
        }  # fmt: skip

    def _built(self) -> Starlette:
        self._by_pattern = [(re.compile(pattern), methods) for pattern, methods in self._routes().items()]
        methods = ["GET", "POST", "PUT", "PATCH", "DELETE"]
        return Starlette(routes=[Route("/{rest:path}", self.endpoint(self._dispatch), methods=methods)])

    def _dispatch(self, request: Request, content: bytes) -> Response:
        path = request.url.path
        plain: tuple[tuple[re.Pattern[str], str, Callable[[Request, bytes], Response]], ...] = (
            (_LOGIN, "POST", self._login),
            (_IMDS, "GET", self._events),
            (_IMDS, "POST", self._events),
            (_BLOB, "GET", self._blob),
            (re.compile(_PRICES), "GET", self._prices),
        )
        for pattern, method, handle in plain:
            if (found := pattern.fullmatch(path)) is not None and request.method == method:
                request.scope["path_params"] = found.groupdict()
                try:
                    self._admit(request)
                    return handle(request, content)
                except RestRefusal as refusal:
                    return self._refused(refusal)
        for pattern, methods in self._by_pattern:
            if (found := pattern.fullmatch(path.rstrip("/").lower())) is not None:
                # The names in the case in which they were asked for.
                spans = {name: found.span(name) for name in found.groupdict()}
                request.scope["path_params"] = {name: path[start:end] for name, (start, end) in spans.items()}
                return self._answer(methods, request, content)
        return self._answer(None, request, content)

    def _authenticate(self, request: Request) -> None:
        path, version = request.url.path.lower(), request.query_params.get("api-version")
        expires = self.cloud.tokens.get(bearer(request))
        if expires is None:
            raise RestRefusal(401, "Authentication failed. The token is invalid", code="AuthenticationFailed")
        if expires <= self.cloud.clock.now():
            raise RestRefusal(401, "The access token has expired", code="ExpiredAuthenticationToken")
        if version is None:
            raise RestRefusal(400, "The api-version query parameter is required", code="MissingApiVersionParameter")
        known = COMPUTE_VERSIONS if _COMPUTE in path else None
        if re.fullmatch(r"20[12]\d-\d\d-\d\d(-preview)?", version) is None or (known and version not in known):
            raise RestRefusal(400, f"The api-version {version!r} is invalid", code="InvalidApiVersionParameter")
        place = re.match(_SUB, path)
        if place is not None and place["sub"] != self.cloud.subscription:
            raise RestRefusal(404, "The subscription could not be found", code="SubscriptionNotFound")
        if any(part in path for part in self.cloud.quirks.refused_paths):
            message = "The client does not have authorization to perform this action"
            raise RestRefusal(403, message, code="AuthorizationFailed")
        found = re.match(_GROUP, path)
        if found is not None and found["group"] not in self.cloud.groups and not re.fullmatch(_GROUP, path):
            raise RestRefusal(404, "Resource group could not be found", code="ResourceGroupNotFound")

    def _refused(self, refusal: RestRefusal) -> Response:
        code = {"": "Error", "not_found": "ResourceNotFound"}.get(refusal.code, refusal.code)
        if refusal.status == 429:
            code = "TooManyRequests"
        error = {"code": code, "message": refusal.message, "details": refusal.detail or []}
        return as_json({"error": error}, refusal.status, refusal.headers)

    # --- the login, and what needs none ---------------------------------------------------------------------------

    def _login(self, request: Request, content: bytes) -> Response:
        cloud, form = self.cloud, {name: values[-1] for name, values in parse_qs(content.decode()).items()}
        wrong = None
        if request.path_params["tenant"] != cloud.tenant:
            wrong = (400, "invalid_request")
        elif form.get("grant_type") != "client_credentials":
            wrong = (400, "unsupported_grant_type")
        elif not str(form.get("scope")).endswith("/.default"):
            wrong = (400, "invalid_scope")
        elif (form.get("client_id"), form.get("client_secret")) != (cloud.client_id, cloud.client_secret):
            wrong = (401, "invalid_client")
        if wrong is not None:
            return as_json({"error": wrong[1], "error_description": "AADSTS7000215: refused"}, wrong[0])
        says = cloud.quirks.expires_in_says
        lives = int(cloud.quirks.token_lives.total_seconds()) if says is None else says
        return as_json({"token_type": "Bearer", "expires_in": lives, "access_token": cloud.issue_token()})

    def _prices(self, request: Request, _: bytes) -> Response:
        query = request.query_params
        if "api-version" not in query:
            raise RestRefusal(400, "api-version is required", code="MissingApiVersionParameter")
        keep, quirks = row_filter(query.get("$filter", "")), self.cloud.quirks
        rows = [row for row in price_rows(self.cloud.sizes.values()) if keep(row)]
        rows = [edited(row, quirks.edit_offer.get(row["skuId"], {})) for row in rows]
        start = int(query.get("$skip", "0"))
        end, following = start + quirks.price_rows, None
        if end < len(rows):
            following = f"{self.cloud.base_url}{_PRICES}?{urlencode({**query, '$skip': end})}"
        page = rows[start:end]
        return as_json({"BillingCurrency": "USD", "Items": page, "NextPageLink": following, "Count": len(page)})

    def _events(self, request: Request, _: bytes) -> Response:
        vm = self.cloud.named(request.path_params["name"])
        if request.headers.get("metadata") != "true" or "api-version" not in request.query_params or vm is None:
            return as_json({"error": "Bad request"}, 400)
        if request.method == "POST" or vm.notice_at is None:
            return as_json({"DocumentIncarnation": 1, "Events": []})
        event = {
            "EventId": vm.machine_id,
            "EventType": "Preempt",
            "ResourceType": "VirtualMachine",
            "Resources": [vm.name],
            "EventStatus": "Scheduled",
            "NotBefore": vm.notice_at.strftime("%a, %d %b %Y %H:%M:%S GMT"),
            "DurationInSeconds": -1,
            "EventSource": "Platform",
        }
        return as_json({"DocumentIncarnation": 2, "Events": [event]})

    def _blob(self, request: Request, _: bytes) -> Response:
        machine = request.path_params["id"]
        vm = self.cloud.rented.get(machine)
        if vm is None or not vm.exists or request.query_params.get("sig") != BLOB_SECRET:
            return Response("<Error><Code>AuthenticationFailed</Code></Error>", status_code=403)
        lines = self.cloud.machines.console(machine, lines=10_000) if machine in self.cloud.machines.ids() else []
        return Response("".join(f"{line}\n" for line in lines), media_type="text/plain")

    # --- subscription, group and what lies in it ------------------------------------------------------------------

    def _subscription(self, _: Request, __: dict[str, Any]) -> Any:
        number = self.cloud.subscription
        return {"id": f"/subscriptions/{number}", "subscriptionId": number, "displayName": "lab", "state": "Enabled"}

    def _group_of(self, request: Request) -> str:
        name = str(request.path_params["group"])
        return name.upper() if self.cloud.quirks.upper_group else name

    def _group(self, request: Request, _: dict[str, Any]) -> Any:
        name = request.path_params["group"]
        if name.lower() not in self.cloud.groups:
            raise RestRefusal(404, f"Resource group {name!r} could not be found", code="ResourceGroupNotFound")
        place = f"/subscriptions/{self.cloud.subscription}/resourceGroups/{name}"
        region = self.cloud.groups[name.lower()]
        return {"id": place, "name": name, "location": region, "properties": {"provisioningState": "Succeeded"}}

    def _put_group(self, request: Request, body: dict[str, Any]) -> Response:
        name, region = request.path_params["group"].lower(), body.get("location")
        if not is_text(region):
            raise RestRefusal(400, "The location property is required", code="LocationRequired")
        is_new = name not in self.cloud.groups
        if not is_new and self.cloud.groups[name] != region:
            raise RestRefusal(409, "The group exists in another location", code="InvalidResourceGroupLocation")
        self.cloud.groups[name] = str(region)
        return as_json(self._group(request, {}), 201 if is_new else 200)

    def _resource_id(self, request: Request) -> tuple[str, str]:
        kind, name = _KINDS[request.path_params["kind"].lower()], request.path_params["name"]
        subnet = request.path_params.get("subnet")
        name = name if subnet is None else f"{name}/subnets/{subnet}"
        return kind, name

    def _resource(self, request: Request, _: dict[str, Any]) -> Any:
        kind, name = self._resource_id(request)
        found = self.cloud.resources.get(f"{kind}/{name}".lower())
        if found is None:
            raise RestRefusal(404, f"The resource {kind}/{name} was not found", code="ResourceNotFound")
        return self._resource_row(request, found)

    def _put_resource(self, request: Request, body: dict[str, Any]) -> Response:
        kind, name = self._resource_id(request)
        region = body.get("location")
        if "/subnets/" in name:
            network = self.cloud.resources.get(f"{kind}/{name.partition('/')[0]}".lower())
            if network is None:
                raise RestRefusal(404, "The network was not found", code="ResourceNotFound")
            region = network.region
        if not is_text(region):
            raise RestRefusal(400, "The location property is required", code="LocationRequired")
        is_new = f"{kind}/{name}".lower() not in self.cloud.resources
        row = AzureResource(kind=kind, name=name, region=str(region), body=body)
        self.cloud.resources[f"{kind}/{name}".lower()] = row
        for subnet in (body.get("properties") or {}).get("subnets") or ():
            inner = AzureResource(kind=kind, name=f"{name}/subnets/{subnet['name']}", region=str(region), body=subnet)
            self.cloud.resources[f"{kind}/{inner.name}".lower()] = inner
        return as_json(self._resource_row(request, row), 201 if is_new else 200)

    def _drop_resource(self, request: Request, _: dict[str, Any]) -> Response:
        kind, name = self._resource_id(request)
        return Response(status_code=202 if self.cloud.drop(f"{kind}/{name}".lower()) else 204)

    def _resources(self, request: Request, _: dict[str, Any]) -> Any:
        kind = request.path_params.get("kind")
        rows = [one for one in self.cloud.resources.values() if "/subnets/" not in one.name]
        found = [self._resource_row(request, one) for one in rows if kind is None or one.kind == _KINDS[kind.lower()]]
        if kind is None:
            found += [self._row(request, vm) for vm in self.cloud.listed() if vm.exists]
        query = request.query_params
        start = int(query.get("$skiptoken", "0"))
        end = start + self.cloud.quirks.resource_rows
        link = f"{self.cloud.base_url}{request.url.path}?{urlencode({**query, '$skiptoken': end})}"
        return {"value": found[start:end], **({"nextLink": link} if end < len(found) else {})}

    def _resource_row(self, request: Request, one: AzureResource) -> dict[str, Any]:
        place = f"/subscriptions/{self.cloud.subscription}/resourceGroups/{self._group_of(request)}"
        return {
            "id": f"{place}/providers/{one.kind}/{one.name}",
            "name": one.name.rpartition("/")[2],
            "type": one.kind,
            "location": one.region,
            "tags": one.body.get("tags") or {},
            "properties": {**(one.body.get("properties") or {}), "provisioningState": "Succeeded"},
        }

    # --- what is sold ---------------------------------------------------------------------------------------------

    def _skus(self, request: Request, _: dict[str, Any]) -> Any:
        found = re.fullmatch(r"location eq '([^']+)'", request.query_params.get("$filter", "").strip())
        wanted = found[1].lower() if found else None
        edits = self.cloud.quirks.edit_offer
        rows = [
            edited(sku_row(size, region), edits.get(f"{size.name}:{region}", {}))
            for size in self.cloud.sizes.values()
            for region in size.prices
            if wanted in (None, region)
        ]
        disk = {
            "resourceType": "disks",
            "name": "Premium_LRS",
            "locations": [wanted or "westeurope"],
            "capabilities": [],
        }
        return {"value": [disk, *rows]}

    def _usages(self, request: Request, _: dict[str, Any]) -> Any:
        region, quirks = request.path_params["region"], self.cloud.quirks
        rows = (("lowPriorityCores", True, quirks.cores_spot), ("cores", False, quirks.cores))
        return {
            "value": [
                {
                    "name": {"value": name, "localizedValue": name},
                    "currentValue": self.cloud.vcpus_in_use(region, is_spot=is_spot),
                    "limit": limit,
                    "unit": "Count",
                }
                for name, is_spot, limit in rows
            ]
        }

    def _require_preview(self) -> None:
        status = self.cloud.quirks.unpreviewed
        if status is not None:
            raise RestRefusal(status, "This feature is not enabled", code="FeatureNotEnabled")

    def _scores(self, _: Request, body: dict[str, Any]) -> Any:
        self._require_preview()
        return {"placementScores": score_rows(self.cloud.sizes, body, has_quota=self.cloud.quirks.cores_spot > 0)}

    def _graph(self, _: Request, body: dict[str, Any]) -> Any:
        self._require_preview()
        if body.get("subscriptions") not in (None, [self.cloud.subscription]) or not is_text(body.get("query"), 8000):
            raise RestRefusal(400, "The query or its subscriptions are invalid", code="BadRequest")
        rows = graph_rows(str(body["query"]), self.cloud.sizes.values(), self.cloud.clock.now())
        return {"totalRecords": len(rows), "count": len(rows), "data": rows, "resultTruncated": "false"}

    # --- machines -------------------------------------------------------------------------------------------------

    def _list(self, request: Request, _: dict[str, Any]) -> Any:
        quirks, query = self.cloud.quirks, request.query_params
        start = int(query.get("$skiptoken", "0"))
        if start and quirks.breaks_list:
            raise RestRefusal(503, "The server is busy", code="ServerBusy")
        vms = [one for one in self.cloud.listed() if one.exists]
        end = start + quirks.list_rows
        page: list[Any] = []
        for vm in vms[start:end]:
            row = self._row(request, vm)
            if query.get("statusOnly") == "true":
                row = {name: row[name] for name in ("id", "name", "type", "location")}
                row["properties"] = {"vmId": vm.machine_id, "instanceView": view_of(vm)}
            page.append(edited(row, quirks.edit_row.get(vm.machine_id, {})))
        if end < len(vms) or (quirks.breaks_list and not start):
            link = f"{self.cloud.base_url}{request.url.path}?{urlencode({**query, '$skiptoken': end})}"
            return {"value": page, "nextLink": link}
        return {"value": page}

    def _require(self, request: Request) -> AzureVm:
        vm = self.cloud.shown(request.path_params["name"])
        if vm is None:
            message = f"The Resource Microsoft.Compute/virtualMachines/{request.path_params['name']} was not found"
            raise RestRefusal(404, message, code="ResourceNotFound")
        return vm

    def _show(self, request: Request, _: dict[str, Any]) -> Any:
        vm = self._require(request)
        row = self._row(request, vm)
        if request.query_params.get("$expand") == "instanceView":
            row["properties"]["instanceView"] = view_of(vm)
        return edited(row, self.cloud.quirks.edit_row.get(vm.machine_id, {}))

    def _row(self, request: Request, vm: AzureVm) -> dict[str, Any]:
        group = request.path_params.get("group", next(iter(self.cloud.groups), "spotd"))
        group = group.upper() if self.cloud.quirks.upper_group else group
        given = vm.body["properties"]
        secret_free = {name: value for name, value in given.get("osProfile", {}).items() if name != "customData"}
        place = f"/subscriptions/{self.cloud.subscription}/resourceGroups/{group}"
        return {
            "id": f"{place}/providers/Microsoft.Compute/virtualMachines/{vm.name}",
            "name": vm.name,
            "type": "Microsoft.Compute/virtualMachines",
            "location": vm.region,
            **({"zones": [vm.zone]} if vm.zone else {}),
            "tags": vm.tags,
            "properties": {
                **given,
                "osProfile": secret_free,
                "hardwareProfile": {"vmSize": vm.size.name},
                "priority": "Spot" if vm.is_spot else "Regular",
                "vmId": vm.machine_id,
                "provisioningState": vm.provisioning_state,
                "timeCreated": time_text(vm.launched_at),
            },
        }

    def _accepted(self, status: int, region: str, operation: str | None, body: Any = None) -> Response:
        headers = {}
        if operation is not None:
            place = f"/subscriptions/{self.cloud.subscription}{_COMPUTE}/locations/{region}/operations/{operation}"
            headers = {
                "azure-asyncoperation": f"{self.cloud.base_url}{place}?api-version=2026-04-01",
                "retry-after": "10",
            }
        return Response(status_code=status, headers=headers) if body is None else as_json(body, status, headers)

    def _put(self, request: Request, body: dict[str, Any]) -> Response:
        name = request.path_params["name"]
        require_valid(name, body, self.cloud.resources)
        is_known = self.cloud.named(name) is not None
        vm, operation = self.cloud.put(name, body, is_new_only=request.headers.get("if-none-match") == "*")
        return self._accepted(200 if is_known else 201, vm.region, operation, self._row(request, vm))

    def _delete(self, request: Request, _: dict[str, Any]) -> Response:
        vm = self.cloud.named(request.path_params["name"])
        operation = self.cloud.delete(request.path_params["name"])
        if vm is None or operation is None:
            return Response(status_code=204)
        return self._accepted(202, vm.region, operation)

    def _operation(self, request: Request, _: dict[str, Any]) -> Any:
        found = self.cloud.operations.get(request.path_params["id"])
        if found is None:
            raise RestRefusal(404, "The operation was not found", code="OperationNotFound")
        error = {} if found.error is None else {"error": found.error}
        return {"name": request.path_params["id"], "status": found.status, **error}

    def _console(self, request: Request, _: dict[str, Any]) -> Any:
        vm = self._require(request)
        is_on = vm.body["properties"].get("diagnosticsProfile", {}).get("bootDiagnostics", {}).get("enabled")
        if not is_on:
            raise RestRefusal(409, "Boot diagnostics is not enabled", code="BootDiagnosticsNotEnabled")
        link = f"{self.cloud.base_url}/blob/{vm.machine_id}"
        return {
            "serialConsoleLogBlobUri": f"{link}/console.log?sig={BLOB_SECRET}",
            "consoleScreenshotBlobUri": f"{link}/screen.bmp?sig={BLOB_SECRET}",
        }

    def _simulate(self, request: Request, _: dict[str, Any]) -> Response:
        vm = self._require(request)
        if not vm.is_spot:
            raise RestRefusal(409, "The machine is not a Spot machine", code="OperationNotAllowed")
        self.cloud.simulate_eviction(vm)
        return Response(status_code=204)

    def _activity(self, request: Request, _: dict[str, Any]) -> Any:
        text = request.query_params.get("$filter", "")
        since = re.search(r"eventTimestamp ge '([^']+)'", text)
        about = re.search(r"resourceUri eq '([^']+)'", text)
        if since is None:
            raise RestRefusal(400, "The filter must have eventTimestamp", code="BadRequest")
        start = datetime.fromisoformat(since[1].replace("Z", "+00:00"))
        shown_until = self.cloud.clock.now() - self.cloud.quirks.log_lag
        name = about[1].rpartition("/")[2].lower() if about else None
        place = f"/subscriptions/{self.cloud.subscription}/resourceGroups/{next(iter(self.cloud.groups), 'spotd')}"
        return {
            "value": [
                {
                    "eventTimestamp": time_text(at),
                    "operationName": {"value": operation, "localizedValue": operation},
                    "status": {"value": "Succeeded"},
                    "caller": caller,
                    "resourceId": f"{place}/providers/Microsoft.Compute/virtualMachines/{machine}",
                }
                for at, operation, machine, caller in reversed(self.cloud.log)
                if start <= at <= shown_until and name in (None, machine.lower())
            ]
        }
