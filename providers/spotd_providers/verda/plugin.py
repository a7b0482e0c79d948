"""Verda as a spotd provider: the requests that are its own, and the descriptor.

It is a plain market with a spot market at fixed prices. A machine that starts can not be deleted: its end is asked for
again later. Its disk and the script of its first boot are objects of their own: what it leaves of these is deleted.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Any, ClassVar, Final
from urllib.parse import quote

from spotd_providers.contract.errors import OfferGone, RequestRejected, Unavailable
from spotd_providers.contract.provider import Provider, Services
from spotd_providers.contract.values import (
    AttemptKey,
    Balance,
    Instance,
    InstanceRef,
    InstanceState,
    LaunchRequest,
    Market,
    MicroUsdPerGbMonth,
    OfferPage,
    OfferQuery,
    ShellAddress,
)
from spotd_providers.kit.calls import Kept, judge_apart, rejected
from spotd_providers.kit.oauth import open_with_tokens
from spotd_providers.kit.rest import Meaning, RestClient, RestRefused
from spotd_providers.kit.shapes import listed_reasons, row_or_none
from spotd_providers.kit.text import quote_safely
from spotd_providers.kit.vm_boot import doorless_ssh_key
from spotd_providers.kit.vm_market import (
    Leftover,
    VmMarket,
    market_plugin,
    missing_powers,
    usd_balance,
    user_data,
)
from spotd_providers.verda.wire import (
    DIALECT,
    PROVIDER,
    WHO,
    VerdaInstanceRow,
    VerdaSettings,
    as_instance,
    meaning_of,
    offers_of,
    stock_of,
    types_of,
    volume_price,
)

HOST_CHARS_MAX: Final = 60
PRICES_KEPT: Final = timedelta(hours=1)
NO_LOGIN: Final = "Verda takes a login only in the start script, which every process of the machine may read"
SAME_STOCK: Final = "Verda states the same stock for spot as for on-demand, so a spot launch may be refused"
_NO_SHELL: Final = "name your ssh key at Verda in providers.verda.ssh_key_id; machines that start afterwards have it"


class VerdaProvider(VmMarket):
    """The requests that are Verda's own."""

    name = PROVIDER
    who = WHO
    mark = "description"
    no_login = NO_LOGIN
    key_hint = "create cloud API credentials in Verda's console: their id is client_id, their secret api_key"
    list_path = "/v1/instances"
    label_fields = ("description", "hostname")
    leftovers: ClassVar = {"/v1/volumes": "volume", "/v1/scripts": "start script"}

    def __init__(self, client: RestClient, settings: VerdaSettings, services: Services) -> None:
        reasons = {} if settings.ssh_key_id else {"SHELL": _NO_SHELL}
        super().__init__(client, services, missing_powers(WHO, **reasons))
        self._settings = settings
        self._ssh_key = settings.ssh_key_id
        self._disk_price = Kept(services.clock, PRICES_KEPT, self._read_disk_price).get

    async def offers(self, query: OfferQuery) -> OfferPage:
        """Return every type in every location that has some now, for each market that is asked about."""
        at = self._services.clock.now()
        raw = await self._list("/v1/instance-types?currency=usd", "the list of types")
        rows = await judge_apart(lambda: types_of(raw), rows=len(raw))
        stock = {market: await self._stock(market) for market in Market}
        same = stock[Market.SPOT] == stock[Market.ON_DEMAND] and any(stock[Market.SPOT].values())
        asked = {market: places for market, places in stock.items() if market in query.markets}
        offers, odd = offers_of(rows.rows, asked, await self._disk_price(), self._settings)
        return OfferPage(
            offers=tuple(offers),
            rejected=listed_reasons((*rows.rejected, *odd)),
            complete=not rows.is_cut and bool(rows.rows),
            note=SAME_STOCK if same and Market.SPOT in query.markets else "",
            at=at,
        )

    async def balance(self) -> Balance:
        """Return the credit of the account, which is paid in advance."""
        answer = await self._client.ask("GET", "/v1/balance", what="the balance")
        return usd_balance(answer.get("amount"), answer.get("currency"), who=WHO)

    def _address(self, raw: Any) -> ShellAddress | None:
        row = row_or_none(VerdaInstanceRow, raw)
        return ShellAddress(host=row.ip, port=22, user="root") if row and row.ip and row.status == "running" else None

    def _machine(self, raw: Any, key: AttemptKey) -> Instance | None:
        row = row_or_none(VerdaInstanceRow, raw)
        return None if row is None else as_instance(row, key, ended_by_us=row.id in self._asked_to_end)

    async def _buy(self, request: LaunchRequest) -> Instance:
        offer, is_spot = request.offer, request.offer.market is Market.SPOT
        script = user_data(request, who=WHO, extra=("type", "location"), container=self._settings.container)
        image = self._settings.image or await self._image(offer.extra["type"])
        named = {"name": request.key, "script": script}
        made = await self._client.ask("POST", "/v1/scripts", what="storing a start script", attempts=1, json_body=named)
        disk = {"name": request.key, "size": request.disk_gb, "on_spot_discontinue": "delete_permanently"}
        body = {
            "instance_type": offer.extra["type"],
            "image": image,
            "hostname": request.key.replace(".", "-")[-HOST_CHARS_MAX:].lstrip("-"),
            "description": request.key,
            "location_code": offer.extra["location"],
            "is_spot": is_spot,
            "contract": "SPOT" if is_spot else "PAY_AS_YOU_GO",
            "pricing": "FIXED_PRICE",
            "ssh_key_ids": [self._ssh_key] if self._ssh_key else [],
            "startup_script_id": made.get("id"),
            "os_volume": disk if is_spot else {"name": request.key, "size": request.disk_gb},
        }
        try:
            return self._new_machine(await self._purchase(self.list_path, body, request), request)
        except RequestRejected as exc:
            if self._ssh_key is not None or "ssh" not in exc.reason.lower():
                raise
            self._ssh_key = await self._registered_key(f"spotd-{self._services.install}")
            raise Unavailable("Verda sells no machine without an ssh key; the next launch names one") from exc

    def _price_limit(self, request: LaunchRequest) -> int:
        """Allow for the disk: no page says whether it is in the price that a machine shows."""
        return super()._price_limit(request) + request.offer.storage_price * request.disk_gb // 720 + 1

    async def _ask_end(self, ref: InstanceRef) -> bool | None:
        row = row_or_none(VerdaInstanceRow, await self._row(ref))
        if row is None:
            return False
        disks = [] if row.os_volume_id is None else [row.os_volume_id]
        body = {"id": [ref.instance_id], "action": "delete", "volume_ids": disks, "delete_permanently": True}
        try:
            answer = await self._client.change("PUT", self.list_path, what="an end", json_body=body)
        except RestRefused as exc:
            if exc.meaning is Meaning.ABSENT:
                return False
            raise Unavailable(str(exc)) from exc
        for one in answer.get("rows") or ():  # each machine has a result of its own, whatever the status of the answer
            said = one.get("error") if isinstance(one, dict) else None
            if said and meaning_of(str(said), is_purchase=False) is not Meaning.ABSENT:
                raise Unavailable(f"Verda does not end instance {ref.instance_id}: {quote_safely(str(said))}")
        self._note_end(ref)
        return None

    def _is_left(self, what: str, one: Leftover, state: InstanceState | None) -> bool:
        """Whether it is of no use: a disk that is detached, or a script, which only the first boot reads."""
        if what == "volume":
            return state is None and one.instance_id is None and (one.status or "").lower() == "detached"
        return state not in (InstanceState.PENDING, InstanceState.UNKNOWN)

    async def _stock(self, market: Market) -> dict[str, frozenset[str]]:
        flag = str(market is Market.SPOT).lower()
        # The two official clients spell the flag differently.
        stock = stock_of(await self._list(f"/v1/instance-availability?is_spot={flag}&isSpot={flag}", "the stock"))
        if stock is None:
            raise Unavailable("Verda's list of what can be had now cannot be read")
        return stock

    async def _read_disk_price(self) -> MicroUsdPerGbMonth:
        price = volume_price(await self._list("/v1/volume-types?currency=usd", "the prices of volumes"))
        if price is None:
            raise Unavailable("Verda does not say in US dollars what a volume costs")
        return price

    async def _registered_key(self, name: str) -> str | None:
        """Return the id of an ssh key that opens no door, which a launch has to name if no other key is named."""
        rows = [row_or_none(Leftover, one) for one in await self._list("/v1/ssh-keys", "the list of ssh keys")]
        known = next((row.id for row in rows if row is not None and row.name == name), None)
        body = {"name": name, "key": doorless_ssh_key(self._services.rng.getrandbits(255))}
        what = "registering an ssh key"
        return known or (await self._client.ask("POST", "/v1/ssh-keys", what=what, json_body=body)).get("id")

    async def _image(self, kind: str) -> str:
        """Return the newest machine image with docker that this type takes: old GPUs refuse new images."""
        path = f"/v1/images?instance_type={quote(kind, safe='')}"
        try:
            found = (await self._client.change("GET", path, what="the list of images")).get("rows")
        except RestRefused as exc:
            raise OfferGone(f"Verda knows no type {kind} now: {exc}") from exc
        types = [one.get("image_type") or one.get("id") for one in found or () if isinstance(one, dict)]
        names = sorted(one for one in types if isinstance(one, str) and one.endswith("docker") and len(one) < 128)
        if not names:
            raise rejected(WHO, "image", f"Verda shows no machine image with docker for {kind}; name one in image")
        return next((one for one in reversed(names) if "ubuntu" in one and "open" in one), names[-1])


@asynccontextmanager
async def _open(settings: VerdaSettings, services: Services) -> AsyncIterator[Provider]:
    hint = "client_id and api_key under [providers.verda]"
    async with open_with_tokens(
        settings.base_url, DIALECT, services, client_id=settings.client_id, path="/v1/oauth2/token", key_hint=hint
    ) as client:
        yield VerdaProvider(client, settings, services)


PLUGIN: Final = market_plugin(
    VerdaProvider,
    VerdaSettings,
    _open,
    title="Verda",
    missing=missing_powers(WHO),
    shell_reason="with `ssh_key_id`",
    provision_timeout=timedelta(minutes=30),
    bills_by=timedelta(minutes=10),
)
