"""uvicorn's protocol for one connection of the API by TCP; apart, since it imports uvicorn."""

from __future__ import annotations

import logging
from typing import Any, Final, Protocol

import anyio

from spotd.service.http_server import is_failure
from spotd.slow_requests import TimedH11Protocol

_LOGGER: Final = logging.getLogger("spotd.team.http")
"""What a peer without a token sends wrong is not written down: that could fill the disk."""
_LOGGER.setLevel(logging.ERROR)
_LOGGER.addFilter(is_failure)


class Losable(Protocol):
    """What wants to know that its connection is lost."""

    lost: anyio.Event


class TeamProtocol(TimedH11Protocol):
    """A connection whose requests know it."""

    def __init__(self, config: Any, state: Any, connection: Losable, window_s: float) -> None:
        super().__init__(config, state, {"connection": connection})
        self._connection = connection
        self.window_s = window_s
        self.logger = _LOGGER

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._connection.lost.set()
