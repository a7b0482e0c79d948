"""Uniform Progress: keep the done work on the straight line from the beginning to the deadline.

Source: "Can't Be Late" (Wu et al., NSDI 2024). With `t` elapsed, `W` the whole work, `D` the whole time and `d` the
overhead, a job is behind while `done < t W / D`. Behind: spot if it is up, else on-demand. Ahead: spot, or wait. The
form of the paper stays on on-demand until the job is ahead by two overheads; the eager form returns to spot as soon as
it is up.
"""

from __future__ import annotations

from spotd.core.policies.baselines import ceiling, with_safety
from spotd.core.policies.observation import Action, Choice, Observation, hours_words, on_demand, spot, wait


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
