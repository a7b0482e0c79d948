"""Low-rank adapters: which matrices they stand beside, and how many parameters they add."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from spotd.estimates.architecture import Architecture
from spotd.estimates.workload import Lora

_ATTENTION: Final = frozenset({"q", "k", "v", "o", "q_down", "kv_down", "kv"})
_FEED_FORWARD: Final = frozenset({"gate", "up", "down"})

TARGET_GROUPS: Final[Mapping[str, frozenset[str]]] = {
    "all": _ATTENTION | _FEED_FORWARD,
    "attention": _ATTENTION,
    "mlp": _FEED_FORWARD,
}
TARGETS: Final[Mapping[str, frozenset[str]]] = {
    **TARGET_GROUPS,
    **{name: frozenset({name}) for name in ("q", "k", "v", "o", "gate", "up", "down")},
    **{f"{name}_proj": frozenset({name}) for name in ("q", "k", "v", "o", "gate", "up", "down")},
}
"""What a user may name, and the matrices it means."""


def adapter_params(architecture: Architecture, lora: Lora) -> int:
    """Return the parameters of all adapters: rank x (inputs + outputs) for each matrix, experts each their own."""
    return sum(
        lora.rank * (matrix.inputs + matrix.outputs) * matrix.copies * layers
        for matrix, layers in architecture.matrices()
        if matrix.name in lora.targets
    )
