"""What the demo plays: an evening in a small market, and three jobs that are interrupted in different ways.

The evening runs 120 times faster than the wall. Two machines are taken away at fixed times, so that a viewer need not
rely on chance: one host is outbid without notice, the other gives the two minutes' notice of AWS.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.resources import files
from pathlib import Path
from random import Random
from typing import Any, Final

from spotd.client.daemon import Daemon
from spotd.client.transport import DaemonUnreachable

TIME_SCALE: Final = 120
EVENING: Final = datetime(2026, 3, 6, 20, 30, tzinfo=UTC)
NIGHT_TARIFF_S: Final = 5_400
"""When the night price comes, seconds after the market opened: 45 seconds of the wall."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptedLoss:
    """How the first machine on a host is taken away: one value for sentence and event."""

    host: str
    delay: str
    notice: bool

    @property
    def sentence(self) -> str:
        if self.notice:
            return f"its first host, {self.host}, will give two minutes' notice"
        return f"its first host, {self.host}, will be outbid without warning"

    def event(self) -> str:
        """Return the event as a table of the market's settings."""
        return f"""
[[providers.local.events]]
do = "preempt"
host = "{self.host}"
after_launch = 1
delay = "{self.delay}"
notice = {str(self.notice).lower()}
lasting = "2h"
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoJob:
    """One job of the demo; `flags` go to the training script, here and in the uninterrupted run.

    Attributes:
        habit: what is special about it.
        loss: how its first host is taken away, `None` where it is not.
    """

    name: str
    habit: str
    gpu: str
    max_price: float
    priority: int
    flags: tuple[str, ...]
    pace: float
    loss: ScriptedLoss | None = None

    @property
    def about(self) -> str:
        """What a viewer is to expect."""
        return self.habit if self.loss is None else f"{self.habit}; {self.loss.sentence}"

    def draft(self, workdir: Path) -> dict[str, Any]:
        """Return the job in the shape of a job file."""
        command = [sys.executable, "train.py", *self.flags, "--pace", str(self.pace)]
        return {
            "name": self.name,
            "run": shlex.join(command),
            "image": "python:3.12-slim",
            "workdir": str(workdir),
            "resources": {"gpu": [f"{self.gpu}:1"], "disk": "10GB"},
            "price": {"max_price": self.max_price},
            "checkpoint": {"every": "5m", "settle": "60s", "stop_grace": "90s"},
            "schedule": {"priority": self.priority},
        }


def jobs(seed: int) -> tuple[DemoJob, ...]:
    """Return the three jobs; the seed decides what they learn."""
    return (
        DemoJob(
            name="numpy-net",
            habit="saves every few seconds",
            loss=ScriptedLoss(host="attic-1", delay="25m", notice=False),
            gpu="RTX_4090",
            max_price=0.50,
            priority=10,
            flags=("--steps", "600", "--save-every", "50", "--seed", str(seed)),
            pace=0.04,
        ),
        DemoJob(
            name="stubborn",
            habit="ignores SIGTERM",
            loss=ScriptedLoss(host="campus-1", delay="30m", notice=True),
            gpu="L40S",
            max_price=1.00,
            priority=5,
            flags=("--steps", "700", "--save-every", "50", "--ignore-sigterm", "--seed", str(seed + 1)),
            pace=0.04,
        ),
        DemoJob(
            name="night-owl",
            habit="its ceiling is below the market until the night price comes",
            gpu="H100_SXM",
            max_price=2.00,
            priority=0,
            flags=("--steps", "300", "--save-every", "50", "--seed", str(seed + 2)),
            pace=0.04,
        ),
    )


def config(folder: Path, seed: int) -> str:
    """Return the demo's configuration; also write the night tariff that it names."""
    rng = Random(seed)
    tariff = folder / "night-tariff.csv"
    tariff.write_text(f"time,price\n0,{2.45 + rng.random() / 10:.4f}\n{NIGHT_TARIFF_S},1.7900\n", encoding="utf-8")

    def host(name: str, gpu: str, flavour: str, price: float, on_demand: float) -> str:
        return f"""
[[providers.local.hosts]]
name = "{name}"
gpu = "{gpu}"
region = "{name.split("-")[0]}"
flavour = "{flavour}"
on_demand = {on_demand}
spot = {{ kind = "seeded", base = {price:.4f}, volatility = 0.02, spikes = 0.0, stock_outs = 0.0 }}
"""

    hosts = [
        host("attic-1", "RTX_4090", "sudden", 0.30 + rng.random() / 50, 0.69),
        host("garage-1", "RTX_4090", "sudden", 0.34 + rng.random() / 50, 0.69),
        host("campus-1", "L40S", "notice", 0.62 + rng.random() / 50, 1.29),
        host("harbour-1", "L40S", "notice", 0.70 + rng.random() / 50, 1.29),
    ]
    events = "".join(job.loss.event() for job in jobs(seed) if job.loss is not None)
    return f"""[daemon]
install = "demo"
poll_every = "60s"
time_scale = {TIME_SCALE}

# A higher bid would bring an outbid machine back: the demo shows how a job is carried to another one.
[bids]
raise_running = false
hold = "0s"

[budget]
day = 50.0
machines = 4

[providers.local]
seed = {seed}
notice_lead = "2m"
{"".join(hosts)}
[[providers.local.hosts]]
name = "tower-1"
gpu = "H100_SXM"
region = "tower"
flavour = "notice"
on_demand = 3.49
spot = {{ kind = "csv", path = "{tariff}" }}
{events}"""


# A private daemon in a temporary folder, and its end without leftovers, whatever happens.


