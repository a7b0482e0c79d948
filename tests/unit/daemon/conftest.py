"""Asynchronous tests of the daemon run on trio with a clock that jumps to the next timer: hours pass in no time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from trio.testing import MockClock

from tests.unit.daemon.rig import Rig


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, Any]]:
    return "trio", {"clock": MockClock(autojump_threshold=0)}


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    return Rig(tmp_path)
