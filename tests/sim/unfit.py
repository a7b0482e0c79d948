"""Hosts that are less than they offer: what a canary on each machine may cost, and what it must not."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime, timedelta
from random import Random
from typing import TYPE_CHECKING, Final

from spotd.core.canary import REFUSALS_MAX
from spotd.core.domain.intents import JobId
from spotd.core.domain.states import EndReason
from spotd_jobs.wire.reports import Outcome
from tests.sim.hazards import Hazard
from tests.sim.machines import Machine
from tests.sim.worlds import Shape

if TYPE_CHECKING:
    from tests.sim.run import Result
    from tests.sim.weather import Weather

UNFIT_FROM: Final = 8_000_000
"""The first seed of worlds with canaries."""
LEFT_ALONE: Final = timedelta(minutes=3)
"""A host that was refused is bought again no sooner, whatever a deadline needs."""


def with_unfit(base: Shape, seed: int) -> Shape:
    """The world with a canary, and with hosts that it refuses."""
    time = timedelta(seconds=Random(f"canary in {seed}").choice([10, 60, 60, 300]))
    return replace(base, hazards=base.hazards | {Hazard.UNFIT}, limits={**base.limits, "canary": time})


def spoil_hosts(weather: Weather) -> None:
    """Make some hosts less than they offer, in some worlds all of them."""
    if Hazard.UNFIT not in weather.shape.hazards:
        return
    luck = Random(f"unfit in {weather.seed}")
    share = luck.choice([0.3, 0.3, 0.6, 1.0])
    for cloud in weather.clouds:
        for host in cloud.hosts:
            host.unfit = luck.random() < share


def refused(result: Result) -> Iterator[tuple[JobId, int, Machine]]:
    """Each machine that its canary refused, with its job and the number of its attempt, in their order."""
    for identity, item in sorted(result.daemon.attempts_ever.items(), key=lambda row: (row[0].job, row[0].number)):
        m = result.daemon.machine_of(item)
        if m is not None and m.outcome is Outcome.UNFIT:
            yield identity.job, identity.number, m


def refusals_bounded(result: Result) -> Iterator[str]:
    """No job is kept from running by its canaries: they refuse so many of its machines, and then only show."""
    if result.daemon.told.restored:
        return  # a state that was put back has forgotten launches
    rows: defaultdict[JobId, list[int]] = defaultdict(list)
    attempts = {(i.job, i.number): item for i, item in result.daemon.attempts_ever.items()}
    for job, number, _ in refused(result):
        if attempts[job, number].end_reason is EndReason.CONTRACT_BROKEN:
            rows[job].append(number)
    for job, numbers in rows.items():
        if len(numbers) > REFUSALS_MAX:
            yield f"{job} was refused by the machines of its attempts {numbers}"


def measured_where_it_may(result: Result) -> Iterator[str]:
    """Only rented machines of one are measured, and only for the first attempt on them."""
    for item in result.daemon.attempts_ever.values():
        m = result.daemon.machine_of(item)
        if m is not None and m.measured and (item.quote.is_own or m.offer.nodes > 1 or item.machine_key is not None):
            yield f"{m.key} was measured on {m.host.name}"


def refused_are_remembered(result: Result) -> Iterator[str]:
    """The end of such an attempt is its host's fault, and not its job's; the host is left alone for a while."""
    daemon = result.daemon
    decided: defaultdict[str | None, list[datetime]] = defaultdict(list)
    for item in daemon.attempts_ever.values():
        decided[item.quote.offer.host_id].append(item.intended_at)
    for job, number, m in refused(result):
        item = next(one for i, one in daemon.attempts_ever.items() if (i.job, i.number) == (job, number))
        if item.end_reason is EndReason.USER_ERROR:
            yield f"{item.key} ended for {item.end_reason}, and its machine was unfit"
        if item.end_reason is not EndReason.CONTRACT_BROKEN or item.ended_at is None or daemon.told.restored:
            continue
        if any(item.ended_at < at < item.ended_at + LEFT_ALONE for at in decided[m.host.name]):
            yield f"{m.host.name} was bought again at once after {item.key}, whose canary refused it"


UNFIT: Final = (refusals_bounded, measured_where_it_may, refused_are_remembered)
