"""Many cases of one sentence in one test, which runs them all and reports every offender at once."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from typing import Any

import pytest

Test = Callable[..., None]


def every(
    names: str | Sequence[str], cases: Iterable[Any], *, ids: Callable[[Any], object] | Iterable[object] | None = None
) -> Callable[[Test], Test]:
    """Run the test with each case in turn: `pytest.mark.parametrize` for cases too small to be tests of their own.

    A fixture is made once for all of them, so a test that changes its fixtures stays parametrized.
    """
    keys = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)
    rows = [(case if len(keys) > 1 else (case,)) for case in map(_values, cases)]
    if not rows or any(len(row) != len(keys) for row in rows):
        raise ValueError(f"no cases, or some without all of {keys}")
    titles: list[object] = [", ".join(f"{key}={value!r}" for key, value in zip(keys, row, strict=True)) for row in rows]
    if callable(ids):
        titles = [" ".join(str(ids(value)) for value in row) for row in rows]
    elif ids is not None:
        titles = list(ids)

    def joined(test: Test) -> Test:
        @wraps(test)
        def run(*args: Any, **fixtures: Any) -> None:
            offenders: list[str] = []
            for title, row in zip(titles, rows, strict=True):
                try:
                    test(*args, **fixtures, **dict(zip(keys, row, strict=True)))
                except (Exception, pytest.fail.Exception) as exc:  # noqa: BLE001 - each is reported below
                    offenders.append(f"{title}: {type(exc).__name__}: {exc}")
            if offenders:
                raise AssertionError(f"{len(offenders)} of {len(rows)} cases:\n" + "\n".join(offenders))

        signature = inspect.signature(test)
        kept = [parameter for name, parameter in signature.parameters.items() if name not in keys]
        run.__signature__ = signature.replace(parameters=kept)  # type: ignore[attr-defined] # pytest asks it for fixtures
        del run.__wrapped__  # or pytest would ask the inner function
        return run

    return joined


def _values(case: Any) -> Any:
    """The values of a `pytest.param` without marks, or the case as it is."""
    if not isinstance(case, type(pytest.param())):
        return case
    if case.marks:
        raise ValueError(f"a case with marks is a test of its own: {case}")
    return case.values if len(case.values) > 1 else case.values[0]
