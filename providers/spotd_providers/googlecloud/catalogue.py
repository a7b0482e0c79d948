"""What is sold, read now and then: regions, types, prices and the machine image, and Google's advice about capacity."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Annotated, Any, Final

from pydantic import Field

from spotd_providers.contract.errors import AuthFailed, NotSupported, ProviderError, Unavailable
from spotd_providers.contract.provider import OfferPriceHistory, PriceHistoryPage, Services
from spotd_providers.contract.values import CAPACITY_SCORE_MAX, Market, MicroUsdPerHour, PoolId, Rejected
from spotd_providers.googlecloud.offers import (
    IMAGE_GB,
    SERVICE,
    GoogleKind,
    PriceTable,
    disk_price,
    kinds_of,
    listed_price,
    offer_id,
    price_table,
    relevant,
    zones_of,
)
from spotd_providers.googlecloud.wire import PROVIDER, WHO, GoogleSettings, every_row
from spotd_providers.kit.calls import Kept, Rest, ask_each, judge_apart, past_page
from spotd_providers.kit.rest import Meaning, RestClient, RestRefused
from spotd_providers.kit.shapes import Instant, Lenient, Row, row_or_none

TYPES_KEPT: Final = timedelta(hours=6)
PRICES_KEPT: Final = timedelta(hours=2)
"""List prices change at most daily."""
LAUNCH_PRICES_WITHIN: Final = timedelta(minutes=5)
"""How old the prices may be by which a launch is judged."""
SCORES_KEPT: Final = timedelta(hours=1)
ASKED_MAX: Final = 24
"""Pools whose advice one poll asks for; the next one goes on."""
HISTORY_KEPT: Final = timedelta(days=90)
HAZARD_MAX: Final = 1_000_000


class _Image(Row):
    diskSizeGb: Annotated[str | int | None, Lenient] = None  # noqa: N815 - Google's own name


class _Scores(Row):
    obtainability: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
    estimatedUptime: Annotated[str | None, Lenient] = None  # noqa: N815 - Google's own name


class _Recommendation(Row):
    scores: _Scores


class _Interval(Row):
    startTime: Instant  # noqa: N815 - Google's own name


class _PastPrice(Row):
    interval: _Interval
    listPrice: Any  # noqa: N815 - Google's own name


class Catalogue:
    """The market of some regions of one project."""

    def __init__(
        self, compute: RestClient, billing: RestClient, project: str, settings: GoogleSettings, services: Services
    ) -> None:
        self._compute, self._billing, self._settings, self._services = compute, billing, settings, services
        self.path = f"/compute/v1/projects/{project}"
        clock = services.clock
        self.prices = Kept(clock, PRICES_KEPT, self._read_prices)
        self.image_gb = Kept(clock, TYPES_KEPT, self._read_image_gb)
        self._types: dict[str, Kept[tuple[list[GoogleKind], list[Rejected]]]] = {}
        self.scores: dict[tuple[str, str], tuple[int | None, int | None]] = {}
        self._scored: dict[tuple[str, str], Rest] = {}
        self._refused: dict[str, Rest] = {}
        self.refusal = ""
        """Why there are no scores, as far as Google says so."""

    async def kinds(self) -> tuple[list[GoogleKind], list[Rejected], bool]:
        """Return the types of all zones, what of them cannot be used, and whether these are all.

        Regions are read each time, so that a market that does not answer is not taken for one that does.
        """
        regions, whole = await self.regions()
        zones = [zone for own in regions.values() for zone in own]
        answers, failed = await ask_each(zones, str, lambda zone: self._types_in(zone).get())
        for zone, exc in failed.items():
            self._services.log.warning("gcp.zone_failed", zone=zone, error=type(exc).__name__, detail=str(exc))
        kinds = [kind for zone in zones if zone in answers for kind in answers[zone][0]]
        bad = [one for zone in zones if zone in answers for one in answers[zone][1]]
        bad += [Rejected(offer_id=one, reason="no such region") for one in self._settings.regions if one not in regions]
        return kinds, bad, whole and not failed

    def forget_types(self, zone: str) -> None:
        """Let the types of a zone be read anew: one was not there."""
        self._types_in(zone).forget()

    def _types_in(self, zone: str) -> Kept[tuple[list[GoogleKind], list[Rejected]]]:
        if zone not in self._types:
            self._types[zone] = Kept(self._services.clock, TYPES_KEPT, partial(self._read_types, zone))
        return self._types[zone]

    async def region_rows(self) -> list[Any]:
        return await every_row(self._compute, f"{self.path}/regions", "the list of regions")

    async def regions(self) -> tuple[dict[str, list[str]], bool]:
        """Return the zones of the regions, and whether these are all that there are."""
        found = [zones_of(row, self._settings) for row in await self.region_rows()]
        return {name: zones for name, zones, _ in found if name}, all(whole for _, _, whole in found)

    async def _read_types(self, zone: str) -> tuple[list[GoogleKind], list[Rejected]]:
        path = f"{self.path}/zones/{zone}"
        rows = await every_row(self._compute, f"{path}/machineTypes", "the list of types")
        has_n1 = any(str(one.get("name")).startswith("n1-") for one in rows if isinstance(one, dict))
        attachable = await self._attachable(path) if has_n1 else frozenset[str]()
        return await judge_apart(lambda: kinds_of(rows, zone, attachable, self._settings), rows=len(rows))

    async def _attachable(self, path: str) -> frozenset[str]:
        """Return the accelerators that a zone lists."""
        rows = await every_row(self._compute, f"{path}/acceleratorTypes", "the list of accelerators")
        return frozenset(str(one.get("name")) for one in rows if isinstance(one, dict))

    async def _read_prices(self) -> PriceTable:
        regions = frozenset(self._settings.regions)
        keep = partial(relevant, regions=regions)
        rows = await every_row(self._billing, SERVICE, "the price list", name="skus", keep=keep)
        return await judge_apart(lambda: price_table(rows, regions), rows=len(rows))

    async def _read_image_gb(self) -> int:
        """Return what the machine image takes of the disk.

        Raises:
            Unavailable: there is no such image, among other things.
        """
        answer = await self._compute.ask("GET", f"/compute/v1/{self._settings.image}", what="the machine image")
        row = row_or_none(_Image, answer)
        text = str(row.diskSizeGb) if row is not None and row.diskSizeGb is not None else ""
        return int(text) if text.isascii() and text.isdecimal() and 0 < len(text) < 5 else IMAGE_GB

    # Advice: not every project is allowed to ask, so a refusal costs the score and nothing else.

    async def refresh_scores(self, kinds: Sequence[GoogleKind], wanted: Iterable[str]) -> None:
        """Ask for the scores of pools that have none or an old one, those of wanted types first."""
        first = frozenset(wanted)
        due = [
            kind
            for kind in sorted(kinds, key=lambda one: (one.name not in first, one.name, one.zone))
            if kind.count and not kind.attached and self._is_due(kind)
        ][:ASKED_MAX]
        if due:
            await ask_each(due, lambda kind: f"{kind.name}:{kind.zone}", self._refresh)

    def _is_due(self, kind: GoogleKind) -> bool:
        rests = (self._scored.get((kind.name, kind.zone)), self._refused.get(kind.region))
        return all(one is None or one.left() <= timedelta(0) for one in rests)

    async def _refresh(self, kind: GoogleKind) -> None:
        pool = (kind.name, kind.zone)
        self._scored[pool] = Rest(self._services.clock)
        self._scored[pool].take(SCORES_KEPT)
        self.scores.pop(pool, None)
        body = {
            "distributionPolicy": {"targetShape": "ANY_SINGLE_ZONE", "zones": [{"zone": f"zones/{kind.zone}"}]},
            "instanceFlexibilityPolicy": {"instanceSelections": {"a": {"machineTypes": [kind.row.name]}}},
            "instanceProperties": {"scheduling": {"provisioningModel": "SPOT"}},
            "size": 1,
        }
        try:
            found = (await self._advice(kind.region, "capacity", body)).get("recommendations")
        except NotSupported as exc:
            self._refused[kind.region] = Rest(self._services.clock)
            self._refused[kind.region].take(TYPES_KEPT)
            self.refusal = str(exc)
            return
        except ProviderError:
            return
        row = row_or_none(_Recommendation, found[0]) if isinstance(found, list) and found else None
        if row is not None:
            self.scores[pool] = (score_of(row.scores.obtainability), hazard_of(row.scores.estimatedUptime))

    async def _advice(self, region: str, what: str, body: Mapping[str, Any]) -> Mapping[str, Any]:
        """Ask for advice.

        Raises:
            NotSupported: this project may not ask.
        """
        path = f"{self.path}/regions/{region}/advice/{what}"
        try:
            return await self._compute.change("POST", path, what="advice", json_body=dict(body))
        except AuthFailed as exc:
            raise NotSupported(f"Google gives this project no advice on capacity in {region}: {exc}") from exc
        except RestRefused as exc:
            if exc.meaning is Meaning.ABSENT:
                raise NotSupported(f"Google knows no advice on capacity in {region}") from exc
            raise Unavailable(str(exc)) from exc

    async def price_history(self, since: datetime, *, after: str) -> PriceHistoryPage:
        """Return what one type has cost as Spot in one zone.

        Raises:
            NotSupported: this project may not ask.
        """
        kinds, _, whole = await self.kinds()
        pages = {f"{one.name}:{one.zone}": one for one in kinds if one.count and not one.attached}
        if not whole:
            raise Unavailable(f"{WHO}'s types are not all known now")
        page = past_page(sorted(pages), since, self._services.clock.now(), after=after, kept=HISTORY_KEPT, who=WHO)
        if not page.names:
            return page.answer()
        kind = pages[page.names[0]]
        body = {
            "instanceProperties": {"machineType": kind.row.name, "scheduling": {"provisioningModel": "SPOT"}},
            "locationPolicy": {"location": f"zones/{kind.zone}"},
            "types": ["PRICE"],
        }
        raw = (await self._advice(kind.region, "capacityHistory", body)).get("priceHistory")
        changes, rejected = past_prices(raw if isinstance(raw, list) else [], page.since, page.until)
        offer = OfferPriceHistory(
            provider=PROVIDER,
            offer_id=offer_id(kind, Market.SPOT),
            pool=PoolId(f"{kind.name}:{kind.zone}"),
            market=Market.SPOT,
            gpu=kind.gpu,
            gpu_count=kind.count,
            storage_price=disk_price(kind, await self.prices.get(), self._settings),
            changes=changes,
        )
        return page.answer((offer,) if changes else (), rejected)


def score_of(obtainability: float) -> int:
    """Map 0 to 1 onto 1 to 10."""
    return max(1, min(CAPACITY_SCORE_MAX, math.ceil(CAPACITY_SCORE_MAX * obtainability)))


def hazard_of(uptime: str | None) -> int | None:
    """Return how many machines end in a million hours that live so long, written as seconds: `"3600s"`."""
    text = (uptime or "").removesuffix("s").partition(".")[0]
    if uptime is None or not uptime.endswith("s") or not text.isascii() or not text.isdecimal() or len(text) > 9:
        return None
    return min(HAZARD_MAX, HAZARD_MAX * 3600 // max(1, int(text)))


def past_prices(
    rows: Iterable[Any], since: datetime, until: datetime
) -> tuple[tuple[tuple[datetime, MicroUsdPerHour | None], ...], int]:
    """Return the changes of a price, of those before the span only the last one, and how many rows cannot be used."""
    found: dict[datetime, MicroUsdPerHour] = {}
    rejected = 0
    for raw in rows:
        row = row_or_none(_PastPrice, raw)
        price = None if row is None else listed_price(row.listPrice)
        if row is None or price is None:
            rejected += 1
            continue
        found[row.interval.startTime.astimezone(UTC)] = price
    known = sorted((at, price) for at, price in found.items() if at <= until)
    before = [one for one in known if one[0] < since][-1:]
    return (*before, *(one for one in known if one[0] >= since)), rejected
