"""A daemon that holds something it cannot judge goes on with everything else, now and at each start after it."""

from __future__ import annotations

from typing import Any

import anyio
import pytest
from sqlalchemy import text

from spotd.api.requests import JobQuery
from spotd.core.domain.intents import AttemptId, JobId
from spotd.core.domain.states import AttemptState, InvariantBroken, JobState
from spotd.core.kernel.quarantine import QUARANTINE_MARK
from spotd.daemon.hosts.host_reader import ReadScope
from spotd.daemon.hosts.reader import read_news
from spotd_providers.contract.values import AttemptKey, InstanceRef, InstanceState, Launched, LaunchRequest
from tests.unit.core.builders import job, offer
from tests.unit.daemon.rig import Rig
from tests.unit.daemon.shop import Hang

pytestmark = pytest.mark.anyio

FIRST, SECOND = AttemptKey("spotd-lab-j1-1"), AttemptKey("spotd-lab-j2-1")


def corrupt(rig: Rig, statement: str) -> None:
    """What a damaged file, or another program, made of a row."""
    with rig.store._engine.begin() as connection:
        connection.execute(text(statement))
    rig.store._memory.forget()


async def two_running(rig: Rig) -> tuple[JobId, JobId]:
    rig.shop.offer_index = [offer(f"o{n}", price=400_000 + n) for n in range(4)]
    first, second = await rig.submit(job(1)), await rig.submit(job(2))
    await rig.until_running(first, 1)
    await rig.until_running(second, 1)
    return first, second


ROWS = {
    "an attempt's state": "UPDATE attempts SET state = 'of the future' WHERE job_id = 'j1'",
    "an attempt's quote": "UPDATE attempts SET quote = '{' WHERE job_id = 'j1'",
    "an attempt's reason": "UPDATE attempts SET end_reason = 'of the future' WHERE job_id = 'j1'",
    "an attempt's instant": "UPDATE attempts SET launched_at = 'soon' WHERE job_id = 'j1'",
    "an attempt's key": "UPDATE attempts SET key = 'spotd-lab-j1-9' WHERE job_id = 'j1'",
    "a job's spec": "UPDATE jobs SET spec = '[]' WHERE id = 'j1'",
    "a job's state": "UPDATE jobs SET state = 'CANCELLED' WHERE id = 'j1'",
    "a job's unknown state": "UPDATE jobs SET state = 'OF THE FUTURE' WHERE id = 'j1'",
    "a job's count": "UPDATE jobs SET attempts_made = 0 WHERE id = 'j1'",
    "a job's instant": "UPDATE jobs SET submitted_at = 9223372036854775807 WHERE id = 'j1'",
}


@pytest.mark.parametrize("statement", ROWS.values(), ids=ROWS.keys())
async def test_a_row_that_cannot_be_understood_costs_its_own_job_at_a_start(statement: str, rig: Rig) -> None:
    async with rig.running():
        _, second = await two_running(rig)
    corrupt(rig, statement)
    reborn = rig.reborn()
    async with reborn.running():
        host = reborn.host(second, 1)
        await reborn.until(lambda: reborn.shop.machine_of(FIRST).state is InstanceState.GONE)
        host.beat("run")
        await reborn.until(lambda: reborn.attempts(second)[0].heartbeat_seq == host.seq)
        assert reborn.job(second).state is JobState.RUNNING
        assert reborn.shop.machine_of(SECOND).state is InstanceState.RUNNING
        host.exit("succeeded")
        await reborn.until_state(second, JobState.SUCCEEDED)
    lines = reborn.store.read(lambda reads: reads.jobs())
    states = {line.id: (line.state, line.reason) for line in lines}
    assert states[JobId("j1")][0].is_final
    assert "job.quarantined" in reborn.kinds(JobId("j1"))
    if states[JobId("j1")][0] is JobState.FAILED:
        assert states[JobId("j1")][1].startswith(QUARANTINE_MARK)


async def test_a_part_of_a_plan_that_the_state_refuses_costs_its_own_job(rig: Rig) -> None:
    async with rig.running():
        first, second = await two_running(rig)
        # The unique index now refuses whatever is written of the first job's attempt.
        corrupt(
            rig,
            "CREATE TRIGGER refuses BEFORE UPDATE ON attempts WHEN NEW.job_id = 'j1' AND NEW.state = 'running'"
            " BEGIN SELECT RAISE(ABORT, 'no'); END",
        )
        rig.host(first, 1).beat("run")
        rig.host(second, 1).beat("run")
        await rig.until_state(first, JobState.FAILED)
        await rig.until(lambda: rig.attempts(second)[0].heartbeat_seq == rig.host(second, 1).seq)
        await rig.until(lambda: rig.shop.machine_of(FIRST).state is InstanceState.GONE)
        assert rig.shop.machine_of(SECOND).state is InstanceState.RUNNING
    assert rig.job(first).reason.startswith(QUARANTINE_MARK)


