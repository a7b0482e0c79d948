"""The architecture that a Hugging Face `config.json` describes.

A key that is missing, of the wrong kind or out of bounds is refused with its name: a guess would be off by whole GPUs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, Final

from spotd.estimates.workload import Architecture, LayerKind, Matrix, attention_matrices, feed_forward_matrices
from spotd_jobs.spec.fields import shown
from spotd_jobs.spec.problems import nearest

# The model families whose parameters are counted, by the `model_type` of a Hugging Face config. Data only.
#
# Each row says what the implementation in Transformers builds where the config leaves it open; the counts of published
# models hold every row.


class HeadNorm(Enum):
    """What normalizes queries and keys."""

    NONE = "none"
    PER_HEAD = "one weight for each number of a head"
    FULL_WIDTH = "one weight for each number of all heads"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFamily:
    """How a family differs from a Llama.

    Attributes:
        gated: the feed-forward has a gate.
        norms: normalizations in each layer.
        norm_bias: each has a bias beside its weight.
        input_bias, output_bias, mlp_bias, head_bias: whether linear maps have one; text names the key that says so.
        tied: head and embedding are one matrix, unless the config says otherwise.
        positions: learned positions, and how many more than the config names.
        wide_mlp: the feed-forward is four times as wide as the model where the config names no width.
        half_mlp: the config names the width of gate and feed-forward together.
        experts, active_experts, expert_width: keys; empty where all layers are dense.
    """

    gated: bool = True
    norms: int = 2
    norm_bias: bool = False
    head_norm: HeadNorm = HeadNorm.NONE
    input_bias: bool | str = False
    output_bias: bool | str = False
    mlp_bias: bool | str = False
    head_bias: bool = False
    tied: bool = False
    positions: int | None = None
    embedding_norm: bool = False
    wide_mlp: bool = False
    half_mlp: bool = False
    latent_attention: bool = False
    shared_queries: bool = False
    sinks: bool = False
    router_bias: bool = False
    experts: str = ""
    active_experts: str = "num_experts_per_tok"
    expert_width: str = "moe_intermediate_size"


_CLASSIC: Final = ModelFamily(gated=False, norm_bias=True, input_bias=True, output_bias=True, mlp_bias=True)

FAMILIES: Final[Mapping[str, ModelFamily]] = {
    "llama": ModelFamily(input_bias="attention_bias", output_bias="attention_bias", mlp_bias="mlp_bias"),
    "mistral": ModelFamily(),
    "granite": ModelFamily(input_bias="attention_bias", output_bias="attention_bias", mlp_bias="mlp_bias"),
    "smollm3": ModelFamily(input_bias="attention_bias", output_bias="attention_bias", mlp_bias="mlp_bias", tied=True),
    "olmo2": ModelFamily(head_norm=HeadNorm.FULL_WIDTH),
    "phi3": ModelFamily(),
    "qwen": ModelFamily(input_bias=True, half_mlp=True),
    "qwen2": ModelFamily(input_bias=True),
    "qwen3": ModelFamily(
        input_bias="attention_bias", output_bias="attention_bias", head_norm=HeadNorm.PER_HEAD
    ),
    "gemma": ModelFamily(tied=True),
    "gemma2": ModelFamily(tied=True, norms=4),
    "gemma3_text": ModelFamily(tied=True, norms=4, head_norm=HeadNorm.PER_HEAD),
    "cohere": ModelFamily(tied=True, norms=1),
    "starcoder2": ModelFamily(
        gated=False, norm_bias=True, input_bias="use_bias", output_bias="use_bias", mlp_bias="use_bias", tied=True
    ),
    "gpt2": replace(_CLASSIC, tied=True, positions=0, wide_mlp=True),
    "gpt_neox": _CLASSIC,
    "opt": replace(_CLASSIC, tied=True, positions=2),
    "bloom": replace(_CLASSIC, tied=True, embedding_norm=True, wide_mlp=True),
    "phi": replace(_CLASSIC, norms=1, head_bias=True, wide_mlp=True),
    "falcon": ModelFamily(
        gated=False, norm_bias=True, input_bias="bias", output_bias="bias", mlp_bias="bias", tied=True, wide_mlp=True,
        shared_queries=True,
    ),
    "mixtral": ModelFamily(experts="num_local_experts", expert_width="intermediate_size"),
    "olmoe": ModelFamily(experts="num_experts", expert_width="intermediate_size", head_norm=HeadNorm.FULL_WIDTH),
    "qwen2_moe": ModelFamily(input_bias=True, experts="num_experts"),
    "qwen3_moe": ModelFamily(experts="num_experts", head_norm=HeadNorm.PER_HEAD),
    "gpt_oss": ModelFamily(
        input_bias=True, output_bias=True, mlp_bias=True, sinks=True, router_bias=True,
        experts="num_local_experts", expert_width="intermediate_size",
    ),
    "deepseek_v2": ModelFamily(latent_attention=True, experts="n_routed_experts"),
    "deepseek_v3": ModelFamily(latent_attention=True, experts="n_routed_experts", router_bias=True),
}  # fmt: skip


LAYERS_MAX: Final = 10_000
EXPERTS_MAX: Final = 100_000
WIDTH_MAX: Final = 10_000_000
WAY_OUT: Final = "give the number of parameters instead: spotctl size --params 7B"

_HIDDEN: Final = ("hidden_size", "n_embd", "d_model")
_LAYERS: Final = ("num_hidden_layers", "n_layer", "n_layers")
_HEADS: Final = ("num_attention_heads", "n_head")
_KEY_VALUE_HEADS: Final = ("num_key_value_heads", "num_kv_heads", "n_head_kv")
_WIDTH: Final = ("intermediate_size", "ffn_dim", "ffn_hidden_size", "n_inner")
_HEAD_DIM: Final = ("head_dim", "kv_channels")
_POSITIONS: Final = ("max_position_embeddings", "n_positions", "n_ctx")


class ModelConfigError(ValueError):
    """The config cannot be counted; `key` says where, empty for the whole, and `hint` is a way out."""

    def __init__(self, message: str, *, key: str = "", hint: str = WAY_OUT) -> None:
        super().__init__(message)
        self.key = key
        self.hint = hint


def architecture_of(config: Mapping[str, Any]) -> Architecture:
    """Return the architecture.

    Raises:
        ModelConfigError: an unknown family, or a key that is missing or cannot be.
    """
    name = config.get("model_type")
    if not isinstance(name, str):
        raise ModelConfigError("is missing, or is not text", key="model_type", hint="give a config.json of a model")
    family = FAMILIES.get(name)
    if family is None:
        raise _unknown(name, config)
    return _Reader(config, name, family).architecture()


def _unknown(name: str, config: Mapping[str, Any]) -> ModelConfigError:
    if isinstance(config.get("text_config"), Mapping):
        return ModelConfigError(
            f"{shown(name)} is a model of more than text, of which only the text part could be counted",
            key="model_type",
        )
    match = nearest(name, FAMILIES)
    known = f"did you mean {match!r}? " if match else f"known: {', '.join(FAMILIES)}; "
    return ModelConfigError(f"{shown(name)} is not a known architecture", key="model_type", hint=f"{known}{WAY_OUT}")


@dataclass(frozen=True, slots=True, kw_only=True)
class _LatentWidths:
    """Widths of attention that keeps one compressed vector per token instead of keys and values."""

    plain: int
    rotary: int
    value: int
    cache: int
    query_rank: int

    @property
    def query(self) -> int:
        """Return the width of one head's query."""
        return self.plain + self.rotary


