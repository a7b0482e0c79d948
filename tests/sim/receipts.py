"""What must hold of charges once providers have billed, by what their machines really cost."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from spotd.core.domain.attempts import Attempt
from tests.sim.bills import ALL_STATED_AFTER
from tests.sim.hazards import Hazard
from tests.sim.machines import Machine
from tests.sim.money import booked_by_attempt
from tests.sim.run import Result
from tests.sim.schedules import machine_of

CENT: Final = 10_000
"""A smaller difference is not corrected."""


def bills_believed(result: Result) -> Iterator[str]:
    """No bill is believed that states less, or more, than the machine cost."""
    for at, item, m in result.daemon.told.bills:
        billed = item.bill.believed
        if billed is not None and abs(billed - m.billed) > CENT:
            yield f"{m.key} cost {m.billed}, and at {at} a bill of {billed} was believed"


def receipts(result: Result) -> Iterator[str]:
    """A day after its end what is booked of a machine is what its provider has billed."""
    booked = booked_by_attempt(result)
    for item, m in billed_machines(result):
        is_stated = m.died is not None and result.ended_at - m.died >= ALL_STATED_AFTER
        if is_stated and item.bill.believed is not None and abs(booked[item.id] - m.billed) > CENT:
            yield f"{m.key} was billed {m.billed}, is booked at {booked[item.id]}, and its bill is known"


def billed_machines(result: Result) -> Iterator[tuple[Attempt, Machine]]:
    if Hazard.BILLS not in result.shape.hazards:
        return
    for item in result.daemon.attempts_ever.values():
        m = machine_of(result, item)
        if m is not None and item.ref == m.ref and result.daemon.clouds[item.provider].manner is not None:
            yield item, m


RECEIPTS: Final = (bills_believed, receipts)
