"""A deadline that nothing else can meet uses a host again that was lost, after a while: never one that is at fault."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any, Final

import pytest

from spotd.core.decide import decide
from spotd.core.domain.cooldowns import Cooldown, CooldownEnd, CooldownScope
from spotd.core.domain.plan import Plan
from spotd.core.domain.world import World
from spotd_jobs.spec.model import CheckpointPolicy, Deadline, GpuAlternative, MarketChoice, Resources, Schedule, Work
from spotd_providers.contract.values import Interruption, Market, MicroUsdPerHour, Offer
from tests.cases import every
from tests.unit.core.builders import MINUTE, NOW, SHOP, job, market, offer, shop_policy

_SPOT: Final = offer("spot", price=100_000)
_SOLD: Final = replace(
    offer("sold", price=400_000, host_id=_SPOT.host_id),
    market=Market.ON_DEMAND,
    interruption=Interruption.NEVER,
    on_demand_price=MicroUsdPerHour(400_000),
)
_LONE: Final = (_SPOT, _SOLD)
_NO_TIME: Final = timedelta(minutes=190)
"""For two hours of work and a start that may fail, but not for half an hour more."""


def _lost(**changes: Any) -> Cooldown:
    known = Cooldown(
        provider=SHOP,
        scope=CooldownScope.HOST,
        subject=str(_SPOT.host_id),
        since=NOW,
        until=NOW + 30 * MINUTE,
        reason="the machine was lost",
        ends=CooldownEnd.DEADLINE,
    )
    return replace(known, **changes)


def _decided(
    offers: tuple[Offer, ...],
    *cooling: Cooldown,
    due: timedelta | None = _NO_TIME,
    minutes: int = 4,
    chosen: MarketChoice = MarketChoice.AUTO,
) -> Plan:
    now = NOW + minutes * MINUTE
    spec = {
        "schedule": Schedule() if due is None else Schedule(deadline=Deadline(at=NOW + due)),
        "work": Work(time=timedelta(hours=2)),
        "checkpoint": CheckpointPolicy(every=15 * MINUTE),
    }
    resources = Resources(gpu=(GpuAlternative(name="RTX_4090", count=1),), market=chosen)
    item = job(spec=spec, resources=resources)
    world = World(policy=shop_policy(), jobs={item.id: item}, attempts={}, intents={}, cooldowns=cooling)
    return decide(world, market(*offers, at=now), now)


def _bought(plan: Plan) -> list[str]:
    return [item.quote.offer.offer_id for item in plan.attempts.values()]


_OTHER: Final = offer("other", price=300_000)
_REFUSED: Final = _lost(
    scope=CooldownScope.OFFER, subject="other", until=NOW + 5 * MINUTE, ends=CooldownEnd.TIME, reason="no"
)


@every(
    ("offers", "cooling", "options", "expected"),
    [
        pytest.param(_LONE, [_lost()], {}, ["sold"], id="nothing else can meet it"),
        pytest.param(_LONE, [_lost()], {"chosen": MarketChoice.SPOT}, ["spot"], id="spot alone is asked for"),
        pytest.param(_LONE, [_lost()], {"minutes": 2}, [], id="the host was lost a moment ago"),
        pytest.param(_LONE, [_lost(strikes=1)], {}, [], id="lost again: twice as long"),
        pytest.param(_LONE, [_lost(strikes=1)], {"minutes": 6}, ["sold"], id="lost again, and that is over"),
        pytest.param(_LONE, [_lost(strikes=50)], {"minutes": 29}, [], id="lost again and again: as for all"),
        pytest.param(_LONE, [_lost()], {"due": None}, [], id="no deadline"),
        pytest.param(_LONE, [_lost()], {"due": timedelta(hours=9)}, [], id="there is time to wait"),
        pytest.param(_LONE, [_lost(ends=CooldownEnd.TIME)], {}, [], id="the host is at fault"),
        pytest.param(_LONE, [_lost(since=None)], {}, [], id="a row of an older spotd"),
        pytest.param((*_LONE, _OTHER), [_lost()], {}, ["other"], id="another host can meet it"),
        pytest.param((*_LONE, _OTHER), [_lost(), _REFUSED], {}, [], id="another one will soon be free"),
        pytest.param(
            (*_LONE, replace(_OTHER, gpu_price=MicroUsdPerHour(9_000_000))),
            [_lost()],
            {},
            ["sold"],
            id="another one is above the ceiling",
        ),
    ],
)
def test_a_lost_host_is_used_where_the_deadline_needs_it(
    offers: tuple[Offer, ...], cooling: list[Cooldown], options: dict[str, Any], expected: list[str]
) -> None:
    assert _bought(_decided(offers, *cooling, **options)) == expected


def test_why_says_that_the_cool_down_was_cut_short() -> None:
    (verdict,) = _decided(_LONE, _lost()).verdicts.values()
    assert (
        "its host is avoided until 12:30 UTC after a preemption, for which the deadline leaves no time"
        in verdict.sentence
    )
