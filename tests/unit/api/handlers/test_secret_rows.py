"""Jobs with secrets over a state that several computers share: taken with a key, kept encrypted, gone with success."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from spotd.api.requests import Submission
from spotd.api.responses import Invalid, StateConflict
from spotd.core.domain.intents import JobId
from spotd.core.domain.states import EndReason, JobState
from spotd.daemon.grants import secret_rows
from spotd.daemon.grants.inputs import InputsAway, SecretsLocked, SecretsMissing
from spotd.daemon.log import HIDDEN
from spotd.store import NotDecrypted, SecretsKey, SecretsKeys, StateError, StateUnavailable
from tests.unit.api.handlers.test_handlers import draft
from tests.unit.daemon.rig import Rig

pytestmark = pytest.mark.anyio
CANARY = "canary-value"
KEY, OTHER = SecretsKey.of(bytes(range(32))), SecretsKey.of(bytes(range(1, 33)))
OURS, THEIRS = SecretsKeys(current=KEY), SecretsKeys(current=OTHER)


@pytest.fixture
def shared(tmp_path: Path) -> Rig:
    return Rig(tmp_path, keys=OURS)


async def submit(rig: Rig, *, array: str = "", value: str = CANARY, name: str = "train", price: float = 1.0) -> JobId:
    made = Submission(
        draft=draft(name=name, secrets=["TOKEN"], price={"max_price": price}), array=array, secrets={"TOKEN": value}
    )
    return JobId((await rig.handlers().submissions.submit(made))["job"]["id"])


def stored(rig: Rig) -> dict[JobId, str]:
    return dict(rig.store.read(lambda reads: reads.secrets_key_ids()))


async def begin(rig: Rig, keys: SecretsKeys) -> None:
    """Another process leads, with these keys."""
    rig.secret_rows.use(keys)
    await rig.secret_rows.begin(rig.secrets)


async def test_a_job_gets_its_secrets_and_its_row_goes_with_its_success(shared: Rig) -> None:
    async with shared.ready():
        job = await submit(shared)
        assert stored(shared) == {job: KEY.id}
        assert not shared.secrets.jobs()
        host = await shared.until_running(job, 1)
        assert shared.grant(job, 1).secrets == {"TOKEN": CANARY}
        assert shared.redactor.clean(CANARY) == HIDDEN
        (row,) = shared.store.read(lambda reads: reads.secrets())
        assert CANARY not in row.data
        host.exit("succeeded")
        await shared.until_state(job, JobState.SUCCEEDED)
        assert stored(shared) == {}
        with pytest.raises(StateConflict, match="not in the state"):
            await shared.handlers().jobs.retry(job, anyway=True)


async def test_a_job_that_fails_keeps_them_for_its_retry(shared: Rig) -> None:
    async with shared.ready():
        job = await submit(shared)
        await shared.handlers().jobs.cancel(job)
        await shared.until_state(job, JobState.CANCELLED)
        assert stored(shared) == {job: KEY.id}
        await begin(shared, THEIRS)
        with pytest.raises(StateConflict, match=f"encrypted with key {KEY.id}") as refused:
            await shared.handlers().jobs.retry(job)
        assert "the same key" in (refused.value.hint or "")
        await begin(shared, OURS)
        await shared.handlers().jobs.retry(job)


async def test_a_submission_that_is_refused_leaves_no_row(shared: Rig) -> None:
    async with shared.ready():
        await submit(shared, price=0.01)
        with pytest.raises(StateConflict, match="named train"):
            await submit(shared)
        assert len(stored(shared)) == 1


async def test_each_job_of_an_array_has_a_row_of_its_own(shared: Rig) -> None:
    async with shared.ready():
        await submit(shared, array="0-2", price=0.01)
        rows = shared.store.read(lambda reads: reads.secrets())
        assert len({row.data for row in rows}) == 3
        assert [OURS.decrypt(row) for row in rows] == [{"TOKEN": CANARY}] * 3


async def test_the_secrets_of_a_large_array_are_asked_for_a_hundred_at_a_time(
    shared: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[object] = []
    async with shared.ready():
        await submit(shared, array="0-149", price=0.01)
        first, *others = sorted(stored(shared))
        shared.store.tx(lambda tx: tx.connection.exec_driver_sql("delete from job_secrets where job_id = ?", (first,)))
        read_here = shared.database.read_here

        def counted(work: Any) -> Any:
            asked.append(work)
            return read_here(work)

        monkeypatch.setattr(shared.database, "read_here", counted)
        missing = shared.secret_rows.missing({job: ["TOKEN"] for job in (first, *others)} | {JobId("bare"): []})
        assert [*missing] == [first]
        assert len(asked) == 2


async def test_more_than_one_transaction_bears_is_refused(shared: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(secret_rows, "BYTES_MAX", 1000)
    async with shared.ready():
        await submit(shared, array="0-9", price=0.01)
        with pytest.raises(Invalid, match="the secrets of 100 jobs are larger"):
            await submit(shared, name="more", array="0-99")
        with pytest.raises(Invalid, match="the secrets of 10 jobs are larger"):
            await submit(shared, name="more", array="0-9", value="\N{GRINNING FACE}" * 20)
        many = {"TOKEN": "x" * 2000}
        assert await shared.secret_rows.refusal(many) is None, "what is taken back is not bounded"


@pytest.mark.parametrize(
    ("keys", "words"),
    [(SecretsKeys(), "secrets_key is not set"), (SecretsKeys(error="no such file /k"), "no such file /k")],
)
async def test_without_a_key_the_submission_is_refused_with_cause_place_and_way_out(
    tmp_path: Path, keys: SecretsKeys, words: str
) -> None:
    rig = Rig(tmp_path, keys=keys)
    async with rig.ready():
        with pytest.raises(Invalid, match=words) as refused:
            await submit(rig)
        assert "postgresql://db/spotd" in str(refused.value)
        assert "spotd secrets-key FILE" in (refused.value.hint or "")
        assert CANARY not in f"{refused.value} {refused.value.hint}"
        assert rig.store.read(lambda reads: reads.jobs()) == ()


async def test_with_another_key_the_submission_is_refused_while_jobs_wait_for_the_first(shared: Rig) -> None:
    async with shared.ready():
        job = await submit(shared, price=0.01)
        await begin(shared, THEIRS)
        with pytest.raises(Invalid, match=f"{KEY.id}, and .* is {OTHER.id} here") as refused:
            await submit(shared, name="other")
        assert "the same key" in (refused.value.hint or "")
        await shared.handlers().jobs.cancel(job)  # the way out where that key is lost
        await shared.until_state(job, JobState.CANCELLED)
        other = await submit(shared, name="other")
        assert stored(shared)[other] == OTHER.id


async def test_a_job_whose_key_is_elsewhere_waits_says_why_and_is_not_bought_for(shared: Rig) -> None:
    async with shared.running():
        job = await submit(shared)
        await begin(shared, THEIRS)
        await shared.until(lambda: shared.offer_cache.page(shared.shop.name) is not None)
        cycles = shared.control_loop.cycles
        await shared.until(lambda: shared.control_loop.cycles > cycles + 2)
        assert shared.attempts(job) == ()
        state = shared.control_loop.state
        assert state is not None
        assert f"encrypted with key {KEY.id}" in state.verdicts[job].sentence
        await begin(shared, OURS)
        await shared.until_running(job, 1)


@pytest.mark.parametrize("keys", [THEIRS, SecretsKeys(error="/k cannot be read")], ids=["another", "unreadable"])
async def test_a_job_taken_since_the_lead_began_waits_as_well_once_the_key_is_not_there(
    shared: Rig, keys: SecretsKeys
) -> None:
    async with shared.running():
        await shared.secret_rows.begin(shared.secrets)
        job = await submit(shared)
        shared.secret_rows.use(keys)
        assert f"encrypted with key {KEY.id}" in shared.secret_rows.locked[job]
        cycles = shared.control_loop.cycles
        await shared.until(lambda: shared.control_loop.cycles > cycles + 20)
        assert (shared.job(job).state, shared.attempts(job)) == (JobState.QUEUED, ())
        shared.secret_rows.use(OURS)
        await shared.until_running(job, 1)


async def test_a_launch_for_which_the_key_is_not_there_is_no_start(shared: Rig) -> None:
    async with shared.running():
        await begin(shared, THEIRS)
        shared.policy.paused = "until the row is that of another spotd"
        job = await submit(shared)
        row = shared.store.read(lambda reads: reads.secrets([job]))[0]
        shared.store.tx(lambda tx: tx.write_secrets([KEY.encrypt(job, THEIRS.decrypt(row))]))
        shared.policy.paused = ""
        await shared.until(lambda: bool(shared.attempts(job)) and job in shared.secret_rows.locked)
        await shared.until(lambda: shared.attempts(job)[0].end_reason is not None)
        assert [one.end_reason for one in shared.attempts(job)] == [EndReason.NOT_SENT]
        assert (shared.job(job).failed_starts, shared.job(job).idle_launches) == (0, 0)
        assert "encrypted with key" in shared.secret_rows.locked[job]
        await begin(shared, OURS)
        await shared.until_running(job, 2)


@pytest.mark.parametrize("sql", ["update job_secrets set data = 'AAAA'", "delete from job_secrets"])
async def test_a_machine_keeps_its_lease_and_its_secrets_when_their_row_is_gone_or_changed(
    shared: Rig, sql: str
) -> None:
    async with shared.ready():
        job = await submit(shared)
        await shared.until_running(job, 1)
        shared.store.tx(lambda tx: tx.connection.exec_driver_sql(sql))
        before = shared.grant(job, 1).issued_at
        await shared.until(lambda: shared.grant(job, 1).issued_at > before)
        assert shared.grant(job, 1).secrets == {"TOKEN": CANARY}


async def test_a_machine_keeps_its_lease_and_its_secrets_whoever_has_the_key(shared: Rig) -> None:
    async with shared.ready():
        job = await submit(shared)
        await shared.until_running(job, 1)
        await begin(shared, THEIRS)
        before = shared.grant(job, 1).issued_at
        await shared.until(lambda: shared.grant(job, 1).issued_at > before)
        assert shared.grant(job, 1).secrets == {"TOKEN": CANARY}


async def test_a_key_is_replaced_by_the_next_leader(shared: Rig) -> None:
    async with shared.ready():
        job = await submit(shared, price=0.01)
        keys = SecretsKeys(current=OTHER, former=KEY)
        await begin(shared, keys)
        assert stored(shared) == {job: OTHER.id}
        await begin(shared, THEIRS)
        assert shared.secret_rows.locked == {}
        assert shared.secret_rows.read(job, ["TOKEN"]) == {"TOKEN": CANARY}
        await begin(shared, OURS)
        assert list(shared.secret_rows.locked) == [job]


async def test_a_row_that_was_moved_to_another_job_or_is_gone_is_no_secret(shared: Rig) -> None:
    async with shared.ready():
        one, other = await submit(shared, price=0.01), await submit(shared, name="other", price=0.01)
        row = shared.store.read(lambda reads: reads.secrets([one]))[0]
        shared.store.tx(lambda tx: tx.write_secrets([replace(row, job=other)]))
        with pytest.raises(SecretsMissing, match=f"job {other} are not what was stored") as found:
            shared.secret_rows.read(other, ["TOKEN"])
        assert not isinstance(found.value, SecretsLocked)
        for data in (None, b"AAAA", 7):
            with pytest.raises(NotDecrypted, match="not what was stored"):
                OURS.decrypt(replace(row, data=data))  # type: ignore[arg-type]  # as another hand may have left it
        with pytest.raises(SecretsMissing, match="has no value for MORE"):
            shared.secret_rows.read(one, ["TOKEN", "MORE"])
        with pytest.raises(SecretsMissing, match="not in the state"):
            shared.secret_rows.read(JobId("nothing"), ["TOKEN"])


@pytest.mark.parametrize("error", [StateUnavailable, StateError])
async def test_a_state_that_does_not_answer_is_tried_again(
    shared: Rig, monkeypatch: pytest.MonkeyPatch, error: type[StateError]
) -> None:
    def away(_work: object) -> None:
        raise error("it does not answer", hint="wait")

    monkeypatch.setattr(shared.database, "read_here", away)
    with pytest.raises(InputsAway, match="it does not answer"):
        shared.secret_rows.read(JobId("j1"), ["TOKEN"])


async def test_files_that_a_move_left_behind_are_removed_once_they_are_rows(shared: Rig) -> None:
    async with shared.ready():
        job = await submit(shared, price=0.01)
        shared.secrets.write(job, {"TOKEN": CANARY})
        shared.secrets.write(JobId("elsewhere"), {"TOKEN": CANARY})
        await begin(shared, THEIRS)
        assert shared.secrets.jobs() == {job, JobId("elsewhere")}, "its row cannot be read here"
        await begin(shared, OURS)
        assert shared.secrets.jobs() == {JobId("elsewhere")}
