"""Azure as a spotd provider: the requests that are its own, and the descriptor.

One `PUT` makes a machine with its interface, address and disk, and one `DELETE` removes all of them. A machine's name
is its key, so a second launch under one key can not make a second machine. What a launch lacks in capacity is said by
its operation some seconds later, and leaves a machine that failed: it is ended before the launch says so.
"""

from __future__ import annotations

import base64
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Any, ClassVar, Final
from urllib.parse import quote, urlsplit

from spotd_providers.azure import wire
from spotd_providers.azure.market import AzureMarket, disk_gb, prices_of
from spotd_providers.azure.wire import KEY_TAG, PROVIDER, WHO, AzureSettings, AzureVmRow, flat, name_of
from spotd_providers.contract import errors
from spotd_providers.contract.errors import AuthFailed, ProviderError, Unavailable
from spotd_providers.contract.provider import Provider, ProviderTraits, Services
from spotd_providers.contract.values import (
    MICRO,
    AttemptKey,
    Capability,
    Instance,
    InstanceId,
    InstanceRef,
    InstanceState,
    LaunchRequest,
    Loss,
    Market,
    OfferPage,
    OfferQuery,
    Power,
)
from spotd_providers.kit.boundary import AdapterPlugin, all_but, is_loopback
from spotd_providers.kit.calls import Page, all_pages, own_path
from spotd_providers.kit.http import Http, open_http
from spotd_providers.kit.oauth import open_with_tokens
from spotd_providers.kit.rest import READ_TIMEOUT_S, Dialect, Meaning, RestClient, RestRefused
from spotd_providers.kit.shapes import row_or_none
from spotd_providers.kit.template import Check, bound
from spotd_providers.kit.text import last_lines
from spotd_providers.kit.vm_boot import doorless_ssh_key
from spotd_providers.kit.vm_causes import CAUSE_WITHIN, CausedEnds
from spotd_providers.kit.vm_market import missing_powers, user_data

SCRIPT_BYTES_MAX: Final = 48_000
USER_DATA_BYTES_MAX: Final = 64_000
NAMES: Final = re.compile(r"[A-Za-z0-9_.-]{1,64}")
OPERATION_READS: Final = 6
LOG_TIMEOUT_S: Final = 6.0
"""The activity log is asked within a list of machines."""
OPERATION_EVERY: Final = timedelta(seconds=5)
"""A launch is watched so long: what lacks capacity fails within seconds."""
STATES_READ_MAX: Final = 200
"""Machines whose power state is read for one list: a list shows none."""
SCOPE: Final = "https://management.azure.com/.default"
NO_LOGIN: Final = "Azure takes a login only in the start script, which every process of the machine may read"
_NO_SHELL: Final = "nothing from outside reaches a machine at Azure: its address lets no connection in"
_POWERS: Final = missing_powers(
    WHO,
    NOTICES="Azure warns the machine alone, half a minute ahead: its runner saves a checkpoint then, no list shows it",
    SHELL=_NO_SHELL,
    PORTS=_NO_SHELL,
    BALANCE="Azure bills afterwards and states no balance",
    BILLING="Azure states costs a day late, and in no call that spotd knows; its portal shows them",
    CAPACITY_SCORES="Azure's placement scores take a right in the whole subscription, so spotd does not ask for them",
    BID_CHANGE="the highest price of a spot machine at Azure is set when it is launched",
)
del _POWERS[Power.LOGS]
_PRICES: Final = Dialect(who="Azure's price list", problem_of=lambda _: None, penalty=timedelta(seconds=3))


