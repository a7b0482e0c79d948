"""The API over a daemon whose state is in memory, and `spotctl` run against it in this process."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from tests.unit.api.command import Result, spotctl
from tests.unit.api.place import Place, place
from tests.unit.daemon.rig import Rig


@dataclass
class Ctl:
    """`spotctl` against one daemon."""

    monkeypatch: pytest.MonkeyPatch
    place: Place

    @property
    def rig(self) -> Rig:
        return self.place.rig

    def __call__(self, *arguments: str, stdin: str = "") -> Result:
        return spotctl(self.monkeypatch, None, *arguments, stdin=stdin)


@pytest.fixture(scope="session")
def _session_place() -> Iterator[Place]:
    with place() as served:
        yield served


@pytest.fixture
def ctl(_session_place: Place, monkeypatch: pytest.MonkeyPatch) -> Ctl:
    """`spotctl` against a daemon that holds nothing yet."""
    _session_place.reset()
    monkeypatch.setenv("SPOTD_SOCKET", str(_session_place.socket))
    monkeypatch.setenv("TZ", "UTC")
    monkeypatch.setenv("COLUMNS", "120")
    return Ctl(monkeypatch, _session_place)
