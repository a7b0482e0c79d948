"""Several processes under torchrun save one checkpoint together, and it survives a kill and a notice (gloo, no GPU)."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from spotd_jobs.wire.grant import Grant
from tests.integration.frameworks.test_real_frameworks import PATIENCE_S, PYTHON, need
from tests.integration.runner.rig import Machine, Rig, until

pytestmark = [pytest.mark.e2e, pytest.mark.slow]
EXAMPLE = Path(__file__).parents[3] / "examples" / "torchrun" / "train.py"
PARTS = {"step/.metadata", "step/__0_0.distcp", "step/__1_0.distcp"}


def grant(rig: Rig, attempt: int, steps: int, **more: Any) -> Grant:
    run = [PYTHON, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "train.py"]
    run += ["--steps", str(steps), "--save-every", "10", "--pace", "0" if steps < 1000 else "0.02"]
    return rig.grant(
        run,
        attempt=attempt,
        code={"train.py": EXAMPLE.read_text()},
        settle_s=600.0,
        stop_grace_s=25.0,
        lease_s=900.0,
        env={"OMP_NUM_THREADS": "1"},
        **more,
    )


def said(machine: Machine, pattern: str) -> str:
    found = until(lambda: re.search(pattern, machine.log()), pattern, PATIENCE_S)
    return str(found[1])


def test_processes_that_save_together_are_resumed_from_a_checkpoint_that_all_have_written(tmp_path: Path) -> None:
    need("torch")
    with Rig(tmp_path) as rig:
        first = rig.start(grant(rig, 1, 10**6))
        until(lambda: len(first.events("checkpoint")) >= 2, "two checkpoints", PATIENCE_S)
        first.kill()
        newest = int(rig.restores(1)[0].name.removeprefix("step-"))

        granted = grant(rig, 2, 10**6, restore=rig.restores(1))
        second = rig.start(granted)
        assert int(said(second, r"starting at step (\d+) with 2 processes")) == newest
        second.event("checkpoint", PATIENCE_S)
        rig.order_stop(granted)
        assert second.wait(PATIENCE_S) == 0
        saved = int(said(second, r"(?s).*step (\d+)  loss [\d.]+  saved"))
        on_stop = rig.restores(2)
        assert int(on_stop[0].name.removeprefix("step-")) == saved, "what was saved on SIGTERM is the newest"
        assert second.events("checkpoint_fallback") == []

        third = rig.start(grant(rig, 3, saved + 15, restore=on_stop))
        assert third.wait(PATIENCE_S) == 0
        resumed = said(third, r"done at step \d+, weights (\S+)")
        straight = rig.start(grant(rig, 4, saved + 15))
        assert straight.wait(PATIENCE_S) == 0
        assert said(straight, r"done at step \d+, weights (\S+)") == resumed, "as if nothing had happened"
        for machine in (first, second, third, straight):
            for manifest in machine.manifests():
                paths = {row["path"].replace(manifest["entry"], "step", 1) for row in manifest["files"]}
                assert paths >= PARTS, "every process's part is there"
