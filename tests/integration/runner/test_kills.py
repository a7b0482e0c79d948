"""SIGKILL of a whole machine at random moments: no complete checkpoint is lost, no partial one is resumed from."""

from __future__ import annotations

import random
import sys
from functools import partial
from pathlib import Path

import pytest

from tests.integration.runner.holding import HeldBucket
from tests.integration.runner.rig import PATIENCE_S, Machine, Rig, until
from tests.integration.runner.servers import Server
from tests.integration.runner.test_over_http import over_http
from tests.integration.runner.trainer import TRAINER, final_weights

pytestmark = pytest.mark.e2e
CODE = {"train.py": TRAINER}
STEPS = 6


def train(pause_s: float, size: int) -> list[str]:
    return [sys.executable, "-IS", "train.py", str(STEPS), str(pause_s), "marked", str(size)]


@pytest.mark.parametrize("seed", [1, 2])
def test_a_job_whose_machines_are_killed_at_random_ends_as_if_nothing_had_happened(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    with Rig(tmp_path) as rig:
        newest_before = None
        for attempt in range(1, 7):
            offers = rig.restores(*range(1, attempt))
            newest = offers[0].name if offers else None
            grant = rig.grant(train(0.05, 400_000), attempt=attempt, code=CODE, restore=offers, settle_s=5.0)
            machine = rig.start(grant)
            if attempt == 6:
                assert machine.wait() == 0
                assert (machine.home / "outputs/final").read_text() == final_weights(STEPS)
            else:
                until(partial(_is_time_to_die, machine, rng.randint(0, 40)), "the moment to die")
                machine.kill()
            restored = [str(event.data["name"]) for event in machine.events("restored")]
            assert restored in ([], [newest]), "only the newest accepted one is resumed from"
            assert machine.events("checkpoint_fallback") == []
            rig.accepted(attempt)  # every manifest in the store is whole
            assert newest_before is None or newest is not None
            newest_before = newest


def test_a_kill_in_the_middle_of_an_upload_leaves_the_older_checkpoint_and_no_half_one(tmp_path: Path) -> None:
    with Rig(tmp_path) as rig:
        small = "cd $SPOTD_CHECKPOINT_DIR; mkdir step-1; echo a >step-1/w; touch step-1/DONE"
        first = rig.start(rig.grant(["/bin/sh", "-c", small]))
        assert first.wait() == 0
        large = "cd $SPOTD_CHECKPOINT_DIR; mkdir s; head -c 400000 /dev/urandom >s/w; touch s/DONE; sleep 600"
        grant = rig.grant(["/bin/sh", "-c", large], attempt=2, restore=rig.restores(1), chunk_bytes=65536)
        bucket = HeldBucket(rig, free=3)
        with Server(bucket.answer) as server:
            machine = rig.start(over_http(rig, server, grant))
            until(lambda: bucket.held, "an upload under way")
            machine.kill()
            bucket.go_on()
        assert len(rig.store.keys(machine.prefix + "data/")) >= 3
        assert rig.accepted(2) == []
        assert [offer.name for offer in rig.restores(1, 2)] == ["step-1"]


def test_a_kill_in_the_middle_of_a_restore_leaves_nothing_that_looks_complete(tmp_path: Path) -> None:
    with Rig(tmp_path) as rig:
        save = "cd $SPOTD_CHECKPOINT_DIR; mkdir step-1; seq 100000 >step-1/w; touch step-1/DONE"
        first = rig.start(rig.grant(["/bin/sh", "-c", save], chunk_bytes=16384))
        assert first.wait() == 0
        check = "seq 100000 | cmp - $SPOTD_RESUME/w && ls -A $SPOTD_CHECKPOINT_DIR"
        grant = rig.grant(["/bin/sh", "-c", check], attempt=2, restore=rig.restores(1), chunk_bytes=16384)
        bucket = HeldBucket(rig, method="GET", free=10)
        with Server(bucket.answer) as server:
            grant = over_http(rig, server, grant)
            machine = rig.start(grant)
            until(lambda: bucket.held, "a restore under way")
            machine.process.kill()
            machine.process.wait(PATIENCE_S)
            bucket.go_on()
            left = list((machine.home / "checkpoints").iterdir())
            assert left, "the restore had begun"
            assert [path.name for path in left if not path.name.startswith(".")] == []
            rig.renew(grant)
            again = rig.start(grant)
            assert again.wait() == 0
        done = again.events()[-1].exit()
        assert done is not None
        assert done.exit_code == 0, again.log()
        assert [line for line in again.log().split() if not line.startswith(".")] == ["step-1"]


def _is_time_to_die(machine: Machine, objects: int) -> bool:
    """So many objects are stored: a moment that is random, and waits for no clock."""
    return machine.process.poll() is not None or len(machine.rig.store.keys(machine.prefix)) > objects
