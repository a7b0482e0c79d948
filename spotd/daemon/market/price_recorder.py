"""Recorder of the price history: every poll, written in a thread of its own; the past is rolled up step by step.

Nothing waits for it. A poller hands over its newest answer and goes on; of answers that the file is too slow for, the
newest of each provider counts. A file or disk that fails costs prices, one line in the log, and nothing else.

Polled prices pass from the daemon that leads to the one that leads after it, through the store that both have. The
leader writes what it polled on a day as one object, again each hour until the day is over. A daemon that begins to lead
reads the objects of others once, from the last day that it has read. What is lost in between costs figures of `history`
and nothing else: no decision rests on the prices of another. Objects go with the prices that they hold, after ninety
days. No host may write below the prefix.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Final, TypeVar, cast

import anyio

from spotd.core.bills import BILLED_WITHIN, READ_AFTER, Sharer, bill_of, compared, is_due, leave_to_last
from spotd.core.domain.attempts import Attempt
from spotd.core.domain.plan import Plan
from spotd.core.domain.states import AttemptState
from spotd.core.domain.world import World
from spotd.daemon.commits import Commits, Database, Threads, cycle_points
from spotd.daemon.controllers import Controller, Outage, Pause
from spotd.daemon.market.offer_cache import Kind
from spotd.daemon.object_keys import shared_prices_prefix
from spotd.history import History, HistoryUnavailable
from spotd.history.file import DAY_S, Retained
from spotd.history.importing import BadDocument, decode, encode
from spotd.store import Reads, StateError
from spotd_jobs.objects.api import ObjectInfo, ObjectMissing, ObjectStore, ObjectTooLarge, StoreError
from spotd_providers.contract.errors import ProviderError
from spotd_providers.contract.provider import Bills, Clock, Logger, Provider
from spotd_providers.contract.values import OfferPage, Power, ProviderCharge, ProviderName

T = TypeVar("T")

BUSY_PAUSE_S: Final = 2.0
"""Between two steps while the past is being rolled up: a step takes milliseconds."""
IDLE_PAUSE_S: Final = 300.0
CLOSE_S: Final = 2.0


class PriceRecorder:
    """`seen` is called by the pollers, `ask` by the API, and `run` is a task."""

    def __init__(
        self,
        history: History,
        *,
        clock: Clock,
        log: Logger,
        note: Callable[[str, str, datetime], None],
        inline: bool = False,
    ) -> None:
        self._history = history
        self._clock = clock
        self._log = log
        self._note = note
        self._threads = Threads(inline=inline)
        self._turn = threading.Lock()
        self._waiting: dict[ProviderName, tuple[OfferPage, datetime]] = {}
        self._outage = Outage(log, "history.held", "history.back")
        self.controller = Controller(
            "price-recorder",
            self.reconcile_once,
            interval_s=IDLE_PAUSE_S,
            outage=self._outage,
            is_first_run_late=True,
        )

    @property
    def last_error(self) -> str:
        """Why prices are not being kept, empty while they are."""
        return self._outage.error

    def seen(self, provider: ProviderName, page: OfferPage, asked_at: datetime) -> None:
        """Take over an answer, which is written as soon as there is time for it."""
        sold = tuple(offer for offer in page.offers if offer.gpu_count and offer.nodes_min == 1)
        # The history is one of prices of GPUs in single machines.
        page = page if len(sold) == len(page.offers) else replace(page, offers=sold)
        self._waiting[provider] = (page, asked_at)
        self.controller.wake_event.notify()

    async def run(self) -> None:
        """Keep prices until this is cancelled, then close the file."""
        try:
            await self.controller.run()
        finally:
            with anyio.move_on_after(CLOSE_S, shield=True):
                await self._call(self._history.close)

    async def reconcile_once(self) -> Pause:
        """Write what waits, and roll up one step of the past."""
        waiting, self._waiting = self._waiting, {}
        last_errors: list[str] = []
        for provider, (page, asked_at) in waiting.items():
            failed = len(last_errors)
            await self._try(partial(self._record, provider, page, int(asked_at.timestamp())), last_errors)
            if len(last_errors) > failed:  # tried again, unless a newer answer comes first
                self._waiting.setdefault(provider, (page, asked_at))
        # Also when nothing could be written: rolling up is what makes room.
        more = await self._try(partial(self._history.step, int(self._clock.now().timestamp())), last_errors)
        return Pause(seconds=BUSY_PAUSE_S if more else IDLE_PAUSE_S, error=last_errors[0] if last_errors else "")

    def _record(self, provider: ProviderName, page: OfferPage, at: int) -> int:
        return self._history.record(provider, page.offers, complete=page.complete, at=at, whole=page.whole)

    async def _try(self, work: Callable[[], int], last_errors: list[str]) -> int:
        """Return what the work returned, or 0 and one error more."""
        try:
            return await self._call(work)
        except HistoryUnavailable as exc:
            last_errors.append(str(exc))
        except Exception as exc:  # noqa: BLE001 - the outermost loop: whatever it is, prices must not end the daemon
            if not self.last_error:
                self._log.error("history.failed", exc_info=exc)
            last_errors.append(f"prices are not kept because of an error of spotd's own ({type(exc).__name__})")
        return 0

    async def ask(self, question: Callable[[History], T]) -> T:
        """Return what the history answers.

        Raises:
            HistoryUnavailable: the file cannot be used now.
        """
        return await self._call(partial(question, self._history))

    async def recall(
        self, providers: Sequence[ProviderName], keep: Callable[[ProviderName, Iterable[Kind], datetime], None]
    ) -> None:
        """Hand over when these providers last offered which kinds of machine; nothing where the file cannot be read."""
        if not providers:
            return
        try:
            found = await self.ask(lambda history: history.last_offers(providers))
        except HistoryUnavailable as exc:
            self._log.warning("history.not_recalled", error=str(exc))
            return
        for provider, kinds in found.items():
            for kind, at in kinds.items():
                keep(provider, (kind,), datetime.fromtimestamp(at, UTC))

    @property
    def bytes_max(self) -> int:
        return self._history.retained.bytes_max

    async def _call(self, work: Callable[[], T]) -> T:
        """Call in a thread, which a cancelled caller leaves behind: a transaction is whole or absent.

        The next call waits for that thread: a connection that is closed under another thread ends the process.
        """

        def alone() -> T:
            with self._turn:
                return work()

        try:
            return await self._threads.run(alone)
        finally:
            for sentence in self._history.set_aside:
                self._log.warning("history.set_aside", reason=sentence)
                self._note("history.set_aside", sentence, self._clock.now())
            self._history.set_aside.clear()


# Corrects what was charged for machines that are gone to what their providers billed.
#
# Best effort: an answer that does not come is asked for again, and what was booked stays until one can be believed.


EVERY: Final = timedelta(minutes=10)
AT_ONCE: Final = 50
DEADLINE_S: Final = 60.0
MARGIN: Final = timedelta(days=1)
"""Providers bill by the hour or by the day: the bills of a whole day around a machine are read."""


class BillCheck:
    """Compares charges with bills. `reconcile_once` compares a few attempts."""

    def __init__(
        self,
        providers: Mapping[ProviderName, Provider],
        *,
        commits: Commits,
        database: Database,
        clock: Clock,
        log: Logger,
    ) -> None:
        self._providers = providers
        self._commits = commits
        self._database = database
        self._clock = clock
        self._log = log
        self.controller = Controller(
            "bills",
            self.reconcile_once,
            interval_s=clock.real_seconds(EVERY),
            expected=(StateError,),
            outage=Outage(log, "bills.held", "bills.back"),
            is_first_run_late=True,
        )

    async def reconcile_once(self) -> None:
        """Ask each provider once for the attempts that are due, and correct what differs.

        Raises:
            StateError: the state cannot be read or written.
        """
        now = self._clock.now()
        policy = self._commits.policy
        for name in sorted(name for name, provider in self._providers.items() if _can_be_asked(provider)):
            rules = policy.providers.get(name)
            if rules is None:
                continue
            until = [now - rules.bill_open_for - after for after in READ_AFTER]
            read = partial(Reads.unread_bills, provider=name, since=now - BILLED_WITHIN, until=until, limit=AT_ONCE)
            ended = await self._database.read(read)
            due = [item for item in ended if is_due(item, policy, now)]
            charges = await self._ask(name, due, now) if due else None
            for item in due if charges is not None else ():
                await self._compare(item, charges or ())

    async def _ask(
        self, name: ProviderName, items: Sequence[Attempt], now: datetime
    ) -> Sequence[ProviderCharge] | None:
        since = min(item.intended_at for item in items) - MARGIN
        try:
            with anyio.fail_after(DEADLINE_S):
                return await cast(Bills, self._providers[name]).charges(since, now)
        except (ProviderError, TimeoutError) as exc:
            self._log.info("bills.unanswered", provider=name, error=str(exc) or type(exc).__name__)
        return None

    async def _compare(self, item: Attempt, charges: Sequence[ProviderCharge]) -> None:
        # A row that states the key of another machine is not of this one, whatever id it names.
        rows = [row for row in charges if row.key is None or row.key == item.carried_key]
        bill = None if item.ref is None else bill_of(item.ref.instance_id, rows)

        def decide(reads: Reads, world: World, now: datetime) -> Plan:
            job = reads.job(item.id.job)
            stored = next((one for one in reads.attempts_of(item.id.job) if one.id == item.id), None)
            if job is None or stored is None or not is_due(stored, world.policy, now):
                return Plan()
            items = reads.attempts_on_machine_of(stored)
            if any(one.state is not AttemptState.ENDED for one in items):
                return Plan()  # the machine goes on, and so does its bill
            if items[-1].id != stored.id:
                return leave_to_last(world, job, stored, now)
            jobs = {one.id.job: reads.job(one.id.job) for one in items}
            sharers = [
                Sharer(job=owner, item=one, booked=reads.charges_of(owner.id))
                for one in items
                if (owner := jobs[one.id.job]) is not None
            ]
            return compared(world, sharers, bill, now) if len(sharers) == len(items) else Plan()

        await self._commits.commit_with(decide, cycle_points)


def _can_be_asked(provider: Provider) -> bool:
    power = provider.capabilities.get(Power.BILLING)
    return power is not None and power.available and isinstance(provider, Bills)


SHARED_EVERY: Final = timedelta(hours=1)
KEPT: Final = Retained().everything
OBJECT_BYTES_MAX: Final = 16_000_000
LISTED_MAX: Final = 5_000
"""A day has one object for each computer that led on it."""


class SharedPrices:
    """`reconcile_once` reads what others wrote, the first time, and writes what was polled here."""

    def __init__(
        self,
        objects: ObjectStore,
        *,
        recorder: PriceRecorder,
        install: str,
        writer: str,
        clock: Clock,
        log: Logger,
        inline: bool = False,
    ) -> None:
        """Make it. `writer` names this computer's folder of the state; it is the same after a restart."""
        self._objects = objects
        self._recorder = recorder
        self._prefix = shared_prices_prefix(install)
        self._writer = writer
        self._clock = clock
        self._log = log
        self._threads = Threads(inline=inline)
        self._is_read = False
        self._written = 0
        """The last day of which everything that was polled here is in the store."""
        self.controller = Controller(
            "shared-prices",
            self.reconcile_once,
            interval_s=clock.real_seconds(SHARED_EVERY),
            expected=(StoreError, HistoryUnavailable),
            outage=Outage(log, "shared_prices.held", "shared_prices.back"),
        )

    async def reconcile_once(self) -> None:
        """Read the objects of others, if that was not done; write those of today and of days that were not written.

        Raises:
            StoreError: the object store cannot be used now.
            HistoryUnavailable: the file of prices cannot be used now.
        """
        now = int(self._clock.now().timestamp())
        if not self._is_read:
            await self._read(now)
            self._is_read = True
        today = now // DAY_S
        # The clock may have been set back since.
        for day in range(max(min(self._written, today - 1) + 1, today - 1), today + 1):
            await self._write(day, now)
            self._written = min(day, today - 1)

    async def _write(self, day: int, now: int) -> None:
        pages = await self._recorder.ask(lambda history: history.pages(day * DAY_S, min((day + 1) * DAY_S, now)))
        if pages:
            key = f"{self._prefix}{_date_of(day)}/{self._writer}.json.gz"
            data = await self._threads.run(partial(encode, pages))
            await self._threads.run(lambda: self._objects.put(key, data))

    async def _read(self, now: int) -> None:
        """Take over what others wrote since the last day that was read, oldest first."""
        found = await self._threads.run(self._list)
        # Our clock alone would delete everything when it is ahead: by the store's, too, the objects must be old.
        by_store = max((int(info.modified.timestamp()) for info in found), default=0)
        gone = _date_of(max(0, (min(now, by_store) - int(KEPT.total_seconds())) // DAY_S))
        known_day = min(await self._recorder.ask(History.shared_day), now // DAY_S - 1)
        for info in found:
            day, _, name = info.key.removeprefix(self._prefix).partition("/")
            if day < gone:
                await self._threads.run(partial(self._objects.delete, [info.key]))
            elif name.removesuffix(".json.gz") != self._writer and day >= _date_of(known_day):
                await self._take_over(info, now)
        await self._recorder.ask(lambda history: history.note_shared_day(now // DAY_S - 1))

    def _list(self) -> list[ObjectInfo]:
        found: list[ObjectInfo] = []
        for info in self._objects.list(self._prefix):
            found.append(info)
            if len(found) >= LISTED_MAX:
                break
        return found

    async def _take_over(self, info: ObjectInfo, now: int) -> None:
        try:
            data = await self._threads.run(lambda: self._objects.get(info.key, bytes_max=OBJECT_BYTES_MAX))
            pages = await self._threads.run(partial(decode, data))
        except (ObjectMissing, ObjectTooLarge, BadDocument) as error:
            self._log.warning("shared_prices.unreadable", key=info.key, error=str(error))
            return
        for page in pages:
            await self._recorder.ask(lambda history, page=page: history.take_over(page, now=now))  # type: ignore[misc]  # mypy cannot type a lambda's defaults


def _date_of(day: int) -> str:
    return datetime.fromtimestamp(day * DAY_S, UTC).date().isoformat()
