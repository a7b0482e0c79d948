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
from spotd.api.shapes.health import (
    CapabilityShape,
    CheckShape,
    DoctorShape,
    ListingShape,
    ProviderShape,
    ReconcileShape,
    StatusShape,
)
from spotd.api.shapes.prices import PricesShape, QuoteShape
from spotd.api.words import utc_text
from spotd.core.candidates import Catalogue, ceiling_for
from spotd.core.metering import spent_in_month, spent_on_day
from spotd.core.pricing import Needs, quote
from spotd.daemon.backend.meant import gpus_meant, known_provider
from spotd.daemon.backend.oddities import notes_of, oddities_of
from spotd.daemon.backend.parts import Parts, ProviderEntry
from spotd.daemon.backend.render import board_shapes, instant, quote_shape
from spotd.daemon.backend.surroundings import config_row, filesystem_row, mode_row, mounts_text, row_of, sqlite_row
from spotd.daemon.guarded import guarded
from spotd.daemon.install import other_account_words
from spotd.daemon.tally import Tally
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

    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    async def status(self) -> StatusShape:
        parts = self._parts
        counts = await parts.read(lambda reads: reads.counts_by_state())
        world, now = parts.world(), parts.clock.now()
        return StatusShape(
            version=str(parts.facts.get("version", "")),
            install=world.policy.install,
            pid=os.getpid(),
            started_at=utc_text(parts.started_at),
            clock_scale=1 / parts.clock.real_seconds(timedelta(seconds=1)),
            paused=parts.why_paused,
            machines=sum(1 for a in world.attempts.values() if a.machine.may_compute and a.ref is not None),
            jobs={state.value: count for state, count in counts.items()},
            spent_day_usd=as_usd(spent_on_day(world, now)),
            spent_month_usd=as_usd(spent_in_month(world, now)),
        )

    async def prices(self, query: PriceQuery) -> PricesShape:
        parts = self._parts
        market, policy, now = parts.boards.snapshot(), parts.policy.current, parts.clock.now()
        known_provider(query.provider, parts.providers)
        sold = {gpu for board in market.boards.values() for gpu, _ in board.shelf.by_gpu}
        wanted = gpus_meant(query.gpu, sold)
        world = parts.world()
        catalogue = Catalogue(market, policy, world.cooldowns, now, attempts=world.attempts.values())
        needs = Needs(disk_gb=DISK_GB, upload_bytes_per_hour=0, restore_bytes_per_hour=0)
        found: list[tuple[int, str, str, QuoteShape]] = []
        for name, board in market.boards.items():
            rules = policy.providers.get(name)
            if rules is None or (query.provider is not None and name != query.provider):
                continue
            for (gpu, count), group in board.shelf.by_gpu.items():
                if wanted is not None and gpu not in wanted:
                    continue
                ceiling = ceiling_for(gpu, count, None, policy)
                for offer in group:
                    priced = quote(offer, needs, rules.fee_ppm, board.at or now)
                    blocked = catalogue.silent.get(name, "") or catalogue.blocked(offer)
                    shape = quote_shape(priced, ceiling, blocked, policy.bid_headroom_ppm)
                    found.append((priced.price.per_gpu, name, offer.offer_id, shape))
        found.sort(key=lambda row: row[:3])
        return PricesShape(
            quotes=[row[3] for row in islice(found, query.limit)],
            boards=board_shapes(market, notes_of(parts.boards, parts.clock)),
            more=len(found) > query.limit,
        )

    async def providers(self) -> list[ProviderShape]:
        return [self._provider(entry) for _, entry in sorted(self._parts.providers.items())]

    def _provider(self, entry: ProviderEntry) -> ProviderShape:
        boards = self._parts.boards
        if entry.provider is None:
            return ProviderShape(
                name=entry.name,
                title=entry.title,
                enabled=entry.enabled,
                ok=False,
                detail=entry.trouble or "disabled in the config",
                offers=0,
                machines=0,
                last_poll_at=None,
                last_listing_at=None,
                fee_multiplier=entry.fee_ppm / 1_000_000,
                requests_h=0,
                requests_min=0,
                capabilities=[],
            )
        now = self._parts.clock.now()
        tally = Tally() if entry.poller is None else entry.poller.tally
        board = boards.snapshot().boards[entry.name]
        seen = boards.machines(entry.name)
        machines = 0 if seen.listing is None else sum(m.state is not InstanceState.GONE for m in seen.listing.instances)
        rules = self._parts.policy.current.providers.get(entry.name)
        odd = oddities_of(boards, entry.name, self._parts.clock, now)
        trouble = (rules.unusable if rules is not None else "") or board.error or seen.error
        offers = f"{board.shelf.size} offers" if board.at is not None else "no answer yet"
        return ProviderShape(
            name=entry.name,
            title=entry.title,
            enabled=entry.enabled,
            ok=not trouble and board.at is not None and not odd.is_unusable,
            detail="; ".join([trouble or offers, *odd.words]),
            offers=board.shelf.size,
            machines=machines,
            last_poll_at=instant(board.at),
            last_listing_at=instant(seen.listing.at) if seen.listing is not None else None,
            fee_multiplier=(rules.fee_ppm if rules is not None else entry.fee_ppm) / 1_000_000,
            requests_h=tally.per_hour(now),
            requests_min=tally.last_minute(now),
            capabilities=[
                CapabilityShape(power=power.value, available=has.available, reason=has.reason)
                for power, has in sorted(entry.provider.capabilities.items())
            ],
        )

    async def doctor(self) -> DoctorShape:
        """Every check at the same time, each with its own time limit."""
        rows: dict[int, list[CheckShape]] = {}
        checks: list[tuple[str, Callable[[], Awaitable[list[CheckShape]]]]] = [
            ("daemon", self._daemon_checks),
            ("store", self._store_checks),
            *(
                (name, lambda entry=entry: self._provider_checks(entry))
                for name, entry in sorted(self._parts.providers.items())
            ),
        ]

        async def one(index: int, area: str, check: Callable[[], Awaitable[list[CheckShape]]]) -> None:
            rows[index] = [row_of(area, "answers", f"no answer within {CHECK_DEADLINE_S:.0f} s", ok=False)]
            with anyio.move_on_after(CHECK_DEADLINE_S):
                rows[index] = await check()

        async with anyio.create_task_group() as group:
            for index, (area, check) in enumerate(checks):
                group.start_soon(one, index, area, check, name=f"check-{area}")
        found = [row for index in sorted(rows) for row in rows[index]]
        return DoctorShape(ok=all(row["ok"] for row in found), checks=found)

    async def _daemon_checks(self) -> list[CheckShape]:
        parts = self._parts
        rows = [
            row_of("daemon", "state", parts.database.trouble or "answers", ok=not parts.database.trouble),
            sqlite_row(sqlite3.sqlite_version_info),
        ]
        config = parts.facts.get("config")
        if isinstance(config, Path) and config.exists():
            rows.append(config_row(config))
        folder = parts.facts.get("state_dir")
        if isinstance(folder, Path):
            rows.extend((mode_row("state folder", folder), filesystem_row(folder, mounts_text())))
        rows.extend(await self._containment_rows())
        rows.append(await self._history_row())
        paused = parts.policy.why_paused
        if paused:
            rows.append(row_of("daemon", "launches", paused, ok=False))
        return rows

    async def _containment_rows(self) -> list[CheckShape]:
        """What the daemon could not go on with, and what it leaves out at the moment."""
        parts = self._parts
        jobs = await parts.database.read(lambda reads: reads.quarantined_jobs())
        rows = [
            row_of("daemon", f"job {job.name}", job.reason, ok=False, hint=f"spotctl retry {job.name}") for job in jobs
        ]
        rows.extend(
            row_of("daemon", one.subject, one.error, ok=False, hint="everything else goes on; report this with the log")
            for one in sorted(parts.brain.contained, key=lambda one: one.subject)
        )
        rows.extend(row_of("daemon", "silent hosts", why, ok=False) for why in parts.brain.doubts)
        if parts.brain.held:
            rows.append(row_of("daemon", "decisions", f"none are made: {parts.brain.held}", ok=False))
        return rows

    async def _history_row(self) -> CheckShape:
        historian = self._parts.historian
        hint = "jobs go on without it; free some space on its disk, or check who may write there"
        if historian.trouble:
            return row_of("daemon", "price history", historian.trouble, ok=False, hint=hint)
        try:
            used = await historian.bytes_used()
        except HistoryUnavailable as exc:
            return row_of("daemon", "price history", str(exc), ok=False, hint=hint)
        return row_of("daemon", "price history", f"{used / 1e6:.1f} of {historian.bytes_max / 1e6:.0f} MB", ok=True)

    async def _store_checks(self) -> list[CheckShape]:
        objects = self._parts.objects
        key = "doctor/probe"

        def probe() -> None:
            objects.put(key, b"spotd")
            if objects.get(key, bytes_max=64) != b"spotd":
                raise ObjectsError("what was written is not what is read")
            objects.delete([key])

        try:
            await self._parts.stored(probe)
        except Exception as exc:  # noqa: BLE001 - a finding is a row, whatever it is
            return [row_of("store", "write and read", str(exc), ok=False, hint="see [store] in the config")]
        where = "hosts that see this computer's files" if objects.shared_with_hosts_by == "filesystem" else "any host"
        rows = [row_of("store", "write and read", "works", ok=True)]
        expires = self._parts.wall.now() + GRANT_TRIED
        try:
            await self._parts.stored(lambda: objects.grant_upload("doctor/", expires=expires, size_max=1024))
        except Exception as exc:  # noqa: BLE001 - as above
            hint = "nothing can be launched with this store: docs/stores.md says which ones can be used"
            return [*rows, row_of("store", "grants", str(exc), ok=False, hint=hint)]
        rows.append(row_of("store", "grants", f"serve {where}", ok=True))
        try:
            found = await self._parts.stored(objects.advice)
        except Exception as exc:  # noqa: BLE001 - as above
            return [*rows, row_of("store", "settings", str(exc), ok=False)]
        return [*rows, *(row_of("store", one.name, one.detail, ok=one.ok, hint=one.hint) for one in found)]

    async def _provider_checks(self, entry: ProviderEntry) -> list[CheckShape]:
        if not entry.enabled:
            return []
        if entry.provider is None:
            return [row_of(entry.name, "opens", entry.trouble, ok=False, hint=f"see [providers.{entry.name}]")]
        rules = self._parts.policy.current.providers.get(entry.name)
        rows = []
        if rules is not None and rules.unusable:
            rows.append(row_of(entry.name, "usable", rules.unusable, ok=False))
        strange = other_account_words(self._parts.world(), self._parts.policy.current, entry.name)
        if strange:
            rows.append(row_of(entry.name, "account", strange, ok=False))
        try:
            lines = await guarded(entry.provider, clock=self._parts.clock, log=self._parts.log).check()
        except ProviderError as exc:
            return [*rows, row_of(entry.name, "answers", str(exc) or type(exc).__name__, ok=False)]
        return [*rows, *(row_of(entry.name, one.name, one.detail, ok=one.ok, hint=one.hint) for one in lines)]

    async def reconcile(self) -> ReconcileShape:
        parts = self._parts
        last = await parts.read(Reads.last_event)
        running = {name: entry.poller for name, entry in parts.providers.items() if entry.poller is not None}
        async with anyio.create_task_group() as group:
            for name, poller in sorted(running.items()):
                group.start_soon(poller.poll_machines, name=f"reconcile-{name}")
        listings = [self._listing(name) for name in sorted(running)]
        await parts.brain.whole_cycle(seconds=CYCLE_DEADLINE_S)
        events = await parts.read(lambda reads: reads.events(since=last))
        return ReconcileShape(
            listings=listings,
            actions=[e.event.message for e in events if not e.event.kind.startswith(_NOTES)],
        )

    def _listing(self, name: ProviderName) -> ListingShape:
        seen = self._parts.boards.machines(name)
        listing = seen.listing
        machines = () if listing is None else tuple(m for m in listing.instances if m.state is not InstanceState.GONE)
        return ListingShape(
            provider=name,
            machines=len(machines),
            complete=listing is not None and listing.complete and not seen.error,
            error=seen.error,
        )
