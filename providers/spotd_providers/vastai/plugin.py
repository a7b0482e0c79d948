"""vast.ai as a spotd provider: what is its own beside `kit/template.py`, and the descriptor.

The container is bought in the plain docker style: runtype `args` with `/bin/sh` as the entrypoint and `-c <script>` as
its arguments. It needs nothing of the image but a POSIX shell, replaces whatever ENTRYPOINT the image has, and sees
the container's environment (`CONTAINER_ID`, `CONTAINER_API_KEY`) directly. The ssh style would install and start an
ssh server first, which fails on images it does not know, and opens a port without use.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any, Final
from urllib.parse import urlsplit

from spotd_providers.contract.errors import (
    ContractViolation,
    NoCapacity,
    OutcomeUnknown,
    PriceMoved,
    ProviderError,
    RequestRejected,
    Unavailable,
)
from spotd_providers.contract.provider import Provider, ProviderTraits, Services
from spotd_providers.contract.values import (
    MICRO,
    AttemptKey,
    Balance,
    Capability,
    CheckLine,
    Instance,
    InstanceId,
    InstanceRef,
    InstanceState,
    LaunchRequest,
    Loss,
    Market,
    MicroUsd,
    MicroUsdPerHour,
    OfferPage,
    OfferQuery,
    Power,
    ProviderCharge,
)
from spotd_providers.kit.boundary import AdapterPlugin, capabilities, is_loopback
from spotd_providers.kit.calls import Page, all_pages, judge_apart
from spotd_providers.kit.http import Http, HttpAnswer, open_http
from spotd_providers.kit.rest import READ_TIMEOUT_S, Meaning, RestRefused, key_setting, open_keyed_http
from spotd_providers.kit.shapes import as_model, decode_or_none, row_or_none, signed_micro_usd
from spotd_providers.kit.template import Check, ProviderTemplate, as_unreadable, bound, clock_lines, examine
from spotd_providers.kit.text import CONSOLE_LINES, key_of, last_lines
from spotd_providers.vastai.client import SEARCHES_PER_MINUTE, VastClient
from spotd_providers.vastai.listing import PriceIncreases, as_charges, as_instance, ref_of
from spotd_providers.vastai.metrics import Benchmarks, VastPriceHistory
from spotd_providers.vastai.offers import (
    PROVIDER,
    SCRIPT_CHARS_MAX,
    OnDemandPrices,
    offers_of,
    request_body,
    search_body,
)
from spotd_providers.vastai.searching import OfferSearch, SearchResult
from spotd_providers.vastai.wire import (
    BID,
    DESTROY,
    LOGS,
    SHOW,
    WHO,
    ChargeRow,
    CreateReply,
    InstanceRow,
    LogReply,
    UserReply,
    VastSettings,
    single_instance,
)

DESTROY_TRIES: Final = 5
LOG_TRIES: Final = 30
LOG_WAIT: Final = timedelta(seconds=0.3)
CREDIT_AGE_MAX: Final = timedelta(minutes=1)
_STOPPED_SOMEHOW: Final = frozenset({Loss.OUTBID, Loss.HOST_LOST})

CAPABILITIES: Final[Mapping[Power, Capability]] = capabilities(
    Power.SPOT,
    Power.BID_CHANGE,
    Power.LOGS,
    Power.BALANCE,
    Power.BILLING,
    Power.HOST_IDENTITY,
    Power.SELF_TERMINATE,
    Power.PRICE_HISTORY,
    missing={
        Power.CAPACITY_SCORES: "vast.ai lists only machines that can be rented now",
        Power.NOTICES: (
            "vast.ai stops an outbid machine without warning, so checkpoint regularly; only an end after an announced"
            " price increase is known before"
        ),
        Power.SHELL: (
            "spotd starts vast.ai machines without their ssh server, which not every image bears; use logs -f"
        ),
        Power.PORTS: (
            "spotd starts vast.ai machines without their ssh server; its ports would need an image that bears one, and"
            " a key of yours in the account"
        ),
        Power.GANG: "vast.ai's machines reach each other through public ports only",
        Power.REPLACE: "it starts no machines that reach each other, of which one could be replaced",
        Power.STOP_RESUME: (
            "a stopped vast.ai machine bills storage and may never get its GPU back, so spotd destroys it"
        ),
    },
)


class VastProvider(VastPriceHistory, ProviderTemplate):
    """The requests that are vast.ai's own, and what its list of machines leaves open."""

    name = PROVIDER
    who = WHO
    capabilities = CAPABILITIES
    ids = re.compile(r"[0-9]{1,15}")
    confirms_ends = False
    judged_prices = frozenset({Market.ON_DEMAND})
    """What the row of a bid's machine states before it runs is not documented."""

    def __init__(self, client: VastClient, keyless: Http, settings: VastSettings, services: Services) -> None:
        super().__init__(services, client, keyless)
        self._client = client
        self._keyless = keyless
        """For log files, which lie on another host and are fetched without the key."""
        self._settings = settings
        self._searcher = OfferSearch(client.search, settings, services.clock, has_room=lambda: client.may_search_soon)
        self._increases = PriceIncreases(client, services.clock)
        self._benchmarks = Benchmarks(client, services.clock)
        self._bought_at: dict[InstanceId, datetime] = {}
        self._credit_gone = (False, datetime.min.replace(tzinfo=UTC))

    async def offers(self, query: OfferQuery) -> OfferPage:
        """Return both markets' asks, priced or rejected; bids are compared with the on-demand prices."""
        found = await self._searcher.found(query)
        page = await judge_apart(lambda: self._offer_page(found), rows=sum(map(len, found.rows.values())))
        return replace(page, benchmarks=await self._benchmarks.results())

    def _offer_page(self, found: SearchResult) -> OfferPage:
        on_demand = OnDemandPrices(found.rows.get(Market.ON_DEMAND, ()))
        offers = []
        rejected = list(found.rejected)
        for market, rows in found.rows.items():
            good, bad = offers_of(rows, market, self._settings, on_demand=on_demand)
            offers.extend(good)
            rejected.extend(bad)
        return OfferPage(
            offers=tuple(offers),
            rejected=tuple(rejected),
            complete=found.complete,
            whole=found.whole,
            note=found.note,
            at=self._services.clock.now(),
        )

    async def change_bid(self, ref: InstanceRef, price: MicroUsdPerHour) -> None:
        """Set the machine's bid to `price` for all its GPUs."""
        await self._require_ours(ref)
        row = row_or_none(InstanceRow, await self._row(ref))
        gpus = max(1, (row.num_gpus if row else None) or 1)
        if not MICRO // 1000 <= price <= 32 * gpus * MICRO:
            raise RequestRejected(
                f"vast.ai takes bids from $0.001 to ${32 * gpus} per hour", field="price", reason="out of range"
            )
        await self._send_bid(ref, price / MICRO)
        row = row_or_none(InstanceRow, await self._row(ref)) if gpus > 1 else None
        # vast.ai's own texts disagree on the unit ("per gpu bid price changed" against "per machine"); only the
        # machine's price afterwards shows it.
        if row is not None and row.dph_base and abs(row.dph_base * MICRO - price * gpus) <= price * gpus // 100:
            self._services.log.warning("vast.bid_was_per_gpu", contract=ref.instance_id, gpus=gpus)
            await self._send_bid(ref, price / gpus / MICRO)

    async def _send_bid(self, ref: InstanceRef, price_usd: float) -> None:
        """Send a bid. Repeating it is harmless: the same price is set again."""
        path = f"/api/v0/instances/bid_price/{ref.instance_id}/"
        try:
            await self._client.change("PUT", path, what=BID, json_body={"client_id": "me", "price": price_usd})
        except RestRefused as exc:
            raise RequestRejected(
                f"vast.ai did not change the bid of instance {ref.instance_id}: {exc.detail or exc.code}",
                field="ref" if exc.meaning is Meaning.ABSENT else "price",
                reason=exc.code or str(exc.status),
            ) from exc

    async def logs(self, ref: InstanceRef, *, lines: int) -> Sequence[str]:
        """Return the container's last lines as vast.ai kept them, without anything that resembles a secret."""
        await self._require_ours(ref)
        return await self._console(ref, lines)

    async def account(self) -> str:
        """Return the number of the user; empty where vast.ai does not state it."""
        user, _ = await self._client.user()
        return "" if user.id is None else str(user.id)

    async def balance(self) -> Balance:
        """Return the credit that is left. A debt counts as nothing left."""
        return Balance(available=MicroUsd(max(0, await self._money_left())))

    async def charges(self, since: datetime, until: datetime) -> Sequence[ProviderCharge]:
        """Return what vast.ai billed for our machines, one charge per kind (gpu, disk, bwd, bwu)."""

        async def page(after: str | None) -> Page:
            answer = await self._client.charge_page(since, until, after=after)
            return answer.results, answer.next_token or None

        return await self._bill(page, ChargeRow, lambda row: as_charges(row, self._services.install))

    async def check(self) -> Sequence[CheckLine]:
        """Check key, credit, quota, clock and each permission, one line each."""

        async def instances() -> str:
            await self._client.instance_page(label=None, after=None)
            return "can list instances"

        async def billing() -> str:
            now = self._services.clock.now()
            await self._client.charge_page(now - timedelta(days=1), now, after=None)
            return "can read charges"

        async def market() -> str:
            found = await self._client.search(search_body(self._settings, OfferQuery().disk_gb, Market.SPOT))
            return f"{found.count} interruptible offers under your filters"

        def further(account: tuple[UserReply, HttpAnswer]) -> Sequence[Check | CheckLine]:
            return (
                _money(account[0]),
                _quota(account[0]),
                *clock_lines(account[1], self._services, who=WHO),
                Check(name="instances", ask=instances, hint=_SCOPES, unanswered=_LATER),
                Check(name="billing", ask=billing, hint=_SCOPES, unanswered=_LATER),
                Check(name="market", ask=market, hint=_FILTERS, refused=_SCOPES, unanswered=_LATER),
            )

        return await examine(self._client.user, further, accepted="accepted", hint=_KEY, unanswered=_LATER)

    async def _page(self, token: str | None) -> Page:
        page = await self._client.instance_page(label=None, after=token)
        return page.instances, page.next_token or None

    async def _rows(self, key: AttemptKey | None) -> tuple[Sequence[Any], bool]:
        """Return the rows of a key by its label, and all rows where there are none: only these prove an absence."""
        total: int | None = None

        async def page(after: str | None) -> Page:
            nonlocal total
            answer = await self._client.instance_page(label=label, after=after)
            total = answer.total_instances
            return answer.instances, answer.next_token or None

        label: str | None = key
        if key is not None:
            narrow, whole = await all_pages(page)
            if any(key_of(self._label(raw), self._services.install) == key for raw in narrow):
                return narrow, whole
            label = None
        rows, whole = await all_pages(page)
        shown = {raw["id"] for raw in rows if isinstance(raw, dict) and isinstance(raw.get("id"), int)}
        return rows, whole and (total is None or len(shown) >= total)

    async def _row(self, ref: InstanceRef) -> Any | None:
        path = f"/api/v0/instances/{ref.instance_id}/"
        value = await self._client.ask_or_absent("GET", path, what=SHOW, params={"owner": "me"})
        return None if value is None else single_instance(value)

    def _label(self, raw: Any) -> str | None:
        label = raw.get("label") if isinstance(raw, dict) else None
        return label if isinstance(label, str) else (None if row_or_none(InstanceRow, raw) is None else "")

    def _machine(self, raw: Any, key: AttemptKey) -> Instance | None:
        row = row_or_none(InstanceRow, raw)
        if row is None:  # what certainly exists under our label is kept, though its row is malformed
            named = row_or_none(InstanceRow, {"id": raw.get("id")}) if isinstance(raw, dict) else None
            return None if named is None else as_unreadable(ref_of(named.id), key, who=WHO)
        bought_at = self._bought_at.get(ref_of(row.id).instance_id)
        return as_instance(row, key, now=self._services.clock.now(), bought_at=bought_at)

    async def _buy(self, request: LaunchRequest) -> Instance:
        """Buy a contract by one PUT.

        A bid that is too low is answered with an error *and* a stopped contract, which bills storage until it is
        destroyed.
        """
        ask, body = request_body(request)
        answer = await self._client.send_purchase("PUT", f"/api/v0/asks/{ask}/", body, key=request.key)
        reply = row_or_none(CreateReply, decode_or_none(answer.body, who=WHO))
        contract = None if reply is None else reply.new_contract
        try:
            self._client.judge_purchase(answer, key=request.key)
        except RestRefused as exc:
            if contract is None:
                raise self._refusal(exc, request) from exc
            raise await self._without_leftover(contract, exc.detail or exc.code, request) from exc
        except OutcomeUnknown as exc:
            if contract is None:
                raise
            raise await self._without_leftover(contract, str(exc), request) from exc
        if contract is None:
            raise OutcomeUnknown(f"vast.ai's answer to the purchase of offer {ask} names no contract", key=request.key)
        ref = ref_of(contract)
        self._bought_at[ref.instance_id] = self._services.clock.now()
        bound(self._bought_at)
        return Instance(ref=ref, key=request.key, state=InstanceState.PENDING, host_id=request.offer.host_id)

    def _refusal(self, refused: RestRefused, request: LaunchRequest) -> ProviderError:
        """Translate a refused purchase. An ask that cannot be had by a bid may be had by a higher one."""
        if refused.meaning is Meaning.NO_CAPACITY and request.offer.market is Market.SPOT:
            return PriceMoved(f"vast.ai did not take the bid: {refused}")
        return refused.of_purchase()

    async def _without_leftover(self, contract: int, said: str, request: LaunchRequest) -> ProviderError:
        """Destroy the stopped contract that vast.ai left behind a refusal, and return the refusal."""
        self._services.log.warning("vast.leftover_contract", key=request.key, contract=contract, reason=said)
        try:
            await self._end(ref_of(contract))
        except ProviderError as exc:
            raise OutcomeUnknown(
                f"vast.ai refused the purchase, but contract {contract} it made could not be destroyed",
                key=request.key,
            ) from exc
        if request.offer.market is Market.SPOT:
            return PriceMoved(f"vast.ai did not take the bid of ${request.price_max / MICRO:.4f}/h: {said}")
        return NoCapacity(f"vast.ai could not start the machine: {said or 'no reason given'}")

    async def _ask_end(self, ref: InstanceRef) -> bool:
        path = f"/api/v0/instances/{ref.instance_id}/"
        try:
            await self._client.change("DELETE", path, what=DESTROY, attempts=DESTROY_TRIES, json_body={})
        except RestRefused as exc:
            if exc.code.startswith("no_such") or "no_such_instance" in exc.detail:
                return False
            raise Unavailable(str(exc)) from exc
        return True

    async def _explain(self, instances: tuple[Instance, ...]) -> tuple[Instance, ...]:
        """Work in what no row says: an empty account, an image that cannot start our script, and an announced end."""
        if any(_stopped_somehow(i) for i in instances) and await self._is_out_of_credit():
            instances = tuple(
                replace(i, loss=Loss.BALANCE, detail="the account has no credit left") if _stopped_somehow(i) else i
                for i in instances
            )
        explained = tuple([await self._explain_end(instance) for instance in instances])
        return await self._increases.work_in(explained)

    async def _explain_end(self, instance: Instance) -> Instance:
        if instance.loss is not Loss.SELF:
            return instance
        said = await self._complaint(instance.ref, lambda: self._console(instance.ref, CONSOLE_LINES))
        return replace(instance, loss=Loss.IMAGE_ERROR, detail=said) if said else instance

    async def _is_out_of_credit(self) -> bool:
        gone, at = self._credit_gone
        now = self._services.clock.now()
        if now - at < CREDIT_AGE_MAX:
            return gone
        try:
            gone = await self._money_left() <= 0
        except ProviderError:
            return False
        self._credit_gone = (gone, now)
        return gone

    async def _money_left(self) -> int:
        """Return the spendable micro-dollars, negative for a debt.

        Raises:
            Unavailable: the account answer states no money.
        """
        reply, _ = await self._client.user()
        if reply.money is None:
            raise Unavailable("vast.ai's account answer states neither credit nor balance")
        return signed_micro_usd(reply.money)

    async def _console(self, ref: InstanceRef, lines: int) -> Sequence[str]:
        """Request the log of a machine, and read it once vast.ai has put it at the address that it names."""
        path = f"/api/v0/instances/request_logs/{ref.instance_id}/"
        value = await self._client.ask("PUT", path, what=LOGS, json_body={"tail": str(lines)})
        url = as_model(LogReply, value, who=WHO, what="a log").result_url
        if urlsplit(url).scheme != "https" and not (is_loopback(self._settings.base_url) and is_loopback(url)):
            raise ContractViolation("vast.ai named a log address that is not https")
        for _ in range(LOG_TRIES):
            await self._services.clock.sleep(LOG_WAIT)
            answer = await self._keyless.read("GET", url, timeout_s=10.0)
            if answer.status == 200:
                return last_lines(answer.text.splitlines(), lines)
        raise Unavailable("vast.ai did not deliver the log in time")