@pytest.mark.lengthy
async def test_a_state_that_refuses_even_the_quarantine_holds_and_is_told_once(rig: Rig) -> None:
    async with rig.running():
        first, _ = await two_running(rig)
        corrupt(
            rig,
            "CREATE TRIGGER refuses BEFORE UPDATE ON attempts WHEN NEW.job_id = 'j1'"
            " BEGIN SELECT RAISE(ABORT, 'no'); END",
        )
        rig.host(first, 1).beat("run")
        await rig.until(lambda: bool(rig.control_loop.held))
        assert (await rig.handlers().jobs.page(JobQuery()))[
            "paused"
        ] == f"no decisions are made: {rig.control_loop.held}"
        before = rig.clock.now()
        await rig.until(lambda: (rig.clock.now() - before).total_seconds() > 120)
        corrupt(rig, "DROP TRIGGER refuses")
        await rig.until(lambda: not rig.control_loop.held)
    assert rig.log.events().count("state.held") == 1
    assert rig.log.events().count("state.back") == 1


async def test_a_cycle_that_raises_is_held_and_the_next_one_goes_on(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    real = rig.host_monitor.read_hosts
    failures = [ValueError("nobody expected this")] * 3

    async def look(*args: Any) -> Any:
        if failures:
            raise failures.pop()
        return await real(*args)

    async with rig.running():
        first, _ = await two_running(rig)
        monkeypatch.setattr(rig.host_monitor, "read_hosts", look)
        await rig.until(lambda: not failures)
        rig.host(first, 1).exit("succeeded")
        await rig.until_state(first, JobState.SUCCEEDED)
    assert rig.log.events().count("state.held") == 1


async def test_a_launch_whose_call_cannot_be_recorded_is_never_made_and_its_attempt_is_over(rig: Rig) -> None:
    corrupt(
        rig,
        "CREATE TRIGGER refuses BEFORE UPDATE ON intents WHEN NEW.state = 'sent' BEGIN SELECT RAISE(ABORT, 'no'); END",
    )
    async with rig.running():
        first = await rig.submit(job(1))
        await rig.until_state(first, JobState.FAILED)
        await rig.until(lambda: rig.attempts(first)[0].state is AttemptState.ENDED)
        corrupt(rig, "DROP TRIGGER refuses")
        await rig.until_running(await rig.submit(job(2)), 1)
    assert rig.job(first).reason.startswith(QUARANTINE_MARK)
    assert [request.key for request in rig.shop.requests] == [SECOND]
    assert rig.kinds(first).count("job.quarantined") == 1


async def test_an_attempt_that_cannot_be_prepared_costs_its_own_job(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    real = rig.grant_writer.prepare

    async def prepare(attempt: Any, owner: Any) -> str:
        if attempt.id == AttemptId(job=JobId("j1"), number=1):
            raise KeyError("a spec nobody thought of")
        return await real(attempt, owner)

    monkeypatch.setattr(rig.grant_writer, "prepare", prepare)
    async with rig.running():
        first = await rig.submit(job(1))
        await rig.until_state(first, JobState.FAILED)
        await rig.until_running(await rig.submit(job(2)), 1)
        await rig.until(lambda: rig.attempts(first)[0].state is AttemptState.ENDED)
    assert rig.job(first).reason.startswith(QUARANTINE_MARK)
    assert [request.key for request in rig.shop.requests] == [SECOND]


async def test_a_host_whose_words_cannot_be_read_costs_no_other_host(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    from spotd.daemon.hosts import monitor

    real = read_news

    def look(reading: ReadScope) -> None:
        if reading.job.id == "j1":
            raise RecursionError("nested a thousand deep")
        real(reading)

    async with rig.running():
        first, second = await two_running(rig)
        monkeypatch.setattr(monitor, "read_news", look)
        rig.host(second, 1).exit("succeeded")
        await rig.until_state(second, JobState.SUCCEEDED)
        rig.shop.set_state(FIRST, InstanceState.PAUSED)
        await rig.until(lambda: not rig.attempts(first)[0].state.counts)


@pytest.mark.parametrize("call", ["launched", "launch_refused", "launch_unknown", "terminate_accepted"])
async def test_an_outcome_that_cannot_be_taken_in_ends_no_daemon_and_forgets_no_machine(
    call: str, rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    from spotd.core.kernel import outcomes
    from spotd_providers.contract.errors import NoCapacity, OutcomeUnknown

    def broken(*_args: object, **_kwargs: object) -> Any:
        raise ZeroDivisionError("nobody expected this")

    if call == "launch_refused":
        rig.shop.faults["launch"].append(NoCapacity("sold out"))
    if call == "launch_unknown":
        rig.shop.faults["launch"].append(OutcomeUnknown("the line broke", key=FIRST))
    async with rig.running():
        with monkeypatch.context() as patched:
            patched.setattr(outcomes, call, broken)
            first = await rig.submit(job(1))
            if call == "terminate_accepted":
                await rig.until(lambda: bool(rig.attempts(first)) and rig.attempts(first)[0].ref is not None)
                await rig.cancel(first)
            await rig.until(lambda: rig.job(first).state.is_final)
            await rig.until(lambda: not rig.shop.alive())
        await rig.until(lambda: rig.attempts(first)[0].state is AttemptState.ENDED)
        await rig.until_running(await rig.submit(job(2)), 1)


async def test_a_quarantined_job_is_shown_by_doctor_until_it_is_queued_again(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def prepare(_attempt: Any, _owner: Any) -> str:
        raise KeyError("a spec nobody thought of")

    async with rig.running():
        with monkeypatch.context() as patched:
            patched.setattr(rig.grant_writer, "prepare", prepare)
            first = await rig.submit(job(1))
            await rig.until_state(first, JobState.FAILED)
        handlers = rig.handlers()
        [row] = [row for row in (await handlers.doctor.report())["checks"] if row["name"] == "job job1"]
        assert not row["ok"]
        assert row["hint"] == "spotctl retry job1"
        assert "a spec nobody thought of" in row["detail"]
        await handlers.jobs.retry(first)
        assert not [row for row in (await handlers.doctor.report())["checks"] if row["name"] == "job job1"]
        await rig.until_running(first, 2)


async def test_a_state_that_refuses_what_a_start_writes_is_held_and_adopted_once_it_does_not(rig: Rig) -> None:
    rig.shop.offer_index = [offer("o1")]
    rig.shop.faults["launch"].append(Hang(acts=True))
    async with rig.running():
        first = await rig.submit(job(1))
        await rig.until(lambda: bool(rig.shop.requests))
    corrupt(rig, "CREATE TRIGGER refuses BEFORE UPDATE ON attempts BEGIN SELECT RAISE(ABORT, 'no'); END")
    reborn = rig.reborn()
    with pytest.raises(InvariantBroken):
        await reborn.control_loop.adopt()
    async with anyio.create_task_group() as group:
        group.start_soon(reborn.executor.run)
        group.start_soon(reborn.control_loop.controller.run)
        for poller in reborn.pollers.values():
            group.start_soon(poller.machines.run)
        await reborn.until(lambda: bool(reborn.control_loop.held))
        corrupt(reborn, "DROP TRIGGER refuses")
        await reborn.until(lambda: reborn.attempts(first)[0].ref is not None)
        group.cancel_scope.cancel()
    assert "machine.adopted" in reborn.kinds(first)


@pytest.mark.parametrize("got", ["spotd-lab-j9-9", "of-another-program"], ids=["ours", "foreign"])
async def test_a_launch_that_is_answered_with_another_key_names_that_machine_and_ends_it_only_if_it_is_ours(
    got: str, rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, really_end, answers, ended = rig.shop.launch, rig.shop.terminate, [AttemptKey(got)], list[str]()

    async def launch(request: LaunchRequest) -> Launched:
        if not answers:
            return await real(request)
        made = rig.shop.put_machine(answers.pop())
        if got.startswith("of-"):  # lists show machines of our label alone
            del rig.shop.machines[made.ref.instance_id]
        return Launched(instance=made)

    async def terminate(ref: InstanceRef) -> None:
        ended.append(ref.instance_id)
        await really_end(ref)

    monkeypatch.setattr(rig.shop, "launch", launch)
    monkeypatch.setattr(rig.shop, "terminate", terminate)
    async with rig.running():
        first = await rig.submit(job(1))
        await rig.until_running(first, 2)
        await rig.until(lambda: all(m.key != got for m in rig.shop.not_gone()))
    recorded = rig.store.read(lambda reads: reads.events(job_id=first))
    [unknown] = [e.event.message for e in recorded if e.event.kind == "launch.unknown"]
    assert f"machine m1, which carries another key: '{got}'" in unknown
    assert ended == ([] if got.startswith("of-") else ["m1"])
