"""What is to be done with a model, and how it is spread over cards."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from fractions import Fraction
from typing import Final

from spotd_jobs.spec.fields import shown
from spotd_jobs.spec.problems import BadValue


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


# The shape of a language model: its matrices, and with them how many parameters it has.
#
# Theory. A decoder is an embedding, layers, and a head that maps back to the vocabulary. Nearly all of its parameters
# are in the matrices of the layers; a mixture of experts has many feed-forward matrices of which a token passes a
# few. All counts are exact. A model of which only the number of parameters is known gets a typical shape of that
# number.


ATTENTION_INPUT: Final = frozenset({"q", "k", "v", "q_down", "kv_down"})
"""Matrices that read the normalized input of a layer's attention."""
FEED_FORWARD_INPUT: Final = frozenset({"gate", "up"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Matrix:
    """A linear map of one layer; `copies` counts the experts that have one each."""

    name: str
    inputs: int
    outputs: int
    copies: int = 1

    @property
    def params(self) -> int:
        return self.inputs * self.outputs * self.copies


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerKind:
    """Layers of one shape.

    Attributes:
        count: how many layers have it.
        vectors: parameters outside matrices: norms, biases.
        active_width: width of the feed-forward that one token passes, over all of its experts.
        active_params: parameters that one token passes.
    """

    count: int
    matrices: tuple[Matrix, ...]
    vectors: int
    active_width: int
    active_params: int

    @property
    def params(self) -> int:
        """Return the parameters of one layer."""
        return sum(matrix.params for matrix in self.matrices) + self.vectors


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """A decoder.

    Attributes:
        family: `model_type` of its config, or `typical` for an assumed one.
        query_width, value_width: of all heads together, as attention reads and writes them.
        cache_width: numbers per token and layer that inference keeps (keys and values, or what they are made of).
        cache_heads: into how many parts tensor parallelism can cut the cache.
        outer_vectors: parameters outside layers and outside the two vocabulary matrices.
        positions: learned positions, each with an embedding of its own.
    """

    family: str
    hidden: int
    query_width: int
    value_width: int
    key_width: int
    cache_width: int
    cache_heads: int
    heads: int
    vocab: int
    tied: bool
    gated: bool
    kinds: tuple[LayerKind, ...]
    outer_vectors: int
    positions: int = 0

    @property
    def layers(self) -> int:
        return sum(kind.count for kind in self.kinds)

    @property
    def layer_params(self) -> int:
        """Return the parameters of all layers."""
        return sum(kind.params * kind.count for kind in self.kinds)

    @property
    def matrix_params(self) -> int:
        """Return the parameters in matrices of layers, which quantization shrinks."""
        return sum(matrix.params * count for matrix, count in self.matrices())

    @property
    def embedding_params(self) -> int:
        return (self.vocab + self.positions) * self.hidden

    @property
    def head_params(self) -> int:
        return 0 if self.tied else self.vocab * self.hidden

    @property
    def params(self) -> int:
        return self.layer_params + self.embedding_params + self.head_params + self.outer_vectors

    @property
    def active_params(self) -> int:
        """Return the parameters that one token passes: all of them, unless there are experts."""
        layers = sum(kind.active_params * kind.count for kind in self.kinds)
        return layers + self.embedding_params + self.head_params + self.outer_vectors

    @property
    def largest_layer_params(self) -> int:
        return max(kind.params for kind in self.kinds)

    @property
    def active_width(self) -> int:
        """Return the widest feed-forward that a token passes."""
        return max(kind.active_width for kind in self.kinds)

    def matrices(self) -> Iterator[tuple[Matrix, int]]:
        """Yield each matrix of a layer with the number of layers that have it."""
        for kind in self.kinds:
            for matrix in kind.matrices:
                yield matrix, kind.count


PARAMS_MIN: Final = 1_000_000
PARAMS_MAX: Final = 10**15
_VOCAB: Final = 128_000
_WIDE: Final = 2048


def typical_architecture(params: int) -> Architecture:
    """Return the shape that models of so many parameters usually have.

    A layer has about 12 x hidden^2 parameters and there is about one layer for each 128 of hidden, so hidden is near
    the cube root of params x 128 / 12 (7B: 4096, 32 layers; 405B: 16384, 128). Heads of 128 share 8 keys and values,
    the vocabulary has 128,000 words, and the feed-forward takes what is left.

    Raises:
        ValueError: fewer than `PARAMS_MIN` or more than `PARAMS_MAX`.
    """
    if not PARAMS_MIN <= params <= PARAMS_MAX:
        raise ValueError(f"between {PARAMS_MIN} and {PARAMS_MAX} parameters have a typical shape, not {params}")
    exact: float = pow(params * 128 / 12, 1 / 3)
    head, step = (64, 64) if exact < _WIDE else (128, 1024)
    hidden = round(exact / step) * step
    layers = max(1, round(hidden / 128))
    heads = hidden // head
    key_value = min(8, heads) * head
    vocab = min(_VOCAB, params // (8 * hidden))
    attention = 2 * hidden * hidden + 2 * hidden * key_value
    outer = 2 * vocab * hidden + hidden
    width = (params - outer - layers * (attention + 2 * hidden)) // (3 * hidden * layers)
    matrices = (
        *attention_matrices(hidden, heads * head, key_value),
        *feed_forward_matrices(hidden, width, gated=True),
    )
    layer = LayerKind(
        count=layers,
        matrices=matrices,
        vectors=2 * hidden,
        active_width=width,
        active_params=sum(matrix.params for matrix in matrices) + 2 * hidden,
    )
    rest = params - outer - layers * layer.params
    return Architecture(
        family="typical",
        hidden=hidden,
        query_width=heads * head,
        value_width=key_value,
        key_width=key_value,
        cache_width=2 * key_value,
        cache_heads=min(8, heads),
        heads=heads,
        vocab=vocab,
        tied=False,
        gated=True,
        kinds=(layer,),
        outer_vectors=hidden + rest,
    )


def attention_matrices(hidden: int, query: int, key_value: int) -> tuple[Matrix, ...]:
    """Return the four matrices of attention; keys and values are narrower where heads share them."""
    return (
        Matrix(name="q", inputs=hidden, outputs=query),
        Matrix(name="k", inputs=hidden, outputs=key_value),
        Matrix(name="v", inputs=hidden, outputs=key_value),
        Matrix(name="o", inputs=query, outputs=hidden),
    )


def feed_forward_matrices(hidden: int, width: int, *, gated: bool, copies: int = 1) -> tuple[Matrix, ...]:
    """Return the two matrices of a feed-forward, or three where a gate multiplies it."""
    gate = (Matrix(name="gate", inputs=hidden, outputs=width, copies=copies),) if gated else ()
    return (
        *gate,
        Matrix(name="up", inputs=hidden, outputs=width, copies=copies),
        Matrix(name="down", inputs=width, outputs=hidden, copies=copies),
    )


# Numbers as people write them on a command line, to exact values; every refusal says how to write it.


COUNT_HINT: Final = "write a number of parameters like 7B, 350M, 1.5T or 6738415616"
_TEXT_MAX: Final = 32
_COUNT: Final = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([KMBT]?)", re.IGNORECASE)
_BYTES: Final = re.compile(r"[0-9.]+\s*[KMGTP]i?B", re.IGNORECASE)
_FACTORS: Final = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


def parse_params(text: str) -> int:
    """Return the number of parameters that a text like `7B` names.

    Raises:
        BadValue: not a number, a size in bytes, or no model's number of parameters.
    """
    value = text.strip()
    match = _COUNT.fullmatch(value) if len(value) <= _TEXT_MAX else None
    if match is None:
        if len(value) <= _TEXT_MAX and _BYTES.fullmatch(value):
            raise BadValue(f"{shown(text)} is a size in bytes, not a number of parameters", hint=COUNT_HINT)
        raise BadValue(f"{shown(text)} is not a number of parameters", hint=COUNT_HINT)
    params = Fraction(match[1]) * _FACTORS[match[2].upper()]
    if not PARAMS_MIN <= params <= PARAMS_MAX:
        raise BadValue(f"{shown(text)} is not between 1M and 1000T parameters", hint=COUNT_HINT)
    return int(params)


# How far the estimate was off from published measurements, by kind of work.
#
# `tests/unit/estimates/published.py` has the measurements with their sources, and a test computes this table from them.


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