def _stopped_somehow(instance: Instance) -> bool:
    return instance.state is InstanceState.PAUSED and instance.loss in _STOPPED_SOMEHOW


# The checks of `spotctl doctor` at vast.ai, one line for each finding.


CREDIT_LOW_USD: Final = 5.0
_KEY: Final = "create a key at console.vast.ai/manage-keys and put it in api_key"
_SCOPES: Final = "give the key the permissions misc, user_read, instance_read, instance_write and billing_read"
_FILTERS: Final = "relax the filters under [providers.vast]"
_LATER: Final = "vast.ai cannot be asked now; try again in a minute"
"""Nothing was found out about the key or its permissions, so this hint does not ask to change them."""


def _money(reply: UserReply) -> CheckLine:
    if reply.money is None:
        return CheckLine(name="balance", ok=False, detail="the account states no credit", hint=_SCOPES)
    hint = "add credit; vast.ai stops every machine at zero" if reply.money < CREDIT_LOW_USD else ""
    return CheckLine(name="balance", ok=not hint, detail=f"${reply.money:.2f} left", hint=hint)


def _quota(reply: UserReply) -> CheckLine:
    """Report the quota: vast.ai's API states none, only a refused purchase shows how fast an account may spend."""
    if reply.email_verified is not None and not reply.email_verified:
        return CheckLine(
            name="quota",
            ok=True,  # with a hint, so a warning: a little may be spent
            detail="the account's e-mail address is not verified, so it may spend only a little per hour",
            hint="verify the address at console.vast.ai",
        )
    return CheckLine(
        name="quota", ok=True, detail="vast.ai states none; it may refuse purchases of a new account that spends fast"
    )


