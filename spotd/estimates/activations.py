"""What the forward pass leaves behind, in bytes.

Theory. Per token and layer the backward pass needs the inputs of each operation (arXiv 2205.05198, section 4, here with
flash attention, without dropout, and with normalizations that compute in 32 bits): both normalizations keep their
input and what they computed, attention keeps queries, keys, values and its output, a gated feed-forward keeps gate,
up, activated gate and product. A matrix needs its input only if it is trained, or if an adapter beside it is. With full
recomputation only the input of each layer stays, and one layer at a time is computed again.

Tensor parallelism cuts all of it, since it includes sequence parallelism, but for the hidden states that are gathered
before each matrix. A stage of a pipeline holds as many micro-batches as there are stages.
"""

from __future__ import annotations

from typing import Final

from spotd.estimates.adapters import TARGET_GROUPS
from spotd.estimates.architecture import ATTENTION_INPUT, FEED_FORWARD_INPUT, Architecture
from spotd.estimates.workload import Layout, Recompute, Workload

LOGIT_BYTES: Final = 12
"""Of one logit in the backward pass: 16 bits as computed, 32 bits for the loss, 32 and 16 bits of gradient."""
LOSS_CHUNKS: Final = 8
_NORM_COPY: Final = 4
_GATHERED: Final = 2


def activation_bytes(model: Architecture, work: Workload, layout: Layout) -> int:
    """Return the bytes of activations on the card that holds most of them."""
    tokens = work.tokens
    layers = -(-model.layers // layout.pipeline)
    in_flight = layout.pipeline
    whole = _kept_per_token(model, work)
    if work.recompute is Recompute.NONE:
        kept = whole * layers * in_flight
    elif work.recompute is Recompute.SELECTIVE:
        kept = _selected_per_token(model, work) * layers * in_flight + whole
    else:
        kept = model.hidden * work.compute_bytes * layers * in_flight + whole
    kept += _gradients_per_token(model, work)
    gathered = _GATHERED * model.hidden * work.compute_bytes if layout.tensor > 1 else 0
    scores = 0 if work.flash else _score_bytes(model, work, layers * in_flight)
    return tokens * gathered + -(-(tokens * kept + scores) // layout.tensor)


def logit_bytes(model: Architecture, work: Workload, layout: Layout) -> int:
    """Return the bytes of the logits; inference computes those of the last token only."""
    if not work.training:
        return -(-work.batch * model.vocab * (work.compute_bytes + 4) // layout.tensor)
    chunks = LOSS_CHUNKS if work.chunked_loss else 1
    return -(-work.tokens * model.vocab * LOGIT_BYTES // (chunks * layout.tensor))


def prefill_bytes(model: Architecture, work: Workload, layout: Layout) -> int:
    """Return the working memory of one layer while a prompt is processed; nothing is kept for a backward pass."""
    tokens = work.batch * min(work.sequence, work.prefill or work.sequence)
    width = (3 if model.gated else 2) * model.active_width
    scores = 0 if work.flash else 2 * work.compute_bytes * model.heads * tokens * work.sequence
    return -(-(tokens * (width + 4 * model.hidden) * work.compute_bytes + scores) // layout.tensor)


def cache_bytes(model: Architecture, work: Workload, layout: Layout) -> int:
    """Return the bytes of keys and values of all tokens; every layer is taken to see the whole sequence."""
    layers = -(-model.layers // layout.pipeline)
    parts = min(layout.tensor, model.cache_heads)
    return -(-work.tokens * layers * model.cache_width * work.cache_bytes // parts)


def _kept_per_token(model: Architecture, work: Workload) -> int:
    """Return the bytes that one layer keeps for each token."""
    number, width = work.compute_bytes, model.active_width
    norms = 2 * model.hidden * (number + _NORM_COPY)
    attention = (model.query_width + model.key_width + 2 * model.value_width) * number
    if model.value_width != model.query_width:  # shared keys and values, but an output as wide as the queries
        attention += (model.query_width - model.value_width) * number
    middle = (3 if model.gated else 1) * width * number
    return norms + attention + middle + _inputs_per_token(model, work)


def _inputs_per_token(model: Architecture, work: Workload) -> int:
    """Return the bytes of inputs that matrices keep because they, or adapters beside them, are trained."""
    targets = TARGET_GROUPS["all"] if work.lora is None else work.lora.targets
    inputs = model.hidden if targets & ATTENTION_INPUT else 0
    inputs += model.hidden if targets & FEED_FORWARD_INPUT else 0
    inputs += model.active_width if "down" in targets else 0
    return inputs * work.compute_bytes


def _selected_per_token(model: Architecture, work: Workload) -> int:
    """Return the bytes per token and layer with selective recomputation: inputs, attention, every other product."""
    products = model.query_width + model.key_width + model.value_width + 2 * model.hidden
    products += (2 if model.gated else 1) * model.active_width
    return (model.hidden + model.query_width + products // 2) * work.compute_bytes


def _gradients_per_token(model: Architecture, work: Workload) -> int:
    """Return the bytes of gradients of activations that exist while one layer's backward pass runs."""
    return 2 * (model.active_width + model.hidden) * work.compute_bytes


def _score_bytes(model: Architecture, work: Workload, layers: int) -> int:
    """Return the bytes of attention scores where they are kept: 16 bits, and 32 bits of their softmax."""
    kept = layers if work.recompute is Recompute.NONE else 1
    return (work.compute_bytes + 4) * model.heads * work.tokens * work.sequence * kept
