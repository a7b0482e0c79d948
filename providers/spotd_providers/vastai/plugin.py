"""The descriptor of vast.ai."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from datetime import datetime, timedelta
from typing import Final
from urllib.parse import urlsplit

from spotd_providers.contract.errors import (
    AuthFailed,
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
    InstanceRef,
    InstanceState,
    Launched,
    LaunchRequest,
    Listing,
    Market,
    MicroUsd,
    MicroUsdPerHour,
    OfferPage,
    OfferQuery,
    Power,
    ProviderCharge,
    micro_usd,
)
from spotd_providers.kit.boundary import AdapterPlugin, capabilities, is_loopback
from spotd_providers.kit.calls import check_line, clock_line, judge_apart
from spotd_providers.kit.http import HttpAnswer, open_http
from spotd_providers.kit.shapes import row_or_none
from spotd_providers.kit.text import clean, key_of
from spotd_providers.vastai.client import SEARCHES_PER_MINUTE, Created, VastClient
from spotd_providers.vastai.listing import InstanceListing, charges_between, money_left, ref_of
from spotd_providers.vastai.offers import (
    PROVIDER,
    SCRIPT_CHARS_MAX,
    OnDemandPrices,
    offers_of,
    refusal_of_purchase,
    request_body,
    search_body,
)
from spotd_providers.vastai.searching import OfferSearch, SearchResult
from spotd_providers.vastai.wire import InstanceRow, UserReply, VastRefused, VastSettings

# The checks of `spotctl doctor` at vast.ai, one line for each finding.


CREDIT_LOW_USD: Final = 5.0
_KEY: Final = "create a key at console.vast.ai/manage-keys and put it in api_key"
_SCOPES: Final = "give the key the permissions misc, user_read, instance_read, instance_write and billing_read"
_FILTERS: Final = "relax the filters under [providers.vast]"
_LATER: Final = "vast.ai cannot be asked now; try again in a minute"
"""Nothing was found out about the key or its permissions, so this hint does not ask to change them."""


async def examine(client: VastClient, settings: VastSettings, services: Services) -> Sequence[CheckLine]:
    """Check key, credit, quota, clock and each permission. A failed check is a line, never an exception."""
    lines: list[CheckLine] = []
    account: list[tuple[UserReply, HttpAnswer]] = []

    async def key() -> str:
        account.append(await client.user())
        return "accepted"

    async def instances() -> str:
        await client.instance_page(label=None, after=None)
        return "can list instances"

    async def billing() -> str:
        now = services.clock.now()
        await client.charge_page(now - timedelta(days=1), now, after=None)
        return "can read charges"

    async def market() -> str:
        found = await client.search(search_body(settings, OfferQuery().disk_gb, Market.SPOT))
        return f"{found.count} interruptible offers under your filters"

    lines.append(await check_line("key", key, hint=_KEY, unanswered=_LATER))
    if not account:
        return tuple(lines)  # whatever is wrong would only be found three more times, each after its time-out
    lines.extend(_of_account(account[0], services))
    lines.append(await check_line("instances", instances, hint=_SCOPES, unanswered=_LATER))
    lines.append(await check_line("billing", billing, hint=_SCOPES, unanswered=_LATER))
    lines.append(await check_line("market", market, hint=_FILTERS, refused=_SCOPES, unanswered=_LATER))
    return tuple(lines)


def _of_account(account: tuple[UserReply, HttpAnswer], services: Services) -> list[CheckLine]:
    reply, answer = account
    credit = reply.balance if reply.credit is None else reply.credit
    if credit is None:
        money = CheckLine(name="balance", ok=False, detail="the account states no credit", hint=_SCOPES)
    else:
        hint = "add credit; vast.ai stops every machine at zero" if credit < CREDIT_LOW_USD else ""
        money = CheckLine(name="balance", ok=not hint, detail=f"${credit:.2f} left", hint=hint)
    if answer.date is None:
        return [money, _quota(reply)]
    clock = clock_line(abs(answer.date - services.clock.now()), who="vast.ai")
    return [money, _quota(reply), clock]


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


# vast.ai as a spotd provider.
#
# The container is bought in the plain docker style: runtype `args` with `/bin/sh` as the entrypoint and `-c <script>`
# as
# its arguments. It needs nothing of the image but a POSIX shell, replaces whatever ENTRYPOINT the image has, and sees
# the container's environment (`CONTAINER_ID`, `CONTAINER_API_KEY`) directly. The ssh style would install and start an
# ssh server first, which fails on images it does not know, and opens a port without use.


VERIFY_TRIES: Final = 4
VERIFY_WAIT: Final = timedelta(seconds=2)

CAPABILITIES: Final[Mapping[Power, Capability]] = capabilities(
    Power.SPOT,
    Power.BID_CHANGE,
    Power.LOGS,
    Power.BALANCE,
    Power.BILLING,
    Power.HOST_IDENTITY,
    Power.SELF_TERMINATE,
    missing={
        Power.CAPACITY_SCORES: "vast.ai lists only machines that can be rented now",
        Power.NOTICES: "vast.ai stops an outbid machine without warning, so checkpoint regularly",
        Power.SHELL: (
            "spotd starts vast.ai machines without their ssh server, which not every image bears; use logs -f"
        ),
        Power.STOP_RESUME: (
            "a stopped vast.ai machine bills storage and may never get its GPU back, so spotd destroys it"
        ),
    },
)


class VastProvider:
    """The Protocol over one open client."""

    name = PROVIDER
    capabilities = CAPABILITIES

    def __init__(self, client: VastClient, settings: VastSettings, services: Services) -> None:
        self._client = client
        self._settings = settings
        self._services = services
        self._listing = InstanceListing(client, services, console=self._console)
        self._searcher = OfferSearch(client.search, settings, services.clock, has_room=lambda: client.may_search_soon)

    async def offers(self, query: OfferQuery) -> OfferPage:
        """Return both markets' asks, priced or rejected; bids are compared with the on-demand prices."""
        found = await self._searcher.found(query)
        return await judge_apart(lambda: self._page(found), rows=sum(map(len, found.rows.values())))

    def _page(self, found: SearchResult) -> OfferPage:
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

    @property
    def requests_sent(self) -> int:
        return self._client.requests_sent

    async def launch(self, request: LaunchRequest) -> Launched:
        """Buy a contract by one PUT, and check that it is of the market that was asked for."""
        ask, body = request_body(request)
        try:
            created = await self._client.create(ask, body, key=request.key)
        except VastRefused as exc:
            raise refusal_of_purchase(exc, request.offer.market) from exc
        if created.refused is not None:
            raise await self._without_leftover(created, created.refused, request)
        self._listing.own(created.contract)
        return Launched(instance=await self._verify_purchase(created.contract, request))

    async def find(self, key: AttemptKey) -> tuple[Instance, ...]:
        """Return every machine that carries the key; only the complete list proves that there is none."""
        if key_of(key, self._services.install) is None:
            return ()
        narrow = await self._listing.read(key)
        found = _carrying(narrow, key)
        if found:
            return found
        listing = await self._listing.read(None)
        found = _carrying(listing, key)
        if not found and not listing.complete:
            raise Unavailable(f"vast.ai's list of instances is incomplete, so it does not prove that {key} is absent")
        return found

    async def instances(self) -> Listing:
        return await self._listing.read(None)

    async def terminate(self, ref: InstanceRef) -> None:
        """Destroy this machine; an absent one is a success, and one that is not ours is refused."""
        # What is absent may be not listed yet: destroying an id that the daemon has recorded is harmless if absent.
        await self._client.destroy(await self._our_contract(ref))

    async def change_bid(self, ref: InstanceRef, price: MicroUsdPerHour) -> None:
        """Set the machine's bid to `price` for all its GPUs."""
        contract = await self._our_contract(ref)
        row = await self._row(contract)
        gpus = max(1, (row.num_gpus if row else None) or 1)
        price_max = 32 * gpus * MICRO
        if not MICRO // 1000 <= price <= price_max:
            raise RequestRejected(
                f"vast.ai takes bids from $0.001 to ${32 * gpus} per hour", field="price", reason="out of range"
            )
        try:
            await self._client.change_bid(contract, price / MICRO)
            if gpus > 1:
                await self._mend_bid_per_gpu(contract, price, gpus)
        except VastRefused as exc:
            raise RequestRejected(
                f"vast.ai did not change the bid of instance {contract}: {exc.detail or exc.code}",
                field="ref" if exc.says_absent else "price",
                reason=exc.code or str(exc.status),
            ) from exc

    async def logs(self, ref: InstanceRef, *, lines: int) -> Sequence[str]:
        """Return the container's last lines as vast.ai kept them, without anything that resembles a secret."""
        return await self._console(await self._our_contract(ref), lines)

    async def account(self) -> str:
        """Return the number of the user; empty where vast.ai does not state it."""
        user, _ = await self._client.user()
        return "" if user.id is None else str(user.id)

    async def balance(self) -> Balance:
        """Return the credit that is left. A debt counts as nothing left."""
        money, _ = await money_left(self._client)
        return Balance(available=MicroUsd(max(0, money)))

    async def charges(self, since: datetime, until: datetime) -> Sequence[ProviderCharge]:
        """Return what vast.ai billed for our machines, one charge per kind (gpu, disk, bwd, bwu)."""
        return await charges_between(self._client, self._services, since, until)

    async def check(self) -> Sequence[CheckLine]:
        """Check key, permissions, credit, market and clock, one line each."""
        return await examine(self._client, self._settings, self._services)

    async def _console(self, contract: int, lines: int) -> Sequence[str]:
        try:
            url = await self._client.log_url(contract, lines=lines)
        except VastRefused as exc:
            raise Unavailable(f"vast.ai has no log of instance {contract}: {exc.detail or exc.code}") from exc
        if urlsplit(url).scheme != "https" and not (is_loopback(self._settings.base_url) and is_loopback(url)):
            raise ContractViolation("vast.ai named a log address that is not https")
        text = await self._client.fetch_log(url)
        return tuple(clean(line, chars_max=4096) for line in text.splitlines()[-lines:]) if lines > 0 else ()

    async def _our_contract(self, ref: InstanceRef) -> int:
        """Return the number of a machine of ours, or of one that vast.ai does not list.

        Raises:
            RequestRejected: the machine is another's.
        """
        contract = _contract(ref)
        if ref.instance_id in self._listing.ours:
            return contract
        row = await self._client.instance(contract)
        if row is not None and (not isinstance(row, dict) or key_of(row.get("label"), self._services.install) is None):
            raise RequestRejected(
                f"vast.ai instance {contract} does not carry the label of this installation",
                field="ref",
                reason="not ours",
            )
        return contract

    async def _row(self, contract: int) -> InstanceRow | None:
        row = await self._client.instance(contract)
        return None if row is None else row_or_none(InstanceRow, row)

    async def _without_leftover(self, created: Created, refused: VastRefused, request: LaunchRequest) -> ProviderError:
        """Destroy the stopped contract that vast.ai left behind a refusal, and return the refusal.

        A bid that is too low is answered with an error *and* a contract, which bills storage until it is destroyed.
        """
        self._services.log.warning(
            "vast.leftover_contract", key=request.key, contract=created.contract, reason=refused.code
        )
        try:
            await self._client.destroy(created.contract)
        except ProviderError as exc:
            raise OutcomeUnknown(
                f"vast.ai refused the purchase, but contract {created.contract} it made could not be destroyed",
                key=request.key,
            ) from exc
        said = refused.detail or refused.code or "no reason given"
        if request.offer.market is Market.SPOT:
            return PriceMoved(f"vast.ai did not take the bid of ${request.price_max / MICRO:.4f}/h: {said}")
        return NoCapacity(f"vast.ai could not start the machine: {said}")

    async def _verify_purchase(self, contract: int, request: LaunchRequest) -> Instance:
        """Check that the new machine is of the market and price that was agreed.

        A fresh contract may not be listed for some seconds. If it can not be seen in time it is returned as pending,
        and the check is made when it is first listed.
        """
        for attempt in range(VERIFY_TRIES):
            if attempt:
                await self._services.clock.sleep(VERIFY_WAIT)
            try:
                row = await self._row(contract)
            except ProviderError as exc:
                self._services.log.warning("vast.verify_failed", key=request.key, reason=type(exc).__name__)
                break
            if row is None or row.is_bid is None:
                continue
            fault = _fault_of_purchase(row, request)
            if fault is not None:
                await self._undo(contract, request.key, str(fault))
                raise fault
            return self._listing.own_row(row, request.key)
        self._listing.verify_later(request.key, request.offer.market)
        return Instance(
            ref=ref_of(contract), key=request.key, state=InstanceState.PENDING, host_id=request.offer.host_id
        )

    async def _undo(self, contract: int, key: AttemptKey, reason: str) -> None:
        self._services.log.error("vast.wrong_purchase", key=key, contract=contract, reason=reason)
        try:
            await self._client.destroy(contract)
        except ProviderError as exc:
            raise OutcomeUnknown(f"{reason}; destroying contract {contract} failed", key=key) from exc

    async def _mend_bid_per_gpu(self, contract: int, price: MicroUsdPerHour, gpus: int) -> None:
        """Set the bid again as a price per GPU, if vast.ai took it as one.

        Its own texts disagree on the unit ("per gpu bid price changed" against "per machine"); only the machine's
        price afterwards shows it.
        """
        row = await self._row(contract)
        if row is None or row.dph_base is None:
            return
        if abs(row.dph_base * MICRO - price * gpus) <= price * gpus // 100:
            self._services.log.warning("vast.bid_was_per_gpu", contract=contract, gpus=gpus)
            await self._client.change_bid(contract, price / gpus / MICRO)


