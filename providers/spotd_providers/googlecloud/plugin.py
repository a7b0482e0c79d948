"""Google Cloud as a spotd provider: the requests that are its own, and the descriptor.

A launch names its machine by the key and carries a request id made of it, so a second one makes no second machine: it
is answered with "already exists", and the machine's label then proves whose it is. What a launch leads to is stated by
an operation some seconds later. Spot machines are deleted by a preemption; the log of operations says why one went.
"""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from datetime import datetime, timedelta
from typing import Any, Final

from spotd_providers.contract.errors import (
    OfferGone,
    OutcomeUnknown,
    PriceMoved,
    ProviderError,
    Unavailable,
)
from spotd_providers.contract.provider import PriceHistoryPage, Provider, ProviderTraits, Services
from spotd_providers.contract.values import (
    AttemptKey,
    Capability,
    Instance,
    InstanceRef,
    InstanceState,
    LaunchRequest,
    Loss,
    Market,
    OfferPage,
    OfferQuery,
    Power,
    Rejected,
)
from spotd_providers.googlecloud.access import open_clients, project_of
from spotd_providers.googlecloud.catalogue import LAUNCH_PRICES_WITHIN, Catalogue
from spotd_providers.googlecloud.offers import disk_type_of, offers_of
from spotd_providers.googlecloud.wire import (
    INSTALL_LABEL,
    KEY_LABEL,
    METADATA,
    NAME_CHARS_MAX,
    NO_RESULTS,
    PROVIDER,
    WHO,
    GoogleSettings,
    OperationRow,
    as_instance,
    cause_in,
    is_twin,
    key_in,
    label_of,
    last_part,
    name_of,
    next_token,
    query_of,
    reference,
    refusal_in,
)
from spotd_providers.kit.boundary import AdapterPlugin, all_but, is_loopback
from spotd_providers.kit.calls import Page, rejected
from spotd_providers.kit.rest import Meaning, RestClient, RestRefused
from spotd_providers.kit.shapes import listed_reasons, row_or_none
from spotd_providers.kit.template import Check, bound
from spotd_providers.kit.text import key_of, last_lines
from spotd_providers.kit.vm_causes import CAUSE_WITHIN, CausedEnds
from spotd_providers.kit.vm_market import SCRIPT_BYTES_MAX, missing_powers, user_data

OPERATION_WITHIN: Final = timedelta(seconds=35)
OPERATION_WAIT: Final = timedelta(seconds=2)
NO_LOGIN: Final = "Google Cloud takes a login only in the metadata, which every process of the machine may read"
_ONCE: Final = """#!/bin/sh
begun=${SPOTD_HOME:-/opt/spotd}/begun
[ -e "$begun" ] && { shutdown -h now; exit 0; }
mkdir -p "${begun%/*}" && : >"$begun"
"""
"""Google runs the script at every boot. A second one means that the first machine's work is over."""
_HAS: Final = frozenset({Power.SPOT, Power.NOTICES, Power.LOGS, Power.CAPACITY_SCORES, Power.PRICE_HISTORY})
_MISSING: Final[Mapping[Power, str]] = {
    power: reason
    for power, reason in missing_powers(
        WHO,
        BALANCE="a Google Cloud account has no balance, it is billed each month",
        BILLING="Google's bills are read only through an export to BigQuery, so prices and seconds are multiplied",
        SELF_TERMINATE="a machine that shuts down is only stopped, and its disk bills until the daemon deletes it",
        SHELL="spotd puts no ssh key on a machine of Google Cloud, so there is none to log in with",
        PORTS="spotd puts no ssh key on a machine of Google Cloud, so no port can be forwarded",
    ).items()
    if power not in _HAS
}


