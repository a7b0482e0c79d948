"""What this machine can do, measured before its job starts: its GPUs, a matrix multiply, its disk, its line.

It can refuse this machine and nothing else. What cannot be measured (no tool of the driver, no torch in the image, an
error of CUDA) refuses nothing; what a network or a disk gives is only shown.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import sys
import threading
from typing import Any, Iterator

from spotd_jobs.runner.heartbeat import GpuReader
from spotd_jobs.runner.process import GRANT_URL_VARIABLE, INSTANCE_KEYS, MARK, JobProcess
from spotd_jobs.wire.client import web
from spotd_jobs.wire.client.sinks import clean, free_bytes, reason_of, remove
from spotd_jobs.wire.client.web import steady

FILE = "canary"
_MB = 1_000_000
_BLOCK_BYTES = 8 * 1024 * 1024
_SHARE = 6
"""The disk and the line have this part of the time each; the matrix multiply has what is left."""
_DISK_MAX = 256 * 1024 * 1024
_DOWNLOAD_MIN, _DOWNLOAD_MAX = 1024 * 1024, 32 * 1024 * 1024
"""What reading the store costs bounds it above; a smaller object shows the delay of the line, and not its rate."""
_CONNECTIONS = 4
_READ = 256 * 1024
_POLL_S = 0.1
_OUTPUT_MAX = 64 * 1024
_SMALL, _LARGE = 2048, 8192
_BURSTS_MIN = 5
"""Of so many with the large matrices one is undisturbed; fewer refuse nothing."""
_MULTIPLY = (
    """
import json, sys, time
until = time.monotonic() + float(sys.argv[1])
try:
    import torch
except Exception as error:
    print(json.dumps({"lacks": type(error).__name__}), flush=True)
    sys.exit()
try:
    built_for = getattr(getattr(torch, "version", None), "cuda", None)
    count = torch.cuda.device_count()
    print(json.dumps({"devices": count if built_for else None}), flush=True)
    count = count if torch.cuda.is_available() else 0
    if not count:
        print(json.dumps({"error": "torch finds no GPU"}), flush=True)
    for device in range(count):
        best = 0.0
        for size in (SMALL, LARGE):
            one = torch.randn(size, size, device=device, dtype=torch.float16)
            other = torch.randn(size, size, device=device, dtype=torch.float16)
            out = torch.mm(one, other)
            torch.cuda.synchronize(device)
            bursts, now = 0, time.monotonic()
            ends = now + max(0.25, min(1.5, (until - now) / (count - device) / 4))
            while bursts < 200 and (time.monotonic() < ends or bursts < MIN and time.monotonic() < until):
                began = time.perf_counter()
                for _ in range(4):
                    torch.mm(one, other, out=out)
                torch.cuda.synchronize(device)
                best = max(best, 4 * 2 * size**3 / (time.perf_counter() - began) / 1e12)
                bursts += 1
            del one, other, out
        print(json.dumps({"device": device, "tflops": best, "bursts": bursts}), flush=True)
except Exception as error:
    print(json.dumps({"error": str(error)[:200]}), flush=True)
""".replace("SMALL", str(_SMALL))
    .replace("LARGE", str(_LARGE))
    .replace("MIN", str(_BURSTS_MIN))
)
"""Run by the image's own Python. The best of many short runs is what the card can do, whatever its heat does later.

