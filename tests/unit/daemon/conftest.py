"""Asynchronous tests of the daemon run on trio with a clock that jumps to the next timer: hours pass in no time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from trio.testing import MockClock

from spotd.store.world import WorldMemory
from tests.unit.daemon.rig import Rig

PROVED = frozenset({"test_adoption", "test_containment", "test_control_loop", "test_crashes", "test_set_aside"})
"""Files in whose tests each world that the daemon decides on is compared with one that is read anew."""


@pytest.fixture(autouse=True)
def proved(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WorldMemory, "is_proved", request.path.stem in PROVED)


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, Any]]:
    return "trio", {"clock": MockClock(autojump_threshold=0)}


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    return Rig(tmp_path)
