"""A daemon's API with a test backend, and `spotctl` run against it in this process."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import pytest

from spotd.cli.client import spotctl
from spotd.cli.entry import run
from tests.unit.api.fake import FakeBackend
from tests.unit.api.serving import Served, served


@dataclass
class Result:
    """How one command line ended."""

    code: int
    out: str
    err: str


@dataclass
class Ctl:
    """`spotctl` against one daemon."""

    monkeypatch: pytest.MonkeyPatch
    place: Served
    environ: Mapping[str, str] = field(default_factory=dict)

    @property
    def backend(self) -> FakeBackend:
        return self.place.backend

    def __call__(self, *arguments: str, stdin: str = "") -> Result:
        out, err = io.BytesIO(), io.StringIO()
        with self.monkeypatch.context() as patch:
            patch.setattr(sys, "stdout", io.TextIOWrapper(out, encoding="utf-8", write_through=True))
            patch.setattr(sys, "stderr", err)
            patch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin.encode()), encoding="utf-8"))
            code = run(spotctl, "spotctl", _text(arguments))
            written = out.getvalue().decode()
        return Result(code, written, err.getvalue())


def _text(arguments: Sequence[str]) -> list[str]:
    return [str(argument) for argument in arguments]


@pytest.fixture(scope="session")
def _session_place() -> Iterator[Served]:
    with served(FakeBackend()) as place:
        yield place


@pytest.fixture
def ctl(_session_place: Served, monkeypatch: pytest.MonkeyPatch) -> Ctl:
    """`spotctl` against a backend that holds nothing yet."""
    _session_place.backend.reset()
    _session_place.failures.clear()
    monkeypatch.setenv("SPOTD_SOCKET", str(_session_place.socket))
    monkeypatch.setenv("TZ", "UTC")
    monkeypatch.setenv("COLUMNS", "120")
    return Ctl(monkeypatch, _session_place)
