"""The exact offline optimum of one window: a dynamic programme over step, done work and what is held."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from spotd.core.policies import HOUR_S
from tests.replays.replay import ReplayTerms, ZoneTrace

_NEVER = np.int64(2**62)
_Costs = npt.NDArray[np.int64]


def optimum(zone: ZoneTrace, terms: ReplayTerms) -> int:
    """The least that a policy which knows the future pays, in micro-dollars times seconds per hour.

    Work is counted in the largest unit that step, overhead and task are whole numbers of. A state is what is held and
    how many steps of its start are over, since the start burns its overhead step by step.
    """
    unit = math.gcd(terms.step_s, math.gcd(terms.overhead_s, terms.task_s))
    goal, step, start = terms.task_s // unit, terms.step_s // unit, terms.overhead_s // unit
    pendings = [max(0, start - n * step) for n in range(-(-start // step) + 1)]
    gains = [max(0, step - pending) for pending in pendings]
    last = len(pendings) - 1
    none: _Costs = np.full(goal + 1, _NEVER, dtype=np.int64)
    none[0] = 0
    empty: _Costs = np.full(goal + 1, _NEVER, dtype=np.int64)
    # index n: the machine has had n steps
    spots, demands = [empty] * (last + 1), [empty] * (last + 1)
    for tick in range(terms.deadline_s // terms.step_s):
        at = terms.start + tick
        if not zone.up[at]:
            none = np.minimum.reduce([none, *spots])
            spots = [empty] * (last + 1)
        best_spot, best_demand = np.minimum.reduce(spots), np.minimum.reduce(demands)
        idle = np.minimum.reduce([none, best_spot, best_demand])
        demand_price = terms.on_demand * terms.step_s
        demands = _advance(np.minimum(none, best_spot), demands, gains, demand_price)
        if zone.up[at]:
            spots = _advance(np.minimum(none, best_demand), spots, gains, zone.price(at) * terms.step_s)
        none = idle
    return int(min(costs[goal] for costs in [none, *spots, *demands]))


def _advance(fresh: _Costs, held: list[_Costs], gains: list[int], price: int) -> list[_Costs]:
    after = [_worked(fresh, gains[0], price)]
    last = len(held) - 1
    for n in range(1, last + 1):
        source = held[n - 1] if n < last else np.minimum(held[last - 1], held[last])
        after.append(_worked(source, gains[n], price))
    if not last:
        after[0] = np.minimum(after[0], _worked(held[0], gains[0], price))
    return after


def _worked(costs: _Costs, gain: int, price: int) -> _Costs:
    """The costs after a step in which this much work was done, which ends at the goal."""
    after = np.full_like(costs, _NEVER)
    if gain < len(costs):
        after[gain:] = costs[: len(costs) - gain]
    after[-1] = min(after[-1], costs[-1 - gain :].min()) if gain < len(costs) else costs.min()
    return np.where(after < _NEVER, after + price, _NEVER)


def usd(paid: int) -> float:
    return paid / HOUR_S / 1_000_000
