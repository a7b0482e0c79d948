"""The one table of GPUs, with their names here, at each provider and among users. Data only; `gpus` reads it.

Theory. A row of `gpus.csv` is one thing that is sold at one price level: model, form factor, and memory where one
model comes with several. A *family* is what a person means by a short name ("h100" is three rows). Cards that a
workshop modified, and factory variants with less memory than the name promises, are rows outside the family: they must
be asked for by name. vast also sells the RTX PRO 6000 without naming its form: that name is a row of its own and a
family. Providers report memory near the nominal figure, not equal to it (error correction takes up to 7 percent),
which is why rows carry nominal gigabytes and `gpus` compares with a tolerance.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuInfo:
    """One row. In the file, `;` stands between the values of a cell.

    Attributes:
        name: canonical id.
        vram_gb: nominal memory; several figures where sources differ for the same card, the first is the usual one.
        compute_capability: CUDA's, say `8.9`; `None` for cards that do not run CUDA.
        vast: `gpu_name` values; several rows may share one, memory distinguishes them.
        runpod: exact ids.
        aws: `GpuInfo.Gpus[].Name` values of EC2.
        aws_types: EC2 instance types and how many of this GPU each holds.
        aliases: further spellings that mean this row (or, shared by several rows, one of them).
        families: short names that mean all rows which list them.
    """

    name: str
    vram_gb: tuple[int, ...]
    compute_capability: str | None
    vast: tuple[str, ...] = ()
    runpod: tuple[str, ...] = ()
    aws: tuple[str, ...] = ()
    aws_types: Mapping[str, int] = field(default_factory=dict)
    aliases: tuple[str, ...] = ()
    families: tuple[str, ...] = ()


def _sizes(family: str, counts: Mapping[str, int]) -> dict[str, int]:
    return {f"{family}.{size}": count for size, count in counts.items()}


_UP_TO_16XLARGE: Final = {"xlarge": 1, "2xlarge": 1, "4xlarge": 1, "8xlarge": 1, "16xlarge": 1}
_G5_LIKE: Final = {**_UP_TO_16XLARGE, "12xlarge": 4, "24xlarge": 4, "48xlarge": 8}
_G7_LIKE: Final = {"2xlarge": 1, "4xlarge": 1, "8xlarge": 1, "12xlarge": 2, "24xlarge": 4, "48xlarge": 8}
_AWS_TYPES: Final[Mapping[str, Mapping[str, int]]] = {
    "B300_SXM": {"p6-b300.48xlarge": 8},
    "B200_SXM": {"p6-b200.48xlarge": 8},
    "H200_SXM": {"p5e.48xlarge": 8, "p5en.48xlarge": 8},
    "H100_SXM": {"p5.4xlarge": 1, "p5.48xlarge": 8},
    "A100_SXM_80": {"p4de.24xlarge": 8},
    "A100_SXM_40": {"p4d.24xlarge": 8},
    "L40S": _sizes("g6e", _G5_LIKE),
    "L4": _sizes("g6", _G5_LIKE) | _sizes("gr6", {"4xlarge": 1, "8xlarge": 1}),
    "A10G": _sizes("g5", _G5_LIKE),
    "T4": _sizes("g4dn", {**_UP_TO_16XLARGE, "12xlarge": 4, "metal": 8}),
    "T4G": _sizes("g5g", {**_UP_TO_16XLARGE, "16xlarge": 2, "metal": 2}),
    "V100_16": _sizes("p3", {"2xlarge": 1, "8xlarge": 4, "16xlarge": 8}),
    "V100_32": {"p3dn.24xlarge": 8},
    "K80": _sizes("p2", {"xlarge": 1, "8xlarge": 8, "16xlarge": 16}),
    "M60": {"g3s.xlarge": 1, "g3.4xlarge": 1, "g3.8xlarge": 2, "g3.16xlarge": 4},
    "K520": {"g2.2xlarge": 1, "g2.8xlarge": 4},
    "RTX_PRO_6000_SE": _sizes("g7e", _G7_LIKE),
    "RTX_PRO_4500": _sizes("g7", _G7_LIKE),
}


def _values(cell: str) -> tuple[str, ...]:
    return tuple(cell.split(";")) if cell else ()


def _read_table() -> tuple[GpuInfo, ...]:
    with Path(__file__).with_name("gpus.csv").open(encoding="utf-8", newline="") as file:
        return tuple(
            GpuInfo(
                name=row["name"],
                vram_gb=tuple(int(gb) for gb in _values(row["vram_gb"])),
                compute_capability=row["compute_capability"] or None,
                vast=_values(row["vast"]),
                runpod=_values(row["runpod"]),
                aws=_values(row["aws"]),
                aws_types=_AWS_TYPES.get(row["name"], {}),
                aliases=_values(row["aliases"]),
                families=_values(row["families"]),
            )
            for row in csv.DictReader(file)
        )


GPUS: Final = _read_table()

AMBIGUOUS_NAMES: Final[Mapping[str, tuple[str, ...]]] = {
    "RTX 6000": ("RTX_A6000", "RTX_6000_ADA", "QUADRO_RTX_6000", "RTX_PRO_6000_SE"),
    "6000": ("RTX_A6000", "RTX_6000_ADA", "QUADRO_RTX_6000", "RTX_PRO_6000_SE"),
    "RTX 5000": ("RTX_A5000", "RTX_5000_ADA", "QUADRO_RTX_5000", "RTX_PRO_5000"),
    "5000": ("RTX_A5000", "RTX_5000_ADA", "QUADRO_RTX_5000", "RTX_PRO_5000"),
    "RTX 4500": ("RTX_A4500", "RTX_4500_ADA", "RTX_PRO_4500"),
    "RTX 4000": ("RTX_A4000", "RTX_4000_ADA", "QUADRO_RTX_4000", "RTX_PRO_4000"),
    "RTX 8000": ("QUADRO_RTX_8000",),
}
"""Names that several generations share: never guessed for a user; a provider's use is settled by memory alone."""
