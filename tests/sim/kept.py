"""Healthy ones of several machines that are kept while lost ones are replaced: what must be true of them."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Final

from spotd.core.domain.attempts import Attempt
from tests.sim.machines import Machine

if TYPE_CHECKING:
    from tests.sim.run import Result

START_MAX: Final = timedelta(minutes=20)
KEPT_BEYOND: Final = timedelta(minutes=1)
"""How much longer than its daemon the first machine waits."""


def note_round(m: Machine, item: Attempt) -> None:
    """Its grant names the next round: the machines that it is said to have are those that its provider has."""
    members = item.members
    if members is None:
        return
    said = {rank for rank, came in enumerate(members.since) if came is not None}
    there = set(range(len(members.since))) - m.dropped
    if said != there:
        m.odd_calls.append(f"round {members.round} is said to have {sorted(said)}, and there are {sorted(there)}")
    wrong = {rank: came for rank, came in enumerate(members.since) if came and m.came.get(rank) != came}
    if wrong:
        m.odd_calls.append(f"round {members.round} names machines that never came: {wrong}")
    if members.lost:
        m.odd_calls.append(f"round {members.round} begins without {members.lost}")


def kept_machines(result: Result) -> Iterator[str]:
    """Only lost ones are replaced or left out, a round begins whole, and no wait is longer than its job allows."""
    for cloud in result.clouds:
        for m in cloud.machines.values():
            for odd in m.odd_calls:
                yield f"of {m.key} {odd}"
            for since, over in m.waits_kept:
                # Those that wait for another first one are bounded by their daemon, or as at a start.
                most = None if m.task.keeps is None else m.task.keeps + (START_MAX if m.label else timedelta(0))
                if most is not None and over - since > most:
                    yield f"{m.key} was kept from {since} to {over}, {most} is the most"
            if m.kept_at is not None and m.alive:
                yield f"{m.key} is kept since {m.kept_at}"


def was_kept(m: Machine, at: datetime) -> bool:
    """Whether the others waited then for another machine in the place of a lost one, by what was last read of them."""
    if m.said:
        return True  # it was outbid meanwhile, and did not come up again
    if m.is_over_unheard or (m.first_lost_at is not None and m.first_lost_at <= at):
        return True
    waits = m.waits_kept if m.kept_at is None else [*m.waits_kept, (m.kept_at, at)]
    return any(since <= at <= over for since, over in waits)
