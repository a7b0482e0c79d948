"""Names say what they mean.

No function is named by a past participle, which leaves open whether it computes, changes or raises. No two classes are
named by the same words in another order, such as a fallback's restore and a restore's fallback: a reader has to look
each time which is which.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]
REMAINING: Final = 250
"""Functions that are still named so. The bound is only ever lowered: a new one is named otherwise."""
NO_PARTICIPLES: Final = frozenset({"need", "feed", "seed", "speed", "exceed", "proceed", "embed", "shed"})
IRREGULAR: Final = frozenset({"told", "bought", "seen", "taken", "sold", "made", "given", "known", "found", "held"})


def is_participle(name: str) -> bool:
    last = name.strip("_").rpartition("_")[2]
    return last in IRREGULAR or (last.endswith("ed") and last not in NO_PARTICIPLES)


ENDINGS: Final = re.compile(r"(?<=....)(ings?|ers?|ors?|ions?|e?s|ed)$")
"""A handler's context and a context's handlers are the same words, too."""


@cache
def trees() -> Sequence[tuple[Path, ast.Module]]:
    roots = ("spotd", "providers/spotd_providers", "jobs/spotd_jobs")
    files = [file for root in roots for file in sorted((ROOT / root).rglob("*.py"))]
    return [(file.relative_to(ROOT), ast.parse(file.read_text(encoding="utf-8"))) for file in files]


def words_of(name: str) -> tuple[str, ...]:
    return tuple(ENDINGS.sub("", word.lower()) for word in re.findall(r"[A-Z][a-z0-9]*", name))


def test_no_two_classes_have_the_same_words_in_another_order() -> None:
    names: defaultdict[tuple[str, ...], dict[tuple[str, ...], str]] = defaultdict(dict)
    for file, tree in trees():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                words = words_of(node.name)
                names[tuple(sorted(words))][words] = f"{file}: {node.name}"
    assert [sorted(swapped.values()) for swapped in names.values() if len(swapped) > 1] == []
    assert words_of("FallbackRestore") == words_of("RestoreFallback")[::-1]


def test_no_more_functions_than_before_are_named_by_a_past_participle() -> None:
    found: list[str] = []
    for file, tree in trees():
        for node in ast.walk(tree):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or not is_participle(node.name):
                continue
            # A predicate asks what is so, and a property is read as a noun phrase or an adjective.
            is_property = any("property" in ast.unparse(one) for one in node.decorator_list)
            if not is_property and not node.name.strip("_").startswith(("is_", "has_", "was_", "are_")):
                found.append(f"{file}: {node.name}")
    assert len(found) <= REMAINING, f"{len(found)} and not {REMAINING}; the new one is among {found}"
