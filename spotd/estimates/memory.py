"""The memory that one card needs, part by part, in bytes.

Theory. Training in mixed precision with AdamW holds 16 bytes for each parameter that is trained (ZeRO, arXiv
1910.02054, section 3.1): 2 of weight, 2 of gradient, 4 of a 32-bit copy and 8 of two states. ZeRO cuts states (stage
1), gradients (2) and weights (3) by the number of replicas; at stage 3 the layers that are computed exist in full for a
moment.
Adapters leave the weights frozen and pay the rest for themselves only. To that come activations and logits, or in
inference the cache of keys and values, and what the runtime takes for itself.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Final

from spotd.estimates.activations import activation_bytes, cache_bytes, logit_bytes, prefill_bytes
from spotd.estimates.adapters import adapter_params
from spotd.estimates.architecture import Architecture
from spotd.estimates.optimizers import optimizer_bytes
from spotd.estimates.workload import LINEAR_BYTES, QUANTIZED, Layout, Precision, Workload

CONTEXT_BYTES: Final = 1_000_000_000
"""CUDA's context with the kernels that PyTorch loads; 0.8 to 1 GB are reported (pytorch issue 34323)."""
COLLECTIVES_BYTES: Final = 1_000_000_000
"""NCCL's buffers where cards exchange something; vLLM measured 1.8 GiB more outside PyTorch with two (pull 10511)."""
FRAGMENT_DIVISOR: Final = 20
"""The allocator wastes a twentieth of what comes and goes."""
BUCKET_PARAMS: Final = 500_000_000
"""DeepSpeed's default bucket for reducing gradients."""
_PREFETCHED_LAYERS: Final = 2


class WorkloadError(ValueError):
    """A combination that does not exist; `hint` is the way out."""

    def __init__(self, message: str, *, hint: str) -> None:
        super().__init__(message)
        self.hint = hint


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryParts:
    """Bytes on the card that needs most.

    Attributes:
        weights: of the model and of adapters.
        master: the 32-bit copy of trained weights that mixed precision updates.
        gathered: layers whose shares are gathered while they are computed, and buffers for gradients on their way.
        runtime: CUDA's context, buffers of NCCL, and what the allocator wastes.
    """

    weights: int
    gradients: int = 0
    master: int = 0
    optimizer: int = 0
    activations: int = 0
    logits: int = 0
    cache: int = 0
    gathered: int = 0
    runtime: int = 0

    @property
    def total(self) -> int:
        return sum(getattr(self, field.name) for field in fields(self))


def memory_parts(model: Architecture, work: Workload, layout: Layout) -> MemoryParts:
    """Return what the fullest card needs.

    Raises:
        WorkloadError: the combination does not exist.
    """
    require_possible(model, work, layout)
    return _training(model, work, layout) if work.training else _inference(model, work, layout)


def require_possible(model: Architecture, work: Workload, layout: Layout) -> None:
    """Require a combination that exists.

    Raises:
        WorkloadError: it does not; the way out is its hint.
    """
    if work.training and work.lora is None and work.precision in QUANTIZED:
        raise WorkloadError(
            f"{work.precision} weights cannot be trained themselves", hint="add --lora 16, or choose --precision bf16"
        )
    if work.lora is not None and not work.training:
        raise WorkloadError("adapters are merged before inference", hint="leave --lora out")
    if work.lora is not None and adapter_params(model, work.lora) == 0:
        raise WorkloadError("no matrix of this model is named by --lora-targets", hint="--lora-targets all")
    if layout.tensor > model.heads:
        raise WorkloadError(
            f"{layout.tensor} tensor-parallel cards cannot share {model.heads} attention heads",
            hint=f"--tp {model.heads} or less",
        )
    if layout.pipeline > model.layers:
        raise WorkloadError(
            f"{layout.pipeline} stages cannot share {model.layers} layers", hint=f"--pp {model.layers} or less"
        )


def outside_allocator(layout: Layout) -> int:
    """Return the bytes that PyTorch's allocator does not know of."""
    return CONTEXT_BYTES + (COLLECTIVES_BYTES if layout.cards > 1 else 0)


def trained_params(model: Architecture, work: Workload) -> int:
    """Return how many parameters are trained."""
    if not work.training:
        return 0
    return model.params if work.lora is None else adapter_params(model, work.lora)


