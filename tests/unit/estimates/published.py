"""Measured memory of real runs, as their makers published it.

Units as the sources write them: `GB` is 10^9 bytes, `GiB` and `MiB` are binary. Where a source writes "GB" and means
binary units, its own figures show it (Qwen2.5: a 7B model in 14.38 "GB" would be smaller than its weights) or exclude
it (Qwen: 81 "G" on one card of 80 GiB). Most sources print what PyTorch's allocator held at most, which leaves CUDA's
context out; Qwen's training table does not say what was read, so the context is counted there.

Left out, with the reason:

* LitGPT's table of several cards with LoRA: FSDP of PyTorch 2.1 kept gradients of frozen weights (pytorch issue 91165);
  its rows of full fine-tuning "on 4 x A10G": the stored config of one says 2 devices, the text says single-card runs.
* torchtune's rows of one method on two GPUs, where nothing says what else differs, and its rows with CPU offload.
* Qwen's "LoRA (emb)" and "LoRA (multinode)": trained embeddings, and sums over nodes.
* Inference servers: they take whatever memory they may.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from spotd.estimates.memory import TARGETS
from spotd.estimates.workload import Layout, Lora, Precision, Recompute, Sharding, Workload

GB: Final = 10**9
GIB: Final = 2**30
MIB: Final = 2**20

LITGPT: Final = "github.com/Lightning-AI/litgpt tutorials/resource-tables.md (A100 40 GB, commit 8641822)"
LITGPT_HUB: Final = "github.com/Lightning-AI/litgpt config_hub/finetune/README.md"
TORCHTUNE: Final = "github.com/pytorch/torchtune README.md, Memory and training speed (September 2024)"
TORCHTITAN: Final = "github.com/pytorch/torchtitan benchmarks/llama3_h100_202412_torchtitan.md"
TORCHTITAN_H200: Final = "github.com/pytorch/torchtitan benchmarks/llama3_8b_h200_2025-06_torchtitan.md"
QWEN: Final = "github.com/QwenLM/Qwen README.md, Profiling of Memory and Speed (A100 80 GB)"
QWEN25: Final = "github.com/QwenLM/Qwen2.5 docs/source/benchmark/speed_benchmark.rst, Transformers"
QWEN3: Final = "github.com/QwenLM/Qwen2.5 docs/source/getting_started/speed_benchmark.md, Qwen3, Transformers (H20)"

_LENGTHS: Final = (256, 512, 1024, 2048, 4096, 8192)

ONE_CARD: Final = Layout()


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """One measurement of one card; `context` says whether it includes CUDA's context."""

    source: str
    model: str
    measured: float
    work: Workload
    layout: Layout = ONE_CARD
    context: bool = False

    @property
    def name(self) -> str:
        batch = f"{self.work.batch}x{self.work.sequence}"
        return f"{self.source.split()[0].rpartition('/')[2]}-{self.model}-{self.work.precision}-{batch}"


def _lora(rank: int, *names: str) -> Lora:
    return Lora(rank=rank, targets=frozenset().union(*(TARGETS[name] for name in names)))


def _litgpt() -> Iterator[Published]:
    """`bf16-true` holds everything in 16 bits; rank 8 on queries and values, nothing recomputed."""
    kept: dict[str, Any] = {"training": True, "recompute": Recompute.NONE, "lora": _lora(8, "q", "v")}
    for model, sequence, by_batch in (
        ("phi-1.5", 1044, {1: 4.82, 2: 6.76, 4: 10.68}),
        ("llama-2-7b", 1304, {1: 21.30, 2: 29.07}),
        ("llama-2-13b", 1304, {1: 38.12}),
    ):
        for batch, measured in by_batch.items():
            work = Workload(**kept, precision=Precision.BF16_PURE, batch=batch, sequence=sequence)
            yield Published(source=LITGPT, model=model, measured=measured * GB, work=work)
    for model, sequence, measured in (
        ("phi-1.5", 1044, 3.78),
        ("llama-2-7b", 1304, 14.14),
        ("llama-2-13b", 1304, 23.14),
    ):
        work = Workload(**kept, precision=Precision.INT4, sequence=sequence)
        yield Published(source=LITGPT, model=model, measured=measured * GB, work=work)
    for model, precision, measured in (
        ("phi-1.5", Precision.BF16, 2.86),
        ("llama-2-7b", Precision.BF16, 13.52),
        ("llama-2-13b", Precision.BF16, 26.21),
        ("llama-2-7b", Precision.INT4, 4.57),
        ("llama-2-13b", Precision.INT4, 8.32),
    ):
        work = Workload(training=False, precision=precision, sequence=100)
        yield Published(source=LITGPT, model=model, measured=measured * GB, work=work)


