"""One checkpoint of several machines: each stores its own part of it, and the first makes one manifest of all parts.

Theory. The first machine decides. Once an entry of its own folder is complete as far as it has it, it asks all others
to hold theirs of the same name. Each of them answers that it holds its part, or what that waits for: like the first one
it judges by settle time, marks and its command's end, except that a mark which frameworks write after all processes
have stored what is theirs (`.metadata`) speaks for all. Held bytes can be rotated away no more. Once all hold theirs,
the checkpoint is queued as any other, and when its turn comes each machine stores the content of its part and sends the
list of it to the first one, over the connection that only a machine of this round has. The first one puts all lists
together, and what an index or `.metadata` in any of them names must be there. Then it publishes one manifest. So
nothing else needs to know of parts: not the daemon, not a restore, and what is not published is not resumed from.

Two machines may save the same file with the same content. With other content neither is right, and nothing is stored.
For the same reason each save needs a name of its own: of an entry that is written over, one machine may hold what is
before, and another what is after. A machine that is lost takes its unsent part with it, and the checkpoint is dropped.
"""

from __future__ import annotations

import base64
import os
import threading
from typing import Any, Iterable

from spotd_jobs.runner import complete, manifest
from spotd_jobs.runner.checkpoint_uploader import CheckpointUploader, CommandEnd, Taken, Watched
from spotd_jobs.runner.gang import Gang
from spotd_jobs.runner.manifest import FILE
from spotd_jobs.runner.part_lists import merge, metadata_of, read_part
from spotd_jobs.runner.process import ProcessEnd
from spotd_jobs.runner.store import GivenUp
from spotd_jobs.runner.upload import TreeUpload, Yielded
from spotd_jobs.wire.client import sinks
from spotd_jobs.wire.client.sinks import ascii_text, clean, log_line, reason_of
from spotd_jobs.wire.client.web import now_text, steady

_PIECE_BYTES = 512 * 1024
_WAIT_S = 0.2
_ASK_AGAIN_MAX_S = 10.0
_AFTER_GRACE_S = 30.0
_ANSWERS_S = 600.0
_ORDERS_MAX = 10_000
_FOREVER_NS = 2**63
_WRITTEN_OVER = "it was written over, and several machines save it: each save needs a name of its own"


class _Hold:
    """A checkpoint of which all machines are asked to hold their parts.

    Attributes:
        answers: by rank, the newest one.
    """

    def __init__(self, taken: Taken, named: dict[str, str]) -> None:
        self.taken = taken
        self.named = named
        self.answers: dict[int, dict[str, Any]] = {}
        self.began = steady()
        self.asked_at = float("-inf")
        self.held_at = float("inf")

    @property
    def tree(self) -> manifest.Tree:
        return self.taken.stage.tree

    def why_not(self, ranks: Iterable[int], nodes: int) -> str:
        """Return what it waits for; empty once all of these hold their parts."""
        for rank in ranks:
            answer = self.answers.get(rank, {"why": "has not answered"})
            if not answer.get("held"):
                return "machine %d of %d %s" % (rank + 1, nodes, clean(str(answer.get("why"))))
        lacks, has = map(set, metadata_of(self.tree))
        for answer in list(self.answers.values()):
            lacks.update(answer["lacks"])
            has.update(answer["has"])
        return complete.LACKS_METADATA if lacks - has else ""


class _PartsUploader(CheckpointUploader):
    """What both kinds of machines do alike: they judge by what is here alone, and take each name once."""

    def __init__(self, gang: Gang, *of_an_uploader: Any) -> None:
        super().__init__(*of_an_uploader)
        self._gang = gang
        self._nodes = gang.place.nodes
        self._news = threading.Condition()
        gang.on_part = self._on_message

    def _on_message(self, rank: int, row: dict[str, Any]) -> None:
        raise NotImplementedError

    def _upload_of(self, *of_an_upload: Any) -> TreeUpload:
        return TreeUpload(*of_an_upload, with_digests=True)

    def _judge(self, tree: manifest.Tree, around: complete.CompletenessContext) -> complete.Completeness:
        return super()._judge(tree, around._replace(in_parts=True))


