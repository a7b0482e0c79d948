"""What a user's spelling of a GPU stands for."""

from __future__ import annotations

from functools import lru_cache

from spotd_providers.contract import gpus


@lru_cache(maxsize=4096)
def resolve_gpu(name: str) -> frozenset[str]:
    """Canonical names a user's spelling stands for; an unknown one stands for itself."""
    try:
        return gpus.resolve(name)
    except gpus.UnknownGpu:
        return frozenset({name})
