"""The hosts of a market without a configuration, similar to what is really sold."""

from __future__ import annotations

from typing import Any, Final

from spotd_providers.local.settings import Flavour, HostSpec, SeededPrice


def _marketplace(name: str, gpu: str, vram_gb: int, base: float, **more: Any) -> HostSpec:
    """Build a host of a bid market: cheap, sudden, with prices on traffic."""
    return HostSpec(
        name=name,
        gpu=gpu,
        vram_mb=vram_gb * 1024,
        flavour=Flavour.SUDDEN,
        spot=SeededPrice(base=base),
        on_demand=round(base * 1.7, 4),
        storage_gb_month=0.15,
        upload_gb=0.004,
        download_gb=0.002,
        **more,
    )


def _cloud(name: str, gpu: str, vram_gb: int, base: float, on_demand: float, **more: Any) -> HostSpec:
    """Build a pool of a large cloud: higher prices, fewer interruptions, two minutes of notice."""
    return HostSpec(
        name=name,
        gpu=gpu,
        vram_mb=vram_gb * 1024,
        flavour=Flavour.NOTICE,
        spot=SeededPrice(base=base, volatility=0.04, night=0.12, weekend=0.06, spikes=0.05),
        on_demand=on_demand,
        storage_gb_month=0.08,
        upload_gb=0.02,
        reliability=0.999,
        **more,
    )


BUILTIN_HOSTS: Final[tuple[HostSpec, ...]] = (
    _marketplace("kyiv-4090", "RTX_4090", 24, 0.29, region="eu-ua", utc_offset_h=2),
    _marketplace("oslo-4090", "RTX_4090", 24, 0.34, region="eu-no", utc_offset_h=1, reliability=0.995),
    _marketplace("taipei-4090x4", "RTX_4090", 24, 1.26, gpu_count=4, region="asia-tw", utc_offset_h=8),
    _marketplace("texas-3090", "RTX_3090", 24, 0.16, region="us-tx", utc_offset_h=-6, reliability=0.97),
    _marketplace("lyon-5090", "RTX_5090", 32, 0.46, region="eu-fr", utc_offset_h=1),
    _marketplace("quebec-a100", "A100_SXM_80", 80, 0.82, region="ca-qc", utc_offset_h=-5, reliability=0.995),
    _marketplace("utah-h100", "H100_SXM", 80, 1.72, region="us-ut", utc_offset_h=-7),
    _marketplace("frankfurt-h100x8", "H100_SXM", 80, 14.2, gpu_count=8, region="eu-de", utc_offset_h=1, cpus=128),
    _cloud("us-east-1a-l4", "L4", 24, 0.33, 0.80, region="us-east-1", utc_offset_h=-5, slots=4),
    _cloud("us-east-1b-a10g", "A10G", 24, 0.44, 1.01, region="us-east-1", utc_offset_h=-5, slots=4),
    _cloud("us-west-2a-l40s", "L40S", 48, 0.79, 1.86, region="us-west-2", utc_offset_h=-8, slots=2),
    _cloud("eu-north-1a-h100", "H100_SXM", 80, 2.35, 4.33, region="eu-north-1", utc_offset_h=1, slots=2),
)
