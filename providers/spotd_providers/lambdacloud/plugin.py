"""Lambda Cloud as a spotd provider: the requests that are its own, and the descriptor.

It is a plain market, on demand only. A listed capacity is not reserved. A launch has no idempotency token and names may
repeat, so the key is the machine's name and a tag of it, and after a lost answer the list of machines decides.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Final

import anyio

from spotd_providers.contract.errors import ProviderError, Unavailable
from spotd_providers.contract.provider import Services
from spotd_providers.contract.values import (
    AttemptKey,
    Instance,
    InstanceRef,
    LaunchRequest,
    Market,
    OfferPage,
    OfferQuery,
    Power,
    ShellAddress,
)
from spotd_providers.kit.calls import judge_apart, rejected
from spotd_providers.kit.rest import RestClient, rest_opener
from spotd_providers.kit.shapes import listed_reasons, row_or_none
from spotd_providers.kit.template import Check
from spotd_providers.kit.vm_boot import doorless_ssh_key
from spotd_providers.kit.vm_market import VmMarket, market_plugin, missing_powers, user_data
from spotd_providers.lambdacloud.wire import (
    DIALECT,
    KEY_TAG,
    PROVIDER,
    WHO,
    LambdaInstanceRow,
    LambdaSettings,
    as_instance,
    offers_of,
    sales_of,
)

NO_LOGIN: Final = "Lambda takes a login only in the user data, which every process of the machine may read"
_NO_SHELL: Final = "name your ssh key at Lambda in providers.lambda.ssh_key, and machines that start afterwards have it"
_MISSING: Final = missing_powers(
    WHO,
    SPOT="Lambda sells on-demand only",
    BALANCE="Lambda bills a card each week and states no balance",
    BILLING="Lambda's API states no charges; its website shows the invoices",
    STOP_RESUME="a Lambda machine cannot be stopped, only ended",
    SELF_TERMINATE="a Lambda machine that shuts itself down may be billed on, so the daemon ends it",
)


class LambdaProvider(VmMarket):
    """The requests that are Lambda's own."""

    name = PROVIDER
    who = WHO
    no_login = NO_LOGIN
    key_hint = "create an API key at cloud.lambda.ai/api-keys and put it in api_key"
    list_path = "/api/v1/instances"
    label_tag = KEY_TAG

    def __init__(self, client: RestClient, settings: LambdaSettings, services: Services) -> None:
        super().__init__(client, services, _MISSING if settings.ssh_key else {**_MISSING, Power.SHELL: _NO_SHELL})
        self._settings = settings
        self._ssh_key = settings.ssh_key or f"spotd-{services.install}"
        self._ssh_key_is_there = False
        self._one_ssh_key = anyio.Lock()

    async def offers(self, query: OfferQuery) -> OfferPage:
        """Return every type in every region that has some now; one answer holds the whole market."""
        at = self._services.clock.now()
        if Market.ON_DEMAND not in query.markets:
            return OfferPage(offers=(), at=at)
        data = await self._client.ask("GET", "/api/v1/instance-types", what="the list of types")
        rows = await judge_apart(lambda: sales_of(data), rows=len(data))
        offers, odd = offers_of(rows.rows, self._settings)
        return OfferPage(
            offers=tuple(offers),
            rejected=listed_reasons((*rows.rejected, *odd)),
            complete=not rows.is_cut and bool(rows.rows or not data),
            at=at,
        )

    def _address(self, raw: Any) -> ShellAddress | None:
        row = row_or_none(LambdaInstanceRow, raw)
        is_up = row is not None and row.status == "active"
        return ShellAddress(host=row.ip, port=22, user="ubuntu") if is_up and row and row.ip else None

    def _further_checks(self) -> Sequence[Check]:
        async def ssh() -> str:
            if await self._has_ssh_key():
                return f"{self._ssh_key!r} is registered"
            if self._settings.ssh_key is None:
                return f"{self._ssh_key!r} will be registered at the first launch"
            raise Unavailable(f"Lambda knows no ssh key {self._ssh_key!r}")

        return [Check(name="ssh key", ask=ssh, hint="name one of your keys at cloud.lambda.ai/ssh-keys, or none")]

    def _machine(self, raw: Any, key: AttemptKey) -> Instance | None:
        row = row_or_none(LambdaInstanceRow, raw)
        return None if row is None else as_instance(row, key)

    async def _buy(self, request: LaunchRequest) -> Instance:
        offer = request.offer
        script = user_data(request, who=WHO, extra=("type", "region"), container=self._settings.container)
        family = self._settings.image_family
        body = {
            "region_name": offer.extra["region"],
            "instance_type_name": offer.extra["type"],
            "ssh_key_names": [self._ssh_key],
            "name": request.key,
            "tags": [{"key": KEY_TAG, "value": request.key}],
            "user_data": script,
            **({} if family is None else {"image": {"family": family}}),
        }
        await self._register_ssh_key()
        try:
            answer = await self._purchase("/api/v1/instance-operations/launch", body, request)
        except ProviderError:
            self._ssh_key_is_there = False  # it may be what the launch lacks; the next one asks again
            raise
        made = answer.get("instance_ids")
        named = {"id": made[0]} if isinstance(made, list) and len(made) == 1 else {}
        return self._new_machine(named, request)

    async def _ask_end(self, ref: InstanceRef) -> None:
        path, body = "/api/v1/instance-operations/terminate", {"instance_ids": [ref.instance_id]}
        await self._client.ask_or_absent("POST", path, what="an end", json_body=body)

    async def _has_ssh_key(self) -> bool:
        rows = await self._list("/api/v1/ssh-keys", "the list of ssh keys")
        return any(isinstance(row, dict) and row.get("name") == self._ssh_key for row in rows)

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


PLUGIN: Final = market_plugin(
    LambdaProvider,
    LambdaSettings,
    rest_opener(LambdaProvider, DIALECT, PROVIDER),
    title="Lambda Cloud",
    missing=_MISSING,
    shell_reason="with `ssh_key`",
    # A machine of eight GPUs was seen to boot for twenty minutes, and then pulls the image.
    provision_timeout=timedelta(minutes=40),
    bills_from_running=True,
    bills_by=timedelta(minutes=1),
)
