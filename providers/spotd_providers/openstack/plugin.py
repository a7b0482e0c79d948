"""Any OpenStack cloud as a spotd provider: the requests that are its own, and the descriptor.

Names are not unique and a launch has no token against doubles. So a server carries its key twice, as its name and in
its metadata, and only one that has both is ours; a launch first reads the list for its key. It is accepted before a
host is found: a server that got none is in ERROR, is ended, and counts as a refusal. Where a flavour has no disk, the
server boots from a volume (`volumes`).
"""

from __future__ import annotations

import base64
import re
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Any, ClassVar, Final
from urllib.parse import quote

from spotd_providers.contract.errors import (
    AuthFailed,
    NoCapacity,
    PriceMoved,
    ProviderError,
    RequestRejected,
    Unavailable,
)
from spotd_providers.contract.provider import Provider, ProviderTraits, Services
from spotd_providers.contract.values import (
    AttemptKey,
    Capability,
    Instance,
    InstanceId,
    InstanceRef,
    InstanceState,
    LaunchRequest,
    Listing,
    Loss,
    Market,
    OfferPage,
    OfferQuery,
    Power,
    ShellAddress,
)
from spotd_providers.kit.boundary import AdapterPlugin, all_but, is_loopback
from spotd_providers.kit.calls import Page, Rest, all_pages, judge_apart, rejected
from spotd_providers.kit.http import open_http
from spotd_providers.kit.rest import READ_TIMEOUT_S, RestRefused
from spotd_providers.kit.shapes import listed_reasons, row_or_none
from spotd_providers.kit.template import Check, bound
from spotd_providers.kit.text import key_of, last_lines
from spotd_providers.kit.vm_causes import CausedEnds
from spotd_providers.kit.vm_market import Leftover, missing_powers, row_name, user_data
from spotd_providers.openstack.keys import NOT_KNOWN, Keystone, OpenstackClient, account_of
from spotd_providers.openstack.volumes import VOLUMES, BootVolumes
from spotd_providers.openstack.wire import (
    KEY_NAME,
    PROVIDER,
    WHO,
    OpenstackSettings,
    ServerRow,
    as_instance,
    flavors_of,
    label_of,
    marks_of,
    newest,
    offers_of,
)

SCRIPT_BYTES_MAX: Final = 40_000
USER_DATA_BYTES_MAX: Final = 49_151
"""65,535 characters of base64."""
SHOWS_DOWN: Final = (2, 69)
"""Since this version a whole list of Nova's holds the servers of a cell that is down; before, it leaves them out."""
NAMES_KEPT: Final = timedelta(hours=1)
FORCE_AFTER: Final = timedelta(minutes=5)
UUID: Final = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
NO_LOGIN: Final = "OpenStack takes a login only in the user data, which every process of the machine may read"
_NO_SHELL: Final = "name your key pair in providers.openstack.ssh_key; machines that start afterwards have it"
_POWERS: Final = missing_powers(
    WHO,
    BALANCE="OpenStack knows no money: the operator's website states what is left",
    BILLING="OpenStack states no charges, so prices and hours are multiplied",
    CAPACITY_SCORES="OpenStack says only after a launch whether there is a host for it",
    NOTICES="an operator of preemptible flavours deletes their machines without notice, so checkpoint regularly",
)
del _POWERS[Power.LOGS]


