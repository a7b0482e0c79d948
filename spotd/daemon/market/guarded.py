"""A provider whose answers and errors can be relied on to be what the contract says, whatever its plugin does.

Every value that a plugin returns passes `plugin_values`, and every exception becomes a leaf of the contract's error
tree with a short, printable message and a sane wait. A plugin that fails is a provider that does not answer, and a
launch whose answer makes no sense has an unknown outcome: nothing that a plugin does can raise out of a cycle.

The calls are counted here as well, where the plugin does not count its own requests. Past prices, from a plugin or from
a client's list, are held to the same types and bounds before they are stored.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from types import new_class
from typing import Any, Final, TypeVar, cast

import anyio

from spotd.core.domain.market import NO_GANGS
from spotd.daemon.market import plugin_fields
from spotd.daemon.market import plugin_values as plain
from spotd.daemon.market.plugin_fields import (
    ID_CHARS_MAX,
    PRICE_MAX,
    MalformedValue,
    bounded,
    identity,
    instant,
    member,
    price,
    text,
    whole,
    whole_or_none,
)
from spotd.daemon.market.plugin_values import AHEAD_MAX, GPUS_MAX, OFFERS_MAX
from spotd_providers.contract import errors, values
from spotd_providers.contract.provider import (
    Bills,
    ChangesBids,
    Clock,
    CountsRequests,
    GivesShell,
    KnowsAccount,
    KnowsBalance,
    KnowsPastPrices,
    Logger,
    OfferPriceHistory,
    OpensPorts,
    PortConnection,
    PriceHistoryPage,
    Provider,
    ReadsLogs,
    ReplacesMembers,
    StartsGangs,
)
from spotd_providers.contract.values import Market, MicroUsdPerGbMonth, MicroUsdPerHour, OfferId, PoolId, ProviderName
from spotd_providers.kit.calls import judge_apart

PAST_CHANGES_MAX: Final = 100_000
"""Of one page of past prices."""
PROVIDER_CHARS_MAX: Final = 64
COUNT_MAX: Final = 2**31


def price_history(value: Any, provider: ProviderName | None, *, now: datetime) -> PriceHistoryPage:
    """Return the offers of a page of past prices that can be used; the others are counted as rejected.

    Args:
        provider: whose they are; `None` where each offer names its own, as recorded lists do.

    Raises:
        Malformed: it is no page, or of no span of the past.
    """
    if not isinstance(value, PriceHistoryPage):
        raise MalformedValue(f"a page of past prices of the type {type(value).__name__}")
    since, until = instant(value.since), instant(value.until)
    if since is None or until is None or not since < until <= now + AHEAD_MAX:
        raise MalformedValue("since, until: not a span of the past")
    rows, more = bounded(value.offers, OFFERS_MAX, what="offers")
    good: list[OfferPriceHistory] = []
    changes_left = PAST_CHANGES_MAX
    rejected = whole_or_none(value.rejected, low=0, high=COUNT_MAX) or 0
    for row in rows:
        try:
            offer = _past_offer(row, provider, changes_left)
        except MalformedValue:
            rejected += 1
            continue
        changes_left -= len(offer.changes)
        good.append(offer)
    return PriceHistoryPage(
        offers=tuple(good),
        since=since,
        until=min(until, now),
        next=text(value.next, chars_max=ID_CHARS_MAX),
        rejected=rejected + more,
        left=whole_or_none(value.left, low=0, high=COUNT_MAX),
    )


def _past_offer(row: Any, provider: ProviderName | None, changes_max: int) -> OfferPriceHistory:
    if not isinstance(row, OfferPriceHistory):
        raise MalformedValue(f"an offer of the past of the type {type(row).__name__}")
    named = identity(row.provider, "provider", chars_max=PROVIDER_CHARS_MAX)
    if provider is not None and named != provider:
        raise MalformedValue("provider: another one")
    market = member(Market, row.market)
    if market is None:
        raise MalformedValue("market: neither spot nor on-demand")
    changes, more = bounded(row.changes, changes_max, what="changes")
    if more:
        raise MalformedValue("changes: too many")
    return OfferPriceHistory(
        provider=ProviderName(named),
        offer_id=OfferId(identity(row.offer_id, "offer_id")),
        pool=PoolId(identity(row.pool, "pool")),
        market=market,
        gpu=identity(row.gpu, "gpu", chars_max=64),
        gpu_count=whole(row.gpu_count, "gpu_count", low=1, high=GPUS_MAX),
        storage_price=MicroUsdPerGbMonth(price(row.storage_price, "storage_price")),
        changes=tuple(_past_change(change) for change in changes),
    )


def _past_change(change: Any) -> tuple[datetime, MicroUsdPerHour | None]:
    """Return one change; a price of 0 is no price that anything was sold for."""
    at = instant(change[0]) if isinstance(change, tuple) and len(change) == 2 else None
    if at is None:
        raise MalformedValue("changes: not pairs of an instant and a price")
    if change[1] is None:
        return at, None
    return at, MicroUsdPerHour(whole(change[1], "price", low=1, high=PRICE_MAX))


T = TypeVar("T")

WAIT_MAX: Final = timedelta(days=1)
"""No provider is believed that it must not be asked for longer."""
WAIT_DEFAULT: Final = timedelta(minutes=1)
ACCOUNT_DEADLINE_S: Final = 60.0
MESSAGE_CHARS_MAX: Final = 500


def no_gangs(provider: Provider) -> str:
    """Why the provider starts no machines that reach each other; empty where it does."""
    found = provider.capabilities.get(values.Power.GANG)
    if found is not None and not found.available:
        return found.reason or NO_GANGS
    return "" if found is not None and nodes_max(provider) > 1 else NO_GANGS


def nodes_max(provider: Provider) -> int:
    """Return how many machines that reach each other the plugin starts in one launch; 1 where it does not say it."""
    inner = provider.inner if isinstance(provider, GuardedProvider) else provider
    try:
        most: object = inner.nodes_max if isinstance(inner, StartsGangs) else 1
    except Exception:  # noqa: BLE001 - a property of a plugin can raise anything
        return 1
    return most if type(most) is int and most > 1 else 1


class GuardedProvider:
    """Implements `Provider` over a plugin's provider; `guarded` makes one with the plugin's optional powers."""

    def __init__(
        self,
        inner: Provider,
        *,
        clock: Clock,
        log: Logger,
        name: values.ProviderName | None = None,
        hide: Callable[[str], str] = str,
    ) -> None:
        self.inner = inner
        self._hide = hide
        """Removes every secret of this process from a text: a provider or a host may quote one."""
        self._clock = clock
        self._log = log
        self._name = values.ProviderName(str(inner.name)) if name is None else name
        self._calls = 0
        self._known_offers: dict[str, values.Offer] = {}
        self._complaints: dict[str, str] = {}

    @property
    def name(self) -> values.ProviderName:
        return self._name

    @property
    def capabilities(self) -> Mapping[values.Power, values.Capability]:
        """Those the plugin declares as it should; none if it fails."""
        try:
            declared: dict[Any, Any] = dict(self.inner.capabilities)
        except Exception as exc:  # noqa: BLE001 - whatever a plugin raises, the daemon goes on without its powers
            self._complain("capabilities", f"it fails with {type(exc).__name__}")
            return {}
        return {
            power: values.Capability(available=has.available is True, reason=plugin_fields.text(has.reason))
            for power, has in declared.items()
            if isinstance(power, values.Power) and isinstance(has, values.Capability)
        }

    @property
    def requests_sent(self) -> int:
        """Requests since it was opened: the plugin's own count where it keeps one, else its calls."""
        try:
            sent = self.inner.requests_sent if isinstance(self.inner, CountsRequests) else self._calls
        except Exception:  # noqa: BLE001 - a count is no reason to stop
            return self._calls
        return sent if type(sent) is int and 0 <= sent < 2**53 else self._calls

    async def offers(self, query: values.OfferQuery) -> values.OfferPage:
        page = await self._answer_of("offers", lambda: self.inner.offers(query))
        now, known = self._now(), self._known_offers

        def read() -> values.OfferPage:
            return self._read("offers", lambda: plain.offer_page(page, self.name, now=now, known=known))

        checked = await judge_apart(read, rows=plain.row_count(page))
        self._known_offers = {offer.offer_id: offer for offer in checked.offers}
        return _with_scope(checked, query)

    async def launch(self, request: values.LaunchRequest) -> values.Launched:
        """One launch, made by the plugin.

        Raises:
            OutcomeUnknown: besides what the plugin says, for an answer that makes no sense: the machine may exist.
            NotSupported: several machines are asked for, and the plugin does not declare that it starts so many.
        """
        offer, nodes = request.offer, request.offer.nodes
        if nodes > 1 and (why := no_gangs(self) or ("" if nodes <= nodes_max(self) else "so many are not started")):
            raise errors.NotSupported(why)
        if not offer.nodes_min <= nodes <= (offer.nodes_max or nodes):
            raise errors.NotSupported("it is not sold as so many machines at once")
        made = await self._answer_of("launch", lambda: self.inner.launch(request))
        try:
            instance = self._read("launch", lambda: plain.instance(_instance_of(made), self.name, now=self._now()))
        except errors.Unavailable as exc:
            raise errors.OutcomeUnknown(str(exc), key=request.key) from exc
        return values.Launched(instance=self._hidden(instance))

    async def find(self, key: values.AttemptKey) -> tuple[values.Instance, ...]:
        found = await self._answer_of("find", lambda: self.inner.find(key))
        machines = self._read("find", lambda: plain.found_machines(found, self.name, now=self._now()))
        return tuple(map(self._hidden, machines))

    async def instances(self) -> values.Listing:
        listing = await self._answer_of("instances", lambda: self.inner.instances())
        found = self._read("instances", lambda: plain.listing(listing, self.name, now=self._now()))
        self._complain("instances", found.rejected[0].reason if found.rejected else "")
        return replace(found, instances=tuple(map(self._hidden, found.instances)))

    async def terminate(self, ref: values.InstanceRef) -> None:
        await self._answer_of("terminate", lambda: self.inner.terminate(ref))

    async def check(self) -> Sequence[values.CheckLine]:
        found = await self._answer_of("check", lambda: self.inner.check())
        return self._read("check", lambda: plain.check_lines(found))

    # --- inside ------------------------------------------------------------------------------------------------

    def _hidden(self, instance: values.Instance) -> values.Instance:
        detail = self._hide(instance.detail)
        return instance if detail == instance.detail else replace(instance, detail=detail)

    def _now(self) -> datetime:
        return self._clock.now()

    async def _answer_of(self, call: str, ask: Callable[[], Awaitable[T]]) -> T:
        """Return the plugin's answer.

        Raises:
            ProviderError: a leaf of the contract's tree, whatever the plugin raised.
        """
        self._calls += 1
        try:
            return await ask()
        except errors.ProviderError as exc:
            raise _sane(exc, self._hide) from exc
        except (Exception, SystemExit) as exc:
            self._log.error("provider.broke_contract", provider=self.name, call=call, exc_info=exc)
            raise errors.ProviderError(f"the plugin failed with {type(exc).__name__}, which is a bug in it") from exc
        except anyio.get_cancelled_exc_class() as exc:
            if anyio.get_current_task().has_pending_cancellation():
                raise
            # It cancelled something of its own. Let through, this would end the task that polls the provider.
            self._log.error("provider.broke_contract", provider=self.name, call=call, exc_info=exc)
            raise errors.ProviderError("the plugin cancelled its own call, which is a bug in it") from exc

    async def _in_time(self, call: str, ask: Callable[[], Awaitable[T]]) -> T:
        """Return the plugin's answer about the account, within a deadline."""
        try:
            with anyio.fail_after(ACCOUNT_DEADLINE_S):
                return await self._answer_of(call, ask)
        except TimeoutError as exc:
            raise errors.Unavailable(f"no answer within {ACCOUNT_DEADLINE_S:.0f} s") from exc

    def _read(self, call: str, read: Callable[[], T]) -> T:
        try:
            return read()
        except Exception as exc:
            why = str(exc) if isinstance(exc, MalformedValue) else type(exc).__name__
            self._complain(call, why)
            raise errors.Unavailable(f"the plugin's answer cannot be used ({why}), which is a bug in it") from exc

    def _complain(self, call: str, why: str) -> None:
        """Log an answer that cannot be used once, as long as the reason stays the same."""
        if why and self._complaints.get(call) != why:
            self._log.error("provider.odd_answer", provider=self.name, call=call, reason=why)
        self._complaints[call] = why


