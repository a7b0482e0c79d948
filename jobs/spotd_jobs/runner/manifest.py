"""A manifest as a document: written with every chunk listed once, read in this and the older form.

The numbers here are those of the daemon's own reader, which refuses what is beyond them.
"""

from __future__ import annotations

import gzip
import json
import os
import stat
import threading
from typing import Any, Iterable, NamedTuple

from spotd_jobs.runner.store import RunnerStore
from spotd_jobs.wire.client import sinks
from spotd_jobs.wire.client.sinks import WINDOW

# What lies below one entry of the checkpoint folder, at one moment, and a copy of it that rotation can not take away.
#
# A `Tree` is compared as a whole: two equal ones mean that nothing was added, removed, replaced or written in
# between, as far as names, sizes, times and inodes show.


ENTRIES_MAX = 100_000
DEPTH_MAX = 250
"""Below the limit of manifests, so that companions and names of outputs fit, too."""
_PATH_BYTES_MAX = 4000
FILE, DIR, LINK = "file", "dir", "link"


class Unfit(Exception):
    """An entry that can not be stored as a checkpoint. The text states why."""


class Vanished(Exception):
    """An entry that went away or changed while it was read."""


class Node(NamedTuple):
    """One path below the checkpoint folder. `path` begins with the entry's name."""

    path: str
    kind: str
    size: int
    mtime_ns: int
    inode: int
    mode: int
    target: str | None


class Tree(NamedTuple):
    """An entry and everything below it, in path order."""

    name: str
    nodes: tuple[Node, ...]

    @property
    def files(self) -> tuple[Node, ...]:
        return tuple(node for node in self.nodes if node.kind == FILE)

    @property
    def size(self) -> int:
        return sum(node.size for node in self.nodes)

    @property
    def changed_ns(self) -> int:
        """When the newest of its files was last written, by their own stamps."""
        return max((node.mtime_ns for node in self.files), default=0)

    def inside(self) -> dict[str, Node]:
        """Files by their path below the entry; a plain file is there under its own name."""
        cut = len(self.name) + 1
        return {node.path[cut:] or node.path: node for node in self.files}


def is_remnant(now: Tree, whole: Tree) -> bool:
    """Whether something of the whole tree is missing and nothing new is there: it is being removed."""
    left = {node for node in now.nodes if node.kind != DIR}
    return left < {node for node in whole.nodes if node.kind != DIR}


def scan(folder: str, name: str) -> Tree:
    """Read the entry as it is now.

    Raises:
        Vanished: something went away meanwhile.
        Unfit: it holds what no manifest can hold.
    """
    nodes: list[Node] = []
    waiting = [name]
    while waiting:
        path = waiting.pop()
        try:
            waiting += _scan_at(folder, path, nodes)
        except (FileNotFoundError, NotADirectoryError):
            raise Vanished(name) from None
        except OSError as error:
            raise Unfit("%s can not be read: %s" % (sinks.ascii_text(path)[-80:], sinks.reason_of(error))) from None
        if len(nodes) > ENTRIES_MAX:
            raise Unfit("it holds more than %d files" % ENTRIES_MAX)
    return Tree(name, tuple(sorted(nodes)))


def is_too_deep(path: str) -> bool:
    """Whether no manifest can hold this path, which begins with the tree's own name."""
    return path.count("/") >= DEPTH_MAX or len(os.fsencode(path)) > _PATH_BYTES_MAX


def _scan_at(folder: str, path: str, nodes: list[Node]) -> list[str]:
    """Read what lies directly below this path and is still to be read. Recursion would end where folders are deep."""
    if is_too_deep(path):
        raise Unfit("it is more than %d folders deep, or a path in it is too long" % DEPTH_MAX)
    full = os.path.join(folder, path)
    facts = os.lstat(full)
    if stat.S_ISLNK(facts.st_mode):
        node = _link(path, full, facts)
        if node is not None:
            nodes.append(node)
    elif stat.S_ISDIR(facts.st_mode):
        names = os.listdir(full)
        if not names:
            nodes.append(Node(path, DIR, 0, facts.st_mtime_ns, facts.st_ino, stat.S_IMODE(facts.st_mode) & 0o777, None))
        return [path + "/" + name for name in names]
    elif stat.S_ISREG(facts.st_mode):
        nodes.append(_file(path, facts))
    # Sockets, pipes and devices are no content.
    return []


