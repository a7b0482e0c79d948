"""A job replayed on a recorded trace of spot availability, step by step, under one policy.

The model is that of published simulators: what is up in a step is known at its beginning; a start costs its overhead
before work begins; a spot machine whose zone is down in the next step is gone; done work is never lost; each step of a
machine is paid whole. A job is done when its work is, judged at the beginning of a step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

from spotd.core.policies import HOUR_S, Action, Observation, Rule, Zone
from spotd_providers.contract.values import MicroUsdPerHour

LATE_FACTOR: Final = 4
"""A replay is given up after so many times the span that it was allowed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ZoneTrace:
    """What one zone offered, step by step.

    Attributes:
        up: whether a spot machine could be had in a step.
        prices: of a spot machine in each step; one value where it never changed.
    """

    name: str
    up: Sequence[bool]
    prices: Sequence[MicroUsdPerHour]

    def price(self, step: int) -> MicroUsdPerHour:
        return self.prices[step] if len(self.prices) > 1 else self.prices[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayTerms:
    """What is replayed: a job with its deadline, from one step of the trace on."""

    task_s: int
    deadline_s: int
    overhead_s: int
    step_s: int
    on_demand: MicroUsdPerHour
    start: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayResult:
    """What it came to.

    Attributes:
        paid: micro-dollars times seconds per hour, so that nothing is rounded before the end.
        finish_s: `None` where the trace ended first.
    """

    paid: int
    finish_s: int | None
    launches: int
    preemptions: int
    is_late: bool

    @property
    def usd(self) -> float:
        return self.paid / HOUR_S / 1_000_000


def replay(rule: Rule, zones: Sequence[ZoneTrace], terms: ReplayTerms) -> ReplayResult:
    """Run the job to its end, or to the end of the trace."""
    held, held_zone, pending, done = Action.WAIT, "", 0, 0
    paid = launches = preemptions = 0
    limit = LATE_FACTOR * (terms.deadline_s // terms.step_s)
    for step, seen in enumerate(_zones_seen(zones, terms, limit)):
        if done >= terms.task_s:
            finish = step * terms.step_s
            is_late = finish > terms.deadline_s
            return ReplayResult(paid=paid, finish_s=finish, launches=launches, preemptions=preemptions, is_late=is_late)
        if held is Action.SPOT and not any(z.is_up and z.name == held_zone for z in seen):
            held, held_zone, pending = Action.WAIT, "", 0
            preemptions += 1
        chosen = rule(
            Observation(
                task_s=terms.task_s,
                work_s=terms.task_s - done,
                elapsed_s=step * terms.step_s,
                left_s=terms.deadline_s - step * terms.step_s,
                step_s=terms.step_s,
                overhead_s=terms.overhead_s,
                zones=seen,
                on_demand=terms.on_demand,
                holds=held,
                held_zone=held_zone,
                pending_s=pending,
            )
        )
        zone = next((z for z in seen if z.is_up and z.name == chosen.zone), None)
        action = Action.WAIT if chosen.action is Action.SPOT and zone is None else chosen.action
        name = chosen.zone if action is Action.SPOT else ""
        if action is not held or name != held_zone:
            pending = 0 if action is Action.WAIT else terms.overhead_s
            launches += action is not Action.WAIT
        held, held_zone = action, name
        if action is Action.WAIT:
            continue
        paid += (zone.price if zone is not None and action is Action.SPOT else terms.on_demand) * terms.step_s
        done += max(0, terms.step_s - pending)
        pending = max(0, pending - terms.step_s)
    return ReplayResult(paid=paid, finish_s=None, launches=launches, preemptions=preemptions, is_late=True)


def _zones_seen(zones: Sequence[ZoneTrace], terms: ReplayTerms, limit: int) -> Iterator[tuple[Zone, ...]]:
    """Yield what a policy sees of each zone, step by step, with the up-runs since the start of the job."""
    end = min([terms.start + limit, *(len(zone.up) for zone in zones)])
    seen = [Zone(name=zone.name, is_up=False, price=zone.price(terms.start)) for zone in zones]
    for step in range(terms.start, end):
        for index, zone in enumerate(zones):
            seen[index] = zone_after(seen[index], is_up=zone.up[step], price=zone.price(step), step_s=terms.step_s)
        yield tuple(seen)


def zone_after(before: Zone, *, is_up: bool, price: MicroUsdPerHour, step_s: int) -> Zone:
    """Return the zone one step later."""
    if is_up:
        return replace(before, is_up=True, price=price, up_s=before.up_s + step_s)
    if not before.up_s:
        return before if before.price == price else replace(before, price=price)
    ended = before.past_up_s + before.up_s
    return replace(before, is_up=False, price=price, up_s=0, past_up_s=ended, past_runs=before.past_runs + 1)
