"""A daemon whose clock runs faster than the wall, for a local market whose prices and ledger do.

Theory. The whole daemon lives in virtual time then, so that prices x time, budgets and events agree with the market's
ledger. Hosts stay real processes: however fast virtual time runs, one takes real milliseconds to start, to send a
heartbeat and to save. So this module, and nothing below it, lengthens what waits for a real process: the spans of the
policy, and what hosts are given for a job's own spans. The parameters of the clock are written once into the state
folder, because a restart, or the market's own process, must compute the same instant from the same second.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final, TypeVar

import anyio

from spotd.config.values import SCALE_MAX
from spotd.core.domain.policy import Policy, ProviderPolicy
from spotd.daemon.clock import SystemClock
from spotd.paths import write_once
from spotd_providers.contract.provider import Clock

CLOCK_FILE: Final = "clock.json"
_T = TypeVar("_T", Policy, ProviderPolicy)

PROCESS_SCALE_MAX: Final = 20.0
"""What a job's own process needs on the wall, to write a checkpoint or to stop, is shortened no further than this."""
LEAST_S: Final = {
    "silence_max": 10.0,
    "silence_limit": 35.0,
    "save_allowance": 8.0,
    "save_limit": 30.0,
    "commit_horizon": 5.0,
    "recheck_every": 0.5,
    "lease": 30.0,
}
"""Spans of the policy, and how many seconds on the wall each lasts at the least."""
PROVIDER_LEAST_S: Final = {"quote_ttl": 5.0, "reconcile_window": 5.0, "provision_timeout": 30.0}


class ClockFileBroken(Exception):
    """The state folder's clock file cannot be used; guessing another time would falsify every ledger."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockParameters:
    """virtual = virtual0 + (real - real0) x scale."""

    real0: float
    virtual0: datetime
    scale: float

    def as_json(self) -> dict[str, Any]:
        return {"real0": self.real0, "virtual0": self.virtual0.isoformat(), "scale": self.scale}


class AcceleratedClock:
    """Virtual time that every process computes alike from the same parameters."""

    def __init__(self, parameters: ClockParameters, *, wall: Callable[[], float] = time.time) -> None:
        self.parameters = parameters
        self._wall = wall

    def now(self) -> datetime:
        p = self.parameters
        return p.virtual0 + timedelta(seconds=(self._wall() - p.real0) * p.scale)

    async def sleep(self, duration: timedelta) -> None:
        await anyio.sleep(max(0.0, self.real_seconds(duration)))

    def real_seconds(self, duration: timedelta) -> float:
        return duration.total_seconds() / self.parameters.scale


def open_clock(state_dir: Path, *, scale: float = 1.0, begin: datetime | None = None) -> Clock:
    """Open the clock of this state folder: the one written there, else a new one as asked for, which is then written.

    A folder without the file and a scale of 1 runs on the system's clock and stays without the file.

    Raises:
        ClockFileBroken: the file is there and holds nothing usable.
    """
    path = state_dir / CLOCK_FILE
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        if scale == 1.0 and begin is None:
            return SystemClock()
        if not (math.isfinite(scale) and 0 < scale <= SCALE_MAX):
            raise ClockFileBroken(f"a clock cannot run {scale} times as fast as the wall") from None
        real0 = time.time()
        first = begin if begin is not None else datetime.fromtimestamp(real0, UTC)
        parameters = ClockParameters(real0=real0, virtual0=first, scale=scale)
        text = write_once(path, json.dumps(parameters.as_json()))
    return AcceleratedClock(parse_parameters(text, where=str(path)))


def parse_parameters(text: str, *, where: str) -> ClockParameters:
    """Return the parameters in a clock file.

    Raises:
        ClockFileBroken: anything is missing, not finite, or without a time zone.
    """
    try:
        data = json.loads(text)
        parameters = ClockParameters(
            real0=float(data["real0"]), virtual0=datetime.fromisoformat(data["virtual0"]), scale=float(data["scale"])
        )
    except (ValueError, KeyError, TypeError) as exc:
        raise ClockFileBroken(f"{where} is not a clock file: {exc}") from exc
    if not math.isfinite(parameters.real0) or not 0 < parameters.scale <= SCALE_MAX:
        raise ClockFileBroken(f"{where} holds a real0 or scale that no clock can have")
    if parameters.virtual0.tzinfo is None:
        raise ClockFileBroken(f"{where} holds a virtual0 without a time zone")
    return parameters


def seconds_on_host(clock: Clock) -> Callable[[timedelta], float]:
    """Return how many seconds a host is given for a span of its job."""
    scale = 1 / clock.real_seconds(timedelta(seconds=1))
    return lambda span: span.total_seconds() / min(scale, PROCESS_SCALE_MAX)


def paced(policy: Policy, clock: Clock) -> Policy:
    """Lengthen each span of the policy that real processes could not follow; in real time it is as it was."""
    if clock.real_seconds(timedelta(seconds=1)) >= 1:
        return policy
    providers = {name: _lengthen(rules, PROVIDER_LEAST_S, clock) for name, rules in policy.providers.items()}
    return replace(_lengthen(policy, LEAST_S, clock), providers=providers)


def _lengthen(value: _T, least_s: dict[str, float], clock: Clock) -> _T:
    second_s = clock.real_seconds(timedelta(seconds=1))
    spans = {name: max(getattr(value, name), timedelta(seconds=s / second_s)) for name, s in least_s.items()}
    return replace(value, **spans)
