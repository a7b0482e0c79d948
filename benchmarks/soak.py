"""Two hours of a real daemon on real sockets: whether memory, descriptors, threads, state and latency stay flat.

`spotd` is a process as in production, on the wall's own time. A marketplace over HTTP (`soak_world.py`) rents it light
machines, which speak the real wire; 1,000 jobs are kept queued over the API's socket, and machines are outbid, taken
with a notice and lost, prices move, jobs end, fail and are cancelled, while others list, ask why, follow logs and
events, and scrape the metrics. Every 30 s the daemon's figures are taken; at the end, or at Ctrl-C, a table shows
them with the slope of each per hour, and the exit code is 1 where one rises. Where the noise of a slope exceeds its
bound, it is not known, which the table says.

    make soak HOURS=2
    python benchmarks/soak.py [--hours 2] [--jobs 1000] [--folder DIR]
    python benchmarks/soak.py --judge DIR/samples.jsonl
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import random
import re
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from spotd.client.daemon import Daemon
from spotd.client.transport import ClientError

SAMPLE_S, PING_S, LIST_S, READ_S, SCRAPE_S, CLI_S = 30.0, 2.0, 15.0, 3.0, 15.0, 60.0
CANCEL_S, OUTBID_S = 20.0, 30.0
FOLLOWED = 4
FINAL = frozenset({"SUCCEEDED", "FAILED", "CANCELLED", "EXPIRED"})
TICK = os.sysconf("SC_CLK_TCK")
WARM_UP = 0.2
"""Part of the run before which nothing is judged: the jobs are queued, their machines bought, caches filled."""
JUDGED_FROM_H = 0.5
"""A shorter run prints its table and is not judged: a minute's noise is not a slope."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """How much a figure may rise in an hour, and why so much is nothing."""

    figure: str
    unit: str
    per_hour: float
    reason: str


BOUNDS = (
    Bound(figure="rss_mb", unit="MB", per_hour=4.0, reason="100 MB a day would be seen; two hours show no less"),
    Bound(figure="descriptors", unit="", per_hour=2.0, reason="a leak of one in a thousand requests is 2 in an hour"),
    Bound(figure="threads", unit="", per_hour=1.0, reason="pools are filled in the warm-up and have a bound"),
    Bound(figure="wal_mb", unit="MB", per_hour=2.0, reason="it is reset by checkpoints, every 1,000 pages"),
    Bound(figure="state_kb_per_end", unit="KB", per_hour=1.0, reason="a row costs as much at the end as at first"),
    Bound(figure="status_ms", unit="ms", per_hour=3.0, reason="a tenth of what a person notices, in a day"),
    Bound(figure="loop_ms", unit="ms", per_hour=15.0, reason="jobs end and are replaced: a cycle has as much to do"),
    Bound(figure="cpu_percent", unit="%", per_hour=5.0, reason="as the loop; it moves with what else the machine does"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """The daemon at one moment; latencies and processor time are of the interval before it.

    Attributes:
        at_s: since the start.
        state_kb_per_end: growth of the state, for each attempt that ended since the warm-up; 0 before.
        status_ms: median of GET /v1/status; `status_max_ms` the worst.
        loop_ms: mean length of a run of the control loop.
        jobs, machines: not final, running now. `ended` counts attempts, `outages` errors of the daemon's controllers.
    """

    at_s: float
    rss_mb: float
    descriptors: int
    threads: int
    wal_mb: float
    state_mb: float
    prices_mb: float
    log_mb: float
    state_kb_per_end: float
    status_ms: float
    status_max_ms: float
    loop_ms: float
    cpu_percent: float
    world_cpu_percent: float
    jobs: int
    machines: int
    ended: int
    outages: int


# --- what is measured ---


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICK


def status_of(pid: int, name: str) -> int:
    found = re.search(rf"^{name}:\s+(\d+)", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1])


def megabytes(path: Path) -> float:
    with contextlib.suppress(FileNotFoundError):
        return path.stat().st_size / 1e6
    return 0.0


def metrics_of(text: str, name: str, label: str = "") -> float:
    """Return the sum of a metric's samples whose labels hold this text."""
    rows = re.findall(rf"^{name}(\{{.*\}})? (\S+)$", text, re.MULTILINE)
    return sum(float(figure) for labels, figure in rows if label in labels)


def fetch(url: str, method: str, path: str, body: str = "", headers: Mapping[str, str] = MappingProxyType({})) -> bytes:
    """Return the body of an answer on loopback.

    Raises:
        OSError: there is none, or it is a refusal.
    """
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=30)
    with contextlib.closing(connection):
        connection.request(method, path, body, dict(headers))
        answer = connection.getresponse()
        content = answer.read()
        if answer.status >= 300:
            raise OSError(f"{method} {path}: {answer.status} {content[:100]!r}")
        return content


