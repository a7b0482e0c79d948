"""Several machines that are bought, shown and ended as one (`Power.GANG`)."""

from __future__ import annotations

import shlex
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final

from spotd_providers.contract.errors import NoCapacity, OfferGone, ProviderError, QuotaExceeded, RequestRejected
from spotd_providers.contract.provider import ReplacesMembers, StartsGangs
from spotd_providers.contract.values import Instance, InstanceState, LaunchRequest, MicroUsdPerHour, Offer, Power
from spotd_providers.testkit.clock import until
from spotd_providers.testkit.harness import Harness, NotApplicable
from spotd_providers.testkit.suite import BehaviourFailed, attempt, behaviour, expect, offers_of, require_refusal

NODES: Final = 2
FAR_TOO_MANY: Final = 5000
REFUSALS: Final = (NoCapacity, OfferGone, QuotaExceeded, RequestRejected)
_SCRIPT: Final = """#!/bin/sh
echo "0000000001 000600" >machine-lease
echo "$$ $SPOTD_NODE_RANK $SPOTD_NODE_ADDRESS $SPOTD_NODE_ROUND" >@FOLDER@/new.$$
mv @FOLDER@/new.$$ @FOLDER@/place.$$
exec sleep 1000
"""


def gang_of(offer: Offer, nodes: int) -> Offer:
    """Return the offer of so many such machines as one."""
    price = offer.on_demand_price
    return replace(
        offer,
        nodes=nodes,
        gpu_count=offer.gpu_count * nodes,
        gpu_price=MicroUsdPerHour(offer.gpu_price * nodes),
        on_demand_price=None if price is None else MicroUsdPerHour(price * nodes),
    )


def _require_gangs(h: Harness) -> None:
    capability = h.provider.capabilities[Power.GANG]
    if not capability.available:
        raise NotApplicable(capability.reason)


async def _bought(h: Harness) -> tuple[LaunchRequest, Instance, Path]:
    """Buy two machines as one by the first offer of which there are as many; return where they note their places."""
    _require_gangs(h)
    folder = h.folder / "places"
    folder.mkdir()
    script = _SCRIPT.replace("@FOLDER@", shlex.quote(str(folder)))
    for offer in await offers_of(h, NODES):
        request = h.request(gang_of(offer, NODES), start_script=script)
        outcome = await attempt(h, partial(h.provider.launch, request))
        if isinstance(outcome, NoCapacity):
            expect(not h.live(request.key), "a refused launch of two machines left one")
            continue
        if isinstance(outcome, Exception):
            raise BehaviourFailed(f"two machines at once raise {outcome!r}") from outcome
        await h.settle()
        found = await h.provider.find(request.key)
        expect(len(found) == 1, f"two machines that were bought as one are shown as {found!r}")
        return request, found[0], folder
    raise BehaviourFailed("no offer is there for two machines at once, though the power is declared")


def _places(folder: Path) -> list[list[str]]:
    return sorted((file.read_text().split() for file in folder.glob("place.*")), key=lambda words: words[1:])


@behaviour()
async def several_machines_are_one_row_at_the_price_of_all(h: Harness) -> None:
    """Machines that are bought as one are one row with one key, at the price of all, in find and in the list."""
    request, instance, _ = await _bought(h)
    expect(instance.key == request.key, f"its key is {instance.key!r}")
    expect(instance.price in (None, request.offer.gpu_price), f"its price is {instance.price!r}")
    listing = await h.provider.instances()
    rows = [one for one in listing.instances if one.key == request.key]
    expect(listing.complete and len(rows) == 1, f"the list shows {rows!r}, complete: {listing.complete}")
    expect(rows[0].ref == instance.ref, f"the list names it {rows[0].ref}, and the search {instance.ref}")


@behaviour()
async def several_machines_know_their_places_and_end_as_one(h: Harness) -> None:
    """Each of them runs the start script once, with a rank of its own and an address; one end is that of all."""
    request, instance, folder = await _bought(h)
    await until(lambda: len(_places(folder)) == NODES)
    places = _places(folder)
    expect([words[1:2] for words in places] == [["0"], ["1"]], f"their ranks are {places!r}")
    expect(all(len(words) == 3 for words in places), f"a machine has no address: {places!r}")
    await h.provider.terminate(instance.ref)
    await h.settle()
    await until(lambda: not any(_sleeps(words[0]) for words in places))
    expect(not h.live(request.key), "a machine of them outlives the end of all")
    left = [one for one in await h.provider.find(request.key) if one.state is not InstanceState.GONE]
    expect(not left, f"after their end they are shown as {left!r}")
    await h.provider.terminate(instance.ref)
    expect(len(_places(folder)) == NODES, "one of them was started twice")


@behaviour()
async def a_machine_of_several_is_replaced_once_and_the_others_stay(h: Harness) -> None:
    """One is replaced: it is ended, another one begins in its place, once for each number, and no other is touched."""
    provider = _replaces(h)
    request, instance, folder = await _bought(h)
    await until(lambda: len(_places(folder)) == NODES)
    first, second = (words[0] for words in _places(folder))
    for _ in range(3):
        await provider.replace_members(request, instance.ref, [1], 4)
    await until(lambda: len(_places(folder)) == NODES + 1)
    places = _places(folder)
    fresh = next(words for words in places if words[0] not in (first, second))
    expect(fresh[1] == "1" and fresh[-1] == "4" and len(fresh) == 4, f"the new one's place is {fresh!r}")
    expect(_sleeps(first) and _sleeps(fresh[0]), "one of the machines that take part has ended")
    expect(not _sleeps(second), "the machine that was replaced lives on")
    rows = [one for one in (await h.provider.instances()).instances if one.key == request.key]
    expect(len(rows) == 1 and rows[0].ref == instance.ref, f"the list shows {rows!r}")
    expect(rows[0].price in (None, request.offer.gpu_price), f"the price of all is {rows[0].price!r} now")
    await _require_end_of_all(h, instance, [words[0] for words in places])
    refused = await attempt(h, partial(provider.replace_members, request, instance.ref, [1], 5))
    expect(isinstance(refused, ProviderError), "a machine of several that were ended was replaced")
    await h.settle()
    expect(len(_places(folder)) == NODES + 1 and not h.live(request.key), "a machine began after the end of all")


