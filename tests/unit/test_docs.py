"""Every file that the documents name exists."""

from __future__ import annotations

import re
from pathlib import Path

from tests.cases import every

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
NOT_HISTORY = [page for page in PAGES if page.name != "CHANGELOG.md"]
ROOTS = "spotd|providers/spotd_providers|jobs/spotd_jobs|tests|docs|examples|benchmarks|systemd|\\.github|\\.ci"
NAMED = re.compile(rf"(?<![\w./<>$-])((?:{ROOTS})/[\w./*-]*[\w*/])")
PARTIAL = re.compile(r"`((?!(?:" + ROOTS + r")/)[\w./-]+\.py)`")
SOURCES = ("spotd", "providers", "jobs", "tests", "examples", "benchmarks", ".ci")
LINKED = re.compile(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)")
ANCHORED = re.compile(r"\]\(([^)#:\s]*)#([^)\s]+)\)")
FENCED = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
NOT_OURS = {"spotd/spotd.sock"}
CONTRIBUTORS = re.compile(
    r"docs/(reference|decisions)/|docs/how-to/new-|docs/(architecture|gangs|glossary|kernel|performance|states|testing|wire)\.md"
    r"|docs/providers/writing-a-provider\.md"
)
USER_PAGES = [
    page
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
    if not CONTRIBUTORS.match(str(page.relative_to(ROOT)))
]
KERNEL_LINES_MAX = 3_000
MODULES = ("`loss_evidence`",)
SENTENCE_WORDS_MAX = 30
SHORTER = {"docs/cli.md": 25, "docs/how-to/bids-and-moves.md": 25}
PAGE_WORDS_MAX = 1_500
LARGER = {"docs/cli.md": 1_900}
PROVIDER_WORDS_MAX = 900
USER_WORDS_MAX = 17_680
"""Of all user pages together but those of providers, of which each user reads a few and each has a bound of its own.

To lengthen one, shorten another: exact rules and figures stand in the reference."""
TO_SPLIT = {"docs/comparison.md": 2}
"""Sentences that are longer, by page. A bound is only ever lowered."""