class _Account(GuardedProvider):
    async def account(self) -> str:
        return plugin_fields.text(await self._in_time("account", lambda: cast(KnowsAccount, self.inner).account()))


class _Balance(GuardedProvider):
    async def balance(self) -> values.Balance:
        found = await self._in_time("balance", lambda: cast(KnowsBalance, self.inner).balance())
        return self._read("balance", lambda: plain.balance(found))


class _Billing(GuardedProvider):
    async def charges(self, since: datetime, until: datetime) -> Sequence[values.ProviderCharge]:
        found = await self._in_time("charges", lambda: cast(Bills, self.inner).charges(since, until))
        good, odd = self._read("charges", lambda: plain.charges(found))
        self._complain("charges", "rows that cannot be used" if odd else "")
        return good


class _Logs(GuardedProvider):
    async def logs(self, ref: values.InstanceRef, *, lines: int) -> Sequence[str]:
        found = await self._in_time("logs", lambda: cast(ReadsLogs, self.inner).logs(ref, lines=lines))
        return tuple(map(self._hide, self._read("logs", lambda: plain.lines(found, count=lines))))


class _Shell(GuardedProvider):
    async def shell(self, ref: values.InstanceRef) -> values.ShellAddress:
        found = await self._in_time("shell", lambda: cast(GivesShell, self.inner).shell(ref))
        return self._read("shell", lambda: plain.shell_address(found))


