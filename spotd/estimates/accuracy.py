"""How far the estimate was off from published measurements, by kind of work.

`tests/unit/estimates/published.py` has the measurements with their sources, and a test computes this table from them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from spotd.estimates.workload import QUANTIZED, Layout, Workload


class WorkKind(StrEnum):
    INFERENCE = "inference on one card"
    FULL = "training of all weights on one card"
    LORA = "adapters beside 16-bit weights on one card"
    QLORA = "adapters beside quantized weights on one card"
    SHARDED = "training sharded over data-parallel cards"
    MODEL_PARALLEL = "tensor or pipeline parallel training"
    PARALLEL_INFERENCE = "inference on several cards"


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownError:
    """Range of (estimate - measurement) / measurement in percent over so many figures, and its mean size.

    `rule_mean` is the mean size of the same error of the rule of thumb, shared evenly by the cards.
    """

    low: int
    high: int
    mean: int
    rule_mean: int
    figures: int


KNOWN_ERRORS: Final[Mapping[WorkKind, KnownError]] = {
    WorkKind.INFERENCE: KnownError(low=-15, high=26, mean=5, rule_mean=21, figures=71),
    WorkKind.FULL: KnownError(low=-29, high=0, mean=18, rule_mean=35, figures=7),
    WorkKind.LORA: KnownError(low=-11, high=15, mean=5, rule_mean=27, figures=29),
    WorkKind.QLORA: KnownError(low=-25, high=36, mean=14, rule_mean=49, figures=31),
    WorkKind.SHARDED: KnownError(low=-7, high=47, mean=11, rule_mean=45, figures=17),
    WorkKind.MODEL_PARALLEL: KnownError(low=-20, high=-11, mean=15, rule_mean=89, figures=3),
}
"""A kind without published figures is missing."""


def work_kind(work: Workload, layout: Layout) -> WorkKind:
    """Return the kind whose measurements apply."""
    if not work.training:
        return WorkKind.INFERENCE if layout.cards == 1 else WorkKind.PARALLEL_INFERENCE
    if layout.tensor * layout.pipeline > 1:
        return WorkKind.MODEL_PARALLEL
    if layout.data > 1:
        return WorkKind.SHARDED
    if work.lora is None:
        return WorkKind.FULL
    return WorkKind.QLORA if work.precision in QUANTIZED else WorkKind.LORA
