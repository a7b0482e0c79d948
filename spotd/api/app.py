"""The application: routes, parameters, and errors as JSON.

Every answer is `{"schema": 1, "now": ..., ...}`, every refusal `{"schema": 1, "error": {...}}` with a code of
`RefusalCode` (or `internal`), and no traceback leaves: what was not expected goes to `on_failure` and the caller gets a
sentence. It listens on a unix socket of mode 0600 only, so each caller is the daemon's own user.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Final

import anyio
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from spotd.api.edge import ADOPTION_S, PATIENT_S, Failure, RequestEdge
from spotd.api.handlers import Handlers
from spotd.api.requests import (
    ContentsQuery,
    CostQuery,
    EventQuery,
    FileQuery,
    FilesQuery,
    HistoryQuery,
    JobQuery,
    LogQuery,
    PriceQuery,
    RetryQuery,
    Submission,
    VerificationQuery,
)
from spotd.api.responses import (
    JSON_TYPE,
    ApiUnavailable,
    BodyTooLong,
    ByteStream,
    Invalid,
    RecordStream,
    RefusalCode,
    ServiceStream,
    error_body,
    json_response,
)
from spotd.api.routes import (
    ApiRoute,
    read_array,
    read_budget_change,
    read_ceiling,
    read_channel,
    read_draft,
    read_flag,
    read_name,
    read_names,
    read_port,
    read_resume_from,
    read_root,
    read_secrets,
    read_sha256,
    read_spans,
    routes_of,
    serving,
)
from spotd.api.schemas.answers import (
    AdoptionResponse,
    CalibrationAnswer,
    ChannelTestsAnswer,
    CheckpointsAnswer,
    CodeAnswer,
    DaemonStatusAnswer,
    DoctorResponse,
    EventResponse,
    ForgottenAnswer,
    ForgottenHostsAnswer,
    HostsResponse,
    JobAnswer,
    JobOrArrayAnswer,
    LogResponse,
    PlanAnswer,
    PresentAnswer,
    ProvidersAnswer,
    ReconcileResponse,
    WhyAnswer,
)
from spotd.api.schemas.bodies import (
    AdoptionBody,
    BudgetBody,
    CeilingBody,
    ChannelBody,
    CheckpointsBody,
    HostBody,
    MachineBody,
    PinBody,
    PlanBody,
    SubmitBody,
)
from spotd.api.schemas.costs import CostResponse, HistoryResponse, LedgerResponse, PricesResponse
from spotd.api.schemas.jobs import (
    DatasetAnswer,
    DatasetsAnswer,
    FilesResponse,
    GpuHistoryResponse,
    JobDetailResponse,
    JobPageResponse,
    PortResponse,
    RootBody,
    ShellResponse,
    StoredAnswer,
    VerificationResponse,
)
from spotd_jobs.wire.client.dataset import CHUNK_BYTES, DOCUMENT_TEXT_MAX

CODE_BYTES_MAX: Final = 8 * 2**30


def make_app(
    handlers: Handlers,
    *,
    on_failure: Failure,
    closing: anyio.Event | None = None,
    code_bytes_max: int = CODE_BYTES_MAX,
) -> Starlette:
    """Return an application that serves these handlers.

    Args:
        closing: when set, streams that are being followed end, so that a shutdown does not wait for their readers.
    """
    api = _Api(handlers, on_failure, closing, code_bytes_max)
    return Starlette(
        routes=[Route(route.path, api.guarded(route), methods=[route.method]) for route in api_routes()],
        exception_handlers={HTTPException: _http_exception},
    )


def api_routes() -> tuple[ApiRoute, ...]:
    """Return everything that the application serves."""
    return routes_of(_Api)


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

    @serving("GET", "/v1/openapi.json")
    async def openapi(self) -> Response:
        """Describe this API, as OpenAPI 3.1."""
        from spotd.api.openapi import document_bytes  # only needed by those who ask

        return Response(document_bytes(api_routes()), media_type=JSON_TYPE)

    @serving("GET", "/v1/status")
    async def status(self) -> DaemonStatusAnswer:
        """Sum the daemon up: version, machines, jobs by state, spending."""
        return {"status": await self._ask(self._handlers.health.status)}

    @serving("POST", "/v1/plan", refuses=[RefusalCode.NOT_FOUND, RefusalCode.CONFLICT])
    async def plan(self, body: PlanBody) -> PlanAnswer:
        """Plan a job without queueing it: candidates with effective prices, ceilings, verdict."""
        draft, resume_from, array = read_draft(body), read_resume_from(body), read_array(body)
        plan = await self._ask(lambda: self._handlers.submissions.plan(draft, resume_from, array), limit_s=PATIENT_S)
        return {"plan": plan}

    @serving("GET", "/v1/code/{sha256}")
    async def has_code(self, sha256: str) -> PresentAnswer:
        """Return whether a packed workdir is in the store."""
        known = read_sha256(sha256)
        present = await self._ask(lambda: self._handlers.submissions.has_code(known), limit_s=PATIENT_S)
        return {"present": present}

    @serving("PUT", "/v1/code/{sha256}")
    async def put_code(self, sha256: str, request: Request) -> CodeAnswer:
        """Store a packed workdir under its hash."""
        # Bounded in size, not in time, since a workdir may be large and its disk slow.
        known = read_sha256(sha256)
        announced = request.headers.get("content-length", "")
        if announced.isdecimal() and int(announced) > self._code_bytes_max:
            raise self._code_too_large()
        return {"code": await self._handlers.submissions.put_code(known, self._body_within(request))}

    async def _body_within(
        self, request: Request, most: int | None = None, refusal: Callable[[], BodyTooLong] | None = None
    ) -> AsyncIterator[bytes]:
        taken, limit = 0, self._code_bytes_max if most is None else most
        async for chunk in request.stream():
            taken += len(chunk)
            if taken > limit:
                raise (refusal or self._code_too_large)()
            if chunk:
                yield chunk

    @serving("GET", "/v1/data")
    async def datasets(self) -> DatasetsAnswer:
        """List the datasets that jobs can name, and the jobs that read them."""
        return {"datasets": await self._ask(self._handlers.data.every, limit_s=PATIENT_S)}

    @serving("POST", "/v1/data", status=201)
    async def store_dataset(self, body: RootBody) -> DatasetAnswer:
        """Keep a dataset that a job is about to read, without a name, or tell what is missing of it."""
        text = read_root(body)
        made = await self._ask(lambda: self._handlers.data.store(text), limit_s=PATIENT_S)
        return {"missing": made} if isinstance(made, list) else {"dataset": made}

    @serving("GET", "/v1/data/chunks/{sha256}")
    async def has_data_chunk(self, sha256: str) -> PresentAnswer:
        """Return whether a chunk of a dataset is in the store."""
        known = read_sha256(sha256)
        return {"present": await self._ask(lambda: self._handlers.data.has_chunk(known), limit_s=PATIENT_S)}

    @serving("PUT", "/v1/data/chunks/{sha256}")
    async def put_data_chunk(self, sha256: str, request: Request) -> StoredAnswer:
        """Store a chunk of a dataset under its hash."""
        known = read_sha256(sha256)
        chunk = self._body_within(request, CHUNK_BYTES, _data_too_large)
        return {"bytes": await self._handlers.data.put_chunk(known, chunk)}

    @serving("PUT", "/v1/data/parts/{sha256}")
    async def put_data_part(self, sha256: str, request: Request) -> StoredAnswer:
        """Store a list of files of a dataset under its hash."""
        known = read_sha256(sha256)
        text = self._body_within(request, DOCUMENT_TEXT_MAX, _data_too_large)
        return {"bytes": await self._handlers.data.put_part(known, text)}

    @serving("POST", "/v1/data/{name}", status=201)
    async def name_dataset(self, name: str, body: RootBody) -> DatasetAnswer:
        """Give a name to a dataset whose chunks and parts are in the store, or tell what is missing."""
        text = read_root(body)
        made = await self._ask(lambda: self._handlers.data.give_name(name, text), limit_s=PATIENT_S)
        return {"missing": made} if isinstance(made, list) else {"dataset": made}

    @serving("POST", "/v1/data/{name}/remove", refuses=[RefusalCode.NOT_FOUND, RefusalCode.CONFLICT])
    async def remove_dataset(self, name: str) -> DatasetAnswer:
        """Forget a dataset that no unfinished job reads; its content is deleted later."""
        return {"dataset": await self._ask(lambda: self._handlers.data.remove(name), limit_s=PATIENT_S)}

    def _code_too_large(self) -> BodyTooLong:
        limit = f"{self._code_bytes_max / 2**30:.3g} GiB"
        return BodyTooLong(
            f"the packed workdir is larger than {limit}",
            hint="list data and checkpoints in .gitignore, so that only code is packed",
        )

    @serving("POST", "/v1/jobs", status=201, refuses=[RefusalCode.NOT_FOUND, RefusalCode.CONFLICT, RefusalCode.BUDGET])
    async def submit(self, body: SubmitBody) -> JobDetailResponse:
        """Queue a job, or an array of jobs."""
        code = body.get("code_sha256")
        submission = Submission(
            draft=read_draft(body),
            code_sha256=None if code is None else read_sha256(code),
            secrets=read_secrets(body),
            resume_from=read_resume_from(body),
            array=read_array(body),
            i_know=read_flag(body, "i_know"),
            agent=read_flag(body, "agent"),
        )
        return await self._ask(lambda: self._handlers.submissions.submit(submission))

    @serving("GET", "/v1/jobs", refuses=[RefusalCode.NOT_FOUND])
    async def jobs(self, query: JobQuery) -> JobPageResponse:
        """List jobs, newest submission first."""
        return await self._ask(lambda: self._handlers.jobs.page(query))

    @serving("GET", "/v1/jobs/{ref}")
    async def job(self, ref: str) -> JobDetailResponse:
        """Show everything about a job."""
        return await self._ask(lambda: self._handlers.jobs.detail(ref))

    @serving("GET", "/v1/jobs/{ref}/gpus")
    async def gpu_history(self, ref: str) -> GpuHistoryResponse:
        """Return the use of the GPUs of the machine that a job has now."""
        return await self._ask(lambda: self._handlers.jobs.gpu_history(ref))

    @serving("GET", "/v1/jobs/{ref}/shell", refuses=[RefusalCode.CONFLICT])
    async def shell(self, ref: str) -> ShellResponse:
        """Return where the machine that a job has now gives a shell."""
        return await self._ask(lambda: self._handlers.ports.address(ref), limit_s=PATIENT_S)

    @serving("GET", "/v1/jobs/{ref}/ports/{port}", refuses=[RefusalCode.CONFLICT])
    async def port(self, ref: str, port: str) -> RecordStream[PortResponse]:
        """Lead to a port of the machine that a job has now, until the reader goes or the job leaves the machine."""
        number = read_port(port)
        serve = await self._ask(lambda: self._handlers.ports.require(ref, number), limit_s=PATIENT_S)
        return ServiceStream(serve, closing=self._closing, on_failure=lambda exc: self._on_failure("port", exc))

    @serving("GET", "/v1/jobs/{ref}/why")
    async def why(self, ref: str) -> WhyAnswer:
        """Explain why a job waits, runs where it does, or ended."""
        return {"why": await self._ask(lambda: self._handlers.jobs.why(ref))}

    @serving("POST", "/v1/jobs/{ref}/cancel")
    async def cancel(self, ref: str) -> JobOrArrayAnswer:
        """Cancel a job, or each job of an array."""
        array = await self._ask(lambda: self._handlers.arrays.cancel(ref))
        if array is not None:
            return {"array": array}
        return {"job": await self._ask(lambda: self._handlers.jobs.cancel(ref))}

    @serving("POST", "/v1/jobs/{ref}/retry", refuses=[RefusalCode.BUDGET])
    async def retry(self, ref: str, query: RetryQuery) -> JobOrArrayAnswer:
        """Queue a job again, or some of the jobs of an array."""
        array = await self._ask(lambda: self._handlers.arrays.retry(ref, start=query.start), limit_s=PATIENT_S)
        if array is not None:
            return {"array": array}
        return {"job": await self._ask(lambda: self._handlers.jobs.retry(ref, anyway=query.anyway))}

    @serving("POST", "/v1/jobs/{ref}/budget")
    async def set_budget(self, ref: str, body: BudgetBody) -> JobAnswer:
        """Change what a job may cost in all."""
        change = read_budget_change(body)
        return {"job": await self._ask(lambda: self._handlers.amendments.set_budget(ref, change))}

    @serving("POST", "/v1/jobs/{ref}/ceiling")
    async def set_ceiling(self, ref: str, body: CeilingBody) -> JobOrArrayAnswer:
        """Change the ceiling of a job, or of each job of an array that has not ended."""
        limit = read_ceiling(body)
        array = await self._ask(lambda: self._handlers.arrays.set_ceiling(ref, limit))
        if array is not None:
            return {"array": array}
        return {"job": await self._ask(lambda: self._handlers.amendments.set_ceiling(ref, limit))}

    @serving("POST", "/v1/machines/forget", refuses=[RefusalCode.NOT_FOUND, RefusalCode.CONFLICT])
    async def forget(self, body: MachineBody) -> ForgottenAnswer:
        """Give up a machine that can neither be seen nor ended."""
        hint = "spotctl show JOB lists those of a job"
        machine = read_name(body, "machine", "machine is the id or the key of a machine", hint=hint)
        return {"forgotten": await self._ask(lambda: self._handlers.amendments.forget(machine))}

    @serving("GET", "/v1/jobs/{ref}/cost")
    async def job_cost(self, ref: str) -> CostResponse:
        """Return the receipt of a job, or of each job of an array."""
        return await self._ask(lambda: self._handlers.receipts.cost(ref))

    @serving("GET", "/v1/cost")
    async def cost(self, query: CostQuery) -> CostResponse | LedgerResponse:
        """Return receipts, sums and budgets; or costs added up by job, day, provider, GPU or host."""
        if (by := query.by) is not None:
            return await self._ask(lambda: self._handlers.ledger.groups(by))
        return await self._ask(lambda: self._handlers.receipts.cost(None))

    @serving("GET", "/v1/calibration")
    async def calibration(self) -> CalibrationAnswer:
        """Compare what was booked with the providers' own bills."""
        return {"calibration": await self._ask(self._handlers.ledger.calibrations)}

    @serving("GET", "/v1/jobs/{ref}/checkpoints")
    async def checkpoints(self, ref: str) -> CheckpointsAnswer:
        """List the checkpoints of a job."""
        return {"checkpoints": await self._ask(lambda: self._handlers.checkpoints.entries(ref))}

    @serving("GET", "/v1/jobs/{ref}/checkpoints/verify")
    async def verify_checkpoints(self, ref: str, query: VerificationQuery) -> RecordStream[VerificationResponse]:
        """Read checkpoints back and check each byte; a stream, since it takes as long as there are bytes."""
        if query.checkpoint and query.all:
            raise Invalid("the parameters checkpoint and all exclude each other")
        records = self._handlers.checkpoints.verify(ref, query.checkpoint, every=query.all)
        return await self._records(records, route="verify", follow=False)

    @serving("POST", "/v1/jobs/{ref}/checkpoints/pin")
    async def pin_checkpoints(self, ref: str, body: PinBody) -> CheckpointsAnswer:
        """Keep checkpoints for good, or no longer."""
        names, pinned = read_names(body), read_flag(body, "pinned", default=True)
        changed = await self._ask(lambda: self._handlers.checkpoints.pin(ref, names, pinned=pinned))
        return {"checkpoints": changed}

    @serving("POST", "/v1/jobs/{ref}/checkpoints/remove")
    async def remove_checkpoints(self, ref: str, body: CheckpointsBody) -> CheckpointsAnswer:
        """Remove checkpoints of a job."""
        names = read_names(body)
        return {"checkpoints": await self._ask(lambda: self._handlers.checkpoints.remove(ref, names))}

    @serving("GET", "/v1/jobs/{ref}/files")
    async def files(self, ref: str, query: FilesQuery) -> FilesResponse:
        """List the files of a checkpoint, or of the outputs."""
        return await self._ask(lambda: self._handlers.files.entries(ref, query.checkpoint), limit_s=PATIENT_S)

    @serving("GET", "/v1/jobs/{ref}/files/content")
    async def file_content(self, ref: str, query: FileQuery) -> ByteStream:
        """Send a file of a checkpoint, or of the outputs."""
        return await self._bytes(self._handlers.files.content(ref, query.checkpoint, query.path), "file content")

    @serving("GET", "/v1/jobs/{ref}/files/contents")
    async def file_contents(self, ref: str, query: ContentsQuery) -> ByteStream:
        """Send many files one behind the other, in the order of their list: a request for each would take hours."""
        manifest, spans = read_sha256(query.manifest), read_spans(query.files)
        return await self._bytes(self._handlers.files.contents(ref, query.checkpoint, manifest, spans), "file contents")

    @serving("GET", "/v1/jobs/{ref}/logs")
    async def logs(self, ref: str, query: LogQuery) -> RecordStream[LogResponse]:
        """Send the log of a job, and go on while it runs if that is asked for."""
        if query.follow:
            await self._ask(lambda: self._handlers.logs.require(ref, query))
        return await self._records(self._handlers.logs.stream(ref, query), route="logs", follow=query.follow)

    @serving("GET", "/v1/events", refuses=[RefusalCode.NOT_FOUND, RefusalCode.CONFLICT])
    async def events(self, query: EventQuery) -> RecordStream[EventResponse]:
        """Send events, and go on as they happen if that is asked for."""
        if query.follow:
            await self._ask(lambda: self._handlers.events.require(query))
        return await self._records(self._handlers.events.stream(query), route="events", follow=query.follow)

    @serving("GET", "/v1/prices", refuses=[RefusalCode.NOT_FOUND, RefusalCode.CONFLICT])
    async def prices(self, query: PriceQuery) -> PricesResponse:
        """List what is on offer now with its effective price, cheapest per GPU first."""
        return await self._ask(lambda: self._handlers.prices.quotes(query))

    @serving("GET", "/v1/history")
    async def history(self, query: HistoryQuery) -> HistoryResponse:
        """Return what prices were, in spans of equal length."""
        return await self._ask(lambda: self._handlers.prices.history(query))

    @serving("GET", "/v1/providers")
    async def providers(self) -> ProvidersAnswer:
        """Return how each provider is doing; without the state store too, since it is asked when something is wrong."""
        return {"providers": await self._handlers.health.providers()}

    @serving("GET", "/v1/hosts")
    async def hosts(self) -> HostsResponse:
        """List what is remembered of hosts, the worst first."""
        return await self._ask(self._handlers.hosts.hosts)

    @serving("POST", "/v1/hosts/forget", refuses=[RefusalCode.NOT_FOUND])
    async def forget_host(self, body: HostBody) -> ForgottenHostsAnswer:
        """Forget what is remembered of a host."""
        host = read_name(body, "host", "host is the name of a host", hint="spotctl providers --hosts lists them")
        return {"forgotten": await self._ask(lambda: self._handlers.hosts.forget(host))}

    @serving("POST", "/v1/notify/test", refuses=[RefusalCode.NOT_FOUND])
    async def test_notifications(self, body: ChannelBody) -> ChannelTestsAnswer:
        """Send one message by a channel of notifications, or by each of them."""
        channel = read_channel(body)
        return {"channels": await self._ask(lambda: self._handlers.notifications.test(channel), limit_s=PATIENT_S)}

    @serving("GET", "/v1/doctor")
    async def doctor(self) -> DoctorResponse:
        """Check daemon, store and providers; without the state store too, to report that it is down."""
        with anyio.move_on_after(PATIENT_S):
            return await self._handlers.doctor.report()
        raise ApiUnavailable("the checks did not end in time", hint="see the daemon's log")

    @serving("POST", "/v1/reconcile")
    async def reconcile(self) -> ReconcileResponse:
        """List the machines of all providers now, and compare."""
        return await self._ask(self._handlers.health.reconcile, limit_s=PATIENT_S)

    @serving("GET", "/v1/adoption")
    async def adoption(self) -> AdoptionResponse:
        """Show from what a lost state would be rebuilt, and change nothing."""
        return await self._ask(self._handlers.adoption.plan, limit_s=ADOPTION_S)

    @serving("POST", "/v1/adoption", refuses=[RefusalCode.CONFLICT])
    async def adopt(self, body: AdoptionBody) -> AdoptionResponse:
        """Rebuild what of a lost state the store knows."""
        secrets = read_secrets(body)
        return await self._ask(lambda: self._handlers.adoption.adopt(secrets), limit_s=ADOPTION_S)
