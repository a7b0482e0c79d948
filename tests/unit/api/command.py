"""`spotctl` run in this process."""

from __future__ import annotations

import io
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from spotd.cli.client import spotctl as commands
from spotd.cli.entry import run


@dataclass
class Result:
    """How one command line ended."""

    code: int
    out: str
    err: str


def spotctl(monkeypatch: pytest.MonkeyPatch, socket: Path | None, *arguments: str, stdin: str = "") -> Result:
    """The command line, against the daemon at a socket or at the one of the environment."""
    out, err = io.BytesIO(), io.StringIO()
    with monkeypatch.context() as patch:
        if socket is not None:
            patch.setenv("SPOTD_SOCKET", str(socket))
        patch.setenv("TZ", "UTC")
        patch.setenv("COLUMNS", "120")
        patch.setattr(sys, "stdout", io.TextIOWrapper(out, encoding="utf-8", write_through=True))
        patch.setattr(sys, "stderr", err)
        patch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin.encode()), encoding="utf-8"))
        code = run(commands, "spotctl", [str(argument) for argument in arguments])
        written = out.getvalue().decode()
    return Result(code, written, err.getvalue())
