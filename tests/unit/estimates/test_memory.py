from __future__ import annotations

from dataclasses import asdict, replace
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spotd.estimates.machines import MemoryNeeds, Spread, rule_of_thumb
from spotd.estimates.memory import TARGETS, WorkloadError, adapter_params, memory_parts
from spotd.estimates.workload import (
    Layout,
    Lora,
    Optimizer,
    Precision,
    Recompute,
    Sharding,
    Workload,
    typical_architecture,
)
from tests.cases import every
from tests.unit.estimates.models import model

TRAIN = Workload(training=True)
ONE = Layout()
ALL = TARGETS["all"]


def test_adamw_in_mixed_precision_holds_16_bytes_per_parameter() -> None:
    """ZeRO, arXiv 1910.02054: 7.5B parameters on 64 cards: 120, 31.4, 16.6 and 1.9 GB."""
    shape = typical_architecture(7_500_000_000)

    def states(sharding: Sharding) -> float:
        parts = memory_parts(shape, TRAIN, Layout(data=64, sharding=sharding))
        return round((parts.weights + parts.gradients + parts.master + parts.optimizer) / 1e9, 1)

    assert [states(sharding) for sharding in (Sharding.NONE, Sharding.ZERO1, Sharding.ZERO2, Sharding.ZERO3)] == [
        120.0, 31.4, 16.6, 1.9,
    ]  # fmt: skip


@every(
    ("name", "tokens", "gib"),
    [
        ("llama-3.1-8b", 16_000, 1.95), ("llama-3.1-8b", 128_000, 15.62),
        ("llama-3.1-70b", 16_000, 4.88), ("llama-3.1-70b", 128_000, 39.06),
    ],
)  # fmt: skip
def test_the_cache_is_what_hugging_face_states_for_llama(name: str, tokens: int, gib: float) -> None:
    """huggingface.co/blog/llama31, whose GB are 2^30 bytes; its row of 405B is for twice the heads of the config."""
    parts = memory_parts(model(name), Workload(training=False, sequence=tokens), ONE)
    assert parts.cache / 2**30 == pytest.approx(gib, abs=0.01)


@every(
    ("optimizer", "bytes_per_param"),
    [
        (Optimizer.ADAMW, 8), (Optimizer.LION, 4), (Optimizer.MOMENTUM, 4), (Optimizer.SGD, 0),
        (Optimizer.ADAMW_8BIT, 2.03125), (Optimizer.LION_8BIT, 1.015625),
    ],
)  # fmt: skip
def test_states_of_an_optimizer(optimizer: Optimizer, bytes_per_param: float) -> None:
    shape = model("llama-3.1-8b")
    assert memory_parts(shape, replace(TRAIN, optimizer=optimizer), ONE).optimizer == bytes_per_param * shape.params


def test_adafactor_keeps_rows_and_columns_and_muon_one_number_of_a_matrix() -> None:
    shape = model("llama-3.1-8b")
    adafactor = memory_parts(shape, replace(TRAIN, optimizer=Optimizer.ADAFACTOR), ONE).optimizer
    assert 0 < adafactor < shape.params // 100
    muon = memory_parts(shape, replace(TRAIN, optimizer=Optimizer.MUON), ONE).optimizer
    assert muon == 8 * shape.params - 4 * shape.matrix_params


def test_rank_8_on_queries_and_values_of_llama_2_7b_is_what_litgpt_prints() -> None:
    """github.com/Lightning-AI/litgpt tutorials/resource-tables.md: 4,194,304 and for 13B 6,553,600."""
    lora = Lora(rank=8, targets=TARGETS["q"] | TARGETS["v"])
    assert adapter_params(model("llama-2-7b"), lora) == 4_194_304
    assert adapter_params(model("llama-2-13b"), lora) == 6_553_600


def test_adapters_leave_the_weights_without_gradients() -> None:
    shape = model("llama-3.1-8b")
    lora = Lora(rank=16, targets=ALL)
    parts = memory_parts(shape, replace(TRAIN, lora=lora), ONE)
    trained = adapter_params(shape, lora)
    assert (parts.gradients, parts.optimizer) == (4 * trained, 8 * trained)
    assert parts.weights == 2 * shape.params + 4 * trained


def test_int4_shrinks_the_layers_and_not_the_embedding() -> None:
    shape = model("llama-3.1-8b")
    parts = memory_parts(shape, Workload(training=False, precision=Precision.INT4), ONE)
    assert parts.weights == shape.matrix_params * 9 // 16 + 2 * (shape.params - shape.matrix_params)


def test_recomputation_trades_activations_away() -> None:
    kept = [memory_parts(model("llama-3.1-8b"), replace(TRAIN, recompute=kind), ONE).activations for kind in Recompute]
    none, selective, full = kept
    assert none > 2 * selective > 4 * full


def test_a_chunked_loss_needs_an_eighth_of_the_logits() -> None:
    whole = memory_parts(model("llama-3.1-8b"), TRAIN, ONE).logits
    assert memory_parts(model("llama-3.1-8b"), replace(TRAIN, chunked_loss=True), ONE).logits == whole // 8


def test_scores_that_are_kept_grow_with_the_square_of_the_sequence() -> None:
    def scores(sequence: int) -> int:
        work = replace(TRAIN, sequence=sequence)
        shape = model("llama-3.1-8b")
        kept = memory_parts(shape, replace(work, flash=False), ONE).activations
        return kept - memory_parts(shape, work, ONE).activations

    assert scores(4096) == 4 * scores(2048)


