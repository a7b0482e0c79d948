"""The pages that are made of the code are committed as they are made, and every page is found from the others.

With RECORD=1 in the environment those that are made are written anew.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.unit.site.pages import PAGES

DOCS = Path(__file__).parents[3] / "docs"


@pytest.mark.parametrize("name", PAGES)
def test_a_page_that_is_made_of_the_code_is_committed_as_it_is_made(name: str) -> None:
    path, text = DOCS / "reference" / name, PAGES[name]()
    if os.environ.get("RECORD"):
        path.write_text(text, encoding="utf-8")
    assert path.read_text(encoding="utf-8") == text