READY_TIMEOUT_S: Final = 30.0
STOP_TIMEOUT_S: Final = 20.0


class DemoFailed(Exception):
    """A failure of the demo; the message names the cause and where to search."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """A running daemon of the demo's own.

    Attributes:
        folder: everything the demo makes is below it.
    """

    folder: Path
    daemon: Daemon
    process: subprocess.Popen[bytes]

    @property
    def log(self) -> Path:
        return self.folder / "spotd.log"

    @property
    def market(self) -> Path:
        return market_folder(self.folder)

    def check_alive(self) -> None:
        """Raise DemoFailed when the daemon has ended by itself."""
        code = self.process.poll()
        if code is not None:
            raise DemoFailed(f"the demo's daemon ended with code {code}; its log is {self.log}")


def market_folder(folder: Path) -> Path:
    return folder / "market"


@contextmanager
def session(seed: int, *, keep: bool) -> Iterator[Session]:
    """Run a daemon over a market of its own. At the end both are gone, and their files too unless `keep`."""
    folder = Path(tempfile.mkdtemp(prefix="spotd-demo-")).resolve()
    process: subprocess.Popen[bytes] | None = None
    try:
        process = _start(folder, seed)
        found = Session(folder=folder, daemon=Daemon(folder / "run" / "spotd.sock"), process=process)
        _wait_until_ready(found)
        yield found
    finally:
        if process is not None:
            _stop(process)
        close_market(folder)
        if not keep:
            shutil.rmtree(folder, ignore_errors=True)


def _start(folder: Path, seed: int) -> subprocess.Popen[bytes]:
    for name in ("run", "state"):
        (folder / name).mkdir(mode=0o700)
    market = market_folder(folder)
    text = config(folder, seed).replace("[providers.local]\n", f'[providers.local]\ndirectory = "{market}"\n', 1)
    (folder / "config.toml").write_text(text, encoding="utf-8")
    clock = {"real0": time.time(), "virtual0": EVENING.isoformat(), "scale": TIME_SCALE}
    (folder / "state" / "clock.json").write_text(json.dumps(clock), encoding="utf-8")
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("SPOTD_")},
        "STATE_DIRECTORY": str(folder / "state"),
        "RUNTIME_DIRECTORY": str(folder / "run"),
    }
    command = [sys.executable, "-m", "spotd", "run", "--config", str(folder / "config.toml")]
    with (folder / "spotd.log").open("wb") as log:
        return subprocess.Popen(
            command, env=environment, stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True
        )


def _wait_until_ready(found: Session) -> None:
    deadline = time.monotonic() + READY_TIMEOUT_S
    while True:
        found.check_alive()
        try:
            found.daemon.status()
        except DaemonUnreachable:
            if time.monotonic() > deadline:
                raise DemoFailed(f"the demo's daemon does not answer; its log is {found.log}") from None
            time.sleep(0.05)
        else:
            return


def _stop(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def close_market(folder: Path) -> None:
    """Stop the market's server and every machine on it."""
    market = market_folder(folder)
    if market.is_dir():
        subprocess.run(
            [sys.executable, "-m", "spotd_providers.local.server", "--dir", str(market), "--stop"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=60,
            check=False,
        )


# The proof: the same script, never interrupted, must end with the same bytes.


HASH_FILE = "weights.sha256"


def training_folder() -> Path:
    """Return the folder of the training script, in the wheel or in a checkout."""
    packaged = Path(str(files("spotd.demo"))) / "example"
    checkout = Path(__file__).resolve().parents[2] / "examples" / "numpy"
    for folder in (packaged, checkout):
        if (folder / "train.py").is_file():
            return folder
    raise DemoFailed("the demo's training script is missing from this installation; reinstall spotd")


def check_numpy() -> None:
    """Raise DemoFailed with the way out when the training script could not run."""
    try:
        import numpy  # noqa: F401 - only whether it is there matters, and only here
    except ImportError:
        raise DemoFailed("the demo trains with numpy, which is not installed: pip install 'spotd[demo]'") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """An uninterrupted run in the background."""

    job: DemoJob
    folder: Path
    process: subprocess.Popen[bytes]

    def sha256(self) -> str:
        """Return what the uninterrupted run ended with."""
        code = self.process.wait(timeout=60)
        if code != 0:
            raise DemoFailed(f"the uninterrupted run of {self.job.name} failed; see {self.folder}")
        return (self.folder / "out" / HASH_FILE).read_text(encoding="utf-8").strip()


def start_reference(job: DemoJob, folder: Path) -> Reference:
    """Start the job's script once from start to end, without spotd and without pauses.

    It gets the environment of a machine: a variable such as `OPENBLAS_CORETYPE` changes the last bit of a product.
    """
    folder.mkdir(parents=True)
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, str(training_folder() / "train.py"), *job.flags],
            cwd=folder,
            env={"PATH": os.environ.get("PATH", os.defpath), "LANG": "C.UTF-8", "HOME": str(folder)},
            stdout=log,
            stderr=log,
            stdin=subprocess.DEVNULL,
        )
    return Reference(job=job, folder=folder, process=process)


def delivered_sha256(daemon: Daemon, job: DemoJob) -> str:
    """Return what the job delivered through the store."""
    outputs = daemon.files(job.name, None)["files"]
    path = next((f["path"] for f in outputs if Path(f["path"]).name == HASH_FILE), None)
    if path is None:
        raise DemoFailed(f"{job.name} delivered no {HASH_FILE}")
    return b"".join(daemon.read_file(job.name, None, path)).decode("ascii", "replace").strip()
