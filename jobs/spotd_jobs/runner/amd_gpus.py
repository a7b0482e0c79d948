"""AMD's GPUs for the heartbeat, by `amd-smi` or the older `rocm-smi`. Odd figures are None, odd rows left out.

`amd-smi metric` names no card, so the names are asked for once. Both tools print JSON: amd-smi 6 a bare list, amd-smi 7
the list below `gpu_data`, rocm-smi a table by card with every figure as text.
"""

from __future__ import annotations

import json
from itertools import islice
from typing import Any

from spotd_jobs.wire.client.sinks import clean

GPUS_MAX = 64
NAMES_ASKED = ("static", "--asic", "--json")
AMD_SMI_ASKED = ("metric", "--usage", "--mem-usage", "--power", "--temperature", "--json")
ROCM_SMI_ASKED = (
    "--showproductname", "--showuse", "--showmeminfo", "vram", "--showpower", "--showtemp", "--json",
)  # fmt: skip
TRIES_MAX = 4
_LIMIT = 1e12


def names_of(text: str) -> dict[int, str]:
    """Return the name of each card by its number."""
    found = {}
    for row in _rows(text):
        asic = row.get("asic")
        name = asic.get("market_name") if isinstance(asic, dict) else None
        index = _index(row)
        if index is not None and isinstance(name, str):
            found[index] = clean(name)
    return found


def parse_amd_smi(text: str, names: dict[int, str]) -> list[dict[str, Any]]:
    """One row for each card of `amd-smi metric`, in the units of nvidia-smi."""
    rows = []
    for row in _rows(text):
        index = _index(row)
        if index is None:
            continue
        rows.append(
            {
                "index": index,
                "name": names.get(index, "AMD GPU"),
                "util_pct": _figure(row, "usage", "gfx_activity"),
                "mem_used_mb": _figure(row, "mem_usage", "used_vram"),
                "mem_total_mb": _figure(row, "mem_usage", "total_vram"),
                "power_w": _figure(row, "power", "socket_power", "average_socket_power", "current_socket_power"),
                "temp_c": _figure(row, "temperature", "hotspot", "edge"),
            }
        )
    return rows


def parse_rocm_smi(text: str) -> list[dict[str, Any]]:
    """One row for each card of `rocm-smi`, in the units of nvidia-smi."""
    content = _json(text)
    rows = []
    for key, card in list(content.items())[:GPUS_MAX] if isinstance(content, dict) else ():
        digits = key[4:] if key.startswith("card") else ""
        if not isinstance(card, dict) or not (digits.isascii() and digits.isdigit() and len(digits) <= 3):
            continue
        name = card.get("Card Series") or card.get("Card series")
        rows.append(
            {
                "index": int(digits),
                "name": clean(name) if isinstance(name, str) else "AMD GPU",
                "util_pct": _number(card.get("GPU use (%)")),
                "mem_used_mb": _mebibytes(card.get("VRAM Total Used Memory (B)")),
                "mem_total_mb": _mebibytes(card.get("VRAM Total Memory (B)")),
                "power_w": _first(
                    card, "Current Socket Graphics Package Power (W)", "Average Graphics Package Power (W)"
                ),
                "temp_c": _first(card, "Temperature (Sensor junction) (C)", "Temperature (Sensor edge) (C)"),
            }
        )
    return rows


def _json(text: str) -> Any:
    """Return the first list or object in the text: for a user outside its groups amd-smi prints a warning before it."""
    for begin in islice((place for place, letter in enumerate(text) if letter in "[{"), TRIES_MAX):
        try:
            return json.JSONDecoder().raw_decode(text, begin)[0]
        except (ValueError, RecursionError):
            continue
    return None


def _rows(text: str) -> list[dict[str, Any]]:
    content = _json(text)
    rows = content.get("gpu_data") if isinstance(content, dict) else content
    return [row for row in rows[:GPUS_MAX] if isinstance(row, dict)] if isinstance(rows, list) else []


def _index(row: dict[str, Any]) -> int | None:
    value = row.get("gpu")
    return value if type(value) is int and 0 <= value < 1024 else None


def _figure(row: dict[str, Any], group: str, *names: str) -> float | None:
    """Return the first of these figures that is one: plain, as text, or with its unit beside it."""
    values = row.get(group)
    for name in names if isinstance(values, dict) else ():
        value = values.get(name)  # type: ignore[union-attr]  # a dict, or there are no names
        found = _number(value.get("value") if isinstance(value, dict) else value)
        if found is not None:
            return found
    return None


def _first(card: dict[str, Any], *keys: str) -> float | None:
    return next((found for found in (_number(card.get(key)) for key in keys) if found is not None), None)


def _mebibytes(value: Any) -> float | None:
    found = _number(value)
    return None if found is None else round(found / 2**20, 1)


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return None
    if isinstance(value, str) and len(value) > 40:
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    return number if 0 <= number < _LIMIT else None
