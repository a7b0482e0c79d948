"""The tables `[bids]` and `[moves]`, on as they stand, and `[canary]`, off: all bounded."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest

from tests.unit.config.test_config import problems_of, read


def test_without_them_bids_follow_outbid_machines_are_kept_and_a_job_moves_twice(tmp_path: Path) -> None:
    config = read(tmp_path, "").config
    assert (config.bids.raise_running, config.bids.hold, config.moves.most) == (True, timedelta(minutes=10), 2)
    assert config.canary.time == timedelta(0)


def test_each_can_be_turned_off(tmp_path: Path) -> None:
    config = read(tmp_path, '[bids]\nraise_running = false\nhold = "0s"\n[moves]\nmost = 0\n').config
    assert (config.bids.raise_running, config.bids.hold, config.moves.most) == (False, timedelta(0), 0)


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ('[bids]\nhold = "16m"\n', "bids.hold"),
        ('[bids]\nhold = "-1m"\n', "bids.hold"),
        ("[bids]\nhold = nan\n", "bids.hold"),
        ('[bids]\nraise_running = "yes"\n', "bids.raise_running"),
        ("[moves]\nmost = -1\n", "moves.most"),
        ("[moves]\nmost = 100000\n", "moves.most"),
        ("[moves]\nmany = 1\n", "moves.many"),
        ('[canary]\ntime = "5s"\n', "canary.time"),
        ('[canary]\ntime = "6m"\n', "canary.time"),
        ('[canary]\ntime = "-1m"\n', "canary.time"),
    ],
)
def test_what_is_out_of_bounds_is_refused(tmp_path: Path, text: str, key: str) -> None:
    assert list(problems_of(tmp_path, text)) == [key]
