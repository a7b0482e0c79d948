"""What a list says of an ended machine's cause reaches the state, the answers and the records, once, and for good."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from spotd.core.domain.cooldowns import CooldownScope
from spotd.core.domain.intents import JobId
from spotd.core.domain.plan import Plan
from spotd.core.domain.states import AttemptState, EndReason, InvariantBroken
from spotd.core.domain.world import RecordKind
from spotd.daemon.market import late_causes
from spotd.daemon.market.late_causes import CauseCheck
from spotd_providers.contract.values import AttemptKey, InstanceId, InstanceState, Listing, Loss, ProviderName
from tests.unit.daemon.rig import Rig

pytestmark = pytest.mark.anyio


def check_of(rig: Rig) -> CauseCheck:
    return CauseCheck(rig.offer_cache.listings, commits=rig.commits, clock=rig.clock, log=rig.log)


async def lost(rig: Rig) -> JobId:
    """A job whose first machine never spoke, and went without a word of its provider; the second one runs."""
    name = await rig.submit()
    await rig.until(lambda: any(one.ref is not None for one in rig.attempts(name)))
    rig.shop.set_state(rig.attempts(name)[0].key, InstanceState.GONE)
    await rig.until(lambda: len(rig.attempts(name)) == 2 and rig.attempts(name)[0].state is AttemptState.ENDED)
    assert rig.attempts(name)[0].end_reason is EndReason.HOST_LOST
    assert rig.job(name).failed_starts == 1
    assert RecordKind.FAILED_STARTS in kinds_of_records(rig)
    return name


def kinds_of_records(rig: Rig) -> set[RecordKind]:
    records = rig.store.read(lambda reads: reads.experience())
    return {identity.kind for identity, one in records.items() if one.count > 1000}


def cooling_hosts(rig: Rig) -> list[timedelta]:
    """For how long each host cools down, by what is stored."""
    now = rig.clock.now()
    world = rig.store.read(lambda reads: reads.world(rig.policy.current, now))
    return [one.until - now for one in world.cooldowns if one.scope is CooldownScope.HOST and one.until > now]


async def test_a_cause_that_is_listed_late_corrects_the_end_durably_and_once(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    async with rig.ready():
        name = await lost(rig)
        check = check_of(rig)
        await check.reconcile_once()
        assert rig.attempts(name)[0].end_reason is EndReason.HOST_LOST, "no list says more yet"
        assert max(cooling_hosts(rig)) > timedelta(minutes=20)
        rig.shop.set_state(rig.attempts(name)[0].key, InstanceState.GONE, Loss.PREEMPTED)
        await rig.clock.sleep(timedelta(minutes=2))
        await check.reconcile_once()
    life = rig.reborn()
    first = life.attempts(name)[0]
    assert (first.end_reason, first.state) == (EndReason.PREEMPTED, AttemptState.ENDED)
    assert (life.job(name).failed_starts, life.job(name).totals.preemptions) == (0, 1)
    assert RecordKind.FAILED_STARTS not in kinds_of_records(life)
    assert all(span < timedelta(minutes=3) for span in cooling_hosts(life))
    async with life.ready():
        await life.until(lambda: bool(life.offer_cache.listings()))
        await check_of(life).reconcile_once()
        shown = (await life.handlers().jobs.detail(name))["job"]["attempts"][0]
        assert (shown["reason"], shown["detail"]) == ("preempted", "the provider took the machine back")
        (receipt,) = (await life.handlers().receipts.cost(name))["receipts"]
        assert receipt["attempts"][0]["reason"] == "preempted"
    assert life.kinds(name).count("attempt.corrected") == 1


async def test_a_preemption_that_is_known_at_once_is_left_alone(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    async with rig.ready():
        name = await rig.submit()
        await rig.until(lambda: any(one.ref is not None for one in rig.attempts(name)))
        rig.shop.set_state(rig.attempts(name)[0].key, InstanceState.GONE, Loss.PREEMPTED)
        check = check_of(rig)
        await check.reconcile_once()  # while it still counts
        await rig.until(lambda: rig.attempts(name)[0].state is AttemptState.ENDED)
        await check.reconcile_once()
        assert rig.job(name).totals.preemptions == 1
        assert "attempt.corrected" not in rig.kinds(name)


async def test_a_cause_that_is_read_before_the_attempt_is_over_is_read_again(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    async with rig.ready():
        name = await rig.submit()
        await rig.until(lambda: any(one.ref is not None for one in rig.attempts(name)))
        gone = replace(rig.shop.machine_of(rig.attempts(name)[0].key), state=InstanceState.GONE, loss=Loss.PREEMPTED)
        rows = Listing(instances=(gone,), complete=True, at=rig.clock.now())
        newest = {rig.shop.name: rows}
        check = CauseCheck(lambda: newest, commits=rig.commits, clock=rig.clock, log=rig.log)
        await check.reconcile_once()
        assert rig.attempts(name)[0].state.counts
        rig.shop.set_state(rig.attempts(name)[0].key, InstanceState.GONE)
        await rig.until(lambda: rig.attempts(name)[0].state is AttemptState.ENDED)
        assert rig.attempts(name)[0].end_reason is EndReason.HOST_LOST
        newest = {rig.shop.name: replace(rows, at=rig.clock.now())}
        await check.reconcile_once()
        assert rig.attempts(name)[0].end_reason is EndReason.PREEMPTED


async def test_what_no_attempt_has_and_what_breaks_a_rule_is_compared_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = Rig(tmp_path)
    async with rig.ready():
        name = await lost(rig)
        key = rig.attempts(name)[0].key
        gone = replace(rig.shop.machine_of(key), state=InstanceState.GONE, loss=Loss.PREEMPTED)
        others = [
            replace(gone, ref=replace(gone.ref, instance_id=InstanceId(f"z{number}")), key=AttemptKey(other))
            for number, other in enumerate([key.removesuffix("-1") + "-91", key, "spotd-other-j1-1"])
        ]
        compared: list[str] = []
        made = rig.commits.commit_with

        async def counted(*args: Any, **options: Any) -> Any:
            compared.append("one")
            return await made(*args, **options)

        def broken(*_: object) -> Plan:
            raise InvariantBroken("a rule")

        monkeypatch.setattr(rig.commits, "commit_with", counted)
        newest: dict[ProviderName, Listing] = {}
        check = CauseCheck(lambda: newest, commits=rig.commits, clock=rig.clock, log=rig.log)
        with monkeypatch.context() as patched:
            patched.setattr(late_causes, "correct_end", broken)
            for seconds in range(5):
                at = rig.clock.now() + timedelta(seconds=seconds)
                newest[rig.shop.name] = Listing(instances=(gone, *others), complete=True, at=at)
                await check.reconcile_once()
        assert len(compared) == 4
        assert rig.attempts(name)[0].end_reason is EndReason.HOST_LOST


async def test_a_machine_that_no_attempt_had_is_passed_over(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    async with rig.ready():
        name = await lost(rig)
        key = rig.attempts(name)[0].key
        gone = replace(rig.shop.machine_of(key), state=InstanceState.GONE, loss=Loss.PREEMPTED)
        for ident, other in (("m8", "spotd-other-j1-1"), ("m9", key)):
            ref = replace(gone.ref, instance_id=type(gone.ref.instance_id)(ident))
            rig.shop.machines[ref.instance_id] = replace(gone, ref=ref, key=type(key)(other))
        await rig.clock.sleep(timedelta(minutes=2))
        await check_of(rig).reconcile_once()
        assert rig.attempts(name)[0].end_reason is EndReason.HOST_LOST
