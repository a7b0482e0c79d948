"""The start of the market's server: detached, so that it outlives its starter."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Final

from spotd_providers.contract.errors import Unavailable
from spotd_providers.kit.files import write_atomically
from spotd_providers.local.hosts import HostClock, measure, read_clock, write_clock
from spotd_providers.local.server.files import ServedEndpoint, find_endpoint
from spotd_providers.local.settings import LocalSettings

START_TIMEOUT_S: Final = 20.0
_CLOCK_DRIFT_REAL_S: Final = 2.0
_PASSED_ON: Final = ("PATH", "HOME", "LANG", "TMPDIR", "PYTHONPATH", "VIRTUAL_ENV", "LD_LIBRARY_PATH")
"""No other variable of ours reaches the server, since its machines must not see our secrets."""


def spec_text(settings: LocalSettings) -> str:
    """Return the market's specification as its server reads it."""
    return settings.market().model_dump_json()


def start_server(folder: Path, settings: LocalSettings, clock: HostClock) -> ServedEndpoint:
    """Start a server of this market unless one runs, and wait until it serves.

    Raises:
        Unavailable: it does not come up; the message says why.
    """
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    write_atomically(folder / "spec.json", spec_text(settings))
    _agree_on_time(folder / "clock.json", clock)
    reader, writer = os.pipe()
    try:
        try:
            _spawn(folder, writer, idle_exit=settings.idle_exit)
        finally:
            os.close(writer)
        word = _one_line(reader)
    except subprocess.TimeoutExpired as exc:
        raise Unavailable(f"the local market does not start within {START_TIMEOUT_S:.0f} s") from exc
    finally:
        os.close(reader)
    endpoint = find_endpoint(folder)
    if word.startswith("error: ") or endpoint is None:
        raise Unavailable(f"the local market does not start: {word or 'no word from it'} (see {folder / 'server.log'})")
    return endpoint


def clocks_agree(ours: HostClock, theirs: HostClock) -> bool:
    """Whether two clocks show the same instant, as far as a couple of real seconds."""
    an_hour = timedelta(hours=1)
    return (
        abs(ours.real_seconds(an_hour) / theirs.real_seconds(an_hour) - 1) < 1e-6
        and abs(ours.real_seconds(ours.now() - theirs.now())) < _CLOCK_DRIFT_REAL_S
    )


def _agree_on_time(file: Path, clock: HostClock) -> None:
    """Give the server this clock; a file that agrees with it already is left alone."""
    if file.exists():
        try:
            if clocks_agree(clock, read_clock(file)):
                return
        except ValueError:
            pass  # unreadable: ours replaces it
    write_clock(file, measure(clock))


def _spawn(folder: Path, ready: int, *, idle_exit: timedelta) -> None:
    with (folder / "server.log").open("ab") as log:
        # It detaches itself, so what we wait for here is only its first process.
        subprocess.run(
            [
                sys.executable,
                "-P",
                "-m",
                "spotd_providers.local.server",
                "--detach",
                "--dir",
                str(folder),
                "--ready-fd",
                str(ready),
                "--idle-exit",
                str(idle_exit.total_seconds()),
            ],
            cwd=folder,
            env={name: os.environ[name] for name in _PASSED_ON if name in os.environ},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            pass_fds=[ready],
            start_new_session=True,
            check=False,
            timeout=START_TIMEOUT_S,
        )


def _one_line(reader: int) -> str:
    """Return the server's first line; empty if it died or wrote nothing in time."""
    text = b""
    while not text.endswith(b"\n"):
        if not select.select([reader], [], [], START_TIMEOUT_S)[0]:
            return ""
        part = os.read(reader, 4096)
        if not part:
            return ""
        text += part
    word = json.loads(text)
    return word if isinstance(word, str) else ""
