"""Nothing of a core value is lost or changed by being stored."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta, timezone

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spotd.core.domain.attempts import Attempt, StopOrder
from spotd.core.domain.cooldowns import Cooldown
from spotd.core.domain.intents import Charge, Intent
from spotd.core.domain.jobs import Checkpoint, Job
from spotd.core.domain.market import Quote
from spotd.core.domain.plan import Event, Plan
from spotd.core.domain.states import AttemptState, EndReason, InvariantBroken, JobState
from spotd.store import Store, Tx
from spotd.store.values import from_json, instant_in, instant_out, to_json, words_out
from spotd_providers.contract.values import MicroUsd, ProviderName
from tests.unit.store import values as v
from tests.unit.store.reads import checkpoints_of, intents_of

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def store() -> Iterator[Store]:
    with Store.open(":memory:") as store:
        yield store


J1 = v.job_id("j1")
EXAMPLES = settings(max_examples=25, deadline=None)
STOP = StopOrder(reason=EndReason.CANCELLED, detail="x", ordered_at=v.NOW, deadline=v.NOW)


class _Undone(Exception):
    """Takes back what an example wrote."""


def after_storing(store: Store, item: Plan, read: Callable[[Tx], object]) -> object:
    """What a transaction reads after writing this plan; then it is undone."""
    found: list[object] = []

    def run(tx: Tx) -> None:
        tx.commit(item)
        found.append(read(tx))
        raise _Undone

    with pytest.raises(_Undone):
        store.tx(run)
    return found[0]


@EXAMPLES
@given(item=v.arbitrary(Job))
def test_any_job_comes_back_as_it_was(store: Store, item: Job) -> None:
    assert after_storing(store, v.plan(item), lambda tx: tx.job(item.id)) == item


@EXAMPLES
@given(item=v.arbitrary_attempts())
def test_any_attempt_comes_back_as_it_was(store: Store, item: Attempt) -> None:
    written = v.plan(v.job(item.id.job, JobState.RUNNING), item)
    assert after_storing(store, written, lambda tx: tx.attempts_of(item.id.job)) == (item,)


@EXAMPLES
@given(item=v.arbitrary_attempts())
def test_the_world_shows_an_attempt_exactly_while_it_has_not_ended(store: Store, item: Attempt) -> None:
    written = v.plan(v.job(item.id.job, JobState.RUNNING), item)
    expected = {} if item.state is AttemptState.ENDED else {item.id: item}
    assert after_storing(store, written, lambda tx: tx.world(v.POLICY, v.NOW).attempts) == expected


@EXAMPLES
@given(item=v.arbitrary(Intent), owner=v.arbitrary_attempts())
def test_any_intent_comes_back_as_it_was(store: Store, item: Intent, owner: Attempt) -> None:
    owner = replace(owner, state=AttemptState.INTENDED)
    item = replace(item, attempt=owner.id, key=owner.key)
    written = v.plan(v.job(owner.id.job, JobState.RUNNING), owner, item)
    assert after_storing(store, written, lambda tx: intents_of(tx, owner.id.job)) == (item,)


@EXAMPLES
@given(item=v.arbitrary(Cooldown))
def test_any_cooldown_comes_back_as_it_was(store: Store, item: Cooldown) -> None:
    before = item.until - timedelta(microseconds=1)
    assert after_storing(store, v.plan(item), lambda tx: tx.world(v.POLICY, before).cooldowns) == (item,)


@EXAMPLES
@given(start=v.INSTANTS.filter(lambda at: at.year >= 1000), item=v.arbitrary(Charge))
def test_any_charge_comes_back_as_it_was(store: Store, start: datetime, item: Charge) -> None:
    item = replace(item, day=start.date(), start=start, end=start, amount=MicroUsd(abs(item.amount)))
    owner = v.attempt(item.attempt.job, item.attempt.number, AttemptState.ENDED)
    written = v.plan(v.job(item.attempt.job), owner, item)
    assert after_storing(store, written, lambda tx: tx.charges_of(item.attempt.job)) == (item,)


@EXAMPLES
@given(item=v.arbitrary(Event))
def test_any_event_comes_back_as_it_was(store: Store, item: Event) -> None:
    assert after_storing(store, v.plan(item), lambda tx: tx.newest_events(limit=1)[0].event) == item


@EXAMPLES
@given(first=st.lists(v.arbitrary(Checkpoint), max_size=4), second=st.lists(v.arbitrary(Checkpoint), max_size=4))
def test_a_jobs_checkpoints_are_whatever_was_committed_last(
    store: Store, first: list[Checkpoint], second: list[Checkpoint]
) -> None:
    def commit_again(tx: Tx) -> tuple[object, object]:
        tx.world(v.POLICY, v.NOW)
        tx.commit(v.plan(v.job(checkpoints=tuple(second))))
        return checkpoints_of(tx, J1), tx.world(v.POLICY, v.NOW).jobs[J1].checkpoints

    written = v.plan(v.job(checkpoints=tuple(first)))
    assert after_storing(store, written, commit_again) == (tuple(second), tuple(second))


@given(value=v.arbitrary(Quote))
def test_a_quote_survives_its_json(value: Quote) -> None:
    assert from_json(Quote, to_json(value)) == value


def test_json_with_a_field_of_another_version_is_still_read() -> None:
    with_more = to_json(STOP).replace('"detail"', '"unknown":[1],"detail"')
    assert from_json(StopOrder, with_more) == STOP


def test_json_that_lacks_a_field_takes_its_default() -> None:
    without = to_json(v.quote()).replace('"extra":{"zone":"a"}', '"unknown":0')
    assert from_json(Quote, without).offer.extra == {}


@given(one=v.arbitrary(datetime), other=v.arbitrary(datetime))
def teststored_instants_sort_as_the_instants_do(one: datetime, other: datetime) -> None:
    assert (instant_out(one) < instant_out(other)) is (one < other)
    assert instant_in(instant_out(one)) == one


def test_an_instant_of_another_zone_isstored_as_the_same_moment() -> None:
    kyiv = v.NOW.astimezone(timezone(timedelta(hours=2)))
    assert instant_in(instant_out(kyiv)) == v.NOW
    assert instant_in(instant_out(kyiv)).tzinfo is UTC


def test_an_instant_without_a_zone_is_refused(store: Store) -> None:
    with pytest.raises(InvariantBroken, match="without a time zone"):
        store.tx(lambda tx: tx.commit(v.plan(v.job(submitted_at=v.NOW.replace(tzinfo=None)))))


@pytest.mark.parametrize(
    ("said", "stored"),
    [("a\0b", "a\\x00b"), ("lone \ud800", "lone \\ud800"), ("naïve 🚀", "naïve 🚀"), ("plain", "plain")],
)
def test_words_of_strangers_are_kept_readable_and_never_stop_a_commit(store: Store, said: str, stored: str) -> None:
    store.tx(lambda tx: tx.commit(v.plan(v.job(reason=said), Event(at=v.NOW, kind="note", message=said))))
    found = store.read(lambda r: r.job(J1))
    assert found is not None
    assert found.reason == stored == words_out(said)


@pytest.mark.parametrize("wrong", [2**63, 10**30], ids=["just too large", "absurd"])
def test_a_number_no_database_holds_is_refused_and_nothing_is_written(wrong: int) -> None:
    with Store.open(":memory:") as store:
        with pytest.raises(InvariantBroken, match="cannot be stored"):
            store.tx(lambda tx: tx.commit(v.plan(v.job("j1"), v.job("j2", code_bytes=wrong))))
        assert store.read(lambda r: r.jobs()) == ()


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_a_number_that_is_none_is_refused(wrong: float) -> None:
    with Store.open(":memory:") as store, pytest.raises(InvariantBroken, match="cannot be stored"):
        store.tx(lambda tx: tx.commit(v.plan(Event(at=v.NOW, kind="x", message="m", data={"n": wrong}))))


def test_a_machine_of_another_provider_than_the_one_that_was_agreed_is_refused() -> None:
    stray = v.attempt(ref=v.ref(provider=ProviderName("aws")))
    with Store.open(":memory:") as store, pytest.raises(InvariantBroken, match="bought at vast"):
        store.tx(lambda tx: tx.commit(v.plan(v.job(state=JobState.PROVISIONING), stray)))
