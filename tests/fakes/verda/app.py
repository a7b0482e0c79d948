"""Verda's HTTP API over a `VerdaCloud`; paths begin with `/v1`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any, Final, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from spotd_providers.testkit.serve import Call, RecordedRequest
from tests.fakes.rest import MONTH_HOURS, Handler, RestApi, RestRefusal, as_json, bearer, edited, is_text
from tests.fakes.verda.cloud import VerdaCloud, VerdaInstance, VerdaVolume
from tests.fakes.verda.records import CREATE, IMAGE_IDS, JUPYTER_TOKEN, LOCATIONS, REQUIRED, VerdaType, refusal, texts

EUR_PER_USD: Final = 0.9
_POWER: Final = ("boot", "start", "shutdown", "force_shutdown", "configure_spot", "delete_stuck")
_ENDS: Final = ("delete", "discontinue", "hibernate")
T = TypeVar("T")


class VerdaApi(RestApi[VerdaCloud]):
    """The ASGI application."""

    base_path = "/v1"

    @staticmethod
    def classify(request: RecordedRequest) -> Call:
        path = request.path.removeprefix(VerdaApi.base_path)
        if path.startswith(("/instance-types", "/instance-availability")):
            return Call.OFFERS
        if path == "/balance":
            return Call.ACCOUNT
        by_method = {"GET": Call.LIST, "POST": Call.LAUNCH, "PUT": Call.TERMINATE}
        return by_method.get(request.method, Call.OTHER) if path.startswith("/instances") else Call.OTHER

    def _routes(self) -> Mapping[str, Mapping[str, Handler]]:
        return {
            "/oauth2/token": {"POST": self._token},
            "/instance-types": {"GET": self._types},
            "/instance-availability": {"GET": self._stock},
            "/instance-availability/{name}": {"GET": self._in_stock},
            "/locations": {"GET": lambda *_: [{"code": one, "name": one, "country_code": "FI"} for one in LOCATIONS]},
            "/volume-types": {"GET": self._volume_types},
            "/images": {"GET": self._images},
            "/balance": {"GET": self._balance},
            "/instances": {"GET": self._list, "POST": self._create, "PUT": self._act},
            "/instances/{id}": {"GET": self._show},
            "/volumes": {"GET": self._volumes},
            "/volumes/trash": {"GET": self._trash},
            "/volumes/{id}": {"GET": self._volume, "DELETE": self._drop_volume},
            "/scripts": {"GET": lambda *_: list(self.cloud.scripts.values()), "POST": self._add_script},
            "/scripts/{id}": {
                "GET": lambda request, _: [_get(self.cloud.scripts, request, "script")],
                "DELETE": lambda request, _: self._drop(self.cloud.scripts, request, "script"),
            },
            "/ssh-keys": {"GET": lambda *_: list(self.cloud.ssh_keys.values()), "POST": self._add_key},
            "/ssh-keys/{id}": {"DELETE": lambda request, _: self._drop(self.cloud.ssh_keys, request, "SSH key")},
        }

    def _refused(self, refusal: RestRefusal) -> Response:
        return as_json({"code": refusal.code, "message": refusal.message}, refusal.status, refusal.headers)

    # --- tokens ---------------------------------------------------------------------------------------------------

    def _authenticate(self, request: Request) -> None:
        path = request.url.path.removeprefix(self.base_path)
        if path == "/oauth2/token" or (self.cloud.quirks.open_catalogue and path == "/instance-types"):
            return
        expires = self.cloud.access.get(bearer(request))
        if expires is None or expires <= self.cloud.clock.now():
            raise refusal("unauthorized_request", "The access token is invalid or has expired")

    def _token(self, _: Request, body: dict[str, Any]) -> Any:
        cloud, now, quirks = self.cloud, self.cloud.clock.now(), self.cloud.quirks
        if body.get("grant_type") == "refresh_token":
            if cloud.refresh.get(str(body.get("refresh_token")), now) <= now:
                code = "unauthorized_request" if quirks.refresh_refused == 401 else "invalid_request"
                raise RestRefusal(quirks.refresh_refused, "Invalid refresh token", code=code)
        elif body.get("grant_type") != "client_credentials":
            raise refusal("invalid_request", "Unsupported grant type")
        elif (body.get("client_id"), body.get("client_secret")) != (cloud.client_id, cloud.client_secret):
            raise refusal("unauthorized_request", "Invalid client id or client secret")
        if quirks.one_token:
            cloud.access.clear()
            cloud.refresh.clear()
        access, refresh = f"fake-access-{cloud.uuid()}", f"fake-refresh-{cloud.uuid()}"
        cloud.access[access], cloud.refresh[refresh] = now + quirks.token_lives, now + quirks.refresh_lives
        says = quirks.token_lives.total_seconds() if quirks.expires_in_says is None else quirks.expires_in_says
        return {
            "access_token": access,
            "refresh_token": refresh,
            "scope": "cloud-api-v1",
            "token_type": "Bearer",
            "expires_in": says,
        }

    # --- offers ---------------------------------------------------------------------------------------------------

    def _price(self, usd: float, currency: str, number: int = 0) -> str | float:
        amount = round(usd * (EUR_PER_USD if currency == "eur" else 1), 4)
        form = self.cloud.quirks.prices
        return str(amount) if form == "text" or (form == "mixed" and number % 2) else amount

    def _types(self, request: Request, _: dict[str, Any]) -> Any:
        quirks = self.cloud.quirks
        currency = quirks.any_currency or request.query_params.get("currency") or quirks.currency
        if currency not in ("usd", "eur"):
            raise refusal("invalid_request", "currency must be one of: usd, eur")
        rows = []
        for number, kind in enumerate(self.cloud.types.values()):
            prices = {
                "price_per_hour": kind.price,
                "spot_price": kind.spot,
                "dynamic_price": kind.dynamic,
                "max_dynamic_price": round(kind.price * 1.4, 4),
                "serverless_price": round(kind.price * 1.1, 4),
                "serverless_spot_price": round(kind.spot * 1.1, 4),
            }
            row = {
                "id": f"type-{number}",
                "instance_type": kind.name,
                **{name: self._price(usd, currency, number + at) for at, (name, usd) in enumerate(prices.items())},
                "currency": currency,
                "manufacturer": "AMD" if "AMD" in kind.gpu else "NVIDIA",
                "model": kind.gpu.partition("x ")[2].partition(" ")[0],
                "name": kind.gpu,
                "display_name": kind.gpu,
                "description": "Dedicated Hardware Instance",
                "best_for": [],
                "p2p": "",
                "deploy_warning": None,
                "supported_os": list(kind.images),
                **_hardware(kind),
            }
            rows.append(edited(row, quirks.edit_offer.get(kind.name, {})))
        return rows

    def _is_spot_asked(self, request: Request) -> bool:
        reads = {"either": ("isSpot", "is_spot"), "none": ()}
        flag = self.cloud.quirks.spot_flag
        return any(request.query_params.get(name) == "true" for name in reads.get(flag, (flag,)))

    def _stock(self, request: Request, _: dict[str, Any]) -> Any:
        spot, asked = self._is_spot_asked(request), request.query_params.get("location_code")
        return [
            {
                "location_code": place,
                "availabilities": [one.name for one in self.cloud.types.values() if one.free.get((place, spot), 0) > 0],
            }
            for place in LOCATIONS
            if asked in (None, place)
        ]

    def _in_stock(self, request: Request, _: dict[str, Any]) -> Any:
        kind = self.cloud.types.get(request.path_params["name"])
        if kind is None:
            raise refusal("not_found", "Invalid instance type")
        rows = self._stock(request, {})
        return any(kind.name in row["availabilities"] for row in rows)

    def _volume_types(self, _: Request, __: dict[str, Any]) -> Any:
        name = "monthly_per_gb" if self.cloud.quirks.older_volume_prices else "price_per_month_per_gb"
        return [
            {"type": kind, "price": {name: usd, "cps_per_gb": usd * 100 / MONTH_HOURS / 3600, "currency": "usd"}}
            for kind, usd in self.cloud.gb_month_usd.items()
        ]

    def _images(self, request: Request, _: dict[str, Any]) -> Any:
        asked = request.query_params.get("instance_type")
        if asked is not None and asked not in self.cloud.types:
            raise refusal("invalid_request", "Invalid instance type")
        return [
            {"id": image_id, "image_type": name, "name": name.title(), "details": []}
            for image_id, name in IMAGE_IDS.items()
            if not asked or name in self.cloud.types[asked].images
        ]

    def _balance(self, _: Request, __: dict[str, Any]) -> Any:
        currency = self.cloud.quirks.balance_currency
        amount = self.cloud.balance() * (EUR_PER_USD if currency == "eur" else 1)
        return {"amount": round(amount, 6), "currency": currency}

    # --- instances ------------------------------------------------------------------------------------------------

    def _list(self, request: Request, _: dict[str, Any]) -> Any:
        asked, ended = request.query_params.get("status"), self.cloud.quirks.lists_ended
        return [
            self._row(one) for one in self.cloud.listed() if (one.status == asked if asked else one.exists or ended)
        ]

    def _show(self, request: Request, _: dict[str, Any]) -> Any:
        one = self.cloud.known(request.path_params["id"])
        if one is None:
            raise refusal("not_found", "Invalid instance id")
        return self._row(one)

    def _row(self, one: VerdaInstance) -> Any:
        quirks, is_up = self.cloud.quirks, one.os_volume_id is not None
        row = {
            "id": one.machine_id,
            "hostname": one.label,
            "description": one.body["description"],
            "status": one.status,
            "created_at": _instant(one.launched_at),
            "ip": "203.0.113.9" if is_up else None,
            "location": one.location,
            "instance_type": one.kind.name,
            "price_per_hour": self._price(one.price / 1_000_000, "usd"),
            "is_spot": one.is_spot,
            "contract": one.body.get("contract") or ("SPOT" if one.is_spot else "PAY_AS_YOU_GO"),
            "pricing": one.body["pricing"],
            "image": one.body["image"],
            "os_name": one.body["image"],
            "os_volume_id": one.os_volume_id,
            "volume_ids": one.volume_ids,
            "ssh_key_ids": one.body.get("ssh_key_ids") or [],
            "startup_script_id": one.body.get("startup_script_id"),
            "jupyter_token": JUPYTER_TOKEN,
            **_hardware(one.kind),
        }
        if quirks.takes_tags and quirks.echoes_tags:
            row["tags"] = one.body.get("tags") or []
        return edited(row, quirks.edit_row.get(one.machine_id, {}))

    def _create(self, _: Request, body: dict[str, Any]) -> Response:
        cloud, quirks = self.cloud, self.cloud.quirks
        fields = {name: fits for name, fits in CREATE.items() if name != "tags" or quirks.takes_tags}
        faults = [f"property {name} should not exist" for name in body if name not in fields]
        faults += [
            f"{name} is invalid" for name, fits in fields.items() if body.get(name) is not None and not fits(body[name])
        ]
        faults += [f"{name} should not be empty" for name in REQUIRED if body.get(name) in (None, "")]
        if quirks.needs_ssh_key and not body.get("ssh_key_ids"):
            faults.append("ssh_key_ids should not be empty")
        if not faults and (body.get("os_volume") or {}).get("size", 50) < quirks.os_volume_gb_min:
            faults.append(f"os_volume.size must not be less than {quirks.os_volume_gb_min}")
        if faults:
            raise refusal("invalid_request", "; ".join(faults))
        kind, volume = cloud.types.get(body["instance_type"]), cloud.volumes.get(body["image"])
        if kind is None:
            raise refusal("invalid_request", "Invalid instance type")
        if IMAGE_IDS.get(body["image"], body["image"]) not in kind.images and (
            volume is None or volume.instance_id or volume.deleted_at
        ):
            raise refusal("invalid_request", "Operating system is not valid for this instance type")
        if body.get("startup_script_id") not in (None, *cloud.scripts):
            raise refusal("not_found", "Invalid startup script id")
        if any(key not in cloud.ssh_keys for key in body.get("ssh_key_ids") or []):
            raise refusal("not_found", "Invalid SSH key id")
        for volume_id in body.get("existing_volumes") or []:
            if volume_id not in cloud.volumes or cloud.volumes[volume_id].instance_id:
                raise refusal("invalid_request", "Invalid volume id")
        by_contract = quirks.spot_decided_by == "contract"
        one = cloud.create(body, is_spot=body.get("contract") == "SPOT" if by_contract else bool(body.get("is_spot")))
        text = f'"{one.machine_id}"' if quirks.quoted_id else one.machine_id
        return Response(text, status_code=quirks.create_status, media_type="text/plain")

    def _act(self, _: Request, body: dict[str, Any]) -> Response:
        ids, action, named = body.get("id"), body.get("action"), body.get("volume_ids") or []
        ids = [ids] if isinstance(ids, str) else ids
        if not texts(ids) or not ids or action not in (*_POWER, *_ENDS) or not texts(named):
            raise refusal("invalid_request", "id, action or volume_ids is invalid")
        targets = [one for one in (self.cloud.rented.get(instance_id) for instance_id in ids) if one]
        of_targets = {volume_id for one in targets for volume_id in one.volume_ids}
        if action in _ENDS and any(one.exists for one in targets) and not of_targets.issuperset(named):
            raise refusal("invalid_request", "Invalid volume id")

        def act(instance_id: str) -> None:
            if action in _ENDS:
                permanently = body.get("delete_permanently") is True
                self.cloud.delete(instance_id, [] if action == "hibernate" else named, permanently=permanently)
            else:
                self.cloud.action(instance_id, action)

        return self._results(ids, act, action)

    def _results(self, ids: list[str], act: Callable[[str], None], action: str) -> Response:
        rows, refusals, form = [], [], self.cloud.quirks.results
        for one in ids:
            row: dict[str, Any] = {"action": action, "instanceId": one, "status": "success", "statusCode": 202}
            try:
                act(one)
            except RestRefusal as no:
                row |= {"status": "error", "error": no.message, "statusCode": no.status}
                refusals.append(no)
            rows.append(row)
        if form == "always" or (form == "bulk" and len(ids) > 1):
            return as_json(rows, 202)
        if refusals:
            raise refusals[0]
        return Response(status_code=202)

    # --- volumes, scripts, keys -----------------------------------------------------------------------------------

    def _volumes(self, request: Request, _: dict[str, Any]) -> Any:
        asked = request.query_params.get("status")
        rows = [_volume_row(self.cloud, one) for one in self.cloud.volumes.values() if one.deleted_at is None]
        return [row for row in rows if asked in (None, row["status"])]

    def _trash(self, _: Request, __: dict[str, Any]) -> Any:
        return [_volume_row(self.cloud, one) for one in self.cloud.volumes.values() if one.deleted_at is not None]

    def _volume(self, request: Request, _: dict[str, Any]) -> Any:
        return _volume_row(self.cloud, _get(self.cloud.volumes, request, "volume"))

    def _drop_volume(self, request: Request, body: dict[str, Any]) -> Response:
        self.cloud.delete_volume(request.path_params["id"], permanently=body.get("is_permanent") is True)
        return Response(status_code=202)

    def _add_script(self, _: Request, body: dict[str, Any]) -> Response:
        name, script, most = body.get("name"), body.get("script"), self.cloud.quirks.script_bytes_max
        if not is_text(name) or not is_text(script, 10_000_000):
            raise refusal("invalid_request", "name or script is invalid")
        if most is not None and len(str(script).encode()) > most:
            raise refusal("invalid_request", "script is too long")
        script_id = self.cloud.uuid()
        self.cloud.scripts[script_id] = {"id": script_id, "name": str(name), "script": str(script)}
        return Response(script_id, status_code=201, media_type="text/plain")

    def _add_key(self, _: Request, body: dict[str, Any]) -> Response:
        if not is_text(body.get("name")) or not str(body.get("key")).startswith(("ssh-", "ecdsa-")):
            raise refusal("invalid_request", "name or key is invalid")
        key_id = self.cloud.uuid()
        self.cloud.ssh_keys[key_id] = {"id": key_id, "name": body["name"], "key": body["key"]}
        return Response(key_id, status_code=201, media_type="text/plain")

    def _drop(self, rows: dict[str, T], request: Request, what: str) -> Response:
        _get(rows, request, what)
        del rows[request.path_params["id"]]
        return Response(status_code=200)


def _get(rows: Mapping[str, T], request: Request, what: str) -> T:
    found = rows.get(request.path_params["id"])
    if found is None:
        raise refusal("not_found", f"Invalid {what} id")
    return found


def _instant(at: datetime | None) -> str | None:
    return at.strftime("%Y-%m-%dT%H:%M:%S.000Z") if at else None


def _hardware(kind: VerdaType) -> dict[str, Any]:
    """Hardware of a type; a type without GPUs has either a count of 0 or no object at all."""
    gpu = {"description": kind.gpu, "number_of_gpus": kind.gpus}
    return {
        "cpu": {"description": "30 CPU", "number_of_cores": 30},
        "gpu": None if not kind.gpus and kind.name.endswith("NULL") else gpu,
        "memory": {"description": "120GB RAM", "size_in_gigabytes": 120},
        "gpu_memory": {"description": f"{kind.memory_gb}GB GPU RAM", "size_in_gigabytes": kind.memory_gb},
        "storage": {"description": "dynamic"},
    }


def _volume_row(cloud: VerdaCloud, one: VerdaVolume) -> dict[str, Any]:
    monthly = cloud.gb_month_usd[one.kind] * one.size
    return {
        "id": one.volume_id,
        "status": "deleted" if one.deleted_at else "attached" if cloud.owner_of(one) else "detached",
        "name": one.name,
        "size": one.size,
        "type": one.kind,
        "is_os_volume": one.is_os,
        "instance_id": cloud.owner_of(one),
        "location": one.location,
        "created_at": _instant(one.made_at),
        "deleted_at": _instant(one.deleted_at),
        "base_hourly_cost": round(monthly / MONTH_HOURS, 6),
        "monthly_price": round(monthly, 4),
        "currency": "usd",
        "ssh_key_ids": [],
    }
