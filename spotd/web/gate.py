"""How many connections the dashboard has open, so that a peer which opens many or says nothing is in no one's way."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from spotd.slow_requests import TimedH11Protocol
from spotd.web.guard import is_loopback
from spotd.web.peers import peer_of

OPEN_MAX: Final = 256
OPEN_PER_PEER_MAX: Final = 48
"""Of each address but loopback, where a proxy may ask for others. A browser opens six, and one for each tab."""
FIRST_REQUEST_WITHIN_S: Final = 10.0


@dataclass(frozen=True, slots=True)
class _Connection:
    peer: str
    transport: asyncio.Transport
    is_request_due: Callable[[], bool]


class Gate:
    """The open connections of one server."""

    def __init__(self) -> None:
        self._open: list[_Connection] = []

    def admits(self, transport: asyncio.Transport, is_request_due: Callable[[], bool]) -> bool:
        """Whether one more connection is served; one that has ended, or whose request has not arrived, makes room.

        Args:
            is_request_due: whether the peer owes a request, or the rest of one.
        """
        peer = peer_of(transport.get_extra_info("peername"), {})
        self._open = [one for one in self._open if not one.transport.is_closing()]
        if not is_loopback(peer) and not self._make_room(
            [one for one in self._open if one.peer == peer], per_peer=True
        ):
            return False
        if not self._make_room(self._open):
            return False
        self._open.append(_Connection(peer, transport, is_request_due))
        return True

    def _make_room(self, those: list[_Connection], *, per_peer: bool = False) -> bool:
        """Return whether one more of those may be open; the oldest of them that owes a request ends for it."""
        if len(those) < (OPEN_PER_PEER_MAX if per_peer else OPEN_MAX):
            return True
        silent = next((one for one in those if one.is_request_due()), None)
        if silent is None:
            return False
        silent.transport.abort()
        self._open = [one for one in self._open if one is not silent]
        return True

    def protocol(self) -> type[TimedH11Protocol]:
        """Return uvicorn's protocol, behind this gate."""
        gate = self

        class Gated(TimedH11Protocol):
            def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as in uvicorn
                super().connection_made(transport)
                if gate.admits(transport, lambda: self.is_request_due):
                    self.loop.call_later(FIRST_REQUEST_WITHIN_S, self._close_if_silent)
                else:
                    transport.abort()

            def _close_if_silent(self) -> None:
                if self.cycle is None and self in self.connections:
                    self.transport.abort()

        return Gated
