"""What a list of another account says of our machines: nothing."""

from __future__ import annotations

from dataclasses import replace

from spotd.core.domain.intents import IntentKind
from spotd.core.domain.plan import applied
from spotd.core.domain.states import AttemptState
from spotd.core.domain.world import World
from spotd.core.kernel.outcomes import terminate_accepted
from spotd.core.kernel.reconcile import reconcile
from spotd_providers.contract.values import InstanceState
from tests.cases import every
from tests.unit.core.builders import MINUTE, NOW, SHOP, instance, listing, world_with


def seen_by(world: World, account: str) -> World:
    """The world, with a key of this account."""
    rules = replace(world.policy.providers[SHOP], account=account)
    return replace(world, policy=replace(world.policy, providers={SHOP: rules}))


@every(
    ("bought_in", "asked_in", "is_over"),
    [("a", "a", True), ("a", "b", False), ("", "b", True), ("a", "", True)],
)
def test_an_empty_list_of_another_account_is_no_proof_of_an_end(bought_in: str, asked_in: str, is_over: bool) -> None:
    world = seen_by(world_with(AttemptState.ENDING, account=bought_in), asked_in)
    plan = reconcile(world, listing(), {}, NOW)
    assert [a.state is AttemptState.ENDED for a in plan.attempts.values()] == ([True] if is_over else [])


def test_a_machine_that_a_list_shows_is_in_the_account_of_that_list() -> None:
    world = seen_by(world_with(AttemptState.RUNNING), "a")
    plan = reconcile(world, listing(instance(InstanceState.RUNNING)), {}, NOW)
    assert [a.account for a in plan.attempts.values()] == ["a"]


@every("state", [AttemptState.RUNNING, AttemptState.ENDING])
def test_a_machine_that_a_new_key_lists_is_that_keys_to_end(state: AttemptState) -> None:
    world = seen_by(world_with(state, account="key of May"), "key of June")
    owed = {i: replace(intent, account="key of May") for i, intent in world.intents.items()}
    plan = reconcile(replace(world, intents=owed), listing(instance(InstanceState.RUNNING)), {}, NOW)
    assert [a.account for a in plan.attempts.values()] == ["key of June"]
    after = {**owed, **plan.intents}
    assert {i.account for i in after.values() if i.kind is IntentKind.TERMINATE} <= {"key of June"}


def test_a_stray_that_a_new_key_lists_is_that_keys_to_end() -> None:
    empty = replace(world_with(AttemptState.RUNNING), attempts={}, jobs={}, intents={})
    found = listing(instance(InstanceState.RUNNING))
    world = seen_by(empty, "key of May")
    world = applied(world, reconcile(world, found, {}, NOW))
    world = seen_by(world, "key of June")
    world = applied(world, reconcile(world, found, {}, NOW))
    assert [intent.account for intent in world.intents.values()] == ["key of June"]


@every(("key", "is_settled"), [("key of May", True), ("key of June", False)])
def test_the_end_of_a_stray_is_not_settled_by_a_list_of_another_account(key: str, *, is_settled: bool) -> None:
    empty = replace(world_with(AttemptState.RUNNING), attempts={}, jobs={}, intents={})
    world = seen_by(empty, "key of May")
    world = applied(world, reconcile(world, listing(instance(InstanceState.RUNNING)), {}, NOW))
    [owed] = world.intents
    world = seen_by(applied(world, terminate_accepted(world, owed, NOW + MINUTE)), key)
    later = NOW + 2 * MINUTE
    world = applied(world, reconcile(world, listing(at=later), {}, later))
    assert (not world.intents) is is_settled
