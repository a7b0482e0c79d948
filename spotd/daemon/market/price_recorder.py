"""Recorder of the price history: every poll, written in a thread of its own; the past is rolled up step by step.

Nothing waits for it. A poller hands over its newest answer and goes on; of answers that the file is too slow for, the
newest of each provider counts. A file or disk that fails costs prices, one line in the log, and nothing else.
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
from spotd.history import History, HistoryUnavailable
from spotd.store import Reads, StateError
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
