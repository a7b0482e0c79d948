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


def _as_awaitable(call: Callable[Concatenate[Daemon, P], T]) -> Callable[Concatenate[AsyncDaemon, P], Awaitable[T]]:
    """Return a call of `Daemon` as one that is awaited."""

    @wraps(call)
    def run(self: AsyncDaemon, /, *args: P.args, **given: P.kwargs) -> Awaitable[T]:
        return asyncio.to_thread(call, self.daemon, *args, **given)

    return run


def _as_stream(
    call: Callable[Concatenate[Daemon, P], Iterator[T]],
) -> Callable[Concatenate[AsyncDaemon, P], AsyncGenerator[T, None]]:
    """Return a call of `Daemon` that yields as one that yields in an `async for`.

    A loop that is left early should close it (`contextlib.aclosing`). Its thread then ends when the daemon next writes
    something, which it does every ten seconds.
    """

    @wraps(call)
    async def run(self: AsyncDaemon, /, *args: P.args, **given: P.kwargs) -> AsyncGenerator[T, None]:
        daemon = Daemon(self._socket)  # its own, since it is what is closed
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
        self._socket = socket
        self.daemon = Daemon(socket)

    status = _as_awaitable(Daemon.status)
    plan = _as_awaitable(Daemon.plan)
    has_code = _as_awaitable(Daemon.has_code)
    put_code = _as_awaitable(Daemon.put_code)
    datasets = _as_awaitable(Daemon.datasets)
    has_data_chunk = _as_awaitable(Daemon.has_data_chunk)
    put_data_chunk = _as_awaitable(Daemon.put_data_chunk)
    put_data_part = _as_awaitable(Daemon.put_data_part)
    store_dataset = _as_awaitable(Daemon.store_dataset)
    name_dataset = _as_awaitable(Daemon.name_dataset)
    remove_dataset = _as_awaitable(Daemon.remove_dataset)
    submit = _as_awaitable(Daemon.submit)
    jobs = _as_awaitable(Daemon.jobs)
    job = _as_awaitable(Daemon.job)
    why = _as_awaitable(Daemon.why)
    gpu_history = _as_awaitable(Daemon.gpu_history)
    shell = _as_awaitable(Daemon.shell)
    port = _as_stream(Daemon.port)
    logs = _as_stream(Daemon.logs)
    cancel = _as_awaitable(Daemon.cancel)
    retry = _as_awaitable(Daemon.retry)
    set_budget = _as_awaitable(Daemon.set_budget)
    set_ceiling = _as_awaitable(Daemon.set_ceiling)
    forget = _as_awaitable(Daemon.forget)
    prices = _as_awaitable(Daemon.prices)
    history = _as_awaitable(Daemon.history)
    import_offers = _as_awaitable(Daemon.import_offers)
    import_prices = _as_awaitable(Daemon.import_prices)
    events = _as_stream(Daemon.events)
    cost = _as_awaitable(Daemon.cost)
    cost_by = _as_awaitable(Daemon.cost_by)
    calibration = _as_awaitable(Daemon.calibration)
    checkpoints = _as_awaitable(Daemon.checkpoints)
    verify_checkpoints = _as_stream(Daemon.verify_checkpoints)
    pin_checkpoints = _as_awaitable(Daemon.pin_checkpoints)
    remove_checkpoints = _as_awaitable(Daemon.remove_checkpoints)
    files = _as_awaitable(Daemon.files)
    read_file = _as_stream(Daemon.read_file)
    read_files = _as_stream(Daemon.read_files)
    providers = _as_awaitable(Daemon.providers)
    hosts = _as_awaitable(Daemon.hosts)
    forget_host = _as_awaitable(Daemon.forget_host)
    test_notifications = _as_awaitable(Daemon.test_notifications)
    doctor = _as_awaitable(Daemon.doctor)
    reconcile = _as_awaitable(Daemon.reconcile)
    adoption = _as_awaitable(Daemon.adoption)
    adopt = _as_awaitable(Daemon.adopt)
