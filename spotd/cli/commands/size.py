"""`size`: the memory that a model needs, the GPUs that hold it, and where they are cheapest now."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Final

import click

from spotd.cli import stderr
from spotd.cli.current_quotes import current_quotes
from spotd.cli.failures import CommandFailed
from spotd.cli.inputs.model_file import read_architecture
from spotd.cli.inputs.options import JSON, TABLE, F, output, shown_option
from spotd.cli.views.figures import PARAMS, number
from spotd.cli.views.size_view import Sizing, cheapest_rows, document, show
from spotd.estimates.adapters import TARGETS
from spotd.estimates.architecture import Architecture, typical_architecture
from spotd.estimates.fitting import MemoryNeeds, Spread, gpu_fits, layout_for
from spotd.estimates.memory import WorkloadError, memory_parts
from spotd.estimates.rule_of_thumb import rule_of_thumb
from spotd.estimates.workload import Lora, Optimizer, Precision, Recompute, Sharding, Workload
from spotd_jobs.spec.problems import nearest
from spotd_providers.contract import gpus
from spotd_providers.contract.gpus_table import GPUS, GpuInfo

_CACHE_BYTES: Final = {"16-bit": 2, "8-bit": 1}
_SHARDING: Final = {**{kind.value: kind for kind in Sharding}, "ddp": Sharding.NONE, "fsdp": Sharding.ZERO3}
_COUNT: Final = click.IntRange(1, 1_000_000)
_CARDS: Final = click.IntRange(1, 65_536)
_RANK: Final = click.IntRange(1, 65_536)
_TOKENS: Final = click.IntRange(1, 100_000_000)


def _one_of(flag: str, kinds: Iterable[str], default: str, text: str) -> Callable[[F], F]:
    return shown_option(flag, type=click.Choice([*kinds], case_sensitive=False), default=default, help=text)


@click.command()
@click.argument("config", metavar="[CONFIG.json]", type=click.Path(path_type=Path), required=False)
@click.option("--params", type=PARAMS, metavar="7B", help="Number of parameters, instead of a config.")
@click.option("--inference", is_flag=True, help="Inference instead of training.")
@_one_of(
    "--precision",
    map(str, Precision),
    Precision.BF16.value,
    "Of the weights; in training bf16 and fp16 are mixed precision.",
)
@_one_of("--optimizer", map(str, Optimizer), Optimizer.ADAMW.value, "What updates the weights.")
@click.option("--lora", type=_RANK, metavar="RANK", help="Train adapters of this rank, and no weights.")
@click.option("--qlora", type=_RANK, metavar="RANK", help="The same over int4 weights.")
@click.option("--lora-targets", default="all", show_default=True, help="all, attention, mlp, or a list like q,v.")
@_one_of(
    "--checkpointing", map(str, Recompute), Recompute.FULL.value, "Activations that are computed again instead of kept."
)
@click.option("--no-flash", is_flag=True, help="Attention that keeps its matrix of scores.")
@click.option("--chunked-loss", is_flag=True, help="A loss that never holds all logits.")
@click.option("--batch", type=_COUNT, default=1, show_default=True, help="Sequences per step of one replica.")
@click.option("--sequence", type=_TOKENS, default=2048, show_default=True, help="Tokens of one, prompt and answer.")
@_one_of("--kv-cache", _CACHE_BYTES, "16-bit", "Keys and values of inference.")
@click.option("--prefill", type=_TOKENS, help="Tokens of a prompt processed at once.  [default: all]")
@_one_of(
    "--sharding",
    _SHARDING,
    Sharding.AUTO.value,
    "What data-parallel cards share; auto is zero3 (fsdp) on more than one.",
)
@click.option("--tp", type=_CARDS, help="Tensor-parallel cards.  [default: 1; all in inference]")
@click.option("--pp", type=_CARDS, default=1, show_default=True, help="Pipeline stages.")
@click.option("--cards", type=_CARDS, help="Cards of the memory table.  [default: as few as tp and pp need]")
@click.option("--headroom", type=number(unit="%", most=100), default="10", show_default=True, help="Room kept free.")
@click.option("--gpu", metavar="NAME", help="Only this GPU, in any usual spelling.")
@click.option("-n", "--limit", type=click.IntRange(1, 1000), default=5, show_default=True, help="Machines shown.")
@output(TABLE, JSON)
def size(*, config: Path | None, params: int | None, output: str, **given: Any) -> None:
    """The memory that a model needs, the GPUs that hold it, and the cheapest machines that do now.

    \b
    spotctl size --params 7B
    spotctl size config.json --qlora 16 --batch 4 --sequence 4096
    spotctl size config.json --inference --precision int4 --sequence 32768
    """
    model = _model(config, params)
    work = _workload(given)
    spread = Spread(sharding=_SHARDING[given["sharding"]], tensor=given["tp"], pipeline=given["pp"])
    wanted = _wanted(given["gpu"])
    cards = given["cards"] or (given["tp"] or 1) * given["pp"]
    layout = layout_for(model, work, spread, cards)
    if layout is None:
        raise CommandFailed(
            f"{cards} cards cannot be divided into {given['tp'] or 1} tensor-parallel x {given['pp']} stages",
            hint=f"--cards {max(1, cards // ((given['tp'] or 1) * given['pp'])) * (given['tp'] or 1) * given['pp']}",
        )
    needs = MemoryNeeds(model, work, spread, headroom=given["headroom"] / 100)
    try:
        parts = memory_parts(model, work, layout)
    except WorkloadError as exc:
        raise CommandFailed(str(exc), hint=exc.hint) from exc
    quotes, silence = current_quotes()
    sizing = Sizing(
        source="--params" if config is None else str(config),
        model=model,
        work=work,
        layout=layout,
        parts=parts,
        rule=rule_of_thumb(model, work),
        headroom=given["headroom"],
        fits=tuple(gpu_fits(needs, work.precision, wanted)),
        cheapest=tuple(cheapest_rows(needs, work.precision, quotes, {gpu.name for gpu in wanted}))[: given["limit"]],
        silence=silence,
    )
    if output == JSON:
        document(sizing)
        return
    show(sizing)
    if silence:
        stderr.note(f"today's prices are left out: {silence}")


def _model(config: Path | None, params: int | None) -> Architecture:
    if config is not None and params is not None:
        raise click.UsageError("a config and --params exclude each other")
    if config is not None:
        return read_architecture(config)
    if params is None:
        raise click.UsageError("give a model: --params 7B, or the path of its config.json")
    return typical_architecture(params)


def _workload(given: dict[str, Any]) -> Workload:
    if given["lora"] and given["qlora"]:
        raise click.UsageError("--lora and --qlora exclude each other")
    rank = given["lora"] or given["qlora"]
    precision = Precision.INT4 if given["qlora"] else Precision(given["precision"])
    return Workload(
        training=not given["inference"],
        precision=precision,
        optimizer=Optimizer(given["optimizer"]),
        lora=None if rank is None else Lora(rank=rank, targets=_targets(given["lora_targets"])),
        recompute=Recompute(given["checkpointing"]),
        flash=not given["no_flash"],
        chunked_loss=given["chunked_loss"],
        batch=given["batch"],
        sequence=given["sequence"],
        cache_bytes=_CACHE_BYTES[given["kv_cache"]],
        prefill=given["prefill"],
    )


def _targets(text: str) -> frozenset[str]:
    found: set[str] = set()
    for name in (part.strip().lower() for part in text.split(",")):
        if name not in TARGETS:
            match = nearest(name, TARGETS)
            known = f"did you mean {match}?" if match else f"known: {', '.join(TARGETS)}"
            raise click.BadParameter(f"{name!r} is no matrix of a layer; {known}", param_hint="'--lora-targets'")
        found |= TARGETS[name]
    return frozenset(found)


def _wanted(name: str | None) -> Sequence[GpuInfo]:
    if name is None:
        return GPUS
    try:
        names = gpus.resolve(name)
    except gpus.UnknownGpu as exc:
        raise CommandFailed(str(exc), hint="spotctl size without --gpu shows all") from exc
    return [gpu for gpu in GPUS if gpu.name in names]