def _fault_of_purchase(row: InstanceRow, request: LaunchRequest) -> ProviderError | None:
    spot = request.offer.market is Market.SPOT
    if row.is_bid is not spot:
        return ContractViolation(
            f"vast.ai sold contract {row.id} {'on-demand' if spot else 'by bid'} though the other was asked for"
        )
    # The same price comes once as a sum and once as a product: a float's last digit is no rise.
    rounding = request.offer.gpu_count
    if not spot and row.dph_base is not None and micro_usd(row.dph_base) > request.price_max + rounding:
        return PriceMoved(f"vast.ai charges ${row.dph_base:.4f}/h where ${request.price_max / MICRO:.4f}/h was agreed")
    return None


def _carrying(listing: Listing, key: AttemptKey) -> tuple[Instance, ...]:
    return tuple(i for i in listing.instances if i.key == key and i.state is not InstanceState.GONE)


def _contract(ref: InstanceRef) -> int:
    text = str(ref.instance_id)
    if not text.isdecimal() or len(text) > 15:
        raise RequestRejected(f"{text!r} is no vast.ai instance id", field="ref", reason="not a number")
    return int(text)


# The bill is reported to exceed the listed price by up to a fifth; the vendor's pages do not confirm it, so it is the
# careful default, to be replaced by what the account's own charges say.
DEFAULT_FEE_MULTIPLIER: Final = "1.20"
REQUEST_TIMEOUT_S: Final = 30.0


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
    if not services.credential:
        raise AuthFailed('vast.ai needs an API key: api_key = { env = "VAST_API_KEY" } under [providers.vast]')
    headers = {"authorization": f"Bearer {services.credential}", "accept": "application/json"}
    async with (
        open_http(settings.base_url, headers=headers, timeout_s=REQUEST_TIMEOUT_S) as http,
        open_http(settings.base_url, timeout_s=REQUEST_TIMEOUT_S) as keyless,
    ):
        client = VastClient(http, keyless=keyless, clock=services.clock, rng=services.rng)
        yield VastProvider(client, settings, services)


PLUGIN: Final = AdapterPlugin(
    name=PROVIDER,
    title="vast.ai",
    settings_model=VastSettings,
    needs_credential=True,
    traits_by=_traits,
    open_by=_open,
)
