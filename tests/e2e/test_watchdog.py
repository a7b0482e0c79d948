"""A command that hangs, on real processes: it is stopped after what it saved is stored, and goes on elsewhere."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.ctl import assert_no_traceback, spotctl
from tests.e2e.harness import host, lab

pytestmark = [pytest.mark.e2e, pytest.mark.lengthy]  # in virtual time: tests/unit/daemon/test_watchdog.py

HANGS_ONCE = """
if [ -n "$SPOTD_RESUME" ]; then cp "$SPOTD_RESUME/state" "$SPOTD_OUTPUT_DIR/seen"; exit 0; fi
echo step 1
cd "$SPOTD_CHECKPOINT_DIR" && mkdir step-1 && echo trained > step-1/state && touch step-1/DONE
exec sleep 1000
"""


def test_a_hung_command_is_stopped_and_the_job_ends_well_on_another_host(tmp_path: Path) -> None:
    with lab(tmp_path / "lab", hosts=host("h1", 0.30) + host("h2", 0.31), scale=60.0) as found:
        found.start()
        flags = ("--image", "none", "--gpu", "RTX_4090", "--disk", "10GB", "--max-price", "1.0", "-o", "id", "-y", "-d")
        watch = ("--no-progress", "10m", "--every", "15m")
        done = spotctl(found, "submit", "--name", "train", *watch, *flags, "--", "/bin/sh", "-c", HANGS_ONCE)
        assert done.returncode == 0, done.stderr
        job = done.stdout.strip()
        found.wait_final(job)
        answer = found.job(job)
        assert answer["state"] == "SUCCEEDED", spotctl(found, "logs", job).stdout
        first, second = answer["attempts"]
        assert (first["reason"], second["resumed_from"]) == ("stalled", "step-1")
        assert first["detail"].startswith("the job made no progress: no new output, step or checkpoint for ")
        assert first["host"] != second["host"]
        assert_no_traceback(found)
