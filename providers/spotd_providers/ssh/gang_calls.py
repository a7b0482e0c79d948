"""What is called on several own hosts of one pool together: the start of all, a change of some, the end of all.

Before another one is started, the hosts of those that stay and run keep who takes part from then on, so any of them
names whatever runs. The lowest rank that stays has to answer: a call that is made again finds there what was chosen.
The end of all is ordered at each, and at whatever their answers name besides. So a start that comes later finds either
that nothing may be changed any more, or that it was ended already.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, Protocol, TypeVar

import anyio

from spotd_providers.contract.errors import NoCapacity, OfferGone, OutcomeUnknown, ProviderError, Unavailable
from spotd_providers.contract.provider import Clock
from spotd_providers.contract.values import Instance, InstanceRef, InstanceState, LaunchRequest, Offer
from spotd_providers.kit.calls import ask_each, rejected
from spotd_providers.kit.text import clean
from spotd_providers.ssh.answers import HostFacts, MachineRow, Part, Places, folder_of
from spotd_providers.ssh.gangs import GangRow, members_of, union_of
from spotd_providers.ssh.settings import SshHost, SshSettings

WHO: Final = "your host"
_ROUNDS_MAX: Final = 64
"""How often hosts may name further machines while all are ended."""
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
        places = Places(parts=tuple((host.name, 0) for host, _ in members), origin=first.name)
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
        if later := [name for name, came in parts if came > number]:
            raise Unavailable(f"the machine on {later[0]} is of a later round than {number}")
        lost = [r for r in ranks if not (parts[r][1] >= number and r in row.parts and row.parts[r].runs)]
        if unknown := [parts[r][0] for r in lost if parts[r][1] >= number and self._is_silent(row, parts[r][0])]:
            raise Unavailable(f"{unknown[0]} does not answer, so what was started there may run")
        if not lost:
            return
        near = self._keepers(row, lost)[0].host
        # One that did not begin in this round may still begin there.
        open_ = [rank for rank in lost if parts[rank][1] >= number and rank not in row.parts]
        silent = await self._end_parts(row, [parts[rank] for rank in lost if rank not in open_])
        used = {parts[rank][0] for rank in range(len(parts)) if rank not in lost}
        used |= {name for name, came in (*parts, *row.former) if came >= number}  # a folder is used once
        free = await self._free(request.offer, near)
        had = {name for name, _ in (*parts, *row.former)}
        others = [pair for pair in free if pair[0].name not in used]
        at_fault = {parts[rank][0] for rank in lost}
        others.sort(key=lambda pair: (pair[0].name in at_fault, pair[0].name in had, pair[1].gpu_price, pair[0].name))
        chosen = {rank: pair for rank in open_ for pair in free if pair[0].name == parts[rank][0]}
        await self._end_parts(row, [parts[rank] for rank in open_ if rank not in chosen])
        chosen |= dict(zip((rank for rank in lost if rank not in chosen), others, strict=False))
        left = [parts[rank] for rank in chosen if parts[rank][0] in silent]
        count, missing, refused = len(chosen), set(lost), dict[int, ProviderError]()
        while chosen:
            coming = {rank: (host.name, number) for rank, (host, _) in chosen.items()}
            row = await self._record(row, self._keepers(row, missing), coming, left)
            outcomes = await self._begin(request, row.places, chosen, near)
            begun = {rank: one for rank, one in outcomes.items() if isinstance(one, MachineRow)}
            row, missing = replace(row, parts={**row.parts, **begun}), missing - begun.keys()
            errors = {rank: one for rank, one in outcomes.items() if isinstance(one, ProviderError)}
            for error in errors.values():
                if isinstance(error, OutcomeUnknown):
                    raise Unavailable(str(error)) from error
                if not isinstance(error, (NoCapacity, OfferGone)):
                    raise error
            refused = {rank: one for rank, one in refused.items() if rank not in chosen} | errors
            others = [pair for pair in others if pair not in chosen.values()]
            # Nothing begins any more on a host that has refused, so another one may have the place in this round.
            chosen, left = dict(zip(errors, others, strict=False)), []
        if refused:
            raise next(iter(refused.values()))
        if count < len(lost):
            raise self._too_few(count, len(lost), request.offer, near)

    async def _begin(
        self, request: LaunchRequest, places: Places, chosen: Mapping[int, tuple[SshHost, Offer]], near: SshHost
    ) -> dict[int, MachineRow | ProviderError]:
        outcomes: dict[int, MachineRow | ProviderError] = {}

        async def begin(rank: int) -> None:
            host, own = chosen[rank]
            outcomes[rank] = await _outcome(self._calls.begin(request, host, own, (rank, places, _address(near))))

        await _side_by_side(chosen, begin)
        return outcomes

    async def drop(self, ref: InstanceRef, ranks: Sequence[int]) -> None:
        """Leave these out, and let the price be that of the others."""
        row = await self._running(ref, ranks)
        fresh = {rank: ("", 0) for rank in ranks if row.places.parts[rank][0]}
        left = [row.places.parts[rank] for rank in fresh]
        await self._record(row, self._keepers(row, ranks), fresh, left)
        await self._end_parts(row, [*left, *(one.part for one in row.outdated)])

    async def _running(self, ref: InstanceRef, ranks: Sequence[int]) -> GangRow:
        row = await self._calls.gang(ref)
        if row is None:
            raise rejected(WHO, "ref", f"{clean(ref.instance_id)} is no machine of several")
        if not all(0 <= rank < len(row.places.parts) for rank in ranks):
            raise rejected(WHO, "ranks", f"{row.key} has no such ranks: {list(ranks)}")
        whole = self._calls.state_of(row)
        if whole is None or whole.notice_at is not None:
            raise rejected(WHO, "ref", f"{row.key} cannot be read, or its owner wants a host back")
        return row

    def _keepers(self, row: GangRow, lost: Collection[int]) -> list[MachineRow]:
        """Return the machines that stay and run, whose hosts keep who takes part from now on.

        Raises:
            Unavailable: the host of the lowest rank that stays does not answer.
        """
        stay = [rank for rank, (name, _) in enumerate(row.places.parts) if name and rank not in lost]
        if stay and stay[0] not in row.parts and self._is_silent(row, row.names[stay[0]]):
            raise Unavailable(f"{row.names[stay[0]]}, which has the first machine that stays, does not answer")
        keepers = [row.parts[rank] for rank in stay if rank in row.parts and row.parts[rank].runs]
        if not keepers:
            raise rejected(WHO, "ref", f"none of the machines of {row.key} that stay runs")
        return keepers

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

    async def _record(
        self, row: GangRow, keepers: Sequence[MachineRow], changed: Mapping[int, Part], left: Sequence[Part]
    ) -> GangRow:
        """Let the hosts of these keep who takes part from now on, and the price of so many; return what is so then."""
        before = row.places
        parts = tuple(changed.get(rank, part) for rank, part in enumerate(before.parts))
        former = tuple(dict.fromkeys((*row.former, *left)))
        places = replace(before, parts=parts, former=former, changes=before.changes + 1)
        known, errors = dict(row.parts), list[ProviderError]()

        async def record(one: MachineRow) -> None:
            assert one.place is not None
            price, devices, name, rank, *_ = one.meta.split(" ")
            # Of a change that broke off some hosts have the new price already.
            count_before, count = (sum(map(bool, every.names)) for every in (one.place[1], places))
            meta = f"{int(price) * count // count_before} {devices} {name} {rank} {places.words}"
            outcome = await _outcome(self._calls.record(one.host, one.folder, one.meta, meta))
            if isinstance(outcome, ProviderError):
                errors.append(outcome)
            known[int(rank)] = replace(one, words=(*one.words[:2], meta, *one.words[3:]))

        await _side_by_side(keepers, record)
        if errors:
            raise errors[0]
        return replace(row, places=places, parts=known)

    # The end.

    async def end(self, row: GangRow) -> None:
        """Order the end of all that take part or are left over, and of what their hosts name besides.

        Raises:
            Unavailable: a part may live on.
        """
        errors: dict[str, ProviderError] = {}
        places = replace(row.places, former=row.former)
        asked: set[Part] = set()

        async def end_one(part: Part) -> None:
            host, came = part
            call = self._calls.end_on(self._hosts[host], folder_of(row.key, came), _end_meta(part, places))
            outcome = await _outcome(call)
            if isinstance(outcome, ProviderError):
                errors[host] = outcome
            else:
                records.extend(one.place[1] for one in outcome if one.place is not None)

        for _ in range(_ROUNDS_MAX):
            fresh = [part for part in (*places.parts, *places.former) if part[0] and part not in asked]
            if not fresh:
                break
            asked.update(fresh)
            records = [places]
            await _side_by_side([part for part in fresh if part[0] in self._hosts], end_one)
            places = union_of(records)
        else:
            errors[row.key] = Unavailable("its hosts name more and more machines")
        missing = dict.fromkeys(name for name, _ in asked if name not in self._hosts)
        if errors or missing:
            why = [f"{one} is not in the config" for one in missing] + [str(one) for one in errors.values()]
            raise Unavailable(f"a part of {clean(row.key)} may live on: {'; '.join(why)}")

    async def end_old_machines(self, rows: Iterable[GangRow]) -> None:
        """End machines whose place another one has, on hosts that answer again; what fails is done by a later list."""
        found = [one for row in rows for one in row.outdated if _is_left(one) and _is_old(one, row)]

        async def end(one: MachineRow) -> None:
            await _outcome(self._calls.end_on(one.host, one.folder))

        await _side_by_side(found, end)


def _is_old(one: MachineRow, row: GangRow) -> bool:
    """Whether its place is certainly another's: two that came in one round may be of two calls that did not agree."""
    rank = 0 if one.place is None else one.place[0]
    name, came = row.places.parts[rank]
    return not name or one.part[1] < came


def _is_left(row: MachineRow) -> bool:
    """Whether a process of it is there, or what it wrote."""
    return row.lives or not row.is_ended


def _address(host: SshHost) -> str:
    return host.pool_address or host.address


def _end_meta(part: Part, places: Places) -> str:
    """Return what a host keeps of a machine that was ended before it began."""
    rank = places.parts.index(part) if part in places.parts else 0
    return f"0 - {part[0]} {rank} {places.words}"


async def _outcome(call: Awaitable[T]) -> T | ProviderError:
    try:
        return await call
    except ProviderError as exc:
        return exc


async def _side_by_side(items: Iterable[T], do: Callable[[T], Coroutine[Any, Any, None]]) -> None:
    async with anyio.create_task_group() as group:
        for item in items:
            group.start_soon(do, item)
