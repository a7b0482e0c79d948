"""A state that is lost: jobs, machines and checkpoints are taken back from the store, and nothing runs twice."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest

from spotd.api.responses import Invalid, StateConflict
from spotd.core.domain.intents import JobId
from spotd.core.domain.policy import Policy
from spotd.core.domain.states import JobState
from spotd.daemon import object_keys
from spotd.daemon.commits import CrashPoint
from spotd.daemon.job_records import ENDED, OPEN, from_document, to_document
from spotd.store import Store
from spotd_providers.contract.values import AttemptKey, MicroUsd
from tests.unit.core.builders import job, shop_policy
from tests.unit.daemon.clocks import VirtualClock
from tests.unit.daemon.rig import Killed, Rig
from tests.unit.daemon.shop import Shop
from tests.unit.daemon.test_recovery_survey import away, outbid, save

pytestmark = pytest.mark.anyio


class Lives:
    """A daemon over one store and one market, whose state is in a file that can be lost."""

    def __init__(self, folder: Path, policy: Policy | None = None) -> None:
        self.folder = folder
        self.policy = policy
        self.clock = VirtualClock()
        self.shop = Shop(self.clock)
        self.state = folder / "state.sqlite"

    def rig(self, crash_at: CrashPoint | None = None) -> Rig:
        stored = Store.open(self.state)
        rig = Rig(self.folder, clock=self.clock, shops=[self.shop], store=stored, crash_at=crash_at, policy=self.policy)
        rig.surveyor.done = False
        rig.policy.gates.append(lambda: rig.surveyor.hold)
        rig.policy.owned = lambda policy: replace(policy, identity_sure=rig.surveyor.done)
        return rig

    def lose_state(self, rig: Rig) -> Rig:
        rig.store.close()
        for left in self.folder.glob("state.sqlite*"):
            left.unlink()
        return self.rig()


async def adopted(rig: Rig, secrets: dict[str, str] | None = None) -> None:
    await rig.handlers().adoption.adopt(secrets or {})


async def follow(rig: Rig) -> None:
    """The files follow the state."""
    await rig.clock.sleep(timedelta(minutes=1))
    await rig.job_records.reconcile_once()


async def go_on(rig: Rig, job: JobId, number: int, *, minutes: int = 10) -> None:
    host = rig.host(job, number)
    host.objects, host.seq = rig.objects, 50
    for _ in range(minutes * 4):
        host.beat("run")
        await rig.clock.sleep(timedelta(seconds=15))


async def one_running_one_queued(lives: Lives) -> tuple[Rig, JobId, JobId]:
    rig = lives.rig()
    await rig.surveyor.run()
    async with rig.running():
        first = await rig.submit()
        await rig.until_running(first, 1)
        await save(rig, first, 1, "u001")
        outbid(lives.shop, 1)
        await rig.until_running(first, 2)
        await save(rig, first, 2, "u002")
        second = await rig.submit(replace(job(2, ceiling=1), name="later"))
        await follow(rig)
        await save(rig, first, 2, "u003")
    return rig, first, second


async def test_a_lost_state_buys_nothing_and_ends_nothing_until_it_is_rebuilt(tmp_path: Path) -> None:
    lives = Lives(tmp_path)
    rig, first, _ = await one_running_one_queued(lives)
    healthy = [m.key for m in lives.shop.alive()]
    bought = len(lives.shop.requests)
    rig = lives.lose_state(rig)
    await rig.surveyor.run()
    assert (rig.surveyor.done, rig.surveyor.lost) == (False, 2)
    assert "spotctl reconcile --adopt" in rig.policy.why_paused
    async with rig.running():
        await rig.clock.sleep(timedelta(minutes=5))
        plan = await rig.handlers().adoption.plan()
        assert next((j["id"], j["attempt"], bool(j["machine"])) for j in plan["jobs"]) == (first, 2, True)
        assert not plan["adopted"]
        assert not plan["strays"]
    assert [m.key for m in lives.shop.alive()] == healthy
    assert len(lives.shop.requests) == bought


async def test_jobs_machines_and_checkpoints_are_taken_back_and_nothing_runs_twice(tmp_path: Path) -> None:
    lives = Lives(tmp_path)
    rig, first, second = await one_running_one_queued(lives)
    before, healthy = rig.job(first), [m.key for m in lives.shop.alive()]
    bought = len(lives.shop.requests)
    rig = lives.lose_state(rig)
    await rig.surveyor.run()
    async with rig.running():
        await rig.until(lambda: rig.offer_cache.machines(lives.shop.name).listing is not None)
        await adopted(rig)
        await go_on(rig, first, 2)
        job = rig.job(first)
        assert job.state is JobState.RUNNING
        assert [c.name for c in job.checkpoints] == ["u003", "u002", "u001"]
        assert (job.spec, job.name, job.submitted_at) == (before.spec, before.name, before.submitted_at)
        assert rig.job(second).name == "later"
        assert not rig.job(second).state.is_final
        assert [m.key for m in lives.shop.alive()] == healthy
        assert len([r for r in lives.shop.requests[bought:] if r.key.split("-")[-2] == first]) == 0
    assert lives.shop.most_alive[f"spotd-lab-{first}"] == 1
    assert {"job.adopted", "machine.adopted"} <= set(rig.kinds(first))


async def test_a_machine_that_another_job_took_over_is_taken_back_by_the_key_that_it_carries(tmp_path: Path) -> None:
    lives = Lives(tmp_path, shop_policy(reuse_wait=timedelta(minutes=10)))
    rig = lives.rig()
    await rig.surveyor.run()
    async with rig.running():
        former = await rig.submit()
        await rig.until_running(former, 1)
        rig.host(former, 1).exit("succeeded", waits=True)
        await rig.until(lambda: rig.job(former).state is JobState.SUCCEEDED)
        heir = await rig.submit(replace(job(2), name="heir"))
        await rig.until_running(heir, 1)
        await follow(rig)
    healthy = [m.key for m in lives.shop.alive()]
    assert [key.split("-")[-2] for key in healthy] == [former], "it goes on to carry its first key"
    rig = lives.lose_state(rig)
    await rig.surveyor.run()
    async with rig.running():
        await rig.until(lambda: rig.offer_cache.machines(lives.shop.name).listing is not None)
        plan = await rig.handlers().adoption.plan()
        assert [bool(one["machine"]) for one in plan["jobs"] if one["id"] == heir] == [True]
        assert plan["strays"] == []
        await adopted(rig)
        await go_on(rig, heir, 1)
        assert rig.job(heir).state is JobState.RUNNING
        assert rig.job(former).state is JobState.SUCCEEDED
    assert [m.key for m in lives.shop.alive()] == healthy
    assert len(lives.shop.requests) == 1


async def test_what_a_job_has_cost_counts_in_its_budget_and_in_those_of_day_and_month(tmp_path: Path) -> None:
    lives = Lives(tmp_path)
    rig, first, _ = await one_running_one_queued(lives)
    spent = rig.job(first).spent
    assert spent > 0
    rig = lives.lose_state(rig)
    await rig.surveyor.run()
    await rig.control_loop.adopt()
    await adopted(rig)
    assert rig.job(first).spent == spent
    world = rig.store.read(lambda reads: reads.world(rig.policy.current, rig.clock.now()))
    assert sum(world.spent_by_day.values()) == spent


async def test_what_a_job_has_cost_is_stored_before_its_next_number_is_used(tmp_path: Path) -> None:
    lives = Lives(tmp_path)
    rig = lives.rig()
    await rig.surveyor.run()
    async with rig.running():
        first = rig.job(await rig.submit())
    for attempts, spent in ((0, 0), (1, 7)):
        rig.job_records.require(replace(first, attempts_made=attempts, spent=MicroUsd(spent)))
    rig = lives.lose_state(rig)
    await rig.surveyor.run()
    (one,) = (await rig.job_records.find_lost()).jobs
    assert one.record.job.spent == 7


@pytest.mark.parametrize("point", [CrashPoint.BEFORE_COMMIT_ADOPT, CrashPoint.AFTER_COMMIT_ADOPT])
async def test_a_daemon_that_dies_while_it_adopts_does_it_again_or_has_done_it(
    tmp_path: Path, point: CrashPoint
) -> None:
    lives = Lives(tmp_path)
    rig, first, _ = await one_running_one_queued(lives)
    rig = lives.lose_state(rig)
    await rig.surveyor.run()
    await rig.control_loop.adopt()
    rig.crash_at = point
    with pytest.raises(Killed):
        await adopted(rig)
    rig.store.close()
    rig = lives.rig()
    await rig.surveyor.run()
    is_done = point is CrashPoint.AFTER_COMMIT_ADOPT
    assert (rig.surveyor.done, rig.surveyor.lost) == (is_done, 0 if is_done else 2)
    async with rig.running():
        await adopted(rig)
        await adopted(rig)
        await go_on(rig, first, 2)
        assert rig.job(first).state is JobState.RUNNING
        assert rig.kinds(first).count("job.adopted") == 1
    assert lives.shop.most_alive[f"spotd-lab-{first}"] == 1


async def test_a_job_that_was_cancelled_or_had_ended_is_taken_back_as_that(tmp_path: Path) -> None:
    lives = Lives(tmp_path)
    rig, first, second = await one_running_one_queued(lives)
    async with rig.running():
        await rig.handlers().jobs.cancel(second)
        await rig.handlers().jobs.cancel(first)
        await rig.until(lambda: rig.job(first).state is JobState.CANCELLING)
        await follow(rig)
    rig = lives.lose_state(rig)
    await rig.surveyor.run()
    async with rig.running():
        await rig.until(lambda: rig.offer_cache.machines(lives.shop.name).listing is not None)
        await adopted(rig)
        assert rig.job(second).state is JobState.CANCELLED
        await rig.until(lambda: rig.job(first).state is JobState.CANCELLED and not lives.shop.alive())
    assert len(lives.shop.requests) == 2


async def test_a_store_that_is_away_forbids_to_adopt_and_to_buy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lives = Lives(tmp_path)
    rig, _, _ = await one_running_one_queued(lives)
    rig = lives.lose_state(rig)
    await rig.surveyor.run()
    monkeypatch.setattr(rig.objects, "list", away)
    with pytest.raises(Exception, match="no answer"):
        await adopted(rig)
    assert rig.store.read(lambda reads: reads.ended_ids()) == ()
    assert rig.policy.why_paused


async def test_a_file_of_a_newer_spotd_forbids_to_adopt_and_is_named(tmp_path: Path) -> None:
    lives = Lives(tmp_path)
    rig, first, _ = await one_running_one_queued(lives)
    key = object_keys.job_record_key("lab", first + OPEN)
    document = json.loads(rig.objects.get(key, bytes_max=10**6))
    document["spec"]["teleport"] = True
    rig.objects.put(key, json.dumps(document).encode())
    rig = lives.lose_state(rig)
    await rig.surveyor.run()
    assert rig.surveyor.lost == 2
    await rig.control_loop.adopt()
    with pytest.raises(StateConflict, match="teleport"):
        await adopted(rig)
    assert [m.key for m in lives.shop.alive()] == [AttemptKey(f"spotd-lab-{first}-2")]


async def test_a_file_of_another_identity_is_left_alone(tmp_path: Path) -> None:
    lives = Lives(tmp_path)
    rig, first, second = await one_running_one_queued(lives)
    for name in (first, second):
        key = object_keys.job_record_key("lab", name + OPEN)
        file = from_document(rig.objects.get(key, bytes_max=10**6))
        rig.objects.put(key, to_document(replace(file, identity="other1")))
    rig = lives.lose_state(rig)
    await rig.surveyor.run()
    assert (rig.surveyor.done, rig.surveyor.lost) == (True, 0)
    await rig.control_loop.adopt()
    plan = await rig.handlers().adoption.plan()
    assert (plan["jobs"], plan["others"]) == ([], 2)


async def test_values_of_secrets_are_asked_for_and_are_in_no_file(tmp_path: Path) -> None:
    lives = Lives(tmp_path)
    rig = lives.rig()
    await rig.surveyor.run()
    async with rig.running():
        plain = job(ceiling=1)
        name = await rig.submit(replace(plain, spec=replace(plain.spec, secrets=("TOKEN",))))
        rig.secrets.write(name, {"TOKEN": "canary-value"})
        await follow(rig)
    file = rig.objects.get(object_keys.job_record_key("lab", name + OPEN), bytes_max=10**6)
    assert b"TOKEN" in file
    assert b"canary-value" not in file
    rig.secrets.remove(name)
    rig = lives.lose_state(rig)
    await rig.surveyor.run()
    await rig.control_loop.adopt()
    with pytest.raises(Invalid, match="TOKEN"):
        await adopted(rig)
    await adopted(rig, {"TOKEN": "canary-value"})
    assert rig.secrets.read(name, ["TOKEN"]) == {"TOKEN": "canary-value"}


async def test_a_retried_job_has_its_file_again_and_an_end_outweighs_a_file_that_is_left(tmp_path: Path) -> None:
    lives = Lives(tmp_path)
    rig, _, second = await one_running_one_queued(lives)
    going_on, ended = (object_keys.job_record_key("lab", second + end) for end in (OPEN, ENDED))
    async with rig.running():
        await rig.handlers().jobs.cancel(second)
        await rig.until(lambda: rig.job(second).state.is_final)
        await follow(rig)
        assert (rig.objects.head(going_on), rig.objects.head(ended) is not None) == (None, True)
        await rig.handlers().jobs.retry(second)
        await rig.until(lambda: not rig.job(second).state.is_final)
        await follow(rig)
        assert (rig.objects.head(going_on) is not None, rig.objects.head(ended)) == (True, None)
