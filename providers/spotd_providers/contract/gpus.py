"""GPU names: one canonical id for what users type and what providers sell.

Three kinds of names meet here. A *canonical id* (`H100_SXM`, `A100_SXM_80`) is a row of `gpus_table`. A *short name*
(`h100`, `a100-80gb`) is what a person types; it means every row they would accept. A *kept name* is a provider's own
spelling, upper-cased and joined by underscores, for anything the table does not hold or cannot distinguish: it is
never dropped and can be asked for by that name.

Nothing is guessed upwards. A card without a stated memory is taken for the smallest it may be; a modified card gets an
id of its own (`RTX_3090_48`); slices of a card (`..._MIG_1G_24GB`) and laptop forms never answer to the card's name.
"""

from __future__ import annotations

import csv
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Final

# The one table of GPUs, with their names here, at each provider and among users. Data only; `gpus` reads it.
#
# Theory. A row of `gpus.csv` is one thing that is sold at one price level: model, form factor, and memory where one
# model comes with several. A *family* is what a person means by a short name ("h100" is three rows). Cards that a
# workshop modified, and factory variants with less memory than the name promises, are rows outside the family: they
# must be asked for by name. vast also sells the RTX PRO 6000 without naming its form: that name is a row of its own
# and a family. Providers report memory near the nominal figure, not equal to it (error correction takes up to 7
# percent), which is why rows carry nominal gigabytes and `gpus` compares with a tolerance.


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
        tflops: of its data sheet: half precision that is summed in single, without sparsity; `None` where unknown.
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
    tflops: int | None = None


def _sizes(family: str, counts: Mapping[str, int]) -> dict[str, int]:
    return {f"{family}.{size}": count for size, count in counts.items()}


