"""When an entry of the checkpoint folder is a complete checkpoint.

Theory. Three things must hold. It is not marked as unfinished: no temporary name, no `checkpoint-is-incomplete.txt`,
and where it is plainly the work of a framework that ends with a mark of its own, that mark is there (a quiet writer
that is not done must not pass for a finished one). What can be checked cheaply is sound: indexes name existing shards,
archives have their ends. And it is finished: its mark shows it, or nothing in it has changed for the settle time, or
the job ended with exit code 0, after which no process writes. A process that was killed or failed proves nothing: it
may have died writing (of a full disk). What it left counts only by its mark, by having settled before, or if it is a
single archive with its end in place.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
from typing import Any, Callable, Iterable, Mapping, NamedTuple

from spotd_jobs.runner.manifest import ChunkIndex, Node, Tree, new_mark
from spotd_jobs.runner.store import RunnerStore
from spotd_jobs.wire.client.sinks import COMPANIONS_MAX, ascii_text, read_text

INCOMPLETE_MARK = "checkpoint-is-incomplete.txt"
POINTERS = ("latest", "latest_checkpointed_iteration.txt")
_MARKS = frozenset((".complete", "DONE", "STABLE", "_SUCCESS", "commit_success.txt", ".snapshot_metadata", ".metadata"))
_TEMPORARY_ENDS = (".tmp", ".partial", ".incomplete")
_ORBAX_TEMPORARY = ".orbax-checkpoint-tmp"
_HF_NAME = re.compile(r"checkpoint-(\d+)")
_MEGATRON_NAME = re.compile(r"iter_(\d{7,})")
_DEEPSPEED_FILE = re.compile(r"(mp_rank_\d+.*_model_states\.pt|(bf16_|fp16_)?zero_pp_rank_.*\.pt)")
_RANK_METADATA = re.compile(r"__\d+\.metadata")
_DCP_PART = re.compile(rb"__\d+_\d+\.distcp")
_ZERO_PART = re.compile(r"(.*)zero_pp_rank_(\d+)_(mp_rank_\d+.*)")
_COLLECTIVE_MARKS = frozenset((".metadata", ".snapshot_metadata", "commit_success.txt"))
"""Marks that are written once the processes of all machines have stored what is theirs."""
_STEP_NAMED = re.compile(r"(?:step|iter|global_step|checkpoint)[=_-]?(\d+)", re.IGNORECASE)
_NUMBER = re.compile(r"\d+")
_STEP_MAX = 2**53
_POINTER_BYTES_MAX = 255
LACKS_METADATA = "its .metadata is not written yet"
NO_INDEX = "an index in it can not be read"
MAY_BE_WRITTEN = "it may still be written"
AFTER_DEATH = {MAY_BE_WRITTEN: "the job died before it was certainly complete"}
"""The verdict on an entry to which nothing writes any more."""
_SOUND_FILES_MAX = 2000
_JSON_BYTES_MAX = 64 * 1024 * 1024
_SAFETENSORS_HEADER_MAX = 100 * 1024 * 1024
_ZIP_TAIL = 65557


class Completeness(NamedTuple):
    """Whether the entry is complete, and what it waits for if not.

    Attributes:
        unsound: nothing more will be written, and yet its content is cut short: it waits for nothing.
    """

    complete: bool
    why: str
    unsound: bool = False


class CompletenessContext(NamedTuple):
    """What is known beside the entry itself.

    Attributes:
        pointed: every name that a pointer file (`latest` ...) holds now or has ever held.
        pointer_ns: when the newest pointer file was written, 0 without one.
        stable_s: for how long the entry has not changed.
        settle_s: how long that must be.
        ended_cleanly: `None` while the job runs; then whether it ended by itself with exit code 0.
        in_parts: other machines have parts of it, so that what it lacks here may be there.
        sealed: a mark of another machine shows that all have stored what is theirs.
    """

    pointed: frozenset[str]
    pointer_ns: int
    stable_s: float
    settle_s: float
    ended_cleanly: bool | None
    in_parts: bool = False
    sealed: bool = False


def is_temporary(name: str) -> bool:
    """Whether this name is never a checkpoint's."""
    low = name.lower()
    return name.startswith(".") or low.startswith("tmp") or low.endswith(_TEMPORARY_ENDS) or _ORBAX_TEMPORARY in low


