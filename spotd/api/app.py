"""The application: routes, parameters, and errors as JSON.

Every answer is `{"schema": 1, "now": ..., ...}`, every refusal `{"schema": 1, "error": {...}}` with a code of
`RefusalCode` (or `internal`), and no traceback leaves: what was not expected goes to `on_failure` and the caller gets a
sentence. It listens on a unix socket of mode 0600 only, so each caller is the daemon's own user.
"""

from __future__ import annotations

import json
import math
import shutil
from collections import Counter
from collections.abc import AsyncIterator, Callable, Container
from contextlib import suppress
from datetime import UTC, date
from typing import Final

import anyio
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from spotd.api import requests, routes
from spotd.api.edge import ADOPTION_S, PATIENT_S, Failure, RequestEdge
from spotd.api.handlers import Handlers
from spotd.api.handlers.context import CALLER
from spotd.api.responses import (
    JSON_TYPE,
    ApiUnavailable,
    BodyTooLong,
    ByteStream,
    Invalid,
    OverBudget,
    RecordStream,
    RefusalCode,
    ServiceStream,
    error_body,
    json_response,
)
from spotd.api.schemas import answers, bodies
from spotd.api.schemas import jobs as schemas
from spotd.api.schemas.costs import CostResponse, HistoryResponse, LedgerResponse, PriceImportAnswer, PricesResponse
from spotd.core.domain.policy import Right
from spotd.store import StateError
from spotd_jobs.wire.client.dataset import CHUNK_BYTES, DOCUMENT_TEXT_MAX

CODE_BYTES_MAX: Final = 8 * 2**30
USER_CODE_BYTES_MAX: Final = 2**30
"""Of a user by TCP; each archive lies on the daemon's disk for a while."""
USER_UPLOADS_MAX: Final = 4
"""At a time, of all users who may not operate."""
UPLOADS_OF_ONE_MAX: Final = 2
USER_BYTES_PER_DAY_MAX: Final = 64 * 2**30
FREE_BYTES_MIN: Final = 2 * 2**30
"""With less free disk no user who may not operate sends anything."""
BODY_GRACE_S: Final = 60.0
BODY_BYTES_PER_S_MIN: Final = 16 * 1024
"""After the grace a user's body that comes more slowly is given up."""
SENT_TODAY: Final = "sent_today"
"""The fact of the state that holds a UTC day, and what each user sent in it."""
_DAY: Final = ""
"""No user's name."""
HIDDEN: Final = "..."


def make_app(
    handlers: Handlers,
    *,
    on_failure: Failure,
    closing: anyio.Event | None = None,
    code_bytes_max: int = CODE_BYTES_MAX,
    only: Container[str] | None = None,
) -> Starlette:
    """Return an application that serves these handlers.

    Args:
        closing: when set, streams that are being followed end, so that a shutdown does not wait for their readers.
        only: names of the routes that are served; all where that is not given.
    """
    api = _Api(handlers, on_failure, closing, code_bytes_max)
    return Starlette(
        routes=[
            Route(route.path, api.guarded(route), methods=[route.method])
            for route in api_routes()
            if only is None or route.name in only
        ],
        exception_handlers={HTTPException: _http_exception},
    )


def api_routes() -> tuple[routes.ApiRoute, ...]:
    """Return everything that the application serves."""
    return routes.routes_of(_Api)


async def _http_exception(request: Request, exc: Exception) -> Response:
    status = exc.status_code if isinstance(exc, HTTPException) else 500
    code = RefusalCode.NOT_FOUND if status == 404 else RefusalCode.INVALID
    message = f"this daemon does not know {request.method} {request.url.path}"
    hint = "spotctl and the daemon may be of different versions"
    response = json_response(error_body(code, message, hint=hint), status=status)
    response.headers.update(getattr(exc, "headers", None) or {})
    return response


def _data_too_large() -> BodyTooLong:
    return BodyTooLong("a part of the dataset is too large", hint="spotctl and the daemon may be of different versions")


