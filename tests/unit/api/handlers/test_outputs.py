"""What `pull` delivers is what the attempt that succeeded had stored when its end was read, and nothing else."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest

from spotd.api.requests import JobQuery
from spotd.api.responses import ApiUnavailable, NotFound, StateConflict
from spotd.cli.commands.jobs import warning_of
from spotd.core.domain.intents import AttemptId, JobId
from spotd.core.domain.states import AttemptState, JobState
from spotd.daemon import object_keys
from spotd.daemon.garbage import sweep
from spotd_jobs.objects.api import StoreError
from spotd_jobs.objects.folder import FolderStore
from spotd_jobs.spec.model import CheckpointPolicy
from spotd_providers.contract.values import AttemptKey, InstanceState, Loss
from tests.unit.core.builders import job
from tests.unit.daemon.checkpoints.test_ended_garbage import data_keys, retention
from tests.unit.daemon.host import Host
from tests.unit.daemon.rig import Rig

pytestmark = pytest.mark.anyio


async def content(rig: Rig, name: str, path: str = "model") -> bytes:
    return b"".join([piece async for piece in rig.handlers().files.content(name, None, path)])


async def second_succeeds(rig: Rig) -> tuple[JobId, Host]:
    """The first machine is lost, the second succeeds with outputs; returns the first host."""
    name = await rig.submit(job(spec={"outputs": ("model",)}))
    first = await rig.until_running(name, 1)
    rig.shop.set_state(AttemptKey("spotd-lab-j1-1"), InstanceState.PAUSED, Loss.OUTBID)
    second = await rig.until_running(name, 2)
    second.outputs("model", b"the true model")
    second.exit("succeeded")
    await rig.until_state(name, JobState.SUCCEEDED)
    await rig.until(lambda: all(a.state is AttemptState.ENDED for a in rig.attempts(name)))
    return name, first


async def test_outputs_of_an_attempt_that_was_lost_are_never_delivered(rig: Rig) -> None:
    async with rig.ready():
        name, first = await second_succeeds(rig)
        first.outputs("model", b"#!/bin/sh\nrm -rf ~")
        assert await content(rig, name) == b"the true model"
        assert (await rig.handlers().files.entries(name, None))["attempt"] == 2


async def test_a_later_attempts_outputs_do_not_count_either_before_it_has_succeeded(rig: Rig) -> None:
    async with rig.ready():
        name, _ = await second_succeeds(rig)
        await rig.handlers().jobs.retry(name, anyway=True)
        third = await rig.until_running(name, 3)
        third.outputs("model", b"half a model")
        assert await content(rig, name) == b"the true model"


async def test_what_is_written_after_the_end_was_read_is_not_what_the_job_made(rig: Rig) -> None:
    async with rig.ready():
        name, _ = await second_succeeds(rig)
        Host(rig.objects, AttemptId(job=name, number=2)).outputs("model", b"another model")
        with pytest.raises(ApiUnavailable, match="as its machine left them"):
            await rig.handlers().files.entries(name, None)


async def test_a_job_that_failed_has_no_outputs_whatever_lies_there(rig: Rig) -> None:
    async with rig.ready():
        name = await rig.submit(job(spec={"outputs": ("model",), "retry_errors": 0}))
        host = await rig.until_running(name, 1)
        host.outputs("model", b"half a model")
        host.exit("failed", code=1)
        await rig.until_state(name, JobState.FAILED)
        with pytest.raises(NotFound, match="no outputs"):
            await rig.handlers().files.entries(name, None)


@pytest.mark.parametrize(
    ("written", "words"),
    [(None, "its machine stored none"), (b"{", "cannot be read"), (b"x" * 20_000_000, "cannot be read")],
    ids=["absent", "garbage", "too large"],
)
async def test_a_success_without_the_outputs_it_names_is_said_everywhere(
    rig: Rig, written: bytes | None, words: str
) -> None:
    async with rig.ready():
        name = await rig.submit(job(spec={"outputs": ("model",)}))
        host = await rig.until_running(name, 1)
        if written is not None:
            host.raw("outputs/manifest.json", written)
        host.exit("succeeded")
        await rig.until_state(name, JobState.SUCCEEDED)
        assert rig.kinds(name).count("outputs.missing") == 1
        assert words in (await rig.handlers().jobs.why(name))["sentence"]
        (row,) = (await rig.handlers().jobs.page(JobQuery()))["jobs"]
        assert words in row["reason"]
        assert words in warning_of(row)
        with pytest.raises(NotFound, match=words):
            await rig.handlers().files.entries(name, None)


async def test_outputs_that_are_named_and_absent_are_said_beside_those_that_are_there(rig: Rig) -> None:
    async with rig.ready():
        name = await rig.submit(job(spec={"outputs": ("mod*", "eval/**")}))
        host = await rig.until_running(name, 1)
        host.outputs("model", b"a model")
        host.exit("succeeded")
        await rig.until_state(name, JobState.SUCCEEDED)
        assert rig.kinds(name).count("outputs.missing") == 1
        assert "nothing matches eval/**" in warning_of((await rig.handlers().jobs.page(JobQuery()))["jobs"][0])
        assert "nothing matches eval/**" in (await rig.handlers().files.entries(name, None))["warning"]
        assert await content(rig, name) == b"a model"


async def test_a_job_that_names_no_outputs_is_not_warned_of(rig: Rig) -> None:
    async with rig.ready():
        name = await rig.submit()
        (await rig.until_running(name, 1)).exit("succeeded")
        await rig.until_state(name, JobState.SUCCEEDED)
        assert warning_of((await rig.handlers().jobs.page(JobQuery()))["jobs"][0]) == ""
        assert "outputs.missing" not in rig.kinds(name)


async def test_outputs_that_lack_a_piece_are_delivered_with_a_warning(rig: Rig) -> None:
    async with rig.ready():
        name = await rig.submit(job(spec={"outputs": ("model",)}))
        host = await rig.until_running(name, 1)
        host.outputs("model", b"a model")
        rig.objects.delete(data_keys(rig, 1))
        host.exit("succeeded")
        await rig.until_state(name, JobState.SUCCEEDED)
        assert "1 of 1 pieces" in (await rig.handlers().files.entries(name, None))["warning"]


# --- a success that is none ------------------------------------------------------------------------------------------


async def test_a_success_is_run_again_only_if_its_owner_says_so(rig: Rig) -> None:
    async with rig.ready():
        name = await rig.submit(job(spec={"outputs": ("model",)}))
        host = await rig.until_running(name, 1)
        host.checkpoint("c1", b"one")
        host.exit("succeeded")
        await rig.until_state(name, JobState.SUCCEEDED)
        with pytest.raises(StateConflict, match="succeeded") as refused:
            await rig.handlers().jobs.retry(name)
        assert "--anyway" in (refused.value.hint or "")
        await rig.handlers().jobs.retry(name, anyway=True)
        assert rig.kinds(name).count("job.retried") == 1
        second = await rig.until_running(name, 2)
        assert [r.name for r in rig.grant(name, 2).restore] in (["c1"], [])
        second.outputs("model", b"the model")
        second.exit("succeeded")
        await rig.until(lambda: (outputs := rig.job(name).outputs) is not None and outputs.attempt == 2)
        assert await content(rig, name) == b"the model"


async def test_a_success_whose_secrets_are_deleted_is_not_queued_to_fail(rig: Rig) -> None:
    async with rig.ready():
        item = job(spec={"secrets": ("TOKEN",)})
        rig.secrets.write(item.id, {"TOKEN": "s"})
        name = await rig.submit(item)
        (await rig.until_running(name, 1)).exit("succeeded")
        await rig.until_state(name, JobState.SUCCEEDED)
        rig.secrets.remove(name)
        with pytest.raises(StateConflict, match="cannot run again"):
            await rig.handlers().jobs.retry(name, anyway=True)


# --- what they keep from being deleted -------------------------------------------------------------------------------


class Asked(FolderStore):
    """Counts the requests for outputs."""

    outputs = 0

    def get(self, key: str, *, bytes_max: int, version: str | None = None) -> bytes:
        type(self).outputs += key.endswith("outputs/manifest.json")
        return super().get(key, bytes_max=bytes_max, version=version)


def test_a_sweep_asks_for_the_outputs_of_no_attempt_but_the_one_that_succeeded(tmp_path: Path) -> None:
    objects = Asked(tmp_path / "objects")
    Asked.outputs = 0
    sweep(objects, job(attempts_made=1_000, state=JobState.RECOVERING), frozenset({1_000}))
    assert Asked.outputs <= 1


async def test_outputs_of_lost_attempts_are_garbage_and_those_that_count_stay(rig: Rig) -> None:
    async with rig.ready():
        name, first = await second_succeeds(rig)
        first.outputs("model", b"worthless")
        for _ in range(3):
            await retention(rig).controller.run_once()
        assert (len(data_keys(rig, 1)), len(data_keys(rig, 2))) == (0, 1)
        assert rig.objects.head(object_keys.outputs_key(AttemptId(job=name, number=1))) is None
        assert await content(rig, name) == b"the true model"


# --- names that no key can have --------------------------------------------------------------------------------------


async def test_a_name_that_no_key_can_have_keeps_no_garbage(rig: Rig) -> None:
    async with rig.ready():
        name = await rig.submit(job(spec={"checkpoint": CheckpointPolicy(keep=1), "retry_errors": 0}))
        host = await rig.until_running(name, 1)
        for number in range(1, 6):
            host.checkpoint(f"c{number}", str(number).encode())
        host.exit("failed", code=1)
        await rig.until_state(name, JobState.FAILED)
        await rig.until(lambda: all(a.state is AttemptState.ENDED for a in rig.attempts(name)))
        folder = Path(rig.objects.presign_get(data_keys(rig, 1)[0], expires=rig.clock.now()).removeprefix("file://"))
        for odd in ("\x01", "\ufffe", "a\\b", "line\nbreak", "\udcff"):
            (folder.parent / odd).write_bytes(b"odd")
        for _ in range(3):
            await retention(rig).controller.run_once()
        assert len(data_keys(rig, 1)) == 1, "the odd ones too are gone"


def test_what_a_store_refuses_to_delete_keeps_nothing_else(tmp_path: Path) -> None:
    class Refusing(FolderStore):
        def delete(self, keys: Iterable[str]) -> None:
            if len(list(keys)) > 1:
                raise StoreError("one of them is locked")

        def delete_listed(self, key: str) -> None:
            if key.endswith("locked"):
                raise StoreError("it is locked")
            super().delete_listed(key)

    objects = Refusing(tmp_path / "objects")
    for name in ("a", "b", "locked"):
        objects.put(f"jobs/j1/attempts/1/data/{name}", b"x")
    done = sweep(objects, job(attempts_made=1, state=JobState.FAILED), frozenset())
    assert (done.objects, done.more, done.clean) == (2, False, frozenset())
    assert [info.key for info in objects.list("jobs/j1/attempts/1/data/")] == ["jobs/j1/attempts/1/data/locked"]


async def test_outputs_that_cannot_be_read_protect_all_that_their_attempt_wrote(rig: Rig) -> None:
    async with rig.ready():
        name = await rig.submit(job(spec={"outputs": ("model",)}))
        host = await rig.until_running(name, 1)
        host.outputs("model", b"a model")
        host.raw("outputs/manifest.json", b"{}")
        host.exit("succeeded")
        await rig.until_state(name, JobState.SUCCEEDED)
        await rig.until(lambda: all(a.state is AttemptState.ENDED for a in rig.attempts(name)))
        for _ in range(3):
            await retention(rig).controller.run_once()
        assert len(data_keys(rig, 1)) == 1


async def test_a_success_is_not_taken_in_while_a_store_refuses_to_give_its_outputs(rig: Rig) -> None:
    async with rig.ready():
        name = await rig.submit(job(spec={"outputs": ("model",)}))
        host = await rig.until_running(name, 1)
        host.outputs("model", b"a model")
        real = rig.objects.get

        def refusing(key: str, **given: object) -> bytes:
            if key.endswith("outputs/manifest.json"):
                raise StoreError("HTTP 403")
            return real(key, **given)  # type: ignore[arg-type]  # as it was called

        rig.objects.get = refusing  # type: ignore[method-assign]  # a passing refusal
        host.exit("succeeded")
        before = rig.control_loop.cycles
        await rig.until(lambda: rig.control_loop.cycles > before + 8)
        assert rig.job(name).state is JobState.RUNNING
        rig.objects.get = real  # type: ignore[method-assign]  # as it was
        await rig.until_state(name, JobState.SUCCEEDED)
        assert await content(rig, name) == b"a model"
