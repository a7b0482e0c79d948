"""Answers that are sent piece by piece.

Records go out as one JSON object a line. An idle stream sends an empty line now and then, so that each side notices
when the other is gone. An error after the status line was sent is a last line `{"schema": 1, "error": ...}`.

Plain bytes have no place for such a line: there the answer is left without its end, so that the server cuts the
connection and the reader sees that something is missing.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any, Final, Generic, TypeVar

import anyio
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from spotd.api.errors import ApiRefusal
from spotd.api.responses import INTERNAL, dumps, error_body, refusal_body
from spotd.api.schemas import SCHEMA

IDLE_LINE_S: Final = 10.0
_CLOSE_S: Final = 2.0
Record = TypeVar("Record", bound=Mapping[str, Any])
NDJSON_TYPE: Final = "application/x-ndjson"


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
                async for record in self._rest:
                    await into.send(_line(record))
            except ApiRefusal as refusal:
                await into.send(_line(refusal_body(refusal)))
            except Exception as exc:  # noqa: BLE001 - the edge of the API: the cause goes to the log, a sentence to the caller
                self._on_failure(exc)
                body = error_body(INTERNAL, "the daemon met an error of its own", hint="see the daemon's log")
                await into.send(_line(body))
            finally:
                await _close(self._rest)

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
