"""Several own hosts of one pool that carry one attempt: what their rows say together, and which hosts take part. Pure.

Each host keeps its own part under the same key, with the names of all hosts in the order of their ranks. So any part
that is found names the whole, even if its launch broke off. What a host that does not answer has is not known, and is
never taken for ended.

Once one is replaced, what the first host keeps is what is true: which host has each place, since which round, and which
hosts may have a machine left whose place is another's. It is written before anything is started.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime

from spotd_providers.contract.values import Instance, InstanceRef, InstanceState, Offer
from spotd_providers.kit.gangs import ENDED, as_one
from spotd_providers.ssh.answers import HostFacts, MachineRow, Part, Places, offers_of, ref_of, without_doubles
from spotd_providers.ssh.settings import SshHost, SshSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class GangRow:
    """The parts of one attempt on several hosts, by rank; `silent` are hosts that did not answer.

    Attributes:
        places: by the first one, or by the newest of the others while that is not seen.
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
        return ref_of(self.names[0], self.key)

    @property
    def host(self) -> SshHost:
        """The first host, or another one while that is not seen."""
        return self.parts[min(self.parts)].host

    @property
    def former(self) -> tuple[Part, ...]:
        """Machines of it that may be there, beside those that have a place."""
        found = dict.fromkeys((*self.places.former, *map(part_of, self.outdated)))
        return tuple(part for part in found if part not in self.places.parts)


def part_of(row: MachineRow) -> Part:
    """Return which of several machines one is, as it was when it began."""
    assert row.place is not None
    rank, places = row.place
    return places.parts[rank]


def with_gangs(rows: Iterable[MachineRow], silent: Iterable[str]) -> list[MachineRow | GangRow]:
    """Return the rows with the parts of each gang as one row."""
    alone: list[MachineRow | GangRow] = []
    parts: defaultdict[InstanceRef, list[MachineRow]] = defaultdict(list)
    for row in rows:
        (alone if row.place is None else parts[row.ref]).append(row)
    gone = frozenset(silent)
    return [*alone, *(_gang(found, gone) for found in parts.values())]


def _gang(rows: Sequence[MachineRow], silent: frozenset[str]) -> GangRow:
    known = [row.place[1] for row in rows if row.place is not None]
    places = max(known, key=lambda one: (one.changes, max(came for _, came in one.parts)))
    parts: dict[int, MachineRow] = {}
    outdated = []
    for row in rows:
        part = part_of(row)
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
