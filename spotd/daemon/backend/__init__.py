"""The daemon as its API sees it: one class that hands each call to the part that knows."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from datetime import datetime

from spotd.api.backend import BudgetChange, Draft, EventQuery, HistoryQuery, JobQuery, LogQuery, PriceQuery, Submission
from spotd.api.shapes.checkpoints import KeptCheckpointShape, VerificationShape
from spotd.api.shapes.costs import CostShape
from spotd.api.shapes.files import FilesShape
from spotd.api.shapes.health import DoctorShape, ProviderShape, ReconcileShape, StatusShape
from spotd.api.shapes.jobs import ForgottenShape, JobDetailShape, JobPageShape, JobShape
from spotd.api.shapes.plans import CodeShape, PlanShape, WhyShape
from spotd.api.shapes.prices import HistoryShape, PricesShape
from spotd.api.shapes.told import EventShape, LogShape
from spotd.daemon.backend.amending import Amending
from spotd.daemon.backend.checkpoints import Checkpoints
from spotd.daemon.backend.files import Files
from spotd.daemon.backend.happenings import Happenings
from spotd.daemon.backend.health import Health
from spotd.daemon.backend.loglines import LogLines
from spotd.daemon.backend.parts import Parts, ProviderEntry
from spotd.daemon.backend.past import Past
from spotd.daemon.backend.queue import Queue
from spotd.daemon.backend.receipts import Receipts

__all__ = ["DaemonBackend", "Parts", "ProviderEntry"]


class DaemonBackend:
    """Implements `spotd.api.backend.Backend`."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._queue = Queue(parts)
        self._amending = Amending(parts, self._queue)
        self._logs = LogLines(parts)
        self._checkpoints = Checkpoints(parts)
        self._files = Files(parts)
        self._receipts = Receipts(parts)
        self._happenings = Happenings(parts)
        self._health = Health(parts)
        self._past = Past(parts)

    def now(self) -> datetime:
        return self._parts.clock.now()

    def trouble(self) -> str:
        return self._parts.database.trouble

    async def status(self) -> StatusShape:
        return await self._health.status()

    async def plan(self, draft: Draft, resume_from: str = "") -> PlanShape:
        return await self._queue.plan(draft, resume_from)

    async def has_code(self, sha256: str) -> bool:
        return await self._queue.has_code(sha256)

    async def put_code(self, sha256: str, stream: AsyncIterator[bytes]) -> CodeShape:
        return await self._queue.put_code(sha256, stream)

    async def submit(self, submission: Submission) -> JobDetailShape:
        return await self._queue.submit(submission)

    async def jobs(self, query: JobQuery) -> JobPageShape:
        return await self._queue.jobs(query)

    async def job(self, ref: str) -> JobDetailShape:
        return await self._queue.job(ref)

    async def why(self, ref: str) -> WhyShape:
        return await self._queue.why(ref)

    def logs(self, ref: str, query: LogQuery) -> AsyncIterator[LogShape]:
        return self._logs.stream(ref, query)

    async def cancel(self, ref: str) -> JobShape:
        return await self._queue.cancel(ref)

    async def retry(self, ref: str, *, anyway: bool = False) -> JobShape:
        return await self._queue.retry(ref, anyway=anyway)

    async def set_budget(self, ref: str, change: BudgetChange) -> JobShape:
        return await self._amending.set_budget(ref, change)

    async def forget(self, machine: str) -> ForgottenShape:
        return await self._amending.forget(machine)

    async def prices(self, query: PriceQuery) -> PricesShape:
        return await self._health.prices(query)

    async def history(self, query: HistoryQuery) -> HistoryShape:
        return await self._past.history(query)

    def events(self, query: EventQuery) -> AsyncIterator[EventShape]:
        return self._happenings.stream(query)

    async def cost(self, ref: str | None) -> CostShape:
        return await self._receipts.cost(ref)

    async def checkpoints(self, ref: str) -> list[KeptCheckpointShape]:
        return await self._checkpoints.listed(ref)

    def verify_checkpoints(self, ref: str, names: Sequence[str], *, every: bool) -> AsyncIterator[VerificationShape]:
        return self._checkpoints.verify(ref, names, every=every)

    async def pin_checkpoints(self, ref: str, names: Sequence[str], *, pinned: bool) -> list[KeptCheckpointShape]:
        return await self._checkpoints.pin(ref, names, pinned=pinned)

    async def remove_checkpoints(self, ref: str, names: Sequence[str]) -> list[KeptCheckpointShape]:
        return await self._checkpoints.remove(ref, names)

    async def files(self, ref: str, checkpoint: str | None) -> FilesShape:
        return await self._files.files(ref, checkpoint)

    def read_file(self, ref: str, checkpoint: str | None, path: str) -> AsyncIterator[bytes]:
        return self._files.read(ref, checkpoint, path)

    def read_files(
        self, ref: str, checkpoint: str | None, manifest: str, spans: Sequence[tuple[int, int]]
    ) -> AsyncIterator[bytes]:
        return self._files.read_many(ref, checkpoint, manifest, spans)

    async def providers(self) -> list[ProviderShape]:
        return await self._health.providers()

    async def doctor(self) -> DoctorShape:
        return await self._health.doctor()

    async def reconcile(self) -> ReconcileShape:
        return await self._health.reconcile()
