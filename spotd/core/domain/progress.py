"""For how long a job has shown no progress, as fresh heartbeats of its host show it.

Theory. Only what lies between two heartbeats that were read counts: a host that is silent, a store that does not answer
and a daemon that was off add nothing. Between them, less time counts than the host and the daemon have counted each,
and never more than a share of the span that is waited for. So a clock that is stepped, a computer that slept for hours
and a host that states nonsense each add a little at most, and a stall takes several heartbeats to be one.

What the host states can only make its own job stop, or keep it running, which its budget bounds.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Final

from spotd_jobs.spec.model import WatchdogPolicy

SHARE: Final = 5
"""What lies between two heartbeats counts as this part of a limit at the most."""
NOTHING: Final = timedelta(0)
RUN: Final = "run"
_WATCHED_PHASES: Final = frozenset({"setup", RUN})
"""While its code or its checkpoint arrives, or what it saved last is stored, no progress is asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostSample:
    """What one heartbeat states about progress.

    Attributes:
        up: since the start script began, by the host's own steady clock.
        printed: bytes of output so far.
        writes: how often its checkpoint folder was found changed.
        seen: what names the newest complete checkpoint on its disk; empty before the first.
        gpu_time: for how long the use of a GPU was read; `None` where no figure was to be had.
        gpu_busy: the use of the busiest GPU, summed over that time.
    """

    boot: int
    up: timedelta
    phase: str
    printed: int
    writes: int
    seen: str = ""
    gpu_time: timedelta | None = None
    gpu_busy: timedelta | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Watch:
    """What is known of an attempt's progress; kept with the attempt, so that no restart forgets it.

    Attributes:
        at: when the newest sample was read.
        quiet: for how long there was no new output, step or checkpoint.
        idle: for how long the busiest GPU was below the limit, without a break.
        idle_busy: its use, summed over that time.
        has_begun: its own work has begun: a GPU was used, or a checkpoint came.
        active: for how long it got on.
    """

    at: datetime
    sample: HostSample
    quiet: timedelta = NOTHING
    idle: timedelta = NOTHING
    idle_busy: timedelta = NOTHING
    has_begun: bool = False
    active: timedelta = NOTHING


def watched(before: Watch | None, sample: HostSample, rules: WatchdogPolicy, at: datetime) -> Watch:
    """Return what is known after a heartbeat that was read at this instant and never before."""
    if before is None:
        return Watch(at=at, sample=sample, has_begun=bool(sample.seen))
    last = before.sample
    if sample.boot != last.boot or sample.phase != last.phase or sample.phase not in _WATCHED_PHASES:
        # Another runner, or another part of its work: what it counts begins anew, and what is known stays.
        quiet = NOTHING if sample.phase != last.phase else before.quiet
        return replace(before, at=at, sample=sample, quiet=quiet, has_begun=before.has_begun or bool(sample.seen))
    span = max(NOTHING, min(sample.up - last.up, at - before.at))
    is_saving, is_new = sample.writes != last.writes, sample.seen not in {"", last.seen}
    gets_on = is_saving or is_new or sample.printed != last.printed
    now = replace(before, at=at, sample=sample, has_begun=before.has_begun or bool(sample.seen))
    if gets_on:
        now = replace(now, quiet=NOTHING, active=now.active + span)
    elif rules.no_progress is not None:
        now = replace(now, quiet=now.quiet + min(span, rules.no_progress / SHARE))
    return now if rules.min_gpu_util is None else _with_gpu(now, last, rules, span, is_saving=is_saving)


def _with_gpu(now: Watch, last: HostSample, rules: WatchdogPolicy, span: timedelta, *, is_saving: bool) -> Watch:
    """Count the time in which the GPUs were hardly used; without a figure, nothing is known of them."""
    sample, limit = now.sample, rules.min_gpu_util
    if limit is None or sample.gpu_time is None or last.gpu_time is None:
        return now
    read = min(sample.gpu_time - last.gpu_time, span)
    if read <= NOTHING:
        return now
    busy = max(NOTHING, min((sample.gpu_busy or NOTHING) - (last.gpu_busy or NOTHING), read))
    if busy * 100 >= read * limit:
        return replace(now, idle=NOTHING, idle_busy=NOTHING, has_begun=True)
    if is_saving:
        return now  # a job that writes a checkpoint needs no GPU for that
    counted = min(read, rules.window / SHARE)
    return replace(now, idle=now.idle + counted, idle_busy=now.idle_busy + busy * (counted / read))
