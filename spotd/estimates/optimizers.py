"""What an optimizer keeps for each parameter that is trained."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from typing import Final

from spotd.estimates.architecture import Architecture
from spotd.estimates.workload import Optimizer

_STATES: Final[Mapping[Optimizer, int]] = {
    Optimizer.ADAMW: 2,
    Optimizer.LION: 1,
    Optimizer.MOMENTUM: 1,
    Optimizer.SGD: 0,
}
"""Numbers per parameter, each as wide as `state_bytes` says."""

_BLOCK: Final = Fraction(4, 256)  # one 32-bit scale for each block of 256, as bitsandbytes does
_8BIT: Final[Mapping[Optimizer, Fraction]] = {
    Optimizer.ADAMW_8BIT: 2 * (1 + _BLOCK),
    Optimizer.LION_8BIT: 1 + _BLOCK,
}


def optimizer_bytes(optimizer: Optimizer, trained: int, architecture: Architecture | None, state_bytes: int) -> int:
    """Return the bytes of the optimizer's states, without a 32-bit copy of the weights.

    Adafactor keeps a row and a column for each matrix (arXiv 1804.04235), Muon one number for each weight of a layer's
    matrix and AdamW's two for every other parameter. Without an architecture all that is trained are adapters, which
    are matrices.
    """
    if optimizer is Optimizer.ADAFACTOR:
        return 0 if architecture is None else _factored_numbers(architecture) * 4
    if optimizer is Optimizer.MUON:
        matrices = trained if architecture is None else architecture.matrix_params
        return (2 * trained - matrices) * state_bytes
    if optimizer in _8BIT:
        return -(-(_8BIT[optimizer] * trained) // 1)
    return _STATES[optimizer] * trained * state_bytes


def _factored_numbers(architecture: Architecture) -> int:
    layers = sum((matrix.inputs + matrix.outputs) * matrix.copies * count for matrix, count in architecture.matrices())
    ends = (architecture.vocab + architecture.positions + architecture.hidden) * (1 if architecture.tied else 2)
    return layers + ends