# --- the run ---


class Soak:
    """A daemon, its world, and what is done to both."""

    def __init__(self, folder: Path, *, jobs: int, hours: float, life_s: float | None = None) -> None:
        self.folder = folder
        self._jobs = jobs
        self._hours = hours
        self._life_s = life_s or min(6_000.0, 0.8 * hours * 3_600)
        self._rng = random.Random(hours)
        self._over = threading.Event()
        self._refs: list[str] = []
        self._pings: list[float] = []
        self._failures: Counter[str] = Counter()
        self._done: Counter[str] = Counter()
        self._submitted = 0
        self._base_url, self._token = "", ""
        self._scraped = ""
        self._port = 0
        self.samples: list[Sample] = []
        self._processes: list[subprocess.Popen[Any]] = []

    # processes

    def start(self) -> None:
        world_log = (self.folder / "world.log").open("wb")
        script = Path(__file__).with_name("soak_world.py")
        self.world = subprocess.Popen(
            [sys.executable, str(script), str(self.folder), str(self._life_s)],
            stdout=subprocess.PIPE,
            stderr=world_log,
            start_new_session=True,
        )
        self._processes.append(self.world)
        assert self.world.stdout is not None
        where = json.loads(self.world.stdout.readline())
        self._base_url, self._token = where["url"], where["token"]
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._port = probe.getsockname()[1]
        for name in ("run", "state", "hidden"):
            (self.folder / name).mkdir(mode=0o700)
        # httpcore imports trio where it is installed, as it is for tests only.
        (self.folder / "hidden" / "trio.py").write_text("raise ImportError('not a part of spotd')\n")
        (self.folder / "config.toml").write_text(
            f"""[daemon]
install = "soak"
[budget]
machines = {2 * self._jobs}
[metrics]
listen = "127.0.0.1:{self._port}"
[providers.local]
base_url = "{self._base_url}"
api_key = {{ env = "SOAK_TOKEN" }}
"""
        )
        environment = {
            **{key: value for key, value in os.environ.items() if not key.startswith("SPOTD_")},
            "STATE_DIRECTORY": str(self.folder / "state"),
            "RUNTIME_DIRECTORY": str(self.folder / "run"),
            "SPOTD_SOCKET": str(self.folder / "run" / "spotd.sock"),
            "SOAK_TOKEN": self._token,
            "PYTHONPATH": os.pathsep.join([str(self.folder / "hidden"), os.environ.get("PYTHONPATH", "")]),
        }
        self._environment = environment
        self.daemon = subprocess.Popen(
            [sys.executable, "-m", "spotd", "run", "--config", str(self.folder / "config.toml")],
            env=environment,
            cwd=self.folder,  # not where sources may lie
            stdout=(self.folder / "spotd.log").open("wb"),
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self._processes.append(self.daemon)
        self.api = Daemon(self.folder / "run" / "spotd.sock")
        give_up_at = time.monotonic() + 60
        while True:
            try:
                self.api.status()
                return
            except ClientError:
                if time.monotonic() > give_up_at or self.daemon.poll() is not None:
                    raise
                time.sleep(0.2)

    def close(self) -> None:
        self._over.set()
        for process in reversed(self._processes):
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(30)
            if process.poll() is None:
                process.kill()

    # traffic

    def submit(self) -> None:
        self._submitted += 1
        number = self._submitted
        waits = number % 7 == 0  # its ceiling is under every price
        data = {
            "name": f"soak-{number:05d}",
            "run": "python train.py",
            "image": "none",
            "resources": {"gpu": ["RTX_4090:1"], "disk": "10GB"},
            "price": {"max_price": 0.05 if waits else 1.0},
            "checkpoint": {"every": "10m", "settle": "10s", "stop_grace": "30s"},
        }
        draft = {"data": data, "flags": {}, "source": "", "base_dir": str(self.folder)}
        self._refs.append(str(self.api.submit(draft)["job"]["id"]))

    def _list(self) -> None:
        """List all jobs as `spotctl ls` does, and queue as many again as have ended."""
        rows = self.api.jobs({"active": 1})["jobs"]
        active = [str(row["id"]) for row in rows if row["state"] not in FINAL]
        self._refs = active
        for _ in range(self._jobs - len(active)):
            self.submit()

    def _read(self) -> None:
        ref = self._rng.choice(self._refs)
        ways: list[Callable[[], object]] = [
            lambda: self.api.job(ref),
            lambda: self.api.why(ref),
            lambda: self.api.checkpoints(ref),
            lambda: self.api.cost(ref),
            lambda: list(self.api.logs(ref)),
            lambda: list(self.api.events({"job": ref})),
            self.api.prices,
            self.api.cost,
            self.api.providers,
            self.api.hosts,
        ]
        self._rng.choice(ways)()

    def _cancel(self) -> None:
        ref = self._rng.choice(self._refs)
        self.api.cancel(ref)
        self._refs.remove(ref)

    def _outbid(self) -> None:
        number = self._rng.randrange(100)
        body = {"host": f"pool-{number:03d}", "lasting": "90s"}
        self._control("preempt", body)
        self._control("price", {"host": f"pool-{(number + 7) % 100:03d}", "price": 0.2, "lasting": "5m"})

    def _control(self, what: str, body: Mapping[str, Any]) -> None:
        headers = {"authorization": f"Bearer {self._token}", "content-type": "application/json"}
        fetch(self._base_url, "POST", f"/control/{what}", json.dumps(body), headers)

    def _scrape(self) -> None:
        self._scraped = fetch(f"http://127.0.0.1:{self._port}", "GET", "/metrics").decode()

    def _ping(self) -> None:
        begin = time.perf_counter()
        self.api.status()
        self._pings.append(1000 * (time.perf_counter() - begin))

    def _run_ls(self) -> None:
        command = [str(Path(sys.executable).with_name("spotctl")), "ls"]
        environment, folder = self._environment, self.folder
        subprocess.run(command, env=environment, cwd=folder, capture_output=True, timeout=60, check=True)

    def _follow(self) -> None:
        """Follow the log of a job until it is over, or for some minutes."""
        daemon = Daemon(self.folder / "run" / "spotd.sock")
        until = time.monotonic() + self._rng.uniform(60, 600)
        for _ in daemon.logs(self._rng.choice(self._refs), follow=True):
            if self._over.is_set() or time.monotonic() > until:
                return

    def _watch_events(self) -> None:
        for _ in Daemon(self.folder / "run" / "spotd.sock").events(follow=True):
            if self._over.is_set():
                return

    def _every(self, pause_s: float, do: Callable[[], object]) -> None:
        """Do this again and again, in a thread of its own; a refusal is counted and is no reason to end."""
        name = getattr(do, "__name__", "?").strip("_")

        def work() -> None:
            while not self._over.wait(pause_s * self._rng.uniform(0.8, 1.2)):
                try:
                    do()
                    self._done[name] += 1
                except (ClientError, OSError, subprocess.SubprocessError, IndexError, ValueError) as exc:
                    self._failures[f"{name}: {type(exc).__name__}: {str(exc)[:100]}"] += 1

        threading.Thread(target=work, name=name, daemon=True).start()

    # the run itself

    def run(self) -> None:
        begin = time.monotonic()
        self._begin = begin
        while len(self._refs) < self._jobs:
            self.submit()
        progress(f"{self._jobs} jobs are queued after {time.monotonic() - begin:.0f} s")
        for pause_s, do in (
            (PING_S, self._ping),
            (LIST_S, self._list),
            (READ_S, self._read),
            (SCRAPE_S, self._scrape),
            (CLI_S, self._run_ls),
            (CANCEL_S, self._cancel),
            (OUTBID_S, self._outbid),
            (1.0, self._watch_events),
            *((1.0, self._follow) for _ in range(FOLLOWED)),
        ):
            self._every(pause_s, do)
        end = begin + self._hours * 3_600
        apart_s = min(SAMPLE_S, self._hours * 3_600 / 10)
        self._before = (time.monotonic(), cpu_s(self.daemon.pid), cpu_s(self.world.pid), 0.0, 0.0)
        self._state_at_warm_up: tuple[float, int] | None = None
        while time.monotonic() < end:
            time.sleep(max(0.0, min(apart_s, end - time.monotonic())))
            if self.daemon.poll() is not None:
                raise SystemExit(f"the daemon ended by itself with {self.daemon.returncode}: {self.folder}/spotd.log")
            sample = self._sample()
            self.samples.append(sample)
            with (self.folder / "samples.jsonl").open("a") as file:
                file.write(json.dumps(asdict(sample)) + "\n")
            if len(self.samples) % 10 == 1 or apart_s < SAMPLE_S:
                progress(line_of(sample))
        for what, count in sorted(self._done.items()):
            print(f"{count:7} {what}")
        for what, count in self._failures.most_common(20):
            print(f"{count:7} refused or failed: {what}")

    def _sample(self) -> Sample:
        pid, state = self.daemon.pid, self.folder / "state"
        with contextlib.suppress(OSError):
            self._scrape()
        text = self._scraped
        at, cpu, world_cpu = time.monotonic(), cpu_s(pid), cpu_s(self.world.pid)
        runs = metrics_of(text, "spotd_controller_run_seconds_count", "control-loop")
        total_s = metrics_of(text, "spotd_controller_run_seconds_sum", "control-loop")
        before = self._before
        self._before = (at, cpu, world_cpu, runs, total_s)
        pings, self._pings = self._pings or [0.0], []
        ended = int(metrics_of(text, "spotd_attempts_ended_total"))
        state_mb = megabytes(state / "state.sqlite")
        jobs = sum(metrics_of(text, "spotd_jobs", f'"{name}"') for name in NOT_FINAL)
        if self._state_at_warm_up is None and at - self._begin >= WARM_UP * self._hours * 3_600:
            self._state_at_warm_up = (state_mb, ended)
        per_end = 0.0
        if self._state_at_warm_up is not None and ended > self._state_at_warm_up[1]:
            since_mb, since = self._state_at_warm_up
            per_end = 1000 * (state_mb - since_mb) / (ended - since)
        return Sample(
            at_s=round(at - self._begin, 1),
            rss_mb=status_of(pid, "VmRSS") / 1024,
            descriptors=sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir()),
            threads=status_of(pid, "Threads"),
            wal_mb=megabytes(state / "state.sqlite-wal"),
            state_mb=state_mb,
            prices_mb=sum(megabytes(path) for path in state.glob("prices*")),
            log_mb=megabytes(self.folder / "spotd.log"),
            state_kb_per_end=per_end,
            status_ms=statistics.median(pings),
            status_max_ms=max(pings),
            loop_ms=1000 * (total_s - before[4]) / max(1.0, runs - before[3]),
            cpu_percent=100 * (cpu - before[1]) / (at - before[0]),
            world_cpu_percent=100 * (world_cpu - before[2]) / (at - before[0]),
            jobs=int(jobs),
            machines=int(metrics_of(text, "spotd_machines")),
            ended=ended,
            outages=int(metrics_of(text, "spotd_controller_errors_total")),
        )


