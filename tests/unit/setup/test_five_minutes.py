"""The page of the first five minutes: what it has a reader write works as it stands."""

from __future__ import annotations

import re
import time
import tomllib
from pathlib import Path

import pytest

from spotd_jobs.runner.complete import is_temporary
from spotd_jobs.spec.parse import parse_job

PAGE = (Path(__file__).parents[3] / "docs/how-to/five-minute-start.md").read_text()


def block(language: str) -> str:
    (found,) = re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)
    text: str = found
    return text


def test_the_training_saves_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(time, "sleep", lambda _seconds: None)
    monkeypatch.setenv("SPOTD_CHECKPOINT_DIR", str(tmp_path))
    monkeypatch.setenv("SPOTD_RESUME", "")
    exec(compile(block("python"), "train.py", "exec"), {})  # noqa: S102 - the page's own program
    assert capsys.readouterr().out.splitlines()[-1] == "step 30 loss 0.067"
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(f"step-{n}" for n in range(5, 31, 5))
    monkeypatch.setenv("SPOTD_RESUME", str(tmp_path / "step-20"))
    monkeypatch.setenv("SPOTD_CHECKPOINT_DIR", str(tmp_path / "next"))
    exec(compile(block("python"), "train.py", "exec"), {})  # noqa: S102 - as above
    assert capsys.readouterr().out.startswith("step 21 ")
    assert is_temporary("tmp-5")


def test_the_job_file_is_one(tmp_path: Path) -> None:
    spec = parse_job(tomllib.loads(block("toml")), "job.toml", base=tmp_path)
    assert spec.name == "first"