def test_tensor_parallel_cards_share_the_cache_as_far_as_there_are_heads() -> None:
    work = Workload(training=False, sequence=8192)
    whole = memory_parts(model("llama-3.1-8b"), work, ONE).cache
    assert memory_parts(model("llama-3.1-8b"), work, Layout(tensor=8)).cache == whole // 8
    assert memory_parts(model("llama-3.1-8b"), work, Layout(tensor=16)).cache == whole // 8


@every(
    ("work", "layout", "words", "hint"),
    [
        (replace(TRAIN, precision=Precision.INT4), ONE, "cannot be trained themselves", "--lora"),
        (Workload(training=False, lora=Lora(rank=8, targets=ALL)), ONE, "merged before inference", "--lora"),
        (TRAIN, Layout(tensor=33), "cannot share 32 attention heads", "--tp 32"),
        (TRAIN, Layout(pipeline=33), "cannot share 32 layers", "--pp 32"),
    ],
)
def test_what_does_not_exist_is_refused_with_a_way_out(work: Workload, layout: Layout, words: str, hint: str) -> None:
    with pytest.raises(WorkloadError, match=words) as caught:
        memory_parts(model("llama-3.1-8b"), work, layout)
    assert hint in caught.value.hint


def test_targets_that_a_model_lacks_are_refused() -> None:
    with pytest.raises(WorkloadError, match="no matrix of this model"):
        memory_parts(model("gpt2"), replace(TRAIN, lora=Lora(rank=8, targets=TARGETS["gate"])), ONE)


def test_the_rules_of_thumb_of_the_field() -> None:
    shape = typical_architecture(7_000_000_000)
    assert rule_of_thumb(shape, TRAIN).total == 16 * shape.params
    assert rule_of_thumb(shape, Workload(training=False)).total == shape.params * 12 // 5
    assert rule_of_thumb(shape, Workload(training=False, precision=Precision.INT4)).total == shape.params * 3 // 5
    lora = Lora(rank=16, targets=ALL)
    adapters = 16 * adapter_params(shape, lora)
    assert rule_of_thumb(shape, replace(TRAIN, lora=lora)).total == shape.params * 12 // 5 + adapters


WORKLOADS = st.builds(
    Workload,
    training=st.just(value=True),
    precision=st.sampled_from([Precision.FP32, Precision.BF16, Precision.BF16_PURE, Precision.FP8]),
    optimizer=st.sampled_from(Optimizer),
    lora=st.one_of(st.none(), st.builds(Lora, rank=st.integers(1, 256), targets=st.sampled_from([*TARGETS.values()]))),
    recompute=st.sampled_from(Recompute),
    flash=st.booleans(),
    chunked_loss=st.booleans(),
    batch=st.integers(1, 64),
    sequence=st.integers(1, 65_536),
)
LAYOUTS = st.builds(
    Layout,
    data=st.integers(1, 64),
    tensor=st.sampled_from([1, 2, 4, 8]),
    pipeline=st.integers(1, 8),
    sharding=st.sampled_from(Sharding),
)
MODELS = st.sampled_from(["llama-3.1-8b", "mixtral", "qwen3-30b-a3b", "deepseek-v3", "gemma-7b", "llama-2-13b"])


@given(MODELS, WORKLOADS, LAYOUTS)
def test_all_parts_are_whole_bytes_and_none_is_negative(name: str, work: Workload, layout: Layout) -> None:
    try:
        parts = memory_parts(model(name), work, layout)
    except WorkloadError:
        return
    assert all(isinstance(size, int) and size >= 0 for size in asdict(parts).values())
    assert parts.total == sum(asdict(parts).values())


@given(MODELS, WORKLOADS, LAYOUTS, st.sampled_from(["batch", "sequence"]))
def test_more_tokens_never_need_less(name: str, work: Workload, layout: Layout, what: str) -> None:
    more = replace(work, **{what: getattr(work, what) + 1})
    try:
        assert memory_parts(model(name), more, layout).total >= memory_parts(model(name), work, layout).total
    except WorkloadError:
        return


@given(MODELS, WORKLOADS, st.integers(1, 6))
def test_sharding_further_never_needs_more_of_what_is_shared(name: str, work: Workload, doublings: int) -> None:
    def shared(data: int) -> int:
        parts = memory_parts(model(name), work, Layout(data=data, sharding=Sharding.ZERO3))
        return parts.weights + parts.gradients + parts.master + parts.optimizer

    try:
        assert shared(2**doublings) <= shared(2 ** (doublings - 1))
    except WorkloadError:
        return


@given(WORKLOADS, st.integers(10**6, 10**12), st.integers(1, 10**12))
def test_more_parameters_never_weigh_less(work: Workload, params: int, more: int) -> None:
    small = replace(work, lora=None)
    less = memory_parts(typical_architecture(params), small, ONE)
    grown = memory_parts(typical_architecture(params + more), small, ONE)
    assert (grown.weights, grown.gradients) >= (less.weights, less.gradients)


@given(MODELS, WORKLOADS, st.integers(1, 200) | st.just(10**6))
def test_more_memory_never_needs_more_cards(name: str, work: Workload, gigabytes: int) -> None:
    needs = MemoryNeeds(model(name), work, Spread(), headroom=Fraction(1, 10))
    few, many = needs.cards_on(gigabytes * 2 * 10**9), needs.cards_on(gigabytes * 10**9)
    assert many is None or (few is not None and few <= many)
