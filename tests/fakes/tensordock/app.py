"""TensorDock's HTTP API v2 over a `TensorDockCloud`; paths begin with `/api/v2`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import Response

from spotd_providers.testkit.serve import Call, RecordedRequest
from tests.fakes.rest import Handler, RestApi, RestRefusal, as_json, bearer, edited, is_count, is_text
from tests.fakes.tensordock.cloud import (
    RAM_GB_HOUR_USD,
    STORAGE_GB_HOUR_USD,
    VCPU_HOUR_USD,
    TensorDockCloud,
    TensorDockNode,
    TensorDockVm,
)

IMAGES: Final = (
    *("ubuntu2204", "ubuntu2404", "ubuntu2404_ml_pytorch", "ubuntu2404_ml_tensorflow", "ubuntu2404_ml_everything"),
)
_VM: Final = "virtualmachine"


class TensorDockApi(RestApi[TensorDockCloud]):
    """The ASGI application."""

    base_path = "/api/v2"

    @staticmethod
    def classify(request: RecordedRequest) -> Call:
        path = request.path.removeprefix(TensorDockApi.base_path)
        if path in ("/locations", "/hostnodes"):
            return Call.OFFERS
        if not path.startswith("/instances"):
            return Call.OTHER
        if request.method == "POST":
            return Call.LAUNCH if path == "/instances" else Call.OTHER
        return {"GET": Call.LIST, "DELETE": Call.TERMINATE}.get(request.method, Call.OTHER)

    def _routes(self) -> Mapping[str, Mapping[str, Handler]]:
        return {
            "/locations": {"GET": self._locations},
            "/hostnodes": {"GET": self._nodes},
            "/instances": {"GET": self._list, "POST": self._create},
            "/instances/{id}": {"GET": self._show, "DELETE": self._delete},
            "/instances/{id}/start": {"POST": self._power(self.cloud.start)},
            "/instances/{id}/stop": {"POST": self._power(self.cloud.halt)},
            "/secrets": {"GET": self._secrets, "POST": self._add_secret},
            "/secrets/{id}": {"DELETE": self._drop_secret},
        }

    def _authenticate(self, request: Request) -> None:
        if request.url.path != f"{self.base_path}/locations" and bearer(request) != self.cloud.token:
            raise RestRefusal(401, "Unauthorized")

    def _refused(self, refusal: RestRefusal) -> Response:
        body = {"status": refusal.status, "error": refusal.message}
        is_hidden = self.cloud.quirks.errors_in_200 and 400 <= refusal.status < 500 and refusal.status not in (401, 429)
        return as_json(body, 200 if is_hidden else refusal.status, refusal.headers)

    # --- offers ---------------------------------------------------------------------------------------------------

    def _price(self, usd: float) -> str | float:
        return usd if self.cloud.quirks.prices == "number" else f"{usd}"

    def _locations(self, request: Request, _: dict[str, Any]) -> Any:
        quirks = self.cloud.quirks
        is_empty = quirks.no_locations == "always" or (
            quirks.no_locations == "without token" and bearer(request) != self.cloud.token
        )
        nodes = [one for one in self.cloud.nodes.values() if not is_empty and (one.free > 0 or quirks.lists_sold_out)]
        places = {node.location_id: node for node in nodes}
        return {
            "data": {
                "locations": [
                    {
                        "id": location_id,
                        "city": first.city,
                        "stateprovince": "Texas",
                        "country": "United States",
                        "tier": 3,
                        "gpus": [self._model(node) for node in nodes if node.location_id == location_id],
                    }
                    for location_id, first in places.items()
                ]
            }
        }

    def _model(self, node: TensorDockNode) -> Any:
        row = {
            "v0Name": node.model,
            "displayName": node.display,
            "max_count": node.free,
            "price_per_hr": self._price(node.price),
            "resources": {"max_vcpus": node.vcpus, "max_ram_gb": node.ram_gb, "max_storage_gb": node.storage_gb},
            "pricing": {
                "per_vcpu_hr": self._price(VCPU_HOUR_USD),
                "per_gb_ram_hr": self._price(RAM_GB_HOUR_USD),
                "per_gb_storage_hr": self._price(STORAGE_GB_HOUR_USD),
            },
            "network_features": {
                "dedicated_ip_available": node.dedicated_ip,
                "port_forwarding_available": True,
                "network_storage_available": False,
            },
        }
        return edited(row, self.cloud.quirks.edit_offer.get(node.node_id, {}))

    def _nodes(self, request: Request, _: dict[str, Any]) -> Any:
        model = request.query_params.get("gpu_model")
        rows = [
            {
                "id": node.node_id,
                "location_id": node.location_id,
                "location": {"tier": 3, "city": node.city, "country": "United States"},
                "uptime_percentage": 99.5,
                "available_resources": {
                    "gpus": [
                        {
                            "v0Name": node.model,
                            "availableCount": node.free,
                            "price_per_hr": self._price(node.price),
                        }
                    ],
                    "available_ports": node.ports,
                    "max_vcpus_per_gpu": node.vcpus // max(1, node.free),
                    "max_ram_per_gpu": node.ram_gb // max(1, node.free),
                },
            }
            for node in self.cloud.nodes.values()
            if model in (None, node.model) and (node.free > 0 or request.query_params.get("status") != "available")
        ]
        return {"data": {"hostnodes": rows}}

    # --- instances ------------------------------------------------------------------------------------------------

    def _create(self, _: Request, body: dict[str, Any]) -> Response:
        data, quirks = body.get("data"), self.cloud.quirks
        wish = data.get("attributes") if isinstance(data, dict) and data.get("type") == _VM else None
        if not isinstance(wish, dict):
            raise RestRefusal(400, "data.type and data.attributes are required")
        model, count = self._require_valid(wish)
        vm = self.cloud.create(wish, model, count)
        says = {"name": vm.label, "status": self._case(quirks.create_says)}
        more = says if quirks.reply_shape == "flat" else {"attributes": says}
        return as_json({"data": {"type": _VM, "id": vm.machine_id, **more}}, quirks.create_status)

    def _require_valid(self, wish: dict[str, Any]) -> tuple[str, int]:
        """The model of GPU and its count.

        Raises:
            RestRefusal: the attributes are outside their schema.
        """
        quirks, wanted = self.cloud.quirks, wish.get("resources")
        faults = [f"{name}: unknown attribute" for name in wish if name not in _ATTRIBUTES]
        faults += [f"{name}: invalid" for name, fits in _ATTRIBUTES.items() if name in wish and not fits(wish[name])]
        faults += [f"{name}: required" for name in ("name", "type", "image", "resources") if name not in wish]
        if ("location_id" in wish) == ("hostnode_id" in wish):
            faults.append("one of location_id and hostnode_id")
        if "location_id" in wish and "port_forwards" in wish:
            faults.append("port_forwards: with a hostnode_id only")
        keys = [name for name in ("ssh_key", "ssh_key_id") if name in wish]
        if len(keys) > 1 or (quirks.needs_ssh_key and not keys):
            faults.append("one of ssh_key and ssh_key_id")
        if isinstance(wanted, dict) and not faults:
            for name, (least, step) in {"vcpu_count": (2, 2), "ram_gb": (8, 8), "storage_gb": (100, 50)}.items():
                if not is_count(wanted.get(name), least):
                    faults.append(f"{name}: {least} or more")
                elif quirks.steps_on_create and wanted[name] % step:
                    faults.append(f"{name}: in steps of {step}")
        if faults:
            raise RestRefusal(400, "Validation failed: " + "; ".join(faults))
        if wish.get("ssh_key_id") not in (None, *self.cloud.secrets):
            raise RestRefusal(404, "SSH key not found")
        found = _gpus(wanted.get("gpus") if wanted else None, quirks.gpus_shape)
        if found is None:
            raise RestRefusal(400, "Validation failed: resources.gpus: invalid")
        return found

    def _list(self, _: Request, __: dict[str, Any]) -> Any:
        rows = [self._row(vm) for vm in self.cloud.listed() if vm.exists or self.cloud.quirks.lists_ended]
        return {"data": {"instances": rows} if self.cloud.quirks.list_shape == "instances" else rows}

    def _show(self, request: Request, _: dict[str, Any]) -> Any:
        vm = self.cloud.known(request.path_params["id"])
        if vm is None:
            raise RestRefusal(404, "Instance not found")
        row = self._row(vm)
        if not isinstance(row, dict) or self.cloud.quirks.show_shape == "data":
            return {"data": row}
        return {"type": _VM, "id": vm.machine_id, **row["attributes"]}

    def _row(self, vm: TensorDockVm) -> Any:
        model, quirks = vm.node.model, self.cloud.quirks
        gpus = [{"gpuV0Name": model, "count": vm.gpus}] if quirks.row_gpus == "list" else {model: {"count": vm.gpus}}
        attributes = {
            "name": vm.label,
            "status": self._case(vm.status),
            "ipAddress": "203.0.113.42" if vm.status == "running" else None,
            "portForwards": vm.ports,
            "image": vm.body["image"],
            "location_id": vm.node.location_id,
            "resources": {**vm.body["resources"], "gpus": gpus},
            "rateHourly": self._price(round(vm.rate / 1_000_000, 6)),
        }
        edit = quirks.edit_row.get(vm.machine_id, {})
        if not isinstance(edit, dict):
            return edit
        return {"type": _VM, "id": vm.machine_id, "attributes": {**attributes, **edit}}

    def _case(self, status: str) -> str:
        return {"lower": status, "title": status.title(), "upper": status.upper()}[self.cloud.quirks.case]

    def _delete(self, request: Request, _: dict[str, Any]) -> Any:
        self.cloud.delete(request.path_params["id"])
        return {"success": True}

    def _power(self, act: Callable[[str], None]) -> Handler:
        def answer(request: Request, _: dict[str, Any]) -> Any:
            act(request.path_params["id"])
            return {"success": True}

        return answer

    # --- secrets --------------------------------------------------------------------------------------------------

    def _secrets(self, _: Request, __: dict[str, Any]) -> Any:
        return {"data": {"secrets": list(self.cloud.secrets.values())}}

    def _add_secret(self, _: Request, body: dict[str, Any]) -> Response:
        data = body.get("data")
        wish = data.get("attributes") if isinstance(data, dict) else None
        if not isinstance(wish, dict) or wish.get("type") != "SSHKEY" or not is_text(wish.get("name")):
            raise RestRefusal(400, "Validation failed: attributes")
        row = {"id": self.cloud.uuid(), "name": wish["name"], "type": "SSHKEY"}
        self.cloud.secrets[row["id"]] = row
        return as_json({"data": {"type": "secret", "id": row["id"], "attributes": row}}, 201)

    def _drop_secret(self, request: Request, _: dict[str, Any]) -> Any:
        if self.cloud.secrets.pop(request.path_params["id"], None) is None:
            raise RestRefusal(404, "Secret not found")
        return {"success": True}


def _gpus(value: Any, shape: str) -> tuple[str, int] | None:
    """The one model and its count, in the shape that is accepted."""
    if not isinstance(value, dict) or len(value) != 1:
        return None
    ((name, row),) = value.items()
    if not isinstance(row, dict) or not is_count(row.get("count"), 1):
        return None
    if set(row) == {"count"} and shape in ("map", "either"):
        return name, row["count"]
    if name == "model" and is_text(row.get("gpuV0Name")) and shape in ("model", "either"):
        return row["gpuV0Name"], row["count"]
    return None


def _forwards(value: Any) -> bool:
    rows = value if isinstance(value, list) else [None]
    return all(
        isinstance(row, dict) and is_count(row.get("internal_port"), 1) and is_count(row.get("external_port"), 1)
        for row in rows
    )


def _cloud_init(value: Any) -> bool:
    if not isinstance(value, dict) or not set(value) <= {"runcmd", "write_files"}:
        return False
    files, commands = value.get("write_files", []), value.get("runcmd", [])
    if not isinstance(files, list) or not isinstance(commands, list):
        return False
    return all(
        isinstance(row, dict)
        and set(row) <= {"path", "content", "permissions", "owner"}
        and str(row.get("path")).startswith("/")
        and all(isinstance(text, str) for text in row.values())
        and "content" in row
        for row in files
    ) and all(isinstance(one, str) or (isinstance(one, list) and all(map(is_text, one))) for one in commands)


_ATTRIBUTES: Final[Mapping[str, Callable[[Any], bool]]] = {
    "name": is_text,
    "type": lambda value: value == _VM,
    "image": lambda value: value in IMAGES,
    "location_id": is_text,
    "hostnode_id": is_text,
    "resources": lambda value: isinstance(value, dict) and set(value) <= {"vcpu_count", "ram_gb", "storage_gb", "gpus"},
    "useDedicatedIp": lambda value: isinstance(value, bool),
    "port_forwards": _forwards,
    "ssh_key": lambda value: str(value).startswith(("ssh-", "ecdsa-")),
    "ssh_key_id": is_text,
    "cloud_init": _cloud_init,
}
