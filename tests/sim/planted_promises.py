"""Cores that break a promise of money, of proof or of bounds, each in one way."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

from spotd.core import (
    billing,
    budgets,
    enforcement,
    host_reports,
    metering,
    plan_builder,
    pricing,
    timeline,
    todays_terms,
)
from spotd.core.domain import cooldowns
from spotd.core.domain.cooldowns import Setback
from spotd.core.domain.intents import AttemptId
from spotd.core.domain.plan import Plan
from spotd.core.domain.policy import key_belongs_to
from spotd.core.domain.world import World
from spotd.core.kernel import judgements, launch_calls, listed, loss_evidence, outcomes, reconcile
from spotd.core.plan_builder import PlanBuilder
from spotd.core.ranking import candidates
from spotd.daemon.executor import Executor
from spotd.daemon.market import plugin_values
from spotd_providers.contract.values import MicroUsdPerHour
from tests.sim.harsh import CEILING
from tests.sim.hazards import Hazard
from tests.sim.planted import ROUGH, Bug, not_asked_again_at_the_call, patched, small
from tests.sim.worlds import QUIET

CALM = replace(ROUGH, crash_rate=0.0, kills_per_hour=0.0, outages_per_hour=0.0, user=False, storm=timedelta(hours=4))
WITHIN = replace(CALM, reachable=True)


def holding(*hazards: Hazard, **changes: Any) -> Any:
    """A world with these hazards and nothing else that could hide the bug."""
    return replace(CALM, hazards=frozenset(hazards), **changes)


def sizes_in_timedeltas() -> AbstractContextManager[None]:
    """A rate as a length of time: days overflow from 24.5 GB on."""

    def wrong(amount: int, span: timedelta) -> int:
        return int(timedelta(hours=amount) / span)

    return patched((pricing, "per_hour", wrong))


def traffic_is_free() -> AbstractContextManager[None]:
    return patched((host_reports, "meter_traffic", lambda _draft, _attempt, _report: None))


def saves_are_not_promised() -> AbstractContextManager[None]:
    """Promises the time of a machine and nothing of what it uploads, nor asks what its last save costs."""
    return patched((budgets, "save_cost", lambda _job, _offer: 0))


def fixed_prices_stay() -> AbstractContextManager[None]:
    return patched((enforcement, "words_over_ceiling", lambda _draft, _item: ""))


def no_setback() -> AbstractContextManager[None]:
    def wrong(job: Any, _item: Any, _reason: Any, _now: datetime) -> Setback:
        return Setback(idle_launches=0, failed_starts=0, not_before=None)

    return patched((plan_builder, "setback", wrong))


def every_machine_is_a_start() -> AbstractContextManager[None]:
    """Takes a machine for a command that ran: the pauses grow, and the number of starts never does."""
    return patched((cooldowns, "did_start", lambda *_: True))


def ends_when_told() -> AbstractContextManager[None]:
    return patched((outcomes, "TERMINATE_RETRY_MAX", timedelta(days=30)))


def believes_when_it_was_made() -> AbstractContextManager[None]:
    def wrong(_item: Any, created_at: datetime | None, now: datetime, default: datetime) -> datetime:
        return min(created_at or default, now)

    def unseen(drafted: Any, item: Any, created_at: datetime | None) -> datetime:
        return wrong(item, created_at, drafted.now, item.intended_at)

    return patched((outcomes, "began", wrong), (reconcile, "began_unseen", unseen))


# --- in admission: what is promised counts ---


def ceilings_of_whole_machines() -> AbstractContextManager[None]:
    limit = pricing.gpu_price_limit

    def wrong(agreed: Any, ceiling: int) -> MicroUsdPerHour:
        return limit(agreed, ceiling * agreed.offer.gpu_count)

    return patched(
        (candidates, "gpu_price_limit", wrong), (launch_calls, "gpu_price_limit", wrong), not_asked_again_at_the_call()
    )


def keeps_the_ceiling_that_was_agreed() -> AbstractContextManager[None]:
    return patched((launch_calls, "at_todays_ceiling", lambda item, *_: item))


def never_accepts_more_again() -> AbstractContextManager[None]:
    right = todays_terms.at_todays_ceiling

    def wrong(item: Any, ceiling: Any, now: datetime) -> Any:
        return right(item, None if ceiling is None else min(ceiling, item.ceiling_now), now)

    return patched((launch_calls, "at_todays_ceiling", wrong))


# --- in metering ---


def meters_one_gpu() -> AbstractContextManager[None]:
    rate, listed_rate = pricing.metered_rate, pricing.listed_rate

    def wrong(agreed: Any) -> MicroUsdPerHour:
        return MicroUsdPerHour(rate(agreed) // agreed.offer.gpu_count)

    def wrong_listed(agreed: Any, price: MicroUsdPerHour) -> tuple[MicroUsdPerHour, Any]:
        whole, of_gpu = listed_rate(agreed, price)
        return MicroUsdPerHour(whole // agreed.offer.gpu_count), of_gpu

    return patched(
        *((module, "metered_rate", wrong) for module in using("metered_rate")),
        *((module, "listed_rate", wrong_listed) for module in using("listed_rate")),
    )


def using(name: str) -> list[Any]:
    """The modules of the core that took this name from where it is made."""
    return [module for module in (billing, listed) if hasattr(module, name)]


def meters_what_was_agreed() -> AbstractContextManager[None]:
    bill = billing.bill_listed

    def wrong(builder: PlanBuilder, attempt: AttemptId, at: datetime, _: MicroUsdPerHour) -> None:
        bill(builder, attempt, at, pricing.metered_rate(builder.attempt(attempt).quote))

    return patched((listed, "bill_listed", wrong))


def meters_the_day_twice() -> AbstractContextManager[None]:
    days = metering.days_between

    def wrong(start: datetime, end: datetime) -> Iterator[tuple[datetime, datetime]]:
        for _, other in days(start, end):
            yield start, other

    return patched((metering, "days_between", wrong))


# --- in the proof of an end ---


def an_accepted_order_is_an_end() -> AbstractContextManager[None]:
    return patched((judgements, "_is_end_accepted", lambda *_: True))


def any_list_is_proof() -> AbstractContextManager[None]:
    return patched(*((module, "proves_absence", lambda *_: True) for module in (loss_evidence, judgements)))


# --- on the computer that it runs on, and beside another one ---


def one_label_is_one_owner() -> AbstractContextManager[None]:
    return patched((listed, "is_own_key", lambda policy, key: key_belongs_to(policy.install, key)))


def meters_follow_the_clock() -> AbstractContextManager[None]:
    def wrong(_world: World, _step: timedelta, _now: datetime, _after: datetime | None = None) -> Plan:
        return Plan()

    return patched((timeline, "redated", wrong))


def leaves_on_full_disk() -> AbstractContextManager[None]:
    """Ends nothing whose end cannot be saved."""
    return patched((Executor, "end_unsaved", lambda *_: None))


def offers_are_not_checked() -> AbstractContextManager[None]:
    return patched((plugin_values, "_offer", lambda row, _provider: row))


def instants_are_not_checked() -> AbstractContextManager[None]:
    return patched((plugin_values, "instant", lambda at: at))


QUIET_DISK = small(QUIET, jobs=3, hosts=3, storm=timedelta(hours=4), hazards=frozenset({Hazard.FULL_DISK}))
FAULTY_PLUGIN = holding(Hazard.ROWS, storm=timedelta(hours=1))
MIDNIGHT = small(holding(Hazard.MONTH_END), jobs=3, storm=timedelta(hours=8), need=(300, 500))

CONFIGURED = holding(
    Hazard.CEILINGS, reachable=True, faults=False, need=(120, 300), limits={"ceiling_default": CEILING}
)

PROMISES: Mapping[str, Bug] = {
    "take bytes for a length of time": Bug(
        patch=sizes_in_timedeltas,
        rule=("said_by_the_core",),
        limit=timedelta(hours=6),
        shape=small(holding(Hazard.TRAFFIC, Hazard.SIZES)),
        seed=2,
    ),
    "meter no traffic": Bug(
        patch=traffic_is_free, rule=("spending",), shape=small(holding(Hazard.TRAFFIC, Hazard.SIZES)), seed=2
    ),
    "promise nothing for uploads": Bug(
        patch=saves_are_not_promised,
        rule=("budgets",),
        shape=replace(WITHIN, limits={"budget_day": 6_000_000}, hazards=frozenset({Hazard.TRAFFIC, Hazard.SIZES})),
        seed=2,
        until=timedelta(hours=1),
    ),
    "keep a machine that bills more than agreed": Bug(
        patch=fixed_prices_stay,
        rule=("above_ceiling",),
        shape=small(WITHIN, hazards=frozenset({Hazard.OVERCHARGE})),
        seed=29,
    ),
    "try for ever what can never start": Bug(
        patch=no_setback,
        rule=("launches_bounded",),
        shape=holding(Hazard.NEVER_STARTS, Hazard.SECRETS, jobs=2, storm=timedelta(hours=1)),
        seed=1,
        limit=timedelta(hours=3),
    ),
    "take every machine for a start": Bug(
        patch=every_machine_is_a_start,
        rule=("launches_bounded",),
        shape=holding(Hazard.NEVER_STARTS, Hazard.SECRETS, jobs=2, storm=timedelta(hours=1)),
        seed=1,
        limit=timedelta(hours=3),
    ),
    "wait with an end for as long as asked": Bug(
        patch=ends_when_told, rule=("forgotten_machines",), shape=small(holding(Hazard.RETRY_AFTER)), seed=11
    ),
    "believe when a machine says it was made": Bug(
        patch=believes_when_it_was_made,
        rule=("spending",),
        shape=small(holding(Hazard.BORN_LONG_AGO)),
        limit=timedelta(hours=5),
    ),
    "hold whole machines to the ceiling of a GPU": Bug(
        patch=ceilings_of_whole_machines, rule=("launches",), shape=small(holding(Hazard.GPUS))
    ),
    "keep the ceiling of the launch where the config accepts less": Bug(
        patch=keeps_the_ceiling_that_was_agreed, rule=("above_ceiling",), shape=CONFIGURED
    ),
    "accept no more where the config does": Bug(
        patch=never_accepts_more_again, rule=("below_ceiling",), shape=CONFIGURED
    ),
    "meter one GPU of a machine": Bug(patch=meters_one_gpu, rule=("spending",), shape=small(holding(Hazard.GPUS))),
    "meter what was agreed and not what is listed": Bug(patch=meters_what_was_agreed, rule=("spending",), shape=CALM),
    "meter the day before midnight twice": Bug(patch=meters_the_day_twice, rule=("spending",), shape=MIDNIGHT),
    "take an order for an end": Bug(
        patch=an_accepted_order_is_an_end,
        rule=("forgotten_machines", "doubles"),
        shape=small(ROUGH, storm=timedelta(hours=4), hazards=frozenset({Hazard.RETRY_AFTER, Hazard.LISTS})),
        seed=6,
    ),
    "take any list for a proof": Bug(patch=any_list_is_proof, rule=("doubles",), shape=ROUGH),
    "take a label for an install": Bug(
        patch=one_label_is_one_owner,
        rule=("foreign_machines",),
        shape=holding(Hazard.TWIN),
        limit=timedelta(hours=5),
        until=timedelta(hours=1),
    ),
    "meter by a clock that was set": Bug(
        patch=meters_follow_the_clock, rule=("spending",), shape=holding(Hazard.CLOCK_STEPS, storm=timedelta(hours=8))
    ),
    "end nothing on a full disk": Bug(patch=leaves_on_full_disk, rule=("full_disk",), shape=QUIET_DISK, seed=36),
    "take the offers of a plugin as they are": Bug(
        patch=offers_are_not_checked,
        rule=("said_by_the_core",),
        shape=FAULTY_PLUGIN,
        limit=timedelta(hours=2),
        until=timedelta(hours=1),
    ),
    "take the instants of a plugin as they are": Bug(
        patch=instants_are_not_checked,
        rule=("said_by_the_core",),
        shape=FAULTY_PLUGIN,
        limit=timedelta(hours=2),
        seed=1,
        until=timedelta(hours=1),
    ),
}
