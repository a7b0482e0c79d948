"""Arrays and chains over a running daemon: submitted, listed, cancelled, retried, charged."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from spotd.api.requests import JobQuery, Submission
from spotd.api.responses import Invalid, NotFound, StateConflict
from spotd.core.domain.intents import JobId
from spotd.core.domain.jobs import Job
from spotd.core.domain.plan import Plan
from spotd.core.domain.states import JobState
from spotd.store import Reads
from spotd_providers.contract.values import MicroUsd
from tests.unit.api.handlers.test_handlers import draft, submitted
from tests.unit.daemon.rig import Rig

pytestmark = pytest.mark.anyio
CHEAP = {"max_price": 0.01}


async def submit_array(rig: Rig, array: str, **changes: Any) -> JobId:
    found = await rig.handlers().submissions.submit(Submission(draft=draft(**changes), array=array))
    task = found["job"]["array"]
    assert task is not None
    return JobId(task["id"])


def jobs_of(rig: Rig, array: JobId) -> list[Job]:
    def work(reads: Reads) -> list[Job]:
        return [job for view in reads.array_jobs(array) if (job := reads.job(view.id)) is not None]

    return rig.store.read(work)


async def test_one_submit_makes_all_jobs_with_names_and_places_of_their_own(rig: Rig) -> None:
    async with rig.ready():
        array = await submit_array(rig, "0-6:2,9%3", price=CHEAP)
        found = jobs_of(rig, array)
        assert [job.name for job in found] == ["train-0", "train-2", "train-4", "train-6", "train-9"]
        assert [job.array.index for job in found if job.array] == [0, 2, 4, 6, 9]
        assert {(job.array.name, job.array.count, job.array.at_once) for job in found if job.array} == {("train", 5, 3)}
        for ref in (array, "train"):
            page = await rig.handlers().jobs.page(JobQuery(array=ref))
            assert [job["name"] for job in page["jobs"]] == [job.name for job in found]
        assert (await rig.handlers().jobs.detail("train-4"))["job"]["array"] == {
            "id": array, "name": "train", "index": 4, "count": 5, "at_once": 3
        }  # fmt: skip
        with pytest.raises(NotFound, match="train is an array"):
            await rig.handlers().jobs.detail("train")
        with pytest.raises(NotFound, match="no array nothing"):
            await rig.handlers().jobs.page(JobQuery(array="nothing"))


async def test_what_a_limit_cuts_off_an_array_is_in_its_sums(rig: Rig) -> None:
    async with rig.ready():
        await submitted(rig, name="other", price=CHEAP)
        array = await submit_array(rig, "0-3", price=CHEAP)
        await rig.handlers().arrays.cancel(array)
        paid = {
            job.id: replace(job, spent=MicroUsd(100_000), on_demand=MicroUsd(300_000)) for job in jobs_of(rig, array)
        }
        rig.store.tx(lambda tx: tx.commit(Plan(jobs=paid)))
        page = await rig.handlers().jobs.page(JobQuery(limit=3))
        assert [job["name"] for job in page["jobs"]] == ["train-3", "train-2", "other"]
        [sums] = page["arrays"]
        assert sums == {
            "id": array, "states": {"CANCELLED": 4}, "spent_usd": 0.4, "estimated": False, "on_demand_usd": 1.2,
            "saved_usd": pytest.approx(0.8), "uncompared_usd": 0.0, "recoveries": 0,
        }  # fmt: skip
        assert (await rig.handlers().jobs.page(JobQuery()))["arrays"] == []


async def test_names_of_unfinished_jobs_and_arrays_exclude_each_other(rig: Rig) -> None:
    async with rig.ready():
        array = await submit_array(rig, "0-3", price=CHEAP)
        for name in ("train", "train-2"):
            with pytest.raises(StateConflict, match=r"already|has not ended"):
                await submitted(rig, name=name)
        with pytest.raises(StateConflict):
            await submit_array(rig, "7-9")
        await rig.handlers().arrays.cancel(array)
        assert await submit_array(rig, "0-1", price=CHEAP) != array


@pytest.mark.parametrize(
    ("array", "sentence"),
    [
        ("0-10000", '"0-10000" makes 10,001 jobs, and an array has at most 10,000'),
        ("0-999999999", "makes 1,000,000,000 jobs"),
        ("1,2,2", '"1,2,2" names an index twice'),
        ("5-2", '"5-2" has a range without an index'),
        ("0-4:0", "has a range without an index"),
        ("-3", '"-3" is not a list of indexes'),
        ("0-3%0", "does not say behind % how many jobs run at once"),
        ("1" * 70_000, "makes too many jobs"),
        ("\u0663", "is not a list of indexes"),
    ],
)
async def test_what_is_no_array_is_refused_with_a_sentence(rig: Rig, array: str, sentence: str) -> None:
    async with rig.ready():
        for call in (
            lambda: submit_array(rig, array),
            lambda: rig.handlers().submissions.plan(draft(), "", array),
        ):
            with pytest.raises(Invalid) as caught:
                await call()
            assert sentence in caught.value.message
        assert rig.store.read(lambda reads: reads.jobs()) == ()
        with pytest.raises(Invalid, match="longer than 63"):
            await submit_array(rig, "0-10", name="x" * 61)


async def test_a_whole_array_is_cancelled_retried_and_charged(rig: Rig) -> None:
    async with rig.ready():
        array = await submit_array(rig, "0-4", price=CHEAP)
        await rig.handlers().jobs.cancel("train-1")
        answer = await rig.handlers().arrays.cancel("train")
        assert answer is not None
        assert (answer["id"], answer["jobs"], answer["states"]) == (array, 5, {"CANCELLED": 5})
        again = await rig.handlers().arrays.retry("train", start=2)
        assert again is not None
        assert (again["retried"], again["next_index"], again["refusals"]) == (3, None, [])
        assert [job.state.is_final for job in jobs_of(rig, array)] == [True, True, False, False, False]
        cost = await rig.handlers().receipts.cost("train")
        assert (len(cost["receipts"]), cost["more"], cost["spent_usd"]) == (5, 0, 0.0)
        assert await rig.handlers().arrays.cancel("train-2") is None


async def test_secrets_of_an_array_are_there_for_each_job_and_go_with_it(rig: Rig) -> None:
    async with rig.ready():
        submission = Submission(draft=draft(secrets=["TOKEN"], price=CHEAP), array="0-2", secrets={"TOKEN": "t"})
        await rig.handlers().submissions.submit(submission)
        ids = [view.id for view in rig.store.read(lambda reads: reads.jobs())]
        assert rig.secrets.jobs() == set(ids)
        rig.secrets.remove(ids[0])
        assert rig.secrets.read(ids[1], ["TOKEN"]) == {"TOKEN": "t"}


async def test_a_job_comes_after_others_by_name_id_or_array(rig: Rig) -> None:
    async with rig.ready():
        prep = await submitted(rig, name="prep", price=CHEAP)
        array = await submit_array(rig, "0-1", name="shards", price=CHEAP)
        last = await submitted(rig, schedule={"after": [prep, "shards"]})
        shards = [job.id for job in jobs_of(rig, array)]
        chain = rig.job(last).chain
        assert chain is not None
        assert chain.after == (prep, *shards)
        await rig.until(lambda: rig.control_loop.state is not None and last in rig.control_loop.state.verdicts)
        why = await rig.handlers().jobs.why(last)
        assert (why["kind"], why["state"]) == ("after", "QUEUED")
        await rig.handlers().jobs.cancel(prep)
        await rig.until(
            lambda: (
                rig.control_loop.state is not None
                and "which is CANCELLED" in rig.control_loop.state.verdicts[last].sentence
            )
        )
        plan = await rig.handlers().submissions.plan(draft(name="b", schedule={"after": ["shards-0"]}))
        assert plan["verdict"] == f"waits for shards-0 ({shards[0]}), which is WAITING_PRICE"


@pytest.mark.parametrize(
    ("after", "message", "hint"),
    [
        (["nothing"], 'there is no job "nothing"', "submit that one first"),
        (["train"], '"train" is the job itself', "leave it out"),
        (["gone"], '"gone" would never come: gone (', "spotctl retry"),
    ],
)
async def test_what_a_job_cannot_come_after_is_refused(rig: Rig, after: list[str], message: str, hint: str) -> None:
    async with rig.ready():
        await rig.handlers().jobs.cancel(await submitted(rig, name="gone", price=CHEAP))
        for call in (
            lambda: submitted(rig, schedule={"after": after}),
            lambda: rig.handlers().submissions.plan(draft(schedule={"after": after})),
        ):
            with pytest.raises(Invalid) as caught:
                await call()
            [problem] = caught.value.problems
            assert problem.key == "schedule.after[0]"
            assert problem.message.startswith(message)
            assert hint in problem.hint


async def test_too_many_jobs_before_one_are_refused(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spotd.api.handlers.plans.AFTER_MAX", 3)
    async with rig.ready():
        await submit_array(rig, "0-3", name="shards", price=CHEAP)
        with pytest.raises(Invalid) as caught:
            await submitted(rig, schedule={"after": ["shards"]})
        assert caught.value.problems[0].message == "names 4 jobs"


async def test_a_success_whose_outputs_are_read_is_not_run_again(rig: Rig) -> None:
    async with rig.running():
        prep = await submitted(rig, name="prep", outputs=["out/**"])
        host = await rig.until_running(prep, 1)
        host.outputs("out/data", b"data")
        host.exit("succeeded")
        await rig.until_state(prep, JobState.SUCCEEDED)
        reader = await submitted(rig, schedule={"after": ["prep"]}, price=CHEAP)
        await rig.until(lambda: (chain := rig.job(reader).chain) is not None and chain.inputs is not None)
        chain = rig.job(reader).chain
        assert chain is not None
        assert [(one.job, one.name, one.attempt) for one in chain.inputs or ()] == [(prep, "prep", 1)]
        with pytest.raises(StateConflict, match="reads the outputs of prep"):
            await rig.handlers().jobs.retry(prep, anyway=True)
        await rig.handlers().jobs.cancel(reader)
        await rig.handlers().jobs.retry(prep, anyway=True)


async def test_a_grant_names_exactly_the_outputs_that_the_job_was_given_and_its_place_in_its_array(rig: Rig) -> None:
    async with rig.running():
        prep = await submitted(rig, name="prep", outputs=["out/**"])
        host = await rig.until_running(prep, 1)
        host.checkpoint("step-1")
        host.outputs("out/data", b"data")
        host.exit("succeeded")
        await rig.until_state(prep, JobState.SUCCEEDED)
        array = await submit_array(rig, "5-6", schedule={"after": ["prep"]})
        first = jobs_of(rig, array)[0].id
        await rig.until(lambda: bool(rig.attempts(first)) and rig.attempts(first)[0].ref is not None)
        grant = rig.grant(first, 1)
        [given] = grant.inputs
        assert (given.folder, given.restore.name) == ("prep", "outputs")
        assert given.restore.manifest.key == f"jobs/{prep}/attempts/1/outputs/manifest.json"
        assert grant.restore == []
        assert grant.array is not None
        assert (grant.array.index, grant.array.count) == (5, 2)
        await rig.until_running(first, 1)
        await rig.until(lambda: rig.grant(first, 1).seen_running)
        assert rig.grant(first, 1).inputs == []


async def test_outputs_that_were_written_over_are_handed_to_no_job(rig: Rig) -> None:
    async with rig.running():
        prep = await submitted(rig, name="prep", outputs=["out/**"])
        host = await rig.until_running(prep, 1)
        host.outputs("out/data", b"data")
        host.exit("succeeded")
        await rig.until_state(prep, JobState.SUCCEEDED)
        host.outputs("out/data", b"other")
        reader = await submitted(rig, schedule={"after": ["prep"]}, retry={"starts": 1})
        await rig.until_state(reader, JobState.FAILED)
        assert "the outputs of prep are not in the store any more as it left them" in rig.job(reader).reason
        assert len(rig.shop.requests) == 1


@pytest.mark.parametrize(
    "size", [pytest.param(1_500, marks=pytest.mark.long), pytest.param(10_000, marks=pytest.mark.slow)]
)
async def test_thousands_of_jobs_are_one_submission_one_transaction_and_one_cancellation(rig: Rig, size: int) -> None:
    async with rig.ready():
        array = await submit_array(rig, f"0-{size - 1}", price=CHEAP)
        answer = await rig.handlers().arrays.cancel(array)
        assert answer is not None
        assert (answer["jobs"], answer["states"]) == (size, {"CANCELLED": size})
        with rig.store._engine.connect() as connection:
            query = "SELECT kind, count(*) FROM events WHERE job_id IS NOT NULL GROUP BY kind"
            counts: dict[str, int] = dict(connection.exec_driver_sql(query).all())
        assert counts["job.submitted"] == counts["job.cancelled"] == size
        assert sum(counts.values()) < 2 * size + 10