NOT_FINAL = ("QUEUED", "WAITING_PRICE", "PROVISIONING", "STARTING", "RUNNING", "RECOVERING", "CANCELLING")


# --- the judgement ---


def slope_per_hour(samples: Sequence[Sample], figure: str) -> tuple[float, float]:
    """Return the slope of a least-squares line per hour, and twice its standard error."""
    hours = [one.at_s / 3_600 for one in samples]
    figures = [float(getattr(one, figure)) for one in samples]
    slope, begin = statistics.linear_regression(hours, figures)
    residue = sum((y - begin - slope * x) ** 2 for x, y in zip(hours, figures, strict=True))
    spread = sum((x - statistics.fmean(hours)) ** 2 for x in hours)
    return slope, 2 * (residue / max(1, len(samples) - 2) / spread) ** 0.5


RISES = "RISES"


def verdict_of(slope: float, error: float, bound: Bound) -> str:
    """Return whether the figure is flat, as far as the noise of its slope allows to say so."""
    if error > bound.per_hour and slope - error <= bound.per_hour < slope + error:
        return "not known: the noise of its slope exceeds its bound"
    # Rising for certain, and by more than is nothing.
    return f"{RISES}: {bound.reason}" if slope - error > 0 and slope > bound.per_hour else "flat"


