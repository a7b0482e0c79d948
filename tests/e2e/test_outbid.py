"""An outbid machine on real processes: kept while its price is high, and gone on with where it had saved."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.ctl import assert_no_traceback, spotctl
from tests.e2e.harness import host, lab
from tests.waiting import until

pytestmark = [pytest.mark.e2e, pytest.mark.lengthy]  # in virtual time: tests/unit/daemon/test_bid_changes.py

SAVES_AND_WAITS = """
if [ -n "$SPOTD_RESUME" ]; then cp "$SPOTD_RESUME/state" "$SPOTD_OUTPUT_DIR/seen"; sleep 1; exit 0; fi
cd "$SPOTD_CHECKPOINT_DIR" && mkdir step-1 && echo trained > step-1/state && touch step-1/DONE
exec sleep 1000
"""
CONFIG = '\n[bids]\nhold = "15m"\n'


def test_an_outbid_machine_is_kept_and_its_job_goes_on_there(tmp_path: Path) -> None:
    with lab(tmp_path / "lab", hosts=host("h1", 0.30), scale=60.0, daemon=CONFIG) as found:
        found.start()
        flags = ("--image", "none", "--gpu", "RTX_4090", "--disk", "10GB", "--max-price", "1.0", "-o", "id", "-y", "-d")
        done = spotctl(found, "submit", "--name", "train", *flags, "--", "/bin/sh", "-c", SAVES_AND_WAITS)
        assert done.returncode == 0, done.stderr
        job = done.stdout.strip()
        until(lambda: found.job(job)["checkpoint"] is not None, what="a checkpoint", within=60)
        found.control("price", {"host": "h1", "price": 0.40, "lasting": "5m"})
        found.wait_final(job)
        answer = found.job(job)
        events = spotctl(found, "events").stdout
        assert answer["state"] == "SUCCEEDED", spotctl(found, "logs", job).stdout
        assert len(answer["attempts"]) == 1
        assert "attempt.held" in events
        assert "attempt.woke" in events
        assert_no_traceback(found)
