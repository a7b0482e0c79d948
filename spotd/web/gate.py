"""How many connections the dashboard has open, so that a peer which opens many or says nothing is in no one's way."""

from __future__ import annotations

import asyncio
from typing import Final

from uvicorn.protocols.http.h11_impl import H11Protocol

from spotd.web.guard import is_loopback
from spotd.web.peers import peer_of

OPEN_MAX: Final = 256
OPEN_PER_PEER_MAX: Final = 48
"""Of each address but loopback, where a proxy may ask for others. A browser opens six, and one for each tab."""
FIRST_REQUEST_WITHIN_S: Final = 10.0


class Gate:
    """The open connections of one server."""

    def __init__(self) -> None:
        self._open: list[tuple[str, asyncio.Transport]] = []

    def admits(self, transport: asyncio.Transport) -> bool:
        """Whether one more connection is served; one that is no longer open makes room."""
        peer = peer_of(transport.get_extra_info("peername"), {})
        self._open = [one for one in self._open if not one[1].is_closing()]
        if len(self._open) >= OPEN_MAX:
            return False
        if not is_loopback(peer) and sum(one[0] == peer for one in self._open) >= OPEN_PER_PEER_MAX:
            return False
        self._open.append((peer, transport))
        return True

    def protocol(self) -> type[H11Protocol]:
        """Return uvicorn's protocol, behind this gate."""
        gate = self

        class Gated(H11Protocol):
            def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as in uvicorn
                super().connection_made(transport)
                if gate.admits(transport):
                    self.loop.call_later(FIRST_REQUEST_WITHIN_S, self._close_if_silent)
                else:
                    transport.abort()

            def _close_if_silent(self) -> None:
                if self.cycle is None and self in self.connections:
                    self.transport.abort()

        return Gated
