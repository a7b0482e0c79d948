"""How tests wait for other processes, whose files come and go."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.waiting import until


def test_a_folder_that_is_removed_while_it_is_searched_is_no_answer_yet(tmp_path: Path) -> None:
    def answers() -> Iterator[list[Path]]:
        yield []
        list((tmp_path / "gone").iterdir())

    known = answers()
    seen: list[Exception] = []

    def probe() -> list[Path]:
        try:
            return next(known, [tmp_path])
        except FileNotFoundError as exc:
            seen.append(exc)
            raise

    assert until(probe, "a folder", every=0.001) == [tmp_path]
    assert len(seen) == 1


def test_what_is_missing_to_the_end_is_named(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"in vain for its text.*No such file.*never"):
        until(lambda: (tmp_path / "never").read_text(), "its text", within=0.0, every=0.001)


def test_any_other_error_of_a_probe_is_its_own(tmp_path: Path) -> None:
    with pytest.raises(IsADirectoryError):
        until(tmp_path.read_text, "a text", every=0.001)
