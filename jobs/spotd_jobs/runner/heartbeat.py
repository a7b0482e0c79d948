"""heartbeat.json: the attempt's state in one small object, written at a steady pace and at every change of phase.

After each of them comes the liveness marker: a second, tiny object in one folder with those of all other attempts, so
that a listing of a thousand shows which hosts live. Its size is a count of what there is to read: it changes when the
heartbeat has something new or an event was stored, and not with figures of the machine. So the daemon reads a host's
documents only when there is news in them.
"""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
from typing import Any, Callable

from spotd_jobs.runner import VERSION
from spotd_jobs.runner.store import RunnerStore
from spotd_jobs.wire.client.sinks import SinkError, clean, log_line, reason_of
from spotd_jobs.wire.client.web import now_text, process_began, steady

# Figures about the machine for the heartbeat: graphics cards, processor, memory, disk. Unknown ones are None.


_GPU_EVERY_S = 10.0
_GPU_TIMEOUT_S = 10.0
_GPUS_MAX = 64
_NO_DEVICES = "no devices were found"
_MB = 1_000_000


_NVIDIA_ASKED = (
    "--query-gpu=index,name,utilization.gpu,memory.used,memory.total,power.draw,temperature.gpu",
    "--format=csv,noheader,nounits",
)


class GpuReader:
    """The answers of the driver's own tool, asked at most every ten seconds: each call costs the driver some work."""

    def __init__(self) -> None:
        found = (shutil.which(name) for name in ("nvidia-smi", "amd-smi", "rocm-smi"))
        self._tool = next((tool for tool in found if tool is not None), None)
        self._asked_at = float("-inf")
        self._rows: list[dict[str, Any]] = []
        self._names: dict[int, str] | None = None

    def read(self) -> list[dict[str, Any]]:
        if self._tool is None or steady() - self._asked_at < _GPU_EVERY_S:
            return self._rows
        self._asked_at = steady()
        self._rows = self._answer(self._tool)
        return self._rows

    def finds_none(self) -> bool:
        """Whether the driver works and has no device, as its own tool says."""
        tool = self._tool or ""
        return os.path.basename(tool) == "nvidia-smi" and _NO_DEVICES in _output(tool, *_NVIDIA_ASKED).lower()

    def _answer(self, tool: str) -> list[dict[str, Any]]:
        if os.path.basename(tool) == "nvidia-smi":
            return parse_gpus(_output(tool, *_NVIDIA_ASKED))
        from spotd_jobs.runner import amd_gpus

        if os.path.basename(tool) == "rocm-smi":
            return amd_gpus.parse_rocm_smi(_output(tool, *amd_gpus.ROCM_SMI_ASKED))
        if self._names is None:
            self._names = amd_gpus.names_of(_output(tool, *amd_gpus.NAMES_ASKED))
        return amd_gpus.parse_amd_smi(_output(tool, *amd_gpus.AMD_SMI_ASKED), self._names)


