"""The example provider as a third party has it: a distribution of its own, found by entry point, run by the kit."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from spotd_providers.testkit import BEHAVIOURS
from spotd_providers.testkit.__main__ import main
from tests.unit.providers.conformance.shelf import EXAMPLE, shop

ROOT = EXAMPLE.parents[1]
WALK_THROUGH = ROOT / "docs" / "providers" / "writing-a-provider.md"


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder into which the example was built and installed, from the sources alone and without a network."""
    if importlib.util.find_spec("hatchling") is None or importlib.util.find_spec("pip") is None:
        pytest.skip("building the example without a network needs pip and hatchling in this environment")
    source = tmp_path_factory.mktemp("source") / "provider-plugin"
    shutil.copytree(EXAMPLE, source, ignore=shutil.ignore_patterns("__pycache__"))
    target = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-build-isolation", "--no-deps"]
    done = subprocess.run(
        [*command, "--target", str(target), str(source)], capture_output=True, text=True, check=False, timeout=240
    )
    assert done.returncode == 0, done.stderr
    return target


def run_testkit(installed: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    paths = [str(installed), str(ROOT), str(ROOT / "providers"), str(ROOT / "jobs")]
    return subprocess.run(
        [sys.executable, "-W", "error", "-m", "spotd_providers.testkit", *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
    )


@pytest.mark.lengthy
def test_the_installed_example_passes_the_suite_by_entry_point(installed: Path) -> None:
    done = run_testkit(installed, "shelf")
    assert done.returncode == 0, done.stdout + done.stderr
    summary = re.search(r"^shelf: (\d+) passed, (\d+) do not apply, 0 failed$", done.stdout, re.MULTILINE)
    assert summary, done.stdout
    assert int(summary[1]) + int(summary[2]) == len(BEHAVIOURS)
    assert int(summary[1]) >= 100
    reasons = re.findall(r"^  n/a  (\S.*?): (.*)$", done.stdout, re.MULTILINE)
    assert len(reasons) == int(summary[2])
    assert all(len(reason) > 12 for _, reason in reasons)
    assert done.stdout in WALK_THROUGH.read_text(), "the walk-through shows another output than this"


def test_an_unknown_provider_is_refused_with_those_installed(installed: Path) -> None:
    done = run_testkit(installed, "shlef")
    assert done.returncode == 2
    assert "no entry point 'shlef' in the group spotd.providers" in done.stderr
    assert "shelf" in done.stderr


def test_a_behaviour_that_does_not_exist_is_refused(installed: Path) -> None:
    done = run_testkit(installed, "shelf", "-k", "nonsense")
    assert (done.returncode, done.stdout) == (2, "")
    assert "nonsense" in done.stderr


def test_a_failing_provider_ends_with_one_and_its_sentence(installed: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(installed, broken)
    adapter = broken / "spotd_shelf" / "provider.py"
    text = adapter.read_text()
    assert text.count("complete = False") == 1
    adapter.write_text(text.replace("complete = False", "pass"))
    done = run_testkit(broken, "shelf", "-k", "a_malformed_row")
    assert done.returncode == 1
    assert "FAIL  a_malformed_row_costs_only_itself_and_completeness: An unreadable row" in done.stdout
    assert "1 failed" in done.stdout


def test_usage_needs_a_name(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as usage:
        main([])
    assert usage.value.code == 2
    assert "NAME" in capsys.readouterr().err


def test_the_stock_of_the_readme_is_sold() -> None:
    slots = shop.read_stock(EXAMPLE / "shelf.toml")
    assert [slot.name for slot in slots] == ["rack-1", "rack-2", "tower", "attic"]
    assert len(shop.Shop(slots=slots, keys={}).free()) == 4


def test_the_code_of_the_walk_through_is_the_examples() -> None:
    sources = "\n".join(path.read_text() for path in (*EXAMPLE.glob("spotd_shelf/*.py"), EXAMPLE / "pyproject.toml"))
    known = {line.strip() for line in sources.splitlines()}
    blocks = re.findall(r"^```(?:python|toml)\n(.*?)^```", WALK_THROUGH.read_text(), re.MULTILINE | re.DOTALL)
    shown = [line.strip() for block in blocks for line in block.splitlines() if line.strip()]
    elsewhere = {  # a test file and a config, which the example does not hold
        '@pytest.mark.parametrize("behaviour", BEHAVIOURS, ids=str)',
        "def test_shelf(behaviour: Behaviour, tmp_path: Path) -> None:",
        "run(behaviour, open_harness, tmp_path)",
        "[providers.local]",
        "enabled = false",
        "[providers.shelf]",
        'api_key = { env = "SHELF_KEY" }',
    }
    assert [line for line in shown if line not in known and line not in elsewhere] == []


def test_the_distribution_names_both_entry_points() -> None:
    project = tomllib.loads((EXAMPLE / "pyproject.toml").read_text())["project"]
    assert set(project["entry-points"]) == {"spotd.providers", "spotd.harnesses"}
