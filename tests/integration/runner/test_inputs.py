"""Outputs of one job as inputs of another, with the real runner on both sides."""

from __future__ import annotations

from pathlib import Path

import pytest

from spotd_jobs.wire.grant import ArrayPlace, Grant, InputGrant
from spotd_jobs.wire.manifest import AcceptedManifest, restore_of, verify_manifest
from spotd_jobs.wire.reports import Outcome
from tests.integration.runner.rig import JOB, Rig

PREPARE = """
mkdir -p out/deep; printf rows >out/deep/table
printf x >"$SPOTD_OUTPUT_DIR/run.sh"; chmod 755 "$SPOTD_OUTPUT_DIR/run.sh"
"""


def prepared(rig: Rig) -> InputGrant:
    """What the first job left, as a grant of the second names it."""
    machine = rig.start(rig.grant(["/bin/sh", "-c", PREPARE], outputs=["out/**"]))
    assert machine.wait() == 0
    key = machine.prefix + "outputs/manifest.json"
    accepted = verify_manifest(rig.store.get(key) or b"", JOB, 1, None)
    assert isinstance(accepted, AcceptedManifest)
    return InputGrant(folder="prep", restore=restore_of(accepted, key, rig.store.url))


def reading(rig: Rig, given: InputGrant, command: str, **changes: object) -> Grant:
    grant = rig.grant(["/bin/sh", "-c", command], setup="test -s $SPOTD_INPUT_DIR/prep/out/deep/table", attempt=2)
    return rig.renew(grant, inputs=[given], **changes)


def test_a_job_reads_what_another_left_before_its_setup_begins(tmp_path: Path) -> None:
    with Rig(tmp_path) as rig:
        command = (
            'cd "$SPOTD_INPUT_DIR/prep" && test -x run.sh && cat out/deep/table && echo " $SPOTD_ARRAY_INDEX of 8"'
        )
        grant = reading(rig, prepared(rig), command, array=ArrayPlace(index=3, count=8))
        machine = rig.start(grant)
        assert machine.wait() == 0
        done = machine.events()[-1].exit()
        assert done is not None
        assert done.outcome is Outcome.SUCCEEDED
        assert "rows 3" in machine.log()


@pytest.mark.parametrize("harm", ["changed", "gone"])
def test_inputs_that_are_not_what_was_left_are_never_read(tmp_path: Path, harm: str) -> None:
    with Rig(tmp_path) as rig:
        given = prepared(rig)
        for key in given.restore.chunks:
            place = rig.store.path(key)
            if harm == "changed":
                place.write_bytes(place.read_bytes()[:-1] + b"?")
            else:
                place.unlink()
        machine = rig.start(reading(rig, given, "echo ran"))
        assert machine.wait() == 0
        done = machine.events()[-1].exit()
        assert done is not None
        assert done.outcome is Outcome.INPUT_UNUSABLE
        assert done.reason.startswith("prep: a chunk")
        assert "ran" not in machine.log().split()