class GoogleProvider(CausedEnds):
    """The requests that are Google's own."""

    name = PROVIDER
    who = WHO
    no_login = NO_LOGIN
    key_hint = "check api_key, and grant roles/compute.instanceAdmin.v1 on the project; an access token ends in an hour"
    judged_prices = frozenset()
    """No page shows what a machine costs, so the list prices are read again before a launch."""

    def __init__(
        self, compute: RestClient, billing: RestClient, project: str, settings: GoogleSettings, services: Services
    ) -> None:
        super().__init__(compute, services, _MISSING)
        self._clients = (compute, billing)
        self._project = project
        self._settings = settings
        self._catalogue = Catalogue(compute, billing, project, settings, services)
        self._base = self._catalogue.path
        self.list_path = f"{self._base}/aggregated/instances?maxResults=1"  # type: ignore[misc] # names the project
        self._announced: dict[str, datetime] = {}
        self._asks_notice = settings.notice

    async def account(self) -> str:
        """Return the project."""
        return self._project

    async def offers(self, query: OfferQuery) -> OfferPage:
        """Return every type with GPUs in every zone of the regions, on the markets asked for."""
        at = self._services.clock.now()
        kinds, odd, whole = await self._catalogue.kinds()
        if Market.SPOT in query.markets:
            await self._catalogue.refresh_scores(kinds, [one.name for one in kinds if one.gpu in query.gpus])
            self._declare()
        offers, bad = offers_of(
            kinds,
            await self._catalogue.prices.get(),
            self._settings,
            markets=[one for one in Market if one in query.markets],
            image_gb=await self._catalogue.image_gb.get(),
            scores=self._catalogue.scores,
        )
        self._note_prices((one for one in offers if "accelerator" not in one.extra), "type")
        return OfferPage(offers=tuple(offers), rejected=listed_reasons([*odd, *bad]), complete=whole, at=at)

    async def price_history(self, since: datetime, *, after: str) -> PriceHistoryPage:
        """Return what one type has cost as Spot in one zone, where this project may ask."""
        return await self._catalogue.price_history(since, after=after)

    def _declare(self) -> None:
        """Declare scores of capacity as missing where Google refused them and none is known."""
        refusal = "" if self._catalogue.scores else self._catalogue.refusal
        self.capabilities = all_but({**_MISSING, **({Power.CAPACITY_SCORES: refusal} if refusal else {})})

    # Machines.

    def _label(self, raw: Any) -> str | None:
        return key_in(raw, self._services.install)

    def _machine(self, raw: Any, key: AttemptKey) -> Instance | None:
        instance = as_instance(raw, key, notice=self._notice_of)
        if instance is None or not isinstance(raw, dict):
            return instance
        kind, place = (str(raw.get(name)).rpartition("/")[2] for name in ("machineType", "zone"))
        is_attached = kind.startswith("n1-")  # the price of its GPUs is none of the type's
        return instance if is_attached else self._priced(instance, kind, place)

    def _notice_of(self, name: str) -> datetime | None:
        """Return since when a machine that we did not end is seen to go away."""
        if name in self._asked_to_end:
            return None
        bound(self._announced)
        return self._announced.setdefault(name, self._services.clock.now())

    def _path(self, ref: InstanceRef) -> str:
        zone = ref.scope or self._scopes.get(ref.instance_id, "")
        if not zone or self.ids.fullmatch(zone) is None:
            raise rejected(WHO, "ref", "it names no zone")
        return f"{self._base}/zones/{zone}/instances/{ref.instance_id}"

    async def _page(self, token: str | None) -> Page:
        query = query_of(token, filter=f"labels.{INSTALL_LABEL}={self._services.install}", returnPartialSuccess="true")
        answer = await self._client.ask(
            "GET", f"{self._base}/aggregated/instances{query}", what="the list of instances"
        )
        items = answer.get("items")
        if not isinstance(items, dict) or not items:
            raise Unavailable(f"{WHO}'s list of instances names no zones")
        rows: list[Any] = []
        for scope, block in items.items():
            rows += _rows_of(str(scope), block)
        if _silent(answer.get("warning")) or answer.get("unreachables"):
            rows.append(Rejected(offer_id="zones", reason="some zones are not in the list"))
        return rows, next_token(answer)

    async def _row(self, ref: InstanceRef) -> Any | None:
        answer = await self._client.ask_or_absent("GET", self._path(ref), what="an instance")
        if answer is not None and answer.get("name") != ref.instance_id:
            raise Unavailable(f"{WHO}'s answer about instance {ref.instance_id} is about none")
        return answer

    async def _ask_end(self, ref: InstanceRef) -> bool | None:
        # A new id each time: a second request with the first one's would be taken for the first.
        number = _request_id(f"{ref.instance_id} {self._services.rng.getrandbits(64)}")
        path = self._path(ref) + query_of(requestId=number, noGracefulShutdown="true")
        self._note_end(ref)
        return False if await self._client.ask_or_absent("DELETE", path, what="an end") is None else None

    async def _ask_cause(self, ref: InstanceRef) -> Loss | None:
        query = query_of(filter=f'targetLink eq ".*{ref.instance_id}$"')
        path = f"{self._base}/zones/{ref.scope or self._scopes.get(ref.instance_id, '')}/operations{query}"
        rows = (await self._client.ask("GET", path, what="the log of operations", attempts=1)).get("items")
        return cause_in(rows if isinstance(rows, list) else [], ref.instance_id)

    async def logs(self, ref: InstanceRef, *, lines: int) -> Sequence[str]:
        """Return the last lines of the serial port, without anything that resembles a secret."""
        await self._require_ours(ref)
        return last_lines(await self._console(ref), lines)

    async def _console(self, ref: InstanceRef) -> Sequence[str]:
        path = f"{self._path(ref)}/serialPort?port=1"
        answer = await self._client.ask_or_absent("GET", path, what="the serial port")
        contents = (answer or {}).get("contents")
        return contents.splitlines() if isinstance(contents, str) else []

    # Launching.

    async def _buy(self, request: LaunchRequest) -> Instance:
        extra = request.offer.extra
        named, container = ("type", "zone", "name"), self._settings.container
        script = user_data(request, who=WHO, extra=named, container=container, key_chars_max=NAME_CHARS_MAX)
        await self._require_price(request)
        ref = reference(name_of(request.key), extra["zone"])
        self._path(ref)
        body = self._body(request, _ONCE + script.removeprefix("#!/bin/sh\n"), await self._catalogue.image_gb.get())
        path = f"{self._base}/zones/{ref.scope}/instances{query_of(requestId=_request_id(request.key))}"
        try:
            answer = await self._client.buy("POST", path, body, key=request.key)
            await self._wait(answer, ref, request)
        except RestRefused as exc:
            if is_twin(exc):
                return await self._twin(ref, request)
            raise await self._refusal(exc, ref, request) from exc
        return Instance(ref=ref, key=request.key, state=InstanceState.PENDING)

    async def _require_price(self, request: LaunchRequest) -> None:
        """Read the prices again where they are older than some minutes: Google takes no limit.

        Raises:
            PriceMoved, OfferGone: by them the machine costs more than may be paid, or is not sold.
            Unavailable: its zone was not read.
        """
        offer, extra = request.offer, request.offer.extra
        kinds, _, whole = await self._catalogue.kinds()
        kind = next((one for one in kinds if (one.name, one.zone) == (extra["name"], extra["zone"])), None)
        if kind is None and not whole:
            raise Unavailable(f"{WHO} does not say whether it sells {offer.offer_id} now")
        if kind is None:
            raise OfferGone(f"{WHO} does not sell {offer.offer_id} now")
        table = await self._catalogue.prices.get(within=LAUNCH_PRICES_WITHIN)
        price = table.price(kind.region, kind.parts(table), is_spot=offer.market is Market.SPOT)
        if isinstance(price, str):
            raise OfferGone(f"{WHO} states no price of {offer.offer_id} now: {price}")
        if price > self._price_limit(request):
            raise PriceMoved(f"{WHO} sells {offer.offer_id} for more than was agreed")

    def _body(self, request: LaunchRequest, script: str, image_gb: int) -> dict[str, Any]:
        settings, offer = self._settings, request.offer
        zone, is_spot = offer.extra["zone"], offer.market is Market.SPOT
        scheduling: dict[str, Any] = {
            "provisioningModel": "SPOT" if is_spot else "STANDARD",
            "onHostMaintenance": "TERMINATE",
            "automaticRestart": False,
        }
        if is_spot or settings.max_run is not None:
            scheduling["instanceTerminationAction"] = "DELETE"
        if is_spot and self._asks_notice:
            scheduling["preemptionNoticeDuration"] = {"seconds": "120"}
        if settings.max_run is not None:
            scheduling["maxRunDuration"] = {"seconds": str(int(settings.max_run.total_seconds()))}
        disk = {
            "sourceImage": settings.image,
            "diskSizeGb": str(request.disk_gb + image_gb),
            "diskType": f"zones/{zone}/diskTypes/{disk_type_of(offer.extra['type'], settings)}",
        }
        attached = offer.extra.get("accelerator")
        kind = f"zones/{zone}/acceleratorTypes/{attached}"
        address = {"accessConfigs": [{"type": "ONE_TO_ONE_NAT"}]} if settings.external_ip else {}
        return {
            "name": name_of(request.key),
            "machineType": f"zones/{zone}/machineTypes/{offer.extra['type']}",
            "labels": {INSTALL_LABEL: str(request.install), KEY_LABEL: label_of(request.key)},
            "scheduling": scheduling,
            "disks": [{"boot": True, "autoDelete": True, "initializeParams": disk}],
            "networkInterfaces": [{"network": settings.network, **address}],
            "guestAccelerators": [{"acceleratorType": kind, "acceleratorCount": offer.gpu_count}] if attached else [],
            "serviceAccounts": [],  # a job must not have the rights of one
            "metadata": {
                "items": [
                    {"key": "startup-script", "value": script},
                    {"key": "serial-port-logging-enable", "value": "true"},
                ]
            },
            "shieldedInstanceConfig": {"enableSecureBoot": False},  # its driver is not signed
        }

    async def _wait(self, answer: Mapping[str, Any], ref: InstanceRef, request: LaunchRequest) -> None:
        """Wait a while until the operation of a launch is done: a wait that is lost is no launch that failed.

        Raises:
            RestRefused: it failed.
        """
        operation = row_or_none(OperationRow, answer)
        if operation is None:
            raise OutcomeUnknown(f"{WHO}'s answer to a launch names no operation", key=request.key)
        until = self._services.clock.now() + OPERATION_WITHIN
        path = f"{self._base}/zones/{ref.scope}/operations/{operation.name}/wait"
        while operation.status != "DONE":
            if self._services.clock.now() >= until:
                return
            try:
                answer = await self._client.ask("POST", path, what="an operation", attempts=1)
            except ProviderError as exc:
                self._services.log.warning(self._event("operation_unread"), key=request.key, reason=type(exc).__name__)
                return
            operation = row_or_none(OperationRow, answer) or operation
            if operation.status != "DONE":
                await self._services.clock.sleep(OPERATION_WAIT)
        refusal = refusal_in(answer, operation)
        if refusal is not None:
            raise refusal

    async def _twin(self, ref: InstanceRef, request: LaunchRequest) -> Instance:
        """Return the machine that has the name already, once its label proves that it is this launch's."""
        try:
            raw = await self._row(ref)
        except ProviderError as exc:
            raise OutcomeUnknown(
                f"{WHO} has a machine {ref.instance_id} and does not show it", key=request.key
            ) from exc
        if raw is None:
            raise OutcomeUnknown(f"{WHO} says that {ref.instance_id} exists, and that it does not", key=request.key)
        if key_of(self._label(raw), self._services.install) != request.key:
            raise rejected(WHO, "key", f"a machine of another owner is called {ref.instance_id}")
        return Instance(ref=ref, key=request.key, state=InstanceState.PENDING)

    async def _refusal(self, exc: RestRefused, ref: InstanceRef, request: LaunchRequest) -> ProviderError:
        """Return the error of a refused launch, once no machine of it is left."""
        try:
            raw = await self._row(ref)
        except ProviderError as failure:
            return OutcomeUnknown(f"{exc}; whether a machine was left is unknown: {failure}", key=request.key)
        if raw is not None and key_of(self._label(raw), self._services.install) == request.key:
            await self._undo(ref, request.key, str(exc))
        if exc.meaning is Meaning.OFFER_GONE:
            self._catalogue.forget_types(ref.scope)
        if self._asks_notice and "preemptionnoticeduration" in exc.detail.lower():
            self._asks_notice = False
            self._services.log.warning(self._event("no_notice"), detail=exc.detail)
            return Unavailable(f"{WHO} takes no preemptionNoticeDuration; the next launch asks for none")
        return exc.of_purchase()

    # The doctor's lines.

    def _further_checks(self) -> Sequence[Check]:
        async def image() -> str:
            return f"{last_part(self._settings.image)}, {await self._catalogue.image_gb.get()} GB"

        async def operations() -> str:
            zones = [zone for own in (await self._catalogue.regions())[0].values() for zone in own]
            if not zones:
                raise Unavailable(f"{WHO} has no zones in {', '.join(self._settings.regions)}")
            path = f"{self._base}/zones/{zones[0]}/operations?maxResults=1"
            await self._client.ask("GET", path, what="the log of operations")
            return "can be read, so preemptions are known as such"

        return [
            Check(name="image", ask=image, hint="name another machine image in providers.gcp.image"),
            Check(name="quotas", ask=self._quotas, hint="ask for GPUs in the console: IAM, Quotas"),
            Check(name="operations", ask=operations, hint="grant compute.zoneOperations.list"),
        ]

    async def _quotas(self) -> str:
        """Return the quotas of GPUs that the regions state."""
        said, total = [], 0.0
        for row in await self._catalogue.region_rows():
            name = row.get("name") if isinstance(row, dict) else None
            quotas = row.get("quotas") if name in self._settings.regions else None
            for one in quotas[:500] if isinstance(quotas, list) else ():
                metric, limit = (one.get("metric"), one.get("limit")) if isinstance(one, dict) else (None, None)
                if (
                    isinstance(metric, str)
                    and metric.endswith("_GPUS")
                    and isinstance(limit, int | float)
                    and limit > 0
                ):
                    said.append(f"{name} {metric} {one.get('usage')} of {limit:g}")
                    total += limit
        if not said:
            raise Unavailable(
                "no quota of GPUs is stated in these regions; those of H100 and newer are not listed here"
            )
        return "; ".join(said[:20])


