"""A backend in memory, behind which a test arranges what the daemon would know."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import cast

import anyio

from spotd.api.errors import InputProblem, Invalid, NotFound, StateConflict
from spotd.api.handlers import Handlers
from spotd.api.job_refs import JobHead, resolve
from spotd.api.requests import (
    BudgetChange,
    EventQuery,
    HistoryQuery,
    JobQuery,
    JobRequest,
    LogQuery,
    PriceQuery,
    Submission,
)
from spotd.api.schemas.checkpoints import KeptCheckpointResponse, VerificationResponse
from spotd.api.schemas.costs import BudgetResponse, CostResponse, ReceiptResponse
from spotd.api.schemas.files import FileResponse, FilesResponse
from spotd.api.schemas.health import CheckResponse, DoctorResponse, ProviderResponse, ReconcileResponse, StatusResponse
from spotd.api.schemas.jobs import ForgottenResponse, JobDetailResponse, JobPageResponse, JobResponse
from spotd.api.schemas.plans import CodeResponse, PlanResponse, WhyResponse
from spotd.api.schemas.prices import BoardResponse, HistoryResponse, PricesResponse, QuoteResponse
from spotd.api.schemas.streams import EventResponse, LogResponse
from spotd_jobs.spec.parse import merge, parse_job
from spotd_jobs.spec.problems import SpecError
from tests.unit.api import made_responses

FINAL = {"SUCCEEDED", "FAILED", "CANCELLED", "EXPIRED"}


def log(text: str = "", *, kind: str = "log", cursor: int, attempt: int = 1, state: str | None = None) -> LogResponse:
    return {
        "kind": kind,  # type: ignore[typeddict-item]  # a test may name any kind
        "cursor": str(cursor),
        "attempt": attempt,
        "at": made_responses.NOW,
        "text": text,
        "state": state,
        "exit_code": None,
    }


@dataclass
class FakeBackend:
    """Holds rows; every answer is made from them."""

    rows: list[JobResponse] = field(default_factory=list)
    records: list[LogResponse] = field(default_factory=list)
    event_rows: list[EventResponse] = field(default_factory=list)
    quotes: list[QuoteResponse] = field(default_factory=list)
    offer_cache: list[BoardResponse] = field(default_factory=list)
    receipts: list[ReceiptResponse] = field(default_factory=list)
    budgets: list[BudgetResponse] = field(default_factory=list)
    past: HistoryResponse = field(default_factory=lambda: made_responses.history())
    history_queries: list[HistoryQuery] = field(default_factory=list)
    budget_changes: list[BudgetChange] = field(default_factory=list)
    forgotten: list[str] = field(default_factory=list)
    provider_rows: list[ProviderResponse] = field(default_factory=list)
    checks: list[CheckResponse] = field(default_factory=list)
    checkpoint_rows: list[KeptCheckpointResponse] = field(default_factory=list)
    damage: dict[str, str] = field(default_factory=dict)
    """What verification finds, by checkpoint."""
    cut_verification: bool = False
    contents: dict[str, bytes] = field(default_factory=dict)
    files_warning: str = ""
    file_rows: list[FileResponse] = field(default_factory=list)
    plan_row: PlanResponse | None = None
    why_row: WhyResponse | None = None
    reconciled: ReconcileResponse = field(default_factory=lambda: {"listings": [], "actions": []})
    code: dict[str, bytes] = field(default_factory=dict)
    submissions: list[Submission] = field(default_factory=list)
    failure: Exception | None = None
    """Raised by every call that looks at the state."""
    error_text: str = ""
    set_aside: list[str] = field(default_factory=list)
    paused: str = ""
    """Why nothing may be launched now."""
    hang: bool = False
    """Every call that looks at the state waits for ever."""
    cut_files_at: int | None = None
    manifest_sha256: str = "0" * 64
    cut_logs_after: int | None = None
    """A stream of logs is given up after so many records, once."""

    def handlers(self) -> Handlers:
        """The interfaces of the handlers, answered from these rows."""
        context = SimpleNamespace(clock=self, database=self)
        submissions = SimpleNamespace(
            plan=self.plan, has_code=self.has_code, put_code=self.put_code, submit=self.submit
        )
        jobs = SimpleNamespace(page=self.jobs, detail=self.job, why=self.why, cancel=self.cancel, retry=self.retry)
        checkpoints = SimpleNamespace(
            entries=self.checkpoints,
            verify=self.verify_checkpoints,
            pin=self.pin_checkpoints,
            remove=self.remove_checkpoints,
        )
        found = SimpleNamespace(
            context=context,
            submissions=submissions,
            jobs=jobs,
            amendments=self,
            checkpoints=checkpoints,
            files=SimpleNamespace(
                entries=self.files, content=self.read_file, contents=lambda *given: self.read_files(*given)
            ),
            logs=SimpleNamespace(stream=self.logs),
            events=SimpleNamespace(stream=lambda query: self.events(query)),
            receipts=self,
            prices=SimpleNamespace(quotes=self.prices, history=self.history),
            health=self,
            doctor=SimpleNamespace(report=self.doctor),
        )
        return cast(Handlers, found)

    def reset(self) -> None:
        """Nothing is known and nothing is wrong, as at first."""
        fresh = FakeBackend()
        self.__dict__.clear()
        self.__dict__.update(fresh.__dict__)

    def now(self) -> datetime:
        return datetime(2026, 11, 21, 10, tzinfo=UTC)

    @property
    def last_error(self) -> str:
        return self.error_text

    async def _look(self) -> None:
        if self.failure is not None:
            raise self.failure
        if self.hang:
            await anyio.sleep_forever()

    def _find(self, ref: str) -> JobResponse:
        heads = [
            JobHead(id=row["id"], name=row["name"], is_final=row["state"] in FINAL, order=-place)
            for place, row in enumerate(self.rows)
        ]
        found = resolve(ref, heads)
        return next(row for row in self.rows if row["id"] == found)

    async def status(self) -> StatusResponse:
        await self._look()
        return {
            "version": "0.1.0",
            "install": "lab",
            "pid": 1,
            "started_at": made_responses.EARLIER,
            "clock_scale": 1.0,
            "paused": self.paused,
            "machines": 1,
            "jobs": {},
            "spent_day_usd": 0.0,
            "spent_month_usd": 0.0,
        }

    async def plan(self, draft: JobRequest, resume_from: str = "") -> PlanResponse:
        await self._look()
        if resume_from:
            self._find(resume_from.partition(":")[0])
        try:
            spec = parse_job(merge(draft.data, draft.flags), draft.source)
        except SpecError as exc:
            problems = tuple(InputProblem(key=p.key, message=p.message, hint=p.hint) for p in exc.problems)
            raise Invalid("the job was refused", problems=problems) from exc
        if unknown := [gpu.name for gpu in spec.resources.gpu if gpu.name.startswith("NOSUCH")]:
            problem = InputProblem(key="resources.gpu[0]", message=f"no GPU is called {unknown[0]}", hint="H100 is one")
            raise Invalid("the job was refused", problems=(problem,))
        row = self.plan_row or made_responses.plan()
        return {
            **row,
            "name": spec.name,
            "image": spec.image,
            "workdir": draft.flags.get("workdir", spec.workdir),
            "secrets": list(spec.secrets),
            "resume_from": made_responses.origin() if resume_from else None,
        }

    async def has_code(self, sha256: str) -> bool:
        await self._look()
        return sha256 in self.code

    async def put_code(self, sha256: str, stream: AsyncIterator[bytes]) -> CodeResponse:
        data = b"".join([chunk async for chunk in stream])
        if hashlib.sha256(data).hexdigest() != sha256:
            raise Invalid("the code has another hash than was said")
        self.code[sha256] = data
        return {"sha256": sha256, "bytes": len(data)}

    async def submit(self, submission: Submission) -> JobDetailResponse:
        plan = await self.plan(submission.draft)
        if any(row["name"] == plan["name"] and row["state"] not in FINAL for row in self.rows):
            raise StateConflict(f"a job {plan['name']!r} is under way", hint="choose another --name")
        self.submissions.append(submission)
        row = made_responses.waiting_job(id=f"6k0b{len(self.rows):06d}", name=plan["name"])
        self.rows.insert(0, row)
        return made_responses.detail(row)

    async def jobs(self, query: JobQuery) -> JobPageResponse:
        await self._look()
        chosen = [
            row
            for row in self.rows
            if (not query.states or row["state"] in query.states) and not (query.active_only and row["state"] in FINAL)
        ]
        return {"jobs": chosen[: query.limit], "more": len(chosen) > query.limit, "paused": self.paused}

    async def job(self, ref: str) -> JobDetailResponse:
        await self._look()
        return {**made_responses.detail(self._find(ref)), "set_aside": self.set_aside}

    async def why(self, ref: str) -> WhyResponse:
        await self._look()
        row = self._find(ref)
        if self.why_row is not None:
            return self.why_row
        return {
            "id": row["id"],
            "name": row["name"],
            "state": row["state"],
            "sentence": row["reason"],
            "kind": "above_ceiling",
            "at": made_responses.NOW,
            "until": None,
            "ceiling_usd_gpu_h": 2.4,
            "best": made_responses.quote(),
            "passed_over": [{"reason": "above the ceiling", "offers": 40}],
            "boards": self.offer_cache,
            "events": self.event_rows,
        }

    async def logs(self, ref: str, query: LogQuery) -> AsyncIterator[LogResponse]:
        await self._look()
        self._find(ref)
        after = int(query.after or 0)
        sent = 0
        for record in self.records:
            if int(record["cursor"]) <= after:
                continue
            if self.cut_logs_after is not None and sent == self.cut_logs_after:
                self.cut_logs_after = None
                return
            sent += 1
            yield record

    async def cancel(self, ref: str) -> JobResponse:
        await self._look()
        row = self._find(ref)
        if row["state"] in FINAL - {"CANCELLED"}:
            raise StateConflict(f"{row['name']} has ended: {row['state']}")
        row["state"], row["reason"] = "CANCELLING", "cancelled by its owner"
        return row

    async def retry(self, ref: str, *, anyway: bool = False) -> JobResponse:
        await self._look()
        row = self._find(ref)
        if row["state"] == "SUCCEEDED" and not anyway:
            raise StateConflict(f"{row['name']} succeeded", hint=f"spotctl retry --anyway {row['id']}")
        if row["state"] not in FINAL:
            raise StateConflict(f"{row['name']} has not ended", hint=f"spotctl cancel {row['id']}")
        row["state"], row["reason"] = "QUEUED", "queued again"
        return row

    async def set_budget(self, ref: str, change: BudgetChange) -> JobResponse:
        await self._look()
        row = self._find(ref)
        self.budget_changes.append(change)
        return row

    async def forget(self, machine: str) -> ForgottenResponse:
        await self._look()
        if machine != "m1":
            raise NotFound(f"no machine {machine!r} is known")
        self.forgotten.append(machine)
        return {"provider": "vast", "machine": machine, "key": "spotd-lab-j1-1", "job": "j1", "attempt": 1}

    async def prices(self, query: PriceQuery) -> PricesResponse:
        await self._look()
        quotes = [quote for quote in self.quotes if query.gpu is None or quote["gpu"] == query.gpu]
        return {"quotes": quotes[: query.limit], "boards": self.offer_cache, "more": len(quotes) > query.limit}

    async def history(self, query: HistoryQuery) -> HistoryResponse:
        await self._look()
        self.history_queries.append(query)
        return self.past

    async def events(self, query: EventQuery) -> AsyncIterator[EventResponse]:
        await self._look()
        for row in self.event_rows:
            if row["id"] > (query.after or 0):
                yield row
        if query.follow:
            await anyio.sleep_forever()

    async def cost(self, ref: str | None) -> CostResponse:
        await self._look()
        wanted = None if ref is None else self._find(ref)["id"]
        chosen = [receipt for receipt in self.receipts if wanted in {None, receipt["id"]}]
        return {
            "receipts": chosen,
            "spent_usd": sum(r["spent_usd"] for r in chosen),
            "on_demand_usd": sum(r["on_demand_usd"] for r in chosen),
            "saved_usd": sum(r["saved_usd"] for r in chosen),
            "recoveries": sum(r["recoveries"] for r in chosen),
            "lost_s": sum(r["lost_s"] for r in chosen),
            "budgets": self.budgets,
            "more": 0,
            "strays": [],
        }

    async def checkpoints(self, ref: str) -> list[KeptCheckpointResponse]:
        await self._look()
        self._find(ref)
        return self.checkpoint_rows

    def _named(self, names: Sequence[str]) -> list[KeptCheckpointResponse]:
        by_name = {row["name"]: row for row in self.checkpoint_rows}
        for name in names:
            if name not in by_name:
                raise NotFound(f"there is no checkpoint {name!r}")
        return [by_name[name] for name in names]

    async def verify_checkpoints(
        self, ref: str, names: Sequence[str], *, every: bool
    ) -> AsyncIterator[VerificationResponse]:
        await self._look()
        self._find(ref)
        chosen = self.checkpoint_rows if every else self._named(names) or self.checkpoint_rows[:1]
        for row in chosen:
            problem = self.damage.get(row["name"], "")
            record: VerificationResponse = {
                "kind": "progress",
                "name": row["name"],
                "attempt": row["attempt"],
                "bytes_done": 0,
                "bytes_total": row["bytes"],
                "ok": None,
                "damaged": 0,
                "problem": "",
            }
            yield record
            if self.cut_verification:
                return
            yield {
                **record,
                "kind": "verified",
                "bytes_done": row["bytes"],
                "ok": not problem,
                "damaged": int(bool(problem)),
                "problem": problem,
            }

    async def pin_checkpoints(self, ref: str, names: Sequence[str], *, pinned: bool) -> list[KeptCheckpointResponse]:
        await self._look()
        self._find(ref)
        for row in self._named(names):
            row["pinned"] = pinned
        return self._named(names)

    async def remove_checkpoints(self, ref: str, names: Sequence[str]) -> list[KeptCheckpointResponse]:
        await self._look()
        self._find(ref)
        gone = self._named(names)
        if any(row["pinned"] for row in gone):
            raise StateConflict(f"checkpoint {gone[0]['name']} is pinned", hint="unpin it")
        self.checkpoint_rows = [row for row in self.checkpoint_rows if row not in gone]
        return gone

    async def files(self, ref: str, checkpoint: str | None) -> FilesResponse:
        await self._look()
        row = self._find(ref)
        if not self.file_rows:
            raise NotFound("there are no outputs yet", hint=f"spotctl checkpoints {row['id']}")
        return {
            "id": row["id"],
            "kind": "outputs" if checkpoint is None else "checkpoint",
            "name": checkpoint or "outputs",
            "attempt": 1,
            "manifest_sha256": self.manifest_sha256,
            "files": self.file_rows,
            "bytes": sum(entry["bytes"] for entry in self.file_rows),
            "warning": self.files_warning,
        }

    async def read_file(self, ref: str, checkpoint: str | None, path: str) -> AsyncIterator[bytes]:
        await self._look()
        self._find(ref)
        if path not in self.contents:
            raise NotFound(f"there is no file {path!r}")
        data = self.contents[path]
        step = 3 if len(data) < 100 else 65536
        for begin in range(0, len(data), step):
            if self.cut_files_at is not None and begin >= self.cut_files_at:
                raise OSError("a chunk is corrupt")
            yield data[begin : begin + step]

    async def read_files(
        self, ref: str, checkpoint: str | None, manifest: str, spans: Sequence[tuple[int, int]]
    ) -> AsyncIterator[bytes]:
        if manifest != self.manifest_sha256:
            raise StateConflict("the files are others by now", hint="pull again")
        for first, last in spans:
            for row in self.file_rows[first : last + 1]:
                if row["kind"] == "file":
                    async for data in self.read_file(ref, checkpoint, row["path"]):
                        yield data

    async def providers(self) -> list[ProviderResponse]:
        return self.provider_rows

    async def doctor(self) -> DoctorResponse:
        return {"ok": all(check["ok"] for check in self.checks), "checks": self.checks}

    async def reconcile(self) -> ReconcileResponse:
        await self._look()
        return self.reconciled

    def add_file(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        self.contents[path] = data
        self.file_rows.append({"path": path, "kind": "file", "bytes": len(data), "mode": mode, "target": None})
