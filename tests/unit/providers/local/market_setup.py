"""A market with one or two hosts whose prices a test writes down."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

from spotd_providers.contract.values import MicroUsdPerHour
from spotd_providers.local.hosts import LedgerLine, read_ledger, segments
from spotd_providers.local.market.floor import Machine
from spotd_providers.local.market.market import LocalMarket
from spotd_providers.local.settings import MarketSpec
from tests.fakes.ledger_sums import total_by_machine
from tests.unit.providers.local.clocks import ManualClock

HOUR = timedelta(hours=1)
MINUTE = timedelta(minutes=1)
FOREVER = "exec sleep 1000"
LAB = "lab"


def steps(folder: Path, *rows: tuple[float, float] | tuple[float, float, int]) -> dict[str, str]:
    """A price source from (hours since the market was opened, dollars, available)."""
    file = folder / f"prices-{abs(hash(rows))}.csv"
    lines = [f"{row[0] * 3600},{row[1]},{row[2] if len(row) > 2 else ''}" for row in rows]
    file.write_text("\n".join(["time,price,available", *lines, ""]))
    return {"kind": "csv", "path": str(file)}


def trace(folder: Path, counts: Sequence[int], *, gap_s: int = 3600, prices: Sequence[float] | None = None) -> Any:
    """A price source that is a recorded trace."""
    file = folder / "trace.json"
    content = {"metadata": {"gap_seconds": gap_s}, "data": list(counts), "prices": list(prices or [1.0] * len(counts))}
    file.write_text(json.dumps(content))
    return {"kind": "trace", "path": str(file)}


def host(name: str = "kyiv", **more: Any) -> dict[str, Any]:
    """A host at 1 $/h in a bid market, without a price on its disk unless asked for."""
    plain = {"spot": {"kind": "fixed", "price": "1.00"}, "storage_gb_month": 0}
    return {"name": name, "gpu": "RTX_4090", **plain, **more}


class Bench:
    """A market under test: its clock is moved by hand, its machines are real."""

    def __init__(self, folder: Path, spec: Mapping[str, Any]) -> None:
        self.folder = folder / "market"
        self.clock = ManualClock()
        self.spec = MarketSpec.model_validate(spec)
        self.market = LocalMarket(self.spec, self.folder, clock=self.clock)
        self._keys = 0

    def reopen(self) -> None:
        """The market's server was killed and started again; what it had in its hands is lost."""
        self.market.ledger.close()
        self.market = LocalMarket(self.spec, self.folder, clock=self.clock)

    def advance(self, duration: timedelta) -> None:
        """It is `duration` later, and the market knows."""
        self.clock.advance(duration)
        self.market.advance()

    def buy(self, offer_id: str = "kyiv:spot", *, dollars: float = 1.5, script: str = FOREVER, **more: Any) -> Machine:
        """A machine, under a key of its own unless one is given."""
        self._keys += 1
        values: dict[str, Any] = {
            "key": f"spotd-{LAB}-job{self._keys}-1",
            "install": LAB,
            "offer_id": offer_id,
            "price_max": MicroUsdPerHour(round(dollars * 1_000_000)),
            "image": "any",
            "disk_gb": 72,
            "start_script": script,
            **more,
        }
        return self.market.launch(**values)

    def lines(self) -> tuple[LedgerLine, ...]:
        """What the market wrote into its ledger."""
        return read_ledger(self.market.ledger.path)

    def bill(self, machine: Machine) -> int:
        """Micro-dollars that the machine cost until now."""
        return total_by_machine(segments(self.lines()), self.clock.now())[machine.machine_id]

    def alive(self, machine: Machine) -> bool:
        """Whether its processes run."""
        known = machine.machine_id in self.market.machines.ids()
        return known and self.market.machines.alive(machine.machine_id)


@contextmanager
def bench(folder: Path, **spec: Any) -> Iterator[Bench]:
    """A market that leaves nothing behind."""
    made = Bench(folder, spec)
    try:
        yield made
    finally:
        made.market.machines.kill_all()
        made.market.ledger.close()
