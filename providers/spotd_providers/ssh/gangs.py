"""Several own hosts of one pool that carry one attempt: what their rows say together, and which hosts take part. Pure.

Each host keeps its own part under the same key, with the names of all hosts in the order of their ranks. So any part
that is found names the whole, even if its launch broke off. What a host that does not answer has is not known, and is
never taken for ended.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime

from spotd_providers.contract.values import Instance, InstanceRef, Offer
from spotd_providers.kit.gangs import as_one
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


def whole_of(row: GangRow, parts: Mapping[int, Instance], now: datetime) -> Instance:
    """Return what the parts are together."""
    hidden = {rank for rank, name in enumerate(row.names) if rank not in parts and name in row.silent}
    return as_one(parts, [f"on {name}" for name in row.names], row.ref, now, hidden=hidden)


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
