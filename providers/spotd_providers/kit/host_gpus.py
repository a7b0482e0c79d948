"""The GPUs of a host, as its driver's own tools name them: cards, MIG slices, and why one cannot be used. Pure.

A card that states no serial number, name or memory is not used: a job is given its GPUs by what names them for good,
since indices change when a card is lost.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from spotd_providers.contract.gpus import canonical
from spotd_providers.kit.text import clean

BUSY_MB: Final = 500
"""Memory in use without a process that is known: a desktop uses less."""
DEVICES_MAX: Final = 256
CUDA: Final = "CUDA_VISIBLE_DEVICES"
ROCM: Final = "ROCR_VISIBLE_DEVICES"
_ID: Final = re.compile(r"(GPU|MIG)-[A-Za-z0-9/-]{4,80}")
_MIG: Final = re.compile(
    r"\s*MIG\s+(?P<profile>\d{1,2}g\.(?P<gb>\d{1,4})gb\S{0,16})\s.*\(UUID:\s*(?P<uuid>MIG-[A-Za-z0-9-]{4,80})\)"
)
_PARENT: Final = re.compile(r"GPU\s+\d+:\s+(?P<name>.{1,80}?)\s+\(UUID:\s*(?P<uuid>GPU-[A-Za-z0-9-]{4,80})\)")

Said = Mapping[str, Sequence[Sequence[str]]]
"""The lines of an answer by their first word, each with its further words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """What a job can have alone: a GPU, a MIG slice, or a place on a host without GPUs.

    Attributes:
        whole: the GPU it is part of.
        fault: why it cannot be used now; empty if it can.
    """

    id: str
    gpu: str
    vram_mb: int | None
    variable: str
    whole: str = ""
    fault: str = ""


def number(text: str, *, digits: int = 15) -> int | None:
    """Return a whole number of an answer; `None` for `[N/A]` and the like."""
    text = text.strip()
    return int(text) if text.isascii() and text.isdecimal() and len(text) <= digits else None


def nvidia_devices(said: Said, own: set[str], held: Collection[str]) -> tuple[list[Device], list[str]]:
    """Read what `nvidia-smi` answered; return the devices, and in words what is wrong.

    Args:
        own: pids of jobs that we know.
        held: devices that such jobs have, whose memory may be in use.
    """
    faults: list[str] = []
    codes = [words[0] for words in said["nvidia"]]
    if codes and codes != ["0"]:
        hangs = codes[0] in ("124", "137")
        faults.append("nvidia-smi hangs" if hangs else f"nvidia-smi fails ({clean(codes[0])}): is its driver loaded?")
        if hangs:
            return [], faults
    more: defaultdict[str, dict[str, str]] = defaultdict(dict)
    for name, text, *_ in said["more"]:
        uuid, _, value = text.partition(",")
        more[uuid.strip()][name] = value.strip()
    foreign = {
        uuid.strip() for uuid, _, pid in (words[0].partition(",") for words in said["app"]) if pid.strip() not in own
    }
    cards: dict[str, Device] = {}
    for text in (words[0] for words in said["gpu"]):
        parts = [part.strip() for part in text.split(",")]
        if len(parts) != 5 or _ID.fullmatch(parts[1]) is None or not (vram := number(parts[3])):
            if text.strip():
                faults.append(f"a GPU is not usable: {clean(text)}")
            continue
        name, of = canonical("", parts[2], vram), more[parts[1]]
        used, errors = (
            number(of.get("memory.used", "")) or 0,
            number(of.get("ecc.errors.uncorrected.volatile.total", "")),
        )
        fault = ""
        if of.get("mig.mode.current", "").lower() == "enabled":
            fault = "it is cut into MIG slices"
        elif errors:
            fault = f"{errors} memory errors that could not be corrected"
        elif parts[1] in foreign:
            fault = "another process uses it"
        elif used > BUSY_MB and parts[1] not in held:
            fault = f"{used} MB of its memory are in use"
        cards[parts[1]] = Device(id=parts[1], gpu=name, vram_mb=vram, variable=CUDA, fault=fault)
    return [*cards.values(), *_slices(said, cards, foreign)], faults


def _slices(said: Said, cards: Mapping[str, Device], foreign: set[str]) -> list[Device]:
    found: list[Device] = []
    parent: re.Match[str] | None = None
    for text in (words[0] for words in said["listed"]):
        parent = _PARENT.match(text) or parent
        cut = _MIG.match(text)
        if cut is None or parent is None or parent["uuid"] not in cards:
            continue
        name = canonical("", f"{parent['name']} MIG {cut['profile']}")
        fault = "another process uses its GPU" if parent["uuid"] in foreign else ""
        vram = int(cut["gb"]) * 1024
        found.append(Device(id=cut["uuid"], gpu=name, vram_mb=vram, variable=CUDA, whole=parent["uuid"], fault=fault))
    return found


def amd_devices(said: Said) -> tuple[list[Device], list[str]]:
    """Read `amd-smi` (a list, or below `gpu_data`) or `rocm-smi` (a table by card)."""
    found: list[Device] = []
    faults: list[str] = []
    for tag in ("amd", "rocm"):
        for text in (words[0] for words in said[tag]):
            try:
                # For a user outside its groups amd-smi prints a warning before the list.
                begin = re.search(r"[\[{]\s*[\]{}\"]", text)
                content = json.JSONDecoder().raw_decode(text, begin.start() if begin else 0)[0]
                rows = content.get("gpu_data", content) if isinstance(content, dict) else content
                cards = list(rows.values()) if isinstance(rows, dict) else list(rows)
            except (ValueError, TypeError, RecursionError):
                faults.append(f"{tag}-smi says nothing that can be read")
                continue
            for card in cards[:DEVICES_MAX]:
                device = _amd_card(card) if isinstance(card, dict) else None
                if device is not None:
                    found.append(device)
                elif not isinstance(card, dict) or card.get("asic") or card.get("Unique ID"):
                    faults.append("an AMD GPU states no name, memory or serial number")
    return found, faults


def _amd_card(card: Mapping[str, Any]) -> Device | None:
    asic, vram = card.get("asic"), card.get("vram")
    asic = asic if isinstance(asic, dict) else {}
    size = vram.get("size") if isinstance(vram, dict) else None
    size = size.get("value") if isinstance(size, dict) else size
    name = asic.get("market_name") or card.get("Card Series") or card.get("Card series")
    serial = str(asic.get("asic_serial") or card.get("Unique ID") or "").lower().removeprefix("0x")
    total = number(str(card.get("VRAM Total Memory (B)", "")), digits=16)
    memory = number(str(size)) if total is None else total // 1024**2
    if not isinstance(name, str) or re.fullmatch(r"[0-9a-f]{4,32}", serial) is None or not memory:
        return None
    return Device(id=f"GPU-{serial}", gpu=canonical("", name, memory), vram_mb=memory, variable=ROCM)