_UP_TO_16XLARGE: Final = {"xlarge": 1, "2xlarge": 1, "4xlarge": 1, "8xlarge": 1, "16xlarge": 1}
_G5_LIKE: Final = {**_UP_TO_16XLARGE, "12xlarge": 4, "24xlarge": 4, "48xlarge": 8}
_G7_LIKE: Final = {"2xlarge": 1, "4xlarge": 1, "8xlarge": 1, "12xlarge": 2, "24xlarge": 4, "48xlarge": 8}
_AWS_ROWS: Final[Mapping[str, Mapping[str, int]]] = {
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

_AZURE_SIZES: Final[Mapping[str, str]] = {
    r"NC\d+ads_A100_v4": "A100_PCIE_80",
    r"ND\d+asr_(A100_)?v4": "A100_SXM_40",
    r"ND\d+amsr?_A100_v4": "A100_SXM_80",
    r"NC\d+(ads|adis)_H100_v5": "H100_NVL",
    r"ND\d+isr?_(noIB_)?H100_v5": "H100_SXM",
    r"ND\d+isr_H200_v5": "H200_SXM",
    r"ND\d+\w*_MI300X_v5": "MI300X",
    r"NC\d+as_T4_v3": "T4",
    r"NC\d+r?s_v3": "V100_16",
    r"ND40rs_v2": "V100_32",
    r"NV\d+adm?s_A10_v5": "A10",
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
                aws_types=_AWS_ROWS.get(row["name"], {}),
                aliases=_values(row["aliases"]),
                families=_values(row["families"]),
                tflops=int(row["tflops"]) if row["tflops"] else None,
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


VRAM_TOLERANCE: Final = 0.07

_PREFIXES: Final = ("nvidia", "geforce", "tesla", "amd", "instinct")
_NOT_NAME: Final = re.compile(r"[^a-z0-9]+")
_MEMORY: Final = re.compile(r"(?:^|(?<=[\s_\-(]))(\d{1,3})\s*gi?b?(?=$|[\s_\-)])", re.IGNORECASE)
_GLUED_MEMORY: Final = re.compile(r"(\d{2})\s*gi?b$", re.IGNORECASE)
_BARE_MEMORY: Final = re.compile(r"[\s_-](\d{2,3})$")
_MIG: Final = re.compile(r"[\s_-]+mig[\s_-]*(\d+)g[\s._-]*(\d+)gb\b", re.IGNORECASE)
_LAPTOP: Final = re.compile(r"[\s_-]*(?:laptop|mobile|max-?q)(?:[\s_-]*gpu)?$", re.IGNORECASE)


class UnknownGpu(ValueError):
    """No GPU of the table answers to this name.

    Attributes:
        text: what was asked for.
        nearest: canonical ids it may have meant, best first.
        kept: the name under which a provider's own spelling of it would be offered; pass it to `matches`.
    """

    def __init__(self, text: str, nearest: tuple[str, ...]) -> None:
        hint = f"; did you mean {', '.join(nearest)}?" if nearest else ""
        super().__init__(f"no GPU is known as {text!r}{hint}")
        self.text = text
        self.nearest = nearest
        self.kept = kept_name(text)


def resolve(text: str, *, sold: Collection[str] = ()) -> frozenset[str]:
    """Return the canonical ids that this name stands for.

    `sold` holds names that providers offer now; kept names among them can be asked for too.

    Raises:
        UnknownGpu: neither the table nor `sold` knows the name, or several generations share it.
    """
    found = _expand(text)
    if found:
        return found
    key = _squash(text)
    kept = frozenset(name for name in sold if _squash(name) == key or name in _modified_ids(text))
    if kept:
        return kept
    raise UnknownGpu(text, _nearest(text))


def standard_name(text: str) -> str:
    """Return one spelling for all ways to write a GPU: its canonical id, or the short name where it has several.

    A name that the table does not hold is kept as a provider's own spelling is.
    """
    found = _expand(text)
    return next(iter(found)) if len(found) == 1 else kept_name(text)


def canonical(provider: str, name: str, vram_mb: int | None = None) -> str:
    """Return the id of a provider's GPU: a row of the table, or the provider's own name kept.

    `vram_mb` is memory of one GPU in MiB, as the provider reports it; it distinguishes rows of one name and wins over
    the name for modified cards.
    """
    vram_mb = vram_mb if vram_mb is not None and vram_mb > 0 else None
    slice_ = _MIG.search(name)
    if slice_:
        return f"{canonical(provider, name[: slice_.start()])}_MIG_{slice_[1]}G_{slice_[2]}GB"
    rows = _OF_PROVIDER.get(provider, {}).get(_squash(name)) or _ANY_PROVIDER.get(_squash(name))
    if rows:
        return _row_by_memory(name, rows, vram_mb)
    if _LAPTOP.search(name):
        return f"{canonical(provider, _LAPTOP.sub('', name))}_LAPTOP"
    shared = _SHARED.get(_squash(name), ())
    if shared and vram_mb is not None:
        fitting = [row for row in shared if _fits(row, vram_mb)]
        return fitting[0].name if len(fitting) == 1 else kept_name(name)
    stated = _MEMORY.search(name)
    if stated and not shared:
        rest = name[: stated.start()] + name[stated.end() :]
        if _ANY_PROVIDER.get(_squash(rest)):
            return canonical(provider, rest, vram_mb or int(stated[1]) * 1024)
    return kept_name(name)


def gpu_info(name: str) -> GpuInfo | None:
    """Return the row of a canonical id; `None` for kept names."""
    return _BY_ID.get(name)


def aws_gpus(instance_type: str) -> tuple[str, int] | None:
    """Return the canonical id and number of GPUs in an EC2 type; `None` for types without whole GPUs in the table."""
    return _AWS_TYPES.get(instance_type)


def azure_gpu(size: str) -> GpuInfo | None:
    """Return the GPU of an Azure size, which no field of Azure's states; `None` for a size in no pattern."""
    known = (gpu for sizes, gpu in _AZURE_SIZES.items() if re.fullmatch(f"Standard_{sizes}", size, re.IGNORECASE))
    return next((_BY_ID[gpu] for gpu in known), None)


def matches(requested: frozenset[str], offered: str) -> bool:
    """Whether an offer's GPU is one of those asked for.

    An offer whose name leaves the form open (`H100`) matches only a request that accepts every form it may have.
    """
    if offered in requested:
        return True
    meanings = _expand(offered)
    if meanings:
        return meanings <= requested
    key = _squash(offered)
    return any(_squash(name) == key for name in requested)


def kept_name(name: str) -> str:
    """Turn a provider's own spelling into an id: maker's words removed, upper case, joined by underscores."""
    words = [word for word in _NOT_NAME.split(name.lower()) if word]
    while len(words) > 1 and words[0] in _PREFIXES:
        words = words[1:]
    return "_".join(words).upper() or "UNKNOWN"


def vram_fits(nominal_gb: int, vram_mb: int) -> bool:
    """Whether reported memory can be that of a card of this nominal size."""
    return abs(vram_mb - nominal_gb * 1024) <= nominal_gb * 1024 * VRAM_TOLERANCE


def _squash(text: str) -> str:
    key = _NOT_NAME.sub("", text.lower())
    while True:
        shorter = next((key[len(p) :] for p in _PREFIXES if key.startswith(p) and len(key) > len(p)), None)
        if shorter is None:
            return key
        key = shorter


def _fits(row: GpuInfo, vram_mb: int) -> bool:
    return any(vram_fits(gb, vram_mb) for gb in row.vram_gb)


def _row_by_memory(name: str, rows: tuple[GpuInfo, ...], vram_mb: int | None) -> str:
    models = {_without_memory(row) for row in rows}
    if vram_mb is None:
        if len(models) > 1:
            return kept_name(name)
        key = _squash(name)
        usual = [row for row in rows if any(_squash(family) == key for family in row.families)] or list(rows)
        return min(usual, key=lambda row: row.vram_gb[0]).name
    fitting = [row for row in rows if _fits(row, vram_mb)]
    if len(fitting) == 1:
        return fitting[0].name
    if fitting:
        sizes = {row.vram_gb[0] for row in fitting}
        exact = [row for row in fitting if row.name == kept_name(name)]
        if exact:
            return exact[0].name
        return f"{kept_name(_MEMORY.sub('', name))}_{min(sizes)}GB"
    model = models.pop() if len(models) == 1 else kept_name(name)
    return f"{model}_{round(vram_mb / 1024)}"


def _without_memory(row: GpuInfo) -> str:
    model, _, last = row.name.rpartition("_")
    return model if model and last.isdigit() and int(last) in row.vram_gb else row.name


@lru_cache(maxsize=4096)
def _expand(text: str) -> frozenset[str]:
    """Return the rows a name may mean; none if the table does not hold it or generations share it."""
    slice_ = _MIG.search(text)
    if slice_:
        cards = _expand(text[: slice_.start()])
        return frozenset(f"{card}_MIG_{slice_[1]}G_{slice_[2]}GB" for card in cards)
    direct = _spoken(text)
    if direct:
        return frozenset(row.name for row in direct)
    if _LAPTOP.search(text):
        cards = _expand(_LAPTOP.sub("", text))
        return frozenset(f"{card}_LAPTOP" for card in cards)
    parts = _split_memory(text)
    if parts is None:
        return frozenset()
    rest, gb = parts
    candidates = _everything_called(rest)
    return frozenset(row.name for row in candidates if gb in row.vram_gb)


def _split_memory(text: str) -> tuple[str, int] | None:
    found = _MEMORY.search(text) or _GLUED_MEMORY.search(text) or _BARE_MEMORY.search(text)
    return (text[: found.start()] + text[found.end() :], int(found[1])) if found else None


def _spoken(text: str) -> tuple[GpuInfo, ...]:
    key = _squash(text)
    return _USER.get(key) or _USER.get(f"rtx{key}") or ()


def _everything_called(text: str) -> tuple[GpuInfo, ...]:
    """Return every row sold under a name, modified cards included."""
    key = _squash(text)
    return (*_ANY_PROVIDER.get(key, ()), *_ANY_PROVIDER.get(f"rtx{key}", ()))


def _modified_ids(text: str) -> frozenset[str]:
    parts = _split_memory(text)
    if parts is None:
        return frozenset()
    rest, gb = parts
    return frozenset(f"{_without_memory(row)}_{gb}" for row in _everything_called(rest))


def _nearest(text: str) -> tuple[str, ...]:
    key = _squash(text)
    if key in _SHARED:
        return tuple(row.name for row in _SHARED[key])
    parts = _split_memory(text)
    if parts and _spoken(parts[0]):
        return tuple(sorted(row.name for row in _spoken(parts[0])))
    from difflib import get_close_matches  # only a mistake needs it

    names: list[str] = []
    for close in get_close_matches(key, _USER, n=6, cutoff=0.6):
        names += [row.name for row in _USER[close] if row.name not in names]
    return tuple(names[:4])


def _index(pairs: Iterable[tuple[str, GpuInfo]]) -> dict[str, tuple[GpuInfo, ...]]:
    found: defaultdict[str, list[GpuInfo]] = defaultdict(list)
    for name, row in pairs:
        rows = found[_squash(name)]
        if row not in rows:
            rows.append(row)
    return {key: tuple(rows) for key, rows in found.items()}


_BY_ID: Final[Mapping[str, GpuInfo]] = {row.name: row for row in GPUS}

_OF_PROVIDER: Final[Mapping[str, Mapping[str, tuple[GpuInfo, ...]]]] = {
    "vast": _index((name, row) for row in GPUS for name in row.vast),
    "runpod": _index((name, row) for row in GPUS for name in row.runpod),
    "aws": _index((name, row) for row in GPUS for name in row.aws),
}

_ANY_PROVIDER: Final[Mapping[str, tuple[GpuInfo, ...]]] = _index(
    (name, row) for row in GPUS for name in (row.name, *row.aliases, *row.families, *row.vast, *row.runpod)
)

_USER: Final[Mapping[str, tuple[GpuInfo, ...]]] = {
    **_ANY_PROVIDER,
    # A person who says a family's name, or an id, means that and not every modified card sold under it.
    **_index((name, row) for row in GPUS for name in (row.name, *row.aliases, *row.families)),
}

_SHARED: Final[Mapping[str, tuple[GpuInfo, ...]]] = {
    _squash(name): tuple(_BY_ID[row] for row in rows) for name, rows in AMBIGUOUS_NAMES.items()
}

_AWS_TYPES: Final[Mapping[str, tuple[str, int]]] = {
    kind: (row.name, count) for row in GPUS for kind, count in row.aws_types.items()
}
