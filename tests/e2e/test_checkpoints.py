"""An owner and their checkpoints, with a real daemon, a real runner and `spotctl` as a process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.e2e.ctl import assert_no_traceback, spotctl
from tests.e2e.harness import host, lab

pytestmark = pytest.mark.e2e

FIRST = 'cd "$SPOTD_CHECKPOINT_DIR" && mkdir one && echo trained > one/state && touch one/DONE'
SECOND = """set -e
cat "$SPOTD_RESUME/state" > "$SPOTD_OUTPUT_DIR/seen"
cd "$SPOTD_CHECKPOINT_DIR" && cp -r one two && echo more >> two/state
"""


def test_a_job_begins_from_another_jobs_checkpoint_and_owns_what_it_writes(tmp_path: Path) -> None:
    with lab(tmp_path / "lab", hosts=host("h1", 0.30), scale=60.0) as found:
        found.start()
        first = found.submit("first", FIRST)
        found.wait_final(first)
        assert spotctl(found, "checkpoints", first, "verify").returncode == 0
        flags = ("--image", "none", "--gpu", "RTX_4090", "--disk", "10GB", "--max-price", "1.0", "-o", "id", "-y", "-d")
        command = ("--", "/bin/sh", "-c", SECOND)
        done = spotctl(found, "submit", "--name", "second", "--resume-from", "first:one", *flags, *command)
        assert done.returncode == 0, done.stderr
        second = done.stdout.strip()
        found.wait_final(second)
        assert found.state(second) == "SUCCEEDED", spotctl(found, "logs", second).stdout
        assert found.job(second)["attempts"][0]["resumed_from"] == "one"
        spotctl(found, "pull", second, "--to", "out")
        assert (found.folder / "out" / "seen").read_text() == "trained\n"
        rows = json.loads(spotctl(found, "checkpoints", second, "-o", "json").stdout)["checkpoints"]
        assert [(row["name"], row["attempt"], row["job"]) for row in rows] == [("two", 1, second), ("one", 0, first)]
        verified = json.loads(spotctl(found, "checkpoints", second, "verify", "--all", "-o", "json").stdout)
        assert verified["ok"]
        store = found.folder / "state" / "store" / "jobs"
        manifest = (store / second / "attempts" / "1" / "checkpoints" / "two.json").read_text()
        assert f"jobs/{first}/" not in manifest, "what a job refers to is its own"
        assert_no_traceback(found)
