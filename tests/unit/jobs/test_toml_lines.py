from __future__ import annotations

import tomllib
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spotd_jobs.spec.problems import key_path, line_of
from tests.cases import every

TEXT = '''name = "x"  # name = 2
env = { A = "1",
 "b.c" = """q
 ] = """ }
[resources]
gpu = ["H100:1", # ,
  'A]100',
]
a.b.c = 3

[[x]]
k=1
[[x]]
k=2
[x.sub]
"z\\u0041" = 1
[ price ] # [x]
max_price = 2.40
'''


@every(
    ("key", "line"),
    [
        ("name", 1),
        ("env.A", 2),
        ('env."b.c"', 3),
        ("resources", 5),
        ("resources.gpu[0]", 6),
        ("resources.gpu[1]", 7),
        ("resources.a.b.c", 9),
        ("x[0].k", 12),
        ("x[1].k", 14),
        ("x[1].sub.zA", 16),
        ("price.max_price", 18),
        ("resources.absent", 5),
        ("resources.gpu[7]", 6),
        ("absent", None),
        ("", None),
    ],
)
def test_the_line_of_a_key_or_of_what_holds_it(key: str, line: int | None) -> None:
    assert line_of(TEXT, key) == line


def leaves(value: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[tuple[str | int, ...], Any]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from leaves(inner, (*path, key))
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from leaves(inner, (*path, index))
    else:
        yield path, value


STRINGS = st.sampled_from(
    [
        '"a"',
        "'a'",
        '"]"',
        "'}'",
        '"#"',
        '"""x\n] = """',
        "'''\n[t]\n'''",
        '"\\""',
        '"a,b"',
        '""',
        '"""\\""""',
        "''''a'''",
    ]
)
SCALARS = st.one_of(
    STRINGS, st.integers(-5, 5).map(str), st.sampled_from(["1.5", "true", "nan", "1979-05-27T07:32:00Z"])
)
GAPS = st.sampled_from(["", " ", "\n", " # c ] }\n", "\n\n"])


@st.composite
def arrays(draw: st.DrawFn) -> str:
    items = draw(st.lists(SCALARS, max_size=4))
    return "[" + ",".join(draw(GAPS) + item + draw(GAPS) for item in items) + "]"


KEYS = st.sampled_from(["a", "b-c", '"q.r"', "'s t'", '"u\\"v"', "1"])


@st.composite
def documents(draw: st.DrawFn) -> str:
    lines = []
    for table in draw(st.lists(st.sampled_from(["", "t1", "t2.u", '"t.3"']), unique=True, max_size=4).map(sorted)):
        lines.append(f"[{table}]" if table else "")
        for key in draw(st.lists(KEYS, unique=True, max_size=4)):
            value = draw(st.one_of(SCALARS, arrays(), st.builds("{{ x = {}, y.z = {} }}".format, SCALARS, arrays())))
            lines.append(f"{key} = {value}{draw(st.sampled_from(['', ' # c']))}")
    return "\n".join(lines) + "\n"


@pytest.mark.long
@given(documents())
def test_cutting_a_document_before_the_line_of_a_leaf_loses_that_leaf_and_none_before(text: str) -> None:
    data = tomllib.loads(text)
    lines = text.splitlines(keepends=True)
    previous = 0
    for path, _ in leaves(data):
        if len({type(part) for part in path}) != 1 or len(path) > 2:
            continue  # inside a list or an inline table the cut would not be valid TOML
        line = line_of(text, key_path(path))
        assert line is not None
        assert line > previous or len(path) == 1
        previous = line
        before = tomllib.loads("".join(lines[: line - 1]))
        assert path not in dict(leaves(before))


@pytest.mark.long
@given(documents(), st.text(max_size=10))
def test_a_damaged_document_never_hangs_or_crashes(text: str, junk: str) -> None:
    for cut in range(0, len(text), 7):
        for key in ("a", "t1.a[2]", junk):
            line = line_of(text[:cut] + junk + text[cut:], key)
            assert line is None or line >= 1
