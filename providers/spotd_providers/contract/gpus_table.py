"""The one table of GPUs, with their names here, at each provider and among users. Data only; `gpus` reads it.

Theory. A row is one thing that is sold at one price level: model, form factor, and memory where one model comes with
several. A *family* is what a person means by a short name ("h100" is three rows). Cards that a workshop modified, and
factory variants with less memory than the name promises, are rows outside the family: they must be asked for by name.
Providers report memory near the nominal figure, not equal to it (error correction takes up to 7 percent), which is
why rows carry nominal gigabytes and `gpus` compares with a tolerance.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuInfo:
    """One row.

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


def _gpu(
    name: str,
    vram_gb: int | tuple[int, ...],
    compute_capability: str | None,
    vast: str | tuple[str, ...] = (),
    runpod: str | tuple[str, ...] = (),
    *,
    aws: str | tuple[str, ...] = (),
    aws_types: Mapping[str, int] | None = None,
    aliases: tuple[str, ...] = (),
    families: tuple[str, ...] = (),
) -> GpuInfo:
    def as_tuple(value: str | tuple[str, ...]) -> tuple[str, ...]:
        return (value,) if isinstance(value, str) else value

    return GpuInfo(
        name=name,
        vram_gb=(vram_gb,) if isinstance(vram_gb, int) else vram_gb,
        compute_capability=compute_capability,
        vast=as_tuple(vast),
        runpod=as_tuple(runpod),
        aws=as_tuple(aws),
        aws_types=dict(aws_types or {}),
        aliases=aliases,
        families=families,
    )


def _sizes(family: str, counts: Mapping[str, int]) -> dict[str, int]:
    return {f"{family}.{size}": count for size, count in counts.items()}


_UP_TO_16XLARGE: Final = {"xlarge": 1, "2xlarge": 1, "4xlarge": 1, "8xlarge": 1, "16xlarge": 1}
_G5_LIKE: Final = {**_UP_TO_16XLARGE, "12xlarge": 4, "24xlarge": 4, "48xlarge": 8}
_G7_LIKE: Final = {"2xlarge": 1, "4xlarge": 1, "8xlarge": 1, "12xlarge": 2, "24xlarge": 4, "48xlarge": 8}

