"""What a plan knows of one host: which machines of it there are, and what was bid for those that are gone."""

from __future__ import annotations

from dataclasses import replace

from spotd.core.domain.attempts import Attempt
from spotd.core.domain.cooldowns import CooldownScope, bid_subject
from spotd.core.domain.intents import AttemptId
from spotd.core.domain.plan import applied
from spotd.core.domain.states import AttemptState
from spotd.core.plan_builder import PlanBuilder
from spotd_providers.contract.values import HostId
from tests.unit.core.builders import MINUTE, NOW, SHOP, world_with

HERE = HostId("host-o1")
WORLD = world_with(AttemptState.RUNNING)
FIRST = next(iter(WORLD.attempts.values()))


def another(host: str, number: int = 2) -> Attempt:
    offer = replace(FIRST.quote.offer, host_id=HostId(host))
    quote = replace(FIRST.quote, offer=offer)
    return replace(FIRST, id=AttemptId(job=FIRST.id.job, number=number), state=AttemptState.INTENDED, quote=quote)


def numbers(builder: PlanBuilder, host: str = HERE) -> list[int]:
    return [item.id.number for item in builder.attempts_on(SHOP, HostId(host))]


def test_each_machine_of_a_host_is_known_by_it_and_a_new_one_at_once() -> None:
    builder = PlanBuilder(WORLD, NOW)
    assert (numbers(builder), numbers(builder, "elsewhere")) == ([1], [])
    builder.put_attempt(another(HERE))
    builder.put_attempt(another("elsewhere", 3))
    assert (numbers(builder), numbers(builder, "elsewhere")) == ([1, 2], [3])


def test_one_that_has_ended_or_was_taken_back_is_none_of_it() -> None:
    builder = PlanBuilder(WORLD, NOW)
    assert numbers(builder) == [1]

    def step() -> None:
        builder.put_attempt(another(HERE))
        raise ValueError

    assert builder.attempted(step) is not None
    assert numbers(builder) == [1]
    builder.put_attempt(replace(FIRST, state=AttemptState.ENDING))
    assert numbers(builder) == [1]
    builder.put_attempt(replace(FIRST, state=AttemptState.ENDED))
    assert numbers(builder) == []


def test_one_whose_host_is_known_only_now_is_of_that_host_alone() -> None:
    builder = PlanBuilder(WORLD, NOW)
    assert numbers(builder) == [1]
    builder.put_attempt(replace(FIRST, quote=another("elsewhere").quote))
    assert (numbers(builder), numbers(builder, "elsewhere")) == ([], [1])


def test_bids_for_machines_that_are_gone_are_known_from_before_and_from_this_plan_until_they_lapse() -> None:
    builder = PlanBuilder(WORLD, NOW)
    builder.cool(SHOP, CooldownScope.BID, bid_subject(HERE, 1, 300_000), MINUTE, "gone")
    assert builder.former_bids(SHOP, HERE) == [(1, 300_000)]
    world = applied(WORLD, builder.plan())
    builder = PlanBuilder(world, NOW)
    builder.cool(SHOP, CooldownScope.BID, bid_subject(HERE, 2, 500_000), MINUTE, "gone")
    assert builder.former_bids(SHOP, HERE) == [(1, 300_000), (2, 500_000)]
    assert builder.former_bids(SHOP, HostId("elsewhere")) == []
    assert PlanBuilder(world, NOW + MINUTE).former_bids(SHOP, HERE) == []