class OpenstackProvider(CausedEnds):
    """The requests that are OpenStack's own."""

    name = PROVIDER
    who = WHO
    machine = "server"
    mark = "name and metadata"
    no_login = NO_LOGIN
    key_hint = "an application credential in credential_id and api_key, or a password with username and project_id"
    list_path = "/compute/servers/detail?limit=1"
    leftovers: ClassVar = {VOLUMES: "volume"}
    _client: OpenstackClient

    def __init__(self, client: OpenstackClient, settings: OpenstackSettings, services: Services) -> None:
        super().__init__(client, services, _POWERS if settings.ssh_key else {**_POWERS, Power.SHELL: _NO_SHELL})
        self._client, self._settings = client, settings
        self._flavor_names: dict[str, str] = {}
        self._ids: dict[str, str] = {}
        self._ids_kept = Rest(services.clock)
        self._is_spot: dict[InstanceId, bool] = {}
        self._ends: dict[InstanceId, Rest] = {}
        self._boot_volumes = BootVolumes(client, services)

    async def account(self) -> str:
        """Return project and region: the list of others would make every server appear gone."""
        return await account_of(self._client.keys)

    async def offers(self, query: OfferQuery) -> OfferPage:
        """Return every flavour that the config states a price of; whether a host is free shows only at the launch."""
        at = self._services.clock.now()
        raw, whole = await all_pages(lambda token: self._client.page("/compute/flavors/detail", "flavors", token))
        rows = await judge_apart(lambda: flavors_of(raw), rows=len(raw))
        self._flavor_names.update({row.id: row.name for row in rows.rows})
        bound(self._flavor_names)
        offers, odd = offers_of(rows.rows, self._settings, self._client.keys.region)
        return OfferPage(
            offers=tuple(one for one in offers if one.market in query.markets),
            rejected=listed_reasons((*rows.rejected, *odd)),
            complete=whole and not rows.is_cut,
            at=at,
        )

    # The servers of the project.

    def _label(self, raw: Any) -> str | None:
        """Return the key that name and metadata agree on; `None` where only one of them is a key of ours.

        A server that this run knows as ours stays so by one of them, since its owner may have renamed it, and by its
        id alone where neither is shown, as of a cell that is down.
        """
        (name, metadata), install = label_of(raw), self._services.install
        known = self._alive.get(InstanceId(row_name(raw, "id")))
        if name is None or metadata is None:
            return known
        said = metadata.get(KEY_NAME, "")
        if said == name and key_of(name, install) is not None:
            return name
        if known is not None and known in (name, said):
            return known
        return None if any(key_of(one, install) is not None for one in (name, said)) else name

    def _machine(self, raw: Any, key: AttemptKey) -> Instance | None:
        row = row_or_none(ServerRow, raw)
        if row is None:
            return None
        name = row.flavor_name or self._flavor_names.get(row.flavor_id or "", "")
        if key:
            self._boot_volumes.note(row, key)
        hangs = row.is_deleting and self._hangs(InstanceId(row.id))
        found = as_instance(row, key, self._settings.flavor(name), hangs=hangs)
        if found.loss is Loss.PROVISION_FAILED:
            self._ids.clear()  # it may be the image that is not there any more
        return found

    async def _page(self, token: str | None) -> Page:
        # With a limit Nova leaves out the servers of a cell that is down, and the list appears whole.
        return await self._client.page("/compute/servers/detail", "servers", token, limit="")

    def _path(self, ref: InstanceRef) -> str:
        return f"/compute/servers/{quote(ref.instance_id, safe='')}"

    async def _row(self, ref: InstanceRef) -> Any | None:
        answer = await self._client.ask_or_absent("GET", self._path(ref), what="a server")
        row = None if answer is None else answer.get("server")
        if answer is not None and (not isinstance(row, dict) or row.get("id") != ref.instance_id):
            raise Unavailable(f"{WHO}'s answer about server {ref.instance_id} is about none")
        return row

    def _address(self, raw: Any) -> ShellAddress | None:
        row = row_or_none(ServerRow, raw)
        is_up = row is not None and (row.status or "").lower() == "active"
        return ShellAddress(host=row.ip, port=22, user=self._settings.ssh_user) if is_up and row and row.ip else None

    def _own(self, instance: Instance) -> None:
        super()._own(instance)
        if instance.market is not None:
            self._is_spot[instance.ref.instance_id] = instance.market is Market.SPOT
            bound(self._is_spot)

    async def _ask_cause(self, ref: InstanceRef) -> Loss | None:
        """Return `PREEMPTED` for a server of a preemptible flavour that went without us: its operator deletes it."""
        return Loss.PREEMPTED if self._is_spot.get(ref.instance_id) else None

    async def _explain(self, instances: tuple[Instance, ...]) -> tuple[Instance, ...]:
        return tuple([await self._with_complaint(one) for one in await super()._explain(instances)])

    async def _with_complaint(self, one: Instance) -> Instance:
        said = await self._complaint(one.ref, lambda: self._console(one.ref)) if one.loss is Loss.SELF else ""
        return replace(one, loss=Loss.IMAGE_ERROR, detail=said) if said else one

    async def _console(self, ref: InstanceRef, lines: int = 50) -> Sequence[str]:
        body = {"os-getConsoleOutput": {"length": lines}}
        answer = await self._client.ask(
            "POST", f"{self._path(ref)}/action", what="a console", attempts=1, json_body=body
        )
        text = answer.get("output")
        return text.splitlines() if isinstance(text, str) else ()

    async def logs(self, ref: InstanceRef, *, lines: int) -> Sequence[str]:
        """Return the last lines of the console, of which OpenStack keeps some 100 kB."""
        await self._require_ours(ref)
        return last_lines(await self._console(ref, max(1, lines)), lines)

    # A launch.

    async def _buy(self, request: LaunchRequest) -> Instance:
        settings, extra = self._settings, request.offer.extra
        script = user_data(
            request,
            who=WHO,
            extra=("flavor", "name"),
            container=settings.container,
            script_bytes_max=SCRIPT_BYTES_MAX,
            user_data_bytes_max=USER_DATA_BYTES_MAX,
            key_chars_max=255,
        )
        said = settings.flavor(extra["name"])
        if said is None or said.price > self._price_limit(request):
            raise PriceMoved(f"the config states another price of {extra['name']} now")
        if (found := await self._of_this_key(request)) is not None:
            return found
        kept = dict(self._ids)
        image, network = await self._image(), await self._network()
        body: dict[str, Any] = {
            "name": request.key,
            "flavorRef": extra["flavor"],
            "user_data": base64.b64encode(script.encode()).decode(),
            "config_drive": True,
            "metadata": marks_of(request.key, self._services.install),
        }
        if extra.get("disk") == "0":
            disk = {"boot_index": 0, "uuid": image, "source_type": "image", "destination_type": "volume"}
            body["block_device_mapping_v2"] = [{**disk, "volume_size": request.disk_gb, "delete_on_termination": True}]
        else:
            body["imageRef"] = image
        if network or await self._client.version() >= (2, 37):
            body["networks"] = [{"uuid": network}] if network else "auto"
        if settings.ssh_key:
            body["key_name"] = settings.ssh_key
        try:
            answer = await self._purchase("/compute/servers", {"server": body}, request)
        except RequestRejected as exc:
            is_kept = bool(kept.items() & self._ids.items())
            self._ids.clear()
            if not is_kept:
                raise
            raise Unavailable(f"{exc} (by ids that were kept; they are asked for again)") from exc
        made = answer.get("server")
        instance = self._new_machine(made if isinstance(made, dict) else {}, request)
        return replace(instance, market=request.offer.market)  # the flavour decides it, and the launch names that

    async def _purchase_refusal(self, exc: RestRefused, request: LaunchRequest) -> ProviderError:
        if exc.status == NOT_KNOWN:
            return Unavailable(f"{WHO} does not know the version that it stated: {exc}")
        return await super()._purchase_refusal(exc, request)

    async def _of_this_key(self, request: LaunchRequest) -> Instance | None:
        """Return the server that an earlier launch under this key made, whose answer was lost.

        Nova would search for the name, and then leave out the servers of a cell that is down.

        Raises:
            Unavailable: the list does not say, or one has only its name or its metadata.
        """
        rows, whole = await self._rows(request.key)
        for raw in rows:
            key = key_of(self._label(raw), self._services.install)
            found = self._machine(raw, request.key) if key == request.key else None
            if found is not None and found.state is not InstanceState.GONE:
                return found
        if not whole or any(self._label(raw) is None and self._may_carry(raw, request.key) for raw in rows):
            raise Unavailable(f"{WHO} does not say whether a server of {request.key} exists")
        return None

    def _may_carry(self, raw: Any, key: AttemptKey) -> bool:
        name, metadata = label_of(raw)
        return name is None or metadata is None or key in (name, metadata.get(KEY_NAME))

    def _fault(self, instance: Instance, request: LaunchRequest) -> ProviderError | None:
        """Return the refusal that a server in ERROR stands for, besides a purchase that is not what was agreed."""
        if instance.loss is Loss.NO_CAPACITY:
            return NoCapacity(f"{WHO}: {instance.detail}")
        if instance.loss is Loss.PROVISION_FAILED:
            return Unavailable(f"{WHO} could not make the server: {instance.detail}")
        return super()._fault(instance, request)

    async def _image(self) -> str:
        image = await self._id_of(self._settings.image, "/image/v2/images?status=active&", "images")
        if image is None:
            raise rejected(WHO, "image", f"the cloud shows no active image {self._settings.image!r}")
        return image

    async def _network(self) -> str:
        """Return the id of the network of the settings; empty for what the cloud chooses."""
        if not self._settings.network:
            return ""
        network = await self._id_of(self._settings.network, "/network/v2.0/networks?", "networks")
        if network is None:
            raise rejected(WHO, "network", f"the cloud shows no network {self._settings.network!r}")
        return network

    async def _id_of(self, name: str, path: str, kind: str) -> str | None:
        """Return the id of the newest of this name; one that is an id already is itself."""
        if UUID.fullmatch(name):
            return name
        if self._ids_kept.left() <= timedelta(0):
            self._ids.clear()
            self._ids_kept.take(NAMES_KEPT)
        if path not in self._ids:
            rows = await self._list(f"{path}name={quote(name, safe='')}", f"the list of {kind}", name=kind)
            found = newest([raw for raw in rows if isinstance(raw, dict) and raw.get("name") == name])
            if found is None:
                return None
            self._ids[path] = found
        return self._ids[path]

    # An end, and what it leaves.

    def _hangs(self, number: InstanceId) -> bool:
        """Whether a deletion takes too long, counted from when it was first asked for or seen."""
        if (patience := self._ends.get(number)) is None:
            patience = self._ends[number] = Rest(self._services.clock)
            patience.take(FORCE_AFTER)
            bound(self._ends)
        return patience.left() <= timedelta(0)

    async def _ask_end(self, ref: InstanceRef) -> bool | None:
        """Ask for the end; where it was asked for long ago and hangs, ask for it by force, which may be forbidden."""
        if await self._client.ask_or_absent("DELETE", self._path(ref), what="an end") is None:
            return False
        self._note_end(ref)
        if self._hangs(ref.instance_id):
            try:
                path, body = f"{self._path(ref)}/action", {"forceDelete": None}
                await self._client.ask_or_absent("POST", path, what="an end by force", attempts=1, json_body=body)
            except ProviderError as exc:
                self._services.log.warning(self._event("force_refused"), machine=ref.instance_id, detail=str(exc))
            else:
                del self._ends[ref.instance_id]  # it has its time again
        return None

    async def instances(self) -> Listing:
        """Return every server of ours, and name the volumes that they boot from."""
        listing = await super().instances()
        await self._boot_volumes.name_some()
        return listing

    async def _left(self, path: str, what: str) -> Sequence[Any]:
        del path, what
        return await self._boot_volumes.rows()

    def _leftover(self, raw: Any) -> Any:
        return self._boot_volumes.leftover(raw)

    def _is_left(self, what: str, one: Leftover, state: InstanceState | None) -> bool:
        del what, one
        return state is None

    async def _discard(self, path: str, number: str) -> None:
        what = self.leftovers[path]
        await self._client.ask_or_absent("DELETE", f"/volume/volumes/{number}", what=f"deleting a {what}")
        self._services.log.info(self._event("leftover_deleted"), kind=what)

    # The doctor.

    def _further_checks(self) -> Sequence[Check]:
        async def region() -> str:
            known = await self._client.version()
            hides = "" if known >= SHOWS_DOWN else ", which hides the servers of a cell that is down"
            return f"{self._client.keys.region}, version {'.'.join(map(str, known))} of Nova{hides}"

        async def image() -> str:
            return f"{self._settings.image} is {await self._image()}"

        async def network() -> str:
            return f"{self._settings.network} is {await self._network()}"

        async def flavors() -> str:
            if not self._settings.flavors:
                raise Unavailable("no flavour has a price, so nothing is offered")
            page = await self.offers(OfferQuery())
            known = {*(one.offer_id for one in page.offers), *(one.offer_id for one in page.rejected)}
            if lacking := [one.name for one in self._settings.flavors if one.name not in known]:
                raise Unavailable(f"the cloud shows no flavour {', '.join(lacking[:5])}")
            if odd := [one for one in page.rejected if self._settings.flavor(one.offer_id) is not None]:
                raise Unavailable(f"{odd[0].offer_id} is not offered: {odd[0].reason}")
            return f"{len(page.offers)} have a price; {len(page.rejected)} without one are not offered"

        async def quota() -> str:
            answer = await self._client.ask("GET", "/compute/limits", what="the limits")
            limits = answer.get("limits")
            said = limits.get("absolute") if isinstance(limits, dict) else None
            most, used = (
                (said.get(name) for name in ("maxTotalInstances", "totalInstancesUsed"))
                if isinstance(said, dict)
                else (None, None)
            )
            if type(most) is not int or type(used) is not int:
                return "the cloud does not state its limits"
            if 0 <= most <= used:
                raise Unavailable(f"all of the {most} servers that the project may have are there")
            return f"{used} of {most if most >= 0 else 'any number of'} servers are there"

        async def volumes() -> str:
            if not any(one.extra["disk"] == "0" for one in (await self.offers(OfferQuery())).offers):
                return "no flavour with a price boots from one"
            await self._client.keys.url("volume")
            return await self._boot_volumes.summary()

        add = "name what you rent, with its price, in tables [[providers.openstack.flavors]]"
        checks = [
            Check(name="region", ask=region, hint="providers.openstack.region names it"),
            Check(name="image", ask=image, hint="see `openstack image list`; providers.openstack.image names one"),
            Check(name="flavors", ask=flavors, hint=add),
            Check(name="quota", ask=quota, hint="ask the operator for a higher limit"),
            Check(name="volumes", ask=volumes, hint="else a volume that a server leaves is never deleted"),
        ]
        if self._settings.network:
            hint = "see `openstack network list`; providers.openstack.network names one"
            checks.append(Check(name="network", ask=network, hint=hint))
        return checks


