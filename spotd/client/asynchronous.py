"""The daemon's API for programs on asyncio: the calls of `Daemon`, each in a thread, so that no loop waits for one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial, wraps
from pathlib import Path
from typing import Concatenate, ParamSpec, TypeVar

from spotd.client.daemon import Daemon

P = ParamSpec("P")
T = TypeVar("T")


def _awaited(call: Callable[Concatenate[Daemon, P], T]) -> Callable[Concatenate[AsyncDaemon, P], Awaitable[T]]:
    """Return a call of `Daemon` as one that is awaited."""

    @wraps(call)
    def run(self: AsyncDaemon, /, *args: P.args, **given: P.kwargs) -> Awaitable[T]:
        return asyncio.to_thread(call, self.daemon, *args, **given)

    return run


def _streamed(
    call: Callable[Concatenate[Daemon, P], Iterator[T]],
) -> Callable[Concatenate[AsyncDaemon, P], AsyncGenerator[T, None]]:
    """Return a call of `Daemon` that yields as one that yields in an `async for`.

    A loop that is left early should close it (`contextlib.aclosing`). Its thread then ends when the daemon next writes
    something, which it does every ten seconds.
    """

    @wraps(call)
    async def run(self: AsyncDaemon, /, *args: P.args, **given: P.kwargs) -> AsyncGenerator[T, None]:
        daemon = Daemon(self.daemon.socket)  # its own, since it is what is closed
        records = call(daemon, *args, **given)
        thread = ThreadPoolExecutor(1, thread_name_prefix=call.__name__)
        step = partial(next, records, None)
        try:
            while (record := await asyncio.get_running_loop().run_in_executor(thread, step)) is not None:
                yield record
        finally:
            daemon.close_streams()
            thread.submit(getattr(records, "close", lambda: None))  # after the step that may wait in there now
            thread.shutdown(wait=False)

    return run


class AsyncDaemon:
    """One daemon, found by its socket. Every call may raise `DaemonUnreachable` or `DaemonRefused`."""

    def __init__(self, socket: Path | None = None) -> None:
        self.daemon = Daemon(socket)

    status = _awaited(Daemon.status)
    plan = _awaited(Daemon.plan)
    has_code = _awaited(Daemon.has_code)
    put_code = _awaited(Daemon.put_code)
    datasets = _awaited(Daemon.datasets)
    has_data_chunk = _awaited(Daemon.has_data_chunk)
    put_data_chunk = _awaited(Daemon.put_data_chunk)
    put_data_part = _awaited(Daemon.put_data_part)
    store_dataset = _awaited(Daemon.store_dataset)
    name_dataset = _awaited(Daemon.name_dataset)
    remove_dataset = _awaited(Daemon.remove_dataset)
    submit = _awaited(Daemon.submit)
    jobs = _awaited(Daemon.jobs)
    job = _awaited(Daemon.job)
    why = _awaited(Daemon.why)
    gpu_history = _awaited(Daemon.gpu_history)
    shell = _awaited(Daemon.shell)
    logs = _streamed(Daemon.logs)
    cancel = _awaited(Daemon.cancel)
    retry = _awaited(Daemon.retry)
    set_budget = _awaited(Daemon.set_budget)
    set_ceiling = _awaited(Daemon.set_ceiling)
    forget = _awaited(Daemon.forget)
    prices = _awaited(Daemon.prices)
    history = _awaited(Daemon.history)
    events = _streamed(Daemon.events)
    cost = _awaited(Daemon.cost)
    cost_by = _awaited(Daemon.cost_by)
    calibration = _awaited(Daemon.calibration)
    checkpoints = _awaited(Daemon.checkpoints)
    verify_checkpoints = _streamed(Daemon.verify_checkpoints)
    pin_checkpoints = _awaited(Daemon.pin_checkpoints)
    remove_checkpoints = _awaited(Daemon.remove_checkpoints)
    files = _awaited(Daemon.files)
    read_file = _streamed(Daemon.read_file)
    read_files = _streamed(Daemon.read_files)
    providers = _awaited(Daemon.providers)
    hosts = _awaited(Daemon.hosts)
    forget_host = _awaited(Daemon.forget_host)
    test_notifications = _awaited(Daemon.test_notifications)
    doctor = _awaited(Daemon.doctor)
    reconcile = _awaited(Daemon.reconcile)
