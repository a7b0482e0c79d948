"""Lambda Cloud's HTTP API over a `LambdaCloud`, as a Starlette application; paths begin with `/api/v1`."""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Callable, Mapping
from datetime import datetime, timedelta
from typing import Any, Final

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from spotd_providers.testkit.serve import Call, Canned, RecordedRequest
from tests.fakes.cloud import FakeApi
from tests.fakes.lambdacloud.cloud import LambdaCloud
from tests.fakes.lambdacloud.records import (
    JUPYTER_TOKEN,
    REGIONS,
    STATUSES,
    FileSystem,
    LambdaInstance,
    Phase,
    Refusal,
    no_such,
)

BASE_PATH: Final = "/api/v1"
EDGE_ERROR: Final = Canned(
    status=403,
    body=b"<html><title>Attention Required! | Cloudflare</title></html>",
    headers={"content-type": "text/html"},
)
"""An answer of the edge in front of the API: not of Lambda's, and no word on the key."""
USER_DATA_BYTES_MAX: Final = 1_000_000
REQUEST_EVERY: Final = timedelta(seconds=1)
LAUNCH_EVERY: Final = timedelta(seconds=12)
_TOLERANCE: Final = timedelta(milliseconds=50)
_TAG_KEY: Final = re.compile(r"[a-z][a-z0-9-:]+")
_HOSTNAME: Final = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
_MOUNTS: Final = ("/home/", "/lambda/nfs/", "/data/")
_IMAGES: Final = tuple(
    {"id": f"image-{arch}-{region}", "family": family, "name": family, "architecture": arch, "region": region}
    for region in REGIONS
    for family, arch in (("lambda-stack-24-04", "x86_64"), ("lambda-stack-24-04-arm", "arm64"))
)
_BLOCKED: Final = {
    Phase.BOOTING: ("vm-has-not-launched", "The instance has not launched yet."),
    Phase.TERMINATING: ("vm-is-terminating", "The instance is being terminated."),
    Phase.TERMINATED: ("vm-is-terminating", "The instance is being terminated."),
    Phase.PREEMPTED: ("vm-is-terminating", "The instance is being terminated."),
}

Fits = Callable[[Any], bool]
Handler = Callable[[Request, Mapping[str, Any]], Any]
Check = Callable[[bytes], Mapping[str, Any]]


def classify(request: RecordedRequest) -> Call:
    """What a request to Lambda is for."""
    path = request.path.removeprefix(BASE_PATH)
    if path == "/instance-types":
        return Call.OFFERS
    if path == "/instance-operations/launch":
        return Call.LAUNCH
    if path == "/instance-operations/terminate":
        return Call.TERMINATE
    if path.startswith("/instances") and request.method == "GET":
        return Call.LIST
    return Call.OTHER


