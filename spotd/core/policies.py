"""What a policy is asked, and what it answers.

Theory. Time is cut into steps. At the beginning of a step a policy sees what can be had during this step, how much work
is left and how much time, and chooses what to use for the step. All spans are whole seconds and all prices integer
micro-dollars per hour of the whole machine, so that two programs which follow the same formula get the same cents.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from fractions import Fraction
from typing import Final

from spotd_providers.contract.values import MicroUsdPerHour

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


# Simple policies: those without a deadline, and the baselines of the literature.


def ceiling(seen: Observation) -> Choice:
    """Use the cheapest spot machine under the ceiling, else wait: what spotd does without a deadline."""
    zone = seen.spot_now()
    return wait("no spot machine is at or under the ceiling") if zone is None else spot(zone, "spot is up")


def always_on_demand(_seen: Observation) -> Choice:
    """Pay for on-demand from beginning to end: the upper anchor of every comparison."""
    return on_demand("this policy always uses on-demand")


def greedy(seen: Observation) -> Choice:
    """Use spot while it is up and wait while it is down, until time forces on-demand.

    Source: the greedy baseline of "Can't Be Late" (Wu et al., NSDI 2024) as its public simulator has it.
    """
    zone = seen.spot_now()
    base = wait("spot is down, and there is time to wait") if zone is None else spot(zone, "spot is up")
    return with_safety(seen, base)


def with_safety(seen: Observation, base: Choice) -> Choice:
    """Return on-demand where time forces it, else the given choice.

    With w work left, overhead d, step g and L steps left: `ceil((w + d) / g) >= L` keeps a spot machine that does
    useful work and uses on-demand otherwise; `ceil((w + 2 d) / g) >= L` keeps a spot machine and uses on-demand
    otherwise. Source: the safety rules of the simulator of "Can't Be Late" (Wu et al., NSDI 2024).
    """
    left = seen.steps_left
    if seen.steps_for(seen.work_s, 2 * seen.overhead_s) < left:
        return base
    held = seen.held_spot()
    is_last_call = seen.steps_for(seen.work_s, seen.overhead_s) >= left
    if held is not None and not (is_last_call and seen.pending_s):
        return spot(held, "keeps the spot machine that it has, though no time is left to lose")
    if base.action is Action.ON_DEMAND:
        return base
    return on_demand(
        f"{hours_words(seen.work_s)} of work are left and {hours_words(seen.left_s or 0)} until the deadline"
    )


# The one-step shield: no choice of a policy can make a job late that could still be in time.
#
# Theory. With w work left, start-up d, step g, L whole steps left and `n(w) = ceil((w + d) / g)` steps that w takes
# on a machine that is started now, on-demand that starts now is in time while `n(w) <= L`. A choice is let through
# only if on-demand is still in time after the worst that the step can bring: nothing is gained by waiting; a spot
# machine that is kept works for `g - pending` and is gone then; one that is launched works for `g - d` and is gone
# then. By induction a job that could be in time at its start is in time at its end, whatever the policy inside
# chooses. A machine that is already on on-demand, and a start that was not feasible, always lead to on-demand.
#
# Where a preemption loses work, the worst step gains nothing and loses what is not saved. A spot machine that would
# have to be left before its first save is not launched at all: it would only cost. The boot time that counts here is
# an upper quantile of the measured ones.


def shielded(rule: Rule, seen: Observation) -> Choice:
    """Return what the policy chooses where the worst next step still leaves time, else what does leave it."""
    chosen = rule(seen)
    if seen.left_s is None or seen.on_demand is None:
        return chosen
    if chosen.action is Action.ON_DEMAND or is_safe(seen, chosen):
        return chosen
    held = seen.held_spot()
    if held is not None and chosen.zone != held.name:
        kept = spot(held, "keeps the spot machine that it has: no time is left for another start")
        if is_safe(seen, kept):
            return kept
    return on_demand(forced_words(seen))


def is_safe(seen: Observation, chosen: Choice) -> bool:
    """Whether on-demand is in time still after the worst step that this choice can bring."""
    start, left = seen.start_max_s, seen.steps_left - seen.margin_steps
    if chosen.action is Action.ON_DEMAND:
        return True
    is_kept = chosen.action is Action.SPOT and seen.holds is Action.SPOT and chosen.zone == seen.held_zone
    at_risk = seen.work_s + (0 if seen.keeps_work else seen.unsaved_s)
    if chosen.action is Action.WAIT:
        return seen.steps_for(at_risk, start) <= left - 2
    startup = seen.pending_s if is_kept else start
    if seen.keeps_work:
        return seen.steps_for(at_risk - max(0, seen.step_s - startup), start) <= left - (1 if is_kept else 2)
    until_saved = 0 if is_kept else seen.overhead_s + seen.save_every_s
    return seen.steps_for(at_risk, start + until_saved) <= left - (1 if is_kept else 2)


def forced_words(seen: Observation) -> str:
    """Why time leaves on-demand alone."""
    return (
        f"the deadline is in {hours_words(seen.left_s or 0)}, and on-demand needs"
        f" {hours_words(seen.work_s + seen.start_max_s)} from now: no time is left to lose"
    )


# Slack pacing, the policy of a job with a deadline: restarts are a budget of slack.
#
# The shorter the slack, the longer-lived spot must seem before on-demand is left; and waiting keeps a small reserve. In
# hours, with w work left, T time left, d the overhead of a restart, g the step, K the on-demand price divided by the
# spot price, `age` the length of the present up-run with this step, and U, n the hours and number of up-runs that have
# ended since the job began:
#
#     slack = T - w - d        R = min(0.10, 2 d) w + 2.5 g        m = (U + 9 h) / (n + 3)
#     gate  = 5 d K / (K - 1) (sqrt(2.5 R / slack) - 1)            with sqrt(50) where slack <= 0.05 R
#     spot up:    on spot or idle: spot;    on on-demand: spot if age + m / 3 >= gate, else on-demand
#     spot down:  on on-demand: on-demand;  idle: wait if slack > R, else on-demand
#
# Where spot costs as much as on-demand, on-demand is used. `m` is the mean up-run, shrunk towards three runs of three
# hours. With several zones the cheapest that is up is launched, the cheapest that passes the gate is returned to, and a
# running spot machine is never moved. Source: own derivation, compared with published policies on recorded traces. It
# runs inside the shield.


RESERVE_SHARE_MAX: Final = 0.10
RESERVE_STEPS: Final = 2.5
PRIOR_UP_S: Final = 9 * HOUR_S
PRIOR_RUNS: Final = 3
ROOT_MAX: Final = math.sqrt(50)


def slack_pacing(seen: Observation) -> Choice:
    """Wait above a small reserve, and return to spot once it seems to last."""
    if seen.left_s is None or seen.on_demand is None:
        return ceiling(seen)
    held = seen.held_spot()
    if held is not None:
        return spot(held, "spot is up")
    worth = sorted((z for z in seen.zones if z.is_up and z.price < seen.on_demand), key=cheapest_first)
    slack, kept = slack_s(seen), reserve_s(seen)
    figures = f"slack is {hours_words(slack)} beside a reserve of {hours_words(kept)}"
    if seen.holds is Action.ON_DEMAND:
        return _on_on_demand(seen, worth, figures)
    if worth:
        return spot(worth[0], "spot is up")
    if any(zone.is_up for zone in seen.zones):
        return on_demand("spot costs no less than on-demand")
    return wait(f"waits for spot: {figures}") if slack > kept else on_demand(f"spot is down: {figures}")


def _on_on_demand(seen: Observation, worth: list[Zone], figures: str) -> Choice:
    if not worth:
        return on_demand(f"stays on on-demand while spot is down: {figures}")
    for zone in worth:
        if zone.up_s + mean_run_s(zone) / 3 >= gate_s(seen, zone):
            return spot(zone, f"goes back to spot, up for {hours_words(zone.up_s)}: {figures}")
    first = worth[0]
    asked = max(0.0, gate_s(seen, first) - mean_run_s(first) / 3)
    return on_demand(
        f"stays on on-demand: spot has been up {hours_words(first.up_s)}, asks for {hours_words(asked)},"
        f" because {figures}"
    )


def slack_s(seen: Observation) -> int:
    """Return the time that may still be lost."""
    return (seen.left_s or 0) - seen.work_s - seen.overhead_s


def reserve_s(seen: Observation) -> float:
    """Return R: slack below which a job without a machine does not wait."""
    share = min(RESERVE_SHARE_MAX, 2 * seen.overhead_s / HOUR_S)
    return share * seen.work_s + RESERVE_STEPS * seen.step_s


def mean_run_s(zone: Zone) -> float:
    """Return m: the mean length of an up-run, shrunk towards a prior."""
    return (zone.past_up_s + PRIOR_UP_S) / (zone.past_runs + PRIOR_RUNS)


def gate_s(seen: Observation, zone: Zone) -> float:
    """Return how long an up-run must promise to be before on-demand is left for it."""
    saved = (seen.on_demand or 0) - zone.price
    if saved <= 0:
        return math.inf
    slack, kept = slack_s(seen), reserve_s(seen)
    root = ROOT_MAX if slack <= 0.05 * kept else math.sqrt(2.5 * kept / slack)
    return 5 * seen.overhead_s * (seen.on_demand or 0) / saved * (root - 1)


# Slack reserve: wait for spot while more than a reserve of slack is left.
#
# With w work left, T time left, overhead d and step g: spot whenever it is up; else stay on on-demand if on it; else
# wait while `T > w + d + 2 g + share * w`. Source: the rule that LEVI found (arXiv 2605.09764), with `share` 0.1;
# scaled by the overhead, `share` is `2 d` with d in hours. It is meant to run inside the shield.


TENTH = Fraction(1, 10)


def slack_reserve(seen: Observation) -> Choice:
    """Keep a reserve of two overheads (in hours) per hour of work left."""
    return _with_reserve(seen, Fraction(2 * seen.overhead_s, HOUR_S))


def slack_reserve_tenth(seen: Observation) -> Choice:
    """Keep a reserve of a tenth of the work left."""
    return _with_reserve(seen, TENTH)


def _with_reserve(seen: Observation, share: Fraction) -> Choice:
    zone = seen.spot_now()
    if seen.left_s is None:
        return ceiling(seen)
    if zone is not None:
        return spot(zone, "spot is up")
    if seen.holds is Action.ON_DEMAND:
        return on_demand("stays on on-demand while spot is down")
    slack = seen.left_s - seen.work_s - seen.overhead_s
    reserve = 2 * seen.step_s + share * seen.work_s
    figures = f"slack is {hours_words(slack)}, the reserve is {hours_words(float(reserve))}"
    return wait(f"waits for spot: {figures}") if slack > reserve else on_demand(f"spot is down: {figures}")


# Uniform Progress: keep the done work on the straight line from the beginning to the deadline.
#
# Source: "Can't Be Late" (Wu et al., NSDI 2024). With `t` elapsed, `W` the whole work, `D` the whole time and `d` the
# overhead, a job is behind while `done < t W / D`. Behind: spot if it is up, else on-demand. Ahead: spot, or wait.
# The form of the paper stays on on-demand until the job is ahead by two overheads; the eager form returns to spot as
# soon as it is up.


def uniform_progress(seen: Observation) -> Choice:
    """Follow the line, and leave on-demand only once the job is ahead by two overheads."""
    return _with_line(seen, returns_eagerly=False)


def uniform_progress_eager(seen: Observation) -> Choice:
    """Follow the line, and leave on-demand as soon as spot is up."""
    return _with_line(seen, returns_eagerly=True)


def _with_line(seen: Observation, *, returns_eagerly: bool) -> Choice:
    if seen.left_s is None:
        return ceiling(seen)
    zone, whole = seen.spot_now(), seen.elapsed_s + max(0, seen.left_s)
    ahead = seen.done_s * whole - seen.elapsed_s * seen.task_s
    line = f"{hours_words(abs(ahead) / max(1, whole))} of work {'behind' if ahead < 0 else 'ahead of'} a steady pace"
    if zone is not None:
        base = spot(zone, f"spot is up; {line}")
    else:
        base = on_demand(f"spot is down; {line}") if ahead < 0 else wait(f"spot is down; {line}")
    if seen.holds is Action.ON_DEMAND:
        short = (seen.elapsed_s + 2 * seen.overhead_s) * seen.task_s - seen.done_s * whole
        if zone is None or (short >= 0 and not returns_eagerly):
            base = on_demand(f"stays on on-demand: {line}")
    return with_safety(seen, base)


# The policies by the names that users write.


WITHOUT_DEADLINE: Final = "ceiling"
WITH_DEADLINE: Final = "slack-pacing"
POLICIES: Final[Mapping[str, Rule]] = {
    WITHOUT_DEADLINE: ceiling,
    "greedy": greedy,
    "uniform-progress": uniform_progress,
    "uniform-progress-eager": uniform_progress_eager,
    "slack-reserve": slack_reserve,
    "slack-reserve-tenth": slack_reserve_tenth,
    WITH_DEADLINE: slack_pacing,
    "on-demand": always_on_demand,
}


def choose(name: str, seen: Observation) -> Choice:
    """Return what the policy of this name chooses, inside the shield where there is a deadline."""
    chosen = shielded(POLICIES[name], seen)
    if chosen.action is not Action.ON_DEMAND or seen.on_demand is not None:
        return chosen
    zone = seen.spot_now()
    why = f"{chosen.sentence}; no on-demand machine may be used"
    return wait(why) if zone is None else spot(zone, why)