class AzureProvider(CausedEnds):
    """The requests that are Azure's own."""

    name = PROVIDER
    who = WHO
    machine = "machine"
    mark = "tag"
    no_login = NO_LOGIN
    ids = NAMES
    judged_prices: ClassVar[frozenset[Market]] = frozenset()
    key_hint = "a client secret of the application in api_key, and the rights of docs/providers/azure.md"
    list_path = "/Microsoft.Compute/virtualMachines"
    leftovers: ClassVar = {
        "/Microsoft.Compute/disks": "disk",
        "/Microsoft.Network/networkInterfaces": "network interface",
        "/Microsoft.Network/publicIPAddresses": "public address",
    }

    def __init__(
        self, client: RestClient, prices: RestClient, bare: Http, settings: AzureSettings, services: Services
    ) -> None:
        super().__init__(client, services, _POWERS)
        self._clients = (client, bare)
        self._bare, self._settings = bare, settings
        self._market = AzureMarket(client, prices, settings, services)
        self._operations: dict[InstanceId, str] = {}
        self._is_spot: dict[InstanceId, bool] = {}

    async def account(self) -> str:
        """Return the subscription and group: a key of others would make every machine appear gone."""
        return f"{self._settings.subscription_id}/{self._settings.resource_group}".lower()

    async def offers(self, query: OfferQuery) -> OfferPage:
        """Return every size with a GPU in the regions of the settings, for each market that is asked about."""
        page = await self._market.offers(query)
        self._note_prices(page.offers, "size")
        return page

    def _at(self, path: str) -> str:
        return self._settings.at(path)

    def _label(self, raw: Any) -> str | None:
        """Return the key in a row's tag, if its name is that key's: a copy of our tags makes no machine ours."""
        name, tags = (raw.get("id"), raw.get("tags")) if isinstance(raw, dict) else (None, None)
        if not isinstance(name, str) or NAMES.fullmatch(name) is None:
            return None
        tag = tags.get(KEY_TAG) if isinstance(tags, dict) else None
        if isinstance(tag, str):
            return tag if name_of(tag) == name else name
        return None if name.startswith(f"spotd-{self._services.install}-") else name

    def _machine(self, raw: Any, key: AttemptKey) -> Instance | None:
        row = row_or_none(AzureVmRow, raw)
        if row is None:
            return None
        size = None if row.properties is None else row.properties.size
        return self._priced(wire.as_instance(row, key), size, raw.get("location"))

    async def _page(self, token: str | None) -> Page:
        return await self._market.list_page(token or self._at(self.list_path), f"the list of {self.machine}s")

    async def _row(self, ref: InstanceRef) -> Any | None:
        path = self._at(f"{self._path(ref)}?$expand=instanceView")
        row = flat(await self._client.ask_or_absent("GET", path, what=f"a {self.machine}"))
        if row is not None and row["id"] != str(ref.instance_id).lower():
            raise Unavailable(f"{WHO}'s answer about {self.machine} {ref.instance_id} is about none")
        return row

    async def _explain(self, instances: tuple[Instance, ...]) -> tuple[Instance, ...]:
        """Read the power state of each machine that is made or failed, and why: a list shows neither."""
        found = list(instances)
        for number, one in enumerate(found[:STATES_READ_MAX]):
            try:
                if one.detail == wire.UNREAD:
                    raw = await self._row(one.ref)
                    ended = replace(one, state=InstanceState.ENDING, detail="")
                    found[number] = ended if raw is None else self._machine(raw, one.key) or one
                if found[number].loss is Loss.PROVISION_FAILED:
                    found[number] = await self._with_failure(found[number])
            except AuthFailed:
                raise
            except ProviderError:
                break  # what Azure does not answer for one it does not answer for the next, and the list may not wait
        return await super()._explain(tuple(found))

    async def _with_failure(self, one: Instance) -> Instance:
        path = self._operations.get(one.ref.instance_id)
        try:
            said = {} if path is None else await self._client.ask("GET", path, what="how a launch went", attempts=1)
        except ProviderError:
            return one  # the reason is optional: an operation expires, or may not be read
        if not isinstance(said.get("error"), dict):
            return one
        cause = wire.failure_of(said["error"])
        loss = Loss.NO_CAPACITY if cause.meaning is Meaning.NO_CAPACITY else one.loss
        return replace(one, loss=loss, detail=str(cause))

    async def _ask_cause(self, ref: InstanceRef) -> Loss | None:
        """Return `PREEMPTED` for a spot machine, unless the activity log says that it was deleted and not evicted.

        The log is minutes late. One whose deletion no row shows was deleted by its eviction policy.
        """
        if not self._is_spot.get(ref.instance_id):
            return None
        since = (self._services.clock.now() - timedelta(hours=2)).strftime("%Y-%m-%dT%H:%M:%SZ")
        uri = f"{self._settings.group}/providers{self._path(ref)}"
        query = quote(f"eventTimestamp ge '{since}' and resourceUri eq '{uri}'", safe="")
        where = f"{self._settings.subscription}/providers/Microsoft.Insights/eventtypes/management/values"
        path = f"{where}?api-version=2015-04-01&$filter={query}"
        try:
            rows = (
                await self._client.ask("GET", path, what="the activity log", attempts=1, timeout_s=LOG_TIMEOUT_S)
            ).get("rows")
        except ProviderError:
            rows = None  # this right is optional, and a log that hangs says as little
        said = repr([row.get("operationName") for row in (rows or ())[:200] if isinstance(row, dict)]).lower()
        is_deleted = "evictspotvm" not in said and "/virtualmachines/delete" in said
        return None if is_deleted else Loss.PREEMPTED

    def _own(self, instance: Instance) -> None:
        super()._own(instance)
        if instance.market is not None:
            self._is_spot[instance.ref.instance_id] = instance.market is Market.SPOT
            bound(self._is_spot)

    async def _buy(self, request: LaunchRequest) -> Instance:
        body = self._body(request)
        if request.offer.market is Market.ON_DEMAND:
            await self._require_price(request)  # a spot machine's highest price is Azure's to keep
        ref = InstanceRef(provider=PROVIDER, instance_id=InstanceId(name_of(request.key)))
        path, is_new = self._at(self._path(ref)), {"if-none-match": "*"}
        answer = await self._client.send_purchase("PUT", path, body, key=request.key, headers=is_new)
        try:
            made = flat(self._client.judge_purchase(answer, key=request.key))
        except RestRefused as exc:
            raise await self._purchase_refusal(exc, request) from exc
        instance = self._machine(made, request.key)
        if instance is None or instance.ref != ref:
            raise errors.OutcomeUnknown(f"{WHO}'s answer to a launch names no {self.machine}", key=request.key)
        self._own(instance)
        if operation := own_path(answer.headers.get("azure-asyncoperation"), self._settings.base_url):
            self._operations[ref.instance_id] = operation
            bound(self._operations)
            await self._watch(operation, instance, request)
        return replace(instance, state=InstanceState.PENDING, detail="")

    async def _watch(self, operation: str, instance: Instance, request: LaunchRequest) -> None:
        """Wait some seconds for the operation of a launch; one that failed leaves a machine, which is ended."""
        for _ in range(OPERATION_READS):
            await self._services.clock.sleep(OPERATION_EVERY)
            try:
                said = await self._client.ask("GET", operation, what="how a launch goes", attempts=1)
            except ProviderError:
                return  # the list shows it
            status = str(said.get("status")).lower()
            if status == "succeeded":
                return
            if status in ("failed", "canceled"):
                cause = wire.failure_of(said.get("error"))
                await self._undo(instance.ref, request.key, str(cause))
                raise await self._purchase_refusal(cause, request) from cause

    def _body(self, request: LaunchRequest) -> Mapping[str, Any]:
        """Build a machine without an identity: what runs there can not ask Azure for anything."""
        settings, offer, is_spot = self._settings, request.offer, request.offer.market is Market.SPOT
        name = name_of(request.key)
        script = user_data(
            request,
            who=WHO,
            extra=("size", "region"),
            container=settings.container,
            script_bytes_max=SCRIPT_BYTES_MAX,
            user_data_bytes_max=USER_DATA_BYTES_MAX,
            beside=wire.watch_lines(settings.base_url, name) if is_spot else "",
        )
        image = dict(zip(("publisher", "offer", "sku", "version"), settings.image.split(":"), strict=True))
        tags = {wire.INSTALL_TAG: str(self._services.install), KEY_TAG: str(request.key)}
        network = f"Microsoft.Network/virtualNetworks/{settings.network}-{offer.extra['region']}"
        door = doorless_ssh_key(self._services.rng.getrandbits(255))
        # Azure is said to take five decimals; a cap below the market's price by less than that would be refused.
        cap = -(-request.price_max // 10) * 10 / MICRO
        spot = {"priority": "Spot", "evictionPolicy": "Delete", "billingProfile": {"maxPrice": cap}}
        dies = {"deleteOption": "Delete"}
        address = {"name": name, "tags": tags, "sku": {"name": "Standard"}, "properties": dies}
        subnet = {"id": f"{settings.group}/providers/{network}/subnets/default"}
        ips = [{"name": "ip", "properties": {"subnet": subnet, "publicIPAddressConfiguration": address}}]
        interface = {"name": name, "tags": tags, "properties": {"primary": True, **dies, "ipConfigurations": ips}}
        keys = [{"path": "/home/spotd/.ssh/authorized_keys", "keyData": door}]
        properties = {
            **(spot if is_spot else {"priority": "Regular"}),
            "hardwareProfile": {"vmSize": offer.extra["size"]},
            "storageProfile": {
                "imageReference": image,
                "osDisk": {
                    "name": name, "createOption": "FromImage", **dies, "diskSizeGB": disk_gb(request.disk_gb),
                    "managedDisk": {"storageAccountType": "Premium_LRS"},
                },
            },
            "osProfile": {
                "computerName": name, "adminUsername": "spotd",
                "customData": base64.b64encode(script.encode()).decode(),
                "linuxConfiguration": {"disablePasswordAuthentication": True, "ssh": {"publicKeys": keys}},
            },
            "networkProfile": {
                "networkApiVersion": wire.NETWORK_API, "networkInterfaceConfigurations": [interface],
            },
            "diagnosticsProfile": {"bootDiagnostics": {"enabled": True}},
        }  # fmt: skip
        return {"location": offer.extra["region"], "tags": tags, "properties": properties}

    async def _require_price(self, request: LaunchRequest) -> None:
        """Require that an on-demand machine still costs what was agreed: a launch names no price."""
        region, size = request.offer.extra["region"], request.offer.extra["size"]
        rows, is_whole = await self._market.price_rows(region, size)
        price = prices_of(rows, region)[0].get((size, Market.ON_DEMAND))
        if price is None and is_whole:
            raise errors.OfferGone(f"{WHO} does not sell {request.offer.offer_id} now")
        if price is None:
            raise Unavailable(f"{WHO}'s price list does not say what {size} costs now")
        if price > self._price_limit(request):
            asked, agreed = price / MICRO, request.price_max / MICRO
            raise errors.PriceMoved(f"{WHO} charges ${asked:.4f}/h where ${agreed:.4f}/h was agreed")

    async def _ask_end(self, ref: InstanceRef) -> bool | None:
        path = self._at(f"{self._path(ref)}?forceDeletion=true")
        if await self._client.ask_or_absent("DELETE", path, what="an end") is None:
            return False
        self._note_end(ref)
        return None

    def _leftover(self, raw: Any) -> Any:
        """Return a disk, interface or address with its key; `None` for one that something may hold."""
        if not isinstance(raw, dict):
            return raw
        tags, said = raw.get("tags"), raw.get("properties")
        key = tags.get(KEY_TAG) if isinstance(tags, dict) else None
        held = (
            [raw.get("managedBy"), said.get("virtualMachine"), said.get("ipConfiguration")]
            if isinstance(said, dict)
            else [True]
        )
        name = raw.get("name")
        known = key or (wire.key_by_name(name, self._services.install) if isinstance(name, str) else None)
        return None if any(held) else {"id": raw.get("id"), "name": known}

    async def _left(self, path: str, what: str) -> Sequence[Any]:
        rows, _ = await all_pages(lambda token: self._market.list_page(token or self._at(path), what))
        return rows

    async def _discard(self, path: str, number: str) -> None:
        what, where = self.leftovers[path], self._at(f"{path}/{quote(number, safe='')}")
        await self._client.ask_or_absent("DELETE", where, what=f"deleting a {what}")
        self._services.log.info(self._event("leftover_deleted"), kind=what)

    async def logs(self, ref: InstanceRef, *, lines: int) -> Sequence[str]:
        """Return the last lines of the serial console, which Azure gives by a link that is itself a secret."""
        await self._require_ours(ref)
        path = self._at(f"{self._path(ref)}/retrieveBootDiagnosticsData?sasUriExpirationTimeInMinutes=10")
        link = (await self._client.ask("POST", path, what="a link to a console")).get("serialConsoleLogBlobUri")
        parts = urlsplit(link if isinstance(link, str) else "")
        is_blob = parts.scheme == "https" and (parts.hostname or "").endswith(".blob.core.windows.net")
        is_here = is_loopback(self._settings.base_url) and own_path(link, self._settings.base_url)
        if not isinstance(link, str) or not (is_here or is_blob):
            raise Unavailable(f"{WHO} gives no link to the console of {self.machine} {ref.instance_id} yet")
        answer = await self._bare.read("GET", link)
        if answer.status != 200:
            raise Unavailable(f"{WHO} answered {answer.status} to a request for a console")
        return last_lines(answer.text.splitlines(), lines)

    def _further_checks(self) -> Sequence[Check]:
        def network(region: str) -> Check:
            name, group = f"{self._settings.network}-{region}", self._settings.resource_group

            async def ask() -> str:
                path = self._at(f"/Microsoft.Network/virtualNetworks/{name}/subnets/default")
                if await self._client.ask_or_absent("GET", path, what="a network") is None:
                    raise Unavailable(f"there is no virtual network {name} with a subnet `default` in {group}")
                return f"{name} is there"

            how = f"az network vnet create -g {group} -n {name} -l {region} --subnet-name default"
            return Check(name=f"network {region}", ask=ask, hint=how)

        def quota(region: str) -> Check:
            async def ask() -> str:
                used, limit = await self._market.spot_cores(region)
                if limit == 0:
                    raise Unavailable(f"no spot machine is allowed in {region}: its quota of cores is 0")
                return f"{used} of {limit} spot cores are used"

            return Check(name=f"quota {region}", ask=ask, hint="ask for lowPriorityCores in Azure's portal, at Quotas")

        return [check for region in self._settings.regions for check in (network(region), quota(region))]


@asynccontextmanager
async def _open(settings: AzureSettings, services: Services) -> AsyncIterator[Provider]:
    if missing := settings.missing():
        raise AuthFailed(f"{WHO} needs {', '.join(missing)} under [providers.azure]")
    login = {"login_url": settings.login_url, "path": f"/{settings.tenant_id}/oauth2/v2.0/token", "scope": SCOPE}
    pair = {"client_id": settings.client_id, "key_hint": "client_id and api_key under [providers.azure]"}
    async with (
        open_with_tokens(settings.base_url, wire.DIALECT, services, **login, **pair) as client,
        open_http(settings.prices_url, timeout_s=READ_TIMEOUT_S) as bare,
    ):
        prices = RestClient(bare, _PRICES, clock=services.clock, rng=services.rng)
        yield AzureProvider(client, prices, bare, settings, services)


def _traits(settings: AzureSettings) -> ProviderTraits:
    return ProviderTraits(
        start_script_bytes_max=SCRIPT_BYTES_MAX,
        hosts_share_filesystem=is_loopback(settings.base_url),
        private_images=Capability(available=False, reason=NO_LOGIN),
        provision_timeout=timedelta(minutes=30),
        quote_ttl=timedelta(minutes=30),
        offers_every_min=timedelta(minutes=10),
        machines_every_min=timedelta(seconds=30),
        bills_by=timedelta(seconds=1),
        causes_within=CAUSE_WITHIN,
    )


PLUGIN: Final = AdapterPlugin(
    name=PROVIDER,
    title="Azure",
    settings_model=AzureSettings,
    needs_credential=True,
    traits_by=_traits,
    open_by=_open,
    powers=all_but(_POWERS),
)