def is_pointer(folder: str, name: str) -> bool:
    """Whether this is a framework's small file that names a checkpoint beside it, and none itself.

    A user may well save a whole checkpoint under the name `latest`.
    """
    if name not in POINTERS:
        return False
    try:
        facts = os.lstat(os.path.join(folder, name))
    except OSError:
        return False
    return stat.S_ISREG(facts.st_mode) and facts.st_size <= _POINTER_BYTES_MAX


def needs_pointer(tree: Tree) -> bool:
    """Whether its framework finishes a checkpoint by naming it in a file beside it: DeepSpeed, Megatron-LM."""
    if _MEGATRON_NAME.fullmatch(tree.name):
        return True
    return any(_DEEPSPEED_FILE.fullmatch(path) for path in tree.inside())


def pointed_names(text: str) -> frozenset[str]:
    """Return the entries that the content of a pointer file names: a DeepSpeed tag, or a Megatron iteration."""
    word = text.strip()
    if word.isdigit():
        return frozenset((word, "iter_%07d" % int(word))) if len(word) < 20 else frozenset()
    return frozenset((word,)) if word and "/" not in word else frozenset()


def judge(folder: str, tree: Tree, around: CompletenessContext) -> Completeness:
    """Whether the entry is a complete checkpoint now. See the module for the theory."""
    inside = tree.inside()
    if is_temporary(tree.name):
        return _not_yet("its name is never a checkpoint's")
    if tree.size == 0:
        return _not_yet("it is empty")
    if any(path.rsplit("/", 1)[-1] == INCOMPLETE_MARK for path in inside):
        return _not_yet("it says that it is incomplete")
    if any(_ORBAX_TEMPORARY in path for path in inside):
        return _not_yet("a part of it has a temporary name")
    missing = _missing_mark(tree, inside, around)
    if missing:
        return _not_yet(missing)
    finished = _why_finished(folder, tree, inside, around)
    if not finished:
        return _not_yet(MAY_BE_WRITTEN)
    unsound = _unsound(folder, tree, inside) or ("" if around.in_parts else _lacking(folder, tree, inside))
    if unsound:
        return Completeness(complete=False, why=unsound, unsound=True)
    return Completeness(complete=True, why=finished)


def _not_yet(why: str) -> Completeness:
    return Completeness(complete=False, why=why)


def _missing_mark(tree: Tree, inside: dict[str, Node], around: CompletenessContext) -> str:
    """Return what a framework's own checkpoint lacks; empty if nothing."""
    if not around.in_parts and lacks_metadata(inside):
        return LACKS_METADATA
    if _HF_NAME.fullmatch(tree.name) and "training_args.bin" in inside and "trainer_state.json" not in inside:
        return "its trainer_state.json is not written yet"
    # One that was passed unnoticed has no name of its own any more, but was finished before a later one was named.
    if needs_pointer(tree) and tree.name not in around.pointed and tree.changed_ns > around.pointer_ns:
        return "the framework's pointer file does not name it yet"
    return ""


def _why_finished(folder: str, tree: Tree, inside: dict[str, Node], around: CompletenessContext) -> str:
    """Why nothing more will be written; empty if that is not known."""
    if around.stable_s >= around.settle_s:
        return "unchanged for the settle time"
    if around.ended_cleanly:
        return "its writer has ended"
    if around.sealed:
        return "marked by another machine"
    # A plain file named DONE is a checkpoint of that name, not a mark of itself.
    marked = _MARKS.intersection(inside) - {tree.name}
    if marked:
        return "marked by " + sorted(marked)[0]
    if tree.name in around.pointed:
        return "named by a pointer file"
    if "trainer_state.json" in inside and not _has_many_ranks(inside):
        return "marked by trainer_state.json"
    if around.ended_cleanly is False and set(inside) == {tree.name} and _is_archive(os.path.join(folder, tree.name)):
        return "an archive with its end in place"
    return ""


def _has_many_ranks(inside: dict[str, Node]) -> bool:
    """Other processes may write their part after rank 0 wrote the mark. One `rng_state.pth` is a single process."""
    return "rng_state.pth" not in inside or any("/" in path for path in inside)


