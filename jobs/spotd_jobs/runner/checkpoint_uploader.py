"""Finds complete checkpoints while the job runs, and brings them to the store without ever being in its way.

Two threads. The *watcher* scans the checkpoint folder, judges each entry, and puts a stage of every complete one
into a short queue. The *uploader* takes the newest of the queue, since that is the one worth having when the machine
goes away, and sends it. An entry counts as new whenever its tree differs from the one that was taken last under its
name, so a file that is written over and over is a new checkpoint each time. But what has only lost files since then is
being removed: a rotation takes one file after the other, and may leave the mark for the last.
"""

from __future__ import annotations

import hashlib
import os
import threading
from typing import Any, NamedTuple

from spotd_jobs.runner import complete, manifest
from spotd_jobs.runner.complete import companions
from spotd_jobs.runner.manifest import ChunkIndex
from spotd_jobs.runner.process import ProcessEnd
from spotd_jobs.runner.store import GivenUp, RunnerStore
from spotd_jobs.runner.upload import Priority, Progress, TreeUpload, Yielded, lower_priority
from spotd_jobs.wire.client.sinks import ascii_text, log_line, read_text, reason_of, remove, write_whole
from spotd_jobs.wire.client.web import now_text, steady

STAGES = "stages"
PUBLISHED = "published"
"""A file in the runner's home: this attempt has stored a checkpoint, whatever starts here next."""
_POLL_MAX_S = 1.0
_POLL_MIN_S = 0.02
_SCAN_SHARE = 20  # a scan that takes long makes scans rarer, so that watching stays under 5 % of one core
_NAME_MAX = 150
_ODD_MAX = 1000
_SMALL_BYTES = 16 * 1024 * 1024
_PATIENCE_S = 20.0
_SLOW_BYTES_PER_S = 16 * 1024 * 1024
_SAFE = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-=+")


class Seen(NamedTuple):
    """A complete checkpoint, as the heartbeat shows it."""

    name: str
    step: int | None
    at: str
    bytes: int
    key: str


class CommandEnd(NamedTuple):
    """How and when the job's process ended."""

    cleanly: bool
    at: float


class Taken(NamedTuple):
    stage: manifest.Stage
    serial: int
    step: int | None
    at: str


class Watched:
    """What the watcher remembers of one entry."""

    def __init__(self, seen: manifest.Tree) -> None:
        self.tree = seen
        self.since = steady()
        self.refused = ""


