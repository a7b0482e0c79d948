"""`every` runs all cases of a test, and one that fails hides no other."""

from __future__ import annotations

import inspect

import pytest

from tests.cases import every


def test_every_offender_is_named_and_the_others_ran_too() -> None:
    ran: list[tuple[int, str]] = []

    @every("number", [1, pytest.param(2, id="two"), 3])
    @every(("word", "count"), [("a", 1), ("b", 2)], ids=["first", "second"])
    def judge(number: int, word: str, count: int) -> None:
        ran.append((number, word))
        assert number != count
        if word == "a" and number == 3:
            pytest.fail("three")

    with pytest.raises(AssertionError) as caught:
        judge()
    assert ran == [(1, "a"), (1, "b"), (2, "a"), (2, "b"), (3, "a"), (3, "b")]
    text = str(caught.value)
    assert text.startswith("3 of 3 cases:")
    for words in ("number=1: ", "number=2: ", "number=3: ", "first: AssertionError", "second: AssertionError", "three"):
        assert words in text


def test_cases_that_hold_raise_nothing_and_fixtures_remain_parameters() -> None:
    @every("text", ["", "a"], ids=repr)
    def judge(tmp_path: str, text: str) -> None:
        assert tmp_path + text in ("x", "xa")

    judge(tmp_path="x")
    assert list(inspect.signature(judge).parameters) == ["tmp_path"]


def test_no_cases_too_few_values_and_marks_are_refused() -> None:
    for names, cases in (("a", []), ("a, b", [(1,)]), ("a", [pytest.param(1, marks=pytest.mark.process)])):
        with pytest.raises(ValueError, match=r"no cases|marks"):
            every(names, cases)
