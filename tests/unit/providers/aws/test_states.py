"""What AWS says of a machine, and what the daemon is told."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from spotd_providers.aws.offers import ANNOUNCED, STATES, as_instance, current_prices
from spotd_providers.aws.plugin import AwsProvider
from spotd_providers.aws.wire import AwsInstanceRow, SpotRequestRow
from spotd_providers.contract.values import AttemptKey, Billing, InstanceState, Loss
from spotd_providers.kit.shapes import row_or_none
from tests.cases import every
from tests.unit.providers.aws.harness import AwsHarness
from tests.unit.providers.aws.stories import cheapest, play

AT = datetime(2026, 3, 2, 12, 0, tzinfo=UTC)
KEY = AttemptKey("spotd-lab-j0b-1")
ENDED = datetime(2026, 3, 2, 11, 40, 7, tzinfo=UTC)


def told(state: str, reason: str = "", message: str = "", code: str = "fulfilled") -> Any:
    row = row_or_none(
        AwsInstanceRow,
        {
            "InstanceId": "i-1",
            "State": {"Name": state, "Code": 0},
            "StateReason": {"Code": reason, "Message": message} if reason else None,
            "InstanceLifecycle": "spot",
        },
    )
    request = row_or_none(SpotRequestRow, {"InstanceId": "i-1", "Status": {"Code": code, "UpdateTime": AT}})
    assert row is not None
    return as_instance(row, KEY, region="us-east-1", request=request, prices={})


@every(
    ("word", "state"),
    [
        ("pending", InstanceState.PENDING),
        ("running", InstanceState.RUNNING),
        ("shutting-down", InstanceState.ENDING),
        ("terminated", InstanceState.GONE),
        ("stopping", InstanceState.PAUSED),
        ("stopped", InstanceState.PAUSED),
        ("meditating", InstanceState.UNKNOWN),
        ("", InstanceState.UNKNOWN),
    ],
)
def test_every_state_is_translated_and_an_unheard_of_one_is_unknown(word: str, state: InstanceState) -> None:
    assert told(word).state is state


@every(
    ("reason", "message", "code", "loss"),
    [
        ("Server.SpotInstanceTermination", "", "instance-terminated-no-capacity", Loss.PREEMPTED),
        ("Server.SpotInstanceShutdown", "", "instance-stopped-no-capacity", Loss.PREEMPTED),
        ("Server.SpotInstanceSomethingNew", "", "fulfilled", Loss.PREEMPTED),
        ("Server.SpotInstanceTermination", "", "instance-terminated-by-price", Loss.OUTBID),
        ("Client.InstanceInitiatedShutdown", "", "instance-terminated-by-user", Loss.SELF),
        ("Client.UserInitiatedShutdown", "", "instance-terminated-by-user", None),
        ("Server.InsufficientInstanceCapacity", "", "fulfilled", Loss.NO_CAPACITY),
        ("Server.InternalError", "Internal error on launch", "fulfilled", Loss.PROVISION_FAILED),
        ("Server.InternalError", "Internal error", "fulfilled", Loss.HOST_LOST),
        ("Client.VolumeLimitExceeded", "", "fulfilled", Loss.PROVISION_FAILED),
        ("Client.InvalidSnapshot.NotFound", "", "fulfilled", Loss.PROVISION_FAILED),
        ("Server.ScheduledStop", "", "fulfilled", Loss.HOST_LOST),
        ("", "", "instance-terminated-no-capacity", Loss.PREEMPTED),
        ("", "", "fulfilled", None),
    ],
)
def test_every_reason_says_why_a_machine_stopped(reason: str, message: str, code: str, loss: Loss | None) -> None:
    assert told("terminated", reason, message, code).loss is loss


@every("code", sorted(ANNOUNCED))
def test_an_announced_end_is_a_notice_of_two_minutes_while_the_machine_runs(code: str) -> None:
    running = told("running", code=code)
    assert running.notice_at == AT + timedelta(minutes=2)
    assert running.state is InstanceState.RUNNING
    assert running.loss is None
    assert told("shutting-down", code=code).notice_at is None


def test_an_announced_end_without_a_legible_time_is_two_minutes_after_it_was_seen(tmp_path: Path) -> None:
    async def story(h: AwsHarness, provider: AwsProvider) -> None:
        launched = (await provider.launch(h.request(await cheapest(h, provider)))).instance
        await h.settle()
        h.cloud.interrupt(launched.ref.instance_id)
        status = {"code": "instance-terminated-no-capacity", "updateTime": "soon"}
        h.cloud.quirks.edit_request[launched.ref.instance_id] = {"status": status}
        seen_at = h.clock.now()
        (warned,) = (await provider.instances()).instances
        assert warned.notice_at is not None
        assert timedelta(minutes=2) <= warned.notice_at - seen_at < timedelta(minutes=2, seconds=10)
        await h.advance(timedelta(seconds=40))
        (again,) = (await provider.instances()).instances
        assert again.notice_at == warned.notice_at, "it does not move with every look"
        assert [line.event for line in h.log.lines].count("aws.notice_without_time") == 1

    play(tmp_path, story)


@every("code", ["fulfilled", "request-canceled-and-instance-running", "pending-fulfillment", "new"])
def test_no_other_code_is_a_notice(code: str) -> None:
    assert told("running", code=code).notice_at is None


def test_a_notice_then_the_end_are_told_in_order_with_the_price_of_the_zone(tmp_path: Path) -> None:
    async def story(h: AwsHarness, provider: AwsProvider) -> None:
        offer = await cheapest(h, provider)
        ref = (await provider.launch(h.request(offer))).instance.ref
        await h.settle()
        (running,) = (await provider.instances()).instances
        assert (running.state, running.price, running.notice_at) == (InstanceState.RUNNING, offer.gpu_price, None)
        end = h.clock.now() + timedelta(minutes=2)
        h.cloud.interrupt(ref.instance_id)
        (warned,) = (await provider.instances()).instances
        assert warned.state is InstanceState.RUNNING
        assert warned.notice_at is not None
        assert end - timedelta(seconds=1) < warned.notice_at <= end  # AWS tells whole seconds
        await h.advance(timedelta(minutes=2))
        (ending,) = (await provider.instances()).instances
        assert (ending.state, ending.loss) == (InstanceState.ENDING, Loss.PREEMPTED)
        await h.advance(timedelta(minutes=1))
        (gone,) = (await provider.instances()).instances
        assert (gone.state, gone.loss) == (InstanceState.GONE, Loss.PREEMPTED)
        assert not await provider.find(gone.key)
        await h.advance(timedelta(hours=1))
        assert not (await provider.instances()).instances

    play(tmp_path, story)


JSON_LIKE = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=12) | st.just(AT),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
PRICE_FIELDS = ("AvailabilityZone", "InstanceType", "ProductDescription", "SpotPrice", "Timestamp")


@given(st.dictionaries(st.sampled_from(PRICE_FIELDS), JSON_LIKE))
def test_no_mutated_price_row_crashes_the_poll_or_costs_another_row(changes: dict[str, Any]) -> None:
    good = {
        "AvailabilityZone": "us-east-1a",
        "InstanceType": "g5.xlarge",
        "ProductDescription": "Linux/UNIX",
        "SpotPrice": "0.4123",
        "Timestamp": AT,
    }
    odd = {**good, "AvailabilityZone": "us-east-1b", **changes}
    prices, rejected = current_prices([good, odd])
    if odd["AvailabilityZone"] != "us-east-1a":
        assert prices[("g5.xlarge", "us-east-1a")] == 412_300
    assert all(type(price) is int and price > 0 for price in prices.values())
    assert all(row.reason for row in rejected)


INSTANCE_FIELDS = ("State", "StateReason", "InstanceLifecycle", "Placement", "LaunchTime", "Tags", "InstanceType")


@given(st.dictionaries(st.sampled_from(INSTANCE_FIELDS), JSON_LIKE))
def test_no_mutated_instance_row_hides_the_machine_or_calls_it_gone(changes: dict[str, Any]) -> None:
    row = row_or_none(AwsInstanceRow, {"InstanceId": "i-1", "State": {"Name": "running"}, **changes})
    assert row is not None
    told = as_instance(row, KEY, region="us-east-1", request=None, prices={})
    state = changes.get("State")
    word = state.get("Name") if isinstance(state, dict) else None
    expected = STATES.get(word, InstanceState.UNKNOWN) if isinstance(word, str) else InstanceState.UNKNOWN
    assert told.state is (expected if "State" in changes else InstanceState.RUNNING)


@every(
    ("state", "transition", "code", "ended_at"),
    [
        ("terminated", "User initiated (2026-03-02 11:40:07 GMT)", "instance-terminated-by-user", ENDED),
        ("shutting-down", "", "instance-terminated-no-capacity", AT),
        ("terminated", "Server.SpotInstanceTermination", "instance-terminated-by-price", AT),
        ("terminated", "User initiated (2026-13-02 11:40:07 GMT)", "fulfilled", None),
        ("terminated", "", "marked-for-termination", None),
        ("running", "User initiated (2026-03-02 11:40:07 GMT)", "instance-terminated-by-user", None),
    ],
)  # fmt: skip
def test_when_a_machine_ended_is_read_from_its_transition_or_its_request(
    state: str, transition: str, code: str, ended_at: datetime | None
) -> None:
    row = row_or_none(
        AwsInstanceRow,
        {"InstanceId": "i-1", "State": {"Name": state, "Code": 0}, "StateTransitionReason": transition},
    )
    request = row_or_none(SpotRequestRow, {"InstanceId": "i-1", "Status": {"Code": code, "UpdateTime": AT}})
    assert row is not None
    assert as_instance(row, KEY, region="us-east-1", request=request, prices={}).ended_at == ended_at


@every(
    ("state", "billing"),
    [
        ("pending", Billing.DISK),
        ("running", Billing.FULL),
        ("stopped", Billing.DISK),
        ("terminated", Billing.UNKNOWN),
        ("meditating", Billing.UNKNOWN),
    ],
)
def test_what_is_billed_follows_the_state(state: str, billing: Billing) -> None:
    assert told(state).billing is billing