def _training(model: Architecture, work: Workload, layout: Layout) -> MemoryParts:
    trained = trained_params(model, work)
    on_card = _share(model, trained, layout)
    width = 4 if _has_wide_adapters(work) or work.precision is Precision.FP32 else 2
    mixed = width == 2 and work.precision is not Precision.BF16_PURE
    weights = _weight_bytes(model, work, layout)
    if work.lora is not None:
        weights += on_card * width
    states = optimizer_bytes(
        work.optimizer,
        trained,
        model if work.lora is None else None,
        2 if work.precision is Precision.BF16_PURE else 4,
    )
    stage, cards = layout.stage, layout.data
    activations = activation_bytes(model, work, layout)
    logits = logit_bytes(model, work, layout)
    return MemoryParts(
        weights=_cut(weights, cards if stage >= 3 else 1),
        gradients=_cut(on_card * width, cards if stage >= 2 else 1),
        master=_cut(on_card * 4 if mixed else 0, cards if stage >= 1 else 1),
        optimizer=_cut(_share(model, states, layout), cards if stage >= 1 else 1),
        activations=activations,
        logits=logits,
        gathered=_gathered_bytes(model, work, layout, on_card, width),
        runtime=outside_allocator(layout) + (activations + logits) // FRAGMENT_DIVISOR,
    )


def _inference(model: Architecture, work: Workload, layout: Layout) -> MemoryParts:
    """Return the parts without a backward pass; replicas share weights at stage 3 only."""
    weights = _weight_bytes(model, work, layout)
    activations = prefill_bytes(model, work, layout)
    logits = logit_bytes(model, work, layout)
    shared = layout.stage >= 3 and layout.data > 1
    return MemoryParts(
        weights=_cut(weights, layout.data if shared else 1),
        activations=activations,
        logits=logits,
        cache=cache_bytes(model, work, layout),
        gathered=_layer_bytes(model, work, layout) * _PREFETCHED_LAYERS if shared else 0,
        runtime=outside_allocator(layout) + (activations + logits) // FRAGMENT_DIVISOR,
    )


def _has_wide_adapters(work: Workload) -> bool:
    """Whether adapters are trained in 32 bits, as PEFT does unless all is 16 bits."""
    return work.lora is not None and work.precision is not Precision.BF16_PURE


def _weight_bytes(model: Architecture, work: Workload, layout: Layout) -> int:
    """Return the bytes of the model's weights on the fullest card, before replicas share them."""
    linear = LINEAR_BYTES[work.precision]
    if work.training and work.precision is Precision.FP8:
        linear = LINEAR_BYTES[Precision.BF16]  # cast as they are used; the weights keep 16 bits
    other = 4 if work.precision is Precision.FP32 else 2
    layers = -(-(linear * model.matrix_params) // 1) + (model.layer_params - model.matrix_params) * other
    return _cut(_of_stage(model, layers, layout) + _ends(model, layout) * other, layout.tensor)


def _share(model: Architecture, amount: int, layout: Layout) -> int:
    """Return the part of something spread evenly over the parameters that one pipeline stage and card holds."""
    if layout.pipeline == 1:
        return _cut(amount, layout.tensor)
    held = _of_stage(model, model.layer_params, layout) + _ends(model, layout)
    return _cut(-(-amount * min(held, model.params) // model.params), layout.tensor)


def _of_stage(model: Architecture, amount: int, layout: Layout) -> int:
    return -(-amount * -(-model.layers // layout.pipeline) // model.layers)


def _ends(model: Architecture, layout: Layout) -> int:
    """Return the parameters outside layers: the first stage has the embedding, the last the head."""
    if layout.pipeline == 1:
        return model.embedding_params + model.head_params + model.outer_vectors
    return max(model.embedding_params, model.head_params) + model.outer_vectors


def _layer_bytes(model: Architecture, work: Workload, layout: Layout) -> int:
    """Return the bytes of the largest layer as it is computed with."""
    linear = min(LINEAR_BYTES[work.precision], LINEAR_BYTES[Precision.BF16])
    return _cut(-(-(linear * model.largest_layer_params) // 1), layout.tensor)


def _gathered_bytes(model: Architecture, work: Workload, layout: Layout, on_card: int, width: int) -> int:
    if layout.data == 1:
        return 0
    if layout.stage == 0:
        return on_card * width  # DDP reduces gradients in buckets beside them
    if layout.stage < 3:
        return 2 * min(BUCKET_PARAMS, on_card) * 2
    if layout.pipeline > 1:  # gathered once for all micro-batches, and gradients are reduced after the last
        return _weight_bytes(model, work, layout) + on_card * width
    ends = _cut(_ends(model, layout) * 2, layout.tensor)
    return ends + _layer_bytes(model, work, layout) * _PREFETCHED_LAYERS


def _cut(amount: int, parts: int) -> int:
    return -(-amount // parts)
