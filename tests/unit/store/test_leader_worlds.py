"""Three processes over one state in PostgreSQL, through 500 partitions: one leads, what it wrote is there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count, pairwise
from typing import Any, Final

import pytest

from spotd.store import StateUnavailable
from spotd.store import postgres as leading
from tests.unit.store.leader_worlds import World

pytestmark = pytest.mark.long
PARTITIONS: Final = 500
SEEDS_OF_A_BUG: Final = 100


def problems(seed: int, monkeypatch: pytest.MonkeyPatch) -> tuple[World, list[str]]:
    """Play a world; return it, and what was wrong in it."""
    world = World(seed, monkeypatch)
    world.run()
    found = list(dict.fromkeys(world.broken))
    there = world.server.commits
    found += [f"{before} before {after}" for before, after in pairwise(there) if after.epoch < before.epoch]
    for process in world.processes:
        found += [f"{one} was refused and is there" for one in process.refused if one in there]
        gone = [one for one in process.known if one not in there]
        if gone and not world.was_promoted:
            found.append(f"{gone} were made and are not there")
        for lost in gone:
            later = [one for one in there if one[:2] == lost[:2] and one.number > lost.number]
            found += [f"{one} follows {lost}, which is lost" for one in later]
    if len(set(there)) < len(there):
        found.append("a commit was made twice")
    return world, found


def test_one_process_leads_through_every_partition(monkeypatch: pytest.MonkeyPatch) -> None:
    partitions = commits = 0
    longest, epochs, were_promoted = 0.0, set[int](), 0
    for seed in count():
        world, found = problems(seed, monkeypatch)
        assert not found, f"world {seed}: {found[:5]}"
        partitions += world.partitions
        commits += len(world.server.commits)
        epochs |= {one.epoch for one in world.server.commits}
        longest = max(longest, world.longest_gap)
        were_promoted += world.was_promoted
        if partitions >= PARTITIONS:
            break
    print(f"PARTITIONS {partitions} in {seed + 1} worlds, {commits} commits, longest without a leader {longest:.1f} s")
    assert commits > 20 * (seed + 1)
    assert len(epochs) > 3
    assert longest > leading.LEASE_S - leading.RENEW_S, "no leader was ever missed"
    assert were_promoted > 5


def test_the_same_world_is_the_same_history(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = ([(one.epoch, one.number) for one in problems(3, monkeypatch)[0].server.commits] for _ in range(2))
    assert first == second


def ignores_who_leads(monkeypatch: pytest.MonkeyPatch) -> None:
    def begin(self: leading.Leadership, connection: Any) -> None:
        leads = connection._session.server.row
        row = connection.execute(leading._FENCE, {"me": leads.holder, "epoch": leads.epoch}).one_or_none()
        self._xid = row[1]

    monkeypatch.setattr(leading.Leadership, "begin", begin)


def gives_up_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leading, "GIVE_UP_S", leading.LEASE_S + 3.0)


def takes_a_lost_answer_for_a_no(monkeypatch: pytest.MonkeyPatch) -> None:
    def require(self: leading.Leadership, error: Exception) -> None:
        raise StateUnavailable("no answer", hint="") from error

    monkeypatch.setattr(leading.Leadership, "_require_committed", require)


def takes_a_lost_answer_for_a_yes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leading.Leadership, "_require_committed", lambda *_: None)


def counts_no_commits(monkeypatch: pytest.MonkeyPatch) -> None:
    def begin(self: leading.Leadership, connection: Any) -> None:
        row = connection.execute(leading._FENCE, {"me": self._me, "epoch": self._epoch}).one_or_none()
        if row is None:
            raise self.lose("another one took the lead")
        self._commits, self._xid = row[0] - 1, row[1]

    monkeypatch.setattr(leading.Leadership, "begin", begin)


def asks_in_two_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def single(self: leading.Leadership) -> Iterator[Any]:
        with self._engine.connect() as connection:
            yield connection
            connection.commit()

    monkeypatch.setattr(leading.Leadership, "_single", single)


def holds_the_lease_for_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leading, "LEASE_S", 60)


BUGS = [
    ignores_who_leads,
    gives_up_late,
    asks_in_two_steps,
    takes_a_lost_answer_for_a_no,
    takes_a_lost_answer_for_a_yes,
    counts_no_commits,
    holds_the_lease_for_a_minute,
]


@pytest.mark.parametrize("bug", [pytest.param(bug, id=bug.__name__) for bug in BUGS])
def test_each_planted_bug_is_found(bug: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    bug(monkeypatch)
    for seed in range(SEEDS_OF_A_BUG):
        if problems(seed, monkeypatch)[1]:
            return
    pytest.fail(f"{SEEDS_OF_A_BUG} worlds do not show it")
