"""The shape of a language model: its matrices, and with them how many parameters it has.

Theory. A decoder is an embedding, layers, and a head that maps back to the vocabulary. Nearly all of its parameters are
in the matrices of the layers; a mixture of experts has many feed-forward matrices of which a token passes a few. All
counts are exact. A model of which only the number of parameters is known gets a typical shape of that number.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

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
