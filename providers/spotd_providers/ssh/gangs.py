"""Several own hosts of one pool that carry one attempt: what their rows say together, and which hosts take part. Pure.

Each host keeps its own part under the same key, with the names of all hosts in the order of their ranks. So any part
that is found names the whole, even if its launch broke off. What a host that does not answer has is not known, and is
never taken for ended.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime

from spotd_providers.contract.values import Instance, InstanceRef, InstanceState, Loss, Offer
from spotd_providers.ssh.answers import HostFacts, MachineRow, offers_of, ref_of, without_doubles
from spotd_providers.ssh.settings import SshHost, SshSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class GangRow:
    """The parts of one attempt on several hosts, by rank; `silent` are hosts of it that did not answer."""

    key: str
    names: tuple[str, ...]
    parts: Mapping[int, MachineRow]
    silent: frozenset[str]

    @property
    def ref(self) -> InstanceRef:
        return ref_of(self.names[0], self.key)

    @property
    def host(self) -> SshHost:
        """The first host, or another one while that is not seen."""
        return self.parts[min(self.parts)].host


def with_gangs(rows: Iterable[MachineRow], silent: Iterable[str]) -> list[MachineRow | GangRow]:
    """Return the rows with the parts of each gang as one row."""
    alone: list[MachineRow | GangRow] = []
    parts: defaultdict[tuple[str, tuple[str, ...]], dict[int, MachineRow]] = defaultdict(dict)
    for row in rows:
        if (place := row.place) is None:
            alone.append(row)
        else:
            parts[row.key, place[1]].setdefault(place[0], row)
    gone = frozenset(silent)
    gangs = [GangRow(key=key, names=names, parts=found, silent=gone) for (key, names), found in parts.items()]
    return [*alone, *gangs]


def as_one(row: GangRow, parts: Mapping[int, Instance], now: datetime) -> Instance:
    """Return what the parts are together: they run while all do, and they are gone when each is proved to be."""
    nodes = len(row.names)
    hidden = [rank for rank in range(nodes) if rank not in parts and row.names[rank] in row.silent]
    absent = [rank for rank in range(nodes) if rank not in parts and rank not in hidden]

    def words(rank: int, what: str) -> str:
        return f"machine {rank + 1} of {nodes} on {row.names[rank]} {what}"

    first = parts.get(0)
    notices = [one.notice_at for one in parts.values() if one.notice_at is not None]
    whole = replace(first or parts[min(parts)], ref=row.ref, notice_at=min(notices, default=None))
    if all(one.state is InstanceState.GONE for one in parts.values()):
        if not hidden:
            return whole
        return replace(whole, state=InstanceState.UNKNOWN, detail=words(hidden[0], "does not answer"))
    if first is None:
        if 0 in hidden:
            return replace(whole, state=InstanceState.UNKNOWN, detail=words(0, "does not answer"))
        return replace(whole, state=InstanceState.PAUSED, loss=Loss.HOST_LOST, detail=words(0, "is gone"))
    if first.state is InstanceState.GONE:
        return replace(whole, state=InstanceState.PAUSED, detail="its end was ordered, and not all of it has ended")
    if first.state is not InstanceState.RUNNING:
        return whole
    lost = [rank for rank, one in sorted(parts.items()) if one.state is not InstanceState.RUNNING]
    if lost:
        detail = words(lost[0], "is lost, and all of them end")
        return replace(whole, notice_at=min([*notices, now]), detail=detail)
    if absent:
        return replace(whole, state=InstanceState.PENDING, detail=words(absent[0], "has not begun"))
    return replace(whole, detail=words(hidden[0], "does not answer")) if hidden else whole


def members_of(
    offer: Offer, first: SshHost, facts: Mapping[str, HostFacts], settings: SshSettings, now: datetime
) -> list[tuple[SshHost, Offer]]:
    """Return the hosts that could take part in a launch by this offer, with their own offers; the first one first.

    None of them costs more than the offer says of each: what was agreed is the price of all.
    """
    without_doubles(facts)
    found = []
    for host in settings.hosts:
        rows = offers_of(host, facts[host.name], settings, now)[0] if host.name in facts else []
        for one in rows:
            is_alike = (one.gpu, one.gpu_vram_mb) == (offer.gpu, offer.gpu_vram_mb)
            is_alike = is_alike and all(one.extra[name] == offer.extra[name] for name in ("variable", "count"))
            if is_alike and one.gpu_price * offer.nodes <= offer.gpu_price:
                found.append((host, one))
    return sorted(found, key=lambda pair: (pair[0].name != first.name, pair[1].gpu_price, pair[0].name))