class LambdaApi(FakeApi[LambdaCloud]):
    """The ASGI application."""

    def __init__(self, cloud: LambdaCloud) -> None:
        self._last: dict[timedelta, datetime] = {}
        super().__init__(cloud)

    def _built(self) -> Starlette:
        operations, names = "/instance-operations", {"instance_ids": _ids}
        routes: dict[str, dict[str, tuple[Handler, Check | None]]] = {
            "/instance-types": {"GET": (self._types, None)},
            "/instances": {"GET": (self._list, None)},
            "/instances/{id}": {
                "GET": (self._show, None),
                "POST": (self._modify, _needs({"name": _name, "tags": _tags})),
            },
            f"{operations}/launch": {"POST": (self._launch, self._launch_fields)},
            f"{operations}/terminate": {"POST": (self._terminate, _needs(names, *names))},
            f"{operations}/restart": {"POST": (self._restart, _needs(names, *names))},
            "/ssh-keys": {
                "GET": (self._ssh_keys, None),
                "POST": (self._add_ssh_key, _needs({"name": _name, "public_key": _public_key}, "name", "public_key")),
            },
            "/ssh-keys/{id}": {"DELETE": (self._drop_ssh_key, None)},
            "/file-systems": {"GET": (self._file_systems, None)},
            "/filesystems": {
                "GET": (self._older_file_systems, None),
                "POST": (self._add_file_system, _needs({"name": _name, "region": _region}, "name", "region")),
            },
            "/filesystems/{id}": {"DELETE": (self._drop_file_system, None)},
            "/images": {"GET": (self._images, None)},
            "/regions": {"GET": (self._regions, None)},
            "/firewall-rulesets": {"GET": (self._rulesets, None)},
            "/firewall-rulesets/{id}": {"DELETE": (self._drop_ruleset, None)},
        }
        paths = [Route(BASE_PATH + path, self._path(methods), methods=_ALL) for path, methods in routes.items()]
        return Starlette(routes=[*paths, Route("/{rest:path}", self._path({}, known=False), methods=_ALL)])

    # --- every request --------------------------------------------------------------------------------------------

    def _path(self, methods: Mapping[str, tuple[Handler, Check | None]], *, known: bool = True) -> Any:
        def answer(request: Request, content: bytes) -> Response:
            try:
                self._admit(request)
                if request.method not in methods:
                    text = f"{request.method} is not allowed here." if known else "Not found."
                    raise Refusal("global/not-found", text, status=405 if known else None)
                handler, check = methods[request.method]
                return _json(200, {"data": handler(request, check(content) if check else {})})
            except Refusal as refusal:
                return self._refused(refusal)

        return self.endpoint(answer)

    def _admit(self, request: Request) -> None:
        """
        Raises:
            Refusal: a wrong key, too many requests, or a refusal that was ordered for this kind of call.
        """
        if _key(request.headers.get("authorization", "")) != self.cloud.api_key:
            raise Refusal("global/invalid-api-key", "API key was invalid, expired, or deleted.")
        record = RecordedRequest(method=request.method, path=request.url.path, query="", headers={}, body=b"")
        call, now, quirks = classify(record), self.cloud.clock.now(), self.cloud.quirks
        limits = [REQUEST_EVERY, *([LAUNCH_EVERY] if call is Call.LAUNCH else [])]
        for least in limits if quirks.rate_limits else []:
            last = self._last.get(least)
            if last is not None and now - last < least - _TOLERANCE:
                code = quirks.rate_limit_code or ""
                raise Refusal(code, "Too many requests.", status=429, retry_after_s=quirks.retry_after_s)
        self._last.update(dict.fromkeys(limits, now))
        if call in quirks.refusals:
            raise Refusal(quirks.refusals[call], "The request was refused.")

    def _refused(self, refusal: Refusal) -> Response:
        status = refusal.status or self.cloud.quirks.statuses.get(refusal.code) or STATUSES.get(refusal.code, 500)
        headers = {} if refusal.retry_after_s is None else {"retry-after": str(refusal.retry_after_s)}
        if not refusal.code:
            return Response("<html><h1>Error</h1></html>", status_code=status, headers=headers, media_type="text/html")
        error = {"code": refusal.code, "message": refusal.message, "suggestion": "See the API reference."}
        return _json(status, {"error": error}, headers)

    # --- offers ---------------------------------------------------------------------------------------------------

    def _types(self, _: Request, __: Mapping[str, Any]) -> Any:
        rows = {
            kind.name: {
                "instance_type": kind.row(),
                "regions_with_capacity_available": [_place(region) for region, left in kind.free.items() if left > 0],
            }
            for kind in self.cloud.kinds.values()
        }
        return {name: self.cloud.quirks.edit_types.get(name, row) for name, row in rows.items()}

    def _regions(self, _: Request, __: Mapping[str, Any]) -> Any:
        return [_place(region) for region in REGIONS]

    def _images(self, _: Request, __: Mapping[str, Any]) -> Any:
        return [{**image, "region": _place(image["region"])} for image in _IMAGES]

    # --- instances ------------------------------------------------------------------------------------------------

    def _launch_fields(self, content: bytes) -> Mapping[str, Any]:
        fields = {**_LAUNCH, **({"quantity": _quantity} if self.cloud.quirks.takes_quantity else {})}
        return _needs(fields, "region_name", "instance_type_name", "ssh_key_names")(content)

    def _launch(self, _: Request, body: Mapping[str, Any]) -> Any:
        wanted = body.get("image")
        if wanted and not any(wanted.items() <= image.items() for image in _IMAGES):
            raise no_such("image")
        return {"instance_ids": [instance.instance_id for instance in self.cloud.launch(body)]}

    def _list(self, _: Request, __: Mapping[str, Any]) -> Any:
        return [self._row(instance) for instance in self.cloud.visible()]

    def _show(self, request: Request, _: Mapping[str, Any]) -> Any:
        return self._row(self.cloud.shown(request.path_params["id"]))

    def _modify(self, request: Request, body: Mapping[str, Any]) -> Any:
        instance = self.cloud.shown(request.path_params["id"])
        instance.name = body.get("name", instance.name)
        instance.tags = list(body.get("tags", instance.tags))
        return self._row(instance)

    def _terminate(self, _: Request, body: Mapping[str, Any]) -> Any:
        return {"terminated_instances": [self._row(one) for one in self.cloud.terminate(body["instance_ids"])]}

    def _restart(self, _: Request, body: Mapping[str, Any]) -> Any:
        return {"restarted_instances": [self._row(one) for one in self.cloud.restart(body["instance_ids"])]}

    def _row(self, instance: LambdaInstance) -> Any:
        edit, quirks, body = (
            self.cloud.quirks.edit_instance.get(instance.instance_id, {}),
            self.cloud.quirks,
            instance.body,
        )
        if not isinstance(edit, dict):
            return edit
        is_up = instance.healthy_at is not None
        row = {
            "id": instance.instance_id,
            "name": instance.name,
            "ip": "203.0.113.7" if is_up else None,
            "private_ip": "10.19.60.24" if is_up else None,
            "status": instance.phase.value,
            "ssh_key_names": body["ssh_key_names"],
            "file_system_names": body.get("file_system_names") or [],
            "file_system_mounts": body.get("file_system_mounts") or [],
            "region": _place(instance.region),
            "instance_type": instance.kind.row(instance.cents),
            "hostname": body.get("hostname") or "203-0-113-7",
            "jupyter_token": JUPYTER_TOKEN if is_up else None,
            "jupyter_url": f"https://jupyter.example/?token={JUPYTER_TOKEN}" if is_up else None,
            "actions": {name: _action(name, instance.phase) for name in _ACTIONS},
            "tags": instance.tags,
            "firewall_rulesets": body.get("firewall_rulesets") or [],
        }
        if quirks.shows_first_healthy and instance.healthy_at is not None:
            row["first_healthy"] = instance.healthy_at.isoformat().replace("+00:00", "Z")
        if quirks.shows_is_reserved:
            row["is_reserved"] = False
        return {**row, **edit}

    # --- belongings -----------------------------------------------------------------------------------------------

    def _ssh_keys(self, _: Request, __: Mapping[str, Any]) -> Any:
        return list(self.cloud.ssh_keys.values())

    def _add_ssh_key(self, _: Request, body: Mapping[str, Any]) -> Any:
        if any(row["name"] == body["name"] for row in self.cloud.ssh_keys.values()):
            raise Refusal("global/duplicate", "An SSH key of this name exists.")
        row = {"id": self.cloud.new_id(), "name": body["name"], "public_key": body["public_key"]}
        self.cloud.ssh_keys[row["id"]] = row
        return row

    def _drop_ssh_key(self, request: Request, _: Mapping[str, Any]) -> Any:
        if self.cloud.ssh_keys.pop(request.path_params["id"], None) is None:
            raise no_such("SSH key")
        return {}

    def _file_systems(self, _: Request, __: Mapping[str, Any]) -> Any:
        return [self._file_system(system) for system in self.cloud.file_systems.values()]

    def _older_file_systems(self, request: Request, body: Mapping[str, Any]) -> Any:
        if not self.cloud.quirks.has_filesystems_route:
            raise Refusal("global/not-found", "Not found.")
        return self._file_systems(request, body)

    def _file_system(self, system: FileSystem) -> dict[str, Any]:
        return {
            "id": system.file_system_id,
            "name": system.name,
            "mount_point": f"/lambda/nfs/{system.name}",
            "created": system.made_at.isoformat(),
            "is_in_use": self.cloud.is_in_use(system),
            "region": _place(system.region),
            "bytes_used": int(system.gib * 2**30),
        }

    def _add_file_system(self, _: Request, body: Mapping[str, Any]) -> Any:
        if any(system.name == body["name"] for system in self.cloud.file_systems.values()):
            raise Refusal("global/duplicate", "A file system of this name exists.")
        system = FileSystem(
            file_system_id=self.cloud.new_id(), name=body["name"], region=body["region"], made_at=self.cloud.clock.now()
        )
        self.cloud.file_systems[system.file_system_id] = system
        return self._file_system(system)

    def _drop_file_system(self, request: Request, _: Mapping[str, Any]) -> Any:
        self.cloud.delete_file_system(request.path_params["id"])
        return {"deleted_ids": [request.path_params["id"]]}

    def _rulesets(self, _: Request, __: Mapping[str, Any]) -> Any:
        return [{"id": ruleset_id, "name": name} for ruleset_id, name in self.cloud.rulesets.items()]

    def _drop_ruleset(self, request: Request, _: Mapping[str, Any]) -> Any:
        ruleset_id = request.path_params["id"]
        if ruleset_id not in self.cloud.rulesets:
            raise no_such("firewall ruleset")
        users = [one for one in self.cloud.instances.values() if one.phase.exists]
        if any(row["id"] == ruleset_id for one in users for row in one.body.get("firewall_rulesets") or []):
            raise Refusal("firewall-rulesets/firewall-ruleset-in-use", "The ruleset is in use.")
        del self.cloud.rulesets[ruleset_id]
        return {}


