"""Lambda Cloud as a spotd provider: the requests that are its own, and the descriptor.

It is a plain market: virtual machines at list price, by one region and type each, without spot, bids, balance or bills.
A listed capacity is not reserved. A launch has no idempotency token and names may repeat, so the key is the machine's
name and a tag of it, and after a lost answer the list of machines decides. What every provider does alike is in
`kit/template.py`, what an HTTP answer means in `kit/rest.py`, what the machine runs in `kit/vm_boot.py`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Any, Final
from urllib.parse import quote

import anyio

from spotd_providers.contract.errors import AuthFailed, NotSupported, OfferGone, OutcomeUnknown, Unavailable
from spotd_providers.contract.provider import Provider, ProviderTraits, Services
from spotd_providers.contract.values import (
    AttemptKey,
    Capability,
    CheckLine,
    Instance,
    InstanceRef,
    InstanceState,
    LaunchRequest,
    Market,
    Offer,
    OfferPage,
    OfferQuery,
    Power,
    ShellAddress,
)
from spotd_providers.kit.boundary import AdapterPlugin, all_but, is_loopback
from spotd_providers.kit.calls import Page, judge_apart, rejected
from spotd_providers.kit.http import HttpAnswer
from spotd_providers.kit.rest import Meaning, RestClient, RestRefused, open_rest
from spotd_providers.kit.shapes import ROWS_MAX, listed_reasons, row_or_none
from spotd_providers.kit.template import Check, ProviderTemplate, clock_lines, examine, require_launchable
from spotd_providers.kit.vm_boot import boot_script, doorless_ssh_key
from spotd_providers.lambdacloud.wire import (
    DIALECT,
    KEY_TAG,
    PROVIDER,
    WHO,
    LambdaInstanceRow,
    LambdaSettings,
    as_instance,
    label_of,
    offers_of,
    ref_of,
    sales_of,
)

SCRIPT_BYTES_MAX: Final = 200_000
USER_DATA_BYTES_MAX: Final = 1_000_000
NAME_CHARS_MAX: Final = 64
SSH_USER: Final = "ubuntu"
NO_LOGIN: Final = "Lambda takes a login only in the user data, which every process of the machine may read"

_NO_SHELL: Final = "name your ssh key at Lambda in providers.lambda.ssh_key, and machines that start afterwards have it"
_MISSING: Final[Mapping[Power, str]] = {
    Power.SPOT: "Lambda sells on-demand only",
    Power.BID_CHANGE: "Lambda sells at list price, so there is no bid to change",
    Power.NOTICES: "Lambda gives no notice before a machine ends, so checkpoint regularly",
    Power.PORTS: "only ssh leads into a machine: spotctl forward uses it with the key that ssh_key names",
    Power.LOGS: "Lambda keeps no console of its machines",
    Power.BALANCE: "Lambda bills a card each week and states no balance",
    Power.BILLING: "Lambda's API states no charges; its website shows the invoices",
    Power.PRICE_HISTORY: "Lambda's API shows only the prices of now",
    Power.GANG: "Lambda sells machines one by one, and spotd rents no cluster of it",
    Power.STOP_RESUME: "a Lambda machine cannot be stopped, only ended",
    Power.HOST_IDENTITY: "Lambda does not say on which host a machine runs",
    Power.SELF_TERMINATE: "a Lambda machine that shuts itself down may be billed on, so the daemon ends it",
    Power.CAPACITY_SCORES: "Lambda says whether a type can be had now, not how likely a launch is to succeed",
}
_KEY: Final = "create an API key at cloud.lambda.ai/api-keys and put it in api_key"
_ANSWERS: Final = "check the network, base_url and Lambda's status page; the key was not judged"


class LambdaProvider(ProviderTemplate):
    """The requests that are Lambda's own."""

    name = PROVIDER
    who = WHO
    no_login = NO_LOGIN

    def __init__(self, client: RestClient, settings: LambdaSettings, services: Services) -> None:
        super().__init__(services)
        self._client = client
        self._settings = settings
        self._ssh_key = settings.ssh_key or f"spotd-{services.install}"
        self._ssh_key_is_there = False
        self._one_ssh_key = anyio.Lock()
        missing = _MISSING if settings.ssh_key else {**_MISSING, Power.SHELL: _NO_SHELL}
        self.capabilities: Mapping[Power, Capability] = all_but(missing)

    @property
    def requests_sent(self) -> int:
        return self._client.requests_sent

    async def offers(self, query: OfferQuery) -> OfferPage:
        """Return every type in every region that has some now; one answer holds the whole market."""
        at = self._services.clock.now()
        if Market.ON_DEMAND not in query.markets:
            return OfferPage(offers=(), at=at)
        data = await self._types()
        rows = await judge_apart(lambda: sales_of(data), rows=len(data))
        offers, odd = offers_of(rows.rows, self._settings)
        return OfferPage(
            offers=tuple(offers),
            rejected=listed_reasons((*rows.rejected, *odd)),
            complete=not rows.is_cut and bool(rows.rows or not data),
            at=at,
        )

    async def shell(self, ref: InstanceRef) -> ShellAddress:
        """Return the machine's own ssh server, which has the key that `ssh_key` names."""
        if self._settings.ssh_key is None:
            raise NotSupported(_NO_SHELL)
        await self._require_ours(ref)
        row = row_or_none(LambdaInstanceRow, await self._row(ref))
        if row is None or row.ip is None or row.status != "active":
            raise Unavailable(f"Lambda shows no address of instance {ref.instance_id} yet")
        return ShellAddress(host=row.ip, port=22, user=SSH_USER)

    async def check(self) -> Sequence[CheckLine]:
        """Check key, clock, market and ssh key, one line each."""

        async def greet() -> HttpAnswer:
            answer, _ = await self._client.answer("GET", "/api/v1/instances", what="the list of instances")
            return answer

        async def market() -> str:
            data = await self._types()
            offers, _ = offers_of(sales_of(data).rows, self._settings)
            return f"{len(data)} types, {len(offers)} offers in your regions now"

        async def ssh() -> str:
            if await self._has_ssh_key():
                return f"{self._ssh_key!r} is registered"
            if self._settings.ssh_key is None:
                return f"{self._ssh_key!r} will be registered at the first launch"
            raise Unavailable(f"Lambda knows no ssh key {self._ssh_key!r}")

        return await examine(
            greet,
            lambda answer: (
                *clock_lines(answer, self._services, who=WHO),
                Check(name="market", ask=market, hint="Lambda's list of types does not answer; see its status page"),
                Check(name="ssh key", ask=ssh, hint="name one of your keys at cloud.lambda.ai/ssh-keys, or none"),
                CheckLine(name="balance", ok=True, detail=_MISSING[Power.BALANCE]),
            ),
            accepted="accepted, can list instances",
            hint=_ANSWERS,
            refused=_KEY,
        )

    async def _page(self, _token: str | None) -> Page:
        answer = await self._client.ask("GET", "/api/v1/instances", what="the list of instances")
        if not isinstance(rows := answer.get("data"), list):
            raise Unavailable("Lambda's list of instances holds no list")
        return rows, None

    async def _row(self, ref: InstanceRef) -> Any | None:
        path = f"/api/v1/instances/{quote(ref.instance_id, safe='')}"
        answer = await self._client.ask_or_absent("GET", path, what="an instance")
        if answer is None:
            return None
        row = row_or_none(LambdaInstanceRow, answer.get("data"))
        if row is None or row.id != ref.instance_id:
            raise Unavailable(f"Lambda's answer about instance {ref.instance_id} is about none")
        return answer["data"]

    def _label(self, raw: Any) -> str | None:
        return label_of(raw, self._services.install)

    def _machine(self, raw: Any, key: AttemptKey) -> Instance | None:
        row = row_or_none(LambdaInstanceRow, raw)
        return None if row is None else as_instance(row, key)

    async def _buy(self, request: LaunchRequest) -> Instance:
        body = launch_body(request, self._settings, ssh_key=self._ssh_key)
        await self._register_ssh_key()
        try:
            answer = await self._client.buy("POST", "/api/v1/instance-operations/launch", body, key=request.key)
        except RestRefused as exc:
            self._ssh_key_is_there = False  # it may be what the launch lacks; the next one asks again
            if exc.meaning in (Meaning.ABSENT, Meaning.REJECTED) and not await self._is_sold(request.offer):
                raise OfferGone(f"Lambda does not sell {request.offer.pool} now: {exc}") from exc
            raise exc.of_purchase() from exc
        data = answer.get("data")
        made = data.get("instance_ids") if isinstance(data, dict) else None
        row = row_or_none(LambdaInstanceRow, {"id": made[0]}) if isinstance(made, list) and len(made) == 1 else None
        if row is None:
            raise OutcomeUnknown("Lambda's answer to a launch names no instance", key=request.key)
        return Instance(ref=ref_of(row.id), key=request.key, state=InstanceState.PENDING, market=Market.ON_DEMAND)

    async def _ask_end(self, ref: InstanceRef) -> None:
        body = {"instance_ids": [ref.instance_id]}
        path = "/api/v1/instance-operations/terminate"
        await self._client.ask_or_absent("POST", path, what="an end", json_body=body)

    async def _types(self) -> Mapping[str, Any]:
        answer = await self._client.ask("GET", "/api/v1/instance-types", what="the list of types")
        if not isinstance(data := answer.get("data"), dict) or len(data) > ROWS_MAX:
            raise Unavailable("Lambda's answer to the list of types holds no types")
        return data

    async def _is_sold(self, offer: Offer) -> bool:
        """Whether the type is still sold in its region: a refused launch does not say what of it is wrong."""
        try:
            offers, _ = offers_of(sales_of(await self._types()).rows, self._settings)
        except (AuthFailed, Unavailable):
            return True
        return offer.offer_id in {one.offer_id for one in offers}

    async def _has_ssh_key(self) -> bool:
        answer = await self._client.ask("GET", "/api/v1/ssh-keys", what="the list of ssh keys")
        rows = answer.get("data")
        return isinstance(rows, list) and any(
            isinstance(row, dict) and row.get("name") == self._ssh_key for row in rows
        )

    async def _register_ssh_key(self) -> None:
        """Make sure that the ssh key exists that a launch must name."""
        async with self._one_ssh_key:
            if self._ssh_key_is_there or await self._has_ssh_key():
                self._ssh_key_is_there = True
                return
            if self._settings.ssh_key is not None:
                raise rejected(WHO, "ssh_key", f"Lambda knows no ssh key {self._ssh_key!r}")
            body = {"name": self._ssh_key, "public_key": doorless_ssh_key(self._services.rng.getrandbits(255))}
            await self._client.ask("POST", "/api/v1/ssh-keys", what="registering an ssh key", json_body=body)
            self._ssh_key_is_there = True