class _Api(RequestEdge):
    """The endpoints; each turns one request into one call of a handler."""

    @routes.serving(Right.VIEW, "GET", "/v1/openapi.json")
    async def openapi(self) -> Response:
        """Describe this API, as OpenAPI 3.1."""
        from spotd.api.openapi import document_bytes  # only needed by those who ask

        return Response(document_bytes(api_routes()), media_type=JSON_TYPE)

    @routes.serving(Right.VIEW, "GET", "/v1/status")
    async def status(self) -> answers.DaemonStatusAnswer:
        """Sum the daemon up: version, machines, jobs by state, spending."""
        return {"status": await self._ask(self._handlers.health.status)}

    @routes.serving(Right.SUBMIT, "POST", "/v1/plan", refuses=[RefusalCode.NOT_FOUND, RefusalCode.CONFLICT])
    async def plan(self, body: bodies.PlanBody) -> answers.PlanAnswer:
        """Plan a job without queueing it: candidates with effective prices, ceilings, verdict."""
        draft, resume_from, array = routes.read_draft(body), routes.read_resume_from(body), routes.read_array(body)
        plan = await self._ask(lambda: self._handlers.submissions.plan(draft, resume_from, array), limit_s=PATIENT_S)
        return {"plan": plan}

    @routes.serving(Right.SUBMIT, "GET", "/v1/code/{sha256}")
    async def has_code(self, sha256: str) -> answers.PresentAnswer:
        """Return whether a packed workdir is in the store."""
        known = routes.read_sha256(sha256)
        present = await self._ask(lambda: self._handlers.submissions.has_code(known), limit_s=PATIENT_S)
        return {"present": present}

    @routes.serving(Right.SUBMIT, "PUT", "/v1/code/{sha256}")
    async def put_code(self, sha256: str, request: Request) -> answers.CodeAnswer:
        """Store a packed workdir under its hash."""
        # Bounded in size, not in time, since a workdir may be large and its disk slow.
        known = routes.read_sha256(sha256)
        most, caller = self._code_bytes_max, CALLER.get()
        if caller.name:
            most = min(most, USER_CODE_BYTES_MAX)
        announced = request.headers.get("content-length", "")
        if announced.isdecimal() and int(announced) > most:
            raise self._code_too_large(most)
        is_counted = caller.right < Right.OPERATE
        if is_counted and self._uploads[caller.name] >= UPLOADS_OF_ONE_MAX:
            raise ApiUnavailable(f"{caller.name} sends code {UPLOADS_OF_ONE_MAX} times now", hint="try again later")
        if is_counted and self._uploads.total() >= USER_UPLOADS_MAX:
            raise ApiUnavailable(f"{USER_UPLOADS_MAX} others send code now", hint="try again in a moment")
        self._uploads[caller.name] += is_counted
        try:
            body = self._body_within(request, most, lambda: self._code_too_large(most))
            return {"code": await self._handlers.submissions.put_code(known, body)}
        finally:
            self._uploads[caller.name] -= is_counted

    async def _body_within(
        self, request: Request, most: int, refusal: Callable[[], BodyTooLong]
    ) -> AsyncIterator[bytes]:
        taken, begin, caller = 0, anyio.current_time(), CALLER.get()
        is_users = bool(caller.name)
        is_counted = caller.right < Right.OPERATE
        if is_counted and shutil.disk_usage(self._handlers.context.spool).free < FREE_BYTES_MIN:
            raise ApiUnavailable("the daemon's disk is nearly full", hint="ask who may operate")
        if is_counted:
            await self._recall_bytes()
        chunks = request.stream()
        while True:
            last = begin + BODY_GRACE_S + taken / BODY_BYTES_PER_S_MIN if is_users else math.inf
            with anyio.CancelScope(deadline=last) as scope:
                chunk = await anext(chunks, None)
            if scope.cancelled_caught:
                raise ApiUnavailable("the body comes too slowly", hint="try again by a better connection")
            if chunk is None:
                if is_counted:
                    await self._keep_bytes()
                return
            taken += len(chunk)
            if taken > most:
                raise refusal()
            if is_counted:
                self._count_bytes(caller.name, len(chunk))
            if chunk:
                yield chunk

    def _count_bytes(self, name: str, size: int) -> None:
        """Count what a user sends in a UTC day.

        Raises:
            OverBudget: it is more than one may send.
        """
        today = self._handlers.context.clock.now().astimezone(UTC).date()
        if self._bytes_day != today:
            self._bytes_day, self._bytes_of = today, Counter()
        self._bytes_of[name] += size
        if self._bytes_of[name] > USER_BYTES_PER_DAY_MAX:
            most = f"{USER_BYTES_PER_DAY_MAX // 2**30} GiB"
            raise OverBudget(f"{name} sent {most} today, and may not send more", hint="ask who may operate to send it")

    async def _recall_bytes(self) -> None:
        """Go on from what was counted before the start of this process."""
        if self._bytes_day is not None:
            return
        text = await self._handlers.context.read(lambda reads: reads.meta(SENT_TODAY))
        if text is not None and self._bytes_day is None:
            kept = json.loads(text)
            self._bytes_day, self._bytes_of = date.fromisoformat(kept.pop(_DAY)), Counter(kept)

    async def _keep_bytes(self) -> None:
        """Let a restart know what was counted; that is no reason to refuse what has come."""
        if self._bytes_day is None:
            return
        text = json.dumps({_DAY: self._bytes_day.isoformat(), **self._bytes_of})
        with suppress(StateError):
            await self._handlers.context.database.tx(lambda tx: tx.set_meta(SENT_TODAY, text))

    @routes.serving(Right.VIEW, "GET", "/v1/data")
    async def datasets(self) -> schemas.DatasetsAnswer:
        """List the datasets that jobs can name, and the jobs that read them."""
        return {"datasets": await self._ask(self._handlers.data.every, limit_s=PATIENT_S)}

    @routes.serving(Right.SUBMIT, "POST", "/v1/data", status=201)
    async def store_dataset(self, body: schemas.RootBody) -> schemas.DatasetAnswer:
        """Keep a dataset that a job is about to read, without a name, or tell what is missing of it."""
        text = routes.read_root(body)
        made = await self._ask(lambda: self._handlers.data.store(text), limit_s=PATIENT_S)
        return {"missing": made} if isinstance(made, list) else {"dataset": made}

    @routes.serving(Right.SUBMIT, "GET", "/v1/data/chunks/{sha256}")
    async def has_data_chunk(self, sha256: str) -> answers.PresentAnswer:
        """Return whether a chunk of a dataset is in the store."""
        known = routes.read_sha256(sha256)
        return {"present": await self._ask(lambda: self._handlers.data.has_chunk(known), limit_s=PATIENT_S)}

    @routes.serving(Right.SUBMIT, "PUT", "/v1/data/chunks/{sha256}")
    async def put_data_chunk(self, sha256: str, request: Request) -> schemas.StoredAnswer:
        """Store a chunk of a dataset under its hash."""
        known = routes.read_sha256(sha256)
        chunk = self._body_within(request, CHUNK_BYTES, _data_too_large)
        return {"bytes": await self._handlers.data.put_chunk(known, chunk)}

    @routes.serving(Right.SUBMIT, "PUT", "/v1/data/parts/{sha256}")
    async def put_data_part(self, sha256: str, request: Request) -> schemas.StoredAnswer:
        """Store a list of files of a dataset under its hash."""
        known = routes.read_sha256(sha256)
        text = self._body_within(request, DOCUMENT_TEXT_MAX, _data_too_large)
        return {"bytes": await self._handlers.data.put_part(known, text)}

    @routes.serving(Right.OPERATE, "POST", "/v1/data/{name}", status=201)
    async def name_dataset(self, name: str, body: schemas.RootBody) -> schemas.DatasetAnswer:
        """Give a name to a dataset whose chunks and parts are in the store, or tell what is missing."""
        text = routes.read_root(body)
        made = await self._ask(lambda: self._handlers.data.give_name(name, text), limit_s=PATIENT_S)
        return {"missing": made} if isinstance(made, list) else {"dataset": made}

    @routes.serving(
        Right.OPERATE, "POST", "/v1/data/{name}/remove", refuses=[RefusalCode.NOT_FOUND, RefusalCode.CONFLICT]
    )
    async def remove_dataset(self, name: str) -> schemas.DatasetAnswer:
        """Forget a dataset that no unfinished job reads; its content is deleted later."""
        return {"dataset": await self._ask(lambda: self._handlers.data.remove(name), limit_s=PATIENT_S)}

    def _code_too_large(self, most: int) -> BodyTooLong:
        limit = f"{most / 2**30:.3g} GiB"
        return BodyTooLong(
            f"the packed workdir is larger than {limit}",
            hint="list data and checkpoints in .gitignore, so that only code is packed",
        )

    @routes.serving(
        Right.SUBMIT,
        "POST",
        "/v1/jobs",
        status=201,
        refuses=[RefusalCode.NOT_FOUND, RefusalCode.CONFLICT, RefusalCode.BUDGET],
    )
    async def submit(self, body: bodies.SubmitBody) -> schemas.JobDetailResponse:
        """Queue a job, or an array of jobs."""
        code = body.get("code_sha256")
        submission = requests.Submission(
            draft=routes.read_draft(body),
            code_sha256=None if code is None else routes.read_sha256(code),
            secrets=routes.read_secrets(body),
            resume_from=routes.read_resume_from(body),
            array=routes.read_array(body),
            i_know=routes.read_flag(body, "i_know"),
            agent=routes.read_flag(body, "agent"),
        )
        return await self._ask(lambda: self._handlers.submissions.submit(submission))

    @routes.serving(Right.VIEW, "GET", "/v1/jobs", refuses=[RefusalCode.NOT_FOUND])
    async def jobs(self, query: requests.JobQuery) -> schemas.JobPageResponse:
        """List jobs, newest submission first."""
        return await self._ask(lambda: self._handlers.jobs.page(query))

    @routes.serving(Right.VIEW, "GET", "/v1/jobs/{ref}")
    async def job(self, ref: str) -> schemas.JobDetailResponse:
        """Show everything about a job; the values of its environment to those who may change it."""
        found = await self._ask(lambda: self._handlers.jobs.detail(ref))
        if not CALLER.get().may_change(found["job"]["submitted_by"]) and found["spec"].get("env"):
            found["spec"] = {**found["spec"], "env": dict.fromkeys(found["spec"]["env"], HIDDEN)}
        return found

    @routes.serving(Right.VIEW, "GET", "/v1/jobs/{ref}/gpus")
    async def gpu_history(self, ref: str) -> schemas.GpuHistoryResponse:
        """Return the use of the GPUs of the machine that a job has now."""
        return await self._ask(lambda: self._handlers.jobs.gpu_history(ref))

    @routes.serving(Right.SUBMIT, "GET", "/v1/jobs/{ref}/shell", own=True, refuses=[RefusalCode.CONFLICT])
    async def shell(self, ref: str) -> schemas.ShellResponse:
        """Return where the machine that a job has now gives a shell."""
        return await self._ask(lambda: self._handlers.ports.address(ref), limit_s=PATIENT_S)

    @routes.serving(Right.LOCAL, "GET", "/v1/jobs/{ref}/ports/{port}", refuses=[RefusalCode.CONFLICT])
    async def port(self, ref: str, port: str) -> RecordStream[schemas.PortResponse]:
        """Lead to a port of the machine that a job has now, until the reader goes or the job leaves the machine."""
        number = routes.read_port(port)
        serve = await self._ask(lambda: self._handlers.ports.require(ref, number), limit_s=PATIENT_S)
        return ServiceStream(serve, closing=self._closing, on_failure=lambda exc: self._on_failure("port", exc))

    @routes.serving(Right.VIEW, "GET", "/v1/jobs/{ref}/why")
    async def why(self, ref: str) -> answers.WhyAnswer:
        """Explain why a job waits, runs where it does, or ended."""
        return {"why": await self._ask(lambda: self._handlers.jobs.why(ref))}

    @routes.serving(Right.SUBMIT, "POST", "/v1/jobs/{ref}/cancel", own=True)
    async def cancel(self, ref: str) -> answers.JobOrArrayAnswer:
        """Cancel a job, or each job of an array."""
        array = await self._ask(lambda: self._handlers.arrays.cancel(ref))
        if array is not None:
            return {"array": array}
        return {"job": await self._ask(lambda: self._handlers.jobs.cancel(ref))}

    @routes.serving(Right.SUBMIT, "POST", "/v1/jobs/{ref}/retry", own=True, refuses=[RefusalCode.BUDGET])
    async def retry(self, ref: str, query: requests.RetryQuery) -> answers.JobOrArrayAnswer:
        """Queue a job again, or some of the jobs of an array."""
        array = await self._ask(lambda: self._handlers.arrays.retry(ref, start=query.start), limit_s=PATIENT_S)
        if array is not None:
            return {"array": array}
        return {"job": await self._ask(lambda: self._handlers.jobs.retry(ref, anyway=query.anyway))}

    @routes.serving(Right.SUBMIT, "POST", "/v1/jobs/{ref}/budget", own=True, refuses=[RefusalCode.BUDGET])
    async def set_budget(self, ref: str, body: bodies.BudgetBody) -> answers.JobAnswer:
        """Change what a job may cost in all."""
        change = routes.read_budget_change(body)
        return {"job": await self._ask(lambda: self._handlers.amendments.set_budget(ref, change))}

    @routes.serving(Right.SUBMIT, "POST", "/v1/jobs/{ref}/ceiling", own=True)
    async def set_ceiling(self, ref: str, body: bodies.CeilingBody) -> answers.JobOrArrayAnswer:
        """Change the ceiling of a job, or of each job of an array that has not ended."""
        limit = routes.read_ceiling(body)
        array = await self._ask(lambda: self._handlers.arrays.set_ceiling(ref, limit))
        if array is not None:
            return {"array": array}
        return {"job": await self._ask(lambda: self._handlers.amendments.set_ceiling(ref, limit))}

    @routes.serving(Right.OPERATE, "POST", "/v1/machines/forget", refuses=[RefusalCode.NOT_FOUND, RefusalCode.CONFLICT])
    async def forget(self, body: bodies.MachineBody) -> answers.ForgottenAnswer:
        """Give up a machine that can neither be seen nor ended."""
        hint = "spotctl show JOB lists those of a job"
        machine = routes.read_name(body, "machine", "machine is the id or the key of a machine", hint=hint)
        return {"forgotten": await self._ask(lambda: self._handlers.amendments.forget(machine))}

    @routes.serving(Right.VIEW, "GET", "/v1/jobs/{ref}/cost")
    async def job_cost(self, ref: str) -> CostResponse:
        """Return the receipt of a job, or of each job of an array."""
        return await self._ask(lambda: self._handlers.receipts.cost(ref))

    @routes.serving(Right.VIEW, "GET", "/v1/cost")
    async def cost(self, query: requests.CostQuery) -> CostResponse | LedgerResponse:
        """Return receipts, sums and budgets; or costs added up by job, day, provider, GPU or host."""
        if (by := query.by) is not None:
            return await self._ask(lambda: self._handlers.ledger.groups(by))
        return await self._ask(lambda: self._handlers.receipts.cost(None))

    @routes.serving(Right.VIEW, "GET", "/v1/calibration")
    async def calibration(self) -> answers.CalibrationAnswer:
        """Compare what was booked with the providers' own bills."""
        return {"calibration": await self._ask(self._handlers.ledger.calibrations)}

    @routes.serving(Right.VIEW, "GET", "/v1/jobs/{ref}/checkpoints")
    async def checkpoints(self, ref: str) -> answers.CheckpointsAnswer:
        """List the checkpoints of a job."""
        return {"checkpoints": await self._ask(lambda: self._handlers.checkpoints.entries(ref))}

    @routes.serving(Right.SUBMIT, "GET", "/v1/jobs/{ref}/checkpoints/verify", own=True)
    async def verify_checkpoints(
        self, ref: str, query: requests.VerificationQuery
    ) -> RecordStream[schemas.VerificationResponse]:
        """Read checkpoints back and check each byte; a stream, since it takes as long as there are bytes."""
        if query.checkpoint and query.all:
            raise Invalid("the parameters checkpoint and all exclude each other")
        records = self._handlers.checkpoints.verify(ref, query.checkpoint, every=query.all)
        return await self._records(records, route="verify", follow=False)

    @routes.serving(Right.SUBMIT, "POST", "/v1/jobs/{ref}/checkpoints/pin", own=True)
    async def pin_checkpoints(self, ref: str, body: bodies.PinBody) -> answers.CheckpointsAnswer:
        """Keep checkpoints for good, or no longer."""
        names, pinned = routes.read_names(body), routes.read_flag(body, "pinned", default=True)
        changed = await self._ask(lambda: self._handlers.checkpoints.pin(ref, names, pinned=pinned))
        return {"checkpoints": changed}

    @routes.serving(Right.SUBMIT, "POST", "/v1/jobs/{ref}/checkpoints/remove", own=True)
    async def remove_checkpoints(self, ref: str, body: bodies.CheckpointsBody) -> answers.CheckpointsAnswer:
        """Remove checkpoints of a job."""
        names = routes.read_names(body)
        return {"checkpoints": await self._ask(lambda: self._handlers.checkpoints.remove(ref, names))}

    @routes.serving(Right.VIEW, "GET", "/v1/jobs/{ref}/files")
    async def files(self, ref: str, query: requests.FilesQuery) -> schemas.FilesResponse:
        """List the files of a checkpoint, or of the outputs."""
        return await self._ask(lambda: self._handlers.files.entries(ref, query.checkpoint), limit_s=PATIENT_S)

    @routes.serving(Right.SUBMIT, "GET", "/v1/jobs/{ref}/files/content")
    async def file_content(self, ref: str, query: requests.FileQuery) -> ByteStream:
        """Send a file of a checkpoint, or of the outputs."""
        return await self._bytes(self._handlers.files.content(ref, query.checkpoint, query.path), "file content")

    @routes.serving(Right.SUBMIT, "GET", "/v1/jobs/{ref}/files/contents")
    async def file_contents(self, ref: str, query: requests.ContentsQuery) -> ByteStream:
        """Send many files one behind the other, in the order of their list: a request for each would take hours."""
        manifest, spans = routes.read_sha256(query.manifest), routes.read_spans(query.files)
        return await self._bytes(self._handlers.files.contents(ref, query.checkpoint, manifest, spans), "file contents")

    @routes.serving(Right.VIEW, "GET", "/v1/jobs/{ref}/logs")
    async def logs(self, ref: str, query: requests.LogQuery) -> RecordStream[answers.LogResponse]:
        """Send the log of a job, and go on while it runs if that is asked for."""
        if query.follow:
            await self._ask(lambda: self._handlers.logs.require(ref, query))
        return await self._records(self._handlers.logs.stream(ref, query), route="logs", follow=query.follow)

    @routes.serving(Right.VIEW, "GET", "/v1/events", refuses=[RefusalCode.NOT_FOUND, RefusalCode.CONFLICT])
    async def events(self, query: requests.EventQuery) -> RecordStream[answers.EventResponse]:
        """Send events, and go on as they happen if that is asked for."""
        if query.follow:
            await self._ask(lambda: self._handlers.events.require(query))
        return await self._records(self._handlers.events.stream(query), route="events", follow=query.follow)

    @routes.serving(Right.VIEW, "GET", "/v1/prices", refuses=[RefusalCode.NOT_FOUND, RefusalCode.CONFLICT])
    async def prices(self, query: requests.PriceQuery) -> PricesResponse:
        """List what is on offer now with its effective price, cheapest per GPU first."""
        return await self._ask(lambda: self._handlers.prices.quotes(query))

    @routes.serving(Right.VIEW, "GET", "/v1/history")
    async def history(self, query: requests.HistoryQuery) -> HistoryResponse:
        """Return what prices were, in spans of equal length."""
        return await self._ask(lambda: self._handlers.prices.history(query))

    @routes.serving(Right.OPERATE, "POST", "/v1/history/offers")
    async def import_offers(self, body: bodies.PastOffersBody) -> PriceImportAnswer:
        """Store what a recorded list says that offers have cost, apart from the prices that were polled."""
        return await self._ask(lambda: self._handlers.imports.offers(body))

    @routes.serving(Right.OPERATE, "POST", "/v1/history/import", refuses=[RefusalCode.CONFLICT])
    async def import_prices(self, body: bodies.PriceImportBody) -> PriceImportAnswer:
        """Store one page of a provider's own records of its past prices."""
        name, since, after = routes.read_import(body)
        return await self._ask(lambda: self._handlers.imports.provider(name, since, after), limit_s=PATIENT_S)

    @routes.serving(Right.VIEW, "GET", "/v1/providers")
    async def providers(self) -> answers.ProvidersAnswer:
        """Return how each provider is doing; without the state store too, since it is asked when something is wrong."""
        return {"providers": await self._handlers.health.providers()}

    @routes.serving(Right.VIEW, "GET", "/v1/hosts")
    async def hosts(self) -> answers.HostsResponse:
        """List what is remembered of hosts, the worst first."""
        return await self._ask(self._handlers.hosts.hosts)

    @routes.serving(Right.OPERATE, "POST", "/v1/hosts/forget", refuses=[RefusalCode.NOT_FOUND])
    async def forget_host(self, body: bodies.HostBody) -> answers.ForgottenHostsAnswer:
        """Forget what is remembered of a host."""
        host = routes.read_name(body, "host", "host is the name of a host", hint="spotctl providers --hosts lists them")
        return {"forgotten": await self._ask(lambda: self._handlers.hosts.forget(host))}

    @routes.serving(Right.OPERATE, "POST", "/v1/notify/test", refuses=[RefusalCode.NOT_FOUND])
    async def test_notifications(self, body: bodies.ChannelBody) -> answers.ChannelTestsAnswer:
        """Send one message by a channel of notifications, or by each of them."""
        channel = routes.read_channel(body)
        return {"channels": await self._ask(lambda: self._handlers.notifications.test(channel), limit_s=PATIENT_S)}

    @routes.serving(Right.OPERATE, "GET", "/v1/doctor")
    async def doctor(self) -> answers.DoctorResponse:
        """Check daemon, store and providers; without the state store too, to report that it is down."""
        with anyio.move_on_after(PATIENT_S):
            return await self._handlers.doctor.report()
        raise ApiUnavailable("the checks did not end in time", hint="see the daemon's log")

    @routes.serving(Right.OPERATE, "POST", "/v1/reconcile")
    async def reconcile(self) -> answers.ReconcileResponse:
        """List the machines of all providers now, and compare."""
        return await self._ask(self._handlers.health.reconcile, limit_s=PATIENT_S)

    @routes.serving(Right.OPERATE, "GET", "/v1/adoption")
    async def adoption(self) -> answers.AdoptionResponse:
        """Show from what a lost state would be rebuilt, and change nothing."""
        return await self._ask(self._handlers.adoption.plan, limit_s=ADOPTION_S)

    @routes.serving(Right.OPERATE, "POST", "/v1/adoption", refuses=[RefusalCode.CONFLICT])
    async def adopt(self, body: bodies.AdoptionBody) -> answers.AdoptionResponse:
        """Rebuild what of a lost state the store knows."""
        secrets = routes.read_secrets(body)
        return await self._ask(lambda: self._handlers.adoption.adopt(secrets), limit_s=ADOPTION_S)
