"""Several own hosts of one pool that carry one attempt: what their rows say together, and which hosts take part. Pure.

Each host keeps its own part under the same key, with the names of all hosts in the order of their ranks. So any part
that is found names the whole, even if its launch broke off. What a host that does not answer has is not known, and is
never taken for ended.

Once one is replaced, every host of the others keeps which host has each place, since which round, and which hosts may
have a machine left whose place is another's. It is written before anything is started. None of these records is above
the others, since any host may be lost with its own: of each place the newest round counts, whichever host says it, and
what is left over is what any of them names (`union_of`). So an old record adds nothing, and two that differ agree once
both are seen.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime

from spotd_providers.contract.values import Instance, InstanceRef, InstanceState, Loss, Offer
from spotd_providers.kit.gangs import ENDED, as_one
from spotd_providers.ssh.answers import HostFacts, MachineRow, Part, Places, offers_of, ref_of, without_doubles
from spotd_providers.ssh.settings import SshHost, SshSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class GangRow:
    """The parts of one attempt on several hosts, by rank; `silent` are hosts that did not answer.

    Attributes:
        places: by all parts that are seen.
        outdated: machines of it whose place another one has, or none.
    """

    key: str
    places: Places
    parts: Mapping[int, MachineRow]
    outdated: tuple[MachineRow, ...]
    silent: frozenset[str]

    @property
    def names(self) -> tuple[str, ...]:
        """By rank; empty for one that is no part any more."""
        return self.places.names

    @property
    def ref(self) -> InstanceRef:
        return ref_of(self.places.origin, self.key)

    @property
    def speaker(self) -> MachineRow:
        """The first machine that runs, or else is seen."""
        found = [*(self.parts[rank] for rank in sorted(self.parts)), *self.outdated]
        return next((one for one in found if one.runs), found[0])

    @property
    def host(self) -> SshHost:
        return self.speaker.host

    @property
    def folder(self) -> str:
        return self.speaker.folder

    @property
    def former(self) -> tuple[Part, ...]:
        """Machines of it that may be there, beside those that have a place."""
        found = dict.fromkeys((*self.places.former, *(row.part for row in self.outdated)))
        return tuple(part for part in found if part not in self.places.parts)


def union_of(records: Iterable[Places]) -> Places:
    """Return what these say together: a place is left for good, else it is that of the machine that came last.

    Where two came in one round for one place, the record that was changed more often knows why.
    """
    known = list(records)
    count = max(len(one.parts) for one in known)
    parts = []
    for rank in range(count):
        claims = [(one.parts[rank], one.changes) for one in known if rank < len(one.parts)]
        parts.append(max(claims, key=lambda claim: (not claim[0][0], claim[0][1], claim[1], claim[0][0]))[0])
    former = dict.fromkeys(part for one in known for part in one.former)
    return Places(
        parts=tuple(parts),
        origin=known[0].origin,
        former=tuple(part for part in former if part not in parts),
        changes=max(one.changes for one in known),
    )


def with_gangs(rows: Iterable[MachineRow], silent: Iterable[str]) -> list[MachineRow | GangRow]:
    """Return the rows with the parts of each gang as one row."""
    alone: list[MachineRow | GangRow] = []
    parts: defaultdict[InstanceRef, list[MachineRow]] = defaultdict(list)
    for row in rows:
        (alone if row.place is None else parts[row.ref]).append(row)
    gone = frozenset(silent)
    return [*alone, *(_gang(found, gone) for found in parts.values())]


def _gang(rows: Sequence[MachineRow], silent: frozenset[str]) -> GangRow:
    places = union_of(row.place[1] for row in rows if row.place is not None)
    parts: dict[int, MachineRow] = {}
    outdated = []
    for row in rows:
        part = row.part
        if part in places.parts and places.parts.index(part) not in parts:
            parts[places.parts.index(part)] = row
        else:
            outdated.append(row)
    return GangRow(key=rows[0].key, places=places, parts=parts, outdated=tuple(outdated), silent=silent)


def whole_of(row: GangRow, parts: Mapping[int, Instance], outdated: Sequence[Instance], now: datetime) -> Instance:
    """Return what the parts are together, which are gone once each machine of theirs is proved to be."""
    absent = {rank: part for rank, part in enumerate(row.places.parts) if rank not in parts}
    hidden = {rank for rank, (name, _) in absent.items() if name in row.silent}
    comes = {rank for rank, (name, came) in absent.items() if came and name and rank not in hidden}
    without = comes | {rank for rank, (name, _) in absent.items() if not name}
    names = [f"on {name}" for name in row.names]
    if not parts:
        state = InstanceState.UNKNOWN if row.silent else InstanceState.PAUSED
        lost = replace(outdated[0], ref=row.ref, state=state, notice_at=None, ended_at=None)
        return replace(lost, loss=Loss.HOST_LOST, detail="none of its machines that are seen has a place")
    whole = as_one(parts, names, row.ref, now, hidden=hidden, without=without, ends_with_one=False)
    if comes and whole.state is InstanceState.RUNNING and not whole.detail:
        rank = min(comes)
        return replace(whole, detail=f"machine {rank + 1} of {len(names)} {names[rank]} has not begun")
    if whole.state in ENDED:
        if silent := [name for name, _ in row.former if name in row.silent]:
            return replace(whole, state=InstanceState.UNKNOWN, detail=f"its machine on {silent[0]} is not shown now")
        if any(one.state not in ENDED for one in outdated):
            return replace(whole, state=InstanceState.PAUSED, detail="a machine of it has not ended")
    return whole


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
