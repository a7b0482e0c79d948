"""Asynchronous tests of the daemon run on trio with a clock that jumps to the next timer: hours pass in no time.

Tasks that are ready at the same instant run in an order that trio draws. Each test begins at the same seed, so that
what fails for one fails for all; `SCHEDULING_SEED=7` draws other orders.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Final

import pytest
from trio._core import _run as scheduler
from trio.testing import MockClock

from spotd.store.world import WorldMemory
from tests.unit.daemon.rig import Rig

SCHEDULING_SEED: Final = os.environ.get("SCHEDULING_SEED", "0")
PROVED = frozenset({"test_adoption", "test_containment", "test_control_loop", "test_crashes", "test_set_aside"})
"""Files in whose tests each world that the daemon decides on is compared with one that is read anew."""


@pytest.fixture(autouse=True)
def proved(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WorldMemory, "is_proved", request.path.stem in PROVED)


@pytest.fixture
def anyio_backend(request: pytest.FixtureRequest) -> tuple[str, dict[str, Any]]:
    draws = scheduler._r  # trio has no public name for it
    draws.seed(f"{SCHEDULING_SEED} {request.node.nodeid}")
    return "trio", {"clock": MockClock(autojump_threshold=0)}


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    return Rig(tmp_path)
