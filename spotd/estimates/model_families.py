"""The model families whose parameters are counted, by the `model_type` of a Hugging Face config. Data only.

Each row says what the implementation in Transformers builds where the config leaves it open; the counts of published
models hold every row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import Final


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