def _unsound(folder: str, tree: Tree, inside: dict[str, Node]) -> str:
    """Return what shows that the content is cut short; empty if nothing does."""
    state = _trainer_state(folder, tree) if "trainer_state.json" in inside else {}
    if state is None:
        return "its trainer_state.json can not be read"
    named = _HF_NAME.fullmatch(tree.name)
    if named and isinstance(state.get("global_step"), int) and state["global_step"] != int(named[1]):
        return "its trainer_state.json speaks of another step"
    for number, path in enumerate(inside):
        if number >= _SOUND_FILES_MAX:
            break
        if not _has_its_end(_place(folder, tree, path)):
            return "a file in it is cut short"
    return ""


def _place(folder: str, tree: Tree, path: str) -> str:
    below = os.path.join(folder, tree.name)
    return below if path == tree.name and not os.path.isdir(below) else os.path.join(below, path)


def _lacking(folder: str, tree: Tree, inside: Iterable[str]) -> str:
    """Return which file is missing that an index or PyTorch's metadata names; empty if none is."""
    named = named_files(folder, tree)
    return NO_INDEX if named is None else lacking(named, inside)


def lacking(named: Mapping[str, str], inside: Iterable[str]) -> str:
    """Return what is said of the first of the named files that is not there; empty if all are."""
    there = set(inside)
    return next((why for path, why in named.items() if path not in there), "")


def named_files(folder: str, tree: Tree) -> dict[str, str] | None:
    """Return each file that an index in it, or PyTorch's metadata, names, and what to say where that is missing.

    The metadata is a pickle: read for names, never loaded. `None`: one of them can not be read.
    """
    named: dict[str, str] = {}
    for path in tree.inside():
        name = path.rsplit("/", 1)[-1]
        found: Iterable[str] | None = ()
        why = "a part that its .metadata names is missing"
        if name.endswith(".index.json"):
            index, why = _json(_place(folder, tree, path)), "a shard that its index names is missing"
            weights = None if index is None else index.get("weight_map")
            found = None if index is None else map(str, weights.values()) if isinstance(weights, dict) else ()
        elif name == ".metadata":
            try:
                with open(_place(folder, tree, path), "rb") as stream:
                    found = map(os.fsdecode, set(_DCP_PART.findall(stream.read(_JSON_BYTES_MAX))))
            except OSError:
                found = None
        if found is None:
            return None
        for one in found:
            named[path[: -len(name)] + one] = why
    return named


def lacks_metadata(inside: Iterable[str]) -> bool:
    """Whether there are parts of PyTorch's, and nothing beside them says that they are all."""
    folders: dict[str, set[str]] = {}
    for path in inside:
        folder, _, name = path.rpartition("/")
        folders.setdefault(folder, set()).add(name)
    return any(
        any(name.endswith(".distcp") for name in names)
        and ".metadata" not in names
        and not any(_RANK_METADATA.fullmatch(name) for name in names)
        for names in folders.values()
    )


def is_sealed(tree: Tree) -> bool:
    """Whether it has a mark that is written only once all processes of the job have stored what is theirs."""
    return bool(_COLLECTIVE_MARKS.intersection(tree.inside()))


def is_bound(inside: Iterable[str]) -> bool:
    """Whether only as many machines as wrote it can load it: DeepSpeed's optimizer states by rank."""
    return any(_ZERO_PART.fullmatch(path) for path in inside)


def why_not_whole(inside: Iterable[str], named: Mapping[str, str]) -> str:
    """Return what all parts of a checkpoint lack together; empty if nothing."""
    there = set(inside)
    if lacks_metadata(there):
        return LACKS_METADATA
    ranks: dict[tuple[str, str], set[int]] = {}
    for found in filter(None, map(_ZERO_PART.fullmatch, there)):
        ranks.setdefault((found[1], found[3]), set()).add(int(found[2]))
    if any(len(numbers) <= max(numbers) for numbers in ranks.values()):
        return "the optimizer states of a rank are missing"
    return lacking(named, there)


def _json(place: str) -> dict[str, object] | None:
    text = read_text(place, _JSON_BYTES_MAX)
    try:
        value = json.loads(text or "")
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def _trainer_state(folder: str, tree: Tree) -> dict[str, object] | None:
    return _json(os.path.join(folder, tree.name, "trainer_state.json"))


