"""What the demo's introduction says is what happens in its market."""

from __future__ import annotations

import tomllib
from datetime import timedelta
from pathlib import Path

import pytest

from spotd.demo import script
from spotd.demo.main import opening
from spotd.demo.script import HASH_FILE, config, jobs
from spotd_providers.contract.values import InstanceState
from tests.unit.providers.local.market_setup import MINUTE, Bench, bench

SEEDS = (1, 2, 3, 7, 2026)


def cheapest(market: Bench, gpu: str) -> str:
    """The offer that a job of this GPU takes."""
    sold = [one for one in market.market.sold() if one.host.gpu == gpu and one.offer_id.endswith(":spot")]
    return str(min(sold, key=lambda one: one.price).offer_id)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("order", [1, -1], ids=["in order", "the other way round"])
def test_every_host_is_taken_away_as_the_introduction_says(tmp_path: Path, seed: int, order: int) -> None:
    spec = tomllib.loads(config(tmp_path, seed))["providers"]["local"]
    queue = [job for job in jobs(seed) if job.loss is not None]
    intro = opening([job.about for job in queue])
    with bench(tmp_path, **spec) as market:
        machines = {job.name: market.buy(cheapest(market, job.gpu), dollars=2.0) for job in queue[::order]}
        market.advance(timedelta(minutes=31))
        for job in queue:
            machine = machines[job.name]
            has_notice = (market.market.machines.home(machine.machine_id) / "notice").exists()
            assert machine.host in job.about
            assert job.about in intro
            if "outbid without warning" in job.about:
                assert (machine.state, has_notice) == (InstanceState.PAUSED, False)
            else:
                assert "two minutes' notice" in job.about
                assert (machine.state, has_notice) == (InstanceState.RUNNING, True)
                assert machine.doomed_at is not None
        market.advance(2 * MINUTE)
        assert not [m for m in machines.values() if market.alive(m) and m.state is InstanceState.RUNNING]


def test_the_uninterrupted_run_has_the_environment_of_a_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENBLAS_CORETYPE", "Haswell")
    monkeypatch.setenv("SOME_SECRET", "hunter2")
    code = tmp_path / "code"
    code.mkdir()
    (code / "train.py").write_text(
        "import os, pathlib\npathlib.Path('out').mkdir()\n"
        f"pathlib.Path('out', {HASH_FILE!r}).write_text(' '.join(sorted(os.environ)))\n"
    )
    monkeypatch.setattr(script, "training_folder", lambda: code)
    seen = script.start_reference(jobs(1)[0], tmp_path / "run").sha256().split()
    assert {"HOME", "LANG", "PATH"} <= set(seen)
    assert not {"OPENBLAS_CORETYPE", "SOME_SECRET"} & set(seen)