@every("page", NOT_HISTORY, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_path_that_a_page_names_exists(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    named = {path.replace("NAME", "*") for path in NAMED.findall(FENCED.sub("", text)) if path not in NOT_OURS}
    assert {path for path in named if not any(ROOT.glob(path))} == set()


@every("page", NOT_HISTORY, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_part_of_a_path_that_a_page_names_exists(page: Path) -> None:
    named = {path.replace("NAME", "*") for path in PARTIAL.findall(FENCED.sub("", page.read_text(encoding="utf-8")))}
    assert {path for path in named if not any(any((ROOT / top).glob(f"**/{path}")) for top in SOURCES)} == set()


def test_every_name_of_the_kit_that_the_provider_page_lists_is_in_its_file() -> None:
    text = (ROOT / "docs" / "how-to" / "new-provider.md").read_text(encoding="utf-8")
    rows = re.findall(r"`(kit/\w+\.py)`: ([^|]+) \|", text)
    assert len(rows) > 10
    for file, names in rows:
        source = (ROOT / "providers" / "spotd_providers" / file).read_text(encoding="utf-8")
        for name in re.findall(r"`(?:\w+\.)?(\w+)`", names):
            defined = rf"^ *(async def|def|class) {name}\b|^ *{name}(: | = )"
            assert re.search(defined, source, re.MULTILINE), (file, name)


@every("page", NOT_HISTORY, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_of_a_page_leads_to_a_file(page: Path) -> None:
    links = set(LINKED.findall(page.read_text(encoding="utf-8")))
    assert {link for link in links if not (page.parent / link).exists()} == set()


def anchors(page: str) -> set[str]:
    """Return the names of a page's headings as GitHub forms them, with those that are written as HTML."""
    found = set(re.findall(r"<a (?:id|name)=\"([^\"]+)\"", page))
    for heading in re.findall(r"^#+ +(.+?) *$", FENCED.sub("", page), re.MULTILINE):
        shown = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        name = re.sub(r"[^\w\- ]", "", shown.lower()).replace(" ", "-")
        found.add(next(one for n in range(len(found) + 1) if (one := f"{name}-{n}" if n else name) not in found))
    return found


def test_anchors_are_those_of_the_headings() -> None:
    page = "# A `b_c`, (d)!\n## [providers.x]\n## [e f](g.md)\n## e f\n```\n# no\n```\n"
    assert anchors(page) == {"a-b_c-d", "providersx", "e-f", "e-f-1"}


@every("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_anchor_of_a_link_is_a_heading_of_the_page_that_it_names(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    wrong = []
    for file, anchor in ANCHORED.findall(FENCED.sub("", text)):
        target = page.parent / file if file else page
        if target.suffix == ".md" and anchor not in anchors(target.read_text(encoding="utf-8")):
            wrong.append(f"{file}#{anchor}")
    assert wrong == []


def test_the_architecture_names_most_files_of_its_flows() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    assert len(set(NAMED.findall(text))) > 40


def test_the_kernel_is_read_in_an_evening_and_has_what_its_page_names() -> None:
    page = (ROOT / "docs" / "kernel.md").read_text(encoding="utf-8")
    table = page.partition("## Theory")[0]
    files = [ROOT / name for name in re.findall(r"^\| `(spotd/[\w/]+\.py)`", table, re.MULTILINE)]
    assert len(files) > 8
    assert sum(len(file.read_text(encoding="utf-8").splitlines()) for file in files) <= KERNEL_LINES_MAX
    named = set(re.findall(r"`(\w+)`", page))
    sources = (
        *(ROOT / "spotd" / "core").rglob("*.py"),
        ROOT / "spotd/store/commit.py",
        *(ROOT / "tests/sim").glob("*.py"),
    )
    source = "\n".join(file.read_text(encoding="utf-8") for file in sources)
    declared = {name for name in named if re.search(rf"\bdef {name}\b|^ *{name}: ", source, re.MULTILINE)}
    assert [name for name in named - declared if f"`{name}`" not in MODULES] == []


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


def sentences(page: str) -> list[str]:
    """Return the sentences of a page: of its paragraphs, the items of its lists and the cells of its tables."""
    text = re.sub(r"^( *)```.*?^\1```", "\n\n", page, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"^    .*$", "", text, flags=re.MULTILINE)
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    text = re.sub(r"^(?:#|\|[-|: ]+$).*$", "\n", text, flags=re.MULTILINE)
    text = re.sub(r"(?<!\\)\||^ *(?:[*-]|\d+\.) ", "\n\n", text, flags=re.MULTILINE)
    blocks = [" ".join(block.split()) for block in re.split(r"\n\s*\n", text)]
    return [one for block in blocks for one in re.split(r"(?<=[.?!])[)*\"]* (?=[^a-z]|spot(?:d|ctl)\b)", block) if one]


def test_sentences_are_found_in_paragraphs_lists_and_tables() -> None:
    page = "# T\n\nOne [two](a.md),\nthree. Four?\n\n* five\n* six. 7\n\n| a b |\n|---|\n| c. D |\n\n```\nno. No\n```\n"
    assert sentences(page) == ["One two, three.", "Four?", "five", "six.", "7", "a b", "c.", "D"]


@every("page", USER_PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_no_sentence_of_a_user_page_is_long(page: Path) -> None:
    name = str(page.relative_to(ROOT))
    limit = SHORTER.get(name, SENTENCE_WORDS_MAX)
    long = [one for one in sentences(page.read_text(encoding="utf-8")) if len(one.split()) > limit]
    assert len(long) <= TO_SPLIT.get(name, 0), long


@every("page", USER_PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_user_page_is_one_task(page: Path) -> None:
    limit = LARGER.get(str(page.relative_to(ROOT)), PAGE_WORDS_MAX)
    assert len(page.read_text(encoding="utf-8").split()) <= limit


def test_the_user_pages_together_stay_short() -> None:
    words = {str(page.relative_to(ROOT)): len(page.read_text(encoding="utf-8").split()) for page in USER_PAGES}
    assert len(words) > 30
    of_providers = {name: words.pop(name) for name in list(words) if name.startswith("docs/providers/")}
    assert max(of_providers.values()) <= PROVIDER_WORDS_MAX, of_providers
    assert sum(words.values()) <= USER_WORDS_MAX, sorted(words.items(), key=lambda one: -one[1])
