"""`spotctl notify test`."""

from __future__ import annotations

from typing import Any

import pytest

from spotd.client.daemon import Daemon
from tests.unit.cli.conftest import Ctl


def test_without_a_channel_it_says_how_to_have_one(ctl: Ctl) -> None:
    result = ctl("notify", "test")
    assert result.code == 6
    assert result.err.startswith("error: no channel is configured")
    assert "[notify.phone]" in result.err


def test_each_channel_is_a_line_and_one_that_fails_fails_the_command(ctl: Ctl, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [
        {"channel": "phone", "ok": True, "error": ""},
        {"channel": "team", "ok": False, "error": "HTTP 404\x1b[2J"},
    ]
    asked: list[str | None] = []

    def answer(_self: Daemon, channel: str | None) -> dict[str, Any]:
        asked.append(channel)
        return {"schema": 1, "now": "", "channels": rows}

    monkeypatch.setattr(Daemon, "test_notifications", answer)
    result = ctl("notify", "test")
    assert (result.code, result.out) == (1, "ok    phone: was taken\nFAIL  team: HTTP 404\n")
    rows.pop()
    assert ctl("notify", "test", "phone", "-o", "id").out == "phone\n"
    assert asked == [None, "phone"]