class Gatherer(_PartsUploader):
    """The checkpoint folder of the first machine, which makes one checkpoint of what all have."""

    def __init__(self, *of_an_uploader: Any) -> None:
        super().__init__(*of_an_uploader)
        self._ranks = range(1, self._nodes)
        self._holds: dict[str, _Hold] = {}
        self._named: dict[int, dict[str, str]] = {}
        self._arriving: dict[int, dict[int, list[bytes]]] = {}
        self._arrived: dict[int, dict[int, bytes]] = {}
        self._failed: dict[int, str] = {}
        self._tries: dict[int, int] = {}
        self._quiet: set[int] = set()

    def drain(self, give_up_at: float, *, ended_cleanly: bool, died_at: float) -> bool:
        self._stopping = True
        self._await_quiet(give_up_at)
        answered_by = min(give_up_at, steady() + _ANSWERS_S)
        try:
            while True:
                self._scan(CommandEnd(ended_cleanly, died_at))
                with self._news:
                    if not self._holds or steady() > answered_by:
                        break
                    self._news.wait(_WAIT_S)
            for hold in list(self._holds.values()):
                self._release(hold, hold.why_not(self._ranks, self._nodes))
            return super().drain(give_up_at, ended_cleanly=ended_cleanly, died_at=died_at)
        finally:
            self._say(over=1)

    def _await_quiet(self, give_up_at: float) -> None:
        """Wait until the commands of all others have ended, too: what they write until then belongs to it."""
        give_up_at = min(give_up_at, steady() + self._gang.grace_s + _AFTER_GRACE_S)
        if self._has_all_quiet():
            return
        self._gang.end_commands("the first machine's command has ended")
        with self._news:
            while steady() < give_up_at and not self._has_all_quiet():
                self._news.wait(_WAIT_S)

    def _has_all_quiet(self) -> bool:
        return set(self._ranks) <= self._quiet | set(self._gang.absent())

    def _scan(self, end: CommandEnd | None) -> None:
        super()._scan(end)
        with self._scan_lock:
            for hold in list(self._holds.values()):
                self._conclude(hold, is_over=end is not None)

    def _take(self, candidate: manifest.Tree) -> None:
        if candidate.name in self._taken:
            self._refuse(candidate.name, _WRITTEN_OVER)
            return
        hold = self._holds.get(candidate.name)
        if hold is not None and hold.tree != candidate:
            self._release(hold, "")
            hold = None
        if hold is None:
            hold = self._begin(candidate)
        if hold is not None and steady() - hold.asked_at >= min(_ASK_AGAIN_MAX_S, (steady() - hold.began) / 4):
            self._ask(hold)

    def _begin(self, candidate: manifest.Tree) -> _Hold | None:
        named = complete.named_files(self._folder, candidate)
        if named is None:
            self._refuse(candidate.name, complete.NO_INDEX)
            return None
        step, serial = complete.step_of(self._folder, candidate), self._store.numbers.take()
        try:
            stage = manifest.stage(self._folder, candidate, os.path.join(self._stages, str(serial)))
        except manifest.Vanished:
            return None
        hold = self._holds[candidate.name] = _Hold(Taken(stage, serial, step, now_text()), named)
        while len(self._holds) > self._keep:
            oldest = min(self._holds.values(), key=lambda one: one.taken.serial)
            self._taken[oldest.tree.name] = oldest.tree
            self._release(oldest, oldest.why_not(self._ranks, self._nodes))
        return hold

    def _ask(self, hold: _Hold) -> None:
        first = next((node for node in hold.tree.files if node.size), None)
        like = None if first is None else [ascii_text(first.path), first.size, first.mtime_ns, first.inode]
        row = {"hold": hold.taken.serial, "name": ascii_text(hold.tree.name), "like": like}
        hold.asked_at = steady()
        for rank in self._ranks:
            if not hold.answers.get(rank, {}).get("held"):
                hold.answers.pop(rank, None)
                self._gang.send_part(dict(row, sealed=complete.is_sealed(hold.tree)), rank)

    def _conclude(self, hold: _Hold, *, is_over: bool) -> None:
        """Queue it once all hold their parts of the same save; let it go where one never will."""
        why = hold.why_not(self._ranks, self._nodes)
        name = hold.tree.name
        if not why:
            # Others may write the next save of this name already. This one would, too, within the settle time.
            hold.held_at = min(hold.held_at, steady())
            if not is_over and steady() - hold.held_at < self._settle_s:
                return
            if not self._is_unchanged(hold.tree):
                self._release(hold, "it was changed or removed before all machines held it")
                return
            del self._holds[name]
            self._named[hold.taken.serial] = hold.named
            self._enqueue(hold.taken)
            return
        absent = self._gang.absent()
        if is_over and any(not (one.get("held") or one.get("final")) for one in list(hold.answers.values())):
            self._ask(hold)  # what they said before their commands had ended is not their last word
        has_all = all(rank in hold.answers or rank in absent for rank in self._ranks)
        if (is_over and has_all) or not os.path.lexists(os.path.join(self._folder, name)):
            self._taken[name] = hold.tree
            self._release(hold, why)
        elif has_all and steady() - hold.began > 2 * self._settle_s:
            self._refuse(name, why)  # it may come yet, but a job that trains on for days without one must show it

    def _is_unchanged(self, tree: manifest.Tree) -> bool:
        try:
            return manifest.scan(self._folder, tree.name) == tree
        except (manifest.Vanished, manifest.Unfit):
            return False

    def _release(self, hold: _Hold, why: str) -> None:
        if why:
            self._refuse(hold.tree.name, why)
        self._holds.pop(hold.tree.name, None)
        hold.taken.stage.release()
        self._say(drop=hold.taken.serial)

    def _say(self, **row: Any) -> None:
        for rank in self._ranks:
            self._gang.send_part(row, rank)

    def _skip(self, taken: Taken, why: str) -> None:
        super()._skip(taken, why)
        self._forget(taken)
        self._say(drop=taken.serial)

    def _forget_take(self, taken: Taken) -> None:
        """Do nothing: a name is taken once, whatever became of it."""

    def _forget(self, taken: Taken) -> None:
        with self._news:
            for rows in (self._named, self._arriving, self._arrived, self._failed, self._tries):
                rows.pop(taken.serial, None)

    def _upload(self, taken: Taken) -> None:
        super()._upload(taken)
        self._forget(taken)
        self._say(stored=taken.serial)

    def _written_by(self) -> dict[str, Any]:
        return {"nodes": self._nodes}

    def _send(self, taken: Taken) -> list[dict[str, Any]]:
        serial = taken.serial
        with self._news:
            # After a pause for a newer one, what others had sent by then may be counted on no more (`ChunkIndex`).
            number = self._tries[serial] = self._tries.get(serial, 0) + 1
            self._arriving[serial], self._arrived[serial] = {}, {}
            self._failed.pop(serial, None)
        self._say(send=serial, number=number)
        entry, prefix = ascii_text(taken.stage.tree.name), self._store.prefix
        files = [super()._send(taken)]
        named = dict(self._named[serial])
        for _, data in sorted(self._await_parts(taken).items()):
            part = read_part(data, prefix)
            files.append(part.files)
            named.update(part.named)
            self.progress.sent += part.sent
        rows = merge(entry, files)
        paths = [str(row["path"]) for row in rows if row["type"] == FILE]
        inside = [sinks.name_of(path[len(entry) + 1 :] or path) for path in paths]
        lacking = complete.why_not_whole(inside, named)
        if lacking:
            raise manifest.Unfit(lacking)
        return rows

    def _await_parts(self, taken: Taken) -> dict[int, bytes]:
        with self._news:
            while True:
                arrived = self._arrived[taken.serial]
                if len(arrived) == len(self._ranks):
                    return arrived
                if taken.serial in self._failed:
                    raise manifest.Unfit(self._failed[taken.serial])
                lost = [rank for rank in self._gang.absent() if rank not in arrived]
                if lost:
                    words = "machine %d of %d was lost before its part was stored"
                    raise manifest.Unfit(words % (lost[0] + 1, self._nodes))
                if self._must_yield():
                    raise Yielded(taken.stage.tree.name)
                if steady() > self._give_up_at:
                    raise GivenUp("the parts of other machines did not come in time")
                self._news.wait(_WAIT_S)

    def _on_message(self, rank: int, row: dict[str, Any]) -> None:
        serial = row.get("answer") or row.get("failed") or row.get("piece") or 0
        with self._news:
            if "quiet" in row:
                self._quiet.add(rank)
            elif "answer" in row:
                if row.get("held"):
                    row = {"held": 1, "lacks": list(map(str, row["lacks"])), "has": list(map(str, row["has"]))}
                for hold in list(self._holds.values()):
                    if hold.taken.serial == serial:
                        hold.answers[rank] = row
                self._wake.set()
            elif "failed" in row:
                if self._tries.get(serial) == row.get("number"):
                    why = clean(str(row.get("why")))
                    self._failed[serial] = "machine %d of %d: %s" % (rank + 1, self._nodes, why)
            elif serial in self._arriving and self._tries[serial] == row["number"]:
                pieces = self._arriving[serial].setdefault(rank, [])
                pieces.append(base64.b64decode(row["data"]))
                if sum(map(len, pieces)) > sinks.MANIFEST_BYTES_MAX:
                    raise ValueError("a part's list is too long")
                if row.get("last"):
                    self._arrived[serial][rank] = b"".join(self._arriving[serial].pop(rank))
            self._news.notify_all()