class _Ports(GuardedProvider):
    async def open_port(self, ref: values.InstanceRef, port: int) -> PortConnection:
        return await self._in_time("open_port", lambda: cast(OpensPorts, self.inner).open_port(ref, port))


class _PastPrices(GuardedProvider):
    async def price_history(self, since: datetime, *, after: str) -> PriceHistoryPage:
        inner = cast(KnowsPastPrices, self.inner)
        found = await self._in_time("price_history", lambda: inner.price_history(since, after=after))
        page = self._read("price_history", lambda: price_history(found, self.name, now=self._now()))
        self._complain("price_history", "rows that cannot be used" if page.rejected else "")
        return page


class _Bids(GuardedProvider):
    async def change_bid(self, ref: values.InstanceRef, price: values.MicroUsdPerHour) -> None:
        await self._in_time("change_bid", lambda: cast(ChangesBids, self.inner).change_bid(ref, price))


class _Members(GuardedProvider):
    async def replace_members(
        self, request: values.LaunchRequest, ref: values.InstanceRef, ranks: Sequence[int], number: int
    ) -> None:
        inner = cast(ReplacesMembers, self.inner)
        await self._in_time("replace_members", lambda: inner.replace_members(request, ref, ranks, number))

    async def drop_members(self, ref: values.InstanceRef, ranks: Sequence[int]) -> None:
        inner = cast(ReplacesMembers, self.inner)
        await self._in_time("drop_members", lambda: inner.drop_members(ref, ranks))


