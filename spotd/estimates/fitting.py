"""Which GPUs hold a workload, and on how many cards."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Final

from spotd.estimates.memory import MemoryParts, WorkloadError, adapter_params, memory_parts
from spotd.estimates.workload import LINEAR_BYTES, Architecture, Layout, Optimizer, Precision, Sharding, Workload
from spotd_providers.contract.gpus import GpuInfo

GIB: Final = 2**30
CARDS_MAX: Final = 16
"""Cards of one machine; a job runs on one."""
REPORTED_SHARE: Final = Fraction(98, 100)
_NOMINAL_SHARE: Final = Fraction(93, 100)

_CAPABILITY_MIN: Final = {
    Precision.BF16: (8, 0),
    Precision.BF16_PURE: (8, 0),
    Precision.FP16: (6, 0),
    Precision.FP8: (8, 9),
    Precision.INT8: (7, 5),
    Precision.INT4: (6, 0),
    Precision.FP32: (0, 0),
}
"""CUDA's compute capability from which the precision is fast or works at all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """How the user wants the model spread; `tensor` is `None` where it is left open."""

    sharding: Sharding = Sharding.AUTO
    tensor: int | None = None
    pipeline: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuFit:
    """A GPU that holds the workload on so many cards."""

    gpu: GpuInfo
    cards: int
    needed: int
    usable: int


def nominal_bytes(gpu: GpuInfo) -> int:
    """Return the bytes that a card surely offers: error correction takes up to 7 percent of what its name says."""
    usual = gpu.vram_gb[0] * GIB * _NOMINAL_SHARE
    return min(usual.numerator // usual.denominator, min(gpu.vram_gb) * GIB)


def reported_bytes(mib: float) -> int:
    """Return the bytes that can be used of what a provider measured on a machine."""
    return int(Fraction(mib) * 2**20 * REPORTED_SHARE)


def can_compute(gpu: GpuInfo, precision: Precision) -> bool:
    """Whether the card computes in this precision; cards without CUDA are not judged."""
    if gpu.compute_capability is None:
        return True
    major, minor = gpu.compute_capability.split(".")
    return (int(major), int(minor)) >= _CAPABILITY_MIN[precision]


def layout_for(model: Architecture, work: Workload, spread: Spread, cards: int) -> Layout | None:
    """Return how so many cards share the work, or `None` where they cannot be divided like that.

    Left open, inference cuts each layer over a power of two of the cards, and training gives each card its own data.
    """
    tensor = spread.tensor
    if tensor is None:
        tensor = 1
        open_inference = not work.training and spread.sharding is Sharding.AUTO
        while open_inference and 2 * tensor * spread.pipeline <= cards and model.heads % (2 * tensor) == 0:
            tensor *= 2
    unit = tensor * spread.pipeline
    if cards < unit or (cards % unit and spread.tensor is not None) or cards % spread.pipeline:
        return None
    sharding = spread.sharding
    if not work.training and sharding is Sharding.AUTO:
        sharding = Sharding.NONE
    return Layout(data=max(1, cards // unit), tensor=tensor, pipeline=spread.pipeline, sharding=sharding)


class MemoryNeeds:
    """What one card needs when so many share the work; each number of cards is computed once."""

    def __init__(self, model: Architecture, work: Workload, spread: Spread, *, headroom: Fraction) -> None:
        self._model = model
        self._work = work
        self._spread = spread
        self._headroom = headroom
        self._known: dict[int, int | None] = {}

    def parts(self, cards: int) -> MemoryParts | None:
        """Return the parts of one card's memory.

        Raises:
            WorkloadError: the work itself is not possible.
        """
        layout = layout_for(self._model, self._work, self._spread, cards)
        return None if layout is None else memory_parts(self._model, self._work, layout)

    def bytes_for(self, cards: int) -> int | None:
        """Return the bytes for one card with headroom, or `None` where so many cards cannot share the work."""
        if cards not in self._known:
            try:
                parts = self.parts(cards)
            except WorkloadError:
                parts = None
            share = Fraction(0) if parts is None else parts.total * (1 + self._headroom)
            self._known[cards] = None if parts is None else -(-share.numerator // share.denominator)
        return self._known[cards]

    def cards_on(self, usable: int) -> int | None:
        """Return the fewest cards, a power of two, that hold the work; `None` where `CARDS_MAX` are too few."""
        cards = 1
        while cards <= CARDS_MAX:
            needed = self.bytes_for(cards)
            if needed is not None and needed <= usable:
                return cards
            cards *= 2
        return None


def gpu_fits(needs: MemoryNeeds, precision: Precision, gpus: Iterable[GpuInfo]) -> Iterator[GpuFit]:
    """Yield the GPUs that hold the work, the least memory in all first."""
    found = []
    for gpu in gpus:
        usable = nominal_bytes(gpu)
        cards = needs.cards_on(usable) if can_compute(gpu, precision) else None
        needed = None if cards is None else needs.bytes_for(cards)
        if cards is not None and needed is not None:
            found.append(GpuFit(gpu=gpu, cards=cards, needed=needed, usable=usable))
    yield from sorted(found, key=lambda fit: (fit.cards * fit.usable, fit.cards))


# The field's rules of thumb, for all cards together.


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
