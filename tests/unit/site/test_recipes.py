"""Job files, scripts and error texts in the pages are those of the code, and what can run here is run."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path

import pytest

from spotd.config.credentials import InstalledPlugins
from spotd.config.load import understand
from spotd_jobs.spec.parse import parse_job
from tests.cases import every

ROOT = Path(__file__).parents[3]
DOCS = ROOT / "docs"
RECIPES = sorted((DOCS / "recipes").glob("*.md"))
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.DOTALL | re.MULTILINE)
BLOCKS = [
    pytest.param(kind, text, id=f"{page.stem}-{number}")
    for page in RECIPES
    for number, (kind, text) in enumerate(BLOCK.findall(page.read_text(encoding="utf-8")))
]
PLAIN = (DOCS / "recipes" / "frameworks.md").read_text(encoding="utf-8").split("## A plain script")[1]


@every(("kind", "text"), BLOCKS)
def test_a_recipe_is_understood(kind: str, text: str) -> None:
    if kind == "toml":
        data = tomllib.loads(text)
        assert parse_job(data, "job.toml", base=ROOT).name == data["name"]
    else:
        assert kind == "python"
        compile(text, "train.py", "exec")


def test_there_is_a_job_file_for_every_recipe() -> None:
    kinds = [param.values[0] for param in BLOCKS]
    assert (kinds.count("toml"), kinds.count("python")) == (8, 4)


def test_the_config_of_the_page_on_agents_is_understood() -> None:
    text = (DOCS / "how-to" / "agents.md").read_text(encoding="utf-8")
    [config] = [found for kind, found in BLOCK.findall(text) if kind == "toml"]
    assert understand(tomllib.loads(config), "config.toml", plugins=InstalledPlugins()).mcp.day_budget == 30_000_000


@pytest.mark.process
def test_the_plain_script_goes_on_where_it_was_stopped(tmp_path: Path) -> None:
    [script] = [text for kind, text in BLOCK.findall(PLAIN) if kind == "python"]

    def run(steps: int, resume: str) -> str:
        environ = {**os.environ, "SPOTD_CHECKPOINT_DIR": str(tmp_path), "SPOTD_RESUME": resume, "STEPS": str(steps)}
        done = subprocess.run([sys.executable, "-c", script], env=environ, capture_output=True, text=True, check=True)
        return done.stdout

    whole = run(300, "")
    for path in tmp_path.iterdir():
        path.unlink()
    run(150, "")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000100.json", "step-000150.json"]
    assert run(300, str(tmp_path / "step-000150.json")) == whole


@cache
def _texts() -> str:
    """The code, in which a text that is written in several pieces is one."""
    files = [file for package in ("spotd", "providers", "jobs") for file in sorted((ROOT / package).rglob("*.py"))]
    return re.sub(r'"\n *f?"', "", "\n".join(file.read_text(encoding="utf-8") for file in files))


def _errors() -> list[str]:
    text = (DOCS / "troubleshooting.md").read_text(encoding="utf-8")
    cells = [line.split(" | ")[0] for line in text.splitlines() if line.startswith("| `")]
    return [error for cell in cells for error in re.findall(r"`([^`]+)`", cell)]


@every("error", _errors())
def test_every_error_text_of_the_page_is_one_of_the_code(error: str) -> None:
    parts = [part.strip() for part in error.split("...")]
    assert max(map(len, parts)) > 8
    assert [part for part in parts if part not in _texts()] == []


def test_every_page_is_in_the_navigation_once() -> None:
    nav = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").split("\nnav:\n")[1]
    named = re.findall(r"[\w/.-]+\.md", nav)
    assert sorted(named) == sorted(str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md"))


def test_nothing_that_the_site_loads_is_from_elsewhere() -> None:
    for page in DOCS.rglob("*.md"):
        text = page.read_text(encoding="utf-8")
        assert not re.findall(r"!\[[^\]]*\]\(https?:|<(?:img|script|link|iframe)\b", text), page
    settings = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    assert "font: false" in settings
    assert "mermaid" not in settings, "its script is loaded from elsewhere"
    for drawing in (DOCS / "assets").glob("*.svg"):
        text = drawing.read_text(encoding="utf-8")
        assert "prefers-color-scheme:dark" in text
        assert re.findall(r"https?://[^\"]*", text) == ["http://www.w3.org/2000/svg"]