_DATA_CENTER: Final = (
    _gpu(
        "B300_SXM",
        (288, 270, 262),
        "10.3",
        "B300",
        "NVIDIA B300 SXM6 AC",
        aws="B300",
        aws_types={"p6-b300.48xlarge": 8},
        aliases=("B300",),
    ),
    _gpu(
        "B200_SXM",
        (180, 192),
        "10.0",
        "B200",
        "NVIDIA B200",
        aws="B200",
        aws_types={"p6-b200.48xlarge": 8},
        aliases=("B200", "B200 SXM6"),
    ),
    _gpu("GB200", 186, "10.0"),
    _gpu(
        "H200_SXM",
        141,
        "9.0",
        "H200",
        "NVIDIA H200",
        aws="H200",
        aws_types={"p5e.48xlarge": 8, "p5en.48xlarge": 8},
        aliases=("H200", "H200 SXM5"),
    ),
    _gpu("H200_NVL", (141, 143), "9.0", "H200 NVL", "NVIDIA H200 NVL"),
    _gpu("GH200", 96, "9.0", "GH200 SXM"),
    _gpu(
        "H100_SXM",
        80,
        "9.0",
        "H100 SXM",
        "NVIDIA H100 80GB HBM3",
        aws="H100",
        aws_types={"p5.4xlarge": 1, "p5.48xlarge": 8},
        aliases=("H100 SXM5", "H100 HBM3"),
        families=("H100",),
    ),
    _gpu("H100_PCIE", 80, "9.0", "H100 PCIE", "NVIDIA H100 PCIe", families=("H100",)),
    _gpu("H100_NVL", 94, "9.0", "H100 NVL", "NVIDIA H100 NVL", families=("H100",)),
    _gpu(
        "A100_SXM_80",
        80,
        "8.0",
        ("A100 SXM4", "A100 SXM"),
        "NVIDIA A100-SXM4-80GB",
        aws="A100",
        aws_types={"p4de.24xlarge": 8},
        families=("A100", "A100 SXM", "A100 SXM4"),
    ),
    _gpu(
        "A100_SXM_40",
        40,
        "8.0",
        ("A100 SXM4", "A100 SXM"),
        "NVIDIA A100-SXM4-40GB",
        aws="A100",
        aws_types={"p4d.24xlarge": 8},
        families=("A100", "A100 SXM", "A100 SXM4"),
    ),
    _gpu("A100_PCIE_80", 80, "8.0", "A100 PCIE", "NVIDIA A100 80GB PCIe", families=("A100", "A100 PCIE")),
    _gpu("A100_PCIE_40", 40, "8.0", "A100 PCIE", families=("A100", "A100 PCIE")),
    _gpu("A100X", 80, "8.0", "A100X"),
    _gpu("A800_PCIE", 80, "8.0", "A800 PCIE", aliases=("A800",)),
    _gpu("L40S", 48, "8.9", "L40S", "NVIDIA L40S", aws="L40S", aws_types=_sizes("g6e", _G5_LIKE)),
    _gpu("L40", 48, "8.9", "L40", "NVIDIA L40"),
    _gpu(
        "L4",
        24,
        "8.9",
        "L4",
        "NVIDIA L4",
        aws="L4",
        aws_types=_sizes("g6", _G5_LIKE) | _sizes("gr6", {"4xlarge": 1, "8xlarge": 1}),
    ),
    _gpu("A40", 48, "8.6", "A40", "NVIDIA A40"),
    _gpu("A30", 24, "8.0", "A30", ("NVIDIA A30", "NVIDIA RTX A30")),
    _gpu("A16", 16, "8.6", "A16"),
    _gpu("A10", 24, "8.6", "A10"),
    _gpu("A10G", 24, "8.6", "A10g", aws="A10G", aws_types=_sizes("g5", _G5_LIKE)),
    _gpu(
        "T4",
        16,
        "7.5",
        "Tesla T4",
        "Tesla T4",
        aws="T4",
        aws_types=_sizes("g4dn", {**_UP_TO_16XLARGE, "12xlarge": 4, "metal": 8}),
    ),
    _gpu(
        "T4G",
        16,
        "7.5",
        aws="T4g",
        aws_types=_sizes("g5g", {"xlarge": 1, "2xlarge": 1, "4xlarge": 1, "8xlarge": 1, "16xlarge": 2, "metal": 2}),
    ),
    _gpu(
        "V100_16",
        16,
        "7.0",
        "Tesla V100",
        ("Tesla V100-PCIE-16GB", "Tesla V100-SXM2-16GB", "Tesla V100-FHHL-16GB"),
        aws="V100",
        aws_types=_sizes("p3", {"2xlarge": 1, "8xlarge": 4, "16xlarge": 8}),
        families=("V100",),
    ),
    _gpu(
        "V100_32",
        32,
        "7.0",
        "Tesla V100",
        ("Tesla V100-SXM2-32GB", "Tesla V100-PCIE-32GB"),
        aws="V100",
        aws_types={"p3dn.24xlarge": 8},
        families=("V100",),
    ),
    _gpu("P100", 16, "6.0", "Tesla P100"),
    _gpu("P40", 24, "6.1", "Tesla P40"),
    _gpu("P4", 8, "6.1", "Tesla P4"),
    _gpu("K80", 12, "3.7", aws="K80", aws_types=_sizes("p2", {"xlarge": 1, "8xlarge": 8, "16xlarge": 16})),
    _gpu(
        "M60",
        8,
        "5.2",
        aws="M60",
        aws_types={"g3s.xlarge": 1, "g3.4xlarge": 1, "g3.8xlarge": 2, "g3.16xlarge": 4},
    ),
    _gpu("K520", 4, "3.0", aws="K520", aws_types={"g2.2xlarge": 1, "g2.8xlarge": 4}),
    _gpu("MI300X", 192, None, (), "AMD Instinct MI300X OAM", aliases=("MI300X OAM",)),
    _gpu("MI250X", 128, None, "InstinctMI250X"),
    _gpu("MI210", 64, None, "InstinctMI210"),
    _gpu("MI100", 32, None, "InstinctMI100"),
    _gpu("MI50", 16, None, "InstinctMI50"),
)

_PRO_6000: Final = ("RTX PRO 6000", "PRO 6000", "RTX PRO 6000 Blackwell")

