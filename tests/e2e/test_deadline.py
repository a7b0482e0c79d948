"""A deadline on real processes: spot is waited for, then on-demand is paid for in time, and saves have an interval."""

from __future__ import annotations

from datetime import datetime, timedelta
from pathlib import Path

import pytest

from tests.e2e.ctl import assert_no_traceback
from tests.e2e.harness import host, lab, until

pytestmark = [pytest.mark.e2e, pytest.mark.lengthy]  # in virtual time: tests/unit/daemon/test_deadlines.py
SCALE = 120.0
DEADLINE = timedelta(minutes=65)


def test_a_job_that_waits_for_spot_is_done_on_demand_before_its_deadline(tmp_path: Path) -> None:
    with lab(tmp_path / "lab", hosts=host("h1", 0.90, on_demand=0.50), scale=SCALE) as found:
        found.environment["SPOTD_FLOOR_S"] = "2"
        found.start()
        until(lambda: found.api.prices({})["quotes"], what="offers")
        job = found.submit(
            "train",
            'echo "$SPOTD_CHECKPOINT_INTERVAL_S" > "$SPOTD_OUTPUT_DIR/interval"',
            resources={"gpu": ["RTX_4090:1"], "disk": "10GB", "market": "auto"},
            price={"max_price": 0.60},
            checkpoint={"every": "20m", "settle": "10s", "stop_grace": "90s"},
            schedule={"deadline": f"{DEADLINE.seconds // 60}m"},
            work={"time": "5m"},
        )
        found.wait_final(job)
        answer = found.job(job)
        assert answer["state"] == "SUCCEEDED", answer["reason"]
        [attempt] = answer["attempts"]
        assert attempt["market"] == "on-demand"
        submitted, bought, ended = (
            datetime.fromisoformat(at) for at in (answer["submitted_at"], attempt["intended_at"], answer["ended_at"])
        )
        assert bought - submitted >= timedelta(minutes=10), "it waits for spot while there is time"
        assert ended <= submitted + DEADLINE
        assert float(found.delivered(job, "interval")) == 20 * 60 / SCALE, "in the seconds of its own clock"
        assert_no_traceback(found)
