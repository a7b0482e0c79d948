"""Patterns of outputs that match nothing are found as the runner matches them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spotd_jobs.runner.outputs import LeftOut, find_outputs
from spotd_jobs.spec.model import unmatched_patterns
from tests.cases import every


@every(
    ("pattern", "path"),
    [
        ("model", "model"),
        ("out", "out/a/b"),
        ("out/**", "out/a/b"),
        ("./out//*", "out/a"),
        ("**", "a/b"),
        ("**/b", "b"),
        ("**/b", "a/a/b"),
        ("a/**/c", "a/c"),
        ("*.pt", "x.pt"),
        (".h*", ".hidden"),
        ("[ab]", "b"),
        ("a/**", "a/.hidden"),
    ],
)
def test_a_pattern_matches(pattern: str, path: str) -> None:
    assert unmatched_patterns([pattern], {path, "other"}) == ()


@every(
    ("pattern", "path"),
    [
        ("model", "models"),
        ("*.pt", "a/x.pt"),
        ("*", ".hidden"),
        ("a/b", "a"),
        ("a/**", "a"),
        ("**/b", ".h/b"),
        ("**/b", "a/bc"),
    ],
)
def test_a_pattern_does_not_match(pattern: str, path: str) -> None:
    assert unmatched_patterns([pattern], {path}) == (pattern,)


NAMES = st.sampled_from(["a", "b", ".h", "ab"])
PARTS = st.sampled_from(["a", "b", "*", "**", "a*", ".h", "?"])


@pytest.mark.long
@given(
    paths=st.lists(st.lists(NAMES, min_size=1, max_size=4), max_size=5),
    pattern=st.lists(PARTS, min_size=1, max_size=4),
)
def test_daemon_and_runner_agree(
    tmp_path_factory: pytest.TempPathFactory, paths: list[list[str]], pattern: list[str]
) -> None:
    folder = tmp_path_factory.mktemp("work")
    there = _made(folder, ["/".join(path) for path in paths])
    text = "/".join(pattern)
    assert (unmatched_patterns([text], there) == ()) == bool(find_outputs(str(folder), [text], LeftOut()))


def _made(folder: Path, paths: list[str]) -> set[str]:
    for path in paths:
        place = folder / path
        if any(parent.is_file() for parent in place.parents) or place.is_dir():
            continue
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text("x")
    return {os.path.relpath(file, folder) for file in folder.rglob("*") if file.is_file()}