def _output(*command: str) -> str:
    """Return what a tool prints within its time; nothing where it cannot be run."""
    import subprocess

    try:
        answer = subprocess.run(
            list(command),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=_GPU_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return answer.stdout.decode("utf-8", "replace")


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


NAME = "heartbeat.json"
_DISK_LOW_MB = 1000
_SOON_S = 1.0
MARKER_BYTES_MAX = 4096
_NO_NEWS = frozenset({"seq", "at", "up_s", "grant_issued_at", "gpus", "host", "progress"})
_PROGRESS_HEARTBEATS = 4
"""How far a transfer has come is news only so seldom."""
_FIGURES_HEARTBEATS = 20
"""And the use of the GPUs so seldom."""


class Status:
    """What the heartbeat holds; written by the attempt, read by its thread. Single assignments, so no lock."""

    def __init__(self, boot: int) -> None:
        self.boot = boot
        self.phase = "boot"
        self.pid: int | None = None
        self.order_checkpoint = 0
        self.notice: dict[str, Any] | None = None
        self.exit: dict[str, Any] | None = None
        self.uploader: Any = None
        self.restore: Any = None
        self.grant_issued_at = ""
        self.began = process_began()
        self.progress: Any = None
        self.watch_s: float | None = None
        self.data: Any = None
        self.gang: dict[str, Any] | None = None


class HeartbeatWriter:
    """The thread that writes heartbeats and liveness markers."""

    def __init__(self, store: RunnerStore, status: Status, home: str, every_s: Callable[[], float]) -> None:
        self._store = store
        self._status = status
        self._home = home
        self._every_s = every_s
        self._gpus = GpuReader()
        self._now = threading.Event()
        self._closed = False
        self._disk_was_low = False
        self._lock = threading.Lock()
        self._last_report = ""
        # Where the last runner on this machine stopped counting is not known: that it began there is unlikely enough.
        self._news = int.from_bytes(os.urandom(2), "big")
        self._thread = threading.Thread(target=self._keep_writing, name="heartbeat", daemon=True)

    def start(self) -> None:
        self._store.events.on_stored = self.soon
        self._thread.start()

    def soon(self) -> None:
        """Write the next heartbeat soon: something changed that is worth it."""
        self._now.set()

    def last(self) -> None:
        """Store the final state; no older one will be written over it.

        Raises:
            store.GivenUp
        """
        self._closed = True
        self._now.set()
        with self._lock:
            document = self._document()
            self._store.put(NAME, json.dumps(document).encode())
            try:
                self._put_liveness_marker(document)
            except Exception as error:  # noqa: BLE001 - the documents of a host that falls silent are read all the same
                log_line("the last liveness marker could not be stored: " + reason_of(error))

    def _keep_writing(self) -> None:
        while not self._closed:
            self._now.clear()
            began = steady()
            with self._lock:
                if self._closed:
                    return
                try:
                    document = self._document()
                    self._store.put_once(NAME, json.dumps(document).encode())
                    self._put_liveness_marker(document)
                except SinkError:
                    pass  # the next heartbeat holds more than this one would have
                except Exception as error:  # noqa: BLE001 - a heartbeat that fails must not be the last
                    log_line("a heartbeat failed: " + reason_of(error))
            every_s = self._every_s()
            # At least a little apart: some stores take one write a second to one name.
            self._now.wait(every_s)
            apart_s = min(_SOON_S, every_s / 4)
            left_s = apart_s - (steady() - began)
            if left_s > 0 and not self._closed:
                time.sleep(left_s)

    def _put_liveness_marker(self, document: dict[str, Any]) -> None:
        """Comes after what it announces is stored: a reader that sees the new size finds the news."""
        stored = self._store.events.stored
        report = json.dumps([stored, _news_of(document, self._every_s(), self._status.watch_s)])
        if report != self._last_report:
            self._last_report = report
            self._news += 1
        self._store.put_liveness_marker(b"+" * (1 + self._news % MARKER_BYTES_MAX))

    def _document(self) -> dict[str, Any]:
        status = self._status
        host = host_figures(self._home)
        self._watch_disk(host["disk_free_mb"])
        restore = status.restore
        gpus = self._gpus.read()
        asked = {}
        if status.watch_s and status.progress is not None:
            asked["progress"] = status.progress.read(gpus, runs=status.phase == "run")
        if status.data is not None:
            asked["data"] = status.data.read()
        if status.gang is not None:
            asked["gang"] = status.gang
        return self._store.document(
            seq=self._store.numbers.take(),
            boot=status.boot,
            at=now_text(),
            phase=status.phase,
            pid=status.pid,
            up_s=round(steady() - status.began, 3),
            runner=VERSION,
            grant_issued_at=status.grant_issued_at,
            order_checkpoint=status.order_checkpoint,
            seen=_row_of(status.uploader, "seen"),
            stored=_row_of(status.uploader, "stored"),
            upload=self._upload(status.uploader),
            restore=None
            if restore is None or restore.name is None
            else {"name": restore.name, "bytes_done": restore.done, "bytes_total": restore.total},
            gpus=gpus,
            host=host,
            notice=status.notice,
            exit=status.exit,
            **asked,
        )

    def _upload(self, uploader: Any) -> dict[str, Any]:
        progress = uploader.progress if uploader is not None else None
        name = progress.name if progress is not None else None
        return {
            "name": name,
            "bytes_done": progress.done if progress is not None and name else 0,
            "bytes_total": progress.total if progress is not None and name else 0,
            "bytes_per_s": progress.rate if progress is not None else 0,
            "queued": uploader.queued if uploader is not None else 0,
            "failing": self._store.failing,
        }

    def _watch_disk(self, free_mb: int | None) -> None:
        low = free_mb is not None and free_mb < _DISK_LOW_MB
        if low and not self._disk_was_low:
            self._store.events.add("disk_low", free_mb=free_mb)
        self._disk_was_low = low


def _news_of(document: dict[str, Any], every_s: float, watch_s: float | None = None) -> dict[str, Any]:
    """Return what of a heartbeat is worth reading it for."""
    news = {name: value for name, value in document.items() if name not in _NO_NEWS}
    for name in ("upload", "restore", "data"):
        transfer = dict(document.get(name) or {})
        if transfer.get("name") is not None:
            transfer.update(bytes_done=int(steady() / (_PROGRESS_HEARTBEATS * every_s)), bytes_per_s=None)
        news[name] = transfer
    if document["gpus"]:
        news["gpus"] = int(steady() / (_FIGURES_HEARTBEATS * every_s))
    if watch_s and "progress" in document:
        news["progress"] = int(steady() / watch_s)
    return news


def _row_of(uploader: Any, which: str) -> dict[str, Any] | None:
    seen = getattr(uploader, which) if uploader is not None else None
    if seen is None:
        return None
    row = {"name": seen.name, "step": seen.step, "at": seen.at}
    if which == "stored":
        row.update(bytes=seen.bytes, key=seen.key)
    return row


def notice_row(source: str, reason: str, at: str | None) -> dict[str, Any]:
    """Return a notice as the heartbeat shows it."""
    return {"source": clean(source), "reason": clean(reason), "at": at}
