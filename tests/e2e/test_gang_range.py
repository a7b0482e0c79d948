"""A training on two to four machines: it loses one of four and goes on with three, where no more are to be had.

Each machine saves its share; the three go on from what the four had saved.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.harness import LEAVES_AT_ONCE, assert_books_are_clean, host, lab, until
from tests.e2e.test_gang import SCALE, code_folder, command, strike

pytestmark = pytest.mark.e2e
HOSTS = (
    host("large", 0.30) + "slots = 4\n" + "".join(host(f"small{i}", 0.31 + i / 100) + "slots = 3\n" for i in range(3))
)


def test_a_job_of_a_range_goes_on_with_as_many_machines_as_there_are(tmp_path: Path) -> None:
    with lab(tmp_path / "lab", hosts=HOSTS, scale=SCALE, daemon=LEAVES_AT_ONCE) as found:
        found.start()
        job = found.submit(
            "gang",
            command(tmp_path, 1500) + " --in-parts",
            workdir=code_folder(tmp_path),
            nodes="2..4",
            outputs=["out/**"],
            checkpoint={"every": "1m", "settle": "10s", "stop_grace": "60s", "saved_by": "all"},
        )
        until(lambda: found.api.checkpoints(job)["checkpoints"], what="the parts of all four to be stored", within=120)
        strike(found, job, "", lambda gang: [gang[1]], saving=False)
        (tmp_path / "release").touch()
        found.wait_final(job, within=120)
        row = found.job(job)
        assert row["state"] == "SUCCEEDED", row
        bought = [one for one in row["attempts"] if one["launched_at"] is not None]
        assert [(one["nodes"], one["gpu_count"]) for one in bought] == [(4, 4), (3, 3)]
        assert [one["resumed_from"] is None for one in bought] == [True, False]
        receipt = found.api.cost(job)["receipts"][0]["attempts"]
        assert [one["nodes"] for one in receipt if one["spent_usd"]] == [4, 3]
        assert found.delivered(job, "weights.sha256")
        until(lambda: not found.open_machines(), what="every machine to be gone")
        assert_books_are_clean(found, reconcile_s=2 * SCALE)