class _Reader:
    """Reads one config by the rules of its family."""

    def __init__(self, config: Mapping[str, Any], name: str, family: ModelFamily) -> None:
        self._config = config
        self._name = name
        self._family = family
        self.hidden = self._number(_HIDDEN)
        self.heads = self._number(_HEADS, most=1_000_000)
        self.key_value_heads = self._shared_heads()
        self.head_dim = self._head_dim()
        if self.key_value_heads > self.heads:
            raise ModelConfigError(
                f"{self.key_value_heads} is more than the {self.heads} heads", key=_KEY_VALUE_HEADS[0]
            )

    def architecture(self) -> Architecture:
        family = self._family
        latent = self._latent_widths() if family.latent_attention else None
        key_value = self.key_value_heads * self.head_dim
        norm = self.hidden * (2 if family.norm_bias else 1)
        vocab = self._number(("vocab_size",), most=100_000_000)
        tied = self._flag("tie_word_embeddings", default=family.tied)
        kinds = tuple(self._kinds())
        return Architecture(
            family=self._name,
            hidden=self.hidden,
            query_width=self.heads * (latent.query if latent else self.head_dim),
            key_width=self.heads * latent.query if latent else key_value,
            value_width=self.heads * latent.value if latent else key_value,
            cache_width=latent.cache if latent else 2 * key_value,
            cache_heads=1 if latent else self.key_value_heads,
            heads=self.heads,
            vocab=vocab,
            tied=tied,
            gated=family.gated,
            kinds=kinds,
            outer_vectors=norm * (2 if family.embedding_norm else 1) + (vocab if family.head_bias else 0),
            positions=0 if family.positions is None else self._number(_POSITIONS) + family.positions,
        )

    def _kinds(self) -> Iterator[LayerKind]:
        layers = self._number(_LAYERS, most=LAYERS_MAX)
        sparse = self._sparse_layers(layers)
        if layers - sparse:
            width = self._dense_width()
            yield self._kind(
                layers - sparse, feed_forward_matrices(self.hidden, width, gated=self._family.gated), width, width
            )
        if sparse:
            yield self._sparse_kind(sparse)

    def _sparse_layers(self, layers: int) -> int:
        """Return how many layers have experts."""
        if not self._family.experts:
            return 0
        if self._name.startswith("deepseek"):
            return layers - min(layers, self._number(("first_k_dense_replace",), least=0, most=LAYERS_MAX, default=0))
        step = self._number(("decoder_sparse_step",), most=LAYERS_MAX, default=1)
        dense = self._config.get("mlp_only_layers") or ()
        if not isinstance(dense, list | tuple) or not all(isinstance(place, int) for place in dense):
            raise ModelConfigError("is not a list of numbers", key="mlp_only_layers")
        return sum(1 for place in range(layers) if place not in dense and (place + 1) % step == 0)

    def _sparse_kind(self, count: int) -> LayerKind:
        family = self._family
        experts = self._number((family.experts,), most=EXPERTS_MAX)
        active = self._number((family.active_experts,), most=experts)
        width = self._number((family.expert_width,))
        shared = self._shared_width(width)
        routed = feed_forward_matrices(self.hidden, width, gated=family.gated, copies=experts)
        always = feed_forward_matrices(self.hidden, shared, gated=family.gated) if shared else ()
        router = (Matrix(name="router", inputs=self.hidden, outputs=experts),)
        vectors = (experts if family.router_bias else 0) + (self.hidden if self._name == "qwen2_moe" else 0)
        if family.mlp_bias:
            vectors += experts * (2 * width + self.hidden)
        idle = sum(matrix.params for matrix in routed) * (experts - active) // experts
        return self._kind(
            count, (*routed, *always, *router), active * width + shared, 0, vectors=vectors, idle_params=idle
        )

    def _shared_width(self, width: int) -> int:
        """Return the width of the experts that every token passes."""
        if self._name == "qwen2_moe":
            return self._number(("shared_expert_intermediate_size",), least=0, default=0)
        if self._name.startswith("deepseek"):
            shared = self._config.get("n_shared_experts")
            return width * (0 if shared is None else self._number(("n_shared_experts",), least=0, most=EXPERTS_MAX))
        return 0

    def _kind(
        self,
        count: int,
        feed_forward: tuple[Matrix, ...],
        active_width: int,
        biased_width: int,
        *,
        vectors: int = 0,
        idle_params: int = 0,
    ) -> LayerKind:
        matrices = (*self._attention(), *feed_forward)
        vectors += self._layer_vectors(biased_width)
        return LayerKind(
            count=count,
            matrices=matrices,
            vectors=vectors,
            active_width=active_width,
            active_params=sum(matrix.params for matrix in matrices) + vectors - idle_params,
        )

    def _attention(self) -> tuple[Matrix, ...]:
        if not self._family.latent_attention:
            return attention_matrices(self.hidden, self.heads * self.head_dim, self.key_value_heads * self.head_dim)
        widths = self._latent_widths()
        query = self.heads * widths.query
        if widths.query_rank:
            queries: tuple[Matrix, ...] = (
                Matrix(name="q_down", inputs=self.hidden, outputs=widths.query_rank),
                Matrix(name="q", inputs=widths.query_rank, outputs=query),
            )
        else:
            queries = (Matrix(name="q", inputs=self.hidden, outputs=query),)
        return (
            *queries,
            Matrix(name="kv_down", inputs=self.hidden, outputs=widths.cache),
            Matrix(name="kv", inputs=widths.cache - widths.rotary, outputs=self.heads * (widths.plain + widths.value)),
            Matrix(name="o", inputs=self.heads * widths.value, outputs=self.hidden),
        )

    def _layer_vectors(self, width: int) -> int:
        """Return the parameters of a layer's norms and biases; `width` is that of a dense feed-forward, or 0."""
        family, query, key_value = self._family, self.heads * self.head_dim, self.key_value_heads * self.head_dim
        vectors = self._norms() * self.hidden * (2 if family.norm_bias else 1)
        if family.latent_attention:
            widths = self._latent_widths()
            vectors += widths.query_rank + widths.cache - widths.rotary
        elif family.head_norm is HeadNorm.PER_HEAD:
            vectors += 2 * self.head_dim
        elif family.head_norm is HeadNorm.FULL_WIDTH:
            vectors += query + key_value
        vectors += query + 2 * key_value if self._has_bias(family.input_bias) else 0
        vectors += self.hidden if self._has_bias(family.output_bias) else 0
        vectors += self.heads if family.sinks else 0
        if width and self._has_bias(family.mlp_bias):
            vectors += self.hidden + width * (2 if family.gated else 1)
        return vectors

    def _norms(self) -> int:
        """Return how many norms a layer has: Falcon's layers have one where attention and feed-forward share it."""
        if self._name == "falcon" and not self._flag("new_decoder_architecture", default=False):
            return 1 if self._flag("parallel_attn", default=True) else 2
        return self._family.norms

    def _shared_heads(self) -> int:
        """Return the heads of keys and values."""
        if self._family.shared_queries and not self._flag("new_decoder_architecture", default=False):
            return 1 if self._flag("multi_query", default=True) else self.heads
        return self._number(_KEY_VALUE_HEADS, most=1_000_000, default=self.heads)

    def _head_dim(self) -> int:
        if self._key(_HEAD_DIM) is None and self.hidden % self.heads:
            raise ModelConfigError(
                f"{self.hidden} cannot be shared among {self.heads} heads", key=self._key(_HIDDEN) or _HIDDEN[0]
            )
        return self._number(_HEAD_DIM, default=self.hidden // self.heads)

    def _dense_width(self) -> int:
        width = self._number(_WIDTH, default=4 * self.hidden if self._family.wide_mlp else None)
        return width // 2 if self._family.half_mlp else width

    def _latent_widths(self) -> _LatentWidths:
        plain = self._number(("qk_nope_head_dim",))
        rotary = self._number(("qk_rope_head_dim",))
        rank = self._config.get("q_lora_rank")
        return _LatentWidths(
            plain=plain,
            rotary=rotary,
            value=self._number(("v_head_dim",)),
            cache=self._number(("kv_lora_rank",)) + rotary,
            query_rank=0 if rank is None else self._number(("q_lora_rank",)),
        )

    def _has_bias(self, rule: bool | str) -> bool:  # noqa: FBT001 - a column of the table of families
        default = self._name == "starcoder2"
        return self._flag(rule, default=default) if isinstance(rule, str) else rule

    def _key(self, names: tuple[str, ...]) -> str | None:
        """Return the first of the names that the config has."""
        return next((name for name in names if self._config.get(name) is not None), None)

    def _number(
        self, names: tuple[str, ...], *, least: int = 1, most: int = WIDTH_MAX, default: int | None = None
    ) -> int:
        key = self._key(names)
        if key is None:
            if default is None:
                raise ModelConfigError("is missing", key=names[0])
            return default
        value = self._config[key]
        if isinstance(value, bool) or not isinstance(value, int):
            raise ModelConfigError(f"{shown(value)} is not a whole number", key=key)
        if not least <= value <= most:
            raise ModelConfigError(f"{shown(value)} is not between {least} and {most}", key=key)
        return value

    def _flag(self, key: str, *, default: bool) -> bool:
        value = self._config.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise ModelConfigError(f"{shown(value)} is not true or false", key=key)
        return value
