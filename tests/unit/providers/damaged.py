"""Payloads with a few of their values replaced or dropped, for tests of what untrusted answers can do."""

from __future__ import annotations

import copy
from typing import Any

from hypothesis import strategies as st

scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=True, allow_infinity=True),
    st.text(max_size=20),
    st.sampled_from([-1, 0, -0.0, 75.5, 1e308, 2**63, 2**1024, "NaN", "75", "\ud800", "", "N/A", "H100 (9999 GB)"]),
)
junk = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
)


def _paths(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(found for name, one in inner for found in _paths(one, (*path, name)))]


@st.composite
def damaged(draw: st.DrawFn, payload: Any) -> Any:
    """The payload with one to three of its values, at any depth, replaced or dropped."""
    found = copy.deepcopy(payload)
    for _ in range(draw(st.integers(1, 3))):
        paths = [path for path in _paths(found) if path]
        if not paths:
            break
        *way, last = draw(st.sampled_from(paths))
        place = found
        for name in way:
            place = place[name]
        if draw(st.integers(0, 3)):
            place[last] = draw(junk)
        else:
            del place[last]
    return found