def launch_body(request: LaunchRequest, settings: LambdaSettings, *, ssh_key: str) -> dict[str, Any]:
    """Build the launch of one instance.

    Raises:
        RequestRejected: it can not be asked for.
    """
    require_launchable(
        request,
        who=WHO,
        extra=("type", "region"),
        script_bytes_max=SCRIPT_BYTES_MAX,
        key_chars_max=NAME_CHARS_MAX,
    )
    offer = request.offer
    try:
        script = boot_script(
            image=request.image,
            start_script=request.start_script,
            container=settings.container,
            has_gpu=offer.gpu_count > 0,
            bytes_max=USER_DATA_BYTES_MAX,
        )
    except ValueError as exc:
        raise rejected(WHO, "image", str(exc)) from exc
    body: dict[str, Any] = {
        "region_name": offer.extra["region"],
        "instance_type_name": offer.extra["type"],
        "ssh_key_names": [ssh_key],
        "name": request.key,
        "tags": [{"key": KEY_TAG, "value": request.key}],
        "user_data": script,
    }
    if settings.image_family is not None:
        body["image"] = {"family": settings.image_family}
    return body


def _traits(settings: LambdaSettings) -> ProviderTraits:
    return ProviderTraits(
        start_script_bytes_max=SCRIPT_BYTES_MAX,
        # A machine of eight GPUs was seen to boot for twenty minutes, and then pulls the image.
        provision_timeout=timedelta(minutes=40),
        hosts_share_filesystem=is_loopback(settings.base_url),
        private_images=Capability(available=False, reason=NO_LOGIN),
        bills_from_running=True,
        bills_by=timedelta(minutes=1),
    )


@asynccontextmanager
async def _open(settings: LambdaSettings, services: Services) -> AsyncIterator[Provider]:
    hint = 'api_key = { env = "LAMBDA_API_KEY" } under [providers.lambda]'
    async with open_rest(settings.base_url, DIALECT, services, key_hint=hint) as client:
        yield LambdaProvider(client, settings, services)


PLUGIN: Final = AdapterPlugin(
    name=PROVIDER,
    title="Lambda Cloud",
    settings_model=LambdaSettings,
    needs_credential=True,
    traits_by=_traits,
    open_by=_open,
    powers={**all_but(_MISSING), Power.SHELL: Capability(available=True, reason="with `ssh_key`")},
)
