"""Every file that the documents name exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
NOT_HISTORY = [page for page in PAGES if page.name != "CHANGELOG.md"]
ROOTS = "spotd|providers/spotd_providers|jobs/spotd_jobs|tests|docs|examples|benchmarks|systemd|\\.github|\\.ci"
NAMED = re.compile(rf"(?<![\w./<>$-])((?:{ROOTS})/[\w./*-]*[\w*/])")
LINKED = re.compile(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)")
FENCED = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
NOT_OURS = {"spotd/spotd.sock"}


@pytest.mark.parametrize("page", NOT_HISTORY, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_path_that_a_page_names_exists(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    named = {path.replace("NAME", "*") for path in NAMED.findall(FENCED.sub("", text)) if path not in NOT_OURS}
    assert {path for path in named if not any(ROOT.glob(path))} == set()


@pytest.mark.parametrize("page", NOT_HISTORY, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_of_a_page_leads_to_a_file(page: Path) -> None:
    links = set(LINKED.findall(page.read_text(encoding="utf-8")))
    assert {link for link in links if not (page.parent / link).exists()} == set()


def test_the_architecture_names_most_files_of_its_flows() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    assert len(set(NAMED.findall(text))) > 40


def test_each_decision_fits_a_page_and_has_its_three_parts() -> None:
    pages = sorted((ROOT / "docs" / "decisions").glob("[0-9]*.md"))
    assert len(pages) >= 9
    for page in pages:
        text = page.read_text(encoding="utf-8")
        assert text.count("\n") <= 50, page.name
        headings = re.findall(r"^## (.+)$", text, re.MULTILINE)
        assert headings == ["Context", "Decision", "Consequences"], page.name


def test_no_word_of_the_glossary_is_defined_twice() -> None:
    text = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")
    words = re.findall(r"^\| \*\*([^*]+)\*\* \|", text, re.MULTILINE)
    assert len(words) > 35
    assert len(words) == len(set(words))


def test_the_readme_stays_short() -> None:
    assert (ROOT / "README.md").read_text(encoding="utf-8").count("\n") < 150
