"""The field's rules of thumb, for all cards together."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Final

from spotd.estimates.adapters import adapter_params
from spotd.estimates.architecture import Architecture
from spotd.estimates.workload import LINEAR_BYTES, Optimizer, Precision, Workload

_OVERHEAD: Final = Fraction(6, 5)
_STATE_BYTES: Final = {
    Optimizer.ADAMW: 8,
    Optimizer.ADAMW_8BIT: 2,
    Optimizer.ADAFACTOR: 0,
    Optimizer.LION: 4,
    Optimizer.LION_8BIT: 1,
    Optimizer.MUON: 4,
    Optimizer.SGD: 0,
    Optimizer.MOMENTUM: 4,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleOfThumb:
    """What the rule gives, and the rule in words."""

    total: int
    rule: str


def rule_of_thumb(model: Architecture, work: Workload) -> RuleOfThumb:
    """Return the rule that people use for such work.

    Inference takes 1.2 times the weights (EleutherAI, Transformer Math 101). Training takes the bytes of weight,
    gradient, 32-bit copy and optimizer states per parameter, 16 for AdamW (ZeRO, arXiv 1910.02054), and leaves
    activations out. Adapters add their own 16 bytes per parameter to what inference takes.
    """
    if work.training and work.lora is None:
        each = _trained_bytes(work)
        return RuleOfThumb(total=each * model.params, rule=f"{each} bytes per parameter, activations not counted")
    each_weight = LINEAR_BYTES[work.precision]
    if work.precision is Precision.INT4:
        each_weight = Fraction(1, 2)
    elif work.training and work.precision is Precision.FP8:
        each_weight = Fraction(2)
    total = _OVERHEAD * each_weight * model.params
    rule = f"{float(each_weight):g} bytes per parameter x 1.2"
    if work.lora is not None:
        total += 16 * adapter_params(model, work.lora)
        rule += ", and 16 bytes per parameter of the adapters"
    return RuleOfThumb(total=-(-total.numerator // total.denominator), rule=rule)


def _trained_bytes(work: Workload) -> int:
    states = _STATE_BYTES[work.optimizer]
    if work.precision is Precision.BF16_PURE:
        return 4 + -(-states // 2)
    return 8 + states
