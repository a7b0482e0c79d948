"""The ways bytes get below an attempt's prefix, behind one method: `put(name, data, sha256)`.

`name` is relative to the prefix. A put is all or nothing and durable when it returns; it is never retried here.
"""

from __future__ import annotations

import errno
import os
from typing import Any

from spotd_jobs.wire.client.console import reason_of
from spotd_jobs.wire.client.files import write_whole

_FLEETING = ("heartbeat.json", "log/")
"""Names whose loss in a power cut costs nothing, and whose writing must not cost a disk sync each."""
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


class SinkError(Exception):
    """The bytes are not there; the same put may work later. The text is fit for an event."""


class SinkDenied(SinkError):
    """The store refused; only a newer grant may help."""


class Sink:
    """One way to write. `parallel` is how many puts at once are worth while."""

    parallel = 1

    def put(self, name: str, data: bytes | memoryview, sha256: str | None = None) -> None:
        """Write exactly `data` to the object `name` below the prefix.

        Raises:
            SinkError
        """
        raise NotImplementedError


def checked_name(name: str) -> str:
    """Return the name itself, if it stays below the prefix.

    Raises:
        ValueError: it does not; a fault of the runner, never of the store.
    """
    parts = name.split("/")
    if any(part in ("", ".", "..") for part in parts) or "\\" in name or "\0" in name:
        raise ValueError("an object name must stay below the prefix")
    return name


class FolderSink(Sink):
    """A folder that this machine shares with the daemon.

    Args:
        fleeting: nothing that is put here is worth a disk sync.
    """

    parallel = 2

    def __init__(self, fields: dict[str, Any], *, fleeting: bool = False) -> None:
        self._folder = str(fields["directory"])
        self._fleeting = fleeting
        self._made: set[str] = set()

    def put(self, name: str, data: bytes | memoryview, sha256: str | None = None) -> None:
        del sha256  # the rename is what makes it whole; the reader hashes
        path = os.path.join(self._folder, checked_name(name))
        durable = not self._fleeting and not name.startswith(_FLEETING)
        try:
            self._make_folder(os.path.dirname(path))
            try:
                write_whole(path, data, durable=durable)
            except FileNotFoundError:
                self._made.clear()  # the folder was removed since
                self._make_folder(os.path.dirname(path))
                write_whole(path, data, durable=durable)
        except OSError as error:
            if error.errno in _FULL:
                raise SinkError("the store's disk is full") from None
            if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
                raise SinkDenied("the store's folder may not be written") from None
            raise SinkError("the store's folder: " + reason_of(error)) from None

    def _make_folder(self, folder: str) -> None:
        if folder in self._made:
            return
        if not os.path.isdir(self._folder):
            # The daemon made it with the grant in it. Making it again would bring back what was removed on purpose.
            raise SinkDenied("the attempt's folder is gone from the store")
        os.makedirs(folder, mode=0o700, exist_ok=True)
        self._made.add(folder)


def sink_of(upload: dict[str, Any], *, fleeting: bool = False) -> Sink:
    """Return the writer that a grant's `upload` or `liveness_marker` describes.

    Args:
        fleeting: what is put may be lost in a power cut.

    Raises:
        ValueError: this runner knows no such method.
    """
    method = upload["method"]
    if method == "folder":
        return FolderSink(upload["fields"], fleeting=fleeting)
    if method in ("post", "sigv4"):
        from spotd_jobs.wire.client import sinks_s3

        return sinks_s3.PostSink(upload["fields"]) if method == "post" else sinks_s3.SigV4Sink(upload["fields"])
    raise ValueError("unknown upload method " + str(method)[:40])
