"""The market's server as a command: serves until it is ended or no longer needed."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import http.client
import json
import logging
import os
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import uvicorn

from spotd_providers.local.market.market import LocalMarket
from spotd_providers.local.market.series import BadPriceFile
from spotd_providers.local.server.app import MarketApp
from spotd_providers.local.settings import (
    AlreadyServed,
    ServedEndpoint,
    announce,
    clock_of,
    find_endpoint,
    spec_of,
    still_ours,
    take,
    withdraw,
)

_PAUSE_MIN_S: Final = 0.02
_WATCH_S: Final = 0.25
"""How soon the end of a machine's processes is noticed without requests."""
_IDLE_PAUSE_S: Final = 5.0
_STOP_TIMEOUT_S: Final = 30.0
_HANDOVER_TIMEOUT_S: Final = 10.0
_log = logging.getLogger("spotd.local")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m spotd_providers.local.server", description=__doc__)
    parser.add_argument("--dir", type=Path, required=True, help="the market's folder")
    parser.add_argument("--stop", action="store_true", help="end every machine and the server")
    parser.add_argument("--idle-exit", type=float, default=600.0, help="seconds without machines and calls (0: never)")
    parser.add_argument("--ready-fd", type=int, default=-1, help="a pipe to which one line is written once it serves")
    parser.add_argument("--detach", action="store_true", help="go on without a parent")
    options = parser.parse_args(arguments)
    if options.detach and os.fork():
        os._exit(0)  # the starter has no child to wait for
    folder: Path = options.dir.resolve()
    if options.stop:
        return stop(folder)
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", level=logging.WARNING)
    word = "ready"
    try:
        lock = _take_soon(folder)
        withdraw(folder)
        _serve(folder, lock, idle_exit_s=options.idle_exit, ready_fd=options.ready_fd)
        return 0
    except AlreadyServed:
        word = "already served"
        return 0
    except (BadPriceFile, ValueError, OSError) as exc:
        word = f"error: {exc}"
        print(word, file=sys.stderr)  # noqa: T201 - this is a command
        return 1
    finally:
        _say(options.ready_fd, word)


def stop(folder: Path) -> int:
    """End every machine of this market and its server; 0 if that succeeded."""
    give_up_at = time.monotonic() + _STOP_TIMEOUT_S
    while time.monotonic() < give_up_at:
        try:
            with os.fdopen(take(folder), "rb"):
                # It is not served: end what its last server left.
                withdraw(folder)
                if (folder / "market.json").exists():
                    market = LocalMarket(spec_of(folder)[0], folder, clock=clock_of(folder))
                    market.shut_down()
                    market.close()
                return 0
        except AlreadyServed:
            endpoint = find_endpoint(folder)
            if endpoint is not None:
                with contextlib.suppress(OSError, http.client.HTTPException):
                    _post_shutdown(endpoint)
            time.sleep(_PAUSE_MIN_S)
    return 1


def _take_soon(folder: Path) -> int:
    """Lock the market until this process ends, so that the next owner finds no other process in it.

    Waits for another server that is just ending, or until it is clear that it serves.

    Raises:
        AlreadyServed: another server serves it.
    """
    give_up_at = time.monotonic() + _HANDOVER_TIMEOUT_S
    while True:
        try:
            return take(folder)
        except AlreadyServed:
            if find_endpoint(folder) is not None or time.monotonic() > give_up_at:
                raise
        time.sleep(_PAUSE_MIN_S)


def _post_shutdown(endpoint: ServedEndpoint) -> None:
    parts = urlsplit(endpoint.url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=_STOP_TIMEOUT_S)
    with contextlib.closing(connection):
        connection.request("POST", "/shutdown", headers={"authorization": f"Bearer {endpoint.token}"})
        connection.getresponse().read()


def _serve(folder: Path, lock: int, *, idle_exit_s: float, ready_fd: int) -> None:
    spec, spec_hash = spec_of(folder)
    market = LocalMarket(spec, folder, clock=clock_of(folder))
    # With the protocol named, asyncio turns Nagle's algorithm off; without, every answer takes 40 ms longer.
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.bind(("127.0.0.1", 0))
    listener.listen(128)
    try:
        asyncio.run(_run(market, folder, lock, listener, spec_hash, idle_exit_s, ready_fd))
    finally:
        listener.close()
        if still_ours(folder, lock):
            market.close()
            withdraw(folder)


async def _run(
    market: LocalMarket,
    folder: Path,
    lock: int,
    listener: socket.socket,
    spec_hash: str,
    idle_exit_s: float,
    ready_fd: int,
) -> None:
    changed = asyncio.Event()
    token = announce(folder, f"http://127.0.0.1:{listener.getsockname()[1]}")
    app = MarketApp(market, token=token, spec_hash=spec_hash)
    server = uvicorn.Server(
        uvicorn.Config(
            app.app,
            http="h11",  # the same parser whatever else is installed
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            timeout_graceful_shutdown=2,
            timeout_keep_alive=75,
        )
    )

    def end() -> None:
        withdraw(folder)
        server.should_exit = True
        changed.set()

    app.changed, app.shut_down = changed.set, end
    _say(ready_fd, "ready")
    watcher = asyncio.create_task(_watch(app, changed, server, lock, idle_exit_s), name="market watcher")
    try:
        await server.serve(sockets=[listener])
    finally:
        watcher.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watcher


async def _watch(app: MarketApp, changed: asyncio.Event, server: uvicorn.Server, lock: int, idle_exit_s: float) -> None:
    """Advance the market when something is due; end a server that is not needed."""
    market = app.market
    while not server.should_exit:
        changed.clear()
        pauses = [_IDLE_PAUSE_S]
        if not still_ours(market.folder, lock):
            # The market was removed: its machines could never be found again.
            await app.on_market(market.machines.kill_all)
            server.should_exit = True
            return
        try:
            due = await app.on_market(market.advance)
            if due is not None:
                pauses.append(market.clock.real_seconds(due - market.clock.now()))
            if market.running():
                pauses.append(_WATCH_S)
        except Exception:  # noqa: BLE001 - the task's outermost loop, see below
            # The outermost loop of this task: a market that cannot act now (disk full, a process that will not die)
            # must try again, and must not die and leave its machines without an owner.
            _log.exception("market.advance_failed")
            pauses.append(1.0)
        if idle_exit_s > 0 and not market.exists_any():
            idle_s = time.monotonic() - app.last_call_s
            if idle_s >= idle_exit_s:
                server.should_exit = True
                return
            pauses.append(idle_exit_s - idle_s)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(changed.wait(), max(_PAUSE_MIN_S, min(pauses)))


def _say(ready_fd: int, word: str) -> None:
    """Print the line that the starter of the server reads; the starter may be gone by then."""
    if ready_fd >= 0:
        with contextlib.suppress(OSError):
            os.write(ready_fd, json.dumps(word).encode() + b"\n")
            os.close(ready_fd)


if __name__ == "__main__":
    sys.exit(main())
