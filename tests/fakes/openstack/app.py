"""The HTTP APIs of the fake: Keystone at `/identity`, and Nova, Cinder, Glance and Neutron below each region."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any, Final
from urllib.parse import urlencode

from starlette.requests import Request
from starlette.responses import Response

from spotd_providers.testkit.serve import Call, RecordedRequest
from tests.fakes.openstack.cloud import OpenstackCloud
from tests.fakes.openstack.compute import Compute
from tests.fakes.openstack.records import (
    FAULT_NAMES,
    PATH_NOT_FOUND,
    REGIONS,
    OpenstackImage,
    OpenstackVolume,
    cut_page,
    not_found,
)
from tests.fakes.rest import Handler, RestApi, RestRefusal, as_json

UNAUTHORIZED: Final = "The request you have made requires authentication."
_OPEN: Final = ("", "identity", "identity/v3", "identity/v3/auth/tokens")
_OPEN_BELOW: Final = ("/compute", "/compute/v2.1", "/compute/v2", "/volume/v3", "/image", "/network")


class OpenstackApi(RestApi[OpenstackCloud]):
    """The ASGI application."""

    base_path = ""

    def __init__(self, cloud: OpenstackCloud) -> None:
        self._compute = Compute(cloud)
        self._service = ""
        super().__init__(cloud)

    @staticmethod
    def classify(request: RecordedRequest) -> Call:
        parts = request.path.strip("/").split("/")
        if len(parts) < 4 or parts[1] != "compute":
            return Call.OTHER
        if "flavors" in parts:
            return Call.OFFERS
        if parts[-1] == "limits":
            return Call.ACCOUNT
        if "servers" not in parts:
            return Call.OTHER
        if request.method == "DELETE" or (parts[-1] == "action" and b"forceDelete" in request.body):
            return Call.TERMINATE
        if request.method == "GET" and parts.index("servers") >= len(parts) - 2:
            return Call.LIST
        return Call.LAUNCH if request.method == "POST" and parts[-1] == "servers" else Call.OTHER

    def _routes(self) -> Mapping[str, Mapping[str, Handler]]:
        cloud = self.cloud
        identity: dict[str, dict[str, Handler]] = {
            "/identity": {"GET": lambda *_: as_json({"versions": {"values": [self._identity()]}}, 300)},
            "/identity/v3": {"GET": lambda *_: {"version": self._identity()}},
            "/identity/v3/auth/tokens": {"POST": self._token},
            "/identity/v3/auth/catalog": {"GET": lambda *_: {"catalog": self._catalogue()}},
        }
        others: dict[str, dict[str, Handler]] = {
            "/volume/v3": {"GET": lambda request, _: self._versions(request, "v3.0", "3.70")},
            "/image": {"GET": lambda request, _: self._versions(request, "v2.9")},
            "/network": {"GET": lambda request, _: self._versions(request, "v2.0")},
            "/volume/v3/{project}/volumes": {"GET": self._volumes},
            "/volume/v3/{project}/volumes/detail": {"GET": self._volumes},
            "/volume/v3/{project}/volumes/{id}": {
                "GET": lambda request, _: {"volume": _volume_row(_volume(cloud, request))},
                "PUT": self._update_volume,
                "DELETE": self._delete_volume,
            },
            "/image/v2/images": {"GET": self._images},
            "/image/v2/images/{id}": {"GET": self._show_image},
            "/network/v2.0/networks": {"GET": self._networks},
        }
        regional = {"/{region}" + path: one for path, one in (self._compute.routes() | others).items()}
        both = {**identity, **regional}
        return {**both, **{path + "/": one for path, one in both.items() if path.count("/") < 4}}

    def _answer(self, methods: Mapping[str, Handler] | None, request: Request, content: bytes) -> Response:
        parts = request.url.path.strip("/").split("/")
        self._service = next(
            (one for one in ("identity", "compute", "volume", "image", "network") if one in parts[:2]), ""
        )
        if request.path_params.get("region", REGIONS[0]) not in REGIONS:
            methods = None
        if self._service == "compute" and self.cloud.quirks.bare_404:
            return Response(PATH_NOT_FOUND, 404, media_type="text/html")
        self._compute.version = None
        answer = super()._answer(methods, request, content)
        answer.headers["x-openstack-request-id"] = f"req-{self.cloud.uuid()}"
        if self._service == "compute" and self._compute.version is not None and not self.cloud.quirks.legacy:
            major, minor = self._compute.version
            answer.headers["openstack-api-version"] = f"compute {major}.{minor}"
            answer.headers["x-openstack-nova-api-version"] = f"{major}.{minor}"
        return answer

    def _refused(self, refusal: RestRefusal) -> Response:
        status, message, headers = refusal.status, refusal.message, refusal.headers
        if status == 429 and self._service in ("compute", "volume"):
            status = self.cloud.quirks.rate_limit_status
        if refusal.code == "not_found" and refusal.message == "Not found":
            return Response(PATH_NOT_FOUND, status, headers, media_type="text/html")
        if status == 401 or self._service == "identity":
            title = {401: "Unauthorized", 403: "Forbidden", 404: "Not Found"}.get(status, "Bad Request")
            return as_json({"error": {"code": status, "message": message, "title": title}}, status, headers)
        if self._service == "network":
            kind = refusal.code or "HTTPError"
            return as_json({"NeutronError": {"type": kind, "message": message, "detail": ""}}, status, headers)
        if self._service == "image":
            return Response(
                f"<html><body><h1>{status}</h1>{message}</body></html>", status, headers, media_type="text/html"
            )
        return as_json({FAULT_NAMES.get(status, "computeFault"): {"code": status, "message": message}}, status, headers)

    # --- Keystone -------------------------------------------------------------------------------------------------

    def _authenticate(self, request: Request) -> None:
        path = request.url.path.strip("/")
        if path in _OPEN or path.endswith(_OPEN_BELOW):
            return
        until, scoped = self.cloud.tokens.get(request.headers.get("x-auth-token", ""), (None, False))
        if until is None or until <= self.cloud.clock.now():
            where = f'Keystone uri="{self.cloud.base_url}/identity"'
            raise RestRefusal(401, UNAUTHORIZED, headers={"www-authenticate": where})
        if not scoped and self._service != "identity":
            raise RestRefusal(403, "Policy doesn't allow this to be performed.")

    def _identity(self) -> dict[str, Any]:
        links = [{"rel": "self", "href": f"{self.cloud.base_url}/identity/v3/"}]
        return {"id": "v3.14", "status": "stable", "updated": "2020-04-07T00:00:00Z", "links": links}

    def _token(self, _: Request, body: dict[str, Any]) -> Response:
        auth = _dict(body.get("auth"))
        identity = _dict(auth.get("identity"))
        methods = identity.get("methods")
        cloud, now = self.cloud, self.cloud.clock.now()
        if not isinstance(methods, list) or not methods:
            raise RestRefusal(400, "'methods' is a required property")
        if methods == ["application_credential"]:
            given = _dict(identity.get("application_credential"))
            right = (given.get("id"), given.get("secret")) == (cloud.credential_id, cloud.secret)
            if "scope" in auth:
                raise RestRefusal(401, "Application credentials cannot request a scope.")
            scoped = True
        elif methods == ["password"]:
            user = _dict(_dict(identity.get("password")).get("user"))
            by_name = user.get("name") == cloud.username and bool(_dict(user.get("domain")))
            right = (user.get("id") == cloud.user_id or by_name) and user.get("password") == cloud.password
            project = _dict(_dict(auth.get("scope")).get("project"))
            scoped = "scope" in auth
            named = project.get("name") == "spotd-project" and bool(_dict(project.get("domain")))
            right = right and (not scoped or named or project.get("id") == cloud.project)
        else:
            right = scoped = False
        if not right:
            raise RestRefusal(401, UNAUTHORIZED)
        name = f"gAAAAA-{cloud.uuid()}"
        cloud.tokens[name] = (now + cloud.quirks.token_lives, scoped)
        token: dict[str, Any] = {
            "methods": methods,
            "user": {"id": cloud.user_id, "name": cloud.username, "domain": {"id": "default", "name": "Default"}},
            "audit_ids": ["3T2dc1CGQxyJsHdDu1xkcw"],
            "issued_at": _instant(now),
            "expires_at": cloud.quirks.expires_says or _instant(now + cloud.quirks.token_lives),
            "is_domain": False,
        }
        if scoped:
            token["project"] = {"id": cloud.project, "name": "spotd-project", "domain": token["user"]["domain"]}
            token["roles"] = [{"id": "9fe2ff9ee4384b1894a90878d3e92bab", "name": "member"}]
            if cloud.quirks.catalogue:
                token["catalog"] = self._catalogue()
        return as_json({"token": token}, 201, {"x-subject-token": name, "vary": "X-Auth-Token"})

    def _catalogue(self) -> list[dict[str, Any]]:
        cloud, quirks = self.cloud, self.cloud.quirks
        compute = "/compute/v2" if quirks.legacy else "/compute/v2.1"
        compute += f"/{cloud.project}" if quirks.project_in_url else ""
        services = {
            "identity": ("keystone", ""),
            "compute": ("nova", compute),
            quirks.volume_type: ("cinderv3", f"/volume/v3/{cloud.project}"),
            "image": ("glance", "/image"),
            "network": ("neutron", "/network"),
        }
        rows: list[dict[str, Any]] = []
        for kind, (name, path) in services.items():
            endpoints: list[dict[str, str]] = []
            for region in REGIONS:
                for interface in ("admin", "internal", "public"):
                    host = cloud.base_url if interface == "public" else "http://controller.invalid:8774"
                    url = f"{host}/{region}{path}" if path else f"{host}/identity"
                    if interface == "public":
                        url = quirks.addresses.get(kind, url)
                    place = {"region": region, "region_id": region, "interface": interface}
                    endpoints.append({"id": f"{len(rows)}{len(endpoints)}", "url": url, **place})
            rows.append({"id": f"service-{len(rows)}", "type": kind, "name": name, "endpoints": endpoints})
        return rows

    def _versions(self, request: Request, version: str, most: str = "") -> Any:
        path = request.url.path.strip("/") + ("" if most else f"/{version.split('.')[0]}")
        links = [{"rel": "self", "href": f"{self.cloud.base_url}/{path}{'.0' if version == 'v2.0' else ''}/"}]
        limits = {"version": most, "min_version": "3.0"} if most else {}
        return {"versions": [{"id": version, "status": "CURRENT", "links": links, **limits}]}

    # --- Cinder ---------------------------------------------------------------------------------------------------

    def _volumes(self, request: Request, _: dict[str, Any]) -> Any:
        asked, region = request.query_params, request.path_params["region"]
        wanted = {key: asked[key] for key in ("name", "status") if key in asked}
        rows = [
            _volume_row(one)
            for one in sorted(self.cloud.volumes.values(), key=lambda one: (one.made_at, one.volume_id), reverse=True)
            if one.region == region
        ]
        found = [row for row in rows if all(row[key] == value for key, value in wanted.items())]
        markers = [row["id"] for row in rows]
        page, following = cut_page(request, [row["id"] for row in found], self.cloud.quirks.page_rows, markers)
        found = [row for row in found if row["id"] in page]
        if not request.url.path.endswith("/detail"):
            found = [{key: row[key] for key in ("id", "name")} for row in found]
        if following is None:
            return {"volumes": found}
        link = f"{self.cloud.base_url}{request.url.path}?{urlencode({**asked, 'marker': following})}"
        return {"volumes": found, "volumes_links": [{"rel": "next", "href": link}]}

    def _update_volume(self, request: Request, body: dict[str, Any]) -> Any:
        volume, wish = _volume(self.cloud, request), _dict(body.get("volume"))
        if volume.volume_id in self.cloud.quirks.forbids_volumes:
            raise RestRefusal(403, "Policy doesn't allow volume:update to be performed.")
        volume.name = str(wish.get("name", volume.name))
        if not self.cloud.quirks.forgets_metadata:
            volume.metadata = dict(wish.get("metadata", volume.metadata))
        return {"volume": _volume_row(volume)}

    def _delete_volume(self, request: Request, _: dict[str, Any]) -> Response:
        self.cloud.delete_volume(_volume(self.cloud, request).volume_id)
        return Response(status_code=202)

    # --- Glance and Neutron ---------------------------------------------------------------------------------------

    def _images(self, request: Request, _: dict[str, Any]) -> Any:
        asked = request.query_params
        rows = [
            _image_row(one)
            for one in sorted(self.cloud.images.values(), key=lambda one: (one.made_at, one.image_id), reverse=True)
            if one.region == request.path_params["region"]
            and asked.get("name", one.name) == one.name
            and asked.get("status", one.status) == one.status
            and (asked.get("os_hidden") == "true") == one.is_hidden
        ]
        most = min(self.cloud.quirks.page_rows, 25) if "limit" not in asked else self.cloud.quirks.page_rows
        page, following = cut_page(request, [row["id"] for row in rows], most)
        more = {"next": f"/v2/images?{urlencode({**asked, 'marker': following})}"} if following else {}
        return {
            "images": [row for row in rows if row["id"] in page],
            "first": "/v2/images",
            "schema": "/v2/schemas/images",
            **more,
        }

    def _show_image(self, request: Request, _: dict[str, Any]) -> Any:
        one = self.cloud.images.get(request.path_params["id"])
        if one is None or one.region != request.path_params["region"]:
            raise RestRefusal(404, f"No image found with ID {request.path_params['id']}")
        return _image_row(one)

    def _networks(self, request: Request, _: dict[str, Any]) -> Any:
        asked = request.query_params
        rows = [
            {
                "id": one.network_id,
                "name": one.name,
                "status": "ACTIVE",
                "admin_state_up": True,
                "router:external": one.is_external,
                "shared": one.is_external,
                "subnets": [one.network_id[::-1]],
                "project_id": self.cloud.project,
                "tenant_id": self.cloud.project,
            }
            for one in self.cloud.networks.values()
            if one.region == request.path_params["region"]
            and asked.get("name", one.name) == one.name
            and asked.get("id", one.network_id) == one.network_id
            and asked.get("router:external", str(one.is_external)).lower() == str(one.is_external).lower()
        ]
        return {"networks": rows}


def _volume(cloud: OpenstackCloud, request: Request) -> OpenstackVolume:
    one = cloud.volumes.get(request.path_params["id"])
    if one is None or one.region != request.path_params["region"]:
        raise not_found("Volume", request.path_params["id"])
    return one


def _volume_row(one: OpenstackVolume) -> dict[str, Any]:
    attached = {"id": one.volume_id, "volume_id": one.volume_id, "server_id": one.server_id, "device": "/dev/vda"}
    return {
        "id": one.volume_id,
        "name": one.name,
        "status": one.status,
        "size": one.size,
        "bootable": "true",
        "encrypted": False,
        "multiattach": False,
        "volume_type": "classic",
        "availability_zone": "nova",
        "description": "",
        "metadata": one.metadata,
        "attachments": [attached] if one.server_id else [],
        "created_at": one.made_at.strftime("%Y-%m-%dT%H:%M:%S.%f"),
        "updated_at": None,
        "os-vol-tenant-attr:tenant_id": OpenstackCloud.project,
    }


def _image_row(one: OpenstackImage) -> dict[str, Any]:
    return {
        "id": one.image_id,
        "name": one.name,
        "status": one.status,
        "visibility": "public",
        "min_disk": one.min_disk,
        "min_ram": 0,
        "size": 700_000_000,
        "disk_format": "qcow2",
        "container_format": "bare",
        "os_hidden": one.is_hidden,
        "protected": False,
        "tags": [],
        "created_at": one.made_at.strftime("%Y-%m-%dT%H:%M:%SZ"),
        "updated_at": one.made_at.strftime("%Y-%m-%dT%H:%M:%SZ"),
        "schema": "/v2/schemas/image",
    }


def _instant(at: datetime) -> str:
    return at.strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
