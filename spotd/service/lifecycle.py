"""Signals: stop in an orderly way, or take over a changed config.

On SIGTERM or SIGINT nothing new is bought, calls under way are finished and committed within a bound, and every machine
is left running: the next start adopts it. A second signal ends the waiting. On SIGHUP the config is read again; one
that cannot be used changes nothing and is reported.
"""

from __future__ import annotations

import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Final

import anyio
import anyio.abc

from spotd.daemon.commits import PolicyHolder
from spotd.daemon.control_loop import ControlLoop
from spotd.daemon.errors import BadConfig
from spotd.daemon.executor import Executor
from spotd.daemon.settings import Settings, changes
from spotd.service.systemd import SystemdNotifier
from spotd_providers.contract.provider import Logger

DRAIN_S: Final = 25.0
LAST_CYCLE_S: Final = 5.0
SHUTTING_DOWN: Final = "spotd is shutting down"
BEGINS_ANEW: Final = "the computer's clock was set, and spotd begins anew with the new date"

Reload = Callable[[], Settings]


@asynccontextmanager
async def signals() -> AsyncIterator[AsyncIterator[signal.Signals]]:
    """Yield the signals that this process receives, one after another."""
    with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT, signal.SIGHUP) as received:
        yield received


class Lifecycle:
    """Reacts to signals until the daemon is to end."""

    def __init__(
        self,
        *,
        settings: Settings,
        load: Reload,
        apply: Callable[[Settings], None],
        policy: PolicyHolder,
        control_loop: ControlLoop,
        executor: Executor,
        notify: SystemdNotifier,
        log: Logger,
    ) -> None:
        self._settings = settings
        self._load = load
        self._apply = apply
        self._policy = policy
        self._control_loop = control_loop
        self._executor = executor
        self._notify = notify
        self._log = log
        self._running: anyio.CancelScope | None = None
        self._stopping = False
        self.begins_anew = False
        """The run was ended by `end_when`."""

    async def end_when(self, event: Callable[[], Awaitable[None]]) -> None:
        """Finish calls under way after the event, and let `run` return, for the daemon to start again."""
        await event()
        self._policy.paused = BEGINS_ANEW
        await self._drain()
        if self._running is not None and not self._stopping:
            self.begins_anew = True
            self._running.cancel()

    async def run(self, received: AsyncIterator[signal.Signals]) -> None:
        """Wait until the daemon may be taken apart."""
        async with anyio.create_task_group() as group:
            self._running = group.cancel_scope
            async for number in received:
                if number is signal.SIGHUP:
                    self.reload()
                elif self._stopping:
                    self._log.warning("daemon.stopping_at_once", signal=number.name)
                    group.cancel_scope.cancel()
                    return
                else:
                    self._stopping = True
                    group.start_soon(self._stop, number, group.cancel_scope, name="stop")

    async def _stop(self, number: signal.Signals, scope: anyio.CancelScope) -> None:
        self._log.info("daemon.stopping", signal=number.name, calls=self._executor.busy)
        await self.drain()
        scope.cancel()

    async def drain(self) -> None:
        """Buy nothing new; finish and commit calls under way, or the next start finds them unknown."""
        self._policy.paused = SHUTTING_DOWN
        self._notify.stopping()
        await self._drain()

    async def _drain(self) -> None:
        self._control_loop.only_reconciles = True
        await self._control_loop.whole_cycle(seconds=LAST_CYCLE_S)
        done = await self._executor.drain(seconds=DRAIN_S)
        state = self._control_loop.state
        machines = 0 if state is None else sum(1 for a in state.world.attempts.values() if a.machine.may_compute)
        self._log.info("daemon.drained", complete=done, machines_left_running=machines)

    def reload(self) -> None:
        """Put the config's limits in force; where that fails the old ones stay and the log has the reason."""
        self._notify.reloading()
        try:
            fresh = self._load()
        except BadConfig as exc:
            self._log.error("config.refused", error=str(exc), kept="the config that was in force")
        else:
            at_once, restart = changes(self._settings, fresh)
            if fresh.install != self._settings.install:
                # Machines carry the label: it stays for as long as this process runs.
                kept = self._settings.install
                self._log.warning("config.install_kept", kept=kept, configured=fresh.install)
                fresh = replace(fresh, install=kept)
            self._apply(fresh)
            self._settings = fresh
            self._log.info("config.reloaded", changed=at_once, needs_restart=restart)
        self._notify.ready()
