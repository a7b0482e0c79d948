"""A private daemon in a temporary folder, and its end without leftovers, whatever happens."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from spotd.client.daemon import Daemon
from spotd.client.errors import DaemonUnreachable
from spotd.demo.script import EVENING, TIME_SCALE, config

READY_TIMEOUT_S: Final = 30.0
STOP_TIMEOUT_S: Final = 20.0


class DemoFailed(Exception):
    """A failure of the demo; the message names the cause and where to search."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """A running daemon of the demo's own.

    Attributes:
        folder: everything the demo makes is below it.
    """

    folder: Path
    daemon: Daemon
    process: subprocess.Popen[bytes]

    @property
    def log(self) -> Path:
        return self.folder / "spotd.log"

    @property
    def market(self) -> Path:
        return market_folder(self.folder)

    def check_alive(self) -> None:
        """Raise DemoFailed when the daemon has ended by itself."""
        code = self.process.poll()
        if code is not None:
            raise DemoFailed(f"the demo's daemon ended with code {code}; its log is {self.log}")


def market_folder(folder: Path) -> Path:
    return folder / "market"


@contextmanager
def session(seed: int, *, keep: bool) -> Iterator[Session]:
    """Run a daemon over a market of its own. At the end both are gone, and their files too unless `keep`."""
    folder = Path(tempfile.mkdtemp(prefix="spotd-demo-")).resolve()
    process: subprocess.Popen[bytes] | None = None
    try:
        process = _start(folder, seed)
        found = Session(folder=folder, daemon=Daemon(folder / "run" / "spotd.sock"), process=process)
        _wait_until_ready(found)
        yield found
    finally:
        if process is not None:
            _stop(process)
        close_market(folder)
        if not keep:
            shutil.rmtree(folder, ignore_errors=True)


def _start(folder: Path, seed: int) -> subprocess.Popen[bytes]:
    for name in ("run", "state"):
        (folder / name).mkdir(mode=0o700)
    market = market_folder(folder)
    text = config(folder, seed).replace("[providers.local]\n", f'[providers.local]\ndirectory = "{market}"\n', 1)
    (folder / "config.toml").write_text(text, encoding="utf-8")
    clock = {"real0": time.time(), "virtual0": EVENING.isoformat(), "scale": TIME_SCALE}
    (folder / "state" / "clock.json").write_text(json.dumps(clock), encoding="utf-8")
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("SPOTD_")},
        "STATE_DIRECTORY": str(folder / "state"),
        "RUNTIME_DIRECTORY": str(folder / "run"),
    }
    command = [sys.executable, "-m", "spotd", "run", "--config", str(folder / "config.toml")]
    with (folder / "spotd.log").open("wb") as log:
        return subprocess.Popen(
            command, env=environment, stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True
        )


def _wait_until_ready(found: Session) -> None:
    deadline = time.monotonic() + READY_TIMEOUT_S
    while True:
        found.check_alive()
        try:
            found.daemon.status()
        except DaemonUnreachable:
            if time.monotonic() > deadline:
                raise DemoFailed(f"the demo's daemon does not answer; its log is {found.log}") from None
            time.sleep(0.05)
        else:
            return


def _stop(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def close_market(folder: Path) -> None:
    """Stop the market's server and every machine on it."""
    market = market_folder(folder)
    if market.is_dir():
        subprocess.run(
            [sys.executable, "-m", "spotd_providers.local.server", "--dir", str(market), "--stop"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=60,
            check=False,
        )
