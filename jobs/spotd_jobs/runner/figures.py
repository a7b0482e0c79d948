"""Figures about the machine for the heartbeat: graphics cards, processor, memory, disk. Unknown ones are None."""

from __future__ import annotations

import os
import shutil
from typing import Any

from spotd_jobs.wire.client.clocks import steady
from spotd_jobs.wire.client.console import clean

_GPU_EVERY_S = 10.0
_GPU_TIMEOUT_S = 10.0
_GPUS_MAX = 64
_MB = 1_000_000


class GpuReader:
    """The answers of nvidia-smi, asked at most every ten seconds: each call costs the driver some work."""

    def __init__(self) -> None:
        self._tool = shutil.which("nvidia-smi")
        self._asked_at = float("-inf")
        self._rows: list[dict[str, Any]] = []

    def read(self) -> list[dict[str, Any]]:
        if self._tool is None or steady() - self._asked_at < _GPU_EVERY_S:
            return self._rows
        self._asked_at = steady()
        import subprocess

        query = "index,name,utilization.gpu,memory.used,memory.total,power.draw,temperature.gpu"
        try:
            answer = subprocess.run(
                [self._tool, "--query-gpu=" + query, "--format=csv,noheader,nounits"],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                timeout=_GPU_TIMEOUT_S,
                check=False,
            )
        except (OSError, subprocess.SubprocessError):
            self._rows = []
        else:
            self._rows = parse_gpus(answer.stdout.decode("utf-8", "replace"))
        return self._rows


def parse_gpus(text: str) -> list[dict[str, Any]]:
    """One row for each line that nvidia-smi printed as CSV; odd lines are left out."""
    rows = []
    for line in text.splitlines()[:_GPUS_MAX]:
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) != 7 or not cells[0].isdigit():
            continue
        rows.append(
            {
                "index": int(cells[0]),
                "name": clean(cells[1]),
                "util_pct": _number(cells[2]),
                "mem_used_mb": _number(cells[3]),
                "mem_total_mb": _number(cells[4]),
                "power_w": _number(cells[5]),
                "temp_c": _number(cells[6]),
            }
        )
    return rows


def _number(cell: str) -> float | None:
    try:
        value = float(cell)
    except ValueError:
        return None
    return value if -1e12 < value < 1e12 else None


def host_figures(folder: str) -> dict[str, Any]:
    """Processor load, memory and the disk that holds `folder`."""
    total_mb, available_mb = _memory()
    disk_total_mb, disk_free_mb = disk(folder)
    try:
        load: float | None = round(os.getloadavg()[0], 2)
    except OSError:
        load = None
    return {
        "cpus": os.cpu_count() or 0,
        "load1": load,
        "mem_total_mb": total_mb,
        "mem_available_mb": available_mb,
        "disk_total_mb": disk_total_mb,
        "disk_free_mb": disk_free_mb,
    }


def disk(folder: str) -> tuple[int | None, int | None]:
    """Size and free space of the folder's disk, in megabytes."""
    try:
        usage = shutil.disk_usage(folder)
    except OSError:
        return None, None
    return usage.total // _MB, usage.free // _MB


def _memory() -> tuple[int | None, int | None]:
    found = {}
    try:
        with open("/proc/meminfo", encoding="ascii", errors="replace") as stream:
            for line in stream:
                name, _, rest = line.partition(":")
                if name in ("MemTotal", "MemAvailable"):
                    found[name] = int(rest.split()[0]) * 1024 // _MB
    except (OSError, ValueError, IndexError):
        return None, None
    return found.get("MemTotal"), found.get("MemAvailable")
