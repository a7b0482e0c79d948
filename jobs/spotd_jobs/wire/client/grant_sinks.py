"""The sink that a grant describes: a folder that this machine shares with the daemon, or a bucket."""

from __future__ import annotations

import errno
import os
from typing import Any

from spotd_jobs.wire.client.sinks import Sink, SinkDenied, SinkError, is_full, reason_of, require_name, write_whole

_FLEETING = ("heartbeat.json", "log/")
"""Names whose loss in a power cut costs nothing, and whose writing must not cost a disk sync each."""


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
        path = os.path.join(self._folder, require_name(name))
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
            if is_full(error):
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
        from spotd_jobs.wire.client import sinks_s3  # only over HTTP: a start costs money

        return sinks_s3.PostSink(upload["fields"]) if method == "post" else sinks_s3.SigV4Sink(upload["fields"])
    raise ValueError("unknown upload method " + str(method)[:40])
