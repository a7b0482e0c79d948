"""A Google Cloud on loopback: Compute Engine, the price catalogue and the token endpoint, on one address.

cloud = GoogleCloud(root, clock=clock)
cloud.stock(*some_kinds())
with serving(Faults(GoogleApi(cloud), classify=GoogleApi.classify)) as served:
    served.url + "/compute/v1"      # compute.googleapis.com/compute/v1; /compute/beta is not there
    served.url + "/v1/services"     # cloudbilling.googleapis.com/v1/services: with cloud.api_key or a token
    served.url + "/token"           # token_uri of a service account; any assertion is taken, its signature is not read
    served.url + "/metadata/NAME"   # stands for metadata.google.internal of the instance of this name

Methods of the cloud: `stock`, `sell_out`, `raise_price`, `price`, `preempt`, `give_notice`, `fail_host`, `vanish`,
`rename` (another status), `add_foreign`, `grant_token`, `break_auth`, `named` (an instance by its name), `billed` and
`spent_usd`. The knobs are those of `RestQuirks` and `GoogleQuirks`. What the cloud holds is in `rented` (by numeric
id), `disks`, `operations` and `kinds`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, Final
from urllib.parse import parse_qs

from starlette.requests import Request
from starlette.responses import Response

from spotd_providers.testkit.serve import Call, RecordedRequest
from tests.fakes.rest import Handler, RestApi, RestRefusal, as_json, bearer, edited
from tests.unit.providers.googlecloud.catalog import (
    COMPUTE_SERVICE,
    IMAGE_PROJECT,
    IMAGES,
    ZONES,
    GoogleQuirks,
    Kind,
    region_of,
    sku_rows,
    some_kinds,
)
from tests.unit.providers.googlecloud.checks import filtered, gpus_attached
from tests.unit.providers.googlecloud.cloud import OFF, Disk, GoogleCloud, GoogleInstance, Operation, missing

__all__ = ["Disk", "GoogleApi", "GoogleCloud", "GoogleInstance", "GoogleQuirks", "Kind", "Operation", "some_kinds"]

COMPUTE: Final = "/compute/v1"
PROJECT: Final = COMPUTE + "/projects/{project}"
ZONE: Final = PROJECT + "/zones/{zone}"
HOST: Final = "https://www.googleapis.com"
PAGE_ROWS: Final = 500
Row = dict[str, Any]


class GoogleApi(RestApi[GoogleCloud]):
    """The ASGI application."""

    base_path = ""

    @staticmethod
    def classify(request: RecordedRequest) -> Call:
        path = request.path
        if path.startswith("/v1/services") or re.search(r"/(machineTypes|regions|zones)(/[^/]+)?$|/advice/", path):
            return Call.OFFERS
        if re.search(r"/instances(/[^/]+)?$", path):
            by_method = {"GET": Call.LIST, "POST": Call.LAUNCH, "DELETE": Call.TERMINATE}
            return by_method.get(request.method, Call.OTHER)
        return Call.ACCOUNT if re.fullmatch(COMPUTE + r"/projects/[^/]+", path) else Call.OTHER

    def _routes(self) -> Mapping[str, Mapping[str, Handler]]:
        return {
            "/token": {"POST": self._token},
            "/v1/services/{service}/skus": {"GET": self._skus},
            "/metadata/{name}/computeMetadata/v1/instance/preempted": {"GET": self._preempted},
            PROJECT: {"GET": self._project},
            PROJECT + "/regions": {"GET": lambda request, _: self._page(request, [self._region(one) for one in ZONES])},
            PROJECT + "/regions/{region}": {"GET": self._one_region},
            PROJECT + "/regions/{region}/advice/capacity": {"POST": self._capacity},
            PROJECT + "/regions/{region}/advice/capacityHistory": {"POST": self._capacity_history},
            PROJECT + "/zones": {"GET": lambda request, _: self._page(request, [self._zone(one) for one in _zones()])},
            PROJECT + "/aggregated/machineTypes": {"GET": self._by_zone("machineTypes", self._types)},
            PROJECT + "/aggregated/instances": {"GET": self._by_zone("instances", self._instances)},
            PROJECT + "/aggregated/disks": {"GET": self._by_zone("disks", self._disks)},
            PROJECT + "/global/images/family/{family}": {"GET": self._image},
            ZONE + "/machineTypes": {"GET": self._in_zone(self._types)},
            ZONE + "/acceleratorTypes": {"GET": self._in_zone(self._accelerators)},
            ZONE + "/machineTypes/{name}": {"GET": self._in_zone(self._types, is_one=True)},
            ZONE + "/instances": {"GET": self._in_zone(self._instances), "POST": self._insert},
            ZONE + "/instances/{name}": {"GET": self._show, "DELETE": self._delete},
            ZONE + "/instances/{name}/serialPort": {"GET": self._serial_port},
            ZONE + "/instances/{name}/simulateMaintenanceEvent": {"POST": self._simulate},
            ZONE + "/disks": {"GET": self._in_zone(self._disks)},
            ZONE + "/disks/{name}": {"GET": self._in_zone(self._disks, is_one=True), "DELETE": self._delete_disk},
            ZONE + "/operations": {"GET": self._in_zone(self._operations)},
            ZONE + "/operations/{name}": {"GET": self._operation},
            ZONE + "/operations/{name}/wait": {"POST": self._wait},
        }

    def _refused(self, refusal: RestRefusal) -> Response:
        if isinstance(refusal.detail, dict):
            return as_json(refusal.detail, refusal.status)
        reason = {"not_found": "notFound", "invalid_request": "parseError"}.get(refusal.code, refusal.code)
        inner = {"message": refusal.message, "domain": "global", "reason": reason or "backendError"}
        words = {401: "UNAUTHENTICATED", 403: "PERMISSION_DENIED", 404: "NOT_FOUND", 429: "RESOURCE_EXHAUSTED"}
        error: Row = {"code": refusal.status, "message": refusal.message, "errors": [inner]}
        if refusal.status in words:
            error["status"] = words[refusal.status]
        return as_json({"error": error}, refusal.status, refusal.headers)

    # --- tokens ---------------------------------------------------------------------------------------------------

    def _answer(self, methods: Mapping[str, Handler] | None, request: Request, content: bytes) -> Response:
        if request.url.path == "/token":
            request.state.form = {name: values[0] for name, values in parse_qs(content.decode("latin-1")).items()}
            content = b""
        return super()._answer(methods, request, content)

    def _authenticate(self, request: Request) -> None:
        path = request.url.path
        if path == "/token" or path.startswith("/metadata/"):
            return
        if path.startswith("/v1/services") and request.query_params.get("key") == self.cloud.api_key:
            return
        expires = self.cloud.access.get(bearer(request))
        if expires is None or expires <= self.cloud.clock.now():
            raise RestRefusal(401, "Request had invalid authentication credentials.", code="authError")
        project = request.url.path.removeprefix(COMPUTE + "/projects/").partition("/")[0]
        if path.startswith(COMPUTE) and project not in (self.cloud.project, IMAGE_PROJECT):
            text = f"Required 'compute.projects.get' permission for 'projects/{project}'"
            raise RestRefusal(403, text, code="forbidden")
        if any(path.endswith(one) for one in self.cloud.quirks.silent_paths):
            raise RestRefusal(503, "Backend error", code="backendError")

    def _accelerators(self, zone: str) -> list[Row]:
        link = self._link(f"zones/{zone}")
        return [{"kind": "compute#acceleratorType", "name": one, "zone": link} for one in self.cloud.quirks.attachable]

    def _token(self, request: Request, _: Row) -> Any:
        form = request.state.form
        is_jwt = form.get("grant_type") == "urn:ietf:params:oauth:grant-type:jwt-bearer"
        if not (is_jwt and form.get("assertion", "").count(".") == 2 and self.cloud.takes_assertions):
            detail = {"error": "invalid_grant", "error_description": "Invalid JWT Signature."}
            raise RestRefusal(400, "invalid_grant", detail=detail)
        return {"access_token": self.cloud.grant_token(), "expires_in": 3599, "token_type": "Bearer"}

    # --- offers ---------------------------------------------------------------------------------------------------

    def _skus(self, request: Request, _: Row) -> Any:
        if request.path_params["service"] != COMPUTE_SERVICE:
            raise missing(f"services/{request.path_params['service']}")
        rows = sku_rows(self.cloud.families, self.cloud.attached)
        edits = self.cloud.quirks.edit_offer
        rows = [edited(row, edits.get(row["description"], {})) for row in rows]
        page, token = self._cut(request, rows, "pageSize", 5000)
        return {"skus": page, "nextPageToken": token or ""}

    def _project(self, _: Request, __: Row) -> Any:
        quota = self.cloud.quirks.quota_gpus
        used = sum(one.gpus for one in self.cloud.rented.values() if one.exists)
        row = {"metric": "GPUS_ALL_REGIONS", "limit": 64.0 if quota is None else float(quota), "usage": float(used)}
        return {"kind": "compute#project", "name": self.cloud.project, "quotas": [row]}

    def _region(self, region: str) -> Row:
        quotas = [{"metric": name, "limit": limit, "usage": 0.0} for name, limit in self.cloud.quotas[region].items()]
        zones = [self._link(f"zones/{zone}") for zone in ZONES[region]]
        return {"kind": "compute#region", "name": region, "status": "UP", "zones": zones, "quotas": quotas}

    def _one_region(self, request: Request, _: Row) -> Any:
        return self._region(self._known_region(request))

    def _known_region(self, request: Request) -> str:
        region = str(request.path_params["region"])
        if region not in ZONES:
            raise missing(f"projects/{self.cloud.project}/regions/{region}")
        return region

    def _zone(self, zone: str) -> Row:
        return {
            "kind": "compute#zone",
            "name": zone,
            "status": "UP",
            "region": self._link(f"regions/{region_of(zone)}"),
        }

    def _types(self, zone: str) -> list[Row]:
        rows = []
        for kind in self.cloud.kinds.values():
            if all(place != zone for place, _ in kind.free):
                continue
            row: Row = {
                "kind": "compute#machineType",
                "name": kind.name,
                "guestCpus": kind.cpus,
                "memoryMb": kind.memory_mb,
                "zone": zone,
                "architecture": "X86_64",
                "selfLink": self._link(f"zones/{zone}/machineTypes/{kind.name}"),
            }
            if kind.gpus:
                gpu = self.cloud.families[kind.family].gpu_type
                row["accelerators"] = [{"guestAcceleratorType": gpu, "guestAcceleratorCount": kind.gpus}]
            if kind.ssd_gb:
                row["bundledLocalSsds"] = {"defaultInterface": "NVME", "partitionCount": kind.ssd_gb // 375}
            if kind.is_deprecated:
                row["deprecated"] = {"state": "DEPRECATED"}
            rows.append(edited(row, self.cloud.quirks.edit_offer.get(kind.name, {})))
        return rows

    def _image(self, request: Request, _: Row) -> Any:
        family = request.path_params["family"]
        if request.path_params["project"] != IMAGE_PROJECT or family not in IMAGES:
            raise missing(f"projects/{request.path_params['project']}/global/images/family/{family}")
        link = f"{HOST}{COMPUTE}/projects/{IMAGE_PROJECT}/global/images/{IMAGES[family]}"
        return {"kind": "compute#image", "name": IMAGES[family], "family": family, "status": "READY", "selfLink": link}

    def _require_advice(self) -> None:
        status = self.cloud.quirks.advice_refused
        if status is not None:
            raise RestRefusal(status, "The method is not available for this project.", code="forbidden")

    def _capacity(self, request: Request, body: Row) -> Any:
        region = self._known_region(request)
        self._require_advice()
        policy = body.get("instanceFlexibilityPolicy", {}).get("instanceSelections") or {}
        names = [name for one in policy.values() for name in one.get("machineTypes", [])]
        zones = [str(one["zone"]).rpartition("/")[2] for one in body.get("distributionPolicy", {}).get("zones", [])]
        if not names or any(name not in self.cloud.kinds for name in names) or body.get("size", 0) < 1:
            raise RestRefusal(400, "Invalid value for field 'instanceFlexibilityPolicy'", code="invalid")
        scores = {"obtainability": self.cloud.quirks.obtainability, "estimatedUptime": "14400s"}
        shard = {"zone": (zones or ZONES[region])[0], "machineType": names[0], "instanceCount": body["size"]}
        return {"recommendations": [{"scores": scores, "shards": [{**shard, "provisioningModel": "SPOT"}]}]}

    def _capacity_history(self, request: Request, body: Row) -> Any:
        self._known_region(request)
        self._require_advice()
        name = body.get("instanceProperties", {}).get("machineType")
        zone = str(body.get("locationPolicy", {}).get("location")).rpartition("/")[2]
        kind, types = self.cloud.kinds.get(str(name)), body.get("types") or []
        if kind is None or zone not in _zones() or not types or not set(types) <= {"PREEMPTION", "PRICE"}:
            raise RestRefusal(400, "Invalid value for field 'instanceProperties'", code="invalid")
        now = self.cloud.clock.now()
        midnight = now.replace(hour=0, minute=0, second=0, microsecond=0)  # the past stays as it is while time passes
        interval = {"startTime": _instant(midnight - timedelta(days=1)), "endTime": _instant(midnight)}
        answer: Row = {"machineType": name, "location": f"zones/{zone}"}
        if "PREEMPTION" in types:
            rate = self.cloud.quirks.preemption_rate
            answer["preemptionHistory"] = [{"interval": interval, "preemptionRate": rate}]
        if "PRICE" in types:
            units, micros = divmod(self.cloud.price(kind, zone, is_spot=True), 1_000_000)
            price = {"currencyCode": "USD", "units": str(units), "nanos": micros * 1000}
            answer["priceHistory"] = [{"interval": interval, "listPrice": price}]
        return answer

    # --- instances ------------------------------------------------------------------------------------------------

    def _instances(self, zone: str) -> list[Row]:
        return [self._row(one) for one in self.cloud.listed() if one.zone == zone]

    def _show(self, request: Request, _: Row) -> Any:
        return self._row(self.cloud.shown(self._known_zone(request), request.path_params["name"]))

    def _row(self, one: GoogleInstance) -> Any:
        is_up = one.started_at is not None and one.status not in OFF
        interfaces = one.body.get("networkInterfaces") or []
        has_ip = is_up and any(row.get("accessConfigs") for row in interfaces)
        access = [{"name": "external-nat", "type": "ONE_TO_ONE_NAT", "natIP": "203.0.113.7"}] if has_ip else []
        row: Row = {
            "kind": "compute#instance",
            "id": one.machine_id,
            "name": one.name,
            "status": one.status,
            "creationTimestamp": _instant(one.launched_at),
            "labels": one.body.get("labels") or {},
            "scheduling": one.body.get("scheduling") or {},
            "zone": self._link(f"zones/{one.zone}"),
            "machineType": self._link(f"zones/{one.zone}/machineTypes/{one.kind.name}"),
            "networkInterfaces": [{"network": "default", "networkIP": "10.128.0.7", "accessConfigs": access}],
            "metadata": one.body.get("metadata") or {},
            "disks": [
                {"deviceName": disk.name, "autoDelete": disk.dies_with is not None, "source": disk.name, "boot": True}
                for number in one.disks
                if (disk := self.cloud.disks.get(number)) is not None
            ],
            "selfLink": self._link(f"zones/{one.zone}/instances/{one.name}"),
        }
        if one.started_at is not None:
            row["lastStartTimestamp"] = _instant(one.started_at)
        return edited(row, self.cloud.quirks.edit_row.get(one.machine_id, {}))

    def _insert(self, request: Request, body: Row) -> Any:
        zone = self._known_zone(request)
        more = gpus_attached(self.cloud, zone, body)
        return self._operation_row(self.cloud.insert(zone, body, more, request.query_params.get("requestId")))

    def _delete(self, request: Request, _: Row) -> Any:
        zone, name = self._known_zone(request), request.path_params["name"]
        return self._operation_row(self.cloud.delete(zone, name, request.query_params.get("requestId")))

    def _simulate(self, request: Request, _: Row) -> Any:
        one = self.cloud.shown(self._known_zone(request), request.path_params["name"])
        if one.is_spot:
            self.cloud.preempt(one.machine_id)
        return self._operation_row(self.cloud.log(one, "simulateMaintenanceEvent", "", at=self.cloud.clock.now()))

    def _preempted(self, request: Request, _: Row) -> Response:
        if request.headers.get("metadata-flavor") != "Google":
            raise RestRefusal(403, "Missing Metadata-Flavor:Google header.", code="forbidden")
        one = self.cloud.named(request.path_params["name"])
        return Response(
            "TRUE" if one.has_notice or one.status == "STOPPING" else "FALSE", media_type="application/text"
        )

    def _serial_port(self, request: Request, _: Row) -> Any:
        one = self.cloud.shown(self._known_zone(request), request.path_params["name"])
        if one.status in OFF or one.started_at is None:
            raise RestRefusal(400, f"The resource '{one.name}' is not ready", code="resourceNotReady")
        text = "".join(line + "\n" for line in self.cloud.machines.console(one.machine_id, lines=20_000)[-20_000:])
        start = int(request.query_params.get("start") or 0)
        return {
            "kind": "compute#serialPortOutput",
            "contents": text[start:],
            "start": str(start),
            "next": str(len(text)),
        }

    # --- disks and operations -------------------------------------------------------------------------------------

    def _disks(self, zone: str) -> list[Row]:
        return [
            {
                "kind": "compute#disk",
                "id": one.number,
                "name": one.name,
                "sizeGb": str(one.size_gb),
                "status": "READY",
                "labels": one.labels,
                "zone": self._link(f"zones/{zone}"),
                "type": self._link(f"zones/{zone}/diskTypes/{one.kind}"),
                "creationTimestamp": _instant(one.made_at),
                **(
                    {"users": [self._link(f"zones/{zone}/instances/{self.cloud.rented[one.user].name}")]}
                    if one.user
                    else {}
                ),
            }
            for one in self.cloud.disks.values()
            if one.zone == zone
        ]

    def _delete_disk(self, request: Request, _: Row) -> Any:
        return self._operation_row(self.cloud.delete_disk(self._known_zone(request), request.path_params["name"]))

    def _operations(self, zone: str) -> list[Row]:
        late, now = self.cloud.quirks.logs_late, self.cloud.clock.now()
        own = [one for one in self.cloud.operations.values() if one.zone == zone]
        return [self._operation_row(one) for one in own if one.user != "system" or one.made_at + late <= now]

    def _found(self, request: Request) -> Operation:
        operation = self.cloud.operations.get(request.path_params["name"])
        if operation is None or operation.zone != self._known_zone(request):
            raise missing(f"operations/{request.path_params['name']}")
        return operation

    def _operation(self, request: Request, _: Row) -> Any:
        return self._operation_row(self._found(request))

    def _wait(self, request: Request, _: Row) -> Any:
        self.cloud.wait(self._found(request))
        return self._operation_row(self._found(request))

    def _operation_row(self, one: Operation) -> Row:
        row: Row = {
            "kind": "compute#operation",
            "id": str(one.number),
            "name": one.name,
            "operationType": one.type,
            "zone": self._link(f"zones/{one.zone}"),
            "targetLink": self._link(one.target),
            "targetId": one.target_number,
            "user": one.user,
            "status": "RUNNING" if one.done_at is None else "DONE",
            "progress": 0 if one.done_at is None else 100,
            "insertTime": _instant(one.made_at),
            "selfLink": self._link(f"zones/{one.zone}/operations/{one.name}"),
        }
        if one.done_at is not None:
            row["endTime"] = _instant(one.done_at)
        if one.done_at is not None and one.errors:
            is_quota = one.errors[0]["code"] == "QUOTA_EXCEEDED"
            row["error"] = {"errors": one.errors}
            row["httpErrorStatusCode"] = 403 if is_quota else 503
            row["httpErrorMessage"] = "FORBIDDEN" if is_quota else "SERVICE UNAVAILABLE"
        return row

    # --- lists ----------------------------------------------------------------------------------------------------

    def _link(self, path: str) -> str:
        return f"{HOST}{COMPUTE}/projects/{self.cloud.project}/{path}"

    def _known_zone(self, request: Request) -> str:
        zone = str(request.path_params["zone"])
        if zone not in _zones():
            raise missing(f"projects/{self.cloud.project}/zones/{zone}")
        return zone

    def _cut(self, request: Request, rows: Sequence[Any], sized_by: str, most: int) -> tuple[Sequence[Any], str | None]:
        size = min(int(request.query_params.get(sized_by) or most), most, self.cloud.quirks.page_rows or most)
        token = request.query_params.get("pageToken") or "at-0"
        if not re.fullmatch(r"at-\d+", token):
            raise RestRefusal(400, "Invalid value for field 'pageToken'", code="invalid")
        start = int(token[3:])
        return rows[start : start + size], f"at-{start + size}" if start + size < len(rows) else None

    def _page(self, request: Request, rows: Sequence[Any]) -> Row:
        page, token = self._cut(request, filtered(request, rows), "maxResults", PAGE_ROWS)
        return {"items": list(page), **({"nextPageToken": token} if token else {})}

    def _in_zone(self, rows_of: Callable[[str], list[Any]], *, is_one: bool = False) -> Handler:
        def answer(request: Request, _: Row) -> Any:
            rows = rows_of(self._known_zone(request))
            if not is_one:
                return self._page(request, rows)
            name = request.path_params["name"]
            found = [row for row in rows if isinstance(row, dict) and row.get("name") == name]
            if not found:
                raise missing(f"zones/{request.path_params['zone']}/{request.url.path.split('/')[-2]}/{name}")
            return found[0]

        return answer

    def _by_zone(self, what: str, rows_of: Callable[[str], list[Any]]) -> Handler:
        def answer(request: Request, _: Row) -> Any:
            cut_off = self.cloud.quirks.unreachable if what == "instances" else set()
            if cut_off and request.query_params.get("returnPartialSuccess") != "true":
                raise RestRefusal(503, f"The zones {sorted(cut_off)} are unreachable", code="backendError")
            pairs = [(zone, row) for zone in _zones() if zone not in cut_off for row in rows_of(zone)]
            kept = filtered(request, [row for _, row in pairs])
            page, token = self._cut(request, [pair for pair in pairs if pair[1] in kept], "maxResults", PAGE_ROWS)
            items: Row = {}
            for zone in _zones():
                rows = [row for place, row in page if place == zone]
                code = "UNREACHABLE" if zone in cut_off else "NO_RESULTS_ON_PAGE"
                warning = {"code": code, "message": f"There are no results for scope 'zones/{zone}' on this page."}
                items[f"zones/{zone}"] = {what: rows} if rows else {"warning": warning}
            more: Row = {"nextPageToken": token} if token else {}
            if cut_off:
                more["unreachables"] = [f"zones/{zone}" for zone in sorted(cut_off)]
            return {"kind": f"compute#{what}AggregatedList", "items": items, **more}

        return answer


def _zones() -> list[str]:
    return [zone for zones in ZONES.values() for zone in zones]


def _instant(at: datetime) -> str:
    return at.strftime("%Y-%m-%dT%H:%M:%S.%f")[:-3] + "-00:00"
