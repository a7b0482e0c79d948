"""The pages that are made of the code are committed as they are made, and every page is found from the others.

With RECORD=1 in the environment those that are made are written anew.
"""

from __future__ import annotations

import os
from pathlib import Path

from tests.cases import every
from tests.unit.site.pages import PAGES, compared

DOCS = Path(__file__).parents[3] / "docs"


@every("name", PAGES)
def test_a_page_that_is_made_of_the_code_is_committed_as_it_is_made(name: str) -> None:
    path, text = DOCS / "reference" / name, PAGES[name]()
    if os.environ.get("RECORD"):
        path.write_text(text, encoding="utf-8")
    assert path.read_text(encoding="utf-8") == text


def test_the_comparison_has_the_places_that_the_code_has_and_says_which_were_never_run_live() -> None:
    path = DOCS / "comparison.md"
    text = path.read_text(encoding="utf-8")
    if os.environ.get("RECORD"):
        path.write_text(compared(text), encoding="utf-8")
    assert text == compared(text)
    assert text.count("Prime Intellect") == 2, "among the places, and among those never run live"