_WORKSTATION: Final = (
    _gpu(
        "RTX_PRO_6000_SE",
        96,
        "12.0",
        ("RTX PRO 6000 S", "RTX PRO 6000 SE"),
        "NVIDIA RTX PRO 6000 Blackwell Server Edition",
        aws=("RTX PRO Server 6000", "RTX PRO 6000"),
        aws_types=_sizes("g7e", _G7_LIKE),
        aliases=("PRO 6000 Server", "RTX PRO 6000 Server"),
        families=_PRO_6000,
    ),
    _gpu(
        "RTX_PRO_6000_WS",
        96,
        "12.0",
        "RTX PRO 6000 WS",
        "NVIDIA RTX PRO 6000 Blackwell Workstation Edition",
        aliases=("RTX PRO 6000 WK", "PRO 6000 WS", "RTX PRO 6000 Workstation"),
        families=_PRO_6000,
    ),
    _gpu(
        "RTX_PRO_6000_MAXQ",
        96,
        "12.0",
        "RTX PRO 6000 Max-Q",
        "NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition",
        families=_PRO_6000,
    ),
    # vast also sells it without naming the form; the name alone therefore is a row of its own and a family.
    _gpu("RTX_PRO_6000", 96, "12.0", "RTX PRO 6000", families=_PRO_6000),
    _gpu("RTX_PRO_5000", 48, "12.0", "RTX PRO 5000", "NVIDIA RTX PRO 5000 Blackwell", aliases=("PRO 5000",)),
    _gpu(
        "RTX_PRO_4500",
        32,
        "12.0",
        "RTX PRO 4500",
        "NVIDIA RTX PRO 4500 Blackwell",
        aws="RTX PRO 4500",
        aws_types=_sizes("g7", _G7_LIKE),
        aliases=("PRO 4500",),
    ),
    _gpu("RTX_PRO_4000", 24, "12.0", "RTX PRO 4000", "NVIDIA RTX PRO 4000 Blackwell", aliases=("PRO 4000",)),
    _gpu("RTX_6000_ADA", 48, "8.9", "RTX 6000Ada", "NVIDIA RTX 6000 Ada Generation", aliases=("6000 Ada", "A6000 Ada")),
    _gpu("RTX_5880_ADA", 48, "8.9", "RTX 5880Ada", "NVIDIA RTX 5880 Ada Generation", aliases=("5880 Ada",)),
    _gpu(
        "RTX_5000_ADA",
        32,
        "8.9",
        "RTX 5000Ada",
        ("NVIDIA RTX 5000 Ada Generation", "NVIDIA A5000 Ada"),
        aliases=("5000 Ada",),
    ),
    _gpu("RTX_4500_ADA", 24, "8.9", "RTX 4500Ada", "NVIDIA RTX 4500 Ada Generation", aliases=("4500 Ada",)),
    _gpu(
        "RTX_4000_ADA",
        20,
        "8.9",
        "RTX 4000Ada",
        ("NVIDIA RTX 4000 Ada Generation", "NVIDIA RTX 4000 SFF Ada Generation"),
        aliases=("4000 Ada", "RTX 4000 Ada SFF", "RTX 4000 SFF Ada"),
    ),
    _gpu("RTX_2000_ADA", 16, "8.9", "RTX 2000Ada", "NVIDIA RTX 2000 Ada Generation", aliases=("2000 Ada",)),
    _gpu("RTX_A6000", 48, "8.6", "RTX A6000", "NVIDIA RTX A6000", aliases=("A6000",)),
    _gpu("RTX_A5000", 24, "8.6", "RTX A5000", "NVIDIA RTX A5000", aliases=("A5000",)),
    _gpu("RTX_A4500", 20, "8.6", "RTX A4500", "NVIDIA RTX A4500", aliases=("A4500",)),
    _gpu("RTX_A4000", 16, "8.6", "RTX A4000", "NVIDIA RTX A4000", aliases=("A4000",)),
    _gpu("RTX_A2000", 6, "8.6", "RTX A2000", "NVIDIA RTX A2000", families=("RTX A2000", "A2000")),
    _gpu("RTX_A2000_12", 12, "8.6", "RTX A2000", families=("RTX A2000", "A2000")),
    _gpu("QUADRO_RTX_8000", 48, "7.5", "Q RTX 8000", "Quadro RTX 8000"),
    _gpu("QUADRO_RTX_6000", 24, "7.5", "Q RTX 6000", "Quadro RTX 6000"),
    _gpu("QUADRO_RTX_5000", 16, "7.5", "Q RTX 5000", "Quadro RTX 5000"),
    _gpu("QUADRO_RTX_4000", 8, "7.5", "Q RTX 4000", "Quadro RTX 4000"),
)


