"""SIGKILL of the real runner at random moments of upload and of restore, with its store in a real S3 server.

The job takes its next step when its last checkpoint is stored, so the interval is never shorter than an upload: then
"at most one interval and one upload of work is lost" means at most one step.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest

from spotd_jobs.objects.s3 import S3Store
from spotd_jobs.wire.grant import Grant, Restore
from tests.fakes.seaweed import Weed
from tests.integration.runner.bucket import BucketStore
from tests.integration.runner.rig import PATIENCE_S, Machine, Rig, until
from tests.integration.runner.trainer import TRAINER, final_weights

pytestmark = pytest.mark.e2e
SIZE = 400_000
CHUNK = 16_384
CHUNKS = SIZE // CHUNK
WAIT_UNTIL_STORED = """
    while not os.path.exists(os.path.join(sys.argv[5], str(step))):
        time.sleep(0.01)
"""
CODE = {"train.py": TRAINER.replace("    time.sleep(pause)\n", WAIT_UNTIL_STORED)}


class Course:
    """One job over many machines; what is on offer after each is only what the daemon would accept."""

    def __init__(self, rig: Rig, rng: random.Random) -> None:
        self.rig = rig
        self.rng = rng
        self.attempt = 0
        self.offers: list[Restore] = []
        self.step = 0
        self.kills = {"upload": 0, "restore": 0, "start": 0}
        self._stored = rig.folder / "stored"
        self._stored.mkdir()

    def grant(self, steps: int = 10**6) -> Grant:
        self.attempt += 1
        run = [sys.executable, "-IS", "train.py", str(steps), "0", "marked", str(SIZE), str(self._stored)]
        return self.rig.grant(
            run, attempt=self.attempt, code=CODE, restore=self.offers[:3], settle_s=60.0, chunk_bytes=CHUNK
        )

    def kill_in_upload(self) -> None:
        machine = self.rig.start(self.grant())
        objects = self.rng.randint(1, 2 * CHUNKS)
        until(lambda: self._data(machine) >= objects, f"{objects} chunks of attempt {self.attempt}")
        machine.kill()
        self.kills["upload"] += 1
        self._look_back(machine)

    def kill_in_restore(self) -> None:
        grant = self.grant()
        machine = self.rig.start(grant)
        enough = self.rng.randint(0, SIZE)
        until(lambda: self._restored_bytes(machine) >= enough, f"{enough} bytes restored")
        machine.kill()
        names = [path.name for path in (machine.home / "checkpoints").iterdir()]
        visible = [name for name in names if not name.startswith(".")]
        self.kills["start" if visible else "restore"] += 1
        if any(name.startswith(".") for name in names):
            assert visible in ([], [self.offers[0].name]), "half a checkpoint under its own name"
        if self.rng.random() < 0.5:
            self.rig.renew(grant)
            again = self.rig.start(grant)  # the same machine comes back
            again.event("restored")
            machine = again
            machine.kill()
        self._look_back(machine)

    def finish(self) -> None:
        steps = self.step + 2
        machine = self.rig.start(self.grant(steps))
        until(lambda: self._data(machine) < 0 or machine.process.poll() is not None, "the end", 2 * PATIENCE_S)
        assert machine.process.returncode == 0
        self._look_back(machine)
        assert self.step == steps
        assert (machine.home / "outputs/final").read_text() == final_weights(steps)

    def _data(self, machine: Machine) -> int:
        """How many chunks are stored; on the way the job may go on from what is."""
        keys = self.rig.store.keys(machine.prefix)
        for key in keys:
            if "/checkpoints/step-" in key:
                (self._stored / key.rsplit("-", 1)[1].removesuffix(".json")).touch()
        return sum("/data/" in key for key in keys)

    def _restored_bytes(self, machine: Machine) -> int:
        if machine.events("restored"):
            return SIZE
        return sum(_blocks(path) for path in (machine.home / "checkpoints").rglob("w"))

    def _look_back(self, machine: Machine) -> None:
        """Nothing that was stored is lost, nothing partial was used, and at most one step is to be done again."""
        resumed = [str(event.data["name"]) for event in machine.events("restored")]
        newest = self.offers[0].name if self.offers else None
        assert set(resumed) <= {newest}, "only the newest complete checkpoint is resumed from"
        assert machine.events("checkpoint_fallback") == []
        saved = [path.parent for path in (machine.home / "checkpoints").glob("step-*/DONE")]
        reached = max([self.step, *(int(path.name.removeprefix("step-")) for path in saved)])
        self.offers = self.rig.restores(self.attempt) + self.offers
        stored = int(self.offers[0].name.removeprefix("step-").partition("~")[0]) if self.offers else 0
        assert stored >= self.step, "a stored checkpoint was lost"
        assert reached - stored <= 1, "more than one interval was lost"
        self.step = stored


def _blocks(path: Path) -> int:
    try:
        return path.stat().st_blocks * 512  # restored files are sparse until they are whole
    except OSError:
        return 0


def carry(weed: Weed, folder: Path, *, seed: int, kills: int) -> None:
    rng = random.Random(seed)
    (folder / "rig").mkdir()
    with Rig(folder / "rig", store=BucketStore(S3Store(weed.place(f"{folder.name}/")))) as rig:
        course = Course(rig, rng)
        for number in range(kills):
            if number % 2 and course.offers:
                course.kill_in_restore()
            else:
                course.kill_in_upload()
        course.finish()
        print("kills:", course.kills)
        assert sum(course.kills.values()) == kills


def test_a_runner_killed_in_uploads_and_restores_loses_no_stored_checkpoint(weed: Weed, tmp_path: Path) -> None:
    carry(weed, tmp_path, seed=1, kills=4)


@pytest.mark.slow
def test_fifty_kills_lose_no_stored_checkpoint(weed: Weed, tmp_path: Path) -> None:
    carry(weed, tmp_path, seed=5, kills=50)
