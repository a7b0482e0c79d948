"""An upload takes what the training leaves, until there is no time for manners."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from spotd_jobs.runner import manifest
from spotd_jobs.runner.manifest import ChunkIndex
from spotd_jobs.runner.upload import Priority, Progress, TreeUpload
from spotd_jobs.wire.grant import Upload, UploadMethod, attempt_prefix
from tests.integration.runner.inside import runner_grant, store_of
from tests.integration.runner.rig import JOB, Machine, Rig, until
from tests.integration.runner.servers import Answer, Request, Server

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="scheduling classes are Linux's")
CHUNK = 1024
CHUNKS = 12


class Gate:
    """A store that takes everything but the content of checkpoints: the first two chunks and the others wait apart."""

    def __init__(self) -> None:
        self.first = threading.Event()
        self.others = threading.Event()
        self.held = 0
        self._lock = threading.Lock()

    def answer(self, request: Request) -> Answer:
        if b"/data/" in request.body.partition(b'name="file"')[0]:
            with self._lock:
                self.held += 1
                gate = self.first if self.held <= 2 else self.others
            gate.wait(60)
        return Answer(204)

    def open(self) -> None:
        self.first.set()
        self.others.set()


@contextmanager
def gated() -> Iterator[tuple[Gate, Upload]]:
    gate = Gate()
    prefix = attempt_prefix(JOB, 1)
    with Server(gate.answer) as server:
        try:
            yield (
                gate,
                Upload(
                    method=UploadMethod.POST,
                    prefix=prefix,
                    expires=datetime.now(UTC) + timedelta(hours=1),
                    size_max=1 << 26,
                    fields={"url": server.url, "form": {"policy": "p"}, "key_prefix": prefix},
                ),
            )
        finally:
            gate.open()


def own_uploaders() -> list[int]:
    """The scheduling class of every worker of an upload in this process."""
    workers = [thread for thread in threading.enumerate() if thread.name.startswith("upload-")]
    return sorted(os.sched_getscheduler(thread.native_id) for thread in workers if thread.native_id)


def idle_threads(machine: Machine) -> int:
    tasks = Path(f"/proc/{machine.process.pid}/task").iterdir()
    return sum(os.sched_getscheduler(int(task.name)) == os.SCHED_IDLE for task in tasks)


def test_others_take_the_place_of_workers_that_gave_way_and_nothing_is_left_out_or_sent_twice(tmp_path: Path) -> None:
    made = tmp_path / "made" / "step-1"
    made.mkdir(parents=True)
    content = os.urandom(CHUNK * CHUNKS)
    (made / "w").write_bytes(content)
    way = Priority.WHOLLY
    with gated() as (gate, leave), Rig(tmp_path) as rig:
        store = store_of(runner_grant(rig, upload=leave))
        stage = manifest.stage(str(made.parent), manifest.scan(str(made.parent), "step-1"), str(tmp_path / "stage"))
        known = ChunkIndex(str(tmp_path / "known"), store.prefix)
        progress = Progress()
        upload = TreeUpload(stage, store, known, progress, CHUNK, lambda: False, lambda: way)
        files: list[dict[str, object]] = []
        thread = threading.Thread(target=lambda: files.extend(upload.run(2)))
        thread.start()
        until(lambda: gate.held == 2, "two chunks under way")
        assert own_uploaders() == [os.SCHED_IDLE] * 2
        way = Priority.NOT
        until(lambda: gate.held == 4, "the chunks of two more workers under way")
        assert own_uploaders() == [os.SCHED_OTHER] * 2 + [os.SCHED_IDLE] * 2
        way = Priority.WHOLLY  # is not believed
        gate.first.set()
        until(lambda: own_uploaders() == [os.SCHED_OTHER] * 2, "the first two workers to end with their chunks")
        assert gate.held == 4
        gate.open()
        thread.join(60)
    (file,) = files
    assert len(file["chunks"]) == CHUNKS  # type: ignore[arg-type]  # a list, in a document of any shape
    assert gate.held == CHUNKS
    assert progress.sent == progress.done == len(content)


def test_a_notice_ends_the_manners_of_an_upload_under_way(tmp_path: Path) -> None:
    chunk = 2 << 20  # a small one would not give way so far
    save = f"head -c {chunk * CHUNKS} /dev/urandom > $SPOTD_CHECKPOINT_DIR/.s && mkdir $SPOTD_CHECKPOINT_DIR/s"
    save += " && cd $SPOTD_CHECKPOINT_DIR && mv .s s/w && touch s/DONE"
    with gated() as (gate, leave), Rig(tmp_path) as rig:
        # Only its mark may finish it: one that settled before the mark came would be stored twice, the second first.
        train = ["/bin/sh", "-c", save + "; exec sleep 300"]
        grant = rig.grant(train, upload=leave, chunk_bytes=chunk, settle_s=60)
        machine = rig.start(grant)
        until(lambda: gate.held == 2, "the upload to be under way")
        assert idle_threads(machine) == 2
        machine.process.terminate()
        until(lambda: gate.held == 4, "the chunks of two more workers under way")
        gate.open()
        machine.wait()
    assert gate.held == CHUNKS
