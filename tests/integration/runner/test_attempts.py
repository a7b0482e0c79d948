"""The runner as a process of its own: from a grant to the last report."""

from __future__ import annotations

import json
import os
import sys
from functools import partial
from pathlib import Path

import pytest

from spotd_jobs.wire.manifest_document import parse_manifest
from spotd_jobs.wire.reports import EventKind, Outcome, Phase
from tests.integration.runner.rig import Rig, until
from tests.integration.runner.trainer import TRAINER, final_weights

pytestmark = pytest.mark.e2e
SECRET = "hunter2-canary"


def train(*words: str) -> list[str]:
    return [sys.executable, "-IS", "train.py", *words]


def test_a_job_runs_from_its_code_and_everything_it_leaves_is_stored(tmp_path: Path) -> None:
    with Rig(tmp_path) as rig:
        grant = rig.grant(
            [
                "/bin/sh",
                "-c",
                "cat hello; cat made; mkdir -p out/deep; echo A >out/deep/a; echo B >$SPOTD_OUTPUT_DIR/b",
            ],
            code={"hello": "from the code\n"},
            setup="echo setting up; echo by setup >made",
            outputs=["out/**"],
        )
        machine = rig.start(grant)
        assert machine.wait() == 0
        assert machine.log() == "setting up\nfrom the code\nby setup\n"
        assert [event.kind for event in machine.events()] == [
            EventKind.BOOT,
            EventKind.STARTED,
            EventKind.OUTPUTS,
            EventKind.EXIT,
        ]
        beat = machine.heartbeat()
        assert beat is not None
        assert beat.exit is not None
        assert (beat.phase, beat.exit.outcome, beat.exit.exit_code) == (Phase.DONE, Outcome.SUCCEEDED, 0)
        assert machine.events()[-1].exit() == beat.exit
        manifest = parse_manifest(rig.store.get(grant.upload.prefix + "outputs/manifest.json") or b"")
        assert [entry.path for entry in manifest.files] == ["b", "out/deep/a"]
        assert [c.part_of(rig.store.get(c.key) or b"") for e in manifest.files for c in e.chunks] == [b"B\n", b"A\n"]
        assert json.loads((machine.directory / "machine-done").read_text())["outcome"] == "succeeded"


@pytest.mark.parametrize(
    ("run", "setup", "outcome", "exit_code", "signal"),
    [
        (["/bin/sh", "-c", "exit 3"], None, Outcome.FAILED, 3, None),
        (["/bin/sh", "-c", "kill -9 $$"], None, Outcome.FAILED, None, 9),
        (["no-such-command-anywhere"], None, Outcome.FAILED, 127, None),
        (["/bin/true"], "exit 7", Outcome.SETUP_FAILED, 7, None),
    ],
    ids=["exit code", "signal", "no command", "setup"],
)
def test_how_a_job_failed_is_told(
    run: list[str], setup: str | None, outcome: Outcome, exit_code: int | None, signal: int | None, tmp_path: Path
) -> None:
    with Rig(tmp_path) as rig:
        machine = rig.start(rig.grant(run, setup=setup))
        assert machine.wait() == 0
        done = machine.events()[-1].exit()
        assert done is not None
        assert (done.outcome, done.exit_code, done.signal) == (outcome, exit_code, signal)
        assert not rig.store.get(machine.prefix + "outputs/manifest.json")


def test_code_that_is_not_what_the_grant_names_is_never_run(tmp_path: Path) -> None:
    with Rig(tmp_path) as rig:
        grant = rig.grant(["/bin/sh", "-c", "echo ran"], code={"hello": "x"})
        archive = rig.store.path("code/code.tar.gz")
        archive.write_bytes(archive.read_bytes()[:-1] + b"x")
        machine = rig.start(grant)
        assert machine.wait() == 0
        done = machine.events()[-1].exit()
        assert done is not None
        assert done.outcome is Outcome.CODE_UNUSABLE
        assert "ran" not in machine.log().split()


