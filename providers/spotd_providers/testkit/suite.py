"""The register of behaviours, and how one of them is run against one harness.

A test file of any test runner subscribes to all of them in a few lines; with pytest:

    @pytest.mark.parametrize("behaviour", BEHAVIOURS, ids=str)
    def test_shelf(behaviour: Behaviour, tmp_path: Path) -> None:
        run(behaviour, open_harness, tmp_path)

A behaviour that does not apply raises `unittest.SkipTest` with the harness's reason, which every runner understands.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from unittest import SkipTest

from spotd_providers.testkit.clock import run_virtually
from spotd_providers.testkit.expect import BehaviourFailed, expect
from spotd_providers.testkit.harness import Harness, HarnessFactory
from spotd_providers.testkit.knobs import NotApplicable
from spotd_providers.testkit.log import caught_logging


@dataclass(frozen=True, slots=True, kw_only=True)
class Behaviour:
    """One thing every provider must do.

    Attributes:
        says: what is true of a provider that passes.
        opens: whether the check opens the provider by itself.
    """

    name: str
    says: str
    check: Callable[[Harness], Awaitable[None]]
    opens: bool = False

    def __str__(self) -> str:
        return self.name


_REGISTER: list[Behaviour] = []
C = TypeVar("C", bound=Callable[..., Awaitable[None]])


def behaviour(*, cases: Sequence[Any] | None = None, opens: bool = False) -> Callable[[C], C]:
    """Register the function as a behaviour; with `cases`, as one per case, which it gets as its second argument."""

    def register(check: C) -> C:
        name = check.__name__
        says = inspect.cleandoc(check.__doc__ or "").partition("\n")[0]
        if cases is None:
            _REGISTER.append(Behaviour(name=name, says=says, check=check, opens=opens))
        else:
            for case in cases:
                one = partial(check, case=case)
                _REGISTER.append(Behaviour(name=f"{name}[{case}]", says=says, check=one, opens=opens))
        return check

    return register


def all_behaviours() -> tuple[Behaviour, ...]:
    """Return every behaviour defined so far."""
    return tuple(_REGISTER)


def run(one: Behaviour, factory: HarnessFactory, folder: Path) -> None:
    """Run one behaviour, and search for secrets where none may be.

    Raises:
        BehaviourFailed: it does not (an `AssertionError`).
        SkipTest: it does not apply to this provider, for the reason given.
    """
    with caught_logging() as library_lines, factory(folder) as harness:
        outcome = run_virtually(partial(_check, one, harness))
        if isinstance(outcome, NotApplicable):
            if not str(outcome).strip():
                raise BehaviourFailed(f"{one.name}: skipped without a reason") from outcome
            raise SkipTest(str(outcome)) from outcome
        if outcome is not None:
            raise outcome
        _nothing_leaked(harness, library_lines)


async def _check(one: Behaviour, harness: Harness) -> Exception | None:
    # The outcome leaves the provider's context as a value, so that its task groups cannot wrap it.
    outcome: Exception | None = None

    async def check() -> None:
        nonlocal outcome
        try:
            await one.check(harness)
        except Exception as exc:  # noqa: BLE001 - re-raised by run() once the provider is closed
            outcome = exc

    if one.opens:
        await check()
    else:
        async with harness.opened():
            await check()
    return outcome


def _nothing_leaked(harness: Harness, library_lines: Sequence[str]) -> None:
    places = {
        "the provider's log": str(harness.log),
        "a library's log": "\n".join(library_lines),
        "a URL": "\n".join(request.url for request in harness.served.requests),
        "an error": "\n".join(harness.errors),
    }
    for secret in harness.secrets():
        for place, text in places.items():
            expect(secret not in text, f"a secret turned up in {place}")
