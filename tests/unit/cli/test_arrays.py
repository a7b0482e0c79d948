"""Arrays on the command line: one submit, one line, one cancel."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.unit.api import worlds
from tests.unit.cli.conftest import Ctl
from tests.unit.cli.test_submit import JOB

SWEEP = JOB.replace("llama-lora", "sweep").replace("2.40", "0.01")


@pytest.fixture
def sweep(ctl: Ctl, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The id of an array of six jobs that wait."""
    ctl.rig.shop.offer_index = [replace(worlds.h100(), gpu="H100_SXM")]
    ctl.place.cycle()
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sweep.toml").write_text(SWEEP)
    run = ctl("submit", "sweep.toml", "--array", "0-10:2%3", "-y")
    assert run.code == 0, run.err
    assert "an array of 6 jobs; each sees its index as SPOTD_ARRAY_INDEX" in run.err
    [found] = run.out.split()
    assert f"spotctl ls --array {found}" in run.err
    return found


def test_an_array_is_one_line_of_ls_and_its_jobs_are_those_of_the_filter(ctl: Ctl, sweep: str) -> None:
    ctl.place.cycle()
    [_, line] = ctl("ls").out.splitlines()
    assert line.startswith(f"{sweep}  sweep 1/6  1 WAITING_PRICE, 5 QUEUED  H100:1")
    lines = ctl("ls", "--array", "sweep").out.splitlines()[1:]
    assert [text.split()[1] for text in lines] == [f"sweep-{index}" for index in range(0, 12, 2)]
    assert len(json.loads(ctl("ls", "-o", "json").out)["jobs"]) == 6


def test_a_whole_array_is_cancelled_retried_and_charged_by_its_name(ctl: Ctl, sweep: str) -> None:
    assert ctl("cancel", "sweep").out == f"sweep ({sweep}), 6 jobs: 6 CANCELLED\n"
    assert ctl("retry", sweep).out == f"sweep ({sweep}), 6 jobs: 6 QUEUED\n"
    assert ctl("cancel", "sweep-4").out.startswith("sweep-4 (")
    assert "sweep-4" in ctl("cost", "sweep").out
    assert ctl("ceiling", "sweep", "3").out == f"sweep ({sweep}), 6 jobs: 1 CANCELLED, 5 QUEUED\n"
    assert "sweep is an array, and this takes one of its jobs" in ctl("show", "sweep").err


def test_a_retry_of_many_jobs_goes_on_where_the_daemon_stopped(
    ctl: Ctl, sweep: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("spotd.api.handlers.submissions.RETRIES_AT_ONCE", 2)
    monkeypatch.setattr("spotd.api.handlers.submissions.RETRIES_LAST_S", -1)
    ctl("cancel", "sweep")
    run = ctl("retry", sweep)
    assert run.out == f"sweep ({sweep}), 6 jobs: 6 QUEUED\n"
    assert run.err.splitlines() == [
        "queued 2 jobs again, and goes on from index 4", "queued 2 jobs again, and goes on from index 8"
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--array", "0-10000"), "an array has at most 10,000"),
        (("--array", "a-b"), "is not a list of indexes"),
        (("--array", "0-1", "--wait"), "--wait follows one job, and --array makes many"),
    ],
)
def test_what_is_no_array_is_refused_before_the_daemon_is_asked(
    ctl: Ctl, tmp_path: Path, arguments: tuple[str, ...], sentence: str
) -> None:
    path = tmp_path / "sweep.toml"
    path.write_text(SWEEP)
    run = ctl("submit", str(path), *arguments)
    assert run.code == 2
    assert sentence in run.err


def test_a_refused_flag_shows_itself_and_not_the_key_of_a_file(ctl: Ctl, tmp_path: Path) -> None:
    plain = ("submit", "--gpu", "H100", "--image", "i", "--name", "x")
    assert ctl(*plain, "--array", "5-1", "--", "true").err == (
        'error: --array: "5-1" has a range without an index\n  hint: write --array 0-15, 0-15:2, 1,3,7 or 0-99%4\n'
    )
    run = ctl(*plain, "--window", "?", "--timezone", "UTC", "--deadline", "0s", "--", "true")
    assert '  hint: write --window "Mon-Fri 22:00-08:00" --window "Sat,Sun"\n' in run.err
    assert "an instant with its zone: --deadline 2026-11-24T08:00:00+02:00\n" in run.err


def test_an_array_that_a_limit_cuts_is_counted_whole(ctl: Ctl, sweep: str) -> None:
    ctl("cancel", "sweep")
    run = ctl("ls", "-n", "2")
    [_, line] = run.out.splitlines()
    assert line.startswith(f"{sweep}  sweep 6/6  CANCELLED")
    assert "only the newest ended jobs are read, 2 of them; spotctl ls --limit 20 shows more" in run.err
    assert len(json.loads(ctl("ls", "-n", "2", "-o", "json").out)["jobs"]) == 2
