"""The page on the Python client is executed, and shows what it prints.

With RECORD=1 in the environment what it prints is written into the page.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest

from tests.unit.api import worlds
from tests.unit.api.place import place

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "how-to" / "python-client.md"
BLOCK = re.compile(r"^```python\n(?P<code>.*?)^```\n(?:```text\n(?P<printed>.*?)^```\n)?", re.DOTALL | re.MULTILINE)


def test_the_page_on_the_client_prints_what_it_shows(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    names: dict[str, Any] = {}

    def executed(block: re.Match[str]) -> str:
        exec(compile(block["code"], str(PAGE), "exec"), names)  # noqa: S102 - our own page
        printed = capsys.readouterr().out
        return f"```python\n{block['code']}```\n" + (f"```text\n{printed}```\n" if printed else "")

    monkeypatch.chdir(ROOT)
    text = PAGE.read_text(encoding="utf-8")
    with place() as served:
        served.rig.host(worlds.attempt().id.job, 1).log("step 1\nstep 2\n")
        served.write_three_jobs()
        monkeypatch.setenv("SPOTD_SOCKET", str(served.socket))
        shown = BLOCK.sub(executed, text)
    if os.environ.get("RECORD"):
        PAGE.write_text(shown, encoding="utf-8")
    assert shown == PAGE.read_text(encoding="utf-8")
    assert len(names) > 10
