"""The application: routes, parameters, and errors as JSON.

Every answer is `{"schema": 1, "now": ..., ...}`, every refusal `{"schema": 1, "error": {...}}` with a code of
`RefusalCode` (or `internal`), and no traceback leaves: what was not expected goes to `on_failure` and the caller gets a
sentence. It listens on a unix socket of mode 0600 only, so each caller is the daemon's own user.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any, Final, TypeVar

import anyio
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from spotd.api.errors import ApiRefusal, ApiUnavailable, Invalid, RefusalCode
from spotd.api.handlers import Handlers
from spotd.api.parameters import (
    read_array,
    read_budget_change,
    read_ceiling,
    read_cost_grouping,
    read_draft,
    read_event_query,
    read_flag,
    read_history_query,
    read_host,
    read_job_query,
    read_json,
    read_log_query,
    read_machine,
    read_names,
    read_price_query,
    read_resume_from,
    read_retry,
    read_secrets,
    read_sha256,
    read_spans,
    read_verification,
    without_unknown,
)
from spotd.api.requests import Submission
from spotd.api.responses import INTERNAL, BodyTooLong, error_body, json_response, refusal_response
from spotd.api.streams import ByteStream, RecordStream
from spotd.api.timestamps import utc_text

CODE_BYTES_MAX: Final = 8 * 2**30
QUICK_S: Final = 30.0
"""Longest that a query of rows may take; the client waits a little longer."""
PATIENT_S: Final = 150.0
"""Longest for what asks providers or the object store."""
_ERROR_CHECK_S: Final = 0.1

Failure = Callable[[str, Exception], None]
"""Called with the route and what broke; must not raise."""
_Endpoint = Callable[[Request], Awaitable[Response]]
_Method = TypeVar("_Method", bound=Callable[..., Awaitable[Response]])
_ROUTES: Final[list[tuple[str, str, str]]] = []
"""Method, path and the name of the endpoint."""


def _serving(method: str, path: str) -> Callable[[_Method], _Method]:
    """Make a method of `_Api` the endpoint of a route."""

    def register(endpoint: _Method) -> _Method:
        _ROUTES.append((method, path, endpoint.__name__))
        return endpoint

    return register


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
        routes=[Route(path, api.guarded(path, getattr(api, name)), methods=[method]) for method, path, name in _ROUTES],
        exception_handlers={HTTPException: _http_exception},
    )


async def _http_exception(request: Request, exc: Exception) -> Response:
    status = exc.status_code if isinstance(exc, HTTPException) else 500
    code = RefusalCode.NOT_FOUND if status == 404 else RefusalCode.INVALID
    message = f"this daemon does not know {request.method} {request.url.path}"
    hint = "spotctl and the daemon may be of different versions"
    return json_response(error_body(code, message, hint=hint), status=status)


class _Api:
    """The endpoints; each turns one request into one call of a handler."""

    def __init__(
        self, handlers: Handlers, on_failure: Failure, closing: anyio.Event | None, code_bytes_max: int
    ) -> None:
        self._handlers = handlers
        self._on_failure = on_failure
        self._closing = closing
        self._code_bytes_max = code_bytes_max

    def guarded(self, path: str, endpoint: _Endpoint) -> _Endpoint:
        """Return the endpoint, with everything that can go wrong turned into JSON."""

        async def answer(request: Request) -> Response:
            try:
                return await endpoint(request)
            except ApiRefusal as refusal:
                return refusal_response(refusal)
            except ClientDisconnect:
                return Response(status_code=400)
            except Exception as exc:  # noqa: BLE001 - the edge of the API: the cause goes to the log, a sentence to the caller
                self._on_failure(path, exc)
                message = "the daemon met an error of its own; nothing is known to have changed"
                return json_response(error_body(INTERNAL, message, hint="see the daemon's log"), status=500)

        return answer

    async def _ask(self, call: Callable[[], Awaitable[Any]], *, limit_s: float = QUICK_S) -> Any:
        """Return the call's result, given up as soon as the state store has an error.

        Raises:
            Unavailable: the store does not answer, or the limit has passed.
        """
        if sentence := self._handlers.context.database.last_error:
            raise _store_down(sentence)
        results: list[Any] = []
        failures: list[Exception] = []
        sentence = ""

        async def work(scope: anyio.CancelScope) -> None:
            try:
                results.append(await call())
            except Exception as exc:  # noqa: BLE001 - carried out of the task group unchanged, which would wrap it
                failures.append(exc)
            scope.cancel()

        with anyio.move_on_after(limit_s):
            async with anyio.create_task_group() as group:
                group.start_soon(work, group.cancel_scope, name="api call")
                while not sentence:
                    await anyio.sleep(_ERROR_CHECK_S)
                    sentence = self._handlers.context.database.last_error
                group.cancel_scope.cancel()
        if failures:
            raise failures[0]
        if results:
            return results[0]
        if sentence:
            raise _store_down(sentence)
        raise ApiUnavailable(f"the daemon did not find an answer within {limit_s:.0f} s", hint="spotctl doctor")

    def _reply(self, body: Mapping[str, Any], *, status: int = 200) -> Response:
        return json_response({"now": utc_text(self._handlers.context.clock.now()), **body}, status=status)

    @_serving("GET", "/v1/status")
    async def status(self, request: Request) -> Response:
        without_unknown(request, ())
        return self._reply({"status": await self._ask(self._handlers.health.status)})

    @_serving("POST", "/v1/plan")
    async def plan(self, request: Request) -> Response:
        body = await read_json(request, {"draft", "resume_from", "array"})
        draft, resume_from, array = read_draft(body), read_resume_from(body), read_array(body)
        plan = await self._ask(lambda: self._handlers.submissions.plan(draft, resume_from, array), limit_s=PATIENT_S)
        return self._reply({"plan": plan})

    @_serving("GET", "/v1/code/{sha256}")
    async def has_code(self, request: Request) -> Response:
        sha256 = read_sha256(request.path_params["sha256"])
        present = await self._ask(lambda: self._handlers.submissions.has_code(sha256), limit_s=PATIENT_S)
        return self._reply({"present": present})

    @_serving("PUT", "/v1/code/{sha256}")
    async def put_code(self, request: Request) -> Response:
        """Store the body as it comes; bounded in size, not in time, since a workdir may be large and its disk slow."""
        sha256 = read_sha256(request.path_params["sha256"])
        announced = request.headers.get("content-length", "")
        if announced.isdecimal() and int(announced) > self._code_bytes_max:
            raise self._code_too_large()
        stored = await self._handlers.submissions.put_code(sha256, self._bounded(request))
        return self._reply({"code": stored})

    async def _bounded(self, request: Request) -> AsyncIterator[bytes]:
        taken = 0
        async for chunk in request.stream():
            taken += len(chunk)
            if taken > self._code_bytes_max:
                raise self._code_too_large()
            if chunk:
                yield chunk

    def _code_too_large(self) -> BodyTooLong:
        limit = f"{self._code_bytes_max / 2**30:.3g} GiB"
        return BodyTooLong(
            f"the packed workdir is larger than {limit}",
            hint="list data and checkpoints in .gitignore, so that only code is packed",
        )

    @_serving("POST", "/v1/jobs")
    async def submit(self, request: Request) -> Response:
        body = await read_json(request, {"draft", "code_sha256", "secrets", "resume_from", "array", "i_know"})
        code = body.get("code_sha256")
        submission = Submission(
            draft=read_draft(body),
            code_sha256=None if code is None else read_sha256(code),
            secrets=read_secrets(body),
            resume_from=read_resume_from(body),
            array=read_array(body),
            i_know=read_flag(body, "i_know"),
        )
        detail = await self._ask(lambda: self._handlers.submissions.submit(submission))
        return self._reply(detail, status=201)

    @_serving("GET", "/v1/jobs")
    async def jobs(self, request: Request) -> Response:
        query = read_job_query(request)
        return self._reply(await self._ask(lambda: self._handlers.jobs.page(query)))

    @_serving("GET", "/v1/jobs/{ref}")
    async def job(self, request: Request) -> Response:
        ref = request.path_params["ref"]
        return self._reply(await self._ask(lambda: self._handlers.jobs.detail(ref)))

    @_serving("GET", "/v1/jobs/{ref}/gpus")
    async def gpu_history(self, request: Request) -> Response:
        ref = request.path_params["ref"]
        return self._reply(await self._ask(lambda: self._handlers.jobs.gpu_history(ref)))

    @_serving("GET", "/v1/jobs/{ref}/why")
    async def why(self, request: Request) -> Response:
        ref = request.path_params["ref"]
        return self._reply({"why": await self._ask(lambda: self._handlers.jobs.why(ref))})

    @_serving("POST", "/v1/jobs/{ref}/cancel")
    async def cancel(self, request: Request) -> Response:
        """Cancel a job, or each job of an array."""
        ref = request.path_params["ref"]
        array = await self._ask(lambda: self._handlers.arrays.cancel(ref))
        if array is not None:
            return self._reply({"array": array})
        return self._reply({"job": await self._ask(lambda: self._handlers.jobs.cancel(ref))})

    @_serving("POST", "/v1/jobs/{ref}/retry")
    async def retry(self, request: Request) -> Response:
        """Queue a job again, or some of the jobs of an array."""
        ref, (anyway, start) = request.path_params["ref"], read_retry(request)
        array = await self._ask(lambda: self._handlers.arrays.retry(ref, start=start), limit_s=PATIENT_S)
        if array is not None:
            return self._reply({"array": array})
        return self._reply({"job": await self._ask(lambda: self._handlers.jobs.retry(ref, anyway=anyway))})

    @_serving("POST", "/v1/jobs/{ref}/budget")
    async def set_budget(self, request: Request) -> Response:
        change = read_budget_change(await read_json(request, {"budget"}))
        ref = request.path_params["ref"]
        return self._reply({"job": await self._ask(lambda: self._handlers.amendments.set_budget(ref, change))})

    @_serving("POST", "/v1/jobs/{ref}/ceiling")
    async def set_ceiling(self, request: Request) -> Response:
        """Change the ceiling of a job, or of each job of an array that has not ended."""
        limit = read_ceiling(await read_json(request, {"ceiling"}))
        ref = request.path_params["ref"]
        array = await self._ask(lambda: self._handlers.arrays.set_ceiling(ref, limit))
        if array is not None:
            return self._reply({"array": array})
        return self._reply({"job": await self._ask(lambda: self._handlers.amendments.set_ceiling(ref, limit))})

    @_serving("POST", "/v1/machines/forget")
    async def forget(self, request: Request) -> Response:
        machine = read_machine(await read_json(request, {"machine"}))
        return self._reply({"forgotten": await self._ask(lambda: self._handlers.amendments.forget(machine))})

    @_serving("GET", "/v1/jobs/{ref}/cost")
    async def job_cost(self, request: Request) -> Response:
        ref = request.path_params["ref"]
        return self._reply(await self._ask(lambda: self._handlers.receipts.cost(ref)))

    @_serving("GET", "/v1/cost")
    async def cost(self, request: Request) -> Response:
        if (by := read_cost_grouping(request)) is not None:
            return self._reply(await self._ask(lambda: self._handlers.ledger.groups(by)))
        return self._reply(await self._ask(lambda: self._handlers.receipts.cost(None)))

    @_serving("GET", "/v1/calibration")
    async def calibration(self, request: Request) -> Response:
        without_unknown(request, ())
        return self._reply({"calibration": await self._ask(self._handlers.ledger.calibrations)})

    @_serving("GET", "/v1/jobs/{ref}/checkpoints")
    async def checkpoints(self, request: Request) -> Response:
        ref = request.path_params["ref"]
        return self._reply({"checkpoints": await self._ask(lambda: self._handlers.checkpoints.entries(ref))})

    @_serving("GET", "/v1/jobs/{ref}/checkpoints/verify")
    async def verify_checkpoints(self, request: Request) -> Response:
        """Answer with a stream, since it takes as long as there are bytes."""
        names, every = read_verification(request)
        records = self._handlers.checkpoints.verify(request.path_params["ref"], names, every=every)
        return await self._records(records, route="verify", follow=False)

    @_serving("POST", "/v1/jobs/{ref}/checkpoints/pin")
    async def pin_checkpoints(self, request: Request) -> Response:
        body = await read_json(request, {"checkpoints", "pinned"})
        names, pinned = read_names(body), body.get("pinned", True)
        if not isinstance(pinned, bool):
            raise Invalid("pinned is true or false")
        ref = request.path_params["ref"]
        changed = await self._ask(lambda: self._handlers.checkpoints.pin(ref, names, pinned=pinned))
        return self._reply({"checkpoints": changed})

    @_serving("POST", "/v1/jobs/{ref}/checkpoints/remove")
    async def remove_checkpoints(self, request: Request) -> Response:
        names = read_names(await read_json(request, {"checkpoints"}))
        ref = request.path_params["ref"]
        return self._reply({"checkpoints": await self._ask(lambda: self._handlers.checkpoints.remove(ref, names))})

    @_serving("GET", "/v1/jobs/{ref}/files")
    async def files(self, request: Request) -> Response:
        without_unknown(request, ("checkpoint",))
        ref, checkpoint = request.path_params["ref"], request.query_params.get("checkpoint")
        return self._reply(await self._ask(lambda: self._handlers.files.entries(ref, checkpoint), limit_s=PATIENT_S))

    @_serving("GET", "/v1/jobs/{ref}/files/content")
    async def file_content(self, request: Request) -> Response:
        without_unknown(request, ("checkpoint", "path"))
        path = request.query_params.get("path", "")
        if not path:
            raise Invalid("the parameter path is missing")
        ref, checkpoint = request.path_params["ref"], request.query_params.get("checkpoint")
        chunks = self._handlers.files.content(ref, checkpoint, path)
        first = await self._first(chunks)
        return ByteStream(first, chunks, on_failure=lambda exc: self._on_failure("file content", exc))

    @_serving("GET", "/v1/jobs/{ref}/files/contents")
    async def file_contents(self, request: Request) -> Response:
        """Send many files one behind the other, in the order of the list: a request for each would take hours."""
        without_unknown(request, ("checkpoint", "manifest", "files"))
        ref, checkpoint = request.path_params["ref"], request.query_params.get("checkpoint")
        manifest, spans = read_spans(request)
        chunks = self._handlers.files.contents(ref, checkpoint, manifest, spans)
        first = await self._first(chunks)
        return ByteStream(first, chunks, on_failure=lambda exc: self._on_failure("file contents", exc))

    @_serving("GET", "/v1/jobs/{ref}/logs")
    async def logs(self, request: Request) -> Response:
        query = read_log_query(request)
        records = self._handlers.logs.stream(request.path_params["ref"], query)
        return await self._records(records, route="logs", follow=query.follow)

    @_serving("GET", "/v1/events")
    async def events(self, request: Request) -> Response:
        query = read_event_query(request)
        return await self._records(self._handlers.events.stream(query), route="events", follow=query.follow)

    async def _records(self, records: AsyncIterator[Any], *, route: str, follow: bool) -> Response:
        """Answer with a stream whose first record was awaited only where that cannot take for ever."""
        first = [] if follow and route == "events" else await self._first(records)
        return RecordStream(first, records, closing=self._closing, on_failure=lambda exc: self._on_failure(route, exc))

    async def _first(self, items: AsyncIterator[Any]) -> list[Any]:
        """Return the first item or nothing, so that a refusal still gets its status code."""

        async def step() -> list[Any]:
            async for item in items:
                return [item]
            return []

        found: list[Any] = await self._ask(step, limit_s=PATIENT_S)
        return found

    @_serving("GET", "/v1/prices")
    async def prices(self, request: Request) -> Response:
        query = read_price_query(request)
        return self._reply(await self._ask(lambda: self._handlers.prices.quotes(query)))

    @_serving("GET", "/v1/history")
    async def history(self, request: Request) -> Response:
        query = read_history_query(request)
        return self._reply(await self._ask(lambda: self._handlers.prices.history(query)))

    @_serving("GET", "/v1/providers")
    async def providers(self, request: Request) -> Response:
        """Answer without the state store too: it is asked when something is wrong."""
        without_unknown(request, ())
        return self._reply({"providers": await self._handlers.health.providers()})

    @_serving("GET", "/v1/hosts")
    async def hosts(self, request: Request) -> Response:
        without_unknown(request, ())
        return self._reply(await self._ask(self._handlers.hosts.hosts))

    @_serving("POST", "/v1/hosts/forget")
    async def forget_host(self, request: Request) -> Response:
        host = read_host(await read_json(request, {"host"}))
        return self._reply({"forgotten": await self._ask(lambda: self._handlers.hosts.forget(host))})

    @_serving("GET", "/v1/doctor")
    async def doctor(self, request: Request) -> Response:
        """Answer without the state store too, and report that it is down."""
        without_unknown(request, ())
        with anyio.move_on_after(PATIENT_S):
            return self._reply(await self._handlers.doctor.report())
        raise ApiUnavailable("the checks did not end in time", hint="see the daemon's log")

    @_serving("POST", "/v1/reconcile")
    async def reconcile(self, request: Request) -> Response:
        without_unknown(request, ())
        return self._reply(await self._ask(self._handlers.health.reconcile, limit_s=PATIENT_S))


def _store_down(sentence: str) -> ApiUnavailable:
    return ApiUnavailable(sentence, hint="running jobs go on; ask again when it is back, or spotctl doctor")
