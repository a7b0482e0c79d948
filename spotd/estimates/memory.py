"""The memory that one card needs, part by part, in bytes.

Theory. Training in mixed precision with AdamW holds 16 bytes for each parameter that is trained (ZeRO, arXiv
1910.02054, section 3.1): 2 of weight, 2 of gradient, 4 of a 32-bit copy and 8 of two states. ZeRO cuts states (stage
1), gradients (2) and weights (3) by the number of replicas; at stage 3 the layers that are computed exist in full for a
moment.
Adapters leave the weights frozen and pay the rest for themselves only. To that come activations and logits, or in
inference the cache of keys and values, and what the runtime takes for itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from fractions import Fraction
from typing import Final

from spotd.estimates import workload

# Low-rank adapters: which matrices they stand beside, and how many parameters they add.


_ATTENTION: Final = frozenset({"q", "k", "v", "o", "q_down", "kv_down", "kv"})
_FEED_FORWARD: Final = frozenset({"gate", "up", "down"})

TARGET_GROUPS: Final[Mapping[str, frozenset[str]]] = {
    "all": _ATTENTION | _FEED_FORWARD,
    "attention": _ATTENTION,
    "mlp": _FEED_FORWARD,
}
TARGETS: Final[Mapping[str, frozenset[str]]] = {
    **TARGET_GROUPS,
    **{name: frozenset({name}) for name in ("q", "k", "v", "o", "gate", "up", "down")},
    **{f"{name}_proj": frozenset({name}) for name in ("q", "k", "v", "o", "gate", "up", "down")},
}
"""What a user may name, and the matrices it means."""


def adapter_params(architecture: workload.Architecture, lora: workload.Lora) -> int:
    """Return the parameters of all adapters: rank x (inputs + outputs) for each matrix, experts each their own."""
    return sum(
        lora.rank * (matrix.inputs + matrix.outputs) * matrix.copies * layers
        for matrix, layers in architecture.matrices()
        if matrix.name in lora.targets
    )


# What the forward pass leaves behind, in bytes.
#
# Theory. Per token and layer the backward pass needs the inputs of each operation (arXiv 2205.05198, section 4, here
# with flash attention, without dropout, and with normalizations that compute in 32 bits): both normalizations keep
# their input and what they computed, attention keeps queries, keys, values and its output, a gated feed-forward keeps
# gate, up, activated gate and product. A matrix needs its input only if it is trained, or if an adapter beside it is.
# With full recomputation only the input of each layer stays, and one layer at a time is computed again.
#
# Tensor parallelism cuts all of it, since it includes sequence parallelism, but for the hidden states that are gathered
# before each matrix. A stage of a pipeline holds as many micro-batches as there are stages.


LOGIT_BYTES: Final = 12
"""Of one logit in the backward pass: 16 bits as computed, 32 bits for the loss, 32 and 16 bits of gradient."""
LOSS_CHUNKS: Final = 8
_NORM_COPY: Final = 4
_GATHERED: Final = 2


def activation_bytes(model: workload.Architecture, work: workload.Workload, layout: workload.Layout) -> int:
    """Return the bytes of activations on the card that holds most of them."""
    tokens = work.tokens
    layers = -(-model.layers // layout.pipeline)
    in_flight = layout.pipeline
    whole = _kept_per_token(model, work)
    if work.recompute is workload.Recompute.NONE:
        kept = whole * layers * in_flight
    elif work.recompute is workload.Recompute.SELECTIVE:
        kept = _selected_per_token(model, work) * layers * in_flight + whole
    else:
        kept = model.hidden * work.compute_bytes * layers * in_flight + whole
    kept += _gradients_per_token(model, work)
    gathered = _GATHERED * model.hidden * work.compute_bytes if layout.tensor > 1 else 0
    scores = 0 if work.flash else _score_bytes(model, work, layers * in_flight)
    return tokens * gathered + -(-(tokens * kept + scores) // layout.tensor)


def logit_bytes(model: workload.Architecture, work: workload.Workload, layout: workload.Layout) -> int:
    """Return the bytes of the logits; inference computes those of the last token only."""
    if not work.training:
        return -(-work.batch * model.vocab * (work.compute_bytes + 4) // layout.tensor)
    chunks = LOSS_CHUNKS if work.chunked_loss else 1
    return -(-work.tokens * model.vocab * LOGIT_BYTES // (chunks * layout.tensor))


def prefill_bytes(model: workload.Architecture, work: workload.Workload, layout: workload.Layout) -> int:
    """Return the working memory of one layer while a prompt is processed; nothing is kept for a backward pass."""
    tokens = work.batch * min(work.sequence, work.prefill or work.sequence)
    width = (3 if model.gated else 2) * model.active_width
    scores = 0 if work.flash else 2 * work.compute_bytes * model.heads * tokens * work.sequence
    return -(-(tokens * (width + 4 * model.hidden) * work.compute_bytes + scores) // layout.tensor)


def cache_bytes(model: workload.Architecture, work: workload.Workload, layout: workload.Layout) -> int:
    """Return the bytes of keys and values of all tokens; every layer is taken to see the whole sequence."""
    layers = -(-model.layers // layout.pipeline)
    parts = min(layout.tensor, model.cache_heads)
    return -(-work.tokens * layers * model.cache_width * work.cache_bytes // parts)


def _kept_per_token(model: workload.Architecture, work: workload.Workload) -> int:
    """Return the bytes that one layer keeps for each token."""
    number, width = work.compute_bytes, model.active_width
    norms = 2 * model.hidden * (number + _NORM_COPY)
    attention = (model.query_width + model.key_width + 2 * model.value_width) * number
    if model.value_width != model.query_width:  # shared keys and values, but an output as wide as the queries
        attention += (model.query_width - model.value_width) * number
    middle = (3 if model.gated else 1) * width * number
    return norms + attention + middle + _inputs_per_token(model, work)


def _inputs_per_token(model: workload.Architecture, work: workload.Workload) -> int:
    """Return the bytes of inputs that matrices keep because they, or adapters beside them, are trained."""
    targets = TARGET_GROUPS["all"] if work.lora is None else work.lora.targets
    inputs = model.hidden if targets & workload.ATTENTION_INPUT else 0
    inputs += model.hidden if targets & workload.FEED_FORWARD_INPUT else 0
    inputs += model.active_width if "down" in targets else 0
    return inputs * work.compute_bytes


def _selected_per_token(model: workload.Architecture, work: workload.Workload) -> int:
    """Return the bytes per token and layer with selective recomputation: inputs, attention, every other product."""
    products = model.query_width + model.key_width + model.value_width + 2 * model.hidden
    products += (2 if model.gated else 1) * model.active_width
    return (model.hidden + model.query_width + products // 2) * work.compute_bytes


def _gradients_per_token(model: workload.Architecture, work: workload.Workload) -> int:
    """Return the bytes of gradients of activations that exist while one layer's backward pass runs."""
    return 2 * (model.active_width + model.hidden) * work.compute_bytes


