"""Recorded traces and reference scores from the folder beside the repository; both are left out of it on purpose."""

from __future__ import annotations

import csv
import gzip
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Final

from spotd.core.policies import HOUR_S
from spotd_providers.contract.values import MicroUsdPerHour
from tests.replays.replay import ReplayTerms, ZoneTrace

DATA: Final = Path(os.environ.get("SPOTD_SHARED_DATA", Path(__file__).parents[3] / "shared" / "data"))
SCORES: Final = DATA / "reference_scores.csv"
ABSENT: Final = f"{SCORES} is not there: recorded traces are not part of the repository"
_ON_DEMAND: Final = {"aws-2022-1node": 3.06, "aws-2023-v100-9zone": 3.06}
_SPOT: Final = 0.9731


@dataclass(frozen=True)
class Window:
    """The rows of one window of one trace: terms, and what each policy cost."""

    trace: str
    terms: ReplayTerms
    costs: dict[str, float]
    rows: dict[str, tuple[str, str, str]]

    @property
    def set_name(self) -> str:
        return self.trace.partition("/")[0]

    @property
    def zone(self) -> ZoneTrace:
        return trace(self.trace)[0]


def micro(usd: float) -> MicroUsdPerHour:
    return MicroUsdPerHour(round(usd * 1_000_000))


@cache
def trace(name: str) -> tuple[ZoneTrace, int, MicroUsdPerHour]:
    """The trace, its step in seconds, and the on-demand price beside it."""
    plain = DATA / "traces" / f"{name}.json"
    raw = plain.read_bytes() if plain.exists() else gzip.decompress(plain.with_suffix(".json.gz").read_bytes())
    document = json.loads(raw)
    meta, folder = document["metadata"], name.partition("/")[0]
    prices = document.get("prices") or [meta.get("spot_price_usd_h", _SPOT)]
    on_demand = _ON_DEMAND.get(folder) or meta["on_demand_price_usd_h"]
    zone = ZoneTrace(
        name=name.partition("/")[2],
        up=tuple(value >= 1 for value in document["data"]),
        prices=tuple(micro(price) for price in prices),
    )
    return zone, int(meta["gap_seconds"]), micro(on_demand)


@cache
def windows() -> tuple[Window, ...]:
    """Every window of the reference scores."""
    return tuple(_windows())


def _windows() -> Iterator[Window]:
    with SCORES.open(newline="") as file:
        rows = list(csv.DictReader(file))
    key = ("trace", "start_tick", "task_h", "deadline_h", "restart_overhead_h")
    for (name, start, task, deadline, overhead), group in groupby(rows, key=lambda row: tuple(row[k] for k in key)):
        _, step_s, on_demand = trace(name)
        mine = list(group)
        yield Window(
            trace=name,
            terms=ReplayTerms(
                task_s=round(float(task) * HOUR_S),
                deadline_s=round(float(deadline) * HOUR_S),
                overhead_s=round(float(overhead) * HOUR_S),
                step_s=step_s,
                on_demand=on_demand,
                start=int(start),
            ),
            costs={row["policy"]: float(row["cost_usd"]) for row in mine},
            rows={row["policy"]: (row["finish_h"], row["launches"], row["preemptions"]) for row in mine},
        )
