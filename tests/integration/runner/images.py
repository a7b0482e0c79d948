"""What an image holds, as a machine's PATH sees it: some tools, and one Python or none."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any, Final

import pytest

from tests.integration.runner.test_pythons import find_python

_TOOLS: Final = ("sh", "env", "cat", "mkdir", "sleep", "test", "true")


def pythons(by_default: str) -> list[Any]:
    """Every Python a runner may meet, as parameters; all but one in the long run only."""
    known = ("3.8", "3.9", "3.10", "3.11", "3.12", "3.13")
    return [version if version == by_default else pytest.param(version, marks=pytest.mark.slow) for version in known]


def image_with(folder: Path, python: str | None) -> str:
    """A PATH with neither curl nor wget, and this Python if any. Absolute places are the real ones all the same."""
    folder.mkdir(parents=True)
    for tool in _TOOLS:
        found = shutil.which(tool)
        if found:
            (folder / tool).symlink_to(found)
    if python is not None:
        found = find_python(python)
        if found is None:
            pytest.skip(f"no Python {python} here; name one in SPOTD_TEST_PYTHONS")
        (folder / "python3").symlink_to(found)
    return str(folder)
