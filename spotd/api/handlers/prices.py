"""Prices now and in the past, also those that this daemon did not poll: of a provider's own records, or of lists."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from itertools import chain, islice
from typing import Any, Final

from spotd import history
from spotd.api.handlers.context import DaemonAnswers
from spotd.api.handlers.health import notes_of
from spotd.api.handlers.render import offers_responses, quote_response
from spotd.api.requests import HistoryQuery, PriceQuery, utc_text
from spotd.api.responses import ApiUnavailable, Invalid, StateConflict
from spotd.api.routes import SECOND_MAX
from spotd.api.schemas import costs
from spotd.api.schemas.costs import PriceImportAnswer
from spotd.core.domain.market import gang_of
from spotd.core.handover import waiting_words
from spotd.core.pricing import Needs, quote
from spotd.core.ranking.candidates import CandidateCatalogue, ceiling_for
from spotd.core.ranking.cost_words import cost_words
from spotd.daemon.market.guarded import guarded, price_history
from spotd.daemon.market.plugin_fields import MalformedValue
from spotd.history import HistoryUnavailable
from spotd_providers.contract import gpus
from spotd_providers.contract.errors import NotSupported, ProviderError
from spotd_providers.contract.provider import KnowsPastPrices, OfferPriceHistory, PriceHistoryPage
from spotd_providers.contract.values import Market, Power, ProviderName, as_usd

RANGE: Final = timedelta(days=7)
ROWS_MAX: Final = 32
LENGTHS_S: Final = tuple(60 * minutes for minutes in (1, 5, 15, 60, 180, 360, 720, 1440, 2880, 7 * 1440, 28 * 1440))
HINT: Final = "jobs go on without it; spotctl doctor says more"


class PriceHandlers(DaemonAnswers):
    async def quotes(self, query: PriceQuery) -> costs.PricesResponse:
        """Return the quotes of the newest pages, the cheapest first."""
        context = self._context
        market, policy, now = context.offer_cache.snapshot(), context.policy.current, context.clock.now()
        _require_provider(query.provider, context.providers)
        sold = {gpu for provider_offers in market.by_provider.values() for gpu, _ in provider_offers.offer_index.by_gpu}
        wanted = _resolved_gpus(query.gpu, sold)
        world = context.world()
        catalogue = CandidateCatalogue(replace(world, policy=policy), market, now)
        needs = Needs(disk_gb=history.DISK_GB, upload_bytes_per_hour=0, restore_bytes_per_hour=0)
        found: list[tuple[int, str, str, costs.QuoteResponse]] = []
        job = None if query.job is None else world.jobs.get(await context.find(query.job))
        for name, provider_offers in market.by_provider.items():
            rules = policy.providers.get(name)
            if rules is None or (query.provider is not None and name != query.provider):
                continue
            index = provider_offers.offer_index
            for (gpu, count), group in chain(index.by_gpu.items(), index.gangs_by_gpu.items()):
                if wanted is not None and gpu not in wanted:
                    continue
                for one in group:
                    offer = one if one.nodes_min == 1 else gang_of(one, one.nodes_min)
                    ceiling = ceiling_for(gpu, count * one.nodes_min, None, policy)
                    at = provider_offers.at or now
                    priced = quote(offer, needs, rules.fee_ppm, at, is_own=rules.is_own)
                    blocked = catalogue.silent.get(name, "") or catalogue.blocked(offer)
                    row = quote_response(priced, ceiling, blocked, policy.bid_headroom_ppm)
                    found.append((priced.price.per_gpu, name, offer.offer_id, row))
        found.sort(key=lambda row: row[:3])
        return costs.PricesResponse(
            quotes=[row[3] for row in islice(found, query.limit)],
            costs=[
                *(() if job is None else cost_words(job, world, market, now)),
                *waiting_words(world, now),
            ],
            offers=offers_responses(market, notes_of(context.offer_cache, context.clock)),
            more=len(found) > query.limit,
        )

    async def history(self, query: HistoryQuery) -> costs.HistoryResponse:
        """Return what prices were.

        Raises:
            Invalid: an unknown GPU or provider, an empty range, too many buckets.
            ApiUnavailable: the file of prices cannot be read now.
        """
        context = self._context
        _require_provider(query.provider, context.providers)
        now = context.clock.now()
        until = min(query.until or now, now)
        since = query.since or _before(until, RANGE)
        if since >= until:
            raise Invalid(
                "the range ends before it begins", hint="--since and --until are spans before now or instants"
            )
        try:
            question = history.SeriesQuery(
                since=max(0, int(since.timestamp())),
                until=int(until.timestamp()) + 1,
                every_s=_length_s(query, until - since),
                gpus=_resolved_gpus(query.gpu, await context.price_recorder.ask(history.History.gpus)),
                provider=None if query.provider is None else ProviderName(query.provider),
                market=None if query.market is None else Market(query.market),
                offer=query.offer,
                pool=query.pool,
            )
            rules = context.policy.current.providers
            terms = history.PriceTerms(fee_ppm={name: rule.fee_ppm for name, rule in rules.items()})
            answer, import_error = await context.price_recorder.ask(
                lambda history: (history.ask(question, terms), history.import_error)
            )
        except history.HistoryUnavailable as exc:
            raise ApiUnavailable(str(exc), hint=HINT) from exc
        except history.TooManyBuckets as exc:
            raise Invalid(str(exc), hint="spotctl history --every 6h") from exc
        return costs.HistoryResponse(
            since=utc_text(since),
            until=utc_text(until),
            bucket_s=answer.bucket_s,
            disk_gb=history.DISK_GB,
            trouble=context.price_recorder.last_error or import_error,
            prices=[_prices(group) for group in answer.groups],
        )


def _length_s(query: HistoryQuery, span: timedelta) -> int | None:
    """Return the length asked for; else one bucket for all prices, and a screenful of buckets for some."""
    if query.every_s is not None:
        return query.every_s
    if query.gpu is None and query.offer is None and query.pool is None:
        return None
    return next((length for length in LENGTHS_S if span.total_seconds() <= length * ROWS_MAX), LENGTHS_S[-1])


def _before(instant: datetime, span: timedelta) -> datetime:
    return instant - span if instant - datetime(1970, 1, 1, tzinfo=UTC) > span else datetime(1970, 1, 1, tzinfo=UTC)


def _prices(group: history.PriceGroup) -> costs.PastPricesResponse:
    return costs.PastPricesResponse(
        gpu=group.gpu, market=group.market.value, buckets=[_bucket(bucket) for bucket in group.buckets]
    )


def _bucket(bucket: history.Bucket) -> costs.PastBucketResponse:
    p10, p25, median, p75, p90 = map(as_usd, bucket.quantiles)
    return costs.PastBucketResponse(
        at=utc_text(datetime.fromtimestamp(bucket.start, tz=UTC)),
        begins=utc_text(datetime.fromtimestamp(bucket.begins, tz=UTC)),
        offers=round(bucket.offers, 2),
        imported=round(bucket.imported, 4),
        low_usd_gpu_h=as_usd(bucket.low),
        p10_usd_gpu_h=p10,
        p25_usd_gpu_h=p25,
        median_usd_gpu_h=median,
        p75_usd_gpu_h=p75,
        p90_usd_gpu_h=p90,
        high_usd_gpu_h=as_usd(bucket.high),
    )


def _resolved_gpus(gpu: str | None, sold: set[str]) -> frozenset[str] | None:
    """Return those of the sold ones that the name means; `None` for no name.

    Raises:
        Invalid: such a GPU is neither known nor sold.
    """
    if gpu is None:
        return None
    try:
        names = gpus.resolve(gpu, sold=sold)
    except gpus.UnknownGpu as exc:
        raise Invalid(str(exc), hint="spotctl prices shows every GPU that is sold now") from exc
    return frozenset(name for name in sold if name in names or gpus.matches(names, name))


def _require_provider(name: str | None, providers: Collection[str]) -> None:
    """Require a provider of the config, or none.

    Raises:
        Invalid: it is not one.
    """
    if name is not None and name not in providers:
        raise Invalid(f"there is no provider {name!r}", hint=f"known here: {', '.join(sorted(providers))}")


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