_POWERS: Final[Mapping[type[Any], type[GuardedProvider]]] = {
    KnowsAccount: _Account,
    KnowsBalance: _Balance,
    Bills: _Billing,
    ReadsLogs: _Logs,
    GivesShell: _Shell,
    OpensPorts: _Ports,
    ChangesBids: _Bids,
    KnowsPastPrices: _PastPrices,
    ReplacesMembers: _Members,
}


def guarded(
    inner: Provider,
    *,
    clock: Clock,
    log: Logger,
    name: values.ProviderName | None = None,
    hide: Callable[[str], str] = str,
) -> GuardedProvider:
    """Return the provider behind its guard, with the optional powers it has; one that is guarded stays as it is."""
    if isinstance(inner, GuardedProvider):
        return inner
    parts = tuple(part for power, part in _POWERS.items() if isinstance(inner, power))
    kind = new_class("Guarded", parts) if parts else GuardedProvider
    made: GuardedProvider = kind(inner, clock=clock, log=log, name=name, hide=hide)
    return made


def _with_scope(page: values.OfferPage, query: values.OfferQuery) -> values.OfferPage:
    """Return the page with the GPUs of which it holds every offer.

    A provider that narrows its search to what was asked for and does not say so would make the others appear sold out.
    """
    asked = {*query.gpus, *query.watched}
    if not asked or page.whole or not page.complete or any(offer.gpu not in asked for offer in page.offers):
        return page
    return replace(page, whole=frozenset((gpu, 0) for gpu in asked))


def _instance_of(made: Any) -> Any:
    if not isinstance(made, values.Launched):
        raise MalformedValue(f"an answer to a launch of the type {type(made).__name__}")
    return made.instance


def _sane(exc: errors.ProviderError, hide: Callable[[str], str] = str) -> errors.ProviderError:
    """Return the same leaf of the tree, with a message that can be shown and a wait that can be kept."""
    try:
        said = plugin_fields.text(hide(str(exc)), chars_max=MESSAGE_CHARS_MAX)
    except Exception:  # noqa: BLE001 - a plugin's own exception class may fail at anything
        said = ""
    said = said or type(exc).__name__
    match exc:
        case errors.RateLimited():
            return errors.RateLimited(said, retry_after=_wait(exc.retry_after) or WAIT_DEFAULT)
        case errors.OfferGone():
            return errors.OfferGone(said, lasts=_wait(exc.lasts))
        case errors.QuotaExceeded():
            return errors.QuotaExceeded(said, quota=plugin_fields.text(exc.quota, chars_max=plugin_fields.ID_CHARS_MAX))
        case errors.RequestRejected():
            return errors.RequestRejected(
                said, field=plugin_fields.text(exc.field), reason=plugin_fields.text(hide(exc.reason))
            )
        case errors.OutcomeUnknown():
            return errors.OutcomeUnknown(said, key=plugin_fields.text(exc.key))
        case _:
            leaf = next((kind for kind in _PLAIN_LEAVES if isinstance(exc, kind)), errors.ProviderError)
            return leaf(said)


_PLAIN_LEAVES: Final[tuple[type[errors.ProviderError], ...]] = (
    errors.Unavailable,
    errors.AuthFailed,
    errors.NoCapacity,
    errors.PriceMoved,
    errors.NoBalance,
    errors.ContractViolation,
    errors.NotSupported,
)


def _wait(value: Any) -> timedelta | None:
    if not isinstance(value, timedelta) or value < timedelta(0):
        return None
    return min(value, WAIT_MAX)