@behaviour()
async def a_machine_of_several_is_left_out_and_the_others_stay(h: Harness) -> None:
    """One is left out: it is ended and billed no more, and the end of all ends the others."""
    provider = _replaces(h)
    request, instance, folder = await _bought(h)
    await until(lambda: len(_places(folder)) == NODES)
    first, second = (words[0] for words in _places(folder))
    for _ in range(2):
        await provider.drop_members(instance.ref, [1])
    await until(lambda: not _sleeps(second))
    expect(_sleeps(first), "the machine that was to stay has ended")
    rows = [one for one in (await h.provider.instances()).instances if one.key == request.key]
    expect(len(rows) == 1 and rows[0].ref == instance.ref, f"the list shows {rows!r}")
    expect(rows[0].price in (None, request.offer.gpu_price // NODES), f"the price of one is {rows[0].price!r}")
    expect(rows[0].state is InstanceState.RUNNING and rows[0].notice_at is None, f"it is shown as {rows[0]!r}")
    await _require_end_of_all(h, instance, [first, second])


@behaviour()
async def the_first_machine_of_several_is_replaced_where_its_provider_says_so(h: Harness) -> None:
    """It is replaced or left out, and the row goes on; elsewhere a call that names it changes nothing."""
    provider = _replaces(h)
    request, instance, folder = await _bought(h)
    await until(lambda: len(_places(folder)) == NODES)
    first, second = (words[0] for words in _places(folder))
    if not h.plugin.traits(h.settings()).replaces_first:
        for call in (
            partial(provider.replace_members, request, instance.ref, [0], 1),
            partial(provider.drop_members, instance.ref, [0]),
        ):
            await require_refusal(h, call, *REFUSALS)
        expect(_sleeps(first) and _sleeps(second), "a refused call ended a machine")
        return
    for _ in range(2):
        await provider.replace_members(request, instance.ref, [0], 4)
    await until(lambda: len(_places(folder)) == NODES + 1)
    fresh = next(words for words in _places(folder) if words[0] not in (first, second))
    expect(fresh[1] == "0" and fresh[-1] == "4", f"the new one's place is {fresh!r}")
    expect(_sleeps(second) and not _sleeps(first), "another one was ended, or not the one that was replaced")
    await h.settle()
    rows = [one for one in (await h.provider.instances()).instances if one.key == request.key]
    expect(len(rows) == 1 and rows[0].ref == instance.ref, f"the list shows {rows!r}")
    expect(rows[0].state is InstanceState.RUNNING, f"it is shown as {rows[0]!r}")
    await provider.replace_members(request, instance.ref, [1], 5)
    await until(lambda: len(_places(folder)) == NODES + 2)
    third = next(words for words in _places(folder) if words[0] not in (first, second, fresh[0]))
    expect(third[1] == "1" and third[-1] == "5", f"the place of one that came after a new first one is {third!r}")
    for _ in range(2):
        await provider.drop_members(instance.ref, [0])
    await until(lambda: not _sleeps(fresh[0]))
    expect(_sleeps(third[0]) and not _sleeps(second), "one that was to stay has ended, or one that was replaced lives")
    await h.settle()
    rows = [one for one in (await h.provider.instances()).instances if one.key == request.key]
    expect(len(rows) == 1 and rows[0].ref == instance.ref, f"without the first one the list shows {rows!r}")
    expect(rows[0].state is InstanceState.RUNNING, f"without the first one it is shown as {rows[0]!r}")
    expect(rows[0].price in (None, request.offer.gpu_price // NODES), f"the price of one is {rows[0].price!r}")
    await _require_end_of_all(h, instance, [words[0] for words in _places(folder)])


def _replaces(h: Harness) -> ReplacesMembers:
    capability = h.provider.capabilities[Power.REPLACE]
    if not capability.available:
        raise NotApplicable(capability.reason)
    provider = h.provider
    if not isinstance(provider, ReplacesMembers):
        raise BehaviourFailed("it declares that it replaces machines, and does not")
    return provider


async def _require_end_of_all(h: Harness, instance: Instance, pids: list[str]) -> None:
    await h.provider.terminate(instance.ref)
    await h.settle()
    await until(lambda: not any(map(_sleeps, pids)))
    expect(not h.live(instance.key), "a machine of them outlives the end of all")


def _sleeps(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"sleep\0")
    except OSError:
        return False


@behaviour()
async def more_machines_than_there_are_is_none_at_all(h: Harness) -> None:
    """A launch of more machines at once than there are is a refusal that leaves none of them."""
    _require_gangs(h)
    provider = h.provider
    expect(isinstance(provider, StartsGangs) and provider.nodes_max > 1, "it starts one machine at most")
    for offer in await offers_of(h, NODES):
        request = h.request(gang_of(offer, FAR_TOO_MANY))
        await require_refusal(h, partial(provider.launch, request), *REFUSALS)
        expect(not h.live(request.key), "a refused launch of many machines left some")
        expect(not await provider.find(request.key), "what was refused is shown")
