"""`spotctl checkpoints`: the list, and what an owner does with it."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from spotd.core.domain.intents import JobId
from spotd.core.domain.states import JobState
from spotd.daemon.contents import checkpoint_manifest
from spotd_jobs.spec.model import CheckpointPolicy
from tests.unit.api import worlds
from tests.unit.api.made_responses import kept_checkpoint
from tests.unit.cli.conftest import Ctl

JOB = JobId(worlds.RUNNING_ID)
SUCCEEDED = JobState.SUCCEEDED


@pytest.fixture
def saved(ctl: Ctl, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ctl:
    """A job with two checkpoints; the current folder is empty."""
    monkeypatch.chdir(tmp_path)
    newest = worlds.stored_checkpoint(ctl.rig, "step-1200", b"w" * 1_500_000, of=JOB, metric=0.25)
    older = worlds.stored_checkpoint(ctl.rig, "step-1100", b"v" * 1_500_000, of=JOB, step=None, pinned=True)
    measured = worlds.spec("llama-lora", checkpoint=CheckpointPolicy(metric="loss"))
    ctl.place.write(worlds.ended(SUCCEEDED, name="llama-lora", ident=JOB, checkpoints=(newest, older), spec=measured))
    return ctl


def damage(ctl: Ctl) -> None:
    """A chunk of the newest checkpoint has other content than was saved."""
    newest = ctl.rig.job(JOB).checkpoints[0]
    manifest, _ = checkpoint_manifest(ctl.rig.objects, newest)
    assert manifest is not None
    ctl.rig.objects.delete([manifest.chunk_keys[0]])
    ctl.rig.objects.put(manifest.chunk_keys[0], b"x" * 1_500_000)


def test_checkpoints_are_listed_newest_first(saved: Ctl) -> None:
    assert saved("checkpoints", "llama-lora").out == (
        "NAME       STEP    SIZE  BY  METRIC  KEPT    AT\n"
        "step-1200  1200  1.5 MB   1    0.25  best    2026-11-21 09:30:00\n"
        "step-1100     -  1.5 MB   1       -  pinned  2026-11-21 09:30:00\n"
    )
    assert saved("checkpoints", "llama-lora", "-o", "id").out == "step-1200\nstep-1100\n"
    assert json.loads(saved("checkpoints", "llama-lora", "-o", "json").out)["checkpoints"][0]["step"] == 1200


def test_one_that_another_job_wrote_names_that_job(saved: Ctl) -> None:
    saved.place.answers("checkpoints.entries", [kept_checkpoint(attempt=0, job="6k0other00")])
    assert "job 6k0other00" in saved("checkpoints", "llama-lora").out


def test_verify_reads_the_newest_unless_told_otherwise(saved: Ctl) -> None:
    result = saved("checkpoints", "llama-lora", "verify")
    assert (result.code, result.out) == (
        0,
        "NAME       BY    READ  FOUND\nstep-1200   1  1.5 MB  every byte is what was saved\n",
    )
    assert saved("checkpoints", "llama-lora", "verify", "step-1100", "-o", "id").out == "step-1100\n"
    every = json.loads(saved("checkpoints", "llama-lora", "verify", "--all", "-o", "json").out)
    assert (every["ok"], [row["name"] for row in every["verified"]]) == (True, ["step-1200", "step-1100"])


def test_damage_is_exit_1_and_names_the_way_out(saved: Ctl) -> None:
    damage(saved)
    result = saved("checkpoints", "llama-lora", "verify", "--all")
    assert result.code == 1
    assert "1 damaged chunk; step-1200/weights: chunk 4ead3cfc4c99 holds other content than was saved" in result.out
    assert "spotctl checkpoints llama-lora rm step-1200" in result.err
    body = json.loads(saved("checkpoints", "llama-lora", "verify", "-o", "json").out)
    assert (body["ok"], body["verified"][0]["ok"], body["verified"][0]["damaged"]) == (False, False, 1)


def test_a_daemon_that_goes_away_in_the_middle_has_verified_nothing(saved: Ctl) -> None:
    real = saved.place.handlers.checkpoints.verify

    async def cut(*args: Any, **given: Any) -> AsyncIterator[Any]:
        async with aclosing(real(*args, **given)) as records:
            yield await anext(records)

    saved.place.replace("checkpoints.verify", cut)
    result = saved("checkpoints", "llama-lora", "verify", "-o", "json")
    assert (result.code, json.loads(result.out)["ok"]) == (5, False)
    assert "ended before it had read all of step-1200" in result.err


def test_pin_and_unpin_say_what_holds_now(saved: Ctl) -> None:
    assert saved("checkpoints", "llama-lora", "pin", "step-1200").out == "step-1200 (1.5 MB) is pinned\n"
    assert saved.rig.job(JOB).checkpoints[0].pinned
    assert saved("checkpoints", "llama-lora", "unpin", "step-1200").out == "step-1200 (1.5 MB) is not pinned any more\n"
    body = json.loads(saved("checkpoints", "llama-lora", "pin", "step-1200", "-o", "json").out)
    assert body["checkpoints"][0]["pinned"] is True


def test_rm_removes_and_a_pinned_one_is_refused(saved: Ctl) -> None:
    refused = saved("checkpoints", "llama-lora", "rm", "step-1100", "-y")
    assert (refused.code, refused.err) == (
        2,
        f"error: checkpoint step-1100 of llama-lora is pinned\nhint: spotctl checkpoints {JOB} unpin step-1100\n",
    )
    assert saved("checkpoints", "llama-lora", "rm", "step-1200", "-y").out == "step-1200 (1.5 MB) is removed\n"
    assert [one.name for one in saved.rig.job(JOB).checkpoints] == ["step-1100"]
    assert saved("checkpoints", "llama-lora", "rm", "step-1200", "-y").code == 6


def test_pull_fetches_the_newest_into_a_folder(saved: Ctl, tmp_path: Path) -> None:
    result = saved("checkpoints", "llama-lora", "pull", "--to", "here")
    assert (result.code, result.out) == (0, "here/step-1200/weights\n")
    assert (tmp_path / "here/step-1200/weights").read_bytes() == b"w" * 1_500_000


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (("pin",), "error: name the checkpoint to pin\n"),
        (("rm",), "error: name the checkpoint to rm\n"),
        (("pull", "a", "b"), "error: pull fetches one checkpoint at a time\n"),
        (("verify", "--force"), "error: --force goes with pull\n"),
        (("--all",), "error: --all goes with verify\n"),
        (("verify", "a", "--all"), "error: the parameters checkpoint and all exclude each other\n"),
    ],
    ids=["pin what", "rm what", "pull two", "force what", "all of what", "all and one"],
)
def test_what_makes_no_sense_is_refused(saved: Ctl, words: tuple[str, ...], error: str) -> None:
    result = saved("checkpoints", "llama-lora", *words)
    assert (result.code, result.err[: len(error)]) == (2, error)
