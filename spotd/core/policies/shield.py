"""The one-step shield: no choice of a policy can make a job late that could still be in time.

Theory. With w work left, start-up d, step g, L whole steps left and `n(w) = ceil((w + d) / g)` steps that w takes on a
machine that is started now, on-demand that starts now is in time while `n(w) <= L`. A choice is let through only if
on-demand is still in time after the worst that the step can bring: nothing is gained by waiting; a spot machine that is
kept works for `g - pending` and is gone then; one that is launched works for `g - d` and is gone then. By induction a
job that could be in time at its start is in time at its end, whatever the policy inside chooses. A machine that is
already on on-demand, and a start that was not feasible, always lead to on-demand.

Where a preemption loses work, the worst step gains nothing and loses what is not saved. A spot machine that would have
to be left before its first save is not launched at all: it would only cost. The boot time that counts here is an upper
quantile of the measured ones.
"""

from __future__ import annotations

from spotd.core.policies.observation import Action, Choice, Observation, Rule, hours_words, on_demand, spot


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
