"""What a policy is asked, and what it answers.

Theory. Time is cut into steps. At the beginning of a step a policy sees what can be had during this step, how much work
is left and how much time, and chooses what to use for the step. All spans are whole seconds and all prices integer
micro-dollars per hour of the whole machine, so that two programs which follow the same formula get the same cents.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from spotd_providers.contract.money import MicroUsdPerHour

HOUR_S: Final = 3600


class Action(StrEnum):
    """What to use for the next step."""

    WAIT = "wait"
    SPOT = "spot"
    ON_DEMAND = "on-demand"


@dataclass(frozen=True, slots=True, kw_only=True)
class Zone:
    """One place where spot machines are sold: a zone of a cloud, or a whole market.

    Attributes:
        name: unique within one observation.
        is_up: a spot machine can be had there in this step.
        price: of a spot machine there, at and under the ceiling of the job.
        up_s: how long it has been up without a break, this step included; 0 while it is down.
        past_up_s, past_runs: how long, and how often, it was up before that, since the job began.
        prior_up_s, prior_runs: the same of the time before the job began, where there is a record.
    """

    name: str
    is_up: bool
    price: MicroUsdPerHour
    up_s: int = 0
    past_up_s: int = 0
    past_runs: int = 0
    prior_up_s: int = 0
    prior_runs: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """What is known at the beginning of one step.

    Attributes:
        task_s, work_s: the whole job and what is left of it, in machine time.
        elapsed_s, left_s: since the job began, and until its deadline; `left_s` is `None` without a deadline.
        step_s: until the next choice.
        overhead_s: what a start costs: boot, restore, and where work is lost at a preemption the mean of that.
        overhead_max_s: an upper quantile of the same, for the shield; 0 stands for `overhead_s`.
        zones: where spot is sold. At most one is held.
        on_demand: the price of an on-demand machine; `None` where none may be used.
        holds: what the last step used and is still there.
        held_zone: where the spot machine is that is held.
        pending_s: how long the held machine still starts.
        unsaved_s: work that is lost when the held machine is lost.
        keeps_work: nothing is ever lost, as published simulators assume.
        save_every_s: how long after its start a machine has saved for the first time, where work can be lost.
        margin_steps: how many steps of time the shield keeps beside its own.
    """

    task_s: int
    work_s: int
    elapsed_s: int
    left_s: int | None
    step_s: int
    overhead_s: int
    overhead_max_s: int = 0
    zones: tuple[Zone, ...] = ()
    on_demand: MicroUsdPerHour | None = None
    holds: Action = Action.WAIT
    held_zone: str = ""
    pending_s: int = 0
    unsaved_s: int = 0
    keeps_work: bool = True
    save_every_s: int = 0
    margin_steps: int = 0

    @property
    def done_s(self) -> int:
        return self.task_s - self.work_s

    @property
    def start_max_s(self) -> int:
        """What a start costs at worst."""
        return max(self.overhead_max_s, self.overhead_s)

    @property
    def steps_left(self) -> int:
        """Whole steps until the deadline; without one, more than any job needs."""
        return NO_END if self.left_s is None else self.left_s // self.step_s

    def steps_for(self, work_s: int, overhead_s: int) -> int:
        """Return how many whole steps so much work takes on a machine that is started now; work that is done, none."""
        return -(-(work_s + overhead_s) // self.step_s) if work_s > 0 else 0

    def held_spot(self) -> Zone | None:
        """Return the zone of the spot machine that is held and can be kept."""
        if self.holds is not Action.SPOT:
            return None
        return next((zone for zone in self.zones if zone.is_up and zone.name == self.held_zone), None)

    def spot_now(self) -> Zone | None:
        """Return the zone to use if spot is to be used: the one of the machine that is held, else the cheapest."""
        return self.held_spot() or min((z for z in self.zones if z.is_up), key=cheapest_first, default=None)


NO_END: Final = 10**9


def cheapest_first(zone: Zone) -> tuple[int, str]:
    return zone.price, zone.name


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What to use for the next step, with the reason in one sentence with figures."""

    action: Action
    sentence: str
    zone: str = ""


Rule = Callable[[Observation], Choice]
"""A policy: an observation in, a choice out."""


def wait(sentence: str) -> Choice:
    return Choice(action=Action.WAIT, sentence=sentence)


def spot(zone: Zone, sentence: str) -> Choice:
    return Choice(action=Action.SPOT, sentence=sentence, zone=zone.name)


def on_demand(sentence: str) -> Choice:
    return Choice(action=Action.ON_DEMAND, sentence=sentence)


def hours_words(seconds: float) -> str:
    """`20 min`, `4.8 h`: how policies write a span."""
    if not math.isfinite(seconds):
        return "more time than there is"
    if abs(seconds) < 2 * HOUR_S:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / HOUR_S:.1f} h"