# The bill is reported to exceed the listed price by up to a fifth; the vendor's pages do not confirm it, so it is the
# careful default, to be replaced by what the account's own charges say.
DEFAULT_FEE_MULTIPLIER: Final = "1.20"


PRIVATE_IMAGES: Final = Capability(
    available=True,
    reason="vast.ai hands the password to the host, whose owner can read it: use one that can only pull this image",
)
"""`image_login` goes with the create, and what a host is given its operator can read."""


def _traits(settings: VastSettings) -> ProviderTraits:
    return ProviderTraits(
        start_script_bytes_max=SCRIPT_CHARS_MAX,
        # Large images take long on a marketplace host's line; launchers in the field give up after this long.
        provision_timeout=timedelta(minutes=30),
        offers_every_min=len(Market) * timedelta(minutes=1) / SEARCHES_PER_MINUTE,  # a search for each
        hosts_share_filesystem=is_loopback(settings.base_url),
        default_fee_multiplier=DEFAULT_FEE_MULTIPLIER,
        ends_itself_by="vast",
        ends_itself_at=settings.base_url,
        bills_from_running=True,
        bills_from_script=True,
        private_images=PRIVATE_IMAGES,
    )


@asynccontextmanager
async def _open(settings: VastSettings, services: Services) -> AsyncIterator[Provider]:
    hint = key_setting(PROVIDER)
    async with (
        open_keyed_http(settings.base_url, who=WHO, services=services, key_hint=hint) as http,
        open_http(settings.base_url, timeout_s=READ_TIMEOUT_S) as keyless,
    ):
        client = VastClient(http, clock=services.clock, rng=services.rng)
        yield VastProvider(client, keyless, settings, services)


PLUGIN: Final = AdapterPlugin(
    name=PROVIDER,
    title="vast.ai",
    settings_model=VastSettings,
    needs_credential=True,
    traits_by=_traits,
    open_by=_open,
    powers=CAPABILITIES,
)
