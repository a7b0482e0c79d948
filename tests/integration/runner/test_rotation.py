"""A framework's rotation beside our upload: it takes nothing from what was complete, and a half removed one is none."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from spotd_jobs.runner import manifest as tree
from tests.integration.runner.holding import HeldBucket
from tests.integration.runner.rig import Machine, Rig, until
from tests.integration.runner.servers import Server
from tests.integration.runner.test_over_http import over_http

IDLE = [sys.executable, "-IS", "-c", "import time; time.sleep(600)"]
PARTS = {"a", "b", "sub/c"}
WHOLE = {*PARTS, "DONE"}


def save(machine: Machine, name: str) -> Path:
    """As a framework does: the parts, then the mark."""
    place = machine.home / "checkpoints" / name
    for part in (*sorted(PARTS), "DONE"):
        (place / part).parent.mkdir(parents=True, exist_ok=True)
        (place / part).write_text(f"{part} of {name}")
    return place


def stored(machine: Machine) -> dict[str, set[str]]:
    """What of each checkpoint the store has, by the checkpoint's name."""
    return {
        manifest["name"]: {row["path"].partition("/")[2] for row in manifest["files"]}
        for manifest in machine.manifests()
    }


@pytest.mark.parametrize("settle_s", [60.0, 0.1], ids=["by its mark", "left alone for long"])
def test_a_checkpoint_that_is_being_removed_is_never_stored_again(settle_s: float, tmp_path: Path) -> None:
    with Rig(tmp_path) as rig:
        grant = rig.grant(IDLE, settle_s=settle_s)
        machine = rig.start(grant)
        machine.event("started")
        old = save(machine, "step-1")
        until(lambda: "step-1" in stored(machine), "the first checkpoint")
        (old / "a").unlink()  # the mark is the last that this rotation will take
        save(machine, "step-2")
        until(lambda: "step-2" in stored(machine), "the second checkpoint")
        (old / "sub/c").unlink()
        save(machine, "step-3")
        until(lambda: "step-3" in stored(machine), "the third checkpoint")
        rig.order_stop(grant)
        assert machine.wait() == 0
        assert stored(machine) == {"step-1": WHOLE, "step-2": WHOLE, "step-3": WHOLE}
        refused = {event.data["name"]: event.data["reason"] for event in machine.events("checkpoint_refused")}
        assert refused == {"step-1": "it was being removed"}


def test_a_rotation_in_the_middle_of_an_upload_takes_nothing_away_from_it(tmp_path: Path) -> None:
    with Rig(tmp_path) as rig:
        bucket = HeldBucket(rig)
        with Server(bucket.answer) as server:
            grant = over_http(rig, server, rig.grant(IDLE, settle_s=60.0, connections=1))
            machine = rig.start(grant)
            machine.event("started")
            place = save(machine, "step-1")
            until(lambda: bucket.held, "a chunk on its way")
            shutil.rmtree(place)
            save(machine, "step-2")
            bucket.go_on()
            until(lambda: len(stored(machine)) == 2, "both checkpoints")
            rig.order_stop(grant)
            assert machine.wait() == 0
        assert stored(machine) == {"step-1": WHOLE, "step-2": WHOLE}
        assert {offer.name for offer in rig.restores(1)} == {"step-1", "step-2"}, "and their chunks are there"
        assert machine.events("checkpoint_skipped") == []


def test_only_what_lost_something_and_gained_nothing_is_being_removed(tmp_path: Path) -> None:
    place = tmp_path / "step-1"
    (place / "sub").mkdir(parents=True)
    for part in PARTS:
        (place / part).write_text(part)
    whole = tree.scan(str(tmp_path), "step-1")

    def is_remnant() -> bool:
        return tree.is_remnant(tree.scan(str(tmp_path), "step-1"), whole)

    assert not is_remnant()
    (place / "sub/c").unlink()
    assert is_remnant(), "an empty folder is left of it"
    (place / "sub/d").write_text("d")
    assert not is_remnant()
    (place / "sub/d").unlink()
    (place / "a").write_text("longer than it was")
    assert not is_remnant(), "it is written anew"
