"""The official `vastai` command, installed once into a cache of its own."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from tests.fakes.official_clients import VASTAI, environment_with

_CALL_SECONDS_MAX: Final = 60


def installed_client() -> Path:
    """The `vastai` command of this version.

    Raises:
        CannotInstall: no package index answers, or it has no such version.
    """
    return environment_with(VASTAI) / "bin" / "vastai"


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
