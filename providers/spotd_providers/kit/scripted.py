"""Machines without an API: each call is a script of ours, run by a shell of the other side (`kit/ssh.py`).

This is what the adapters of own hosts and of Slurm share beyond the template.
"""

from __future__ import annotations

import shlex
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from datetime import UTC, datetime
from typing import Any, Final

from spotd_providers.contract.provider import Provider, Services
from spotd_providers.contract.values import CheckLine, LaunchRequest
from spotd_providers.kit.calls import clock_line, rejected
from spotd_providers.kit.ssh import CHANGES, Lines, LocalShell, SshLink, printer
from spotd_providers.kit.template import require_launchable
from spotd_providers.kit.vm_boot import DockerRun, boot_script

SCRIPT_BYTES_MAX: Final = 32_768
KEY_CHARS_MAX: Final = 64
LAUNCH_WITHIN_S: Final = 60
"""Of the other side's own uptime: a launch that arrives later starts nothing."""
POLLS: Final = frozenset({"probe", "offers", "list"})
"""Operations that are asked again and again, so that one which fails need not be waited for."""
_LAST_S: Final = 253_402_300_000
"""The end of the last year that a calendar has."""
_ALONE: Final = DockerRun()
Opener = Callable[[Any, Services], AbstractAsyncContextManager[Provider]]


async def operate(shell: SshLink | LocalShell, operation: str, script: str, *, timeout_s: float) -> Lines:
    """Run one operation of a library of shell functions and return the lines of its answer.

    Raises:
        Unavailable, AuthFailed, RateLimited: it certainly did not run.
        AnswerLost: it may have run.
    """
    is_poll, is_read = operation in POLLS, operation not in CHANGES
    command = f"/bin/sh -s {operation}"
    return await shell.ask(command, script, timeout_s=timeout_s, patient=is_poll, repeatable=is_read)


def script_of(library: str, *words: object, files: Mapping[str, str]) -> str:
    """Return what a shell there runs: the library, what a launch writes, and one call of it."""
    call = " ".join(shlex.quote(str(word)) for word in words)
    return f"{library}{''.join(printer(name, text) for name, text in files.items())}spotd_run {call}\n"


def job_script(
    request: LaunchRequest,
    *,
    who: str,
    extra: tuple[str, ...],
    container: str = "none",
    docker: DockerRun = _ALONE,
) -> str:
    """Build what a machine runs; its end is a mark that its supervisor watches for.

    Raises:
        RequestRejected: it can not be asked for.
    """
    require_launchable(request, who=who, extra=extra, script_bytes_max=SCRIPT_BYTES_MAX, key_chars_max=KEY_CHARS_MAX)
    try:
        return boot_script(
            image=request.image,
            start_script=request.start_script,
            container=container,
            has_gpu=False,
            bytes_max=2 * SCRIPT_BYTES_MAX,
            end=": >over",
            docker=docker,
        )
    except ValueError as exc:
        raise rejected(who, "image" if container == "docker" else "start_script", str(exc)) from exc


def clock_finding(epoch_s: int, services: Services, *, who: str) -> CheckLine:
    """Compare this computer's clock with what the other side's shows, in seconds since 1970."""
    skew = abs(datetime.fromtimestamp(min(epoch_s, _LAST_S), UTC) - services.clock.now())
    return clock_line(skew, who=who, hint=f"synchronise the clock of {who}: stores refuse a wrong one")


def shell_opener(
    kind: Callable[[Any, Services], Any],
) -> Callable[[Any, Services], AbstractAsyncContextManager[Provider]]:
    """Return what opens a provider that ends its connections itself (`aclose`)."""

    @asynccontextmanager
    async def enter(settings: Any, services: Services) -> AsyncIterator[Provider]:
        provider = kind(settings, services)
        try:
            yield provider
        finally:
            await provider.aclose()

    return enter
