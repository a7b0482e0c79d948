"""What the rows of several machines that were bought as one say together."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta

from spotd_providers.contract.values import (
    AttemptKey,
    Billing,
    Instance,
    InstanceId,
    InstanceRef,
    InstanceState,
    Loss,
    ProviderName,
)
from spotd_providers.kit.gangs import as_one
from tests.cases import every

NOW = datetime(2026, 3, 2, 12, tzinfo=UTC)
SOON = NOW + timedelta(minutes=2)
GANG = InstanceRef(provider=ProviderName("shop"), instance_id=InstanceId("r-1"))
PENDING, RUNNING, PAUSED = InstanceState.PENDING, InstanceState.RUNNING, InstanceState.PAUSED
ENDING, GONE, UNKNOWN = InstanceState.ENDING, InstanceState.GONE, InstanceState.UNKNOWN


def machine(state: InstanceState, loss: Loss | None = None) -> Instance:
    ref = InstanceRef(provider=GANG.provider, instance_id=InstanceId("i-1"))
    billing = Billing.FULL if state is RUNNING else Billing.UNKNOWN
    return Instance(ref=ref, key=AttemptKey("spotd-lab-j-1"), state=state, loss=loss, billing=billing)


def whole(*states: InstanceState | None, hidden: tuple[int, ...] = ()) -> Instance:
    parts = {rank: machine(state) for rank, state in enumerate(states) if state is not None}
    return as_one(parts, [f"on host {rank}" for rank in range(len(states))], GANG, NOW, hidden=hidden)


@every(
    ("states", "hidden", "expected"),
    [
        ((PENDING, PENDING), (), PENDING),
        ((RUNNING, PENDING), (), RUNNING),
        ((PENDING, RUNNING), (), RUNNING),
        ((RUNNING, RUNNING), (), RUNNING),
        ((RUNNING, None), (), PENDING),
        ((RUNNING, None), (1,), RUNNING),
        ((None, RUNNING), (0,), UNKNOWN),
        ((None, RUNNING), (), PAUSED),
        ((ENDING, RUNNING), (), PAUSED),
        ((GONE, RUNNING), (), PAUSED),
        ((GONE, PENDING), (), PAUSED),
        ((GONE, UNKNOWN), (), PAUSED),
        ((RUNNING, UNKNOWN), (), RUNNING),
        ((UNKNOWN, RUNNING), (), UNKNOWN),
        ((GONE, ENDING), (), ENDING),
        ((ENDING, GONE), (), ENDING),
        ((GONE, GONE), (), GONE),
        ((GONE, None), (1,), UNKNOWN),
        ((None, GONE), (0,), UNKNOWN),
    ],
)
def test_they_run_while_the_first_does_and_are_gone_when_each_is(
    states: tuple[InstanceState | None, ...], hidden: tuple[int, ...], expected: InstanceState
) -> None:
    found = whole(*states, hidden=hidden)
    assert (found.ref, found.state) == (GANG, expected)
    assert (found.billing is Billing.FULL) == (RUNNING in states)


@every("state", [PAUSED, ENDING, GONE], ids=str)
def test_the_loss_of_another_one_is_announced(state: InstanceState) -> None:
    found = whole(RUNNING, RUNNING, state)
    assert (found.state, found.notice_at) == (RUNNING, NOW)
    assert found.detail == "machine 3 of 3 on host 2 is lost, and all of them end"


def test_the_first_notice_of_any_is_that_of_all() -> None:
    parts = {0: machine(RUNNING), 1: replace(machine(RUNNING), notice_at=SOON)}
    assert as_one(parts, ["", ""], GANG, NOW).notice_at == SOON


@every(
    ("losses", "expected"),
    [
        ((Loss.PREEMPTED, Loss.PREEMPTED), Loss.PREEMPTED),
        ((Loss.PREEMPTED, Loss.OUTBID), Loss.PREEMPTED),
        ((Loss.PREEMPTED, Loss.SELF), Loss.HOST_LOST),
        ((Loss.SELF, Loss.PREEMPTED), Loss.SELF),
        ((None, None), None),
    ],
)
@every("state", [ENDING, GONE], ids=str)
def test_they_count_as_taken_where_each_was_since_the_others_are_billed(
    losses: tuple[Loss | None, ...], expected: Loss | None, state: InstanceState
) -> None:
    ends = {rank: NOW - timedelta(minutes=rank) for rank in range(2)}
    parts = {rank: replace(machine(state, loss), ended_at=ends[rank]) for rank, loss in enumerate(losses)}
    found = as_one(parts, ["", ""], GANG, NOW)
    assert (found.loss, found.ended_at) == (expected, NOW)
    assert as_one({**parts, 1: machine(state)}, ["", ""], GANG, NOW).ended_at is None


def test_a_loss_of_the_first_alone_is_stated_while_others_live() -> None:
    parts = {0: replace(machine(GONE, Loss.PREEMPTED), ended_at=NOW), 1: machine(RUNNING)}
    found = as_one(parts, ["", ""], GANG, NOW)
    assert (found.state, found.loss, found.ended_at) == (PAUSED, Loss.PREEMPTED, None)
    assert found.detail == "machine 1 of 2 has ended, and not all of them have"


@every(
    ("states", "hidden", "without", "expected", "detail"),
    [
        ((PAUSED, RUNNING), (), (), RUNNING, "machine 1 of 2 on 0 is lost"),
        ((GONE, RUNNING), (), (), RUNNING, "machine 1 of 2 on 0 is lost"),
        ((None, RUNNING), (), (), RUNNING, "machine 1 of 2 on 0 is lost"),
        ((None, RUNNING), (0,), (), RUNNING, "machine 1 of 2 on 0 is not shown now"),
        ((None, RUNNING), (), (0,), RUNNING, ""),
        ((RUNNING, PAUSED), (), (), RUNNING, "machine 2 of 2 on 1 is lost"),
        ((RUNNING, None), (), (), PENDING, "machine 2 of 2 on 1 has not begun"),
        ((PAUSED, None), (1,), (), UNKNOWN, "machine 2 of 2 on 1 is not shown now"),
        ((None, PAUSED), (0,), (), UNKNOWN, "machine 1 of 2 on 0 is not shown now"),
        ((None, PAUSED), (), (), PAUSED, "machine 1 of 2 on 0 is gone"),
        ((PAUSED, PAUSED), (), (), PAUSED, ""),
        ((PAUSED, GONE), (), (), PAUSED, ""),
        ((None, GONE), (), (0,), GONE, ""),
    ],
)
def test_where_a_loss_is_judged_by_their_owner_they_run_while_any_does(
    states: tuple[InstanceState | None, ...],
    hidden: tuple[int, ...],
    without: tuple[int, ...],
    expected: InstanceState,
    detail: str,
) -> None:
    parts = {rank: machine(state) for rank, state in enumerate(states) if state is not None}
    names = [f"on {rank}" for rank in range(len(states))]
    found = as_one(parts, names, GANG, NOW, hidden=hidden, without=without, ends_with_one=False)
    assert (found.state, found.detail, found.notice_at) == (expected, detail, None)
