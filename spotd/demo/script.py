"""What the demo plays: an evening in a small market, and three jobs that are interrupted in different ways.

The evening runs 120 times faster than the wall. Two machines are taken away at fixed times, so that a viewer need not
rely on chance: one host is outbid without notice, the other gives the two minutes' notice of AWS.
"""

from __future__ import annotations

import shlex
import sys
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from random import Random
from typing import Any, Final

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
