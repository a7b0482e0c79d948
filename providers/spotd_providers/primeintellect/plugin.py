"""Prime Intellect as a spotd provider: the requests that are its own, and the descriptor.

A pod has no script of its own: what it runs is the start command of a template in the account, which runs what the
variable `SPOTD_START` holds. So only rows that take a template are bought, and only for images that have one.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta
from typing import Any, Final
from urllib.parse import urlencode

from spotd_providers.contract.errors import NoCapacity, OfferGone, OutcomeUnknown, PriceMoved, Unavailable
from spotd_providers.contract.provider import ProviderTraits, Services
from spotd_providers.contract.values import (
    HOURS_PER_STORAGE_MONTH,
    MICRO,
    AttemptKey,
    Balance,
    Capability,
    Instance,
    LaunchRequest,
    OfferPage,
    OfferQuery,
    Power,
    ProviderCharge,
)
from spotd_providers.kit.boundary import AdapterPlugin, all_but, is_loopback
from spotd_providers.kit.calls import Page, all_pages, judge_apart, rejected
from spotd_providers.kit.rest import RestClient, RestRefused, rest_opener
from spotd_providers.kit.shapes import ROWS_MAX, charges_of, listed_reasons, row_or_none
from spotd_providers.kit.template import require_launchable
from spotd_providers.kit.text import key_of
from spotd_providers.kit.vm_market import NAME_CHARS_MAX, PAGE_ROWS, VmMarket, missing_powers, usd_balance
from spotd_providers.primeintellect.wire import (
    ANY_IMAGE,
    DIALECT,
    PROVIDER,
    SOLD_OUT,
    TEMPLATE,
    WHO,
    HistoryRow,
    PrimePodRow,
    PrimeRow,
    PrimeSettings,
    as_instance,
    offer_of,
    sales_of,
)

API: Final = "/api/v1"
SCRIPT_BYTES_MAX: Final = 16_000
START: Final = "SPOTD_START"
START_COMMAND: Final = f"""/bin/sh -c 'eval "$(printf %s "${START}" | base64 -d)"'"""
"""What the template runs. The script travels in an alphabet that no shell, form or cloud on the way changes."""
NO_LOGIN: Final = "Prime Intellect takes a login of a registry only in a template, which you make there"
NO_TEMPLATE: Final = "providers.primeintellect.templates names no template of your account, so nothing would start"
EMPTY: Final = "Prime Intellect listed nothing, twice, as a sick server of its does; its last offers are kept"
_MISSING: Final = missing_powers(WHO, SHELL="the console of Prime Intellect leads into a pod, spotctl ssh does not")
del _MISSING[Power.BILLING]


class PrimeProvider(VmMarket):
    """The requests that are Prime Intellect's own."""

    name = PROVIDER
    who = WHO
    machine = "pod"
    mark = "name"
    no_login = NO_LOGIN
    key_hint = "create an API key with the rights Availability: read and Instances: read and write; put it in api_key"
    list_path = f"{API}/pods/"

    def __init__(self, client: RestClient, settings: PrimeSettings, services: Services) -> None:
        super().__init__(client, services, _MISSING)
        self._settings = settings

    async def offers(self, query: OfferQuery) -> OfferPage:
        """Return every configuration that a template can be started on, of each market that is asked about."""
        at = self._services.clock.now()
        raw, whole = await self._market_rows()
        found = await judge_apart(lambda: sales_of(raw), rows=len(raw))
        summary = {} if raw else await self._client.ask("GET", f"{API}/availability/gpu-summary", what="the summary")
        is_empty = any(isinstance(one, dict) and one for one in summary.values())
        return OfferPage(
            offers=tuple(offer_of(one) for one in found.rows if one.market in query.markets),
            rejected=listed_reasons(found.rejected),
            complete=whole and not found.is_cut and not is_empty,
            note=EMPTY if is_empty else "",
            at=at,
        )

    async def balance(self) -> Balance:
        """Return what is left in the wallet, which is paid in advance."""
        what = "the wallet"
        answer = await self._client.send("GET", f"{API}/billing/wallet?limit=1&offset=0", what=what)
        if answer.status == 403:
            raise Unavailable("Prime Intellect's key may not read the wallet, so what is left in it is not known")
        try:
            wallet = self._client.judge(answer, what)
        except RestRefused as exc:
            raise Unavailable(str(exc)) from exc
        return usd_balance(wallet.get("balance_usd"), wallet.get("currency"), who=WHO)

    async def charges(self, since: datetime, until: datetime) -> Sequence[ProviderCharge]:
        """Return the bill of each pod of ours that has ended and lived in this time."""

        async def page(token: str | None) -> Page:
            return await self._offset_page(f"{API}/pods/history", "the bill", token)

        def charge(row: HistoryRow) -> Iterable[ProviderCharge]:
            key = key_of(row.name, self._services.install)
            start, end = row.created_at, max(row.created_at, row.terminated_at)
            if key is None or end < since or start > until:
                return ()
            how: Any = {"total": row.total, "parts": (), "rounding": 0.0, "currency": row.currency}
            return charges_of(key, row.id, start, end, **how)

        return await self._bill(page, HistoryRow, charge)

    async def _page(self, token: str | None) -> Page:
        return await self._offset_page(self.list_path, "the list of pods", token)

    def _machine(self, raw: Any, key: AttemptKey) -> Instance | None:
        row = row_or_none(PrimePodRow, raw)
        return None if row is None else as_instance(row, key, ended_by_us=row.id in self._asked_to_end)

    async def _buy(self, request: LaunchRequest) -> Instance:
        limits = {"script_bytes_max": SCRIPT_BYTES_MAX, "key_chars_max": NAME_CHARS_MAX}
        require_launchable(request, who=WHO, extra=("type", "cloud"), **limits)
        template = self._settings.templates.get(request.image) or self._settings.templates.get(ANY_IMAGE)
        if template is None:
            raise rejected(WHO, "image", "providers.primeintellect.templates names no template that runs it")
        row = await self._sold_now(request)
        script = base64.b64encode(request.start_script.encode()).decode()
        pod = {
            "name": request.key,
            "cloudId": row.cloud_id,
            "gpuType": row.type,
            "socket": row.socket,
            "gpuCount": row.count,
            "diskSize": row.disk_gb(request.disk_gb),
            "image": TEMPLATE,
            "customTemplateId": template,
            "dataCenterId": row.place,
            "country": row.country,
            "security": row.security,
            "maxPrice": self._price_limit(request) / MICRO,
            "envVars": [{"key": START, "value": script}],
            "autoRestart": False,  # a second life of one attempt
        }
        body = {"pod": pod, "provider": {"type": row.cloud}, "disks": [], "team": None}
        answer = await self._purchase(self.list_path, body, request)
        bought = self._machine(answer, request.key)
        if bought is None:
            raise OutcomeUnknown(f"{WHO}'s answer to a launch names no pod", key=request.key)
        return bought

    def _price_limit(self, request: LaunchRequest) -> int:
        """Allow for the disk, which is in the price that a pod shows."""
        offer = request.offer
        disk = offer.storage_price * request.disk_gb // HOURS_PER_STORAGE_MONTH
        return super()._price_limit(request) + offer.storage_fixed + disk + 1

    async def _sold_now(self, request: LaunchRequest) -> PrimeRow:
        """Return the row of an offer as it is sold at this moment: its `cloudId` may be another one by now.

        Raises:
            OfferGone, NoCapacity, PriceMoved: it is not sold as it was offered.
        """
        offer = request.offer
        raw, whole = await self._market_rows(gpu_type=offer.extra["type"], gpu_count=str(offer.gpu_count))
        found = sales_of(raw)
        now = next((one for one in found.rows if one.id == offer.offer_id), None)
        if now is None and not whole:
            raise Unavailable(f"{WHO} shows only a part of what it sells, so {offer.offer_id} was not found")
        if now is None:
            is_out = any(one.offer_id == offer.offer_id and one.reason == SOLD_OUT for one in found.rejected)
            raise NoCapacity(f"{WHO} has none left") if is_out else OfferGone(f"{WHO} does not sell it now")
        if offer_of(now).gpu_price > request.price_max:
            raise PriceMoved(f"{WHO} sells {offer.offer_id} for more than was agreed")
        return now

    async def _market_rows(self, **wanted: str) -> tuple[list[Any], bool]:
        """Return the rows on sale, and whether these are all; an empty answer is asked for twice."""

        async def page(token: str | None) -> Page:
            number = int(token or 1)
            path = f"{API}/availability/gpus?{urlencode({**wanted, 'page': number, 'page_size': PAGE_ROWS})}"
            answer = await self._client.ask("GET", path, what="the market")
            rows, total = answer.get("items"), answer.get("totalCount")
            if not isinstance(rows, list) or type(total) is not int:
                raise Unavailable(f"{WHO}'s answer about the market is no list with a count")
            is_last = (number - 1) * PAGE_ROWS + len(rows) >= total
            return rows, None if is_last else "" if len(rows) < PAGE_ROWS else str(number + 1)

        rows, whole = await all_pages(page, rows_max=ROWS_MAX)
        return (rows, whole) if rows else await all_pages(page, rows_max=ROWS_MAX)


def _traits(settings: PrimeSettings) -> ProviderTraits:
    return ProviderTraits(
        start_script_bytes_max=SCRIPT_BYTES_MAX,
        provision_timeout=timedelta(minutes=30),
        hosts_share_filesystem=is_loopback(settings.base_url),
        private_images=Capability(available=False, reason=NO_LOGIN),
        no_launches="" if settings.templates else NO_TEMPLATE,
    )


PLUGIN: Final = AdapterPlugin(
    name=PROVIDER,
    title="Prime Intellect",
    settings_model=PrimeSettings,
    needs_credential=True,
    traits_by=_traits,
    open_by=rest_opener(PrimeProvider, DIALECT, PROVIDER),
    powers=all_but(_MISSING),
)