class CheckpointUploader:
    """The checkpoint folder of one attempt, watched and stored.

    Args:
        settle_s, keep: the job's own rules.
        home: where stages are kept, by hard link.
    """

    def __init__(
        self, store: RunnerStore, known: ChunkIndex, folder: str, home: str, rules: dict[str, Any], chunk_bytes: int
    ) -> None:
        self._store = store
        self._known = known
        self._folder = folder
        self._stages = os.path.join(home, STAGES)
        self._published_mark = os.path.join(home, PUBLISHED)
        self._settle_s = float(rules.get("settle_s", 10.0))
        self._keep = max(1, int(rules.get("keep", 3)))
        self._chunk_bytes = chunk_bytes
        self._watched: dict[str, Watched] = {}
        self._taken: dict[str, manifest.Tree] = {}
        self._whole: dict[str, manifest.Tree] = {}
        """Of each entry that is there, the last state that was complete, whatever became of its upload."""
        self._odd: dict[str, str] = {}
        """Of entries that could not even be read: what was reported of each."""
        self._published: set[str] = set()
        self._names_are_free = True
        self._pointed: set[str] = set()
        self._pointer_ns = 0
        self._queue: list[Taken] = []
        self._current: Taken | None = None
        self._change = threading.Condition()
        self._scan_lock = threading.Lock()
        self._wake = threading.Event()
        self._stopping = False
        self._urgent = False
        self._give_up_at = float("inf")
        self._previous: str | None = None
        self.progress = Progress()
        self.seen: Seen | None = None
        self.stored: Seen | None = None
        self._poll_s = min(_POLL_MAX_S, max(_POLL_MIN_S, self._settle_s / 4))
        remove(self._stages)
        self._threads = [
            threading.Thread(target=self._watch, name="watcher", daemon=True),
            threading.Thread(target=self._upload_all, name="uploader", daemon=True),
        ]

    def start(self, restored: str | None, manifest_sha256: str | None, *, first_boot: bool) -> None:
        """Watching begins. What was restored under this name is known, not new.

        Args:
            first_boot: this attempt has certainly published nothing yet.
        """
        self._previous = manifest_sha256
        self._names_are_free = first_boot
        if restored is not None:
            try:
                self._taken[restored] = self._whole[restored] = manifest.scan(self._folder, restored)
            except (manifest.Vanished, manifest.Unfit) as odd:
                log_line("what was restored is sent again: " + reason_of(odd))
        self._read_pointers()
        for thread in self._threads:
            thread.start()

    def scan_now(self) -> None:
        self._wake.set()

    @property
    def queued(self) -> int:
        return len(self._queue)

    def hurry(self) -> None:
        """Upload the newest complete checkpoint first, whatever is under way: the machine will go away."""
        self._urgent = True
        self._store.hurry()
        self._wake.set()

    def drain(self, give_up_at: float, *, ended_cleanly: bool, died_at: float) -> bool:
        """Store what is complete, newest first, until `give_up_at`: the job has ended, nothing writes any more.

        Returns whether all of it is stored.
        """
        self._give_up_at = give_up_at
        self.hurry()
        self._stopping = True
        self._wake.set()
        self._scan(CommandEnd(ended_cleanly, died_at))
        with self._change:
            while self._queue or self._current is not None:
                left_s = give_up_at - steady()
                if left_s <= 0:
                    return False
                self._change.wait(min(left_s, 0.5))
        return True

    def note_end(self, ended: ProcessEnd) -> None:
        """Take note that the command on this machine writes no more."""

    def _watch(self) -> None:
        lower_priority(Priority.MOSTLY)
        pause_s = self._poll_s
        while not self._stopping:
            self._wake.wait(pause_s)
            self._wake.clear()
            if self._stopping:
                return
            began = steady()
            try:
                self._scan(None)
            except Exception as error:  # noqa: BLE001 - a folder in an unusable state now may be well at the next scan
                log_line("the scan for checkpoints failed: " + reason_of(error))
            pause_s = max(self._poll_s, (steady() - began) * _SCAN_SHARE)

    def _scan(self, end: CommandEnd | None) -> None:
        """Every entry that is complete now, and was not taken in this state, is in the queue."""
        with self._scan_lock:
            self._read_pointers()
            found = []
            for name in self._names():
                try:
                    candidate = self._candidate(name, end)
                    if candidate is not None:
                        found.append((self._age(candidate), candidate))
                except Exception as error:  # noqa: BLE001 - whatever is wrong with one entry, the others are read
                    self._refuse(name, "it can not be read: " + reason_of(error))
            for _, candidate in sorted(found, key=lambda pair: pair[0]):
                try:
                    self._take(candidate)
                except Exception as error:  # noqa: BLE001 - as above
                    self._refuse(candidate.name, "it can not be held: " + reason_of(error))

    def _names(self) -> list[str]:
        try:
            names = os.listdir(self._folder)
        except OSError:
            return []
        for gone in set(self._watched) - set(names):
            del self._watched[gone]
            self._whole.pop(gone, None)
        return [
            name
            for name in names
            if not complete.is_temporary(name)
            and not complete.is_pointer(self._folder, name)
            and not os.path.islink(os.path.join(self._folder, name))
        ]

    def _candidate(self, name: str, end: CommandEnd | None) -> manifest.Tree | None:
        try:
            now = manifest.scan(self._folder, name)
        except manifest.Vanished:
            return None
        except manifest.Unfit as unfit:
            self._refuse(name, str(unfit))
            return None
        watched = self._watched.get(name)
        if watched is None or watched.tree != now:
            watched = self._watched[name] = Watched(now)
        if self._taken.get(name) == now:
            return None
        if name in self._whole and manifest.is_remnant(now, self._whole[name]):
            if end is not None:
                self._refuse(name, "it was being removed")
            return None
        around = complete.CompletenessContext(
            pointed=frozenset(self._pointed),
            pointer_ns=self._pointer_ns,
            # After a death it is how long it had been left alone *then*: waiting longer proves nothing.
            stable_s=(end.at if end is not None else steady()) - watched.since,
            settle_s=self._settle_s,
            ended_cleanly=end.cleanly if end is not None else None,
        )
        verdict = self._judge(now, around)
        if not verdict.complete:
            # Without a word a job whose files never pass would train on for days with nothing to resume from.
            if end is not None or verdict.unsound:
                self._refuse(name, complete.AFTER_DEATH.get(verdict.why, verdict.why))
            return None
        return now

    def _judge(self, tree: manifest.Tree, around: complete.CompletenessContext) -> complete.Completeness:
        return complete.judge(self._folder, tree, around)

    def _age(self, candidate: manifest.Tree) -> tuple[int, int, str]:
        return (candidate.changed_ns, complete.step_of(self._folder, candidate) or 0, candidate.name)

    def _take(self, candidate: manifest.Tree) -> None:
        serial = self._store.numbers.take()
        try:
            stage = manifest.stage(self._folder, candidate, os.path.join(self._stages, str(serial)))
        except manifest.Vanished:
            return  # it changed after all; the next scan sees the new state
        self._enqueue(Taken(stage, serial, complete.step_of(self._folder, candidate), now_text()))

    def _enqueue(self, taken: Taken) -> None:
        candidate, step = taken.stage.tree, taken.step
        self._taken[candidate.name] = self._whole[candidate.name] = candidate
        self.seen = Seen(safe_name(candidate.name), step, taken.at, candidate.size, "")
        with self._change:
            self._queue.append(taken)
            while len(self._queue) > self._keep:
                self._skip(self._queue.pop(0), "newer ones were complete before it could be stored")
            self._change.notify_all()

    def _skip(self, taken: Taken, why: str) -> None:
        taken.stage.release()
        self._store.events.add("checkpoint_skipped", name=ascii_text(taken.stage.tree.name), reason=why)

    def _refuse(self, name: str, why: str) -> None:
        watched = self._watched.get(name)
        if watched is not None:
            if watched.refused == why:
                return
            watched.refused = why
        else:
            if self._odd.get(name) == why:
                return
            if len(self._odd) >= _ODD_MAX:
                self._odd.clear()
            self._odd[name] = why
        self._store.events.add("checkpoint_refused", name=ascii_text(name), reason=why)

    def _read_pointers(self) -> None:
        for name in complete.POINTERS:
            place = os.path.join(self._folder, name)
            if complete.is_pointer(self._folder, name):
                try:
                    self._pointer_ns = max(self._pointer_ns, os.stat(place).st_mtime_ns)
                except OSError:
                    continue
                self._pointed |= complete.pointed_names(read_text(place, 4096) or "")

    def _upload_all(self) -> None:
        while True:
            with self._change:
                while not self._queue:
                    self._change.wait()
                self._current = taken = self._queue.pop()
            put_back = False
            try:
                self._upload(taken)
            except Yielded:
                put_back = True
            except manifest.Vanished:
                self._skip(taken, "it was changed while it was read")
                self._forget_take(taken)
            except manifest.Unfit as unfit:
                self._skip(taken, str(unfit))
            except GivenUp as given_up:
                self._skip(taken, "no time was left: %s" % given_up)
            except Exception as error:  # noqa: BLE001 - one checkpoint that can not be stored must not stop the others
                self._skip(taken, reason_of(error))
            with self._change:
                if put_back:
                    self._queue.append(taken)
                    self._queue.sort(key=lambda other: other.serial)
                self._current = None
                self._change.notify_all()

    def _must_yield(self) -> bool:
        if steady() > self._give_up_at:
            return False
        current, queue = self._current, self._queue
        return self._urgent and current is not None and any(other.serial > current.serial for other in queue)

    def _gives_way(self) -> Priority:
        """How far the upload under way gives way to the job: not at all once the job or its machine ends."""
        if self._urgent:
            return Priority.NOT
        # What is small uses the processor only briefly, and may be written over soon. Slow is either starved, or needs
        # so little of the processor that the training does not miss it.
        small = self.progress.total <= _SMALL_BYTES
        slow = self.progress.seconds > _PATIENCE_S and self.progress.pace < _SLOW_BYTES_PER_S
        return Priority.MOSTLY if small or slow else Priority.WHOLLY

    def _upload(self, taken: Taken) -> None:
        entry = taken.stage.tree.name
        name = self._unique_name(entry, taken.serial)
        self.progress.begin(name, taken.stage.tree.size)
        try:
            files = self._send(taken)
            files += companions(self._folder, taken.stage.tree, self._pointed, self._store, self._known)
            size = sum(entry["size"] for entry in files)
            data = manifest.manifest_bytes(
                self._store,
                kind="checkpoint",
                name=name,
                entry=ascii_text(entry),
                serial=taken.serial,
                step=taken.step,
                created_at=taken.at,
                bytes=size,
                files=files,
                previous=self._previous,
                **self._written_by(),
            )
            key = "checkpoints/%s.json" % name
            if not self._published:
                write_whole(self._published_mark, b"")
            self._known.publishing()
            self._store.put(key, data)
            self._known.published(files)
        finally:
            self.progress.end()
        self._previous = hashlib.sha256(data).hexdigest()
        self._published.add(name)
        self.stored = Seen(name, taken.step, taken.at, size, self._store.prefix + key)
        self._store.events.add(
            "checkpoint",
            name=name,
            step=taken.step,
            bytes=size,
            uploaded_bytes=self.progress.sent,
            seconds=round(self.progress.seconds, 3),
            key=self._store.prefix + key,
            serial=taken.serial,
        )
        taken.stage.release()

    def _send(self, taken: Taken) -> list[dict[str, Any]]:
        """Store the content; return the manifest's `files`."""
        of_an_upload = taken.stage, self._store, self._known, self.progress, self._chunk_bytes
        return self._upload_of(*of_an_upload, self._must_yield, self._gives_way).run(self._store.parallel)

    def _upload_of(self, *of_an_upload: Any) -> TreeUpload:
        return TreeUpload(*of_an_upload)

    def _written_by(self) -> dict[str, Any]:
        """Return what the manifest says of its writers."""
        return {}

    def _forget_take(self, taken: Taken) -> None:
        if self._taken.get(taken.stage.tree.name) == taken.stage.tree:
            del self._taken[taken.stage.tree.name]

    def _unique_name(self, entry: str, serial: int) -> str:
        """Return the final name of this checkpoint, fit to be part of a key. None is ever published twice."""
        safe = safe_name(entry)
        if not self._names_are_free:
            return "%s~%d" % (safe, serial)
        number, name = 1, safe
        while name in self._published:
            number, name = number + 1, "%s~%d" % (safe, number + 1)
        return name


def safe_name(entry: str) -> str:
    """Return a name for an entry that is fit to be part of a key, and no other entry's."""
    safe = "".join(character if character in _SAFE else "_" for character in entry)
    if safe != entry or len(safe) > _NAME_MAX:
        safe = safe[:_NAME_MAX] + "-" + hashlib.sha256(os.fsencode(entry)).hexdigest()[:12]
    return safe
