"""The ways bytes get below an attempt's prefix, behind one method: `put(name, data, sha256)`.

`name` is relative to the prefix. A put is all or nothing and durable when it returns; it is never retried here.
"""

from __future__ import annotations

from spotd_jobs.wire.client.paths import is_plain


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


def require_name(name: str) -> str:
    """Return the name itself, if it stays below the prefix.

    Raises:
        ValueError: it does not; a fault of the runner, never of the store.
    """
    if not is_plain(name) or "\\" in name or "\0" in name:
        raise ValueError("an object name must stay below the prefix")
    return name