_ALL: Final = ["GET", "POST", "PUT", "PATCH", "DELETE"]
_ACTIONS: Final = ("migrate", "rebuild", "restart", "cold_reboot", "terminate")


def _json(status: int, body: Any, headers: Mapping[str, str] | None = None) -> Response:
    return Response(json.dumps(body), status_code=status, headers=dict(headers or {}), media_type="application/json")


def _place(region: str) -> dict[str, str]:
    return {"name": region, "description": REGIONS[region]}


def _action(name: str, phase: Phase) -> dict[str, Any]:
    reason = _BLOCKED.get(phase)
    if reason is None or (name == "terminate" and phase is Phase.BOOTING):
        return {"available": True}
    return {"available": False, "reason_code": reason[0], "reason_description": reason[1]}


def _key(header: str) -> str | None:
    """The key of a request: `Bearer KEY`, or `Basic` with the key as user name."""
    kind, _, rest = header.partition(" ")
    if kind != "Basic":
        return rest if kind == "Bearer" else None
    try:
        return base64.b64decode(rest, validate=True).decode().partition(":")[0]
    except (binascii.Error, UnicodeDecodeError):
        return None


# --- what a body may hold -----------------------------------------------------------------------------------------


def _needs(fields: Mapping[str, Fits], *required: str) -> Check:
    """Build the check of a body: an object with these fields, the required ones and no others."""

    def check(content: bytes) -> Mapping[str, Any]:
        try:
            body = json.loads(content)
        except ValueError:
            raise Refusal("global/invalid-parameters", "The body is not JSON.") from None
        if not isinstance(body, dict):
            raise Refusal("global/invalid-parameters", "The body is not an object.")
        faults = [f"{name}: unknown field" for name in body if name not in fields]
        faults += [f"{name}: invalid value" for name, fits in fields.items() if name in body and not fits(body[name])]
        faults += [f"{name}: required" for name in required if name not in body]
        if faults:
            raise Refusal("global/invalid-parameters", f"Invalid request data: {'; '.join(faults)}.")
        return body

    return check


