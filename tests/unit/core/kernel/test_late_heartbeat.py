"""A host whose heartbeat is late is looked for in its provider's list at once, for a while."""

from __future__ import annotations

from datetime import timedelta

from spotd.core.domain.states import AttemptState
from spotd.core.kernel.reconcile import reconcile
from spotd_providers.contract.values import InstanceState
from tests.cases import every
from tests.unit.core.builders import NOW, SHOP, instance, listing, report, world_with


@every(
    ("silent_s", "looks"),
    [(10, False), (26, False), (27, True), (44, True), (120, True), (146, True), (148, False), (90_000, False)],
)
def test_a_late_heartbeat_asks_for_a_list_within_the_first_minutes(silent_s: int, looks: bool) -> None:
    world = world_with(AttemptState.RUNNING, heartbeat_seen_at=NOW - timedelta(seconds=silent_s))
    plan = reconcile(world, listing(instance(InstanceState.RUNNING)), report(liveness_check=True), NOW)
    assert plan.list_again == ({SHOP} if looks else frozenset())


def test_the_next_cycle_comes_when_the_heartbeat_is_late() -> None:
    world = world_with(AttemptState.RUNNING, heartbeat_seen_at=NOW)
    plan = reconcile(world, listing(instance(InstanceState.RUNNING)), report(liveness_check=True), NOW)
    assert plan.wake_at == NOW + timedelta(seconds=27)
