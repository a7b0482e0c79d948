"""The register of behaviours, and how one of them is run against one harness.

A test file of any test runner subscribes to all of them in a few lines; with pytest:

    @pytest.mark.parametrize("behaviour", BEHAVIOURS, ids=str)
    def test_shelf(behaviour: Behaviour, tmp_path: Path) -> None:
        run(behaviour, open_harness, tmp_path)

A behaviour that does not apply raises `unittest.SkipTest` with the harness's reason, which every runner understands.
"""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar
from unittest import SkipTest

from spotd_providers.contract import errors
from spotd_providers.contract.errors import ProviderError
from spotd_providers.contract.values import AttemptKey, Instance, InstanceState, Market, Offer
from spotd_providers.testkit.clock import outlast, run_virtually
from spotd_providers.testkit.harness import Harness, HarnessFactory, NotApplicable, caught_logging

# Expectations of behaviours: they survive `python -O`, and failures must be leaves of the contract.


T = TypeVar("T")

LEAVES: Final[tuple[type[ProviderError], ...]] = tuple(
    kind for kind in vars(errors).values() if isinstance(kind, type) and ProviderError in kind.__bases__
)
DEADLINE_MAX: Final = timedelta(minutes=5)
"""No single call may keep the daemon waiting for longer."""


class BehaviourFailed(AssertionError):
    """A behaviour that the provider does not show; the message says what happened instead."""


def expect(condition: object, otherwise: str) -> None:
    """Require that the condition holds.

    Raises:
        BehaviourFailed: with `otherwise` as its message.
    """
    if not condition:
        raise BehaviourFailed(otherwise)


async def attempt(h: Harness, call: Callable[[], Awaitable[T]]) -> T | ProviderError:
    """Await a call; return its result or its error of the contract. Deadlines pass at once where answers hang."""
    outcome, waited = await outlast(call, lambda: h.faults.hanging)
    expect(waited <= DEADLINE_MAX, f"kept its caller waiting for {waited}")
    if isinstance(outcome, Exception):
        if isinstance(outcome, NotApplicable):
            raise outcome
        h.errors.append("".join(traceback.format_exception(outcome)) + repr(outcome) + repr(outcome.args))
        if not isinstance(outcome, LEAVES):
            raise BehaviourFailed(f"raised {outcome!r}, which is no leaf of the contract") from outcome
        expect(str(outcome).strip(), f"{type(outcome).__name__} says nothing")
        return outcome
    return outcome


async def require_refusal(
    h: Harness, call: Callable[[], Awaitable[object]], *kinds: type[ProviderError]
) -> ProviderError:
    """Require that a call fails in one of these ways, and return its error."""
    outcome = await attempt(h, call)
    names = " or ".join(kind.__name__ for kind in kinds)
    if not isinstance(outcome, ProviderError):
        raise BehaviourFailed(f"returned {outcome!r} instead of raising {names}")
    if not isinstance(outcome, kinds):
        raise BehaviourFailed(f"raised {outcome!r} instead of {names}") from outcome
    return outcome


async def all_offers(h: Harness) -> tuple[Offer, ...]:
    """Return the offers on sale, at least one."""
    page = await h.provider.offers(h.query())
    expect(page.offers, "nothing is on offer although the cloud sells something")
    return page.offers


async def offers_of(h: Harness, nodes: int = 1) -> list[Offer]:
    """Return the offers that so many machines may be bought by as one."""
    return [one for one in await all_offers(h) if one.nodes_min <= nodes <= (one.nodes_max or nodes)]


async def an_offer(h: Harness, market: Market | None = None) -> Offer:
    """Return the cheapest offer (of that market).

    Raises:
        NotApplicable: nothing is sold on that market.
    """
    offers = [o for o in await offers_of(h) if market is None or o.market is market]
    if not offers:
        raise NotApplicable(f"this provider sells nothing {market}")
    return min(offers, key=lambda offer: (offer.gpu_price, offer.offer_id))


async def buy_machine(h: Harness, offer: Offer | None = None) -> tuple[AttemptKey, Instance]:
    """Launch a machine of ours and let it come up."""
    key = h.key()
    request = h.request(offer or await an_offer(h), key)
    instance = (await h.provider.launch(request)).instance
    await h.settle()
    return key, instance


async def the_machine(h: Harness, key: AttemptKey) -> Instance:
    """Return the one machine under this key that is not gone, as `find` returns it."""
    found = [i for i in await h.provider.find(key) if i.state is not InstanceState.GONE]
    expect(len(found) == 1, f"find({key}) returns {len(found)} machines instead of one: {found!r}")
    return found[0]


def require_nothing_bought(h: Harness, key: AttemptKey) -> None:
    """Require that the world holds no machine under this key."""
    machines = h.live(key)
    expect(not machines, f"a machine exists although the launch was refused: {machines!r}")


def require_one_machine(h: Harness, key: AttemptKey) -> None:
    """Require that the world holds exactly one machine under this key, and that one request to buy was sent."""
    machines = h.live(key)
    expect(len(machines) == 1, f"{len(machines)} machines exist under {key} instead of one: {machines!r}")
    expect(h.launch_calls() == 1, f"{h.launch_calls()} requests to buy were sent instead of one")


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
