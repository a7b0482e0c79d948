"""Budgets that are changed and machines that are given up, over a running daemon in virtual time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta

import pytest

from spotd.api.requests import BudgetChange
from spotd.api.responses import ApiUnavailable, Invalid, NotFound, OverBudget, StateConflict
from spotd.core.domain.intents import JobId
from spotd.core.domain.states import JobState
from spotd.daemon.hosts import monitor
from spotd_jobs.objects.api import ObjectInfo, StoreError, StoreUnavailable
from spotd_jobs.spec.model import PriceLimit
from spotd_providers.contract.errors import AuthFailed
from tests.unit.api.handlers.test_arrays import CHEAP, jobs_of, submit_array
from tests.unit.core.builders import job
from tests.unit.daemon.host import Host
from tests.unit.daemon.rig import Rig

pytestmark = pytest.mark.anyio


async def test_a_budget_is_added_to_and_set_while_the_job_runs(rig: Rig) -> None:
    async with rig.ready():
        name = await rig.submit(job(budget=5_000_000))
        await rig.until_running(name, 1)
        await rig.handlers().amendments.set_budget("job1", BudgetChange(amount=20_000_000, is_added=True))
        assert (await rig.handlers().jobs.detail(name))["budget_usd"] == 25.0
        await rig.handlers().amendments.set_budget(name, BudgetChange(amount=7_000_000))
        assert rig.job(name).budget == 7_000_000
        assert rig.kinds(name).count("job.budget") == 2


async def test_there_must_be_a_budget_to_add_to(rig: Rig) -> None:
    async with rig.ready():
        name = await rig.submit()
        with pytest.raises(Invalid, match="no budget to add to"):
            await rig.handlers().amendments.set_budget(name, BudgetChange(amount=1, is_added=True))


@pytest.mark.long
async def test_a_retry_that_would_expire_again_is_refused_until_the_budget_is_raised(rig: Rig) -> None:
    async with rig.ready():
        name = await rig.submit(job(budget=100_000))
        host = await rig.until_running(name, 1)
        while rig.job(name).state is not JobState.EXPIRED:
            if rig.attempts(name)[-1].state.counts:
                host.beat("run")
            await rig.clock.sleep(timedelta(seconds=30))
        await rig.until(lambda: rig.job(name).spent > 0)  # settled once the machine is gone
        launches = len(rig.shop.requests)
        with pytest.raises(OverBudget, match="spotctl budget job1") as refused:
            await rig.handlers().jobs.retry(name)
        assert "of the job's $0.10 is spent" in refused.value.message
        with pytest.raises(OverBudget):
            await rig.handlers().jobs.retry(name, anyway=True)
        assert rig.job(name).state is JobState.EXPIRED
        assert rig.kinds(name).count("job.retried") == 0
        await rig.handlers().amendments.set_budget(name, BudgetChange(amount=5_000_000, is_added=True))
        assert (await rig.handlers().jobs.retry(name))["state"] == "QUEUED"
        await rig.until(lambda: len(rig.shop.requests) > launches)


async def test_a_machine_whose_account_is_dead_is_given_up_and_ended_when_it_comes_back(rig: Rig) -> None:
    async with rig.ready():
        name = await rig.submit()
        await rig.until_running(name, 1)
        (machine,) = rig.shop.alive()
        with pytest.raises(StateConflict, match="lists it as running"):
            await rig.handlers().amendments.forget(str(machine.ref.instance_id))
        rig.shop.always["instances"] = AuthFailed("the key was revoked")
        rig.shop.always["offers"] = AuthFailed("the key was revoked")
        await rig.until(lambda: bool(rig.offer_cache.machines(machine.ref.provider).error))
        told = await rig.handlers().amendments.forget(machine.key)
        assert (told["job"], told["attempt"], told["machine"]) == (name, 1, machine.ref.instance_id)
        (attempt,) = rig.attempts(name)
        assert attempt.meter.rate == 0
        assert rig.job(name).state is JobState.RECOVERING
        with pytest.raises(NotFound):
            await rig.handlers().amendments.forget(machine.key)
        rig.shop.always.clear()
        await rig.until(lambda: not rig.shop.alive(), within=timedelta(hours=1))


async def given_up(rig: Rig, name: JobId, *, last: Callable[[Host], None]) -> None:
    """Give up the machine of a running job, whose host writes this just before."""
    host = await rig.until_running(name, 1)
    (machine,) = rig.shop.alive()
    rig.shop.always["instances"] = rig.shop.always["offers"] = AuthFailed("the key was revoked")
    await rig.until(lambda: bool(rig.offer_cache.machines(machine.ref.provider).error))
    last(host)
    await rig.handlers().amendments.forget(machine.key)


async def test_what_a_machine_saved_last_is_read_before_it_is_given_up(rig: Rig) -> None:
    async with rig.ready():
        name = await rig.submit()
        await given_up(rig, name, last=lambda host: host.checkpoint("step-1"))
        assert [c.name for c in rig.job(name).checkpoints] == ["step-1"]
        assert rig.job(name).state is JobState.RECOVERING


async def test_a_job_that_ended_well_on_a_machine_that_is_given_up_has_succeeded(rig: Rig) -> None:
    async with rig.ready():
        name = await rig.submit()
        await given_up(rig, name, last=lambda host: host.exit())
        assert rig.job(name).state is JobState.SUCCEEDED


async def test_no_machine_is_given_up_while_what_it_saved_last_cannot_be_read(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(*_: object) -> None:
        raise StoreUnavailable("it does not answer")

    async with rig.ready():
        name = await rig.submit()
        with monkeypatch.context() as outage, pytest.raises(ApiUnavailable, match="does not answer"):
            await given_up(rig, name, last=lambda _host: outage.setattr(rig.objects, "list", away))
        assert rig.attempts(name)[0].state.counts
        await rig.handlers().amendments.forget(rig.attempts(name)[0].key)
        assert rig.job(name).state is JobState.RECOVERING


@pytest.mark.parametrize("call", ["list", "get"])
async def test_no_machine_is_given_up_while_the_store_refuses_the_daemon_all_that_it_asks(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    def refuses(*_: object, **__: object) -> None:
        raise StoreError("the bucket refuses: HTTP 403 AccessDenied")

    def key_is_revoked(host: Host) -> None:
        host.checkpoint("step-1")
        for refused in ("get", "head") if call != "list" else ("list", "list_after"):
            revoked.setattr(rig.objects, refused, refuses)

    async with rig.ready():
        name = await rig.submit()
        with monkeypatch.context() as revoked, pytest.raises(ApiUnavailable, match="403"):
            await given_up(rig, name, last=key_is_revoked)
        await rig.handlers().amendments.forget(rig.attempts(name)[0].key)
        assert [c.name for c in rig.job(name).checkpoints] == ["step-1"]


async def test_a_machine_of_whose_writing_no_list_can_be_read_is_given_up_all_the_same(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = rig.objects.list

    def odd_names(prefix: str) -> Iterator[ObjectInfo]:
        if "/attempts/" in prefix:
            raise StoreError("the bucket gave an answer that cannot be read")
        return whole(prefix)

    async with rig.ready():
        name = await rig.submit()
        await given_up(rig, name, last=lambda _host: monkeypatch.setattr(rig.objects, "list", odd_names))
        assert rig.job(name).state is JobState.RECOVERING
        assert "host.not_readable" in rig.log.events()


async def test_a_machine_whose_host_wrote_what_cannot_be_read_is_given_up_all_the_same(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def breaks(*_: object, **__: object) -> None:
        raise RuntimeError("a number that is none")

    async with rig.ready():
        name = await rig.submit()
        await given_up(rig, name, last=lambda _host: monkeypatch.setattr(monitor, "read_host", breaks))
        assert rig.job(name).state is JobState.RECOVERING
        assert "host.not_readable" in rig.log.events()


async def test_a_raised_ceiling_buys_at_once_and_a_lowered_one_lets_the_machine_go(rig: Rig) -> None:
    async with rig.ready():
        name = await rig.submit(job(ceiling=100_000))
        await rig.until_state(name, JobState.WAITING_PRICE)
        raised = rig.clock.now()
        await rig.handlers().amendments.set_ceiling("job1", PriceLimit(per_gpu_hour=500_000))
        await rig.until(lambda: bool(rig.shop.requests))
        assert rig.clock.now() - raised < timedelta(seconds=5)
        await rig.until_running(name, 1)
        assert (await rig.handlers().jobs.detail(name))["ceiling_usd_gpu_h"] == 0.5
        await rig.handlers().amendments.set_ceiling(name, PriceLimit(per_gpu_hour=100_000))
        why = await rig.handlers().jobs.why(name)
        assert any("from $0.5000/GPU-h to $0.1000/GPU-h" in event["message"] for event in why["events"])
        await rig.until(lambda: rig.attempts(name)[0].stop is not None)
        order = rig.attempts(name)[0].stop
        assert order is not None
        assert order.detail == "$0.4000/GPU-h, accepted are $0.1000/GPU-h"


async def test_a_changed_ceiling_outlives_the_daemon(rig: Rig) -> None:
    async with rig.ready():
        name = await rig.submit()
        await rig.until_running(name, 1)
        await rig.handlers().amendments.set_ceiling(name, PriceLimit(machine_hour=700_000))
    next_life = rig.reborn()
    async with next_life.ready():
        assert next_life.job(name).spec.price == PriceLimit(machine_hour=700_000)
        assert next_life.attempts(name)[0].ceiling_now == 700_000
        detail = await next_life.handlers().jobs.detail(name)
        assert (detail["ceiling_usd_gpu_h"], detail["spec"]["price"]) == (0.7, {"max_price": "0.7/h"})


async def test_an_ended_job_keeps_the_ceiling_that_is_set_for_its_retry(rig: Rig) -> None:
    async with rig.ready():
        name = await rig.submit(job(ceiling=100_000))
        await rig.cancel(name)
        await rig.until_state(name, JobState.CANCELLED)
        await rig.handlers().amendments.set_ceiling(name, PriceLimit(per_gpu_hour=500_000))
        await rig.handlers().jobs.retry(name)
        await rig.until(lambda: bool(rig.shop.requests))


async def test_the_ceiling_of_one_job_of_an_array_is_its_own_and_that_of_the_array_is_all_theirs(rig: Rig) -> None:
    async with rig.ready():
        array = await submit_array(rig, "0-3", price=CHEAP)
        handlers = rig.handlers()
        await rig.until(lambda: all(one.state is not JobState.QUEUED for one in jobs_of(rig, array)[:1]))
        await handlers.amendments.set_ceiling("train-2", PriceLimit(per_gpu_hour=500_000))
        await rig.until(lambda: [one.attempts_made for one in jobs_of(rig, array)] == [0, 0, 1, 0])
        answer = await handlers.arrays.set_ceiling("train", PriceLimit(per_gpu_hour=500_000))
        assert answer is not None
        assert {one.spec.price for one in jobs_of(rig, array)} == {PriceLimit(per_gpu_hour=500_000)}
        await rig.until(lambda: sum(one.attempts_made for one in jobs_of(rig, array)) > 1)
        assert await handlers.arrays.set_ceiling("train-2", None) is None
