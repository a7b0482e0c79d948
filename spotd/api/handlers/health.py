"""How the daemon, its stores and its providers are: status, prices, providers, doctor, reconcile."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Awaitable, Callable
from datetime import timedelta
from itertools import islice
from pathlib import Path
from typing import Final

import anyio

from spotd.api.backend import PriceQuery
from spotd.api.handlers.context import HandlerContext
from spotd.api.handlers.environment_checks import config_row, filesystem_row, mode_row, mounts_text, row_of, sqlite_row
from spotd.api.handlers.listing_anomalies import notes_of, oddities_of
from spotd.api.handlers.name_resolution import known_provider, resolved_gpus
from spotd.api.handlers.render import instant, offers_responses, quote_response
from spotd.api.schemas.health import (
    CapabilityResponse,
    CheckResponse,
    DoctorResponse,
    ListingResponse,
    ProviderResponse,
    ReconcileResponse,
    StatusResponse,
)
from spotd.api.schemas.prices import PricesResponse, QuoteResponse
from spotd.api.timestamps import utc_text
from spotd.core.candidates import CandidateCatalogue, ceiling_for
from spotd.core.metering import spent_in_month, spent_on_day
from spotd.core.pricing import Needs, quote
from spotd.daemon.install import other_account_words
from spotd.daemon.market.guarded import guarded
from spotd.daemon.market.provider_entry import ProviderEntry
from spotd.daemon.market.request_counts import RequestCounts
from spotd.history import DISK_GB, HistoryUnavailable
from spotd.store import Reads
from spotd_jobs.objects.api import StoreError as ObjectsError
from spotd_providers.contract.errors import ProviderError
from spotd_providers.contract.money import as_usd
from spotd_providers.contract.values import InstanceState, ProviderName

CHECK_DEADLINE_S: Final = 30.0
GRANT_TRIED: Final = timedelta(minutes=1)
CYCLE_DEADLINE_S: Final = 60.0
_NOTES: Final = ("host.note", "provider.", "history.")


class Health:
    """The part of the backend that knows how things are."""

    def __init__(self, context: HandlerContext) -> None:
        self._context = context

    async def status(self) -> StatusResponse:
        context = self._context
        counts = await context.read(lambda reads: reads.counts_by_state())
        world, now = context.world(), context.clock.now()
        return StatusResponse(
            version=str(context.facts.get("version", "")),
            install=world.policy.install,
            pid=os.getpid(),
            started_at=utc_text(context.started_at),
            clock_scale=1 / context.clock.real_seconds(timedelta(seconds=1)),
            paused=context.why_paused,
            machines=sum(1 for a in world.attempts.values() if a.machine.may_compute and a.ref is not None),
            jobs={state.value: count for state, count in counts.items()},
            spent_day_usd=as_usd(spent_on_day(world, now)),
            spent_month_usd=as_usd(spent_in_month(world, now)),
        )

    async def prices(self, query: PriceQuery) -> PricesResponse:
        context = self._context
        market, policy, now = context.offer_cache.snapshot(), context.policy.current, context.clock.now()
        known_provider(query.provider, context.providers)
        sold = {gpu for provider_offers in market.offer_cache.values() for gpu, _ in provider_offers.offer_index.by_gpu}
        wanted = resolved_gpus(query.gpu, sold)
        world = context.world()
        catalogue = CandidateCatalogue(market, policy, world.cooldowns, now, attempts=world.attempts.values())
        needs = Needs(disk_gb=DISK_GB, upload_bytes_per_hour=0, restore_bytes_per_hour=0)
        found: list[tuple[int, str, str, QuoteResponse]] = []
        for name, provider_offers in market.offer_cache.items():
            rules = policy.providers.get(name)
            if rules is None or (query.provider is not None and name != query.provider):
                continue
            for (gpu, count), group in provider_offers.offer_index.by_gpu.items():
                if wanted is not None and gpu not in wanted:
                    continue
                ceiling = ceiling_for(gpu, count, None, policy)
                for offer in group:
                    priced = quote(offer, needs, rules.fee_ppm, provider_offers.at or now)
                    blocked = catalogue.silent.get(name, "") or catalogue.blocked(offer)
                    shape = quote_response(priced, ceiling, blocked, policy.bid_headroom_ppm)
                    found.append((priced.price.per_gpu, name, offer.offer_id, shape))
        found.sort(key=lambda row: row[:3])
        return PricesResponse(
            quotes=[row[3] for row in islice(found, query.limit)],
            boards=offers_responses(market, notes_of(context.offer_cache, context.clock)),
            more=len(found) > query.limit,
        )

    async def providers(self) -> list[ProviderResponse]:
        return [self._provider(entry) for _, entry in sorted(self._context.providers.items())]

    def _provider(self, entry: ProviderEntry) -> ProviderResponse:
        offer_cache = self._context.offer_cache
        if entry.provider is None:
            return ProviderResponse(
                name=entry.name,
                title=entry.title,
                enabled=entry.enabled,
                ok=False,
                detail=entry.last_error or "disabled in the config",
                offers=0,
                machines=0,
                last_poll_at=None,
                last_listing_at=None,
                fee_multiplier=entry.fee_ppm / 1_000_000,
                requests_h=0,
                requests_min=0,
                capabilities=[],
            )
        now = self._context.clock.now()
        request_counts = RequestCounts() if entry.poller is None else entry.poller.request_counts
        provider_offers = offer_cache.snapshot().offer_cache[entry.name]
        seen = offer_cache.machines(entry.name)
        machines = 0 if seen.listing is None else sum(m.state is not InstanceState.GONE for m in seen.listing.instances)
        rules = self._context.policy.current.providers.get(entry.name)
        odd = oddities_of(offer_cache, entry.name, self._context.clock, now)
        last_error = (rules.unusable if rules is not None else "") or provider_offers.error or seen.error
        offers = f"{provider_offers.offer_index.size} offers" if provider_offers.at is not None else "no answer yet"
        return ProviderResponse(
            name=entry.name,
            title=entry.title,
            enabled=entry.enabled,
            ok=not last_error and provider_offers.at is not None and not odd.is_unusable,
            detail="; ".join([last_error or offers, *odd.words]),
            offers=provider_offers.offer_index.size,
            machines=machines,
            last_poll_at=instant(provider_offers.at),
            last_listing_at=instant(seen.listing.at) if seen.listing is not None else None,
            fee_multiplier=(rules.fee_ppm if rules is not None else entry.fee_ppm) / 1_000_000,
            requests_h=request_counts.per_hour(now),
            requests_min=request_counts.last_minute(now),
            capabilities=[
                CapabilityResponse(power=power.value, available=has.available, reason=has.reason)
                for power, has in sorted(entry.provider.capabilities.items())
            ],
        )

    async def doctor(self) -> DoctorResponse:
        """Every check at the same time, each with its own time limit."""
        rows: dict[int, list[CheckResponse]] = {}
        checks: list[tuple[str, Callable[[], Awaitable[list[CheckResponse]]]]] = [
            ("daemon", self._daemon_checks),
            ("store", self._store_checks),
            *(
                (name, lambda entry=entry: self._provider_checks(entry))
                for name, entry in sorted(self._context.providers.items())
            ),
        ]

        async def one(index: int, area: str, check: Callable[[], Awaitable[list[CheckResponse]]]) -> None:
            rows[index] = [row_of(area, "answers", f"no answer within {CHECK_DEADLINE_S:.0f} s", ok=False)]
            with anyio.move_on_after(CHECK_DEADLINE_S):
                rows[index] = await check()

        async with anyio.create_task_group() as group:
            for index, (area, check) in enumerate(checks):
                group.start_soon(one, index, area, check, name=f"check-{area}")
        found = [row for index in sorted(rows) for row in rows[index]]
        return DoctorResponse(ok=all(row["ok"] for row in found), checks=found)

    async def _daemon_checks(self) -> list[CheckResponse]:
        context = self._context
        rows = [
            row_of("daemon", "state", context.database.last_error or "answers", ok=not context.database.last_error),
            sqlite_row(sqlite3.sqlite_version_info),
        ]
        config = context.facts.get("config")
        if isinstance(config, Path) and config.exists():
            rows.append(config_row(config))
        folder = context.facts.get("state_dir")
        if isinstance(folder, Path):
            rows.extend((mode_row("state folder", folder), filesystem_row(folder, mounts_text())))
        rows.extend(await self._containment_rows())
        rows.append(await self._history_row())
        paused = context.policy.why_paused
        if paused:
            rows.append(row_of("daemon", "launches", paused, ok=False))
        return rows

    async def _containment_rows(self) -> list[CheckResponse]:
        """What the daemon could not go on with, and what it leaves out at the moment."""
        context = self._context
        jobs = await context.database.read(lambda reads: reads.quarantined_jobs())
        rows = [
            row_of("daemon", f"job {job.name}", job.reason, ok=False, hint=f"spotctl retry {job.name}") for job in jobs
        ]
        rows.extend(
            row_of("daemon", one.subject, one.error, ok=False, hint="everything else goes on; report this with the log")
            for one in sorted(context.control_loop.contained, key=lambda one: one.subject)
        )
        rows.extend(row_of("daemon", "silent hosts", why, ok=False) for why in context.control_loop.doubts)
        if context.control_loop.held:
            rows.append(row_of("daemon", "decisions", f"none are made: {context.control_loop.held}", ok=False))
        return rows

    async def _history_row(self) -> CheckResponse:
        price_recorder = self._context.price_recorder
        hint = "jobs go on without it; free some space on its disk, or check who may write there"
        if price_recorder.last_error:
            return row_of("daemon", "price history", price_recorder.last_error, ok=False, hint=hint)
        try:
            used = await price_recorder.bytes_used()
        except HistoryUnavailable as exc:
            return row_of("daemon", "price history", str(exc), ok=False, hint=hint)
        return row_of(
            "daemon", "price history", f"{used / 1e6:.1f} of {price_recorder.bytes_max / 1e6:.0f} MB", ok=True
        )

    async def _store_checks(self) -> list[CheckResponse]:
        objects = self._context.objects
        key = "doctor/probe"

        def probe() -> None:
            objects.put(key, b"spotd")
            if objects.get(key, bytes_max=64) != b"spotd":
                raise ObjectsError("what was written is not what is read")
            objects.delete([key])

        try:
            await self._context.stored(probe)
        except Exception as exc:  # noqa: BLE001 - a finding is a row, whatever it is
            return [row_of("store", "write and read", str(exc), ok=False, hint="see [store] in the config")]
        where = "hosts that see this computer's files" if objects.shared_with_hosts_by == "filesystem" else "any host"
        rows = [row_of("store", "write and read", "works", ok=True)]
        expires = self._context.wall.now() + GRANT_TRIED
        try:
            await self._context.stored(lambda: objects.grant_upload("doctor/", expires=expires, size_max=1024))
        except Exception as exc:  # noqa: BLE001 - as above
            hint = "nothing can be launched with this store: docs/stores.md says which ones can be used"
            return [*rows, row_of("store", "grants", str(exc), ok=False, hint=hint)]
        rows.append(row_of("store", "grants", f"serve {where}", ok=True))
        try:
            found = await self._context.stored(objects.advice)
        except Exception as exc:  # noqa: BLE001 - as above
            return [*rows, row_of("store", "settings", str(exc), ok=False)]
        return [*rows, *(row_of("store", one.name, one.detail, ok=one.ok, hint=one.hint) for one in found)]

    async def _provider_checks(self, entry: ProviderEntry) -> list[CheckResponse]:
        if not entry.enabled:
            return []
        if entry.provider is None:
            return [row_of(entry.name, "opens", entry.last_error, ok=False, hint=f"see [providers.{entry.name}]")]
        rules = self._context.policy.current.providers.get(entry.name)
        rows = []
        if rules is not None and rules.unusable:
            rows.append(row_of(entry.name, "usable", rules.unusable, ok=False))
        strange = other_account_words(self._context.world(), self._context.policy.current, entry.name)
        if strange:
            rows.append(row_of(entry.name, "account", strange, ok=False))
        try:
            lines = await guarded(entry.provider, clock=self._context.clock, log=self._context.log).check()
        except ProviderError as exc:
            return [*rows, row_of(entry.name, "answers", str(exc) or type(exc).__name__, ok=False)]
        return [*rows, *(row_of(entry.name, one.name, one.detail, ok=one.ok, hint=one.hint) for one in lines)]

    async def reconcile(self) -> ReconcileResponse:
        context = self._context
        last = await context.read(Reads.last_event)
        running = {name: entry.poller for name, entry in context.providers.items() if entry.poller is not None}
        async with anyio.create_task_group() as group:
            for name, poller in sorted(running.items()):
                group.start_soon(poller.poll_machines, name=f"reconcile-{name}")
        listings = [self._listing(name) for name in sorted(running)]
        await context.control_loop.whole_cycle(seconds=CYCLE_DEADLINE_S)
        events = await context.read(lambda reads: reads.events(since=last))
        return ReconcileResponse(
            listings=listings,
            actions=[e.event.message for e in events if not e.event.kind.startswith(_NOTES)],
        )

    def _listing(self, name: ProviderName) -> ListingResponse:
        seen = self._context.offer_cache.machines(name)
        listing = seen.listing
        machines = () if listing is None else tuple(m for m in listing.instances if m.state is not InstanceState.GONE)
        return ListingResponse(
            provider=name,
            machines=len(machines),
            complete=listing is not None and listing.complete and not seen.error,
            error=seen.error,
        )
