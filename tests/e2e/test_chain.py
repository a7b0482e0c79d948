"""A job prepares data and another one works with it: real processes, real machines of the local market."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.ctl import assert_no_traceback, spotctl
from tests.e2e.harness import host, lab

pytestmark = pytest.mark.e2e
HOSTS = "".join(host(f"h{i}", 0.30 + i / 100) for i in range(3))
JOB = """
name = "{name}"
run = "{run}"
image = "scratch"
outputs = ["out/**"]
[resources]
gpu = ["RTX_4090:1"]
[price]
max_price = 1.00
{more}
"""


def test_a_job_works_with_what_another_one_left(tmp_path: Path) -> None:
    with lab(tmp_path / "lab", hosts=HOSTS) as found:
        found.start()
        prep = tmp_path / "prep.toml"
        prep.write_text(JOB.format(name="prep", run="mkdir out; seq 1 100 > out/numbers", more=""))
        train = tmp_path / "train.toml"
        run = "mkdir out; awk '{s+=$1} END {print s}' $SPOTD_INPUT_DIR/prep/out/numbers > out/sum"
        train.write_text(JOB.format(name="train", run=run, more='[schedule]\nafter = ["prep"]'))
        first = spotctl(found, "submit", str(prep), "-y", "-o", "id").stdout.strip()
        last = spotctl(found, "submit", str(train), "-y", "-o", "id").stdout.strip()
        found.wait_final(first)
        found.wait_final(last)
        assert found.state(last) == "SUCCEEDED"
        assert found.delivered(last, "sum") == "5050"
        assert_no_traceback(found)
