"""The hardware of an instance type, or the reason why it is not offered."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from spotd_providers.aws.wire import TypeRow
from spotd_providers.contract.gpus import aws_gpus, canonical, gpu_info, vram_fits
from spotd_providers.contract.values import NO_GPU

OPEN_DRIVER_MIN: Final = 7.5
"""CUDA compute capability from which NVIDIA's open kernel modules work; the default images have no others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """One instance type that can be offered."""

    instance_type: str
    gpu: str
    gpu_count: int
    gpu_vram_mb: int | None
    cpus: int | None
    memory_mb: int | None
    sold_as: frozenset[str]


def hardware(row: TypeRow, *, own_image: bool, without_gpu: bool = False) -> Hardware | str | None:
    """Describe the type's hardware: a reason if it cannot be used, `None` for one without GPUs that is not wanted.

    Args:
        own_image: the user names the machine image, and answers for its drivers and processor.
        without_gpu: the user names this type although it has no GPU.
    """
    gpus = row.GpuInfo.Gpus if row.GpuInfo is not None else []
    architectures = row.ProcessorInfo.SupportedArchitectures if row.ProcessorInfo is not None else []
    other_processor = f"its processor is {'/'.join(architectures) or 'unknown'}, the machine image is for x86_64"
    if not gpus:
        if without_gpu and "x86_64" not in architectures and not own_image:
            return other_processor
        return _described(row, NO_GPU, 0, None) if without_gpu else None
    first = gpus[0]
    if len(gpus) > 1:
        return "it has several kinds of GPU"
    if first.Manufacturer.upper() != "NVIDIA":
        return f"its GPUs are made by {first.Manufacturer}, images for CUDA do not run on them"
    if "x86_64" not in architectures and not own_image:
        return other_processor
    vram = first.MemoryInfo.SizeInMiB if first.MemoryInfo is not None else None
    known = aws_gpus(row.InstanceType)
    # Fractions of a card (g6f) count 0; they are named by their memory and never answer to the whole card's name.
    count = first.Count or first.LogicalGpuCount or 0
    if count <= 0:
        return "AWS does not say how many GPUs it has"
    name = known[0] if known is not None else canonical("aws", first.Name, vram)
    info = gpu_info(name)
    if not own_image and info is not None and float(info.compute_capability or OPEN_DRIVER_MIN) < OPEN_DRIVER_MIN:
        return f"the default machine image's driver knows no {name}; set ami"
    return _described(row, name, count, _memory(name, vram))


def _described(row: TypeRow, gpu: str, gpu_count: int, gpu_vram_mb: int | None) -> Hardware:
    return Hardware(
        instance_type=row.InstanceType,
        gpu=gpu,
        gpu_count=gpu_count,
        gpu_vram_mb=gpu_vram_mb,
        cpus=row.VCpuInfo.DefaultVCpus if row.VCpuInfo is not None else None,
        memory_mb=row.MemoryInfo.SizeInMiB if row.MemoryInfo is not None else None,
        sold_as=frozenset(row.SupportedUsageClasses),
    )


def _memory(gpu: str, stated_mb: int | None) -> int | None:
    """Return the memory that a card in the table is sold with: AWS states 22,888 MiB for one with 24 GB."""
    info = gpu_info(gpu)
    if info is not None and stated_mb:
        fitting = [gb for gb in info.vram_gb if vram_fits(gb, stated_mb)]
        return max([stated_mb, *(gb * 1024 for gb in fitting)])
    return stated_mb or None
