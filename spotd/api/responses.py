"""Answers and refusals as bytes."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, ClassVar, Final, Generic, TypeVar

import anyio
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from spotd.api.schemas import SCHEMA
from spotd.api.schemas.bodies import ErrorResponse
from spotd_jobs.spec.problems import Problem, listed_problems

# The closed set of ways in which the API refuses a request.


TEXT_CHARS_MAX: Final = 8_000
"""Of what a refusal says: it may name what the request named, which may be very much."""


class RefusalCode(StrEnum):
    """Why a request was refused. The strings are part of the JSON output."""

    NOT_FOUND = "not_found"
    AMBIGUOUS = "ambiguous"
    INVALID = "invalid"
    CONFLICT = "conflict"
    BUDGET = "budget"
    UNAUTHORIZED = "unauthorized"
    FORBIDDEN = "forbidden"
    UNAVAILABLE = "unavailable"


class ApiRefusal(Exception):
    """A request was refused, and nothing changed. The message is for the user and ends without a full stop.

    A refusal that names neither a hint nor problems, which have theirs, has the way out of its kind.
    """

    code: RefusalCode
    way_out: ClassVar[str] = ""

    def __init__(self, message: str, *, hint: str = "", problems: tuple[Problem, ...] = ()) -> None:
        super().__init__(message[:TEXT_CHARS_MAX])
        self.message = message[:TEXT_CHARS_MAX]
        self.hint = (hint or ("" if problems else self.way_out))[:TEXT_CHARS_MAX]
        self.problems = listed_problems(problems)


class NotFound(ApiRefusal):
    """No job, checkpoint or file of this name."""

    code = RefusalCode.NOT_FOUND
    way_out = "spotctl ls shows the jobs, spotctl pull JOB --list their files"


class Ambiguous(ApiRefusal):
    """The reference means several jobs; the hint lists them."""

    code = RefusalCode.AMBIGUOUS


class Invalid(ApiRefusal):
    """A job or a parameter that is wrong; `problems` names the places."""

    code = RefusalCode.INVALID
    way_out = "GET /v1/openapi.json states what each route takes"


class StateConflict(ApiRefusal):
    """The job is in no state for this (cancel of an ended one, retry of a running one, a name in use)."""

    code = RefusalCode.CONFLICT


class Unauthorized(ApiRefusal):
    """The request has no token, or none of a user."""

    code = RefusalCode.UNAUTHORIZED


class Forbidden(ApiRefusal):
    """The right of the user does not reach so far."""

    code = RefusalCode.FORBIDDEN


class OverBudget(ApiRefusal):
    """A budget forbids it."""

    code = RefusalCode.BUDGET


class ApiUnavailable(ApiRefusal):
    """Something the daemon needs does not answer; the same request may succeed later."""

    code = RefusalCode.UNAVAILABLE
    way_out = "try again; spotctl doctor shows what does not answer"


INTERNAL: Final = "internal"
JSON_TYPE: Final = "application/json"
STATUS_OF_LONG_BODY: Final = 413
STATUS_OF_DEFECT: Final = 500

STATUS_OF_CODE: Final[Mapping[RefusalCode, int]] = {
    RefusalCode.NOT_FOUND: 404,
    RefusalCode.AMBIGUOUS: 409,
    RefusalCode.INVALID: 422,
    RefusalCode.CONFLICT: 409,
    RefusalCode.BUDGET: 402,
    RefusalCode.UNAUTHORIZED: 401,
    RefusalCode.FORBIDDEN: 403,
    RefusalCode.UNAVAILABLE: 503,
}


class BodyTooLong(Invalid):
    """A body is beyond its limit."""


def dumps(body: Mapping[str, Any]) -> bytes:
    """Return compact JSON in UTF-8.

    Raises:
        ValueError: a number is not finite.
    """
    return json.dumps(body, separators=(",", ":"), allow_nan=False).encode()


def json_response(body: Mapping[str, Any], *, status: int = 200) -> Response:
    return Response(dumps({"schema": SCHEMA, **body}), status_code=status, media_type=JSON_TYPE)


def error_body(
    code: str, message: str, *, hint: str = "", problems: tuple[Problem, ...] = ()
) -> dict[str, ErrorResponse]:
    return {
        "error": {
            "code": str(code),
            "message": message,
            "hint": hint,
            "problems": [{"key": p.key, "message": p.message, "hint": p.hint} for p in problems],
        }
    }


def refusal_body(refusal: ApiRefusal) -> dict[str, ErrorResponse]:
    return error_body(refusal.code, refusal.message, hint=refusal.hint, problems=refusal.problems)


def refusal_response(refusal: ApiRefusal) -> Response:
    status = STATUS_OF_LONG_BODY if isinstance(refusal, BodyTooLong) else STATUS_OF_CODE[refusal.code]
    return json_response(refusal_body(refusal), status=status)


# Answers that are sent piece by piece.
#
# Records go out as one JSON object a line. An idle stream sends an empty line now and then, so that each side notices
# when the other is gone. An error after the status line was sent is a last line `{"schema": 1, "error": ...}`.
#
# Plain bytes have no place for such a line: there the answer is left without its end, so that the server cuts the
# connection and the reader sees that something is missing.


IDLE_LINE_S: Final = 10.0
_CLOSE_S: Final = 2.0
Record = TypeVar("Record", bound=Mapping[str, Any])
NDJSON_TYPE: Final = "application/x-ndjson"
NOTICE_HEADER: Final = b"spotd-notice"
"""A sentence about an answer that is not the newest or not from who knows best."""


class _Streamed(Response):
    """A response whose body is sent by `_body`, which is cancelled when the reader goes away."""

    media_type = "application/octet-stream"

    def __init__(self) -> None:
        super().__init__()
        del self.headers["content-length"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        del scope  # what it holds was read from the request already
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async with anyio.create_task_group() as group:

            async def notice_departure() -> None:
                while (await receive())["type"] != "http.disconnect":
                    pass
                group.cancel_scope.cancel()

            group.start_soon(notice_departure, name="stream reader")
            await self._body(send)
            group.cancel_scope.cancel()

    async def _body(self, send: Send) -> None:
        raise NotImplementedError

    async def _write(self, send: Send, data: bytes) -> None:
        await send({"type": "http.response.body", "body": data, "more_body": True})

    async def _end(self, send: Send) -> None:
        await send({"type": "http.response.body", "body": b"", "more_body": False})


class ByteStream(_Streamed):
    """The chunks, or a cut connection."""

    def __init__(
        self, first: Sequence[bytes], rest: AsyncIterator[bytes], *, on_failure: Callable[[Exception], None]
    ) -> None:
        super().__init__()
        self._first, self._rest, self._on_failure = first, rest, on_failure

    async def _body(self, send: Send) -> None:
        try:
            for chunk in self._first:
                await self._write(send, chunk)
            async for chunk in self._rest:
                await self._write(send, chunk)
        except Exception as exc:  # noqa: BLE001 - the edge of the API: the cause goes to the log, the end stays missing
            self._on_failure(exc)
        else:
            await self._end(send)
        finally:
            await _close(self._rest)


class RecordStream(_Streamed, Generic[Record]):
    """The records as lines, until they end, the reader goes, or the daemon closes."""

    media_type = NDJSON_TYPE

    def __init__(
        self,
        first: Sequence[Record],
        rest: AsyncIterator[Record],
        *,
        closing: anyio.Event | None,
        on_failure: Callable[[Exception], None],
    ) -> None:
        super().__init__()
        self._first, self._rest = first, rest
        self._closing, self._on_failure = closing, on_failure

    async def _body(self, send: Send) -> None:
        for record in self._first:
            await self._write(send, _line(record))
        into, out = anyio.create_memory_object_stream[bytes](64)
        async with anyio.create_task_group() as group:
            group.start_soon(self._produce, into, name="stream records")
            if self._closing is not None:
                group.start_soon(_when, self._closing.wait, group.cancel_scope, name="stream closing")
            await self._consume(out, send)
            group.cancel_scope.cancel()
        await self._end(send)

    async def _produce(self, into: MemoryObjectSendStream[bytes]) -> None:
        async with into:
            try:
                await self._each(lambda record: into.send(_line(record)))
            except ApiRefusal as refusal:
                await into.send(_line(refusal_body(refusal)))
            except Exception as exc:  # noqa: BLE001 - the edge of the API: the cause goes to the log, a sentence to the caller
                self._on_failure(exc)
                body = error_body(INTERNAL, "the daemon met an error of its own", hint="see the daemon's log")
                await into.send(_line(body))
            finally:
                await _close(self._rest)

    async def _each(self, put: Callable[[Record], Awaitable[None]]) -> None:
        async for record in self._rest:
            await put(record)

    async def _consume(self, out: MemoryObjectReceiveStream[bytes], send: Send) -> None:
        async with out:
            while True:
                line = b"\n"
                with anyio.move_on_after(IDLE_LINE_S):
                    try:
                        line = await out.receive()
                    except anyio.EndOfStream:
                        return
                await self._write(send, line)


Serve = Callable[[Callable[[Record], Awaitable[None]]], Awaitable[None]]


class ServiceStream(RecordStream[Record]):
    """Records of something that is served for as long as its reader stays: `serve` may hold tasks of its own."""

    def __init__(
        self, serve: Serve[Record], *, closing: anyio.Event | None, on_failure: Callable[[Exception], None]
    ) -> None:
        super().__init__((), _nothing(), closing=closing, on_failure=on_failure)
        self._serve = serve

    async def _each(self, put: Callable[[Record], Awaitable[None]]) -> None:
        await self._serve(put)


async def _nothing() -> AsyncIterator[Any]:
    for nothing in range(0):
        yield nothing


async def _close(items: AsyncIterator[Any]) -> None:
    """Let a generator that was not exhausted free what it holds now, not when it is collected."""
    if isinstance(items, AsyncGenerator):
        with anyio.move_on_after(_CLOSE_S, shield=True):
            await items.aclose()


async def _when(wait: Callable[[], Awaitable[object]], scope: anyio.CancelScope) -> None:
    await wait()
    scope.cancel()


def _line(record: Mapping[str, Any]) -> bytes:
    return dumps({"schema": SCHEMA, **record}) + b"\n"


# Which job a user means by an id, a name or a prefix.


_NAMED_MAX: Final = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class JobHead:
    """As much of a job as is needed to find it. `order` grows with submission."""

    id: str
    name: str
    is_final: bool
    order: float


def resolve(ref: str, heads: Iterable[JobHead]) -> str:
    """Return the id of the one job that `ref` means.

    An exact id comes first, then an exact name, then a prefix of an id. Of several jobs of one name the unfinished one
    is meant, or the newest if all have ended: an earlier run must not stand in the way of its successor.

    Raises:
        NotFound: no job.
        Ambiguous: several unfinished jobs of that name, or several ids with that prefix.
    """
    known = list(heads)
    if any(head.id == ref for head in known):
        return ref
    named = [head for head in known if head.name == ref]
    unfinished = [head for head in named if not head.is_final]
    if len(unfinished) > 1:
        raise _ambiguous(ref, unfinished)
    if unfinished:
        return unfinished[0].id
    if named:
        return max(named, key=lambda head: head.order).id
    prefixed = [head for head in known if ref and head.id.startswith(ref)]
    if len(prefixed) > 1:
        raise _ambiguous(ref, prefixed)
    if prefixed:
        return prefixed[0].id
    raise NotFound(f"there is no job {ref!r}", hint="spotctl ls")


def _ambiguous(ref: str, found: list[JobHead]) -> Ambiguous:
    newest_first = sorted(found, key=lambda head: head.order, reverse=True)
    shown = ", ".join(f"{head.id} ({head.name})" for head in newest_first[:_NAMED_MAX])
    more = f" and {len(found) - _NAMED_MAX} more" if len(found) > _NAMED_MAX else ""
    return Ambiguous(f"{ref!r} means {len(found)} jobs", hint=f"one of {shown}{more}")
