"""A host's clock is the host's own: whatever it says, what lists showed to run is booked, and nothing beyond them."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from spotd.core.domain.plan import applied
from spotd.core.domain.world import World
from spotd.core.kernel.reconcile import reconcile
from spotd.core.metering import job_spent
from spotd_providers.contract.values import InstanceState, cost
from tests.unit.core.billing.test_bills import JOB, RATE, over
from tests.unit.core.billing.test_unwatched import DIED, KINDS, SECOND, heard, left
from tests.unit.core.builders import MINUTE, NOW, instance, listing

DAY = timedelta(days=1)
"""By how much the clock is off once it was set, and by how much before that."""
CLOCKS = pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param(-10 * MINUTE, -10 * MINUTE, id="ten minutes behind"),
        pytest.param(-100 * SECOND, -100 * SECOND, id="a hundred seconds behind"),
        pytest.param(10 * MINUTE, 10 * MINUTE, id="ten minutes ahead"),
        pytest.param(-DAY, -DAY, id="a day behind"),
        pytest.param(timedelta(0), -2 * MINUTE, id="set back"),
        pytest.param(-2 * MINUTE, 2 * MINUTE, id="set forward"),
        pytest.param(datetime(1970, 1, 1, tzinfo=UTC) - NOW, timedelta(0), id="1970, then right"),
        pytest.param(timedelta(0), datetime(9999, 12, 31, tzinfo=UTC) - NOW, id="right, then 9999"),
    ],
)


def runs(world: World, at: datetime) -> World:
    return applied(world, reconcile(world, listing(instance(InstanceState.RUNNING), at=at), {}, at + SECOND))


@CLOCKS
@KINDS
@pytest.mark.parametrize("apart", [timedelta(seconds=s) for s in (20, 62, 85)], ids=str)
@pytest.mark.parametrize("lists_first", [True, False], ids=["listed, then read", "read, then listed"])
def test_what_lists_showed_to_run_is_booked_whatever_its_host_s_clock_says(
    before: timedelta, after: timedelta, apart: timedelta, *, lists_first: bool, ends_itself: bool
) -> None:
    """Its host is read so seldom that a clock which is behind is believed from one read to the next."""
    world, at, last = left(ends_itself=ends_itself), DIED, DIED
    listed = apart / 2 if lists_first else apart * 3 / 4
    for n in range(1, 9):
        asked, at = at, at + apart
        off = before if n < 5 else after
        wrote = at - 3 * SECOND + min(off, datetime.max.replace(tzinfo=UTC) - at)
        # As `hosts.reader` dates it: what a read did not find was written after it.
        alive_at = max(asked, wrote) if wrote <= at else wrote
        world = applied(world, reconcile(world, {}, heard(at, seq=500 + n, alive_at=alive_at), at))
        last = at + listed - apart if lists_first else at + listed
        world = runs(world, last)
    world = over(world, InstanceState.GONE, last + apart)
    booked = job_spent(world, world.jobs[JOB], last + 2 * apart)
    assert cost(RATE, last - NOW) <= booked <= cost(RATE, last + apart + SECOND - NOW)
