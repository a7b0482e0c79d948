"""Machines of three marketplaces, killed at random in uploads and restores, with the checkpoints in a real bucket.

After each kill the bucket says what was complete; the next machine must resume from exactly that, and the job must end
with the bytes of a run that nobody disturbed.
"""

from __future__ import annotations

import os
import random
import sys
from collections import Counter
from datetime import timedelta
from pathlib import Path

import pytest

from spotd_jobs.objects.s3 import S3Store
from tests.e2e.clouds import GPUS, KIND, Clouds, newest_complete, three_clouds
from tests.e2e.harness import FINAL, LEAVES_AT_ONCE, straight_sha256, training_folder, until
from tests.e2e.test_bucket import store_keys, store_section
from tests.fakes.aws import ZONES
from tests.fakes.seaweed import Weed
from tests.fakes.vastai import Ask

pytestmark = pytest.mark.e2e
BALLAST = 12_000_000


@pytest.mark.timeout(600)
def test_no_checkpoint_is_lost_when_machines_are_killed_in_uploads_and_restores(weed: Weed, tmp_path: Path) -> None:
    carry(weed, tmp_path, seed=1, kills=2)


@pytest.mark.slow
def test_fifty_kills_of_machines_lose_no_checkpoint(weed: Weed, tmp_path: Path) -> None:
    kinds = carry(weed, tmp_path, seed=2, kills=50)
    assert kinds["upload"] >= 10
    assert kinds["restore"] >= 10


def carry(weed: Weed, folder: Path, *, seed: int, kills: int) -> Counter[str]:
    """How many kills met what; the job was carried through all of them."""
    release = folder / "release"
    flags = f"--steps {400 + 150 * kills} --save-every 15"
    run = f"RELEASE={release} BALLAST={BALLAST} SAVE_S=0.1 {sys.executable} slow_train.py {flags} --pace 0.03"
    with three_clouds(
        folder, more=LEAVES_AT_ONCE + store_section(weed, folder.name), environment=store_keys(weed)
    ) as f:
        stock(f)
        f.lab.start()
        job = f.lab.submit(
            "net",
            run,
            workdir=training_folder(folder),
            image="python:3.12-slim",
            resources={"gpu": GPUS, "disk": "10GB", "market": "auto"},
            price={"max_price": 0.5},
        )
        course = Course(f, S3Store(weed.place(f"{folder.name}/")), job, random.Random(seed))
        for number in range(kills):
            course.kill_one(in_restore=number % 2 == 1)
        release.touch()
        f.lab.wait_final(job, within=300)
        assert f.lab.state(job) == "SUCCEEDED", f.lab.job(job)
        course.check_resumptions()
        assert f.lab.delivered(job, "weights.sha256") == straight_sha256(folder, flags)
        assert [e for e in f.lab.events(job) if e["kind"] == "checkpoint.fallback"] == []
        until(lambda: not f.left(), what="every machine to be gone")
        machines: dict[str, set[str]] = {}
        for name, own in f.spending().items():
            for span in own:
                machines.setdefault(span.key, set()).add(f"{name} {span.machine_id}")
        assert all(len(found) == 1 for found in machines.values()), machines
        print("kills:", dict(course.kinds), "clouds:", dict(course.clouds))
        return course.kinds


class Course:
    """One job over many machines, and what the bucket held of it when each of them died."""

    def __init__(self, found: Clouds, store: S3Store, job: str, rng: random.Random) -> None:
        self._found = found
        self._store = store
        self._job = job
        self._rng = rng
        self._killed = 0
        self._complete: dict[int, str | None] = {}
        self.kinds: Counter[str] = Counter()
        self.clouds: Counter[str] = Counter()

    def kill_one(self, *, in_restore: bool) -> None:
        cloud, machine, attempt = until(self._next_machine, what="the next machine", within=180, every=0.05)
        wanted = "restore" if in_restore and newest_complete(self._store, self._job) is not None else "upload"
        pieces = self._rng.randint(7, 12)  # a checkpoint is three, and an older one must be there to be wrong
        kind = until(
            lambda: self._in_restore(cloud, machine) if wanted == "restore" else self._in_upload(attempt, pieces),
            what=f"attempt {attempt} in its {wanted}",
            within=180,
            every=0.002,
        )
        self._kill(cloud, machine)
        self._killed = attempt
        self._complete[attempt] = newest_complete(self._store, self._job)
        self.kinds[kind] += 1
        self.clouds[cloud] += 1

    def check_resumptions(self) -> None:
        """Each attempt that came to resume did it from what was complete when the one before it died."""
        for attempt in self._found.lab.job(self._job)["attempts"]:
            expected = self._complete.get(attempt["attempt"] - 1)
            if attempt["resumed_from"] is not None or (expected is not None and attempt["running_at"] is not None):
                assert attempt["resumed_from"] == expected, (attempt, self._complete)

    def _next_machine(self) -> tuple[str, str, int] | None:
        assert self._found.lab.state(self._job) not in FINAL, "the job ended: make it longer"
        for cloud, own in self._found.spending().items():
            for span in own:
                attempt = int(span.key.rsplit("-", 1)[1])
                if attempt > self._killed and span.end is None:
                    return cloud, span.machine_id, attempt
        return None

    def _in_restore(self, cloud: str, machine: str) -> str | None:
        """It is fetching; or that was over too quickly to be seen, and the command runs."""
        names = list(_names_below(self._home(cloud, machine)))
        if any(name.startswith(".spotd-restore-") for name in names):
            return "restore"
        return "run" if any(name.startswith("step-") for name in names) else None

    def _in_upload(self, attempt: int, pieces: int) -> str | None:
        prefix = f"jobs/{self._job}/attempts/{attempt}/data/"
        return "upload" if sum(1 for _ in self._store.list(prefix)) >= pieces else None

    def _home(self, cloud: str, machine: str) -> Path:
        return self._found.clouds[cloud].machines.home(machine)

    def _kill(self, cloud: str, machine: str) -> None:
        if cloud == "vast":
            self._found.vast.outbid(int(machine))
        elif cloud == "aws":
            self._found.aws.interrupt(machine, notice=False)
        else:
            self._found.runpod.lose_host(machine)


def _names_below(folder: Path) -> list[str]:
    """Names of what is somewhere below a folder that changes meanwhile."""
    return [name for _, folders, files in os.walk(folder) for name in (*folders, *files)]


def stock(found: Clouds) -> None:
    """Enough machines that those which cool down after a loss are not missed, in all three markets."""
    found.vast.quirks.boot = found.aws.quirks.boot = found.runpod.quirks.starting = timedelta(seconds=2)
    found.runpod.quirks.provisioning = timedelta(0)
    for number in range(12):
        usd = 0.11 + number / 100
        found.vast.stock(Ask(ask_id=24_000_000 + number, machine_id=19_000 + number, dph_base=0.6, min_bid=usd))
    for zone in ZONES[2:]:
        found.aws.stock(KIND, zone, KIND.spot, since=found.clock.now())
