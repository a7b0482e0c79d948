"""What is to be done with a model, and how it is spread over cards."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from fractions import Fraction
from typing import Final


class Precision(StrEnum):
    """Numbers of the weights. In training, `bf16` and `fp16` are mixed precision with a 32-bit copy of the weights."""

    FP32 = "fp32"
    BF16 = "bf16"
    FP16 = "fp16"
    BF16_PURE = "bf16-pure"
    FP8 = "fp8"
    INT8 = "int8"
    INT4 = "int4"


class Optimizer(StrEnum):
    ADAMW = "adamw"
    ADAMW_8BIT = "adamw-8bit"
    ADAFACTOR = "adafactor"
    LION = "lion"
    LION_8BIT = "lion-8bit"
    MUON = "muon"
    SGD = "sgd"
    MOMENTUM = "momentum"


class Recompute(StrEnum):
    """Which activations are computed again in the backward pass instead of being kept."""

    NONE = "none"
    SELECTIVE = "selective"
    FULL = "full"


class Sharding(StrEnum):
    """What data-parallel cards share instead of each having a copy; `auto` is zero3 on more than one card."""

    AUTO = "auto"
    NONE = "none"
    ZERO1 = "zero1"
    ZERO2 = "zero2"
    ZERO3 = "zero3"


QUANTIZED: Final = frozenset({Precision.INT8, Precision.INT4})

LINEAR_BYTES: Final[Mapping[Precision, Fraction]] = {
    Precision.FP32: Fraction(4),
    Precision.BF16: Fraction(2),
    Precision.FP16: Fraction(2),
    Precision.BF16_PURE: Fraction(2),
    Precision.FP8: Fraction(1),
    Precision.INT8: Fraction(1),
    Precision.INT4: Fraction(9, 16),  # 4 bits, and one 32-bit scale for each block of 64 (QLoRA, arXiv 2305.14314)
}
"""Bytes of a weight in a matrix of a layer. Embeddings, head and norms have 16 bits at least."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lora:
    """Low-rank adapters beside frozen matrices; `targets` names matrices of a layer."""

    rank: int
    targets: frozenset[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """One step of training, or one batch of inference, on one data-parallel replica.

    Attributes:
        batch: sequences in one forward pass of one replica (the micro-batch).
        sequence: tokens of one sequence; in inference, of prompt and answer together.
        flash: attention never keeps its matrix of scores.
        chunked_loss: the loss is computed piece by piece, so that not all logits exist at once.
        cache_bytes: of one number in the cache of keys and values.
        prefill: tokens of a prompt that inference processes at once.
    """

    training: bool
    precision: Precision = Precision.BF16
    optimizer: Optimizer = Optimizer.ADAMW
    lora: Lora | None = None
    recompute: Recompute = Recompute.FULL
    flash: bool = True
    chunked_loss: bool = False
    batch: int = 1
    sequence: int = 2048
    cache_bytes: int = 2
    prefill: int | None = None

    @property
    def tokens(self) -> int:
        return self.batch * self.sequence

    @property
    def compute_bytes(self) -> int:
        """Return the bytes of an activation."""
        return 4 if self.precision is Precision.FP32 else 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How the model is spread: `data` replicas, each of `tensor` x `pipeline` cards."""

    data: int = 1
    tensor: int = 1
    pipeline: int = 1
    sharding: Sharding = Sharding.NONE

    @property
    def cards(self) -> int:
        return self.data * self.tensor * self.pipeline

    @property
    def stage(self) -> int:
        """Return the stage of ZeRO, 0 where nothing is shared; FSDP is stage 3."""
        if self.sharding is Sharding.AUTO:
            return 3 if self.data > 1 else 0
        return {Sharding.NONE: 0, Sharding.ZERO1: 1, Sharding.ZERO2: 2, Sharding.ZERO3: 3}[self.sharding]