def _text(value: Any) -> bool:
    return isinstance(value, str) and bool(value)


def _texts(value: Any) -> bool:
    return isinstance(value, list) and all(_text(one) for one in value)


def _ids(value: Any) -> bool:
    return _texts(value) and bool(value)


def _name(value: Any) -> bool:
    return _text(value) and len(value) <= 64


def _region(value: Any) -> bool:
    return value in REGIONS


def _quantity(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _public_key(value: Any) -> bool:
    words = value.split() if isinstance(value, str) else []
    try:
        return (
            len(words) >= 2
            and words[0].startswith(("ssh-", "ecdsa-"))
            and bool(base64.b64decode(words[1], validate=True))
        )
    except binascii.Error:
        return False


def _tags(value: Any) -> bool:
    if not _rows(value, {"key", "value"}) or len({one["key"] for one in value}) != len(value):
        return False
    return all(
        _TAG_KEY.fullmatch(one["key"])
        and len(one["key"]) <= 55
        and not one["key"].startswith("lambda-ai-")
        and len(one["value"]) <= 128
        for one in value
    )


def _rows(value: Any, names: set[str]) -> bool:
    """Whether it is a list of objects with exactly these fields, all texts."""
    return isinstance(value, list) and all(
        isinstance(one, dict) and set(one) == names and all(isinstance(text, str) for text in one.values())
        for one in value
    )


_LAUNCH: Final[Mapping[str, Fits]] = {
    "region_name": _region,
    "instance_type_name": _text,
    "ssh_key_names": lambda value: _texts(value) and len(value) == 1,
    "name": _name,
    "hostname": lambda value: isinstance(value, str) and _HOSTNAME.fullmatch(value) is not None,
    "file_system_names": _texts,
    "file_system_mounts": lambda value: (
        _rows(value, {"mount_point", "file_system_id"})
        and all(one["mount_point"].startswith(_MOUNTS) and ".." not in one["mount_point"] for one in value)
    ),
    "image": lambda value: (
        isinstance(value, dict) and set(value) in ({"id"}, {"family"}) and all(map(_text, value.values()))
    ),
    # The fake's hosts run shell scripts and no other format of cloud-init.
    "user_data": lambda value: (
        isinstance(value, str) and len(value.encode()) <= USER_DATA_BYTES_MAX and value.startswith("#!")
    ),
    "tags": _tags,
    "firewall_rulesets": lambda value: _rows(value, {"id"}),
}
