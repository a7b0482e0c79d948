"""Simple policies: those without a deadline, and the baselines of the literature."""

from __future__ import annotations

from spotd.core.policies.observation import Action, Choice, Observation, hours_words, on_demand, spot, wait


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
