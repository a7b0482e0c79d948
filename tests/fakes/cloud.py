"""The base of the fake clouds: a clock, a ledger, hosts that run processes, due events, and their HTTP application.

Nothing happens between requests by itself. What is due by now (a boot, a price, an interruption, the end of a process)
is made up for at the next request, in order and dated to the moment it was due, so that the ledger is right however
seldom the cloud is asked. A server that runs for long calls `advance()` from a timer (`ticking`).
"""

from __future__ import annotations

import os
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from datetime import datetime
from heapq import heappop, heappush
from itertools import count
from pathlib import Path
from typing import Final, Generic, TypeVar

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response

from spotd_providers.contract.values import MICRO, MicroUsdPerHour
from spotd_providers.local.hosts import HostClock, Ledger, Machines, read_ledger, segments
from spotd_providers.testkit.serve import AsgiApp, Receive, Scope, Send
from tests.fakes.ledger_sums import total_by_machine

NOTHING: Final = MicroUsdPerHour(0)
FOR_EVER: Final = "exec sleep 2147483647"
"""The script of a container that was given nothing to run."""
POWERED_OFF: Final = "powered-off"
"""The file in `$SPOTD_HOME` that the `shutdown` of `path_with_shutdown` leaves."""
_SHUTDOWN: Final = f'#!/bin/sh\nmkdir -p "$SPOTD_HOME" && : >"$SPOTD_HOME/{POWERED_OFF}"\n'
C = TypeVar("C", bound="FakeCloud")


def path_with_shutdown(root: Path) -> str:
    """Return a PATH whose `shutdown` ends a fake's machine, as its processes must never reach the real one."""
    binaries = root / "bin"
    binaries.mkdir(parents=True, exist_ok=True)
    for name in ("shutdown", "poweroff", "halt", "systemctl"):
        (binaries / name).write_text(_SHUTDOWN)
        (binaries / name).chmod(0o755)
    return os.pathsep.join([str(binaries), str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])


class FakeCloud(ABC):
    """One account at a fake provider. Methods may be called from any thread.

    Attributes:
        base_url: where machines find the API; the API fills it in from the first request.
    """

    def __init__(self, root: Path, *, clock: HostClock, path: str | None = None) -> None:
        self.clock = clock
        self.base_url = ""
        self.machines = Machines(root / "machines", clock=clock, path=path)
        self.ledger_path = root / "ledger.jsonl"
        self.ledger = Ledger(self.ledger_path)
        self.lock = threading.RLock()
        self.private: dict[str, tuple[str, str]] = {}
        """Images whose registry gives them only for this name and password."""
        self._events: list[tuple[datetime, int, Callable[[datetime], None]]] = []
        self._order = count()

    def at(self, instant: datetime, happens: Callable[[datetime], None]) -> None:
        """Call `happens` with its own instant once that has come."""
        with self.lock:
            heappush(self._events, (instant, next(self._order), happens))

    def advance(self) -> None:
        """Make happen everything that is due by now."""
        with self.lock:
            now = self.clock.now()
            while self._events and self._events[0][0] <= now:
                instant, _, happens = heappop(self._events)
                happens(instant)
            self._settle_processes(set(self.machines.ids()), now)

    @abstractmethod
    def _settle_processes(self, known: set[str], now: datetime) -> None:
        """Change the state of each running machine whose process (one of `known`) has ended."""

    def spent_usd(self) -> float:
        """Sum of the ledger, $."""
        return sum(total_by_machine(segments(read_ledger(self.ledger_path)), self.clock.now()).values()) / MICRO

    def shut_down(self) -> None:
        """End the processes of all machines; the ledger stays."""
        with self.lock:
            self.machines.kill_all()
            self.ledger.close()


class FakeApi(ABC, Generic[C]):
    """The ASGI application of a fake cloud. `advance()` of the cloud runs before every request."""

    def __init__(self, cloud: C) -> None:
        self.cloud = cloud
        self._app: AsgiApp = self._built()

    @abstractmethod
    def _built(self) -> Starlette:
        """The application with all its routes."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, send)

    def endpoint(self, handle: Callable[[Request, bytes], Response]) -> Callable[[Request], Awaitable[Response]]:
        """An endpoint that answers by `handle` in a thread, with the cloud locked and up to date."""

        async def answer(request: Request) -> Response:
            content = await request.body()
            if not self.cloud.base_url:
                self.cloud.base_url = str(request.base_url).rstrip("/")
            return await run_in_threadpool(self._locked, handle, request, content)

        return answer

    def _locked(self, handle: Callable[[Request, bytes], Response], request: Request, content: bytes) -> Response:
        with self.cloud.lock:
            self.cloud.advance()
            return handle(request, content)