def _rtx(
    model: str,
    vram_gb: int,
    compute_capability: str,
    *,
    vast: str | None = None,
    runpod: str | None = None,
    more: tuple[int, ...] = (),
    odd: tuple[int, ...] = (),
) -> tuple[GpuInfo, ...]:
    """Build the rows of one consumer model: the usual one, factory variants with `more` memory, and `odd` ones.

    Providers sell all of them under one name; people who say that name mean the usual one or more.
    """
    name = f"RTX_{model.upper().replace(' ', '_')}"
    vast_name = vast or f"RTX {model}"
    family = (model, f"RTX {model}")
    usual = _gpu(name, vram_gb, compute_capability, vast_name, runpod or f"NVIDIA GeForce RTX {model}", families=family)
    return (
        usual,
        *(_gpu(f"{name}_{gb}", gb, compute_capability, vast_name, families=family) for gb in more),
        *(_gpu(f"{name}_{gb}", gb, compute_capability, vast_name) for gb in odd),
    )


def _gtx(model: str, vram_gb: int, compute_capability: str) -> GpuInfo:
    name = f"GTX_{model.upper().replace(' ', '_')}"
    return _gpu(name, vram_gb, compute_capability, f"GTX {model}", f"NVIDIA GeForce GTX {model}", aliases=(model,))


_CONSUMER: Final = (
    *_rtx("5090", 32, "12.0"),
    *_rtx("5080", 16, "12.0"),
    *_rtx("5070 Ti", 16, "12.0"),
    *_rtx("5070", 12, "12.0"),
    *_rtx("5060 Ti", 8, "12.0", more=(16,)),
    *_rtx("5060", 8, "12.0"),
    *_rtx("4090", 24, "8.9", odd=(48,)),
    *_rtx("4090D", 24, "8.9", odd=(48,)),
    *_rtx("4080 SUPER", 16, "8.9", vast="RTX 4080S"),
    *_rtx("4080", 16, "8.9"),
    *_rtx("4070 Ti SUPER", 16, "8.9", vast="RTX 4070S Ti"),
    *_rtx("4070 Ti", 12, "8.9"),
    *_rtx("4070 SUPER", 12, "8.9", vast="RTX 4070S"),
    *_rtx("4070", 12, "8.9"),
    *_rtx("4060 Ti", 8, "8.9", more=(16,)),
    *_rtx("4060", 8, "8.9"),
    *_rtx("3090 Ti", 24, "8.6"),
    *_rtx("3090", 24, "8.6"),
    *_rtx("3080 Ti", 12, "8.6"),
    *_rtx("3080", 10, "8.6", more=(12,), odd=(20,)),
    *_rtx("3070 Ti", 8, "8.6"),
    *_rtx("3070", 8, "8.6"),
    *_rtx("3060 Ti", 8, "8.6"),
    *_rtx("3060", 12, "8.6", odd=(8,)),
    *_rtx("3050", 8, "8.6"),
    *_rtx("2080 Ti", 11, "7.5", odd=(22,)),
    *_rtx("2080S", 8, "7.5", runpod="NVIDIA GeForce RTX 2080 SUPER"),
    *_rtx("2080", 8, "7.5"),
    *_rtx("2070S", 8, "7.5", runpod="NVIDIA GeForce RTX 2070 SUPER"),
    *_rtx("2070", 8, "7.5"),
    *_rtx("2060S", 8, "7.5", runpod="NVIDIA GeForce RTX 2060 SUPER"),
    *_rtx("2060", 6, "7.5", more=(12,)),
    _gpu("TITAN_RTX", 24, "7.5", "Titan RTX"),
    _gpu("TITAN_V", 12, "7.0", "Titan V"),
    _gpu("TITAN_XP", 12, "6.1", "Titan Xp"),
    _gtx("1660 Ti", 6, "7.5"),
    _gpu("GTX_1660S", 6, "7.5", "GTX 1660 S", "NVIDIA GeForce GTX 1660 SUPER", aliases=("GTX 1660 Super", "1660S")),
    _gtx("1660", 6, "7.5"),
    _gtx("1650", 4, "7.5"),
    _gtx("1080 Ti", 11, "6.1"),
    _gtx("1080", 8, "6.1"),
    _gtx("1070 Ti", 8, "6.1"),
    _gtx("1070", 8, "6.1"),
    _gtx("1060", 6, "6.1"),
    _gtx("1050 Ti", 4, "6.1"),
    _gtx("1050", 2, "6.1"),
)

GPUS: Final[tuple[GpuInfo, ...]] = (*_DATA_CENTER, *_WORKSTATION, *_CONSUMER)

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