class Keeper(_PartsUploader):
    """The checkpoint folder of another machine, which stores its part when the first one asks for it."""

    def __init__(self, *of_an_uploader: Any) -> None:
        super().__init__(*of_an_uploader)
        self._held: dict[int, tuple[Taken | None, dict[str, str]]] = {}
        self._asked: dict[int, int] = {}
        """By checkpoint, how often its part was asked for."""
        self._files: dict[int, list[dict[str, Any]]] = {}
        self._orders: list[dict[str, Any]] = []
        self._end: CommandEnd | None = None
        self._is_over = False
        threading.Thread(target=self._serve, name="parts", daemon=True).start()

    def note_end(self, ended: ProcessEnd) -> None:
        self._end = CommandEnd(ended.succeeded, ended.at)
        self._gang.send_part({"quiet": 1})

    def drain(self, give_up_at: float, *, ended_cleanly: bool, died_at: float) -> bool:
        self._give_up_at = give_up_at
        if self._end is None:
            self._end = CommandEnd(ended_cleanly, died_at)
            self._gang.send_part({"quiet": 1})
        self.hurry()
        self._stopping = True
        with self._news:
            while not self._is_over and not self._gang.absent() and steady() < give_up_at:
                self._news.wait(_WAIT_S)
        return self._is_over

    def _take(self, candidate: manifest.Tree) -> None:
        """Judge it no more: the first machine asks for it."""
        self._taken[candidate.name] = candidate

    def _refuse(self, name: str, why: str) -> None:
        """Leave it to the first machine to say what is refused."""

    def _on_message(self, rank: int, row: dict[str, Any]) -> None:
        del rank
        with self._news:
            if len(self._orders) < _ORDERS_MAX:
                self._orders.append(row)
            self._is_over = self._is_over or "over" in row
            self._news.notify_all()

    def _serve(self) -> None:
        while True:
            with self._news:
                while not self._orders:
                    self._news.wait()
                row = self._orders.pop(0)
            try:
                if "hold" in row:
                    final = self._end is not None
                    self._gang.send_part(dict(self._hold(row), answer=row["hold"], final=final))
                elif "send" in row:
                    self._asked[int(row["send"])] = int(row["number"])
                    self._begin_send(int(row["send"]))
                elif "drop" in row or "stored" in row:
                    self._let_go(row)
            except Exception as error:  # noqa: BLE001 - one order that fails must not end the service of all later ones
                log_line("a part of a checkpoint: " + reason_of(error))
                if "hold" in row:
                    self._gang.send_part({"answer": row["hold"], "why": "failed: " + reason_of(error), "final": True})
                elif "send" in row:
                    self._say_failure(int(row["send"]), reason_of(error))

    def _hold(self, row: dict[str, Any]) -> dict[str, Any]:
        """Hold what is here of this checkpoint; return the answer."""
        name, serial = sinks.name_of(str(row["name"])), int(row["hold"])
        with self._scan_lock:
            try:
                tree = manifest.scan(self._folder, name)
            except manifest.Vanished:
                tree = manifest.Tree(name, ())
            except manifest.Unfit as unfit:
                return {"why": "can not store its part: %s" % unfit}
            if row["like"] in [[ascii_text(node.path), node.size, node.mtime_ns, node.inode] for node in tree.files]:
                return self._held_answer(serial, None, {})  # the first machine has this very folder
            if not tree.size:
                return self._held_answer(serial, None, {}) if row["sealed"] else {"why": "has no part of it"}
            why, named = self._why_not_done(tree, sealed=bool(row["sealed"])), complete.named_files(self._folder, tree)
            if why or named is None:
                return {"why": "is not done: " + (why or complete.NO_INDEX)}
            try:
                stage = manifest.stage(self._folder, tree, os.path.join(self._stages, str(serial)))
            except manifest.Vanished:
                return {"why": "is not done: " + complete.MAY_BE_WRITTEN}
            return self._held_answer(serial, Taken(stage, serial, None, now_text()), named)

    def _held_answer(self, serial: int, taken: Taken | None, named: dict[str, str]) -> dict[str, Any]:
        lacks, has = ([], []) if taken is None else metadata_of(taken.stage.tree)
        self._held[serial] = (taken, named)
        return {"held": 1, "lacks": lacks, "has": has}

    def _why_not_done(self, tree: manifest.Tree, *, sealed: bool) -> str:
        """Return what this machine's part waits for; empty once it is complete."""
        watched, end = self._watched.get(tree.name), self._end
        if watched is None or watched.tree != tree:
            watched = self._watched[tree.name] = Watched(tree)
        verdict = complete.judge(
            self._folder,
            tree,
            complete.CompletenessContext(
                pointed=frozenset(),
                pointer_ns=_FOREVER_NS,  # the first machine has the pointer file, and asks once that names it
                stable_s=(steady() if end is None else end.at) - watched.since,
                settle_s=self._settle_s,
                ended_cleanly=None if end is None else end.cleanly,
                in_parts=True,
                sealed=sealed,
            ),
        )
        return "" if verdict.complete else verdict.why

    def _begin_send(self, serial: int) -> None:
        """Queue the upload of this part: the content that is stored already costs nothing again."""
        if serial not in self._held:
            self._say_failure(serial, "it holds no part")
            return
        taken, _ = self._held[serial]
        if taken is None:
            self._send_list(serial, [], self._asked[serial])
            return
        with self._change:
            self._queue.append(taken)
            self._change.notify_all()

    def _upload(self, taken: Taken) -> None:
        number = self._asked.get(taken.serial, 0)
        if taken.serial not in self._held:
            return  # let go meanwhile
        self.progress.begin(taken.stage.tree.name, taken.stage.tree.size)
        try:
            self._send_list(taken.serial, self._send(taken), number)
        finally:
            self.progress.end()

    def _send_list(self, serial: int, files: list[dict[str, Any]], number: int) -> None:
        """Send the list of this machine's part, whose content is stored."""
        # The manifest that will name these chunks counts as the next one, whenever it comes: as on one machine.
        self._known.publishing()
        about = {"named": self._held[serial][1], "sent": self.progress.sent if files else 0}
        data = manifest.manifest_bytes(self._store, entry="-", files=files, **about)
        self._files[serial] = files
        for first in range(0, len(data), _PIECE_BYTES):
            piece = base64.b64encode(data[first : first + _PIECE_BYTES]).decode()
            row = {"piece": serial, "data": piece, "last": first + _PIECE_BYTES >= len(data)}
            self._gang.send_part(dict(row, number=number))

    def _skip(self, taken: Taken, why: str) -> None:
        taken.stage.release()
        self._say_failure(taken.serial, why)

    def _say_failure(self, serial: int, why: str) -> None:
        self._gang.send_part({"failed": serial, "number": self._asked.get(serial, 0), "why": why})

    def _let_go(self, row: dict[str, Any]) -> None:
        """Free what is held of a checkpoint that the first machine has published, or given up."""
        serial = int(row["stored"] if "stored" in row else row["drop"])
        taken, _ = self._held.pop(serial, (None, {}))
        files = self._files.pop(serial, None)
        self._asked.pop(serial, None)
        if "stored" in row and files is not None:
            self._known.published(files)
        if taken is not None:
            with self._change:
                self._queue = [other for other in self._queue if other.serial != serial]
            taken.stage.release()

    def _forget_take(self, taken: Taken) -> None:
        """Do nothing: the first machine asks again."""