def test_the_job_sees_its_environment_and_secrets_are_nowhere_else(tmp_path: Path) -> None:
    with Rig(tmp_path) as rig:
        grant = rig.grant(
            ["/bin/sh", "-c", "env; test \"$TOKEN\" = " + SECRET],
            env={"MINE": "yes"},
            secrets={"TOKEN": SECRET},
            every_s=900.0,
        )  # fmt: skip
        machine = rig.start(grant, env={"CONTAINER_API_KEY": "host-key", "SPOTD_GRANT_URL": grant.grant_url})
        assert machine.wait() == 0
        done = machine.events()[-1].exit()
        assert done is not None
        assert done.outcome is Outcome.SUCCEEDED
        seen = dict(line.split("=", 1) for line in machine.log().splitlines() if "=" in line)
        assert seen["MINE"] == "yes"
        assert (seen["SPOTD_JOB_ID"], seen["SPOTD_JOB_NAME"], seen["SPOTD_ATTEMPT"]) == ("j1", "a job", "1")
        assert (seen["SPOTD_RESUME"], seen["SPOTD_CHECKPOINT_INTERVAL_S"]) == ("", "900")
        assert Path(seen["SPOTD_CHECKPOINT_DIR"]).is_dir()
        assert Path(seen["SPOTD_OUTPUT_DIR"]).is_dir()
        assert "SPOTD_NOTICE_FILE" in seen
        assert "CONTAINER_API_KEY" not in seen
        assert "SPOTD_GRANT_URL" not in seen
        written = [path for path in tmp_path.rglob("*") if path.is_file() and path.name != "grant.json"]
        assert [path for path in written if SECRET.encode() in path.read_bytes()] == []


@pytest.mark.parametrize("style", ["marked", "renamed", "last"])
def test_a_killed_machine_s_job_goes_on_elsewhere_as_if_nothing_had_happened(style: str, tmp_path: Path) -> None:
    with Rig(tmp_path) as rig:
        first = rig.start(rig.grant(train("500", "0.15", style), code={"train.py": TRAINER}, settle_s=0.05))
        first.event("checkpoint")
        first.kill()
        offers = rig.restores(1)
        rest = train("500", "0", style, "50000", "final")
        second = rig.start(rig.grant(rest, attempt=2, code={"train.py": TRAINER}, restore=offers))
        assert second.wait() == 0
        restored = second.event("restored")
        assert restored.data["name"] == offers[0].name
        assert second.event("started").data["resume"] == offers[0].name
        assert "resumed at" in second.log()
        assert (second.home / "outputs/final").read_text() == final_weights(500)


def test_what_was_restored_is_not_stored_as_new_and_no_checkpoint_hangs_on_another_attempt(tmp_path: Path) -> None:
    save = "cd $SPOTD_CHECKPOINT_DIR; mkdir step-%d; cp $OLDPWD/big step-%d/w; touch step-%d/DONE"
    files = {"big": "weights that do not change " * 2000}
    with Rig(tmp_path) as rig:
        first = rig.start(rig.grant(["/bin/sh", "-c", save % (1, 1, 1)], code=files))
        assert first.wait() == 0
        second = rig.start(
            rig.grant(["/bin/sh", "-c", save % (2, 2, 2)], code=files, attempt=2, restore=rig.restores(1))
        )
        assert second.wait() == 0
        event = second.event("checkpoint")
        assert (event.data["bytes"], event.data["uploaded_bytes"]) == (54000, 54000)
        accepted = rig.accepted(2)
        assert [one.name for one in accepted] == ["step-2"], "what was restored is not stored as new"
        assert all(key.startswith(second.prefix) for key in accepted[0].chunk_keys)
        assert accepted[0].previous == rig.accepted(1)[0].sha256