def _rows_of(scope: str, block: Any) -> list[Any]:
    """Return the rows of one zone of an aggregated list; what of it is silent stands there as rejected."""
    instances = block.get("instances", []) if isinstance(block, dict) else None
    if not isinstance(instances, list):
        return [Rejected(offer_id=scope, reason="what this zone holds cannot be read")]
    rows = [{**one, "zone": one.get("zone") or scope} if isinstance(one, dict) else one for one in instances]
    if _silent(block.get("warning")):
        rows.append(Rejected(offer_id=scope, reason="this zone does not answer now"))
    return rows


def _silent(warning: Any) -> bool:
    """Whether a warning says more than that there is nothing."""
    return warning is not None and not (isinstance(warning, dict) and warning.get("code") == NO_RESULTS)


def _request_id(text: str) -> str:
    """Return a UUID made of this text."""
    digits = hashlib.sha256(text.encode()).hexdigest()
    return f"{digits[:8]}-{digits[8:12]}-4{digits[13:16]}-8{digits[17:20]}-{digits[20:32]}"


def _traits(settings: GoogleSettings) -> ProviderTraits:
    local = is_loopback(settings.base_url)
    return ProviderTraits(
        start_script_bytes_max=SCRIPT_BYTES_MAX,
        reconcile_window=timedelta(minutes=4),
        # An image of 10 GB onto a fresh disk, and the boot of eight GPUs.
        provision_timeout=timedelta(minutes=30),
        hosts_share_filesystem=local,
        private_images=Capability(available=False, reason=NO_LOGIN),
        free_if_taken_within=timedelta(minutes=1),
        bills_from_running=True,
        bills_at_least=timedelta(minutes=1),
        bills_by=timedelta(seconds=1),
        notice_imds="" if local else METADATA,
        causes_within=CAUSE_WITHIN,
    )


@asynccontextmanager
async def _open(settings: GoogleSettings, services: Services) -> AsyncIterator[Provider]:
    project = project_of(settings, services.credential)
    async with open_clients(settings, services) as (compute, billing):
        yield GoogleProvider(compute, billing, project, settings, services)


PLUGIN: Final = AdapterPlugin(
    name=PROVIDER,
    title="Google Cloud",
    settings_model=GoogleSettings,
    # Without api_key, google-auth reads what Google's own tools read: environment, gcloud's login, the host's account.
    needs_credential=False,
    traits_by=_traits,
    open_by=_open,
    powers=all_but(_MISSING),
)
