"""From when a lease counts: from the question that its grant answered, however long the answer took."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from spotd_jobs.runner import store as grants
from spotd_jobs.runner.store import MISSING_MAX, GrantKeeper, NotCurrent, first_grant
from spotd_jobs.wire.client import web
from tests.integration.runner.rig import Rig

LEASE_S = 600.0
SLOW_S = 90.0


class SlowStore:
    """A store whose answers take long, on a clock of its own."""

    def __init__(self, rig: Rig) -> None:
        self.now = 1000.0
        self._rig = rig
        self.second = 0
        self.changes: dict[str, Any] = {}

    def steady(self) -> float:
        return self.now

    def read(self, _url: str, _bytes_max: int, **_: Any) -> bytes:
        raw = self._rig.grant(["true"]).model_dump(mode="json", by_alias=True)
        self.second += 1
        raw.update(lease_s=LEASE_S, issued_at=f"2026-01-01T00:00:{self.second:02}Z", expires="9999-01-01T00:00:00Z")
        raw.update(self.changes)
        self.now += SLOW_S
        return json.dumps(raw).encode()


@pytest.fixture
def slow_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SlowStore:
    store = SlowStore(Rig(tmp_path))
    monkeypatch.chdir(tmp_path)  # where a runner marks its lease
    monkeypatch.setattr(grants, "steady", store.steady)
    monkeypatch.setattr(web, "read", store.read)
    return store


def test_the_first_lease_counts_from_the_question(slow_store: SlowStore) -> None:
    keeper = GrantKeeper(first_grant("https://store/grant.json", lambda _: False), lambda: None)
    assert keeper.lease_left_s() == LEASE_S - SLOW_S
    slow_store.now += LEASE_S
    assert keeper.lease_left_s() == -SLOW_S


def test_a_renewed_lease_counts_from_the_question(slow_store: SlowStore) -> None:
    keeper = GrantKeeper(first_grant("https://store/grant.json", lambda _: False), lambda: None)
    slow_store.now += 100
    keeper.refresh()
    assert keeper.lease_left_s() == LEASE_S - SLOW_S


def test_an_old_grant_renews_nothing(slow_store: SlowStore) -> None:
    keeper = GrantKeeper(first_grant("https://store/grant.json", lambda _: False), lambda: None)
    slow_store.second = 0
    keeper.refresh()
    assert keeper.lease_left_s() == LEASE_S - 2 * SLOW_S


def test_a_machine_that_ran_before_begins_nothing_anew_without_a_checkpoint(slow_store: SlowStore) -> None:
    slow_store.changes = {"seen_running": True, "restore": []}
    with pytest.raises(NotCurrent, match="has run before"):
        first_grant("https://store/grant.json", lambda _: False)


def test_a_grant_that_has_expired_starts_nothing(slow_store: SlowStore) -> None:
    slow_store.changes = {"expires": "2001-01-01T00:00:00Z"}
    with pytest.raises(NotCurrent, match="has expired"):
        first_grant("https://store/grant.json", lambda _: False)


def test_the_grant_of_another_attempt_in_its_place_withdraws_this_one(slow_store: SlowStore) -> None:
    keeper = GrantKeeper(first_grant("https://store/grant.json", lambda _: False), lambda: None)
    slow_store.changes = {"attempt": 2}
    keeper.refresh()
    assert keeper.withdrawn


def test_a_machine_without_a_grant_asks_three_times_and_runs_nothing(
    slow_store: SlowStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A withdrawn grant is deleted: to wait for as long as for a store that is away would bill the machine."""
    asked: list[str] = []

    def nothing(url: str, _bytes_max: int, **_: Any) -> bytes:
        asked.append(url)
        raise web.Missing("404")

    monkeypatch.setattr(web, "read", nothing)
    with pytest.raises(NotCurrent, match="no grant for this machine"):
        first_grant("https://store/grant.json", lambda _: len(asked) > 9)
    assert len(asked) == MISSING_MAX