What starts CUDA and loads its library is before each measured time: that takes seconds on a good machine.
"""


class Canary:
    """One measurement. `measure` runs in a thread of its own and never raises; `stop` may be called meanwhile.

    Attributes:
        until: when it is over, by this machine's steady clock.
        unfit: in what the machine is less than what was sold; empty where nothing shows it.
    """

    def __init__(
        self, rules: dict[str, Any], grant: dict[str, Any], home: str, mark: str, folders: dict[str, str]
    ) -> None:
        self._rules = rules
        self._grant = grant
        self._home = home
        self._mark = mark
        self._folders = folders
        self._stopped = threading.Event()
        self._found: list[str] = []
        self._time_s = float(rules["time_s"])
        self.began = steady()
        self.until = self.began + self._time_s
        self.unfit = ""

    @property
    def may_refuse(self) -> bool:
        return bool(self._rules.get("may_refuse"))

    def words(self) -> str:
        """Return what was found so far, in one line."""
        short = "" if not self.unfit or self.may_refuse else "; less than was sold, and the job runs all the same"
        return ", ".join(self._found or ["nothing could be measured"]) + short

    def stop(self) -> None:
        """End it: its processes are killed within a moment."""
        self._stopped.set()

    def measure(self) -> None:
        """Measure one after the other; nothing more once the machine is known to be unfit and may be refused."""
        for step in (self._count_gpus, self._write_disk, self._download, self._multiply):
            if self._is_over() or (self.unfit and self.may_refuse):
                return
            try:
                step()
            except Exception as error:  # noqa: BLE001 - a measurement that fails says nothing against the machine
                self._found.append("%s failed (%s)" % (step.__name__.strip("_").replace("_", " "), reason_of(error)))

    def _is_over(self) -> bool:
        return self._stopped.is_set() or steady() >= self.until

    def _count_gpus(self) -> None:
        reader, wanted = GpuReader(), int(self._rules["gpus"])
        rows = reader.read()
        if not rows and reader.finds_none():
            self._found.append("0 GPUs")
            self.unfit = "0 of %d GPUs" % wanted
            return
        if not rows:
            self._found.append("no tool of the driver shows its GPUs")
            return
        sizes = [row["mem_total_mb"] for row in rows if row.get("mem_total_mb")]
        memory = ", %.1f GiB" % (min(sizes) / 1024) if sizes else ""
        self._found.append("%d GPU%s%s" % (len(rows), "" if len(rows) == 1 else "s", memory))
        least = float(self._rules.get("gpu_memory_mb_min") or 0)
        enough = len(rows) - sum(size < least for size in sizes)
        if len(rows) < wanted:
            self.unfit = "%d of %d GPUs" % (len(rows), wanted)
        elif enough < wanted:
            self.unfit = "a GPU of %.1f GiB, the least is %.1f GiB" % (min(sizes) / 1024, least / 1024)

    def _write_disk(self) -> None:
        path, written, began = os.path.join(self._home, FILE), 0, steady()
        until, most = began + self._time_s / _SHARE, min(_DISK_MAX, (free_bytes(self._home) or 0) // 8)
        block = os.urandom(_BLOCK_BYTES)  # what a disk cannot compress
        try:
            with open(path, "wb", buffering=0) as stream:
                while written < most and steady() < until and not self._stopped.is_set():
                    written += stream.write(block)
                    os.fsync(stream.fileno())
        finally:
            remove(path)
        if written:
            rate = written / max(steady() - began, 1e-6) / _MB
            self._found.append("disk %.1f GB/s" % (rate / 1000) if rate >= 1000 else "disk %.0f MB/s" % rate)

    def _download(self) -> None:
        urls = list(_readable(self._grant))
        if not urls:
            return
        began = steady()
        download = _Download(urls, began + self._time_s / _SHARE, self._stopped)
        download.run()
        done, took = download.done, max(steady() - began, 1e-6)
        if done < _DOWNLOAD_MIN:
            return
        stated = self._rules.get("download_mbps")
        of = " of %.0f" % float(stated) if stated else ""
        self._found.append("download %.0f%s Mbit/s" % (done * 8 / took / _MB, of))

    def _multiply(self) -> None:
        why = "no Python of the image has torch"
        for python in _pythons():
            rows = self._speed_rows(python)
            self._judge_devices(rows)
            speeds = [row for row in rows if isinstance(row.get("tflops"), (int, float))]
            if speeds:
                self._judge_speeds(speeds)
            if rows and "lacks" in rows[-1]:
                continue
            why = clean(str(rows[-1].get("error") or "")) if rows else ""
            if speeds and not why:
                return
            why = why or "there was no time for it"
            break
        self._found.append("matrix multiply not measured (%s)" % why[:160])

    def _judge_devices(self, rows: list[dict[str, Any]]) -> None:
        count = next((row["devices"] for row in rows if "devices" in row), None)
        if isinstance(count, int) and count < int(self._rules["gpus"]) and "CUDA_VISIBLE_DEVICES" not in os.environ:
            self.unfit = "%d of %d GPUs in torch" % (count, int(self._rules["gpus"]))

    def _judge_speeds(self, rows: list[dict[str, Any]]) -> None:
        usual, least = self._rules.get("tflops"), float(self._rules.get("tflops_min") or 0)
        lowest = min(float(row["tflops"]) for row in rows)
        self._found.append("%.3g%s TFLOPS" % (lowest, " of %g" % float(usual) if usual else ""))
        sure = min([float(row["tflops"]) for row in rows if int(row["bursts"]) >= _BURSTS_MIN], default=least)
        if sure < least and not self.unfit:
            self.unfit = "%.3g TFLOPS, the least for this GPU is %.3g" % (sure, least)

    def _speed_rows(self, python: str) -> list[dict[str, Any]]:
        """Return what the program printed before its time was over; nothing of it runs any more."""
        hidden = (*INSTANCE_KEYS, GRANT_URL_VARIABLE)
        env = {name: value for name, value in os.environ.items() if name not in hidden}
        env.update(self._folders)
        env[MARK] = self._mark
        output = b""
        if self._is_over():
            return []
        reader, writer = os.pipe()
        try:
            try:
                argv = [python, "-c", _MULTIPLY, "%.1f" % max(0.0, self.until - steady())]
                child = JobProcess(argv, env, self._home, writer)
            finally:
                os.close(writer)
            try:
                while not self._is_over() and len(output) < _OUTPUT_MAX:
                    if select.select([reader], [], [], _POLL_S)[0]:
                        data = os.read(reader, 4096)
                        if not data:
                            break
                        output += data
            finally:
                child.send(signal.SIGKILL)
                child.kill_rest(self._mark)  # nothing of the job has this mark, however late this thread is
        finally:
            os.close(reader)
        return list(_rows(output))


class _Enough(Exception):
    """As much was read as is needed, or the time is over."""


class _Download:
    """Reads the objects by several connections, again and again, until its time or its most bytes are reached."""

    def __init__(self, urls: list[str], until: float, stopped: threading.Event) -> None:
        self._urls = urls
        self._until = until
        self._stopped = stopped
        self._counts = [0] * _CONNECTIONS

    @property
    def done(self) -> int:
        return sum(self._counts)

    def run(self) -> None:
        threads = [
            threading.Thread(target=self._read, args=(n,), name="canary", daemon=True) for n in range(_CONNECTIONS)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(max(0.0, self._until - steady()))  # one that hangs in a connection ends by itself later

    def _read(self, number: int) -> None:
        def take(block: memoryview) -> None:
            self._counts[number] += len(block)
            if self.done >= _DOWNLOAD_MAX or steady() >= self._until or self._stopped.is_set():
                raise _Enough

        place = memoryview(bytearray(_READ))
        try:
            turn = number
            while not self._stopped.is_set() and steady() < self._until:
                before = self._counts[number]
                web.read_blocks(self._urls[turn % len(self._urls)], _DOWNLOAD_MAX, place, take)
                turn += _CONNECTIONS
                if self._counts[number] == before:
                    return
        except (_Enough, web.WebError):
            return
        finally:
            web.drop_connections()


def _readable(grant: dict[str, Any]) -> Iterator[str]:
    """Yield what the attempt reads from the store in any case: chunks of its checkpoint, or else its code."""
    restore = (grant.get("restore") or [{}])[0]
    urls = [str(url) for url in list((restore.get("chunks") or {}).values())[: 4 * _CONNECTIONS]]
    code = grant.get("code")
    if not urls and code and int(code.get("size") or 0) >= _DOWNLOAD_MIN:
        urls = [str(code["url"])]
    return (url for url in urls if url.startswith("http"))


def _pythons() -> list[str]:
    found = (shutil.which("python3"), shutil.which("python"), sys.executable)
    return list(dict.fromkeys(path for path in found if path))


def _rows(output: bytes) -> Iterator[dict[str, Any]]:
    for line in output.decode("utf-8", "replace").splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            continue  # torch warns on the same stream
        if isinstance(row, dict):
            yield row
