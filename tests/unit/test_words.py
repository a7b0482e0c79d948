"""The words of the code and the docs: each public class name has one owner, and words outside the glossary are gone.

A word counts wherever it is written: in identifiers (`OfferBoards` and `offer_boards` are the words "offer boards"),
docstrings, comments, messages and docs.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Final

from tests.cases import every
from tests.unit.test_docs import USER_PAGES

ROOT: Final = Path(__file__).parents[2]
SHIPPED: Final = ("spotd", "providers/spotd_providers", "jobs/spotd_jobs")
_MADE: Final = frozenset({"api.md", "commands.md", "config.md", "job-file.md"})
"""Pages that are made of the code hold no words of their own."""
_WORD: Final = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])")
_PUBLIC_CLASS: Final = re.compile(r"^[ \t]*class ([^\W_]\w*)", re.MULTILINE)

BANNED: Final = (
    "a life",
    "beat",
    "beats",
    "bell",
    "board",
    "book",
    "books",
    "brain",
    "dear",
    "dearer",
    "dearest",
    "glance",
    "gpus meant",
    "granter",
    "happenings",
    "heard",
    "historian",
    "host report",
    "host view",
    "inhabited",
    "leave to write",
    "livegarbage",
    "looked",
    "lowkey",
    "machines seen",
    "merchandise",
    "misfit",
    "oddities",
    "oddity",
    "policy box",
    "purse",
    "raise ppm",
    "saver",
    "sighting",
    "sightings",
    "storekeeper",
    "stranger",
    "strangers",
    "stripper",
    "surroundings",
    "tells",
    "temperament",
    "temperaments",
    "told",
    "whoever",
    "wish",
    "wished",
)
REMAINING: Final = {
    "boards": 1,
    "look": 1,
    "looks": 1,
    "nobody": 1,
    "trouble": 5,
}
"""Words that are still to go, with the most places that may hold them. A bound is only ever lowered."""


OLD_SENTENCES: Final = (
    r"[Ww]ays? out\b.*:",
    r"\bas bid\b",
    r"\bwins now\b",
    r"\bnone of \S+ offers\b",
    r"\boffers? fits?\b",
    r"\bmachines rank by\b",
    r"\bnot kept any longer\b",
    r"\bsays that the machine is gone\b",
    r"\b(?:an?|each|other|no|of) loss(?:es)?\b(?! that)",
    r"[\d}] losses\b",
    r"\blosses (?:at|of|on|in)\b",
    r"\bRECOV\b",
    r"\bRecoveries\b|\b\d+ recover(?:y|ies)\b",
    r"\b[Cc]ools? (?:down|until)\b|\bCOOLS\b",
    r"\b(?:unsupported|not available yet|not available in this version)\b",
    r"\bnothing (?:is|was) bought\b",
    r"\b0 machine hours\b",
)
"""What spotd once said, for which it has one word now: preemption, not supported, avoided until, renting, Try.

Each is a pattern over texts that a user may read: of the code without docstrings, and of the user's pages."""
FOREIGN: Final = frozenset({"providers/spotd_providers/vastai/offers.py", "spotd/cli/commands/size.py"})
"""Files that hold others' sentences, or the loss of a model."""


def _texts(file: Path) -> Iterator[str]:
    """Yield the texts of a source file that are no docstrings, each f-string as a whole with its values as `{}`."""
    parts: set[int] = set()
    plain: list[ast.Constant] = []
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            plain.append(node)
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            parts.add(id(node.value))
        elif isinstance(node, ast.JoinedStr):
            parts.update(id(one) for one in node.values)
            yield "".join(str(one.value) if isinstance(one, ast.Constant) else "{}" for one in node.values)
    yield from (str(node.value) for node in plain if id(node) not in parts)


@cache
def _said() -> dict[str, list[str]]:
    files = [file for file in _sources() if str(file.relative_to(ROOT)) not in FOREIGN]
    pages = [page for page in USER_PAGES if page.name != "comparison.md"]
    return {
        **{str(file.relative_to(ROOT)): list(_texts(file)) for file in files},
        **{str(page.relative_to(ROOT)): page.read_text(encoding="utf-8").splitlines() for page in pages},
    }


def _sources() -> Iterator[Path]:
    for package in SHIPPED:
        yield from sorted((ROOT / package).rglob("*.py"))


def _beside() -> Iterator[Path]:
    """Benchmarks and examples, which are not shipped in the packages but read all the same."""
    for folder in ("benchmarks", "examples"):
        yield from sorted(file for file in (ROOT / folder).rglob("*") if file.suffix in {".py", ".md", ".toml"})


@cache
def _words_by_file() -> dict[str, str]:
    """The words of each source file and page, in lower case, in order, with one space around each."""
    pages = [page for page in sorted((ROOT / "docs").rglob("*.md")) if page.name not in _MADE]
    files = [*_sources(), *pages, ROOT / "README.md", *_beside()]
    texts = {str(file.relative_to(ROOT)): file.read_text(encoding="utf-8") for file in files}
    return {name: f" {'  '.join(_WORD.findall(text)).lower()} " for name, text in texts.items()}


def _places(phrase: str) -> dict[str, int]:
    """How often each file holds the phrase."""
    wanted = f" {phrase.replace(' ', '  ')} "
    counts = {name: words.count(wanted) for name, words in _words_by_file().items()}
    return {name: number for name, number in counts.items() if number}


def test_no_public_class_name_has_two_owners() -> None:
    owners: defaultdict[str, list[str]] = defaultdict(list)
    for file in _sources():
        for name in _PUBLIC_CLASS.findall(file.read_text(encoding="utf-8")):
            owners[name].append(str(file.relative_to(ROOT)))
    assert {name: files for name, files in owners.items() if len(files) > 1} == {}


@every("phrase", BANNED)
def test_a_banned_word_is_nowhere(phrase: str) -> None:
    assert _places(phrase) == {}


@every(("phrase", "bound"), REMAINING.items())
def test_a_word_that_is_to_go_does_not_come_back(phrase: str, bound: int) -> None:
    places = _places(phrase)
    assert sum(places.values()) <= bound, f"{phrase!r} is in more places than before: {places}"


@every("pattern", OLD_SENTENCES)
def test_an_old_sentence_is_said_nowhere(pattern: str) -> None:
    said = [(file, text) for file, texts in _said().items() for text in texts if re.search(pattern, text)]
    assert said == []


def test_texts_are_found_whole_and_without_docstrings(tmp_path: Path) -> None:
    file = tmp_path / "module.py"
    file.write_text('"""of it"""\ndef f(n: int) -> str:\n    """of f"""\n    return f"{n} losses" + "or none"\n')
    assert sorted(_texts(file)) == ["or none", "{} losses"]
