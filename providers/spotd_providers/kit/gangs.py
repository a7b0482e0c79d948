"""Several machines that were bought as one: what their rows say together. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Final

from spotd_providers.contract.values import Billing, Instance, InstanceRef, InstanceState, Loss

ENDED: Final = frozenset({InstanceState.ENDING, InstanceState.GONE})
_LOST: Final = ENDED | {InstanceState.PAUSED}
_TAKEN: Final = frozenset({Loss.PREEMPTED, Loss.OUTBID})


def as_one(
    parts: Mapping[int, Instance],
    names: Sequence[str],
    ref: InstanceRef,
    now: datetime,
    *,
    hidden: Collection[int] = (),
    without: Collection[int] = (),
    ends_with_one: bool = True,
) -> Instance:
    """Return what the parts are together: they run while the first does, and they are gone when each is proved to be.

    Where the loss of one is judged by their owner, they run while any of them does.

    A provider may bill nothing for a machine that it took back: all of them count as taken once each was.

    Args:
        parts: the machines that are known, by rank; at least one.
        names: what a user reads of each machine, by rank: `on titan`.
        hidden: ranks of which nothing can be known now, which are never taken for ended.
        without: ranks that are no part any more, or to which another machine comes.
        ends_with_one: the loss of one is the end of all; else their owner judges it.
    """
    nodes = len(names)
    absent = [rank for rank in range(nodes) if rank not in parts and rank not in hidden and rank not in without]

    def words(rank: int, what: str) -> str:
        return f"machine {rank + 1} of {nodes} {names[rank]} {what}".replace("  ", " ")

    lead = 0
    if not ends_with_one:
        placed = [rank for rank in range(nodes) if rank not in without]
        running = [rank for rank in placed if rank in parts and parts[rank].state is InstanceState.RUNNING]
        lead = next(iter([*running, *placed]), 0)
    first = parts.get(lead)
    notices = [one.notice_at for one in parts.values() if one.notice_at is not None]
    whole = replace(first or parts[min(parts)], ref=ref, notice_at=min(notices, default=None))
    if any(one.billing is Billing.FULL for one in parts.values()):
        whole = replace(whole, billing=Billing.FULL)
    if all(one.state in ENDED for one in parts.values()):
        if hidden:
            return replace(whole, state=InstanceState.UNKNOWN, detail=words(min(hidden), "is not shown now"))
        return _when_over(whole, list(parts.values()))
    if hidden and not ends_with_one and (first is None or first.state is not InstanceState.RUNNING):
        return replace(whole, state=InstanceState.UNKNOWN, detail=words(min(hidden), "is not shown now"))
    if first is None:
        if lead in hidden:
            return replace(whole, state=InstanceState.UNKNOWN, detail=words(lead, "is not shown now"))
        return replace(whole, state=InstanceState.PAUSED, loss=Loss.HOST_LOST, detail=words(lead, "is gone"))
    if first.state in ENDED:
        detail = words(lead, "has ended, and not all of them have")
        return replace(whole, state=InstanceState.PAUSED, ended_at=None, detail=detail)
    if first.state is InstanceState.PENDING and any(one.state is InstanceState.RUNNING for one in parts.values()):
        return replace(whole, state=InstanceState.RUNNING, detail=words(0, "starts"))  # as others are billed already
    lost = [rank for rank, one in sorted(parts.items()) if one.state in _LOST]
    if not ends_with_one and 0 in absent:
        lost, absent = sorted({0, *lost}), [rank for rank in absent if rank]  # it begins before the others
    if lost and first.state is InstanceState.RUNNING and not ends_with_one:
        return replace(whole, detail=words(lost[0], "is lost"))
    if lost and first.state is InstanceState.RUNNING:
        detail = words(lost[0], "is lost, and all of them end")
        return replace(whole, notice_at=min([*notices, now]), detail=detail)
    if absent and first.state is InstanceState.RUNNING:
        return replace(whole, state=InstanceState.PENDING, detail=words(absent[0], "has not begun"))
    if first.state is InstanceState.RUNNING and hidden:
        return replace(whole, detail=words(min(hidden), "is not shown now"))
    return whole


def _when_over(whole: Instance, parts: Sequence[Instance]) -> Instance:
    state = InstanceState.GONE if all(one.state is InstanceState.GONE for one in parts) else InstanceState.ENDING
    ends = [one.ended_at for one in parts if one.ended_at is not None]
    is_partly_taken = whole.loss in _TAKEN and any(one.loss not in _TAKEN for one in parts)
    loss = Loss.HOST_LOST if is_partly_taken else whole.loss
    return replace(whole, state=state, loss=loss, ended_at=max(ends) if len(ends) == len(parts) else None)