def _litgpt_hub() -> Iterator[Published]:
    """At most 512 tokens; rank 32 on queries and values, for Gemma rank 8 on everything."""
    few, every = _lora(32, "q", "v"), _lora(8, "all")
    for model, precision, batch, lora, measured in (
        ("llama-2-7b", Precision.BF16_PURE, 2, few, 19.77),
        ("llama-3.1-8b", Precision.BF16_PURE, 1, few, 19.73),
        ("mistral-7b", Precision.BF16_PURE, 2, few, 20.66),
        ("gemma-2b", Precision.BF16_PURE, 2, every, 12.62),
        ("llama-2-7b", Precision.INT4, 2, few, 13.68),
        ("llama-3.1-8b", Precision.INT4, 2, few, 17.41),
        ("mistral-7b", Precision.INT4, 2, few, 14.29),
        ("tinyllama", Precision.BF16_PURE, 4, None, 14.10),
    ):
        work = Workload(
            training=True, precision=precision, recompute=Recompute.NONE, lora=lora, batch=batch, sequence=512
        )
        yield Published(source=LITGPT_HUB, model=model, measured=measured * GB, work=work)


def _torchtune() -> Iterator[Published]:
    """Batch 2 of 2048 tokens, packed; each layer recomputed, loss in chunks, compiled."""
    shared = Layout(data=8, sharding=Sharding.ZERO3)
    for model, precision, rank, layout, measured in (
        ("llama-3.1-8b", Precision.BF16_PURE, 8, ONE_CARD, 16.2 * GIB),
        ("llama-3.1-8b", Precision.INT4, 8, ONE_CARD, 7.4 * GIB),
        ("llama-3.1-70b", Precision.BF16_PURE, 16, shared, 27.6 * GIB),
        ("llama-3.1-405b", Precision.INT4, 16, shared, 44.8 * GB),
    ):
        work = Workload(
            training=True, precision=precision, lora=_lora(rank, "all"), batch=2, sequence=2048, chunked_loss=True
        )
        yield Published(source=TORCHTUNE, model=model, measured=measured, work=work, layout=layout)


def _torchtitan() -> Iterator[Published]:
    """AdamW, sequences of 8192 unless said; the compiled runs. A row of 405B has 8 micro-batches in its batch."""

    def layout(data: int, tensor: int = 1, pipeline: int = 1) -> Layout:
        return Layout(data=data, tensor=tensor, pipeline=pipeline, sharding=Sharding.ZERO3)

    some, full = Recompute.SELECTIVE, Recompute.FULL
    for model, precision, recompute, batch, sequence, spread, measured in (
        ("llama-3.1-8b", Precision.BF16, some, 2, 8192, layout(8), 77.0),
        ("llama-3.1-8b", Precision.FP8, some, 2, 8192, layout(8), 76.8),
        ("llama-3.1-8b", Precision.BF16, some, 2, 8192, layout(128), 62.0),
        ("llama-3.1-8b", Precision.FP8, full, 1, 32768, layout(8), 83.9),
        ("llama-3.1-70b", Precision.FP8, full, 16, 8192, layout(32, 8), 71.9),
        ("llama-3.1-405b", Precision.FP8, full, 4, 8192, layout(8, 8, 8), 82.5),
        ("llama-3.1-405b", Precision.FP8, full, 1, 32768, layout(8, 8, 8), 75.3),
    ):
        work = Workload(training=True, precision=precision, recompute=recompute, batch=batch, sequence=sequence)
        yield Published(source=TORCHTITAN, model=model, measured=measured * GIB, work=work, layout=spread)
    work = Workload(training=True, precision=Precision.FP8, recompute=some, batch=2, sequence=8192)
    for cards, measured in ((32, 47.96), (64, 46.97)):
        yield Published(
            source=TORCHTITAN_H200, model="llama-3.1-8b", measured=measured * GIB, work=work, layout=layout(cards)
        )


