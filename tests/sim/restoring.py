"""A state that is put back to an older copy while machines, and what they saved, live on."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from spotd.core.domain.attempts import Attempt
from spotd.core.domain.intents import AttemptId, JobId
from spotd.core.domain.jobs import Job
from spotd.core.domain.world import World
from spotd.core.timeline import Anchor
from tests.sim.daemon import Daemon


@dataclass(frozen=True, kw_only=True)
class Backup:
    """A copy of the state database."""

    at: datetime
    world: World
    done: dict[JobId, Job]
    attempts: dict[AttemptId, Attempt]
    charges: int
    cancels: dict[JobId, datetime]
    anchor: Anchor | None
    off: timedelta


def backup_of(daemon: Daemon) -> Backup:
    told = daemon.told
    return Backup(
        at=daemon.true,
        world=daemon.world,
        done=dict(daemon.done),
        attempts={i: item for i, item in daemon.attempts_ever.items() if i not in told.forgotten},
        charges=len(told.charges),
        cancels=dict(told.cancels),
        anchor=daemon.anchor,
        off=daemon.off,
    )


def restore(daemon: Daemon, copy: Backup) -> frozenset[JobId]:
    """The process is gone and its state is the copy. Returns the jobs that the state never heard of.

    For the oracles: what a life that nobody remembers knew is no part of what the daemon had to know.
    """
    assert not daemon.up
    now, told = daemon.true, daemon.told
    lost = frozenset({*daemon.world.jobs, *daemon.done} - {*copy.world.jobs, *copy.done})
    for identity, item in daemon.attempts_ever.items():
        if identity in copy.attempts:
            daemon.remember(copy.attempts[identity])
            continue
        owner = copy.world.jobs.get(identity.job)
        told.forgotten[identity] = now
        if item.state.counts and (owner is None or owner.state.is_final or owner.cancel_requested):
            daemon.remember(replace(item, ended_at=now))  # nobody wants its machine any more
            told.unwanted[item.key] = now
    daemon.world = replace(copy.world, policy=daemon.world.policy)
    daemon.done = dict(copy.done)
    del told.charges[copy.charges :]
    told.cancels = dict(copy.cancels)
    told.sent = {identity: at for identity, at in told.sent.items() if at <= copy.at}
    told.lost_jobs |= lost
    told.restored.append((copy.at, now))
    daemon.anchor, daemon.off = copy.anchor, copy.off
    for cloud in daemon.clouds.values():
        for m in cloud.machines.values():
            if m.end_taken is not None and m.end_taken > copy.at:
                m.end_taken = None  # the answer was given to a life that nobody remembers
    for read in daemon.read.values():
        del read[next((i for i, (_, known) in enumerate(read) if known > copy.at), len(read)) :]
    return lost
