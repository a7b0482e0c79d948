"""Nova's API over a `OpenstackCloud`."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any, Final
from urllib.parse import urlencode

from starlette.requests import Request
from starlette.responses import Response

from tests.fakes.openstack.cloud import OpenstackCloud, vm_state
from tests.fakes.openstack.create import VERSION_MIN, Orders
from tests.fakes.openstack.records import ACTIONS, Flavor, OpenstackServer, cut_page, not_found
from tests.fakes.rest import Handler, RestRefusal, as_json, edited, is_text

_PAGING: Final = ("sort_key", "sort_dir", "limit", "marker")
_FILTERS: Final = {
    **dict.fromkeys(("name", "status", "image", "flavor", "ip", "changes-since", "reservation_id"), VERSION_MIN),
    **dict.fromkeys(("tags", "tags-any", "not-tags", "not-tags-any"), (2, 26)),
    "ip6": (2, 5),
    "changes-before": (2, 66),
    "locked": (2, 73),
}
"""What a user may filter by, and since which version; other parameters are ignored before 2.75."""


class Compute:
    """The handlers. `version` is the microversion of the request that is being answered, once known."""

    def __init__(self, cloud: OpenstackCloud) -> None:
        self.cloud = cloud
        self.version: tuple[int, int] | None = None

    def routes(self) -> dict[str, dict[str, Handler]]:
        """Handlers below a region; each path works with the id of the project in it, and without."""
        paths: dict[str, dict[str, Handler]] = {
            "/flavors": {"GET": self._flavors},
            "/flavors/detail": {"GET": self._flavors},
            "/flavors/{id}": {"GET": lambda request, _: {"flavor": self._flavor_row(self._flavor(request))}},
            "/servers": {"GET": self._servers, "POST": self._create},
            "/servers/detail": {"GET": self._servers},
            "/servers/{id}": {"GET": self._show, "PUT": self._update, "DELETE": self._delete},
            "/servers/{id}/action": {"POST": self._action},
            "/limits": {"GET": self._limits},
            "/os-availability-zone": {"GET": lambda *_: {"availabilityZoneInfo": [_ZONE]}},
        }
        found: dict[str, dict[str, Handler]] = {
            "/compute": {"GET": lambda *_: {"versions": [self._version_row()]}},
            "/compute/{api}": {"GET": lambda *_: self._root()},
        }
        for api in ("v2.1", "v2"):
            for path, methods in paths.items():
                found[f"/compute/{api}{path}"] = {name: self._versioned(one) for name, one in methods.items()}
            for path, methods in paths.items():
                found[f"/compute/{api}/{{project}}{path}"] = {
                    name: self._versioned(one) for name, one in methods.items()
                }
        return found

    def _versioned(self, handler: Handler) -> Handler:
        def handle(request: Request, body: dict[str, Any]) -> Any:
            if request.path_params.get("project", self.cloud.project) != self.cloud.project:
                project, text = request.path_params["project"], "doesn't match Context's project_id"
                raise RestRefusal(
                    400, f"Malformed request URL: URL's project_id '{project}' {text} '{self.cloud.project}'"
                )
            self.version = self._asked_version(request)
            return handler(request, body)

        return handle

    def _asked_version(self, request: Request) -> tuple[int, int]:
        if self.cloud.quirks.legacy or "/compute/v2/" in request.url.path:
            return VERSION_MIN
        asked = request.headers.get("x-openstack-nova-api-version", "2.1")
        for one in request.headers.get("openstack-api-version", "").split(","):
            if one.strip().startswith("compute "):
                asked = one.strip().removeprefix("compute ")
        if asked == "latest":
            asked = self.cloud.quirks.microversion_max
        if not re.fullmatch(r"[1-9]\d*\.([1-9]\d*|0)", asked):
            raise RestRefusal(
                400, f"API Version String {asked} is of invalid format. Must be of format MajorNum.MinorNum."
            )
        major, minor = map(int, asked.split("."))
        most = self.cloud.quirks.microversion_max
        if not VERSION_MIN <= (major, minor) <= tuple(map(int, most.split("."))):
            raise RestRefusal(
                406, f"Version {asked} is not supported by the API. Minimum is 2.1 and maximum is {most}."
            )
        return major, minor

    def _knows(self, minor: int) -> bool:
        return (self.version or VERSION_MIN) >= (2, minor)

    def _root(self) -> Any:
        status, said = self.cloud.quirks.version_says or (200, {"version": self._version_row()})
        return as_json(said, status)

    def _version_row(self) -> dict[str, Any]:
        legacy = self.cloud.quirks.legacy
        most = "" if legacy else self.cloud.quirks.microversion_max
        return {
            "id": "v2.0" if legacy else "v2.1",
            "status": "SUPPORTED" if legacy else "CURRENT",
            "version": most,
            "min_version": "" if legacy else "2.1",
            "updated": "2013-07-23T11:33:21Z",
            "links": [{"rel": "self", "href": f"{self.cloud.base_url}/compute/v2.1/"}],
        }

    # --- flavours and limits --------------------------------------------------------------------------------------

    def _flavor_row(self, one: Flavor, *, region: str = "", detail: bool = True) -> Any:
        row: dict[str, Any] = {"id": one.id_in(region or self._region), "name": one.name, "links": []}
        if detail:
            row |= {"vcpus": one.vcpus, "ram": one.ram, "disk": one.disk, "swap": "" if not self._knows(75) else 0}
            row |= {"OS-FLV-EXT-DATA:ephemeral": 0, "os-flavor-access:is_public": True, "rxtx_factor": 1.0}
            row["OS-FLV-DISABLED:disabled"] = one.disabled
            if self._knows(55):
                row["description"] = None
            if self._knows(61) and not self.cloud.quirks.hides_extra_specs:
                row["extra_specs"] = one.specs
        return edited(row, self.cloud.quirks.edit_offer.get(one.name, {}))

    def _flavors(self, request: Request, _: dict[str, Any]) -> Any:
        self._region = request.path_params["region"]
        detail = request.url.path.endswith("/detail")
        found = sorted(self.cloud.flavors.values(), key=lambda one: one.id_in(self._region))
        ids = [one.id_in(self._region) for one in found]
        page, following = cut_page(request, ids, self.cloud.quirks.page_rows)
        rows = [self._flavor_row(one, detail=detail) for one in found if one.id_in(self._region) in page]
        return {"flavors": rows, **self._links("flavors", request, following)}

    def _flavor(self, request: Request) -> Flavor:
        self._region, asked = request.path_params["region"], request.path_params["id"]
        return self.cloud.flavor(self._region, asked) or _refuse(not_found("Flavor", asked))

    def _limits(self, request: Request, _: dict[str, Any]) -> Any:
        region, quota = request.path_params["region"], self.cloud.quirks.quota
        mine = [one for one in self.cloud.rented.values() if one.exists and one.region == region]
        absolute = {
            "maxTotalInstances": quota.get("instances", -1),
            "maxTotalCores": quota.get("cores", -1),
            "maxTotalRAMSize": quota.get("ram", -1),
            "totalInstancesUsed": len(mine),
            "totalCoresUsed": sum(one.flavor.vcpus for one in mine),
            "totalRAMUsed": sum(one.flavor.ram for one in mine),
            "maxServerMeta": self.cloud.quirks.metadata_max,
            "maxTotalKeypairs": 100,
        }
        return {"limits": {"rate": [], "absolute": absolute}}

    def _links(self, name: str, request: Request, marker: str | None) -> dict[str, Any]:
        if marker is None:
            return {}
        host = self.cloud.quirks.link_host or str(request.base_url).rstrip("/")
        asked = urlencode({**request.query_params, "marker": marker})
        return {f"{name}_links": [{"rel": "next", "href": f"{host}{request.url.path}?{asked}"}]}

    # --- servers --------------------------------------------------------------------------------------------------

    def _servers(self, request: Request, _: dict[str, Any]) -> Any:
        asked, quirks, cloud = request.query_params, self.cloud.quirks, self.cloud
        unknown = [key for key in asked if key not in (*_FILTERS, *_PAGING, "all_tenants")]
        if unknown and self._knows(75):
            raise RestRefusal(400, f"Additional properties are not allowed ({unknown[0]!r} was unexpected)")
        if asked.get("all_tenants") in ("1", "true", "True"):
            raise RestRefusal(
                403, "Policy doesn't allow os_compute_api:servers:detail:get_all_tenants to be performed."
            )
        filters = {
            key: asked[key] for key in asked if key in _FILTERS and (self.version or VERSION_MIN) >= _FILTERS[key]
        }
        region = request.path_params["region"]
        everyone = [one for one in cloud.rented.values() if one.region == region]
        everyone.sort(key=lambda one: (one.launched_at, one.machine_id), reverse=True)
        # A deleted row stays in the database, where `changes-since` finds it.
        listed = {one.machine_id for one in cloud.listed()} - quirks.hidden
        if "changes-since" in filters:
            listed |= {one.machine_id for one in everyone if not one.exists and not one.vanished}
        found = [
            one for one in everyone if one.machine_id in listed and (one.status != "SOFT_DELETED" or not one.exists)
        ]
        down = [one for one in found if one.machine_id in quirks.down]
        keep = self._filter(filters)
        up = [one for one in found if one not in down and keep(one)]
        if quirks.breaks_page and "marker" in asked:
            raise RestRefusal(500, "Unexpected API Error.")
        markers = [one.machine_id for one in everyone if one.exists]
        page, following = cut_page(request, [one.machine_id for one in up], quirks.page_rows, markers)
        detail = request.url.path.endswith("/detail")
        rows = [self._server_row(one, detail=detail) for one in up if one.machine_id in page]
        if self._knows(69) and not filters and not any(key in asked for key in _PAGING):
            rows = [*(self._down_row(one) for one in down), *rows]
        return {"servers": rows, **self._links("servers", request, following)}

    def _filter(self, filters: Mapping[str, str]) -> Callable[[OpenstackServer], bool]:
        try:
            name = re.compile(filters.get("name", ""), re.IGNORECASE)
        except re.error:
            raise RestRefusal(400, f"Invalid input for query parameters name. Value: {filters['name']}") from None
        since = filters.get("changes-since")
        try:
            instant = datetime.fromisoformat(since.replace("Z", "+00:00")) if since else None
        except ValueError:
            raise RestRefusal(400, f"Invalid input for query parameters changes-since. Value: {since}") from None
        tags = set(filters.get("tags", "").split(",")) - {""}

        def keep(one: OpenstackServer) -> bool:
            return (
                name.search(one.label or "") is not None
                and filters.get("status", one.status).upper() == one.status.upper()
                and filters.get("image", one.image_id) == one.image_id
                and filters.get("flavor", one.flavor.id_in(one.region)) == one.flavor.id_in(one.region)
                and tags <= set(one.tags)
                and (instant is None or one.updated_at >= instant)
                and ("locked" not in filters or (filters["locked"].lower() == "true") == one.locked)
            )

        return keep

    def _server(self, request: Request) -> OpenstackServer:
        one = self.cloud.require(request.path_params["id"])
        if one.region != request.path_params["region"]:
            raise not_found("Instance", one.machine_id)
        return one

    def _show(self, request: Request, _: dict[str, Any]) -> Any:
        one = self.cloud.known(request.path_params["id"])
        is_here = one is not None and one.region == request.path_params["region"]
        if one is not None and is_here and one.machine_id in self.cloud.quirks.down and self._knows(69):
            more = {"OS-EXT-STS:power_state": 0, "user_id": one.user_id, "OS-EXT-AZ:availability_zone": "UNKNOWN"}
            return {"server": {**self._down_row(one), "flavor": self._flavor_in(one), "image": _image_of(one), **more}}
        return {"server": self._server_row(self._server(request))}

    def _down_row(self, one: OpenstackServer) -> dict[str, Any]:
        row = {"id": one.machine_id, "status": "UNKNOWN", "tenant_id": self.cloud.project}
        return {**row, "created": _second(one.launched_at), "links": []}

    def _flavor_in(self, one: OpenstackServer) -> dict[str, Any]:
        if not self._knows(47):
            return {"id": one.flavor.id_in(one.region), "links": []}
        facts = {"vcpus": one.flavor.vcpus, "ram": one.flavor.ram, "disk": one.flavor.disk, "ephemeral": 0, "swap": 0}
        specs = {} if self.cloud.quirks.hides_extra_specs else {"extra_specs": one.flavor.specs}
        return {"original_name": one.flavor.name, **facts, **specs}

    def _server_row(self, one: OpenstackServer, *, detail: bool = True) -> Any:
        row: dict[str, Any] = {"id": one.machine_id, "name": one.label, "links": []}
        edit = self.cloud.quirks.edit_row.get(one.machine_id, {})
        if not detail:
            return edited(row, edit)
        fixed = {"version": 4, "OS-EXT-IPS:type": "fixed", "OS-EXT-IPS-MAC:mac_addr": "fa:16:3e:4f:9c:11"}
        has_port = one.network is not None and one.active_at is not None and one.exists
        row |= {
            "status": one.status,
            "tenant_id": self.cloud.project,
            "user_id": one.user_id,
            "metadata": one.metadata,
            "hostId": "9d1f" * 14 if one.has_host else "",
            "image": _image_of(one),
            "flavor": self._flavor_in(one),
            "created": _second(one.launched_at),
            "updated": _second(one.updated_at),
            "addresses": {one.network.name: [{"addr": "198.51.100.9", **fixed}]} if one.network and has_port else {},
            "accessIPv4": "",
            "accessIPv6": "",
            "OS-DCF:diskConfig": "MANUAL",
            "OS-EXT-AZ:availability_zone": "nova" if one.has_host else "",
            "config_drive": "True" if one.body.get("config_drive") else "",
            "key_name": one.body.get("key_name"),
            "OS-SRV-USG:launched_at": _naive(one.active_at),
            "OS-SRV-USG:terminated_at": _naive(one.ended_at),
            "OS-EXT-STS:task_state": one.task_state,
            "OS-EXT-STS:vm_state": vm_state(one),
            "OS-EXT-STS:power_state": {"ACTIVE": 1, "PAUSED": 3, "SHUTOFF": 4, "SUSPENDED": 4}.get(one.status, 0),
            "os-extended-volumes:volumes_attached": [self._attached(volume_id) for volume_id in one.volume_ids],
        }
        if one.status in ("BUILD", "ACTIVE"):
            row["progress"] = 0
        if one.has_host and one.exists:
            row["security_groups"] = [{"name": "default"}]
        if one.fault and one.status in ("ERROR", "DELETED"):
            row["fault"] = {"code": 500, "created": _second(one.updated_at), "message": one.fault}
        row |= {"locked": one.locked} if self._knows(9) else {}
        row |= {"description": one.body.get("description")} if self._knows(19) else {}
        row |= {"tags": one.tags} if self._knows(26) else {}
        row |= {"trusted_image_certificates": None} if self._knows(63) else {}
        row |= {"locked_reason": None} if self._knows(73) else {}
        return edited(row, edit)

    def _attached(self, volume_id: str) -> dict[str, Any]:
        volume = self.cloud.volumes[volume_id]
        return {"id": volume_id, **({"delete_on_termination": volume.goes} if self._knows(3) else {})}

    def _update(self, request: Request, body: dict[str, Any]) -> Any:
        one = self._server(request)
        wish = body.get("server")
        if not isinstance(wish, dict) or not is_text(wish.get("name", "x")):
            raise RestRefusal(400, "Invalid input for field/attribute server.")
        one.label = wish.get("name", one.label)
        return {"server": self._server_row(one)}

    def _delete(self, request: Request, _: dict[str, Any]) -> Response:
        self.cloud.delete(self._server(request).machine_id)
        return Response(status_code=204)

    def _action(self, request: Request, body: dict[str, Any]) -> Any:
        one = self._server(request)
        action = next(iter(body), "")
        if action == "forceDelete":
            self.cloud.delete(one.machine_id, force=True)
        elif action in ("lock", "unlock"):
            one.locked = action == "lock"
        elif action in ACTIONS:
            self.cloud.act(one.machine_id, action)
        elif action == "os-getConsoleOutput":
            return self._console(one, (body[action] or {}).get("length"))
        else:
            raise RestRefusal(400, f"There is no such action: {action}")
        return Response(status_code=202)

    def _console(self, one: OpenstackServer, length: Any) -> Any:
        if self.cloud.quirks.console_missing:
            raise RestRefusal(404, "Guest does not have a console available.")
        if not one.has_host or one.active_at is None:
            raise RestRefusal(409, f"Instance {one.machine_id} is not ready")
        file = self.cloud.machines.directory(one.machine_id) / "console.log"
        text = file.read_text(errors="replace") if file.exists() else f"cloud-init: {one.label} is up\n"
        lines = text[-100_000:].splitlines()
        return {"output": "\n".join(lines if length is None else lines[-int(length) :] if int(length) else [])}

    def _create(self, request: Request, body: dict[str, Any]) -> Response:
        wish = body.get("server")
        one = Orders(self.cloud, self.version or VERSION_MIN).order(request.path_params["region"], wish)
        link = f"{self.cloud.base_url}{request.url.path}/{one.machine_id}"
        groups = one.body.get("security_groups") or [{"name": "default"}]
        row = {"id": one.machine_id, "links": [{"rel": "self", "href": link}], "OS-DCF:diskConfig": "MANUAL"}
        return as_json(
            {"server": {**row, "security_groups": groups, "adminPass": ADMIN_PASSWORD}}, 202, {"location": link}
        )


ADMIN_PASSWORD: Final = "fake-admin-pass-93c7"
"""Of every server, in the answer of its create: a secret that no adapter may keep."""
_ZONE: Final = {"zoneName": "nova", "zoneState": {"available": True}, "hosts": None}


def _refuse(refusal: RestRefusal) -> Any:
    raise refusal


def _image_of(one: OpenstackServer) -> Any:
    return {"id": one.image_id, "links": []} if one.image_id else ""


def _second(at: datetime) -> str:
    return at.strftime("%Y-%m-%dT%H:%M:%SZ")


def _naive(at: datetime | None) -> str | None:
    return at.strftime("%Y-%m-%dT%H:%M:%S.%f") if at else None
