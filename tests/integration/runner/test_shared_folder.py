"""A checkpoint folder on a disk that several machines of one attempt share: none clears what another put there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from spotd_jobs.runner import restore
from spotd_jobs.runner.restore import RestoreRun, clear_aside
from spotd_jobs.wire.client import sinks
from tests.integration.runner.inside import restore_into, runner_grant, store_of, upload_tree
from tests.integration.runner.rig import Rig
from tests.integration.runner.test_transfer import offer

ATTEMPT, LATER = "jobs/j1/attempts/1/", "jobs/j1/attempts/2/"
FILES = {f"rank_{rank}": f"weights of {rank}".encode() * 20 for rank in range(3)}


def stored(rig: Rig) -> list[dict[str, Any]]:
    """What there is to restore."""
    made = rig.folder / "made" / "step-1"
    made.mkdir(parents=True)
    for name, content in FILES.items():
        (made / name).write_bytes(content)
    return [offer(rig, upload_tree(rig, store_of(runner_grant(rig)), made.parent, "step-1"), "step-1")]


def content(folder: Path) -> dict[str, dict[str, bytes]]:
    """All that is to be seen there, and nothing that was left hidden."""
    assert not [one.name for one in folder.iterdir() if one.name.startswith(restore._RESTORING)]
    shown = (one for one in folder.iterdir() if not one.name.startswith("."))
    return {one.name: {file.name: file.read_bytes() for file in one.iterdir()} for one in shown}


def once(work: Callable[[], object]) -> Callable[[], None]:
    left = [work]

    def again() -> None:
        if left:
            left.pop()()

    return again


@pytest.mark.parametrize("point", ["_fill", "_move_in"])
def test_one_that_begins_while_another_restores_takes_nothing_from_it(
    point: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Rig(tmp_path) as rig:
        offers, folder = stored(rig), tmp_path / "shared"
        clear_aside(str(folder), 0, ATTEMPT, 1)
        second = restore_into(rig, folder, offers, rank=1)

        def begin_first() -> None:
            clear_aside(str(folder), 0, ATTEMPT, 0)
            assert restore_into(rig, folder, offers).run() is not None

        begin, real = once(begin_first), getattr(RestoreRun, point)

        def after_another(self: RestoreRun, *args: Any) -> None:
            if self is second:
                begin()
            real(self, *args)

        monkeypatch.setattr(RestoreRun, point, after_another)
        done = second.run()
        assert done is not None
        assert (second.fallbacks, Path(done.path)) == ([], folder / "step-1")
        assert content(folder) == {"step-1": FILES}


def test_two_that_put_the_same_in_place_at_one_moment_both_succeed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Rig(tmp_path) as rig:
        offers, folder = stored(rig), tmp_path / "shared"
        first, other = (restore_into(rig, folder, offers, rank=rank) for rank in (0, 1))
        at_once, remove = once(other.run), sinks.remove

        def remove_then_lose(path: str) -> None:
            remove(path)
            if path == str(folder / "step-1"):
                at_once()

        monkeypatch.setattr(sinks, "remove", remove_then_lose)
        assert first.run() is not None
        assert content(folder) == {"step-1": FILES}


def test_what_the_first_one_still_stores_stays_when_another_starts_again_or_comes_in_its_place(tmp_path: Path) -> None:
    folder = tmp_path / "shared"
    clear_aside(str(folder), 0, ATTEMPT, 0)
    saved = folder / "step-2"
    saved.mkdir()
    clear_aside(str(folder), 3, ATTEMPT, 2)
    assert saved.is_dir(), "the same attempt"
    clear_aside(str(folder), 0, LATER, 2)
    assert not saved.exists(), "what an earlier attempt left is never resumed from"
    assert [one.name for one in tmp_path.glob("shared.spotd-before-*")] == ["shared.spotd-before-m2-0"]
    clear_aside(str(folder), 0, LATER, 0)
    assert [one.name for one in tmp_path.glob("shared.spotd-before-*")] == ["shared.spotd-before-m2-0"]
    assert list(folder.iterdir()) == []
    clear_aside(str(folder), 1, LATER, 2)
    (folder / "step-3").mkdir()
    clear_aside(str(folder), 1)
    assert list(folder.iterdir()) == [], "one that works alone clears all"


def test_a_folder_that_is_a_disk_of_its_own_has_the_mark_inside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, beside = tmp_path / "shared", tmp_path / "shared.spotd-first"
    monkeypatch.setattr("os.path.ismount", lambda path: path == str(folder))
    clear_aside(str(folder), 0, ATTEMPT, 0)
    beside.unlink()  # the disk beside it is another one on each machine
    (folder / "step-1").mkdir()
    clear_aside(str(folder), 0, ATTEMPT, 1)
    assert (folder / "step-1").is_dir()
    clear_aside(str(folder), 0)
    assert list(folder.iterdir()) == []
