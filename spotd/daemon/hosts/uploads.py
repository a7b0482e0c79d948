"""How many bytes a checkpoint added to the store, by what the daemon found there and not by what its host states."""

from __future__ import annotations

from collections.abc import Container

from spotd_jobs.wire.manifest import AcceptedManifest


def uploaded_bytes(manifest: AcceptedManifest, known: Container[str], own: str) -> int:
    """Return the size of the chunks below the attempt's own prefix that no earlier manifest named."""
    sizes = {chunk.key: chunk.size for entry in manifest.files for chunk in entry.chunks}
    return sum(size for key, size in sizes.items() if key.startswith(own) and key not in known)