def judge(samples: Sequence[Sample]) -> bool:
    """Print first and last half with the slope of each figure; return whether none rises that is bounded."""
    if len(samples) < 4:
        print("too few samples for a table")
        return True
    length_h = samples[-1].at_s / 3_600
    warm = [one for one in samples if one.at_s >= WARM_UP * samples[-1].at_s]
    judged = length_h >= JUDGED_FROM_H
    print(f"\n{length_h:.2f} h, {len(samples)} samples; after a warm-up of {warm[0].at_s / 60:.0f} min")
    print(f"{'figure':18} {'first half':>11} {'last half':>11} {'slope/h':>10} {'+-':>8} {'bound/h':>8}  verdict")
    flat = True
    for bound in BOUNDS:
        # What is divided by a count is noise while that is small.
        some = warm[len(warm) // 3 :] if bound.figure == "state_kb_per_end" else warm
        half = len(some) // 2
        first, last = (
            statistics.median(float(getattr(one, bound.figure)) for one in part) for part in (some[:half], some[half:])
        )
        slope, error = slope_per_hour(some, bound.figure)
        verdict = verdict_of(slope, error, bound)
        flat = flat and not (verdict.startswith(RISES) and judged)
        name = f"{bound.figure} {bound.unit}" if bound.unit and bound.unit.lower() not in bound.figure else bound.figure
        print(
            f"{name:18} {first:11.2f} {last:11.2f} {slope:+10.2f} {error:8.2f} {bound.per_hour:8.1f}"
            f"  {verdict if judged else '(too short to judge)'}"
        )
    print("last: " + line_of(samples[-1]))
    return flat


def line_of(sample: Sample) -> str:
    return (
        f"{sample.at_s / 60:6.1f} min  {sample.rss_mb:6.1f} MB  {sample.descriptors} fd  {sample.threads} threads"
        f"  WAL {sample.wal_mb:.1f} MB  state {sample.state_mb:.1f} MB  prices {sample.prices_mb:.1f} MB"
        f"  status {sample.status_ms:.1f} ms (worst {sample.status_max_ms:.0f})  loop {sample.loop_ms:.0f} ms"
        f"  processor {sample.cpu_percent:.0f} % (world {sample.world_cpu_percent:.0f} %)"
        f"  {sample.jobs} jobs, {sample.machines} machines, {sample.ended} attempts ended, {sample.outages} errors"
    )


def progress(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')}  {text}", flush=True)


def read_samples(path: Path) -> Iterator[Sample]:
    for line in path.read_text().splitlines():
        yield Sample(**json.loads(line))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hours", type=float, default=2.0)
    parser.add_argument("--jobs", type=int, default=1_000)
    parser.add_argument(
        "--life", type=float, metavar="SECONDS", help="a job's mean work; short, so that more end in less"
    )
    parser.add_argument("--folder", type=Path, help="kept; by default a temporary one that is removed")
    parser.add_argument("--judge", type=Path, help="judge the samples of a former run")
    options = parser.parse_args()
    if options.judge is not None:
        return 0 if judge(list(read_samples(options.judge))) else 1
    with contextlib.ExitStack() as stack:
        folder = options.folder or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="spotd-soak-")))
        folder.mkdir(parents=True, exist_ok=True)
        soak = Soak(folder.resolve(), jobs=options.jobs, hours=options.hours, life_s=options.life)
        progress(f"{options.jobs} jobs for {options.hours:g} h, in {soak.folder}")
        try:
            soak.start()
            soak.run()
        except KeyboardInterrupt:
            progress("ended early")
        finally:
            soak.close()
        return 0 if judge(soak.samples) else 1


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGINT))
    sys.exit(main())
