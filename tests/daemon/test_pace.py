"""How long a poller waits: the pace is a promise to the user, and a rest that a provider asked for is one to it."""

from __future__ import annotations

from datetime import timedelta
from itertools import pairwise
from random import Random

import anyio
import pytest

from spotd.daemon.bell import Bell
from spotd.daemon.boards import Boards
from spotd.daemon.crash import never
from spotd.daemon.pollers import Pace, Poller
from spotd_providers.contract.errors import AuthFailed, ProviderError, RateLimited, Unavailable
from spotd_providers.contract.values import OfferPage, OfferQuery
from tests.daemon.clocks import VirtualClock
from tests.daemon.rig import Log
from tests.daemon.shop import Shop

pytestmark = pytest.mark.anyio
MINUTE = timedelta(minutes=1)
EVERY_MINUTE = Pace(poll_every=MINUTE)


class Asked(Shop):
    """Notes when it is asked for its offers."""

    def __init__(self, clock: VirtualClock) -> None:
        super().__init__(clock)
        self.clock = clock
        self.asked_s: list[float] = []

    async def offers(self, query: OfferQuery) -> OfferPage:
        self.asked_s.append(anyio.current_time())
        return await super().offers(query)


async def ring_often(poller: Poller) -> None:
    while True:
        await anyio.sleep(1)
        poller.ask_again()


async def pauses_s(shop: Asked, *, hours: float, pace: Pace = EVERY_MINUTE) -> list[float]:
    """Seconds between one question and the next."""
    boards = Boards(Bell())
    boards.open(shop.name)
    poller = Poller(
        shop,
        boards=boards,
        clock=shop.clock,
        rng=Random(1),
        log=Log(),
        pace=pace,
        query=OfferQuery,
        crash=never,
    )
    async with anyio.create_task_group() as group:
        if pace.offers_every_min:
            group.start_soon(ring_often, poller)
        with anyio.move_on_after(hours * 3600):
            await poller.offers_loop()
        group.cancel_scope.cancel()
    return [after - before for before, after in pairwise(shop.asked_s)]


async def test_a_poll_never_comes_later_than_its_interval_and_not_always_at_the_same_moment() -> None:
    pauses = await pauses_s(Asked(VirtualClock()), hours=3)
    assert len(pauses) > 100
    assert all(0.9 * 60 <= pause <= 60 for pause in pauses), pauses
    assert len({round(pause) for pause in pauses}) > 3


async def test_a_marketplace_that_counts_questions_is_asked_evenly_and_not_more_often_than_it_answers() -> None:
    hasty = Pace(poll_every=timedelta(seconds=5), offers_every_min=timedelta(seconds=15))
    pauses = await pauses_s(Asked(VirtualClock()), hours=1, pace=hasty)
    assert len(pauses) > 100
    assert set(pauses) == {15.0}


@pytest.mark.parametrize(
    ("failure", "least_s"),
    [
        pytest.param(RateLimited("slow down", retry_after=timedelta(seconds=90)), 90, id="longer-than-the-pace"),
        pytest.param(RateLimited("slow down", retry_after=timedelta(seconds=60)), 60, id="as-long-as-the-pace"),
        pytest.param(Unavailable("down"), 60, id="away"),
        pytest.param(AuthFailed("no"), 600, id="refused"),
    ],
)
async def test_a_failing_provider_is_never_asked_again_before_its_rest_is_over(
    failure: ProviderError, least_s: float
) -> None:
    shop = Asked(VirtualClock())
    shop.always["offers"] = failure
    pauses = await pauses_s(shop, hours=3)
    assert len(pauses) > 10
    assert all(pause >= least_s for pause in pauses), pauses
