"""What is called on several own hosts of one pool together: the start of all, a change of some, the end of all.

What the first host keeps of them is changed before another one is started, so whatever runs is found by it, and only
while the first one runs. The end of all is ordered there first. So a start that comes later finds either that nothing
may be changed any more, or that it was ended already.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, Protocol, TypeVar

import anyio

from spotd_providers.contract.errors import NoCapacity, OutcomeUnknown, ProviderError, Unavailable
from spotd_providers.contract.provider import Clock
from spotd_providers.contract.values import Instance, InstanceRef, InstanceState, LaunchRequest, Offer
from spotd_providers.kit.calls import ask_each, rejected
from spotd_providers.kit.text import clean
from spotd_providers.ssh.answers import HostFacts, MachineRow, Part, Places, folder_of
from spotd_providers.ssh.gangs import GangRow, members_of, part_of
from spotd_providers.ssh.settings import SshHost, SshSettings

WHO: Final = "your host"
T = TypeVar("T")
Place = tuple[int, Places, str]
"""A rank, the places of all, and the address of another one of them."""


class HostCalls(Protocol):
    """What is called on one host."""

    async def facts(self, host: SshHost) -> HostFacts: ...

    async def begin(self, request: LaunchRequest, host: SshHost, offer: Offer, place: Place) -> MachineRow:
        """Start a machine; `OutcomeUnknown` where it may run."""
        ...

    async def end_on(self, host: SshHost, folder: str, meta: str = "") -> Sequence[MachineRow]:
        """End one machine; with `meta` one that is still on its way as well."""
        ...

    async def record(self, host: SshHost, folder: str, before: str, meta: str) -> None:
        """Change what a host keeps of a machine that runs, if it is what it was."""
        ...

    async def gang(self, ref: InstanceRef) -> GangRow | None: ...

    def state_of(self, row: GangRow) -> Instance | None: ...


class GangCalls:
    """The calls for several hosts that carry one attempt."""

    def __init__(self, calls: HostCalls, settings: SshSettings, clock: Clock) -> None:
        self._calls = calls
        self._settings = settings
        self._hosts = {host.name: host for host in settings.hosts}
        self._clock = clock

    async def buy(self, request: LaunchRequest, first: SshHost) -> Instance:
        """Start the job on as many hosts of the pool; what was started is undone unless all of them begin.

        The first one begins alone: a list that is read meanwhile shows it as one that waits for the others.
        """
        offer, key = request.offer, request.key
        free = await self._free(offer, first)
        if len(free) < offer.nodes or free[0][0] is not first:
            raise self._too_few(len(free), offer.nodes, offer, first)
        members = free[: offer.nodes]
        places = Places(parts=tuple((host.name, 0) for host, _ in members))
        outcomes: dict[int, MachineRow | ProviderError] = {}

        async def begin(rank: int) -> None:
            host, own = members[rank]
            near = members[1 if rank == 0 else 0][0]
            outcomes[rank] = await _outcome(self._calls.begin(request, host, own, (rank, places, _address(near))))

        await begin(0)
        if isinstance(outcomes[0], MachineRow):
            await _side_by_side(range(1, offer.nodes), begin)
        rows = {rank: one for rank, one in outcomes.items() if isinstance(one, MachineRow)}
        errors = [one for one in outcomes.values() if isinstance(one, ProviderError)]
        if not errors:
            row = GangRow(key=key, places=places, parts=rows, outdated=(), silent=frozenset())
            found = self._calls.state_of(row)
            if found is not None and found.state is not InstanceState.GONE:
                return found
            errors = [OutcomeUnknown(f"the answers of {', '.join(places.names)} cannot be read", key=key)]
        await self._undo_parts(request, [members[rank][0] for rank in sorted(rows, reverse=True)])
        raise next((one for one in errors if isinstance(one, OutcomeUnknown)), errors[0])

    async def _undo_parts(self, request: LaunchRequest, hosts: Sequence[SshHost]) -> None:
        """End what was started of a gang that is not whole.

        Raises:
            OutcomeUnknown: some of it may live on; a search finds it by its key.
        """
        for host in hosts:
            try:
                await self._calls.end_on(host, request.key)
            except ProviderError as exc:
                raise OutcomeUnknown(f"{exc}, so a part of it may run on {host.name}", key=request.key) from exc

    async def _free(self, offer: Offer, first: SshHost) -> list[tuple[SshHost, Offer]]:
        facts, _ = await ask_each(self._settings.pool_of(first), lambda one: one.name, self._calls.facts)
        return members_of(offer, first, facts, self._settings, self._clock.now())

    def _too_few(self, count: int, wanted: int, offer: Offer, first: SshHost) -> NoCapacity:
        where = f"pool {first.pool}" if first.pool else f"{first.name}, which has no pool,"
        return NoCapacity(f"{count} hosts of {where} have {offer.gpu} free at that price, not {wanted}")

    # Some are replaced, or left out.

    async def replace(self, request: LaunchRequest, ref: InstanceRef, ranks: Sequence[int], number: int) -> None:
        """Start others in the places of these, on hosts of the pool that have room, or on their own hosts again.

        A host that does not answer may have its machine on: that one is ended once it answers, and has no place.
        """
        row = await self._running(ref, ranks)
        parts = row.places.parts
        if left_out := [rank for rank in ranks if not parts[rank][0]]:
            raise rejected(WHO, "ranks", f"{left_out} of {row.key} were left out")
        lost = [r for r in ranks if not (parts[r][1] >= number and r in row.parts and _runs(row.parts[r]))]
        if unknown := [parts[r][0] for r in lost if parts[r][1] >= number and self._is_silent(row, parts[r][0])]:
            raise Unavailable(f"{unknown[0]} does not answer, so what was started there may run")
        if not lost:
            return
        # One that did not begin in this round may still begin there.
        open_ = [rank for rank in lost if parts[rank][1] >= number and rank not in row.parts]
        silent = await self._end_parts(row, [parts[rank] for rank in lost if rank not in open_])
        first = row.parts[0].host
        used = {parts[rank][0] for rank in range(len(parts)) if rank not in lost}
        used |= {name for name, came in (*parts, *row.former) if came >= number}  # a folder is used once
        free = await self._free(request.offer, first)
        had = {name for name, _ in (*parts, *row.former)}
        others = [pair for pair in free if pair[0].name not in used]
        at_fault = {parts[rank][0] for rank in lost}
        others.sort(key=lambda pair: (pair[0].name in at_fault, pair[0].name in had, pair[1].gpu_price, pair[0].name))
        chosen = {rank: pair for rank in open_ for pair in free if pair[0].name == parts[rank][0]}
        await self._end_parts(row, [parts[rank] for rank in open_ if rank not in chosen])
        chosen |= dict(zip((rank for rank in lost if rank not in chosen), others, strict=False))
        if chosen:
            coming = {rank: (host.name, number) for rank, (host, _) in chosen.items()}
            places = await self._record(row, coming, [parts[rank] for rank in chosen if parts[rank][0] in silent])
            errors: list[ProviderError] = []

            async def begin(rank: int) -> None:
                host, own = chosen[rank]
                found = await _outcome(self._calls.begin(request, host, own, (rank, places, _address(first))))
                if isinstance(found, ProviderError):
                    errors.append(found)

            await _side_by_side(chosen, begin)
            for error in errors:
                if isinstance(error, OutcomeUnknown):
                    raise Unavailable(str(error)) from error
            if errors:
                raise errors[0]
        if len(chosen) < len(lost):
            raise self._too_few(len(chosen), len(lost), request.offer, first)

    async def drop(self, ref: InstanceRef, ranks: Sequence[int]) -> None:
        """Leave these out, and let the price be that of the others."""
        row = await self._running(ref, ranks)
        fresh = {rank: ("", 0) for rank in ranks if row.places.parts[rank][0]}
        if fresh:
            await self._record(row, fresh, [row.places.parts[rank] for rank in fresh])
        await self._end_parts(row, [*(row.places.parts[rank] for rank in fresh), *map(part_of, row.outdated)])

    async def _running(self, ref: InstanceRef, ranks: Sequence[int]) -> GangRow:
        row = await self._calls.gang(ref)
        if row is None:
            raise rejected(WHO, "ref", f"{clean(ref.instance_id)} is no machine of several")
        if not all(0 < rank < len(row.places.parts) for rank in ranks):
            raise rejected(WHO, "ranks", f"{row.key} has no such ranks beside the first: {list(ranks)}")
        whole = self._calls.state_of(row)
        if 0 not in row.parts and self._is_silent(row, row.names[0]):
            raise Unavailable(f"{row.names[0]}, which has the first machine, does not answer")
        if whole is None or whole.state is not InstanceState.RUNNING or whole.notice_at is not None:
            raise rejected(WHO, "ref", f"{row.key} does not run, or its owner wants a host back")
        return row

    def _is_silent(self, row: GangRow, name: str) -> bool:
        return name in row.silent or name not in self._hosts

    async def _end_parts(self, row: GangRow, parts: Iterable[Part]) -> set[str]:
        """End these where their hosts answer; return the hosts that do not."""
        silent = {name for name, _ in parts if self._is_silent(row, name)}
        for name, came in parts:
            if name in silent:
                continue
            meta = _end_meta((name, came), row.places)
            await self._calls.end_on(self._hosts[name], folder_of(row.key, came), meta)
        return silent

    async def _record(self, row: GangRow, changed: Mapping[int, Part], left: Sequence[Part]) -> Places:
        """Let the first host keep who takes part from now on, and the price of so many."""
        before = row.places
        parts = tuple(changed.get(rank, part) for rank, part in enumerate(before.parts))
        former = tuple(dict.fromkeys((*before.former, *map(part_of, row.outdated), *left)))
        places = replace(before, parts=parts, former=former, changes=before.changes + 1)
        first = row.parts[0]
        price, devices, name, rank, *_ = first.meta.split(" ")
        count_before, count = (sum(bool(name) for name in one.names) for one in (before, places))
        meta = f"{int(price) * count // count_before} {devices} {name} {rank} {places.words}"
        await self._calls.record(first.host, first.folder, first.meta, meta)
        return places

    # The end.

    async def end(self, row: GangRow) -> None:
        """Order the end of all: of the first one, then of what it says takes part, whether or not others answer.

        Raises:
            Unavailable: a part may live on.
        """
        errors: dict[str, ProviderError] = {}
        known = [row.places]
        name = row.names[0]
        if name in self._hosts:
            meta = _end_meta(row.places.parts[0], row.places)
            outcome = await _outcome(self._calls.end_on(self._hosts[name], row.key, meta))
            if isinstance(outcome, ProviderError):
                errors[name] = outcome
            else:
                known += [one.place[1] for one in outcome if one.place is not None]
        newest = max(known, key=lambda one: one.changes)
        found = (*newest.parts[1:], *newest.former, *row.places.parts[1:], *row.former)
        parts = [part for part in dict.fromkeys(found) if part[0]]

        async def end_one(part: Part) -> None:
            host, came = part
            call = self._calls.end_on(self._hosts[host], folder_of(row.key, came), _end_meta(part, newest))
            if isinstance(error := await _outcome(call), ProviderError):
                errors[host] = error

        await _side_by_side([part for part in parts if part[0] in self._hosts], end_one)
        missing = dict.fromkeys(one for one in (name, *(one for one, _ in parts)) if one not in self._hosts)
        if errors or missing:
            why = [f"{one} is not in the config" for one in missing] + [str(one) for one in errors.values()]
            raise Unavailable(f"a part of {clean(row.key)} may live on: {'; '.join(why)}")

    async def end_old_machines(self, rows: Iterable[GangRow]) -> None:
        """End machines whose place another one has, on hosts that answer again; what fails is done by a later list."""
        found = [one for row in rows if 0 in row.parts for one in row.outdated if one.lives and _is_old(one, row)]

        async def end(one: MachineRow) -> None:
            await _outcome(self._calls.end_on(one.host, one.folder))

        await _side_by_side(found, end)


def _is_old(one: MachineRow, row: GangRow) -> bool:
    """Whether its place is certainly another's: the first host may have been read before one came that is newer."""
    rank = 0 if one.place is None else one.place[0]
    name, came = row.places.parts[rank]
    return not name or part_of(one)[1] < came


def _runs(row: MachineRow) -> bool:
    return row.lives and row.words[5] != "1"


def _address(host: SshHost) -> str:
    return host.pool_address or host.address


def _end_meta(part: Part, places: Places) -> str:
    """Return what a host keeps of a machine that was ended before it began."""
    parts = places.parts if part in places.parts else (places.parts[0], part, *places.parts[2:])
    return f"0 - {part[0]} {parts.index(part)} {replace(places, parts=parts).word}"


async def _outcome(call: Awaitable[T]) -> T | ProviderError:
    try:
        return await call
    except ProviderError as exc:
        return exc


async def _side_by_side(items: Iterable[T], do: Callable[[T], Coroutine[Any, Any, None]]) -> None:
    async with anyio.create_task_group() as group:
        for item in items:
            group.start_soon(do, item)
