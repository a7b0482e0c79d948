"""Payloads with a few of their values replaced, dropped or doubled, for tests of what untrusted answers can do.

Drawn from a seeded generator and copied only along the way to the change: a case costs some microseconds, where one of
hypothesis with junk at any depth costs 30 milliseconds, twenty times what the adapter takes to read it.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any, Final

SEED: Final = 20_261_128
SLICE: Final = 150
"""Cases of a quick run; a slow one has `ALL`."""
ALL: Final = 6000
ODD: Final[tuple[Any, ...]] = (
    None, True, False, -1, 0, -0.0, 1, 75.5, 0.1 + 0.2, 1e-9, 1e308, 2**63, 2**1024, -(2**63),
    float("nan"), float("inf"), float("-inf"),
    "", "NaN", "75", "-1", "1e999", "0.0", "\ud800", "\0", "N/A", "H100 (9999 GB)", "9999-12-31T23:59:59Z", "x" * 5000,
    [], {}, [None], [[[]]], {"a": {"b": []}}, [{}] * 3, {"": None}, list(range(40)),
)  # fmt: skip

Path = tuple[Any, ...]


def _paths(value: Any, path: Path = ()) -> list[Path]:
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(found for name, one in inner for found in _paths(one, (*path, name)))]


def _value_at(value: Any, path: Path) -> Any:
    for name in path:
        value = value[name]
    return value


def _changed(value: Any, path: Path, rng: Random, other: Any) -> Any:
    """The value with what is at the path replaced, dropped or doubled; itself where the path leads nowhere any more."""
    name, *rest = path
    known = range(len(value)) if isinstance(value, list) else value if isinstance(value, dict) else ()
    if name not in known:
        return value
    found = value.copy()
    if rest:
        found[name] = _changed(found[name], tuple(rest), rng, other)
        return found
    match rng.choice(("odd", "odd", "odd", "odd", "drop", "other", "negative", "twice")):
        case "drop":
            del found[name]
        case "other":
            found[name] = other
        case "negative" if isinstance(found[name], int | float):
            found[name] = -found[name]
        case "twice" if isinstance(found, list):
            found.insert(name, found[name])
        case _:
            found[name] = rng.choice(ODD)
    return found


def judge_damaged(judge: Callable[..., None], *payloads: Any, count: int, seed: int = SEED) -> None:
    """Judge so many sets of these payloads, each with one to three damages; a failure names its case."""
    rng = Random(seed)
    places = [[path for path in _paths(one) if path] for one in payloads]
    for number in range(count):
        cases = []
        for payload, paths in zip(payloads, places, strict=True):
            found = payload
            for _ in range(rng.randint(1, 3)):
                other = _value_at(payload, rng.choice(paths))
                found = _changed(found, rng.choice(paths), rng, other)
            cases.append(found)
        try:
            judge(*cases)
        except BaseException as exc:
            exc.add_note(f"case {number} of seed {seed}: {cases!r}"[:4000])
            raise
