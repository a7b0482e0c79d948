"""The HTTP API over an `OpenstackCloud`: Keystone at `/v3`, Nova, Glance, Neutron and Cinder below their own paths."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import Response

from spotd_providers.testkit.serve import Call, Receive, RecordedRequest, Scope, Send
from tests.fakes.openstack.cloud import OpenstackCloud, OpenstackServer, OpenstackVolume
from tests.fakes.openstack.records import (
    ADMIN_PASSWORD,
    FAULTS,
    MICROVERSION_MIN,
    OTHER_REGION,
    REGION,
    USER_DATA_CHARS_MAX,
    Flavor,
    refusal,
)
from tests.fakes.rest import Handler, RestApi, RestRefusal, as_json, edited, is_count, is_text

NOVA: Final = "/compute/v2.1"
_CREATE: Final = {
    "name", "flavorRef", "imageRef", "networks", "key_name", "user_data", "config_drive", "availability_zone",
    "security_groups", "metadata", "block_device_mapping_v2", "min_count", "max_count", "adminPass",
}  # fmt: skip
_OPEN: Final = ("/v3/auth/tokens", "/v3", "/", NOVA, "/image", "/network", "/volume")
_UNAUTHORIZED: Final = "The request you have made requires authentication."


class OpenstackApi(RestApi[OpenstackCloud]):
    """The ASGI application."""

    base_path = ""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":  # the project may be in the path of Nova's and is in that of Cinder's
            path = scope["path"].replace(f"/{self.cloud.project}", "")
            scope = {**scope, "path": path.rstrip("/") or "/", "raw_path": path.encode()}
        await super().__call__(scope, receive, send)

    @staticmethod
    def classify(request: RecordedRequest) -> Call:
        path = re.sub(r"/[0-9a-f]{32}(?=/|$)", "", request.path).rstrip("/")
        if path == f"{NOVA}/flavors/detail":
            return Call.OFFERS
        if path == f"{NOVA}/limits":
            return Call.ACCOUNT
        if path.startswith(f"{NOVA}/servers"):
            if path.endswith("/action"):
                return Call.OTHER
            return {"GET": Call.LIST, "POST": Call.LAUNCH, "DELETE": Call.TERMINATE}.get(request.method, Call.OTHER)
        return Call.OTHER

    def _routes(self) -> Mapping[str, Mapping[str, Handler]]:
        return {
            "/v3": {"GET": lambda request, _: {"version": _version("v3.14", self._root(request) + "/v3/")}},
            "/v3/auth/tokens": {"POST": self._token},
            NOVA: {"GET": self._nova},
            f"{NOVA}/flavors/detail": {"GET": self._flavors},
            f"{NOVA}/flavors/{{id}}": {"GET": self._flavor},
            f"{NOVA}/servers/detail": {"GET": self._list},
            f"{NOVA}/servers": {"POST": self._create},
            f"{NOVA}/servers/{{id}}": {"GET": self._show, "DELETE": self._delete},
            f"{NOVA}/servers/{{id}}/action": {"POST": self._act},
            f"{NOVA}/limits": {"GET": self._limits},
            f"{NOVA}/os-availability-zone": {
                "GET": lambda *_: {"availabilityZoneInfo": [{"zoneName": "nova", "zoneState": {"available": True}}]}
            },
            "/image": {"GET": lambda request, _: self._versions(request, "v2.9", "/image/v2/")},
            "/image/v2/images": {"GET": self._images},
            "/network": {"GET": lambda request, _: self._versions(request, "v2.0", "/network/v2.0/")},
            "/network/v2.0/networks": {"GET": self._networks},
            "/volume/v3/volumes/detail": {"GET": self._volumes},
            "/volume/v3/volumes/{id}": {"GET": self._volume, "PUT": self._name_volume, "DELETE": self._drop_volume},
        }

    def _refused(self, no: RestRefusal) -> Response:
        headers = no.headers
        if no.code == "bare":
            return Response("<html>404</html>", status_code=no.status, media_type="text/html")
        if no.status == 401 or no.code == "error":
            body: Any = {"error": {"code": no.status, "message": no.message, "title": "Unauthorized"}}
        elif no.code == "NeutronError":
            body = {"NeutronError": {"type": "BadRequest", "message": no.message, "detail": ""}}
        else:
            code = no.code if no.code in FAULTS.values() else FAULTS.get(no.status, "computeFault")
            text = "The resource could not be found." if no.code == "not_found" else no.message
            body = {code: {"code": no.status, "message": text}}
        return as_json(body, no.status, headers)

    # Keystone.

    def _root(self, request: Request) -> str:
        return str(request.base_url).rstrip("/")

    def _authenticate(self, request: Request) -> None:
        if request.url.path in _OPEN:
            return
        if self.cloud.quirks.bare_404 and request.url.path.startswith(NOVA):
            raise RestRefusal(404, "", code="bare")
        expires = self.cloud.tokens.get(request.headers.get("x-auth-token", ""))
        if expires is None or expires <= self.cloud.clock.now():
            raise RestRefusal(401, _UNAUTHORIZED, code="error")

    def _token(self, request: Request, body: dict[str, Any]) -> Response:
        cloud, quirks = self.cloud, self.cloud.quirks
        auth = body.get("auth") or {}
        identity = auth.get("identity") or {}
        match identity.get("methods"):
            case ["application_credential"]:
                said = identity.get("application_credential") or {}
                is_right = (said.get("id"), said.get("secret")) == (cloud.credential_id, cloud.secret)
                if "scope" in auth:
                    raise RestRefusal(401, "Application credentials cannot request a scope.", code="error")
            case ["password"]:
                user = (identity.get("password") or {}).get("user") or {}
                domain = user.get("domain") or {}
                is_right = (user.get("name"), user.get("password")) == (cloud.username, cloud.password)
                is_right = is_right and (domain.get("name"), domain.get("id")) in (("Default", None), (None, "default"))
                if auth.get("scope") != {"project": {"id": cloud.project}}:
                    raise RestRefusal(401, _UNAUTHORIZED, code="error")
            case _:
                raise RestRefusal(400, "'methods' is a required property", code="error")
        if not is_right:
            raise RestRefusal(401, _UNAUTHORIZED, code="error")
        token, expires = f"fake-token-{cloud.uuid()}", cloud.clock.now() + quirks.token_lives
        cloud.tokens[token] = expires
        says = f"{expires:%Y-%m-%dT%H:%M:%S.%f}Z" if quirks.expires_says is None else quirks.expires_says
        answer = {
            "methods": identity["methods"],
            "expires_at": says,
            "issued_at": f"{cloud.clock.now():%Y-%m-%dT%H:%M:%S.%f}Z",
            "user": {"id": "u-1", "name": cloud.username, "domain": {"id": "default", "name": "Default"}},
            "project": {"id": cloud.project, "name": "lab", "domain": {"id": "default", "name": "Default"}},
            "roles": [{"id": "r-1", "name": "member"}],
            "catalog": self._catalog(self._root(request)),
        }
        return as_json({"token": answer}, 201, {"x-subject-token": token})

    def _catalog(self, root: str) -> list[Any]:
        nova = f"{root}{NOVA}/{self.cloud.project}" if self.cloud.quirks.project_in_url else f"{root}{NOVA}"
        urls = {
            "compute": nova,
            "image": f"{root}/image",
            "network": f"{root}/network",
            "block-storage": f"{root}/volume/v3/{self.cloud.project}",
            "identity": f"{root}/v3",
            **self.cloud.quirks.addresses,
        }
        names = {"compute": "nova", "image": "glance", "network": "neutron", "identity": "keystone"}
        return [
            {
                "id": f"s-{kind}",
                "type": kind,
                "name": names.get(kind, "cinder"),
                "endpoints": [
                    {
                        "id": f"e-{kind}-{face}-{place}",
                        "interface": face,
                        "region": place,
                        "region_id": place,
                        "url": at,
                    }
                    for place, at in ((REGION, url), (OTHER_REGION, "https://bhs5.invalid/"))
                    for face in ("public", "internal")
                ],
            }
            for kind, url in urls.items()
        ]

    def _versions(self, request: Request, number: str, path: str) -> Any:
        return {"versions": [_version(number, self._root(request) + path)]}

    # Nova: versions and flavours.

    def _nova(self, request: Request, _: dict[str, Any]) -> Any:
        if self.cloud.quirks.version_says is not None:
            status, said = self.cloud.quirks.version_says
            return as_json(said, status)
        row = _version("v2.1", self._root(request) + NOVA + "/")
        return {"version": {**row, "version": self.cloud.quirks.microversion_max, "min_version": "2.1"}}

    def _micro(self, request: Request) -> tuple[int, ...]:
        """The microversion that a request asks for.

        Raises:
            RestRefusal: Nova does not know it.
        """
        said = request.headers.get("x-openstack-nova-api-version", "")
        kind, _, number = request.headers.get("openstack-api-version", "").partition(" ")
        said = number if kind == "compute" else said
        most = tuple(int(part) for part in self.cloud.quirks.microversion_max.split("."))
        asked = most if said == "latest" else tuple(int(part) for part in (said or "2.1").split("."))
        if not MICROVERSION_MIN <= asked <= most:
            raise refusal(406, f"Version {said} is not supported by the API.")
        return asked

    def _flavor_row(self, kind: Flavor, micro: tuple[int, ...]) -> Any:
        row = {
            "id": kind.flavor_id,
            "name": kind.name,
            "vcpus": kind.vcpus,
            "ram": kind.ram_mb,
            "disk": kind.disk_gb,
            "OS-FLV-EXT-DATA:ephemeral": 0,
            "swap": "" if micro < (2, 75) else 0,
            "rxtx_factor": 1.0,
            "os-flavor-access:is_public": True,
            "OS-FLV-DISABLED:disabled": kind.disabled,
            "links": [],
        }
        if micro >= (2, 55):
            row["description"] = None
        if micro >= (2, 61):
            row["extra_specs"] = {} if self.cloud.quirks.hides_extra_specs else dict(kind.extra_specs)
        return edited(row, self.cloud.quirks.edit_offer.get(kind.name, {}))

    def _flavors(self, request: Request, _: dict[str, Any]) -> Any:
        micro = self._micro(request)
        kinds, following = self._paged(request, list(self.cloud.flavors.values()), lambda one: one.flavor_id)
        return {"flavors": [self._flavor_row(one, micro) for one in kinds], **_links("flavors", following)}

    def _flavor(self, request: Request, _: dict[str, Any]) -> Any:
        kind = self.cloud.flavors.get(request.path_params["id"])
        if kind is None:
            raise refusal(404, f"Flavor {request.path_params['id']} could not be found.")
        return {"flavor": self._flavor_row(kind, self._micro(request))}

    def _paged(self, request: Request, rows: Sequence[Any], name: Any) -> tuple[Sequence[Any], str]:
        """The rows of the page that is asked for, and the URL of the next one."""
        asked, marker = request.query_params.get("limit"), request.query_params.get("marker")
        if asked is not None and not asked.isdecimal():
            raise refusal(400, "limit param must be an integer")
        size = min(int(asked or self.cloud.quirks.page_rows), self.cloud.quirks.page_rows)
        names = [name(one) for one in rows]
        if marker is not None and marker not in names:
            raise refusal(400, f"marker [{marker}] not found")
        begin = names.index(marker) + 1 if marker is not None else 0
        page = rows[begin : begin + size]
        if begin + size >= len(rows):
            return page, ""
        url = request.url.include_query_params(marker=name(page[-1]))
        return page, str(url)

    # Nova: servers.

    def _list(self, request: Request, _: dict[str, Any]) -> Any:
        micro, asked = self._micro(request), request.query_params
        if self.cloud.quirks.breaks_page and "marker" in asked:
            raise refusal(500, "Unexpected API Error.")
        rows = list(reversed(self.cloud.listed()))
        if "changes-since" in asked:
            since = datetime.fromisoformat(asked["changes-since"])
            ended = [one for one in self.cloud.rented.values() if one.updated_at and one.updated_at >= since]
            rows = [*rows, *ended]
        if "name" in asked:
            rows = [one for one in rows if re.search(asked["name"], one.name)]
        page, following = self._paged(request, rows, lambda one: one.machine_id)
        return {"servers": [self._row(one, micro) for one in page], **_links("servers", following)}

    def _known(self, request: Request) -> OpenstackServer:
        one = self.cloud.known(request.path_params["id"])
        if one is None:
            raise refusal(404, f"Instance {request.path_params['id']} could not be found.")
        return one

    def _show(self, request: Request, _: dict[str, Any]) -> Any:
        return {"server": self._row(self._known(request), self._micro(request))}

    def _row(self, one: OpenstackServer, micro: tuple[int, ...]) -> Any:
        flavor: dict[str, Any] = {"id": one.flavor.flavor_id, "links": []}
        if micro >= (2, 47):
            flavor = {"original_name": one.flavor.name, "vcpus": one.flavor.vcpus, "ram": one.flavor.ram_mb}
            flavor |= {"disk": one.flavor.disk_gb, "ephemeral": 0, "swap": 0, "extra_specs": {}}
        address = {"addr": "203.0.113.21", "version": 4, "OS-EXT-IPS:type": "fixed"}
        row = {
            "id": one.machine_id,
            "name": one.name,
            "status": one.status,
            "OS-EXT-STS:vm_state": {"ACTIVE": "active", "BUILD": "building"}.get(one.status, "stopped"),
            "OS-EXT-STS:task_state": one.task_state,
            "OS-EXT-STS:power_state": 1 if one.status == "ACTIVE" else 0,
            "created": _instant(one.launched_at),
            "updated": _instant(one.updated_at or one.launched_at),
            "OS-SRV-USG:launched_at": f"{one.active_at:%Y-%m-%dT%H:%M:%S}.000000" if one.active_at else None,
            "OS-SRV-USG:terminated_at": None,
            "flavor": flavor,
            "image": {"id": one.body["imageRef"], "links": []} if one.body.get("imageRef") else "",
            "metadata": one.metadata,
            "addresses": {"Ext-Net": [address]} if one.active_at else {},
            "accessIPv4": "",
            "accessIPv6": "",
            "key_name": one.body.get("key_name"),
            "hostId": "9" * 56 if one.active_at else "",
            "OS-EXT-AZ:availability_zone": "nova",
            "os-extended-volumes:volumes_attached": [
                {"id": number, "delete_on_termination": self.cloud.volumes[number].dies_with_server}
                if number in self.cloud.volumes
                else {"id": number}
                for number in one.volume_ids
            ],
            "tenant_id": self.cloud.project,
        }
        if one.fault is not None:
            row["fault"] = one.fault
        if micro >= (2, 9):
            row["locked"] = one.locked
        if micro >= (2, 26):
            row["tags"] = list(one.body.get("tags") or [])
        return edited(row, self.cloud.quirks.edit_row.get(one.machine_id, {}))

    def _create(self, request: Request, sent: dict[str, Any]) -> Response:
        micro, body = self._micro(request), sent.get("server")
        if not isinstance(body, dict):
            raise refusal(400, "Invalid input for field/attribute server. Value: None.")
        self._require_fields(body, micro)
        flavor = self.cloud.flavors.get(body["flavorRef"])
        if flavor is None:
            raise refusal(self.cloud.quirks.unknown_flavor, f"Flavor {body['flavorRef']} could not be found.")
        self._require_disk(body, flavor)
        if body.get("key_name") not in (None, *self.cloud.keypairs):
            raise refusal(400, "Invalid key_name provided.")
        networks = body.get("networks")
        if isinstance(networks, list) and any(one.get("uuid") not in self.cloud.networks for one in networks):
            raise refusal(400, "Network could not be found.")
        if networks in (None, "auto") and self.cloud.quirks.many_networks:
            raise refusal(409, "Multiple possible networks found, use a Network ID to be more specific.")
        one = self.cloud.create(body, flavor)
        links = [{"rel": "self", "href": f"{self._root(request)}{NOVA}/servers/{one.machine_id}"}]
        row = {"id": one.machine_id, "links": links, "OS-DCF:diskConfig": "MANUAL", "adminPass": ADMIN_PASSWORD}
        return as_json({"server": row}, 202)

    def _require_fields(self, body: dict[str, Any], micro: tuple[int, ...]) -> None:
        known = _CREATE | ({"tags"} if micro >= (2, 52) else set()) | ({"description"} if micro >= (2, 19) else set())
        if odd := sorted(set(body) - known):
            raise refusal(400, f"Additional properties are not allowed ({odd[0]!r} was unexpected)")
        metadata = body.get("metadata", {})
        fits = {
            "name": is_text(body.get("name")),
            "flavorRef": is_text(body.get("flavorRef")),
            "config_drive": isinstance(body.get("config_drive", True), bool),
            "metadata": isinstance(metadata, dict) and all(is_text(one) for one in (*metadata, *metadata.values())),
            "user_data": _is_user_data(body.get("user_data", "")),
            "networks": _are_networks(body.get("networks"), micro),
        }
        if faults := [name for name, is_right in fits.items() if not is_right]:
            raise refusal(400, f"Invalid input for field/attribute {faults[0]}.")

    def _require_disk(self, body: dict[str, Any], flavor: Flavor) -> None:
        disks, image_id = body.get("block_device_mapping_v2") or [], body.get("imageRef") or ""
        for disk in disks:
            if not is_count(disk.get("volume_size"), 1) or disk.get("source_type") != "image":
                raise refusal(400, "Block Device Mapping is Invalid.")
            image_id = disk.get("uuid")
        image = self.cloud.images.get(image_id)
        if image is None:
            raise refusal(400, "Can not find requested image")
        if not disks and flavor.disk_gb == 0:
            raise refusal(400, "Only volume-backed servers are allowed for flavors with zero disk.")
        if not disks and flavor.disk_gb < int(str(image["min_disk"])):
            raise refusal(400, "Flavor's disk is too small for requested image.")

    def _delete(self, request: Request, _: dict[str, Any]) -> Response:
        self._micro(request)
        self.cloud.delete(self._known(request))
        return Response(status_code=204)

    def _act(self, request: Request, body: dict[str, Any]) -> Response:
        self._micro(request)
        one = self._known(request)
        match list(body):
            case ["forceDelete"]:
                self.cloud.delete(one, force=True)
                return Response(status_code=202)
            case ["os-getConsoleOutput"]:
                if self.cloud.quirks.console_missing:
                    raise refusal(404, "Unable to get console log, functionality not implemented.")
                if one.active_at is None:
                    raise refusal(409, f"Instance {one.machine_id} is not ready")
                lines = (body["os-getConsoleOutput"] or {}).get("length") or 10_000
                return as_json({"output": "\n".join(self.cloud.machines.console(one.machine_id, lines=int(lines)))})
            case _:
                raise refusal(400, f"There is no such action: {next(iter(body), '')}.")

    def _limits(self, request: Request, _: dict[str, Any]) -> Any:
        self._micro(request)
        alive = [one for one in self.cloud.rented.values() if one.exists]
        most = self.cloud.quirks.quota_gpus
        return {
            "limits": {
                "rate": [],
                "absolute": {
                    "maxTotalInstances": 10 if most is None else most,
                    "totalInstancesUsed": len(alive),
                    "maxTotalCores": -1,
                    "totalCoresUsed": sum(one.flavor.vcpus for one in alive),
                    "maxTotalRAMSize": -1,
                    "totalRAMUsed": sum(one.flavor.ram_mb for one in alive),
                },
            }
        }

    # Glance, Neutron and Cinder.

    def _images(self, request: Request, _: dict[str, Any]) -> Any:
        name = request.query_params.get("name")
        rows = [
            {"id": image_id, "status": "active", "visibility": "public", **image}
            for image_id, image in self.cloud.images.items()
            if name in (None, image["name"])
        ]
        return {"images": rows, "schema": "/v2/schemas/images", "first": "/v2/images"}

    def _networks(self, request: Request, _: dict[str, Any]) -> Any:
        name = request.query_params.get("name")
        rows = self.cloud.networks.items()
        found = [{"id": uuid, "name": called, "status": "ACTIVE"} for uuid, called in rows if name in (None, called)]
        return {"networks": found}

    def _volumes(self, request: Request, _: dict[str, Any]) -> Any:
        rows, following = self._paged(request, list(self.cloud.volumes.values()), lambda one: one.volume_id)
        return {"volumes": [_volume_row(one) for one in rows], **_links("volumes", following)}

    def _known_volume(self, request: Request) -> OpenstackVolume:
        volume = self.cloud.volumes.get(request.path_params["id"])
        if volume is None:
            raise refusal(404, f"Volume {request.path_params['id']} could not be found.")
        return volume

    def _volume(self, request: Request, _: dict[str, Any]) -> Any:
        return {"volume": _volume_row(self._known_volume(request))}

    def _name_volume(self, request: Request, body: dict[str, Any]) -> Any:
        volume = self._known_volume(request)
        volume.name = body["volume"].get("name", volume.name)
        return {"volume": _volume_row(volume)}

    def _drop_volume(self, request: Request, _: dict[str, Any]) -> Response:
        self.cloud.delete_volume(self._known_volume(request))
        return Response(status_code=202)


def _volume_row(one: OpenstackVolume) -> dict[str, Any]:
    attached = [{"server_id": one.server_id, "volume_id": one.volume_id}] if one.server_id else []
    return {"id": one.volume_id, "name": one.name, "size": one.size, "status": one.status, "attachments": attached,
            "metadata": one.metadata, "bootable": "true"}  # fmt: skip


def _version(number: str, url: str) -> dict[str, Any]:
    return {"id": number, "status": "CURRENT", "links": [{"rel": "self", "href": url}]}


def _links(kind: str, url: str) -> dict[str, Any]:
    return {f"{kind}_links": [{"rel": "next", "href": url}]} if url else {}


def _instant(at: datetime) -> str:
    return f"{at:%Y-%m-%dT%H:%M:%SZ}"


def _is_user_data(value: Any) -> bool:
    if not isinstance(value, str) or len(value) > USER_DATA_CHARS_MAX:
        return False
    try:
        base64.b64decode(value, validate=True)
    except binascii.Error:
        return False
    return True


def _are_networks(value: Any, micro: tuple[int, ...]) -> bool:
    if micro >= (2, 37):
        return value in ("auto", "none") or (isinstance(value, list) and bool(value))
    return value is None or isinstance(value, list)
