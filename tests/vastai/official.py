"""The official `vastai` command, installed once into a cache of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import venv
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import platformdirs

VERSION: Final = "1.9.1"
_INSTALL_SECONDS_MAX: Final = 240
_CALL_SECONDS_MAX: Final = 60


class CannotInstall(Exception):
    """The official client is not here and cannot be had; the message says why."""


def installed_client() -> Path:
    """The `vastai` command of this version. It drags in dozens of packages, hence its own environment.

    Raises:
        CannotInstall: no package index answers, or it has no such version.
    """
    cache = Path(os.environ.get("SPOTD_TEST_CACHE") or platformdirs.user_cache_dir("spotd-tests"))
    folder = cache / f"vastai-{VERSION}-py{sys.version_info.major}.{sys.version_info.minor}"
    command, ready = folder / "bin" / "vastai", folder / "ready"
    if ready.exists() and command.exists():
        return command
    try:
        venv.create(folder, with_pip=True, clear=True)
        done = subprocess.run(
            [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", f"vastai=={VERSION}"],
            capture_output=True,
            text=True,
            timeout=_INSTALL_SECONDS_MAX,
            check=False,
        )
    except subprocess.TimeoutExpired as exc:
        raise CannotInstall(f"installing vastai {VERSION} took longer than {_INSTALL_SECONDS_MAX} s") from exc
    except (OSError, subprocess.CalledProcessError) as exc:
        raise CannotInstall(f"an environment for vastai {VERSION} cannot be made: {type(exc).__name__}") from exc
    if done.returncode:
        raise CannotInstall(f"vastai {VERSION} cannot be installed: {done.stderr.strip()[-300:]}")
    ready.touch()
    return command


class OfficialClient:
    """`vastai` pointed at a fake. Its home is a folder of the test, so no real key is ever read."""

    def __init__(self, command: Path, url: str, key: str, home: Path) -> None:
        home.mkdir(parents=True, exist_ok=True)
        self._start = [str(command), "--url", url, "--api-key", key, "--no-color", "--full"]
        self._environment = {
            "HOME": str(home),
            "PATH": os.environ.get("PATH", os.defpath),
            "LANG": "C.UTF-8",
            "VASTAI_NO_UPDATE_CHECK": "1",
        }

    def says(self, *words: str) -> str:
        """What the command prints; a failure is the test's failure."""
        done = self._run(words)
        # The client exits with 1 after some successes ("return True" becomes its exit code): its words decide.
        assert "Traceback" not in done.stderr, done.stderr
        assert "Failed with error" not in done.stderr, done.stderr
        return done.stdout

    def fails(self, *words: str) -> str:
        """What the command complains about."""
        done = self._run(words)
        assert "Traceback" not in done.stderr, done.stderr
        return done.stderr + done.stdout

    def _run(self, words: Sequence[str]) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*self._start, *words],
            capture_output=True,
            text=True,
            timeout=_CALL_SECONDS_MAX,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            check=False,
        )

    def tells(self, *words: str) -> Any:
        """The JSON that the command prints with `--raw`."""
        return json.loads(self.says("--raw", *words))
