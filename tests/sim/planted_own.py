"""Bugs of own machines: of the wait for them, of what is taken and left, and of what their owner does."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any, Final

from spotd.core import pacer, relocation
from spotd.core.domain.jobs import Job
from spotd.core.domain.states import EndReason
from spotd.core.kernel import listed
from spotd.core.own_first import OwnFirst
from spotd.core.plan_builder import PlanBuilder
from spotd.core.ranking.candidates import CandidateCatalogue
from spotd.daemon.market.offer_cache import OfferCache
from tests.sim.hazards import Hazard
from tests.sim.planted import BelievesEveryListing, Bug, lists_alone, patched
from tests.sim.worlds import QUIET, Shape

HALF_AN_HOUR: Final = timedelta(minutes=30)
CROWDED: Final = replace(
    QUIET,
    jobs=6,
    hosts=4,
    storm=timedelta(hours=6),
    need=(60, 150),
    reachable=True,
    paces=(60,),
    hazards=frozenset({Hazard.OWN, Hazard.CHAINS, Hazard.OWNERS_JOBS, Hazard.OWNERS_HOURS}),
    limits={"rent_after": HALF_AN_HOUR, "moves_max": 3},
)
"""More jobs than places of one's own, which come and go."""


def owned(*hazards: Hazard, **changes: object) -> Shape:
    """The same world with these hazards alone."""
    return replace(CROWDED, hazards=frozenset({Hazard.OWN, *hazards}), **changes)  # type: ignore[arg-type]  # by name


def waits_since_the_submit() -> AbstractContextManager[None]:
    """Counts what the job waited for others, or for its window, as a wait for own machines."""
    return patched((OwnFirst, "_since", lambda _self, job: job.submitted_at))


def waits_anew_each_time() -> AbstractContextManager[None]:
    return patched((OwnFirst, "_since", lambda self, _job: self._builder.now))


def waits_for_nothing() -> AbstractContextManager[None]:
    return patched((OwnFirst, "wait", lambda *_args, **_more: None))


def forgets_what_was_seen() -> AbstractContextManager[None]:
    """Takes an own machine that is not on offer for one that there is not."""
    right = OwnFirst._places

    def wrong(self: OwnFirst, job: Job, catalogue: CandidateCatalogue) -> Iterator[str]:
        return (words for words in right(self, job, catalogue) if words.endswith("free now"))

    return patched((OwnFirst, "_places", wrong))


def moves_for_money() -> AbstractContextManager[None]:
    """Leaves an own machine for a rented one that costs less."""

    def never(*_args: Any) -> bool:
        return False

    return patched((relocation, "keeps_own", never), (pacer, "keeps_own", never))


def one_place_for_two() -> AbstractContextManager[None]:
    """Sends jobs to a place that another one was given a moment ago."""
    right = CandidateCatalogue.__init__

    def wrong(self: CandidateCatalogue, *args: Any) -> None:
        right(self, *args)
        self._buying = set()

    return patched(
        (CandidateCatalogue, "__init__", wrong),
        (CandidateCatalogue, "take", lambda *_: None),
        (OfferCache, "bought", lambda *_args, **_more: None),
    )


def a_notice_is_the_end() -> AbstractContextManager[None]:
    """Ends a machine as soon as its owner has announced to want it back."""

    def wrong(builder: PlanBuilder, attempt: Any, _at: datetime) -> None:
        if builder.attempt(attempt).state.counts:
            builder.end_attempt(attempt, EndReason.PREEMPTED, "its owner wants it")

    return patched((listed, "note_notice", wrong))


def own_machines_cost_nothing() -> AbstractContextManager[None]:
    """Leaves what an own machine costs out of the books, and so out of each budget."""
    right = PlanBuilder.put_attempt

    def wrong(self: PlanBuilder, item: Any) -> None:
        if item.quote.is_own and item.meter.rate:
            item = replace(item, meter=replace(item.meter, rate=type(item.meter.rate)(0)))
        right(self, item)

    return patched((PlanBuilder, "put_attempt", wrong))


OWN: Final[Mapping[str, Bug]] = {
    "count the wait for own machines from the submit": Bug(
        patch=waits_since_the_submit, rule=("rented_too_soon",), shape=CROWDED, until=timedelta(hours=6)
    ),
    "count the wait for own machines anew": Bug(
        patch=waits_anew_each_time, rule=("waited_too_long",), shape=CROWDED, until=timedelta(hours=3)
    ),
    "wait for no own machine": Bug(
        patch=waits_for_nothing, rule=("rented_too_soon",), shape=CROWDED, until=timedelta(hours=1)
    ),
    "forget an own machine that is in use": Bug(
        patch=forgets_what_was_seen, rule=("rented_too_soon",), shape=CROWDED, until=timedelta(hours=1)
    ),
    "leave an own machine for a price": Bug(
        patch=moves_for_money,
        rule=("left_for_a_price",),
        shape=owned(Hazard.MOVES, jobs=3, need=(200, 300)),
        seed=24,
        until=timedelta(hours=6),
    ),
    "give one place to two jobs": Bug(
        patch=one_place_for_two, rule=("own_launches",), shape=CROWDED, until=timedelta(hours=1)
    ),
    "take a notice for the end": Bug(
        patch=a_notice_is_the_end, rule=("owners_hours",), shape=CROWDED, until=timedelta(hours=5)
    ),
    "book nothing for own machines": Bug(
        patch=own_machines_cost_nothing, rule=("spending", "budgets"), shape=CROWDED, seed=1
    ),
    "believe a list without a computer that is silent": Bug(
        daemon=BelievesEveryListing,
        patch=lists_alone,
        rule=("healthy_machines_killed", "doubles"),
        shape=owned(Hazard.NODES, jobs=3, reachable=False, need=(200, 300)),
        seed=1,
        until=timedelta(hours=5),
    ),
}
