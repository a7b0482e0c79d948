"""The daemon as its API sees it: one class that hands each call to the part that knows."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from datetime import datetime

from spotd.api.backend import (
    BudgetChange,
    EventQuery,
    HistoryQuery,
    JobQuery,
    JobRequest,
    LogQuery,
    PriceQuery,
    Submission,
)
from spotd.api.handlers.amendments import Amending
from spotd.api.handlers.checkpoints import Checkpoints
from spotd.api.handlers.context import HandlerContext
from spotd.api.handlers.events import EventStream
from spotd.api.handlers.files import Files
from spotd.api.handlers.health import Health
from spotd.api.handlers.history import PriceHistory
from spotd.api.handlers.jobs import Queue
from spotd.api.handlers.logs import JobLogs
from spotd.api.handlers.receipts import Receipts
from spotd.api.schemas.checkpoints import KeptCheckpointResponse, VerificationResponse
from spotd.api.schemas.costs import CostResponse
from spotd.api.schemas.files import FilesResponse
from spotd.api.schemas.health import DoctorResponse, ProviderResponse, ReconcileResponse, StatusResponse
from spotd.api.schemas.jobs import ForgottenResponse, JobDetailResponse, JobPageResponse, JobResponse
from spotd.api.schemas.plans import CodeResponse, PlanResponse, WhyResponse
from spotd.api.schemas.prices import HistoryResponse, PricesResponse
from spotd.api.schemas.streams import EventResponse, LogResponse

__all__ = ["DaemonBackend", "HandlerContext"]


class DaemonBackend:
    """Implements `spotd.api.backend.Backend`."""

    def __init__(self, parts: HandlerContext) -> None:
        self._context = parts
        self._queue = Queue(parts)
        self._amending = Amending(parts, self._queue)
        self._logs = JobLogs(parts)
        self._checkpoints = Checkpoints(parts)
        self._files = Files(parts)
        self._receipts = Receipts(parts)
        self._happenings = EventStream(parts)
        self._health = Health(parts)
        self._past = PriceHistory(parts)

    def now(self) -> datetime:
        return self._context.clock.now()

    def last_error(self) -> str:
        return self._context.database.last_error

    async def status(self) -> StatusResponse:
        return await self._health.status()

    async def plan(self, draft: JobRequest, resume_from: str = "") -> PlanResponse:
        return await self._queue.plan(draft, resume_from)

    async def has_code(self, sha256: str) -> bool:
        return await self._queue.has_code(sha256)

    async def put_code(self, sha256: str, stream: AsyncIterator[bytes]) -> CodeResponse:
        return await self._queue.put_code(sha256, stream)

    async def submit(self, submission: Submission) -> JobDetailResponse:
        return await self._queue.submit(submission)

    async def jobs(self, query: JobQuery) -> JobPageResponse:
        return await self._queue.jobs(query)

    async def job(self, ref: str) -> JobDetailResponse:
        return await self._queue.job(ref)

    async def why(self, ref: str) -> WhyResponse:
        return await self._queue.why(ref)

    def logs(self, ref: str, query: LogQuery) -> AsyncIterator[LogResponse]:
        return self._logs.stream(ref, query)

    async def cancel(self, ref: str) -> JobResponse:
        return await self._queue.cancel(ref)

    async def retry(self, ref: str, *, anyway: bool = False) -> JobResponse:
        return await self._queue.retry(ref, anyway=anyway)

    async def set_budget(self, ref: str, change: BudgetChange) -> JobResponse:
        return await self._amending.set_budget(ref, change)

    async def forget(self, machine: str) -> ForgottenResponse:
        return await self._amending.forget(machine)

    async def prices(self, query: PriceQuery) -> PricesResponse:
        return await self._health.prices(query)

    async def history(self, query: HistoryQuery) -> HistoryResponse:
        return await self._past.history(query)

    def events(self, query: EventQuery) -> AsyncIterator[EventResponse]:
        return self._happenings.stream(query)

    async def cost(self, ref: str | None) -> CostResponse:
        return await self._receipts.cost(ref)

    async def checkpoints(self, ref: str) -> list[KeptCheckpointResponse]:
        return await self._checkpoints.listed(ref)

    def verify_checkpoints(self, ref: str, names: Sequence[str], *, every: bool) -> AsyncIterator[VerificationResponse]:
        return self._checkpoints.verify(ref, names, every=every)

    async def pin_checkpoints(self, ref: str, names: Sequence[str], *, pinned: bool) -> list[KeptCheckpointResponse]:
        return await self._checkpoints.pin(ref, names, pinned=pinned)

    async def remove_checkpoints(self, ref: str, names: Sequence[str]) -> list[KeptCheckpointResponse]:
        return await self._checkpoints.remove(ref, names)

    async def files(self, ref: str, checkpoint: str | None) -> FilesResponse:
        return await self._files.files(ref, checkpoint)

    def read_file(self, ref: str, checkpoint: str | None, path: str) -> AsyncIterator[bytes]:
        return self._files.read(ref, checkpoint, path)

    def read_files(
        self, ref: str, checkpoint: str | None, manifest: str, spans: Sequence[tuple[int, int]]
    ) -> AsyncIterator[bytes]:
        return self._files.read_many(ref, checkpoint, manifest, spans)

    async def providers(self) -> list[ProviderResponse]:
        return await self._health.providers()

    async def doctor(self) -> DoctorResponse:
        return await self._health.doctor()

    async def reconcile(self) -> ReconcileResponse:
        return await self._health.reconcile()