def _score_bytes(model: workload.Architecture, work: workload.Workload, layers: int) -> int:
    """Return the bytes of attention scores where they are kept: 16 bits, and 32 bits of their softmax."""
    kept = layers if work.recompute is workload.Recompute.NONE else 1
    return (work.compute_bytes + 4) * model.heads * work.tokens * work.sequence * kept


# What an optimizer keeps for each parameter that is trained.


_STATES: Final[Mapping[workload.Optimizer, int]] = {
    workload.Optimizer.ADAMW: 2,
    workload.Optimizer.LION: 1,
    workload.Optimizer.MOMENTUM: 1,
    workload.Optimizer.SGD: 0,
}
"""Numbers per parameter, each as wide as `state_bytes` says."""

_BLOCK: Final = Fraction(4, 256)  # one 32-bit scale for each block of 256, as bitsandbytes does
_8BIT: Final[Mapping[workload.Optimizer, Fraction]] = {
    workload.Optimizer.ADAMW_8BIT: 2 * (1 + _BLOCK),
    workload.Optimizer.LION_8BIT: 1 + _BLOCK,
}


def optimizer_bytes(
    optimizer: workload.Optimizer, trained: int, architecture: workload.Architecture | None, state_bytes: int
) -> int:
    """Return the bytes of the optimizer's states, without a 32-bit copy of the weights.

    Adafactor keeps a row and a column for each matrix (arXiv 1804.04235), Muon one number for each weight of a layer's
    matrix and AdamW's two for every other parameter. Without an architecture all that is trained are adapters, which
    are matrices.
    """
    if optimizer is workload.Optimizer.ADAFACTOR:
        return 0 if architecture is None else _factored_numbers(architecture) * 4
    if optimizer is workload.Optimizer.MUON:
        matrices = trained if architecture is None else architecture.matrix_params
        return (2 * trained - matrices) * state_bytes
    if optimizer in _8BIT:
        return -(-(_8BIT[optimizer] * trained) // 1)
    return _STATES[optimizer] * trained * state_bytes


def _factored_numbers(architecture: workload.Architecture) -> int:
    layers = sum((matrix.inputs + matrix.outputs) * matrix.copies * count for matrix, count in architecture.matrices())
    ends = (architecture.vocab + architecture.positions + architecture.hidden) * (1 if architecture.tied else 2)
    return layers + ends


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


def memory_parts(model: workload.Architecture, work: workload.Workload, layout: workload.Layout) -> MemoryParts:
    """Return what the fullest card needs.

    Raises:
        WorkloadError: the combination does not exist.
    """
    require_possible(model, work, layout)
    return _training(model, work, layout) if work.training else _inference(model, work, layout)


def require_possible(model: workload.Architecture, work: workload.Workload, layout: workload.Layout) -> None:
    """Require a combination that exists.

    Raises:
        WorkloadError: it does not; the way out is its hint.
    """
    if work.training and work.lora is None and work.precision in workload.QUANTIZED:
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


def outside_allocator(layout: workload.Layout) -> int:
    """Return the bytes that PyTorch's allocator does not know of."""
    return CONTEXT_BYTES + (COLLECTIVES_BYTES if layout.cards > 1 else 0)


def trained_params(model: workload.Architecture, work: workload.Workload) -> int:
    """Return how many parameters are trained."""
    if not work.training:
        return 0
    return model.params if work.lora is None else adapter_params(model, work.lora)


def _training(model: workload.Architecture, work: workload.Workload, layout: workload.Layout) -> MemoryParts:
    trained = trained_params(model, work)
    on_card = _share(model, trained, layout)
    width = 4 if _has_wide_adapters(work) or work.precision is workload.Precision.FP32 else 2
    mixed = width == 2 and work.precision is not workload.Precision.BF16_PURE
    weights = _weight_bytes(model, work, layout)
    if work.lora is not None:
        weights += on_card * width
    states = optimizer_bytes(
        work.optimizer,
        trained,
        model if work.lora is None else None,
        2 if work.precision is workload.Precision.BF16_PURE else 4,
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


def _inference(model: workload.Architecture, work: workload.Workload, layout: workload.Layout) -> MemoryParts:
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


def _has_wide_adapters(work: workload.Workload) -> bool:
    """Whether adapters are trained in 32 bits, as PEFT does unless all is 16 bits."""
    return work.lora is not None and work.precision is not workload.Precision.BF16_PURE


def _weight_bytes(model: workload.Architecture, work: workload.Workload, layout: workload.Layout) -> int:
    """Return the bytes of the model's weights on the fullest card, before replicas share them."""
    linear = workload.LINEAR_BYTES[work.precision]
    if work.training and work.precision is workload.Precision.FP8:
        linear = workload.LINEAR_BYTES[workload.Precision.BF16]  # cast as they are used; the weights keep 16 bits
    other = 4 if work.precision is workload.Precision.FP32 else 2
    layers = -(-(linear * model.matrix_params) // 1) + (model.layer_params - model.matrix_params) * other
    return _cut(_of_stage(model, layers, layout) + _ends(model, layout) * other, layout.tensor)


def _share(model: workload.Architecture, amount: int, layout: workload.Layout) -> int:
    """Return the part of something spread evenly over the parameters that one pipeline stage and card holds."""
    if layout.pipeline == 1:
        return _cut(amount, layout.tensor)
    held = _of_stage(model, model.layer_params, layout) + _ends(model, layout)
    return _cut(-(-amount * min(held, model.params) // model.params), layout.tensor)


def _of_stage(model: workload.Architecture, amount: int, layout: workload.Layout) -> int:
    return -(-amount * -(-model.layers // layout.pipeline) // model.layers)


def _ends(model: workload.Architecture, layout: workload.Layout) -> int:
    """Return the parameters outside layers: the first stage has the embedding, the last the head."""
    if layout.pipeline == 1:
        return model.embedding_params + model.head_params + model.outer_vectors
    return max(model.embedding_params, model.head_params) + model.outer_vectors


def _layer_bytes(model: workload.Architecture, work: workload.Workload, layout: workload.Layout) -> int:
    """Return the bytes of the largest layer as it is computed with."""
    linear = min(workload.LINEAR_BYTES[work.precision], workload.LINEAR_BYTES[workload.Precision.BF16])
    return _cut(-(-(linear * model.largest_layer_params) // 1), layout.tensor)


def _gathered_bytes(
    model: workload.Architecture, work: workload.Workload, layout: workload.Layout, on_card: int, width: int
) -> int:
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