@asynccontextmanager
async def _open(settings: OpenstackSettings, services: Services) -> AsyncIterator[Provider]:
    missing = [*settings.missing(), *(() if services.credential else ("api_key",))]
    if missing or services.credential is None:
        raise AuthFailed(f"{WHO} needs {', '.join(missing)} under [providers.openstack]")
    headers = {"accept": "application/json"}
    async with open_http(settings.base_url, headers=headers, timeout_s=READ_TIMEOUT_S) as login:
        keys = Keystone(login, settings, services.credential, services.clock)
        opened = open_http(
            settings.base_url,
            headers=headers,
            timeout_s=READ_TIMEOUT_S,
            tokens=keys,
            key_header="x-auth-token",
            date_shown=services.date_shown,
        )
        async with opened as http:
            yield OpenstackProvider(
                OpenstackClient(http, keys, clock=services.clock, rng=services.rng), settings, services
            )


def _traits(settings: OpenstackSettings) -> ProviderTraits:
    return ProviderTraits(
        start_script_bytes_max=SCRIPT_BYTES_MAX,
        hosts_share_filesystem=is_loopback(settings.base_url),
        private_images=Capability(available=False, reason=NO_LOGIN),
        provision_timeout=timedelta(minutes=40),
        bills_by=timedelta(hours=1),
    )


PLUGIN: Final = AdapterPlugin(
    name=PROVIDER,
    title="OpenStack",
    settings_model=OpenstackSettings,
    needs_credential=True,
    traits_by=_traits,
    open_by=_open,
    powers={**all_but(_POWERS), Power.SHELL: Capability(available=True, reason="with `ssh_key`")},
)
