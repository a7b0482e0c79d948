"""What exists: all of ours, nothing of others', and never a wrong "there is none"."""

from __future__ import annotations

from datetime import timedelta
from functools import partial

from spotd_providers.contract.errors import ProviderError, Unavailable
from spotd_providers.contract.values import AttemptKey, InstanceState, Launched
from spotd_providers.testkit.expect import (
    BehaviourFailed,
    all_offers,
    an_offer,
    attempt,
    buy_machine,
    expect,
    the_machine,
)
from spotd_providers.testkit.faults import Call
from spotd_providers.testkit.harness import Harness
from spotd_providers.testkit.knobs import OddState
from spotd_providers.testkit.suite import behaviour


@behaviour()
async def an_unknown_key_finds_nothing(h: Harness) -> None:
    """Find of a key that was never used is empty, and the listing of an account without machines is too."""
    expect(not await h.provider.find(h.key()), "find returns a machine that was never made")
    listing = await h.provider.instances()
    expect(listing.complete and not listing.instances, f"{listing!r} for an account without machines")


@behaviour()
async def keys_that_begin_alike_are_distinguished(h: Harness) -> None:
    """Find of attempt 1 does not return attempt 10, nor the other way round."""
    first, tenth = AttemptKey(f"spotd-{h.install}-j0b-1"), AttemptKey(f"spotd-{h.install}-j0b-10")
    offers = sorted(await all_offers(h), key=lambda o: (o.gpu_price, o.offer_id))
    other = next((o for o in offers if o.pool != offers[0].pool), offers[0])
    await h.provider.launch(h.request(offers[0], tenth))
    await h.settle()
    expect(not await h.provider.find(first), "attempt 10 was taken for attempt 1")
    await h.provider.launch(h.request(other, first))
    await h.settle()
    for key in (first, tenth):
        expect((await the_machine(h, key)).key == key, "attempts 1 and 10 were mixed up")


@behaviour()
async def every_machine_is_listed_however_many(h: Harness) -> None:
    """A listing goes on to the last page."""
    keys = [h.key() for _ in range(60)]
    h.add_machines(keys)
    listing = await h.provider.instances()
    listed = {instance.key for instance in listing.instances}
    missing = set(keys) - listed
    expect(listing.complete, "a listing that went well is called incomplete")
    expect(not missing, f"{len(missing)} of 60 machines are missing")
    expect(len(listing.instances) == 60, f"{len(listing.instances)} machines are listed instead of 60")
    await the_machine(h, keys[-1])


@behaviour()
async def foreign_machines_are_never_shown_or_touched(h: Harness) -> None:
    """Machines without our install label are not listed, not found, and outlive everything we do."""
    foreign = set(h.add_foreign_machines())
    expect(foreign, "the harness made no foreign machine")
    key, instance = await buy_machine(h)
    listing = await h.provider.instances()
    expect([i.key for i in listing.instances] == [key], f"foreign machines are listed: {listing.instances!r}")
    labels = [m.label for m in h.machines() if m.machine_id in foreign and m.label]
    expect(any(label.startswith(f"spotd-{h.install}") for label in labels), "no foreign label begins like ours")
    for label in labels:
        expect(not await h.provider.find(AttemptKey(label)), f"find returns the foreign machine {label!r}")
    await h.provider.terminate(instance.ref)
    await h.settle()
    alive = {machine.machine_id for machine in h.machines() if machine.exists}
    expect(foreign <= alive, f"foreign machines were ended: {foreign - alive}")
    expect(not h.live(key), "our own machine was not ended")


@behaviour()
async def part_of_a_listing_is_called_incomplete(h: Harness) -> None:
    """A listing that broke off says so, or fails; it is never passed for the whole."""
    key, _ = await buy_machine(h)
    h.list_only_part()
    outcome = await attempt(h, h.provider.instances)
    if not isinstance(outcome, ProviderError):
        expect(not outcome.complete, f"part of a listing was passed for the whole: {outcome!r}")
    h.faults.clear()
    expect(h.live(key), "the machine is gone from the world")


@behaviour()
async def a_malformed_row_costs_only_itself_and_completeness(h: Harness) -> None:
    """An unreadable row of a listing hides no other machine, and the listing is no longer complete."""
    keys = [h.key() for _ in range(3)]
    h.add_machines(keys)
    victim = h.live(keys[1])[0]
    h.spoil_listed_row(victim.machine_id)
    outcome = await attempt(h, h.provider.instances)
    if isinstance(outcome, ProviderError):
        raise BehaviourFailed(f"one malformed row cost the whole listing: {outcome!r}")
    listed = {instance.key for instance in outcome.instances}
    expect({keys[0], keys[2]} <= listed, f"one malformed row cost others: {listed}")
    expect(keys[1] in listed or not outcome.complete, "an unreadable row was dropped from a listing called complete")


@behaviour()
async def an_unheard_of_state_is_unknown_and_not_gone(h: Harness) -> None:
    """A state the provider never documented is UNKNOWN: the machine stays listed and found."""
    key, _ = await buy_machine(h)
    h.set_state(h.live(key)[0].machine_id, OddState.UNHEARD_OF)
    machine = await the_machine(h, key)
    expect(machine.state is InstanceState.UNKNOWN, f"an unheard-of state is taken for {machine.state}")
    listing = await h.provider.instances()
    expect(key in {i.key for i in listing.instances}, "the machine is not listed any more")


@behaviour()
async def a_new_machine_is_found_within_the_reconcile_window(h: Harness) -> None:
    """However late listings are, a machine is found before the declared window has passed."""
    window = h.plugin.traits(h.settings()).reconcile_window
    h.set_list_lag(min(timedelta(seconds=60), window / 2))
    request = h.request(await an_offer(h))
    h.faults.lose_answer(Call.LAUNCH)
    outcome = await attempt(h, partial(h.provider.launch, request))
    expect(not isinstance(outcome, Launched), "a lost answer was understood")
    await h.advance(window)
    await the_machine(h, request.key)
    expect(len(h.live(request.key)) == 1, "there is not exactly one machine")


@behaviour()
async def a_launch_under_list_lag_still_names_its_machine(h: Harness) -> None:
    """A machine that listings do not show yet is launched all the same; launch does not take it for failed."""
    h.set_list_lag(timedelta(seconds=45))
    request = h.request(await an_offer(h))
    launched = await h.provider.launch(request)
    machines = h.live(request.key)
    expect(len(machines) == 1 and launched.instance.ref.instance_id == machines[0].machine_id, "another machine")


@behaviour()
async def a_listing_that_cannot_be_had_is_an_error(h: Harness) -> None:
    """When the cloud cannot be reached, find and the listing fail; neither says that there is nothing."""
    key, _ = await buy_machine(h)
    h.served.stop()
    for call in (h.provider.instances, partial(h.provider.find, key)):
        outcome = await attempt(h, call)
        expect(isinstance(outcome, Unavailable), f"{outcome!r} from a cloud that cannot be reached")
