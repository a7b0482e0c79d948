"""A port of a job's machine, or a shell on it: where its provider gives a way, and as long as the job has it.

The way into a machine is the daemon's (a kubeconfig, spotd's own ssh key); `spotctl` listens on this computer and hands
each connection to a socket that only this user can open. The daemon itself listens to no port.
"""

from __future__ import annotations

import secrets
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import anyio
from anyio.abc import SocketStream

from spotd import paths
from spotd.api.handlers.context import DaemonAnswers, HandlerContext
from spotd.api.responses import ApiUnavailable, StateConflict
from spotd.api.schemas.jobs import PortResponse, ShellResponse
from spotd.core.domain.attempts import Attempt
from spotd.core.domain.intents import JobId
from spotd.daemon.market.guarded import GuardedProvider, guarded
from spotd_providers.contract.errors import ProviderError
from spotd_providers.contract.provider import GivesShell, OpensPorts, PortConnection
from spotd_providers.contract.values import InstanceRef, Power

CONNECTIONS_MAX: Final = 64
"""At a time, of one forwarded port: a page opens a dozen."""
CHECK_EVERY_S: Final = 1.0
"""Between two checks whether the job still has the machine."""
PIECE: Final = 32 * 1024
CLOSE_S: Final = 6.0
Put = Callable[[PortResponse], Awaitable[None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """The machine that a job has now, and its provider."""

    job: JobId
    attempt: Attempt
    ref: InstanceRef
    provider: GuardedProvider


class PortHandlers(DaemonAnswers):
    """Leads to what a job's machine serves."""

    async def _place(self, ref: str) -> _Place:
        """Return the machine of a job.

        Raises:
            StateConflict: it has none now.
            ApiUnavailable: its provider is not open.
        """
        context = self._context
        job_id = await context.find(ref)
        attempt = context.world().counting_attempt(job_id)
        if attempt is None or attempt.ref is None:
            raise StateConflict(f"job {ref} has no machine now", hint=f"spotctl why {ref}")
        entry = context.providers.get(attempt.provider)
        if entry is None or entry.provider is None:
            raise ApiUnavailable(f"{attempt.provider} is not open now", hint="spotctl doctor")
        provider = guarded(entry.provider, clock=context.clock, log=context.log)
        return _Place(job=job_id, attempt=attempt, ref=attempt.ref, provider=provider)

    async def address(self, ref: str) -> ShellResponse:
        """Return where the machine gives a shell; spotd itself does not connect there, and holds no key for it.

        Raises:
            StateConflict: the job has no machine now, or its provider gives no shell.
            ApiUnavailable: the provider does not state it now.
        """
        place = await self._place(ref)
        provider = place.provider
        if not _has(provider, Power.SHELL) or not isinstance(provider, GivesShell):
            raise StateConflict(_why_not(provider, Power.SHELL, "gives no shell"), hint=f"spotctl logs -f {ref}")
        try:
            found = await provider.shell(place.ref)
        except ProviderError as exc:
            raise ApiUnavailable(str(exc) or type(exc).__name__, hint="try again in a minute") from exc
        ports: Literal["provider", "ssh", "none"] = (
            "provider" if _has(provider, Power.PORTS) else "none" if found.no_ports else "ssh"
        )
        return ShellResponse(
            job_id=place.job, attempt=place.attempt.id.number, host=found.host, port=found.port, user=found.user,
            command=list(found.command), ports=ports, no_ports=found.no_ports,
        )  # fmt: skip

    async def require(self, ref: str, port: int) -> Callable[[Put], Awaitable[None]]:
        """Return what serves a port of the machine, once a first connection proved that something listens there.

        Raises:
            StateConflict: the job has no machine now, or its provider leads to no ports.
            ApiUnavailable: nothing answers at that port now.
        """
        place = await self._place(ref)
        provider = place.provider
        if not _has(provider, Power.PORTS) or not isinstance(provider, OpensPorts):
            raise StateConflict(_why_not(provider, Power.PORTS, "leads to no ports"), hint=f"spotctl logs -f {ref}")
        try:
            first = await provider.open_port(place.ref, port)
        except ProviderError as exc:
            raise ApiUnavailable(str(exc) or type(exc).__name__, hint=f"spotctl logs -f {ref}") from exc
        await first.aclose()
        return lambda put: _Door(self._context, place, port).serve(put)


def _has(provider: GuardedProvider, power: Power) -> bool:
    found = provider.capabilities.get(power)
    return found is not None and found.available


def _why_not(provider: GuardedProvider, power: Power, words: str) -> str:
    found = provider.capabilities.get(power)
    return (found.reason if found is not None else "") or f"{provider.name} {words}"


class _Door:
    """The socket of one forwarded port."""

    def __init__(self, context: HandlerContext, place: _Place, port: int) -> None:
        self._context = context
        self._place = place
        self._port = port
        self._connections = anyio.Semaphore(CONNECTIONS_MAX)

    async def serve(self, put: Put) -> None:
        """Serve until the job has another machine, or none."""
        number = self._place.attempt.id.number
        async with _private_folder() as folder:
            path = folder / secrets.token_hex(8)
            async with (
                await anyio.create_unix_listener(path, mode=0o600) as listener,
                anyio.create_task_group() as group,
            ):
                group.start_soon(listener.serve, self._lead, name="forwarded port")
                await put(PortResponse(kind="open", socket=str(path), attempt=number, text=""))
                reason = await self._end_of_use()
                group.cancel_scope.cancel()
        await put(PortResponse(kind="end", socket="", attempt=number, text=reason))

    async def _end_of_use(self) -> str:
        """Wait until the machine is not the job's any more, and return why."""
        while True:
            now = self._context.world().counting_attempt(self._place.job)
            if now is None or now.id != self._place.attempt.id:
                break
            await anyio.sleep(CHECK_EVERY_S)
        return "the job has left this machine" if now is None else f"the job is on another machine: {now.provider}"

    async def _lead(self, near: SocketStream) -> None:
        async with near, self._connections:
            provider = self._place.provider
            if not isinstance(provider, OpensPorts):
                return
            try:
                far = await provider.open_port(self._place.ref, self._port)
            except ProviderError as exc:
                self._context.log.info("port.refused", job=self._place.job, port=self._port, reason=str(exc))
                return
            try:
                async with anyio.create_task_group() as group:
                    group.start_soon(_send, near, far, name="to the machine")
                    await _receive(far, near)
                    group.cancel_scope.cancel()
            finally:
                with anyio.move_on_after(CLOSE_S, shield=True):
                    await _quietly(far.aclose)


async def _send(near: SocketStream, far: PortConnection) -> None:
    async def all_of_it() -> None:
        async for data in near:
            await far.send(data)
        await far.send_eof()

    await _quietly(all_of_it)


async def _receive(far: PortConnection, near: SocketStream) -> None:
    async def all_of_it() -> None:
        while data := await far.receive():
            for at in range(0, len(data), PIECE):
                await near.send(data[at : at + PIECE])

    await _quietly(all_of_it)


async def _quietly(call: Callable[[], Awaitable[Any]]) -> None:
    """Let a connection end however it ends: what a plugin raises here concerns this connection alone."""
    with suppress(Exception):  # either side may go at any time, and the other one sees the end
        await call()


@asynccontextmanager
async def _private_folder() -> AsyncIterator[Path]:
    """Make a folder that only this user may enter, beside the daemon's own socket."""
    beside = paths.socket_path().parent
    with tempfile.TemporaryDirectory(prefix="port-", dir=beside if beside.is_dir() else None) as folder:
        yield Path(folder)
