"""What the simulator holds a daemon to when prices leap: two pages that state the same are two readings."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING, cast

from spotd_providers.contract.values import ProviderName
from tests.cases import every
from tests.sim.cloud import Cloud, Trade
from tests.sim.daemon import EPOCH
from tests.sim.orders import Orders

if TYPE_CHECKING:
    from tests.sim.daemon import Daemon

DOWN, UP = -100, 100


@every(
    ("leaps", "is_judged"),
    [
        ([DOWN], True),
        ([DOWN, DOWN], False),
        ([DOWN, UP], True),
        ([DOWN, 0, DOWN], True),
        ([DOWN, 0], False),
    ],
)
def test_an_order_is_judged_by_a_leap_that_one_page_alone_has_stated(leaps: list[int], is_judged: bool) -> None:
    """World 1000273: two pages in a row stated a hundredth of the same prices, and a machine was left for them."""
    name = ProviderName("zones")
    cloud, orders = Cloud(name, 3, Random(0), EPOCH, Trade()), Orders(cast("Daemon", None))
    for leap in leaps:
        cloud.leap = leap
        offers = tuple(row.offer for row in cloud.rows())
        orders.note_page(name, offers, cloud.unleapt)
    assert (name in orders.pages) is is_judged
