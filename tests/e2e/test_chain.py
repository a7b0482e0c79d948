"""A job prepares data and another one works with it: real processes, real machines of the local market."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.e2e.ctl import assert_no_traceback, spotctl
from tests.e2e.harness import Lab, host, lab

pytestmark = pytest.mark.e2e
HOSTS = (
    "".join(host(f"h{i}", 0.30 + i / 100) for i in range(3))
    + """
[[providers.local.hosts]]
name = "plain"
gpu = "CPU"
gpu_count = 0
cpus = 16
spot = { kind = "fixed", price = 0.02 }
"""
)
JOB = """
name = "{name}"
run = "{run}"
image = "scratch"
outputs = ["out/**"]
[resources]
{needs}
[price]
max_price = 1.00
{more}
"""


def attempts(found: Lab, ref: str) -> list[dict[str, Any]]:
    return [dict(one) for one in found.api.job(ref)["job"]["attempts"]]


AFTER = '[schedule]\nafter = ["prep"]'


def test_a_job_on_a_gpu_works_with_what_one_without_a_gpu_left(tmp_path: Path) -> None:
    with lab(tmp_path / "lab", hosts=HOSTS) as found:
        found.start()
        prep = tmp_path / "prep.toml"
        prep.write_text(JOB.format(name="prep", run="mkdir out; seq 1 100 > out/numbers", more="", needs="cpus = 4"))
        train = tmp_path / "train.toml"
        run = "mkdir out; awk '{s+=$1} END {print s}' $SPOTD_INPUT_DIR/prep/out/numbers > out/sum"
        train.write_text(JOB.format(name="train", run=run, needs='gpu = ["RTX_4090:1"]', more=AFTER))
        first = spotctl(found, "submit", str(prep), "-y", "-o", "id").stdout.strip()
        last = spotctl(found, "submit", str(train), "-y", "-o", "id").stdout.strip()
        found.wait_final(first)
        found.wait_final(last)
        assert found.state(last) == "SUCCEEDED"
        where = [(attempt["host"], attempt["gpu_count"]) for ref in (first, last) for attempt in attempts(found, ref)]
        assert where == [("plain", 0), ("h0", 1)]
        assert found.delivered(last, "sum") == "5050"
        assert_no_traceback(found)
