"""The metrics of one daemon, put together."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from spotd.api.handlers.context import HandlerContext
from spotd.api.handlers.environment_checks import row_of
from spotd.api.schemas.health import CheckResponse
from spotd.daemon.controllers import Controller
from spotd.daemon.threads import Threads
from spotd.service.metrics.exposition import text_of
from spotd.service.metrics.listener import MetricsListener
from spotd.service.metrics.reading import MetricsReader
from spotd_providers.contract.provider import Logger


def make_listener(
    host: str, port: int, context: HandlerContext, controllers: Sequence[Controller], *, log: Logger
) -> MetricsListener:
    """Return what serves this daemon's figures, with a line in `doctor`; they are computed in a thread of their own."""
    reader, threads = MetricsReader(context, controllers), Threads(inline=context.inline)

    async def compute() -> bytes:
        return await threads.run(partial(text_of, await reader.read()))

    listener = MetricsListener(host, port, compute, log=log)

    def findings() -> list[CheckResponse]:
        error = listener.last_error
        hint = "see [metrics] in the config; everything else goes on without them" if error else ""
        return [row_of("daemon", "metrics", error or f"at {listener.where}", ok=not error, hint=hint)]

    context.findings.append(findings)
    return listener
