"""Bugs of reading what providers have billed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from datetime import timedelta
from typing import Final

from spotd.core import bills as bill_correction
from spotd.core.bills import Bill, bill_of
from spotd.daemon.market import price_recorder
from spotd_providers.contract.values import InstanceId, MicroUsd, ProviderCharge
from tests.sim.hazards import Hazard
from tests.sim.planted import Bug, patched
from tests.sim.worlds import Shape

BILLED: Final = Shape(
    jobs=4,
    hosts=4,
    storm=timedelta(hours=2),
    need=(20, 60),
    user=False,
    faults=False,
    crash_rate=0.0,
    kills_per_hour=0.0,
    outages_per_hour=0.0,
    hazards=frozenset({Hazard.BILLS}),
)


def every_bill_is_whole() -> AbstractContextManager[None]:
    """Believes a bill of nothing, or of some of the time."""
    return patched((bill_correction, "_refusal", lambda *_args, **_given: ""))


def rows_count_each_time() -> AbstractContextManager[None]:
    """Adds a row up that stands in the list twice."""

    def wrong(machine: InstanceId, charges: Iterable[ProviderCharge]) -> Bill | None:
        own = [row for row in charges if row.instance_id == machine]
        found = bill_of(machine, own)
        return found and replace(found, amount=MicroUsd(sum(row.amount for row in own)))

    return patched((price_recorder, "bill_of", wrong))


BILLS: Mapping[str, Bug] = {
    "believe a bill that is not whole": Bug(patch=every_bill_is_whole, rule=("bills_believed",), shape=BILLED, seed=3),
    "add up rows twice": Bug(patch=rows_count_each_time, rule=("bills_believed",), shape=BILLED, seed=6),
}
