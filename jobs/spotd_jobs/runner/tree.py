"""What lies below one entry of the checkpoint folder, at one moment, and a copy of it that rotation can not take away.

A `Tree` is compared as a whole: two equal ones mean that nothing was added, removed, replaced or written in between, as
far as names, sizes, times and inodes show.
"""

from __future__ import annotations

import os
import stat
from typing import NamedTuple

from spotd_jobs.wire.client.console import reason_of
from spotd_jobs.wire.client.files import remove
from spotd_jobs.wire.client.names import ascii_text
from spotd_jobs.wire.client.paths import climb, is_plain

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
            raise Unfit("%s can not be read: %s" % (ascii_text(path)[-80:], reason_of(error))) from None
        if len(nodes) > ENTRIES_MAX:
            raise Unfit("it holds more than %d files" % ENTRIES_MAX)
    return Tree(name, tuple(sorted(nodes)))


def _scan_at(folder: str, path: str, nodes: list[Node]) -> list[str]:
    """Read what lies directly below this path and is still to be read. Recursion would end where folders are deep."""
    if path.count("/") >= DEPTH_MAX or len(os.fsencode(path)) > _PATH_BYTES_MAX:
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
    climbs, rest = climb(target)
    # One level stays for the entry itself.
    return climbs < max(1, path.count("/")) and (not rest or is_plain("/".join(rest)))


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
            raise Unfit("%s can not be read" % ascii_text(node.path)[-80:]) from None
        except OSError:
            raise Vanished(node.path) from None
        if not is_same(descriptor, node):
            os.close(descriptor)
            raise Vanished(node.path)
        return descriptor

    def release(self) -> None:
        """Free the disk space of what was rotated away."""
        if self._folder is not None:
            remove(self._folder)


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
    remove(folder)
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
        remove(folder)
        raise Vanished(tree.name) from None
    except OSError:
        remove(folder)
        return False  # another file system, or one without links
    return True
