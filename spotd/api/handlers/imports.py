"""Prices that this daemon did not poll: of a provider's own records, or of lists that a client read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from spotd.api.handlers.context import DaemonAnswers
from spotd.api.requests import utc_text
from spotd.api.responses import ApiUnavailable, Invalid, StateConflict
from spotd.api.routes import SECOND_MAX
from spotd.api.schemas.costs import PriceImportAnswer
from spotd.daemon.market.guarded import guarded
from spotd.daemon.market.past_price_values import price_history
from spotd.daemon.market.plugin_fields import MalformedValue
from spotd.history import HistoryUnavailable
from spotd_providers.contract.errors import NotSupported, ProviderError
from spotd_providers.contract.provider import KnowsPastPrices, OfferPriceHistory, PriceHistoryPage
from spotd_providers.contract.values import Power, ProviderName

BODY_HINT: Final = "GET /v1/openapi.json states what an offer of the past holds"
LIST_HINT: Final = "import a recorded list: docs/how-to/backtest.md shows the format"
AGES: Final = timedelta(days=90)


class ImportHandlers(DaemonAnswers):
    async def offers(self, body: Mapping[str, Any]) -> PriceImportAnswer:
        """Store what a recorded list says that offers have cost.

        Raises:
            Invalid: the body is no such list.
            ApiUnavailable: nothing was stored.
        """
        rows = body.get("offers")
        if not isinstance(rows, list):
            raise Invalid("offers is a list of offers of the past", hint=BODY_HINT)
        page = PriceHistoryPage(
            offers=tuple(map(_offer, rows)),
            since=_instant_of(body.get("since_s")),  # type: ignore[arg-type] # what is no instant is refused by the gate
            until=_instant_of(body.get("until_s")),  # type: ignore[arg-type] # as above
        )
        try:
            return await self._store(price_history(page, None, now=self._context.clock.now()))
        except MalformedValue as exc:
            raise Invalid(str(exc), hint=BODY_HINT) from exc

    async def provider(self, name: str, since: datetime, after: str) -> PriceImportAnswer:
        """Ask a provider for one page of its own records, and store it.

        Raises:
            Invalid: there is no such provider.
            StateConflict: it gives no past prices.
            ApiUnavailable: it does not answer, or nothing was stored.
        """
        context = self._context
        entry = context.providers.get(ProviderName(name))
        if entry is None:
            known = ", ".join(sorted(context.providers))
            raise Invalid(
                f"there is no provider and no file {name!r}", hint=f"providers here: {known}; a list is given as a file"
            )
        if entry.provider is None:
            raise ApiUnavailable(f"{name} is not open now", hint="spotctl doctor")
        provider = guarded(entry.provider, clock=context.clock, log=context.log)
        power = provider.capabilities.get(Power.PRICE_HISTORY)
        if not isinstance(provider, KnowsPastPrices) or power is None or not power.available:
            why = (power.reason if power is not None else "") or f"{name} gives no past prices"
            raise StateConflict(why, hint=LIST_HINT)
        try:
            page = await provider.price_history(max(since, context.clock.now() - AGES), after=after)
        except NotSupported as exc:
            raise StateConflict(
                str(exc), hint="import a recorded list: docs/how-to/backtest.md shows the format"
            ) from exc
        except ProviderError as exc:
            raise ApiUnavailable(
                str(exc) or type(exc).__name__, hint="what was imported stays; the same command goes on in a minute"
            ) from exc
        if page.next and page.next == after:
            raise ApiUnavailable(f"the pages of {name}'s past prices do not end", hint="spotctl doctor")
        return await self._store(page)

    async def _store(self, page: PriceHistoryPage) -> PriceImportAnswer:
        context = self._context
        now = int(context.clock.now().timestamp())
        try:
            prices = await context.price_recorder.ask(lambda history: history.take_over(page, now=now))
        except HistoryUnavailable as exc:
            raise ApiUnavailable(str(exc), hint="what was imported before stays; spotctl doctor says more") from exc
        return PriceImportAnswer(
            offers=len(page.offers),
            prices=prices,
            rejected=page.rejected,
            until=utc_text(page.until),
            next=page.next,
            left=page.left,
        )


def _offer(row: Any) -> OfferPriceHistory:
    """Return the row as it is: `price_history` holds every value to its type and bounds."""
    row = row if isinstance(row, Mapping) else {}
    return OfferPriceHistory(
        provider=row.get("provider", ""),
        offer_id=row.get("offer", ""),
        pool=row.get("pool", ""),
        market=row.get("market", ""),
        gpu=row.get("gpu", ""),
        gpu_count=row.get("count", 0),
        storage_price=row.get("storage_microusd_gb_month", 0),
        changes=_changes(row.get("changes")),  # type: ignore[arg-type] # as in `offers`
    )


def _changes(rows: Any) -> Sequence[Any]:
    if not isinstance(rows, list):
        return (None,)  # refused by the gate
    return [
        (_instant_of(row[0]), row[1]) if isinstance(row, list) and len(row) == 2 else None  # a pair as JSON has it
        for row in rows
    ]


def _instant_of(second: object) -> datetime | None:
    if type(second) is not int or not 0 <= second <= SECOND_MAX:
        return None
    return datetime.fromtimestamp(second, UTC)
