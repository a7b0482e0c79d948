"""A protocol of uvicorn that ends connections whose request does not arrive.

uvicorn has one time limit, for a connection between two requests, and drops it at the first byte of the next. So a
request that is begun and never ended, or comes a byte at a time, holds its connection for ever. Here a request that has
begun must either be whole or have brought `BYTES_MIN` more at the end of each `WINDOW_S`; a large upload does, and
the time in which the application itself does not read does not count.
"""

from __future__ import annotations

import asyncio
from typing import Final

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

WINDOW_S: Final = 30.0
BYTES_MIN: Final = 16 * 1024


class TimedH11Protocol(H11Protocol):
    """uvicorn's protocol with a limit for the arrival of each request."""

    window_s: float = WINDOW_S
    _timer: asyncio.TimerHandle | None = None
    _bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as in uvicorn
        super().connection_made(transport)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_watching()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._bytes += len(data)
        super().data_received(data)
        self._watch()

    @property
    def is_request_due(self) -> bool:
        """Whether the peer owes the rest of a request: of its first one also when it has sent nothing yet."""
        if self.transport.is_closing() or self not in self.connections:
            return False  # one that became a websocket is in another protocol's care
        if self.conn.their_state is h11.SEND_BODY:
            return True
        # `scope` is of the newest request, none before the first.
        is_first = not vars(self).get("scope")
        return self.conn.their_state is h11.IDLE and (is_first or bool(self.conn.trailing_data[0]))

    def _watch(self) -> None:
        if not self.is_request_due:
            self._stop_watching()
        elif self._timer is None:
            self._bytes = 0
            self._timer = self.loop.call_later(self.window_s, self._end_if_slow)

    def _stop_watching(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _end_if_slow(self) -> None:
        self._timer = None
        if self.is_request_due and self._bytes < BYTES_MIN and not self.flow.read_paused:
            self.transport.abort()
        else:
            self._watch()