def _has_its_end(place: str) -> bool:
    """Whether a zip archive (`torch.save`, numpy) or a safetensors file ends where its header states. Others pass."""
    try:
        with open(place, "rb") as stream:
            start = stream.read(8)
            size = os.fstat(stream.fileno()).st_size
            if start.startswith(b"PK\x03\x04"):
                stream.seek(max(0, size - _ZIP_TAIL))
                return b"PK\x05\x06" in stream.read(_ZIP_TAIL)
            if place.endswith(".safetensors"):
                return _safetensors_size(start, stream.read) == size
    except OSError:
        return False
    return True


def _is_archive(place: str) -> bool:
    """Whether `_has_its_end` can really judge this file."""
    try:
        with open(place, "rb") as stream:
            return place.endswith(".safetensors") or stream.read(4) == b"PK\x03\x04"
    except OSError:
        return False


def _safetensors_size(start: bytes, read: Callable[[int], bytes]) -> int:
    header_size = int.from_bytes(start, "little") if len(start) == 8 else -1
    if not 0 < header_size <= _SAFETENSORS_HEADER_MAX:
        return -1
    try:
        header = json.loads(read(header_size))
        ends = [int(tensor["data_offsets"][1]) for name, tensor in header.items() if name != "__metadata__"]
    except (ValueError, KeyError, TypeError, IndexError, AttributeError):
        return -1
    return 8 + header_size + max(ends, default=0)


def step_of(folder: str, tree: Tree) -> int | None:
    """Return the training step of the checkpoint, where its content or its name shows it."""
    if "trainer_state.json" in tree.inside():
        step = (_trainer_state(folder, tree) or {}).get("global_step")
        if isinstance(step, int) and 0 <= step < _STEP_MAX:
            return step
    named = _STEP_NAMED.findall(tree.name)
    numbers = named or _NUMBER.findall(tree.name)
    return int(numbers[-1]) if numbers and len(numbers[-1]) < 16 else None


# What lies beside a checkpoint and names it: without it the framework would not find its own checkpoint again.
#
# DeepSpeed's and Megatron's pointer files, and links such as Lightning's `last.ckpt`. They are stored with each
# checkpoint they belong to, since each may be the one that is restored.


_COMPANION_BYTES_MAX = 4096


def companions(folder: str, of: Tree, pointed: set[str], store: RunnerStore, known: ChunkIndex) -> list[dict[str, Any]]:
    """Manifest entries of the pointers and links to this checkpoint; their content is in the store.

    Raises:
        store.GivenUp
    """
    entries: list[dict[str, Any]] = []
    is_named = of.name in pointed or needs_pointer(of)
    for beside in sorted(os.listdir(folder)):
        if len(entries) == COMPANIONS_MAX:
            break
        place = os.path.join(folder, beside)
        if os.path.islink(place):
            if os.readlink(place) == of.name and not is_temporary(beside):
                entries.append(_entry(beside, "link", of.name))
        elif is_named and is_pointer(folder, beside):
            text = read_text(place, _COMPANION_BYTES_MAX) or ""
            if of.name not in pointed_names(text):
                # It names a newer one by now; what is restored must find itself.
                text = str(int(of.name[len("iter_") :])) if of.name.startswith("iter_") else of.name
            entries.append(_stored(beside, os.fsencode(text), store, known))
    return entries


def _stored(name: str, data: bytes, store: RunnerStore, known: ChunkIndex) -> dict[str, Any]:
    digest = hashlib.sha256(data).hexdigest()
    key = known.claim(digest)
    if key is None:
        name_in_store = "data/" + digest + new_mark()
        key = store.prefix + name_in_store
        try:
            store.put(name_in_store, data, digest)
        except BaseException:
            known.failed(digest)
            raise
        known.sent(digest, key, len(data))
    entry = _entry(name, "file", None)
    entry.update(
        size=len(data),
        mode=0o644,
        chunks=[{"key": key, "sha256": digest, "size": len(data), "offset": 0, "length": len(data)}],
    )
    return entry


def _entry(path: str, kind: str, target: str | None) -> dict[str, Any]:
    return {
        "path": ascii_text(path),
        "type": kind,
        "size": 0,
        "mode": 0o777,
        "mtime_ns": 0,
        "target": None if target is None else ascii_text(target),
        "chunks": [],
    }