def _qwen_training() -> Iterator[Published]:
    """Batch 1, each layer recomputed, rank 64 on every matrix; DeepSpeed's figures are sums over the cards."""
    zero3 = Layout(data=4, sharding=Sharding.ZERO3)
    zero2 = Layout(data=2, sharding=Sharding.ZERO2)
    every = _lora(64, "all")
    for model, precision, lora, layout, by_length in (
        ("qwen-1.8b", Precision.BF16, every, ONE_CARD, (6.7, 7.4, 8.4, 11.0, 16.2, 21.8)),
        ("qwen-7b", Precision.BF16, every, ONE_CARD, (20.1, 20.4, 21.5, 23.8, 29.7, 36.6)),
        ("qwen-14b", Precision.BF16, every, ONE_CARD, (34.6, 35.1, 35.3, 37.4, 42.5, 55.2)),
        ("qwen-1.8b", Precision.INT4, every, ONE_CARD, (5.8, 6.0, 6.6, 7.8, 10.2, 15.8)),
        ("qwen-7b", Precision.INT4, every, ONE_CARD, (11.5, 11.5, 12.3, 13.9, 16.9, 23.5)),
        ("qwen-14b", Precision.INT4, every, ONE_CARD, (18.7, 18.4, 18.9, 19.9, 23.0, 27.9)),
        ("qwen-72b", Precision.INT4, every, ONE_CARD, (61.4, 61.4, 62.9, 64.1, 68.0, 75.6)),
        ("qwen-1.8b", Precision.BF16, None, ONE_CARD, (43.5, 43.5, 43.5, 43.5, 47.1, 48.3)),
        ("qwen-7b", Precision.BF16, None, zero2, (139.2, 148.0, 162.0)),
        ("qwen-72b", Precision.BF16, every, zero3, (215.4, 217.7, 222.6, 228.8, 249.0, 289.2)),
    ):
        for sequence, measured in zip(_LENGTHS, by_length, strict=False):
            work = Workload(training=True, precision=precision, lora=lora, sequence=sequence)
            each = measured * GB / layout.cards
            yield Published(source=QWEN, model=model, measured=each, work=work, layout=layout, context=True)


def _qwen_inference() -> Iterator[Published]:
    """2048 tokens are written after the prompt, which is processed at once."""
    for source, model, precision, unit, by_prompt in (
        (QWEN25, "qwen2.5-0.5b", Precision.BF16, GIB, {1: 0.97, 6144: 1.23, 14336: 1.60, 30720: 2.34}),
        (QWEN25, "qwen2.5-7b", Precision.BF16, GIB, {1: 14.38, 6144: 15.38, 14336: 16.91, 30720: 19.97}),
        (QWEN25, "qwen2.5-7b", Precision.INT8, GIB, {1: 8.42, 6144: 9.43, 14336: 10.96, 30720: 14.01}),
        (QWEN25, "qwen2.5-7b", Precision.INT4, GIB, {1: 5.52, 6144: 6.52, 14336: 8.05, 30720: 11.11}),
        (QWEN25, "qwen2.5-14b", Precision.BF16, GIB, {1: 28.08, 6144: 29.50, 14336: 31.95, 30720: 36.85}),
        (QWEN25, "qwen2.5-14b", Precision.INT8, GIB, {1: 16.11, 6144: 17.61, 14336: 19.98, 30720: 24.88}),
        (QWEN25, "qwen2.5-14b", Precision.INT4, GIB, {1: 9.94, 6144: 11.36, 14336: 13.81, 30720: 18.71}),
        (QWEN3, "qwen3-4b", Precision.BF16, MIB, {1: 7973, 6144: 8860, 14336: 10012, 30720: 12317}),
        (QWEN3, "qwen3-4b", Precision.FP8, MIB, {1: 5281, 6144: 6144, 14336: 7297, 30720: 9611}),
        (QWEN3, "qwen3-4b", Precision.INT4, MIB, {1: 2915, 6144: 3881, 14336: 5151, 30720: 7742}),
        (QWEN3, "qwen3-8b", Precision.BF16, MIB, {1: 15947, 6144: 16811}),
        (QWEN3, "qwen3-8b", Precision.FP8, MIB, {1: 9323, 6144: 10187}),
        (QWEN3, "qwen3-8b", Precision.INT4, MIB, {1: 6177, 6144: 7113}),
        (QWEN3, "qwen3-32b", Precision.BF16, MIB, {1: 62751, 6144: 64583, 14336: 66632, 30720: 70728}),
        (QWEN3, "qwen3-32b", Precision.FP8, MIB, {1: 33379, 6144: 34915, 14336: 36963, 30720: 41060}),
        (QWEN3, "qwen3-32b", Precision.INT4, MIB, {1: 19109, 6144: 20795, 14336: 23105, 30720: 27718}),
        (QWEN3, "qwen3-30b-a3b", Precision.BF16, MIB, {1: 58462, 6144: 59037, 14336: 59806, 30720: 61342}),
        (QWEN3, "qwen3-30b-a3b", Precision.FP8, MIB, {1: 30296, 6144: 30872, 14336: 31641, 30720: 33177}),
    ):
        for prompt, measured in by_prompt.items():
            work = Workload(training=False, precision=precision, sequence=prompt + 2048, prefill=prompt)
            yield Published(source=source, model=model, measured=measured * unit, work=work)


PUBLISHED: Final = (
    *_litgpt(),
    *_litgpt_hub(),
    *_torchtune(),
    *_torchtitan(),
    *_qwen_training(),
    *_qwen_inference(),
)
