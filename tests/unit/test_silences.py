"""Each line at which a checker is silenced says why."""

from __future__ import annotations

import io
import re
import tokenize
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]
CODES: Final = r"(?:: ?[A-Z]+\d+(?:, ?[A-Z]+\d+)*)?"
SILENCE: Final = re.compile(rf"#\s*(?:noqa{CODES}|type: ignore(?:\[[\w, -]+\])?|pragma: no \w+)")


def unexplained(text: str) -> list[int]:
    """Return the lines with a silence and fewer than four letters beside it."""
    if not SILENCE.search(text):
        return []
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    silences = [one for one in tokens if one.type == tokenize.COMMENT and SILENCE.search(one.string)]
    return [one.start[0] for one in silences if len(re.findall(r"[a-z]", SILENCE.sub("", one.string))) < 4]


def test_each_silence_of_a_checker_has_its_reason_beside_it() -> None:
    roots = ("spotd", "providers", "jobs", "tests", "benchmarks")
    files = [file for root in roots for file in sorted((ROOT / root).rglob("*.py"))]
    wrong = {str(file.relative_to(ROOT)): unexplained(file.read_text(encoding="utf-8")) for file in files}
    assert {name: lines for name, lines in wrong.items() if lines} == {}
    assert unexplained("x = 1  # noqa: S324\ny = 2  # type: ignore[arg-type]  # a fake\n") == [1]