def test_a_checkpoint_written_over_in_place_is_stored_each_time_under_a_name_of_its_own(tmp_path: Path) -> None:
    save = f"""
for n in 1 2 3; do
  echo "$n" 1<>"$SPOTD_CHECKPOINT_DIR/last"
  until test -e {tmp_path}/stored-$n; do sleep 0.02; done
done
"""
    with Rig(tmp_path) as rig:
        machine = rig.start(rig.grant(["/bin/sh", "-c", save], settle_s=0.1))
        for number in (1, 2, 3):
            until(partial(_has_stored, rig, number), f"checkpoint {number}")
            (tmp_path / f"stored-{number}").touch()
        assert machine.wait() == 0
        assert [one.name for one in rig.accepted(1)] == ["last", "last~2", "last~3"]
        contents = {one.chunk_keys for one in rig.accepted(1)}
        assert len(contents) == 3
        assert {one.entry for one in rig.accepted(1)} == {"last"}


def _has_stored(rig: Rig, checkpoints: int) -> bool:
    return len(rig.accepted(1)) == checkpoints


def test_a_frameworks_pointer_is_restored_beside_the_checkpoint_it_names(tmp_path: Path) -> None:
    save = """
cd $SPOTD_CHECKPOINT_DIR
for n in 1 2; do
  mkdir global_step$n; echo $n >global_step$n/mp_rank_00_model_states.pt; printf global_step$n >latest
done
echo lightning >epoch1.ckpt; ln -s epoch1.ckpt last.ckpt
"""
    with Rig(tmp_path) as rig:
        first = rig.start(rig.grant(["/bin/sh", "-c", save]))
        assert first.wait() == 0
        offers = {offer.name: offer for offer in rig.restores(1)}
        assert set(offers) == {"global_step1", "global_step2", "epoch1.ckpt"}
        for number, (name, beside, text) in enumerate(
            [("global_step1", "latest", "global_step1"), ("epoch1.ckpt", "last.ckpt", "lightning\n")], start=2
        ):
            look = rig.start(rig.grant(["/bin/sh", "-c", "exit 0"], attempt=number, restore=[offers[name]]))
            assert look.wait() == 0
            folder = look.home / "checkpoints"
            assert sorted(path.name for path in folder.iterdir()) == sorted([name, beside])
            assert (folder / beside).read_text() == text


def test_an_incomplete_checkpoint_of_a_killed_job_is_refused_and_said(tmp_path: Path) -> None:
    run = "mkdir $SPOTD_CHECKPOINT_DIR/step-1; echo half >$SPOTD_CHECKPOINT_DIR/step-1/w; kill -9 $$"
    with Rig(tmp_path) as rig:
        machine = rig.start(rig.grant(["/bin/sh", "-c", run], settle_s=10.0))
        assert machine.wait() == 0
        refused = machine.event("checkpoint_refused")
        assert refused.data == {"name": "step-1", "reason": "the job died before it was certainly complete"}
        assert rig.accepted(1) == []


def test_a_checkpoint_that_can_never_pass_is_told_while_the_job_runs(tmp_path: Path) -> None:
    folder = "$SPOTD_CHECKPOINT_DIR/step-1"
    run = f"mkdir {folder}; echo no header >{folder}/model.safetensors; echo >{folder}/DONE; sleep 300"
    with Rig(tmp_path) as rig:
        machine = rig.start(rig.grant(["/bin/sh", "-c", run]))
        refused = machine.event("checkpoint_refused")
        assert refused.data == {"name": "step-1", "reason": "a file in it is cut short"}
        assert machine.process.poll() is None
        machine.kill()


def test_the_job_s_processes_share_the_runner_s_session_and_none_outlives_the_job(tmp_path: Path) -> None:
    run = "sleep 300 & setsid sleep 300 & ps -o sid= -p $$; ps -o pgid= -p $$; echo $$"
    with Rig(tmp_path) as rig:
        machine = rig.start(rig.grant(["/bin/sh", "-c", run]))
        assert machine.wait() == 0
        session, group, pid = (int(line) for line in machine.log().split()[-3:])
        assert session == machine.process.pid
        assert group == pid
        assert not _running("SPOTD_JOB_ID=j1\0", str(tmp_path))


def _running(mark: str, home: str) -> list[str]:
    found = []
    for environ in Path("/proc").glob("[0-9]*/environ"):
        try:
            text = environ.read_text(errors="replace")
        except OSError:
            continue
        if mark in text and home in text and int(environ.parent.name) != os.getpid():
            found.append(environ.parent.name)
    return found
