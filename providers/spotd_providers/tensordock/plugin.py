"""TensorDock as a spotd provider: the requests that are its own, and the descriptor.

It is a plain market, on demand only: no spot price is documented for its present API. An empty list of locations is no
proof that nothing is sold, so it is never taken for the market.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Final

from spotd_providers.contract.errors import RequestRejected, Unavailable
from spotd_providers.contract.provider import Services
from spotd_providers.contract.values import (
    FREE_STORAGE,
    AttemptKey,
    Instance,
    InstanceRef,
    LaunchRequest,
    Market,
    MicroUsdPerGbMonth,
    OfferPage,
    OfferQuery,
    Power,
    ShellAddress,
)
from spotd_providers.kit.calls import Page
from spotd_providers.kit.rest import RestClient, rest_opener
from spotd_providers.kit.shapes import ROWS_MAX, listed_reasons, row_or_none
from spotd_providers.kit.template import bound
from spotd_providers.kit.vm_boot import doorless_ssh_key
from spotd_providers.kit.vm_market import VmMarket, market_plugin, missing_powers, user_data
from spotd_providers.tensordock.wire import (
    DIALECT,
    DISK_STEP_GB,
    PROVIDER,
    SYSTEM_GB,
    WHO,
    TensorDockRow,
    TensorDockSettings,
    as_instance,
    flat,
    offers_of,
)

NO_LOGIN: Final = "TensorDock takes a login only in cloud-init, which every process of the machine may read"
EMPTY: Final = "TensorDock lists no location at all, which is no proof that nothing is sold (a deposit may be needed)"
_BOOT: Final = "/var/lib/spotd-boot.sh"
_NO_SHELL: Final = "name your ssh key in providers.tensordock.ssh_key_id; machines that start afterwards have it"
_MISSING: Final = missing_powers(
    WHO,
    SPOT="TensorDock documents no spot price for its present API, so spotd rents on demand",
    BALANCE="TensorDock's API states no balance; watch it on its website",
)


class TensorDockProvider(VmMarket):
    """The requests that are TensorDock's own."""

    name = PROVIDER
    who = WHO
    mark = "name"
    no_login = NO_LOGIN
    key_hint = "create an API token in TensorDock's dashboard and put it in api_key"
    list_path = "/api/v2/instances"

    def __init__(self, client: RestClient, settings: TensorDockSettings, services: Services) -> None:
        super().__init__(client, services, _MISSING if settings.ssh_key_id else {**_MISSING, Power.SHELL: _NO_SHELL})
        self._settings = settings
        self._gpus_by_name = True
        self._disk_prices: dict[str, MicroUsdPerGbMonth] = {}

    async def offers(self, query: OfferQuery) -> OfferPage:
        """Return every model at every location, for one, two, four and eight GPUs."""
        at = self._services.clock.now()
        if Market.ON_DEMAND not in query.markets:
            return OfferPage(offers=(), at=at)
        data = (await self._client.ask("GET", "/api/v2/locations", what="the list of locations")).get("data")
        rows = data.get("locations") if isinstance(data, dict) else None
        if not isinstance(rows, list) or len(rows) > ROWS_MAX:
            raise Unavailable("TensorDock's answer about locations is no list")
        offers, bad = offers_of(rows, self._settings)
        for one in offers:  # where models differ, the lowest: too little taken off a rate breaks no budget
            known = self._disk_prices.get(one.extra["location"], one.storage_price)
            self._disk_prices[one.extra["location"]] = min(known, one.storage_price)
        bound(self._disk_prices)
        return OfferPage(
            offers=tuple(offers),
            rejected=listed_reasons(bad),
            complete=bool(rows),
            note="" if rows else EMPTY,
            at=at,
        )

    def _address(self, raw: Any) -> ShellAddress | None:
        row = row_or_none(TensorDockRow, raw)
        is_up = row is not None and (row.status or "").lower() == "running"
        return ShellAddress(host=row.ip, port=22, user="user") if is_up and row and row.ip else None

    async def _page(self, _token: str | None) -> Page:
        data = (await self._client.ask("GET", self.list_path, what="the list of instances")).get("data")
        rows = data.get("instances") if isinstance(data, dict) else data
        if not isinstance(rows, list):
            raise Unavailable("TensorDock's answer about instances is no list")
        return [flat(one) for one in rows[:ROWS_MAX]], None if len(rows) <= ROWS_MAX else ""

    async def _row(self, ref: InstanceRef) -> Any | None:
        answer = await self._client.ask_or_absent("GET", self._path(ref), what="an instance")
        if answer is None:
            return None
        raw = flat(answer.get("data", answer))
        if not isinstance(raw, dict) or raw.get("id") != ref.instance_id:
            raise Unavailable(f"TensorDock's answer about instance {ref.instance_id} is about none")
        return raw

    def _machine(self, raw: Any, key: AttemptKey) -> Instance | None:
        row = row_or_none(TensorDockRow, raw)
        return None if row is None else as_instance(row, key, self._disk_prices.get(row.location or "", FREE_STORAGE))

    async def _buy(self, request: LaunchRequest) -> Instance:
        script = user_data(request, who=WHO, extra=("model", "location"), container=self._settings.container)
        offer, count = request.offer, {"count": request.offer.gpu_count}
        model = offer.extra["model"]
        key = self._settings.ssh_key_id
        attributes = {
            "name": request.key,
            "type": "virtualmachine",
            "image": self._settings.image,
            "location_id": offer.extra["location"],
            "resources": {
                "vcpu_count": self._settings.vcpus_per_gpu * offer.gpu_count,
                "ram_gb": self._settings.memory_gb_per_gpu * offer.gpu_count,
                "storage_gb": _disk_gb(request),
                "gpus": {model: count} if self._gpus_by_name else {"model": {"gpuV0Name": model, **count}},
            },
            "useDedicatedIp": key is not None,  # nothing has to reach the machine but the user's own ssh
            **({"ssh_key_id": key} if key else {"ssh_key": doorless_ssh_key(self._services.rng.getrandbits(255))}),
            "cloud_init": {
                "write_files": [{"path": _BOOT, "content": script, "permissions": "0755"}],
                "runcmd": [f"sh {_BOOT}"],
            },
        }
        body = {"data": {"type": "virtualmachine", "attributes": attributes}}
        try:
            answer = await self._purchase(self.list_path, body, request)
        except RequestRejected as exc:
            if "gpus" not in exc.reason.lower():
                raise
            self._gpus_by_name = not self._gpus_by_name  # both forms are documented
            raise Unavailable("TensorDock refuses this form of naming GPUs; the next launch takes the other") from exc
        data = answer.get("data")
        return self._new_machine(data if isinstance(data, dict) else {}, request)

    def _price_limit(self, request: LaunchRequest) -> int:
        """Allow for the disk, which is in the rate of a machine at a location whose prices are not known yet."""
        return super()._price_limit(request) + request.offer.storage_price * _disk_gb(request) // 720 + 1


def _disk_gb(request: LaunchRequest) -> int:
    return SYSTEM_GB + -(-request.disk_gb // DISK_STEP_GB) * DISK_STEP_GB


PLUGIN: Final = market_plugin(
    TensorDockProvider,
    TensorDockSettings,
    rest_opener(TensorDockProvider, DIALECT, PROVIDER),
    title="TensorDock",
    missing=_MISSING,
    shell_reason="with `ssh_key_id`",
    provision_timeout=timedelta(minutes=40),
)