def _file(path: str, facts: os.stat_result) -> Node:
    return Node(path, FILE, facts.st_size, facts.st_mtime_ns, facts.st_ino, stat.S_IMODE(facts.st_mode) & 0o777, None)


def _link(path: str, full: str, facts: os.stat_result) -> Node | None:
    """Store a link that stays inside its entry as a link, one that leads out to a file as that file."""
    target = os.readlink(full)
    if leads_inside(path, target):
        return Node(path, LINK, 0, facts.st_mtime_ns, facts.st_ino, 0o777, target)
    try:
        behind = os.stat(full)
    except OSError:
        return None  # it leads nowhere
    if not stat.S_ISREG(behind.st_mode):
        raise Unfit("a link leads out of it to something that is no file")
    return _file(path, behind)


def leads_inside(path: str, target: str) -> bool:
    """Whether the link at `path` stays below its entry, whatever other links there are: it climbs only at its start."""
    if not target or target.startswith("/"):
        return False
    climbs, rest = sinks.climb(target)
    # One level stays for the entry itself.
    return climbs < max(1, path.count("/")) and (not rest or sinks.is_plain("/".join(rest)))


class Stage:
    """A tree whose bytes stay readable: hard links where the file system has them, else the files themselves.

    A hard link shares its bytes with the original, so a file that is rewritten in place still changes here: readers
    compare `Node` with what they opened, before and after.
    """

    def __init__(self, tree: Tree, root: str, folder: str | None) -> None:
        self.tree = tree
        self._root = root
        self._folder = folder

    def open(self, node: Node) -> int:
        """Open a descriptor of the node's bytes.

        Raises:
            Vanished: they are not what they were when the tree was read.
            Unfit: they may not be read.
        """
        try:
            # Without blocking: where the file was, there may be a pipe by now.
            flags = os.O_RDONLY | os.O_NONBLOCK | getattr(os, "O_CLOEXEC", 0)
            descriptor = os.open(os.path.join(self._root, node.path), flags)
        except PermissionError:
            raise Unfit("%s can not be read" % sinks.ascii_text(node.path)[-80:]) from None
        except OSError:
            raise Vanished(node.path) from None
        if not is_same(descriptor, node):
            os.close(descriptor)
            raise Vanished(node.path)
        return descriptor

    def release(self) -> None:
        """Free the disk space of what was rotated away."""
        if self._folder is not None:
            sinks.remove(self._folder)


def is_same(descriptor: int, node: Node) -> bool:
    """Whether the opened file is still what the tree saw."""
    facts = os.fstat(descriptor)
    return (facts.st_size, facts.st_mtime_ns, facts.st_ino) == (node.size, node.mtime_ns, node.inode)


def stage(checkpoint_dir: str, tree: Tree, folder: str) -> Stage:
    """Hold the tree in `folder` by hard links, or read it in place where links do not work.

    Raises:
        Vanished: it is no longer what it was.
    """
    held = _link_files(checkpoint_dir, tree, folder)
    result = Stage(tree, folder if held else checkpoint_dir, folder if held else None)
    try:
        if scan(checkpoint_dir, tree.name) != tree:
            raise Vanished(tree.name)
    except (Vanished, Unfit):
        result.release()
        raise Vanished(tree.name) from None
    return result


def _link_files(checkpoint_dir: str, tree: Tree, folder: str) -> bool:
    sinks.remove(folder)
    made: set[str] = set()
    try:
        for node in tree.files:
            place = os.path.join(folder, node.path)
            parent = os.path.dirname(place)
            if parent not in made:
                os.makedirs(parent, exist_ok=True)
                made.add(parent)
            os.link(os.path.realpath(os.path.join(checkpoint_dir, node.path)), place)
    except FileNotFoundError:
        sinks.remove(folder)
        raise Vanished(tree.name) from None
    except OSError:
        sinks.remove(folder)
        return False  # another file system, or one without links
    return True


_PLAIN_MAX = 64 * 1024
_ROW_BYTES = 150
_CHUNK_BYTES = 110
_ODD_BYTES = 3
_PLAIN_CHARACTERS = bytes(byte for byte in range(32, 127) if byte not in b'%\\"')


