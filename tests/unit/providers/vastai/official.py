"""The official `vastai` command, installed once into a cache of its own.

A test asks it for much, and it imports for most of a second each time: so each command is a fork of one process that
has imported the client, and runs the very script that was installed.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, Self

from tests.fakes.official_clients import VASTAI, environment_with

_CALL_SECONDS_MAX: Final = 60
_FORKS: Final = """
import json, os, runpy, sys
import vastai.cli.main
for line in sys.stdin:
    argv, out, err = json.loads(line)
    child = os.fork()
    if not child:
        for number, path in ((0, os.devnull), (1, out), (2, err)):
            os.dup2(os.open(path, os.O_RDWR | os.O_CREAT, 0o600), number)
        sys.stdin = open(0)
        sys.argv = argv
        runpy.run_path(argv[0], run_name="__main__")
        sys.exit()
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


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
        self._home = home
        environment = {
            "HOME": str(home),
            "PATH": os.environ.get("PATH", os.defpath),
            "LANG": "C.UTF-8",
            "VASTAI_NO_UPDATE_CHECK": "1",
        }
        python = command.with_name("python")
        self._forks = subprocess.Popen(
            [str(python), "-c", _FORKS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._forks.kill()
        self._forks.communicate()

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
        command = [*self._start, *words]
        out, err = self._home / "stdout", self._home / "stderr"
        for path in (out, err):
            path.unlink(missing_ok=True)
        asked, told = self._forks.stdin, self._forks.stdout
        assert asked is not None
        assert told is not None
        asked.write(json.dumps([command, str(out), str(err)]).encode() + b"\n")
        asked.flush()
        if not select.select([told], [], [], _CALL_SECONDS_MAX)[0]:
            raise subprocess.TimeoutExpired(command, _CALL_SECONDS_MAX)
        code = int(told.readline())
        return subprocess.CompletedProcess(command, code, out.read_text(), err.read_text())

    def tells(self, *words: str) -> Any:
        """The JSON that the command prints with `--raw`."""
        return json.loads(self.says("--raw", *words))
