"""One row that cannot be understood costs no answer: what is readable is shown, and which row is set aside."""

from __future__ import annotations

from datetime import timedelta

import pytest

from spotd.api.requests import JobQuery
from spotd.core.domain.intents import JobId
from spotd.store import Store
from spotd_providers.contract.values import AttemptKey, InstanceState
from tests.unit.core.builders import job, offer
from tests.unit.daemon.rig import Rig
from tests.unit.daemon.test_containment import ROWS, corrupt

pytestmark = pytest.mark.anyio

OTHERS = {
    "an attempt's start": "UPDATE attempts SET running_at = 'soon' WHERE job_id = 'j1'",
    "an attempt's ceiling": "UPDATE attempts SET meter_since = 9223372036854775807 WHERE job_id = 'j1'",
    "a checkpoint": "INSERT INTO checkpoints (job_id, ordinal, name, attempt, bytes, at, manifest_key, sha256, pinned,"
    " host, doubted_by) VALUES ('j1', 0, 'step-1', 1, 1, 'soon', 'jobs/j1/checkpoints/1/step-1.json', '', 0, '', '[]')",
    "a job's spending": "UPDATE jobs SET spent = 'much' WHERE id = 'j1'",
}
READABLE = {"an attempt's key", "a job's state", "a job's count"}
"""Wrong, but not unreadable."""


@pytest.mark.parametrize("name", [*ROWS, *OTHERS])
async def test_a_row_that_cannot_be_understood_costs_no_answer(name: str, rig: Rig) -> None:
    rig.shop.offer_index = [offer(f"o{n}", price=400_000 + n) for n in range(4)]
    async with rig.ready():
        await rig.until_running(await rig.submit(job(1)), 1)
        await rig.until_running(await rig.submit(job(2)), 1)
    corrupt(rig, {**ROWS, **OTHERS}[name])
    handlers = rig.handlers()
    whole = await handlers.jobs.detail("j1")
    assert (whole["job"]["id"], whole["job"]["name"]) == ("j1", "job1")
    if name not in READABLE:
        (sentence,) = whole["set_aside"]
        assert "cannot be understood" in sentence
        assert sentence.startswith("attempt 1" if "attempt" in name else "this job")
    assert (await handlers.jobs.why("j1"))["events"]
    page = await handlers.jobs.page(JobQuery())
    assert {row["id"] for row in page["jobs"]} == {"j1", "j2"}
    cost = await handlers.receipts.cost(None)
    assert {row["id"] for row in cost["receipts"]} == {"j1", "j2"}
    assert (await handlers.receipts.cost("j1"))["receipts"][0]["name"] == "job1"
    other = await handlers.jobs.detail("j2")
    assert (other["set_aside"], len(other["job"]["attempts"])) == ([], 1)


async def test_the_readable_attempts_are_shown_and_the_booked_money_of_the_others_counts(rig: Rig) -> None:
    async with rig.ready():
        name = await rig.submit(job(1))
        await rig.until_running(name, 1)
        await rig.clock.sleep(timedelta(minutes=20))
        rig.shop.set_state(AttemptKey("spotd-lab-j1-1"), InstanceState.GONE)
        await rig.until_running(name, 2)
    before = await rig.handlers().receipts.cost(name)
    corrupt(rig, "UPDATE attempts SET quote = '{' WHERE job_id = 'j1' AND number = 1")
    whole = await rig.handlers().jobs.detail(name)
    assert [one["attempt"] for one in whole["job"]["attempts"]] == [2]
    (sentence,) = whole["set_aside"]
    assert sentence.startswith("attempt 1: its row in the state cannot be understood (")
    after = await rig.handlers().receipts.cost(name)
    assert after["spent_usd"] == pytest.approx(before["spent_usd"]) != 0
    assert any("attempt 1 cannot be understood" in one for one in after["receipts"][0]["corrections"])


async def test_the_values_of_no_job_go_at_a_start_and_a_job_that_cannot_be_understood_keeps_its_own(rig: Rig) -> None:
    name = await rig.submit(job(1))
    for owner in (name, JobId("j9")):
        rig.secrets.write(owner, {"TOKEN": "x"})
    corrupt(rig, "UPDATE jobs SET spec = '[]' WHERE id = 'j1'")
    await rig.secrets.remove_of_no_job(rig.database)
    assert rig.secrets.jobs() == {name}


def test_an_ended_job_whose_row_cannot_be_understood_holds_up_no_collection(store_of_one: Store) -> None:
    found = store_of_one.read(lambda reads: reads.readable_jobs([JobId("j1"), JobId("j2")]))
    assert [one.id for one in found] == ["j2"]


@pytest.fixture
def store_of_one(rig: Rig) -> Store:
    from tests.unit.store import values as v

    rig.store.tx(lambda tx: tx.commit(v.running_job("j1")))
    rig.store.tx(lambda tx: tx.commit(v.running_job("j2")))
    corrupt(rig, "UPDATE jobs SET submitted_at = 9223372036854775807 WHERE id = 'j1'")
    return rig.store