def text_bytes(nodes: Iterable[Node], chunks: int) -> int:
    """About how long the manifest of these will be; it will not be longer."""
    rows = 0
    for node in nodes:
        names = os.fsencode(node.path) + os.fsencode(node.target or "")
        rows += _ROW_BYTES + len(names) + _ODD_BYTES * len(names.translate(None, _PLAIN_CHARACTERS))
    return rows + _CHUNK_BYTES * chunks + _PLAIN_MAX


def too_much(chunks: int, text: int) -> str:
    """Why no manifest can hold this; empty if one can."""
    if chunks > sinks.CHUNKS_MAX:
        return "it would be more than %d chunks" % sinks.CHUNKS_MAX
    if text > sinks.MANIFEST_TEXT_MAX:
        return "the list of its files would be longer than %d MB" % (sinks.MANIFEST_TEXT_MAX // 1_000_000)
    return ""


def manifest_bytes(store: RunnerStore, **fields: Any) -> bytes:
    """Return the manifest as it is stored; `files` has the chunks of each file with it.

    Raises:
        Unfit: it is larger than the daemon reads.
    """
    numbers: dict[str, int] = {}
    chunks: list[list[Any]] = []
    rows = []
    for file in fields.pop("files"):
        pieces: list[list[int]] = []
        for chunk in file["chunks"]:
            number = numbers.setdefault(chunk["key"], len(chunks))
            if number == len(chunks):
                chunks.append([chunk["key"].rpartition("/")[2], chunk["size"]])
            whole = chunk["length"] == chunk["size"]
            pieces.append([number] if whole else [number, chunk["offset"], chunk["length"]])
        row = {name: value for name, value in file.items() if name != "chunks" and value not in (None, 0)}
        row["mode"] = file["mode"]
        rows.append(dict(row, pieces=pieces) if pieces else row)
    document = dict(store.document(**fields), schema=2, chunks=chunks, files=rows)
    text = store.seal(document)
    data = text if len(text) <= _PLAIN_MAX else gzip.compress(text, 6)
    if len(data) > sinks.MANIFEST_BYTES_MAX:
        raise Unfit("the list of its files is larger than %d MB" % (sinks.MANIFEST_BYTES_MAX // 1_000_000))
    return data


def read(data: bytes) -> dict[str, Any]:
    """Return the manifest, with names as this system has them, and of each file where in which chunk its bytes are.

    Raises:
        Unreadable: there is none.
    """
    try:
        document = json.loads(sinks.text_of(data))
        if document["schema"] == 2:
            _unfold(document)
        for file in document["files"]:
            for chunk in file["chunks"]:
                chunk.setdefault("offset", 0)
                chunk.setdefault("length", chunk["size"])
                if not 0 <= chunk["offset"] <= chunk["offset"] + chunk["length"] <= chunk["size"]:
                    raise sinks.Unreadable("a piece of a file lies outside its chunk")
        result: dict[str, Any] = document
        return result
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError):
        raise sinks.Unreadable("its manifest can not be read") from None


def _unfold(document: dict[str, Any]) -> None:
    chunks = []
    for name, size, *attempt in document["chunks"]:
        key = sinks.chunk_key(document["job"], attempt[0] if attempt else document["attempt"], name)
        chunks.append({"key": key, "sha256": name[:64], "size": size})
    document["entry"] = sinks.name_of(document["entry"])
    for file in document["files"]:
        file["path"] = sinks.name_of(file["path"])
        file["target"] = sinks.name_of(file["target"]) if file.get("target") is not None else None
        file.setdefault("size", 0)
        file.setdefault("mtime_ns", 0)
        pieces = []
        for number, *place in file.pop("pieces", []):
            chunk = dict(chunks[number])
            if place:
                chunk["offset"], chunk["length"] = place
            pieces.append(chunk)
        file["chunks"] = pieces


# Which chunks the store has already, so that no byte is sent twice: not after an interruption, not for a new name.
#
# Only chunks of the own attempt count. The host of an earlier one may still have write permission for a while, and what
# it can write over must not be part of a checkpoint of this one: its first checkpoint is sent whole. This host may be
# dead and still write, too, so small chunks (`REUSED_MIN`) are sent for each checkpoint anew: to write over one spoils
# one checkpoint, not all that are kept.
#
# The daemon deletes what old checkpoints of a running attempt leave behind, and it must never meet a runner that still
# counts on it. So what this attempt sent is counted on only while it is young: sent after the third newest manifest was
# published, or named by one of the three newest (`WINDOW`, the daemon's rule too). The rest is forgotten *before* the
# next manifest goes out, and when its content comes again it is sent again, under a key that was never used (every
# upload brings a mark of its own), so that a late deletion of the old one can not hit it.


REUSED_MIN = 1024 * 1024
"""Bytes. A chunk of fewer costs next to nothing to send again."""


def new_mark() -> str:
    """Return what the names of an upload's chunks end in: no other upload of any attempt ends in the same."""
    return "-" + os.urandom(4).hex()


class ChunkIndex:
    """Content hash to full key. Chunks of this attempt are remembered on disk, for a runner that is started again."""

    def __init__(self, path: str, prefix: str) -> None:
        self._path = path
        self._prefix = prefix
        self._lock = threading.Lock()
        self._keys: dict[str, str] = {}
        self._last: dict[str, int] = {}
        """Of this attempt's own: after how many manifests it was sent, or last named by one."""
        self._small: set[str] = set()
        """Of these, the ones that no other checkpoint may name."""
        self._count = 0
        self._under_way: dict[str, threading.Event] = {}
        self._load()

    def claim(self, sha256: str) -> str | None:
        """Return the key, if the store has the chunk; `None` gives the caller the duty to send it and then call `sent`.

        Waits while another thread sends the same chunk.
        """
        while True:
            with self._lock:
                key = self._keys.get(sha256)
                if key is not None:
                    return key
                under_way = self._under_way.get(sha256)
                if under_way is None:
                    self._under_way[sha256] = threading.Event()
                    return None
            under_way.wait()

    def sent(self, sha256: str, key: str, size: int) -> None:
        """Record that the claimed chunk of so many bytes is in the store."""
        with self._lock:
            if size < REUSED_MIN:
                self._small.add(sha256)
            self._keys[sha256] = key
            self._last[sha256] = self._count
            self._under_way.pop(sha256).set()
            line = self._line(sha256)
        try:
            # One short line per write: it is whole or, at the very end after a crash, ignored.
            with open(self._path, "a", encoding="ascii") as stream:
                stream.write(line)
        except OSError:
            return  # it only saves sending again after a restart

    def failed(self, sha256: str) -> None:
        """Record that the claimed chunk was not sent; another thread may try."""
        with self._lock:
            self._under_way.pop(sha256).set()

    def publishing(self) -> None:
        """Forget what is too old to be counted on once the next manifest is published.

        Raises:
            OSError: this could not be made to last, so the manifest must not be published. A full disk is no such case:
                then the file goes, and a runner that is started again sends everything again.
        """
        with self._lock:
            self._count += 1
            old = [s for s, last in self._last.items() if last <= self._count - WINDOW or s in self._small]
            for sha256 in old:
                del self._keys[sha256], self._last[sha256]
            self._small.clear()
            try:
                self._rewrite()
            except OSError:
                os.remove(self._path)

    def published(self, files: list[dict[str, Any]]) -> None:
        """Record that the manifest of these files is in the store: what it names counts as new again."""
        with self._lock:
            for entry in files:
                for chunk in entry["chunks"]:
                    if chunk["key"].startswith(self._prefix) and chunk["size"] >= REUSED_MIN:
                        self._keys[chunk["sha256"]] = chunk["key"]
                        self._last[chunk["sha256"]] = self._count
            try:
                self._rewrite()
            except OSError:
                return  # the file holds less than is true, which only costs sending again

    def _rewrite(self) -> None:
        lines = ["%d\n" % self._count, *(self._line(sha256) for sha256 in self._last)]
        sinks.write_whole(self._path, "".join(lines).encode())

    def _line(self, sha256: str) -> str:
        return "%s %s %d %d\n" % (sha256, self._keys[sha256], self._last[sha256], sha256 in self._small)

    def _load(self) -> None:
        try:
            with open(self._path, encoding="ascii", errors="replace") as stream:
                lines = stream.read().split("\n")[:-1]
        except OSError:
            return
        for line in lines:
            if line.isdigit():
                self._count = int(line)
            sha256, _, rest = line.partition(" ")
            key, _, last = rest.rpartition(" ")[0].rpartition(" ")
            if len(sha256) == 64 and key.startswith(self._prefix) and last.isdigit():
                self._keys[sha256], self._last[sha256] = key, int(last)
                if rest.endswith(" 1"):
                    self._small.add(sha256)
        self._count = max(self._count, *self._last.values(), 0)
