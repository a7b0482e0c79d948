"""A checkpoint fetched while the image that will restore it is still on its way."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from spotd_jobs.wire.grant import Grant
from tests.integration.runner.rig import Machine, Rig
from tests.integration.runner.trainer import TRAINER, final_weights

pytestmark = pytest.mark.e2e
STEPS = 4
TRAIN = [sys.executable, "-IS", "train.py"]


def saved(rig: Rig) -> tuple[Grant, list[Path]]:
    """The grant of a second attempt, and where the store keeps the chunks that it will restore."""
    code = {"train.py": TRAINER}
    first = rig.start(rig.grant([*TRAIN, "2", "0", "renamed"], code=code))
    assert first.wait() == 0, first.console()
    offers = rig.restores(1)
    grant = rig.grant([*TRAIN, str(STEPS), "0", "renamed"], attempt=2, code=code, restore=offers[:1])
    return grant, [rig.store.path(key) for key in offers[0].chunks]


def fetched(rig: Rig, grant: Grant) -> list[Path]:
    """What lies ready after the runner ran ahead; the machine itself has not started yet."""
    machine = rig.start(grant, machine="m2", env={"SPOTD_PREFETCH": "1"})
    assert machine.wait() == 0, machine.console()
    assert [key for key in rig.store.keys(grant.upload.prefix) if not key.endswith("grant.json")] == []
    assert not (machine.directory / "machine-done").exists()
    return sorted((machine.home / "prefetch").glob("*"))


def went_on(rig: Rig, grant: Grant) -> Machine:
    machine = rig.start(grant, machine="m2")
    assert machine.wait() == 0, machine.console()
    assert machine.event("restored").data["name"] == "step-2"
    assert final_weights(STEPS) in [path.read_text() for path in machine.home.rglob("final")]
    assert not (machine.home / "prefetch").exists()
    return machine


def test_what_was_fetched_ahead_is_not_fetched_again(tmp_path: Path) -> None:
    with Rig(tmp_path) as rig:
        grant, chunks = saved(rig)
        assert len(fetched(rig, grant)) == len(chunks)
        for chunk in chunks:
            chunk.unlink()
        went_on(rig, grant)


def test_what_comes_too_late_for_the_restore_fetches_nothing(tmp_path: Path) -> None:
    with Rig(tmp_path) as rig:
        grant, _ = saved(rig)
        went_on(rig, grant)
        late = rig.start(grant, machine="m2", env={"SPOTD_PREFETCH": "1"})
        assert late.wait() == 0
        assert not (late.home / "prefetch").exists()


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize("damage", [flip, cut, Path.unlink])
def test_what_is_damaged_or_missing_of_it_comes_from_the_store(damage: Callable[[Path], None], tmp_path: Path) -> None:
    with Rig(tmp_path) as rig:
        grant, _ = saved(rig)
        damage(fetched(rig, grant)[0])
        assert went_on(rig, grant).events("checkpoint_fallback") == []


def test_a_chunk_that_the_store_spoiled_is_left_to_the_restore_to_judge(tmp_path: Path) -> None:
    with Rig(tmp_path) as rig:
        grant, chunks = saved(rig)
        flip(chunks[0])
        assert chunks[0].name[:64] not in [path.name for path in fetched(rig, grant)]


def test_a_machine_whose_job_is_over_fetches_nothing(tmp_path: Path) -> None:
    with Rig(tmp_path) as rig:
        grant, _ = saved(rig)
        assert fetched(rig, rig.order_stop(grant)) == []
