"""Job files, configs and requests of any size: what is searched, listed and answered stays within a bound."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from spotd.api.handlers.plans import read_spec
from spotd.api.requests import JobDraft
from spotd.api.responses import Invalid, dumps, refusal_body
from spotd.config.credentials import InstalledPlugins
from spotd.config.load import understand
from spotd.config.values import ConfigError
from spotd.core.domain.market import MarketSnapshot
from spotd_jobs.spec import problems
from spotd_jobs.spec.parse import BYTES_MAX, parse_job, parse_toml
from spotd_jobs.spec.problems import PROBLEMS_MAX, VALUES_MAX, FileProblems, Problem, SpecError
from tests.cases import every

MANY = 100_000
ANSWER_BYTES_MAX = 200_000


@pytest.fixture
def searches(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The words for which a nearest known key was searched, which is what takes the time."""
    found: list[str] = []

    shipped = difflib.get_close_matches

    def search(word: str, *rest: Any, **more: Any) -> list[str]:
        found.append(word)
        return shipped(word, *rest, **more)

    monkeypatch.setattr(difflib, "get_close_matches", search)
    return found


def nested(depth: int) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for _ in range(depth):
        value = {"a": value}
    return value


SHAPES: list[Any] = [
    pytest.param({f"k{n}": n for n in range(MANY)}, id="unknown keys"),
    pytest.param({f"k{n}": n for n in range(VALUES_MAX - 10)}, id="as many as are judged"),
    pytest.param({"resources": {f"k{n}": n for n in range(5_000)}}, id="unknown keys of a table"),
    pytest.param({"env": {f"k {n}": "" for n in range(MANY)}}, id="variables"),
    pytest.param({"speed": {f"k{n}": "x" for n in range(MANY)}}, id="numbers"),
    pytest.param({"secrets": ["x y"] * MANY}, id="a list"),
    pytest.param({"resources": {"gpu": [[]] * MANY}}, id="a list of lists"),
    pytest.param({"k" * 2_000_000: 1}, id="one long key"),
    pytest.param({"name": "x" * 2_000_000}, id="one long value"),
    pytest.param({"resources": {"gpu": {"k" * 1_000_000: ["x" * 1_000_000]}}}, id="both"),
    pytest.param(nested(400), id="depth"),
    pytest.param({"env": nested(400)}, id="depth in a table"),
]


@every("data", SHAPES)
@every("side", ["data", "flags"])
def test_the_api_answers_any_job_file_with_a_bounded_search_and_answer(
    searches: list[str], data: dict[str, Any], side: str
) -> None:
    searches.clear()
    parts: dict[str, Any] = {"data": {}, "flags": {}, side: data}
    with pytest.raises(Invalid) as refused:
        read_spec(JobDraft(**parts, source="train.toml", base_dir=""), MarketSnapshot(), frozenset())
    assert len(searches) <= 2 * PROBLEMS_MAX
    assert all(len(word) <= 300 for word in searches)
    assert 0 < len(refused.value.problems) <= PROBLEMS_MAX
    assert len(dumps(refusal_body(refused.value))) < ANSWER_BYTES_MAX


@pytest.mark.parametrize("data", SHAPES)
def test_a_config_of_any_size_is_refused_with_a_bounded_search_and_list(searches: list[str], data: Any) -> None:
    for table in (data, {"daemon": data}, {"providers": {"local": data}}, {"notify": {"a": data}}):
        searches.clear()
        with pytest.raises(ConfigError) as refused:
            understand(table, "config.toml", plugins=InstalledPlugins())
        assert len(searches) <= 3 * PROBLEMS_MAX
        assert len(refused.value.problems) <= PROBLEMS_MAX
        assert len(str(refused.value)) < ANSWER_BYTES_MAX


@pytest.mark.long
@every("error", [SpecError, ConfigError])
@every(
    ("raw", "message"),
    [
        pytest.param(b"".join(b"k%d=1\n" % n for n in range(MANY)), "more than 10,000 values", id="keys"),
        pytest.param(b"a = [" + b"1," * MANY + b"]", "more than 10,000 values", id="list"),
        pytest.param(b".".join([b"a"] * 400_000) + b" = 1", "a key of too many parts", id="dotted"),
        pytest.param(b"[" + b" . ".join([b'"a"'] * 100_000) + b"]", "a key of too many parts", id="header"),
        pytest.param(b"x = { " + b".".join([b"'a'"] * 100_000) + b" = 1 }", "a key of too many parts", id="inline"),
        pytest.param(b"#" * (BYTES_MAX + 1), "larger than 1 MB", id="bytes"),
    ],
)
def test_a_file_of_very_much_is_refused_before_it_is_judged(
    raw: bytes, message: str, error: type[FileProblems]
) -> None:
    with pytest.raises(error, match=message):
        parse_toml(raw, source="train.toml", refusal=error)


def test_texts_with_many_dots_are_no_keys() -> None:
    text = f'run = "python {".".join(["a"] * 50)}"\n# {".".join(["a"] * 50)}\n'
    assert parse_toml(text.encode(), source="train.toml", refusal=SpecError)[0]


def test_the_last_of_too_many_problems_says_how_many_more_there_are() -> None:
    with pytest.raises(SpecError) as refused:
        parse_job({f"k{n}": n for n in range(1_000)}, "train.toml")
    assert len(refused.value.problems) == PROBLEMS_MAX
    assert refused.value.problems[-1].message.startswith("and ")
    assert "950 more unknown keys" not in refused.value.problems[0].message


def test_a_file_is_scanned_once_for_the_lines_of_all_its_problems(monkeypatch: pytest.MonkeyPatch) -> None:
    scans: list[int] = []
    walk = problems._walk

    def counted(text: str) -> Any:
        scans.append(len(text))
        return walk(text)

    monkeypatch.setattr(problems, "_walk", counted)
    text = "".join(f"k{n} = 1\n" for n in range(40))
    found = SpecError("train.toml", [Problem(key=f"k{n}", message="unknown key") for n in range(40)]).located(text)
    assert [problem.line for problem in found.problems] == list(range(1, 41))
    assert len(scans) == 1


def test_what_a_refusal_says_is_bounded_whatever_it_names(tmp_path: Path) -> None:
    refused = Invalid("x" * 10**6, hint="y" * 10**6, problems=tuple(Problem(key="k", message="m") for _ in range(MANY)))
    body: Mapping[str, Any] = refusal_body(refused)
    assert len(dumps(body)) < ANSWER_BYTES_MAX
