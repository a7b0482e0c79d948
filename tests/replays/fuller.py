"""A fuller replay of a recorded trace than the published model: what that leaves out costs time and money here.

* A preemption loses what was not saved, and may come anywhere in the step in which the zone goes down.
* A start takes a time that is drawn for it; some starts fail, and are given up after `GIVES_UP_S`, billed all the same.
* Some preemptions are silent: the machine does nothing, is billed, and is missed after `SILENT_S`.
* Each start from a checkpoint moves it at a price. Machines are billed by the second.
* A change of machine first saves, which takes a while.

On-demand machines fail to start, too, and are not preempted. A policy is asked every minute, as the daemon asks, and is
told what the daemon would know of starts: `starts_seen` of before the job, and those of the job. The daemon's own
functions make the usual start of them and what the shield holds back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from random import Random
from typing import Final

from spotd.core.domain.world import ONE, Record, RecordId, added
from spotd.core.policies import HOUR_S, Action, Observation, Rule, Zone
from spotd.core.starts import ANY_IMAGE, careful_start, failure_record, ratio_record, start_record, usual_start
from spotd_providers.contract.values import Market, MicroUsdPerHour, ProviderName
from tests.replays.replay import ReplayResult, ReplayTerms, ZoneTrace, zone_after

MINUTE_S: Final = 60
SAVES_EVERY_S: Final = 15 * MINUTE_S
SAVE_S: Final = 2 * MINUTE_S
GIVES_UP_S: Final = 10 * MINUTE_S
START_LIMIT: Final = timedelta(minutes=25)
"""The provider's time for a start: EC2's. What fails is seen to before."""
FAILS: Final = {Action.SPOT: 0.08, Action.ON_DEMAND: 0.03}
SILENT: Final = 0.15
SILENT_S: Final = 5 * MINUTE_S
BOOT_SPREAD: Final = 0.5
"""Of the logarithm of the time that a start takes."""
BOOT_MAX: Final = 3
"""No start takes more than so many times the usual."""
STARTS_SEEN: Final = 100
"""So many machines were started before the job, three of four on spot."""
EGRESS_USD: Final = 0.02 * 10
"""Ten gigabytes at two cents."""


@dataclass(slots=True)
class _Machine:
    action: Action
    zone: str
    rate: MicroUsdPerHour
    starts_for: int
    fails: bool = False
    ran: int = 0
    unsaved: int = 0
    silent_for: int | None = None
    saving_for: int | None = None
    """It was ordered to stop, and saves."""


class _Starts:
    """What the daemon has on record of starts, and what follows from it."""

    _PROVIDER: Final = ProviderName("replayed")
    _AT: Final = datetime(2026, 1, 1, tzinfo=UTC)
    _IMAGE: Final = "image"

    def __init__(self, seen: int, terms: ReplayTerms) -> None:
        self._known: dict[RecordId, Record] = {}
        rng = Random(seen)
        for number in range(seen):
            action = Action.SPOT if number % 4 else Action.ON_DEMAND
            self._add(_launched(action, "", MicroUsdPerHour(0), terms, rng))
        self.learn(None)

    def learn(self, machine: _Machine | None) -> None:
        """Add a machine that was launched; it is known at once how its start ends."""
        if machine is not None:
            self._add(machine)
        usual = usual_start(self._known, self._PROVIDER, self._IMAGE)
        careful = careful_start(
            self._known, self._PROVIDER, Market.ON_DEMAND, self._IMAGE, usual, START_LIMIT, self._AT
        )
        self.usual_s, self.careful_s = round(usual.total_seconds()), round(careful.total_seconds())

    def _add(self, machine: _Machine) -> None:
        market = Market.SPOT if machine.action is Action.SPOT else Market.ON_DEMAND
        took = timedelta(seconds=machine.starts_for)
        kinds = [failure_record(self._PROVIDER, market, took, START_LIMIT)]
        if not machine.fails:
            kinds = [start_record(self._PROVIDER, image) for image in (self._IMAGE, ANY_IMAGE)]
            kinds.append(ratio_record(self._known, self._PROVIDER, self._IMAGE, market, took))
        for one in kinds:
            self._known[one] = added(self._known.get(one), one, ONE, took, self._AT)


def replay_fully(
    rule: Rule, zones: Sequence[ZoneTrace], terms: ReplayTerms, seed: int, starts_seen: int = STARTS_SEEN
) -> ReplayResult:
    """Run the job to its end, or to twice its deadline."""
    rng, machine, starts = Random(seed), None, _Starts(starts_seen, terms)
    saved = paid = launches = preemptions = 0
    egress = 0.0
    seen = [Zone(name=zone.name, is_up=False, price=zone.price(terms.start)) for zone in zones]
    for now in range(0, 2 * terms.deadline_s, MINUTE_S):
        at = terms.start + now // terms.step_s
        if at >= min(len(zone.up) for zone in zones):
            break
        for index, traced in enumerate(zones):
            seen[index] = zone_after(seen[index], is_up=traced.up[at], price=traced.price(at), step_s=MINUTE_S)
        if machine is not None and saved + machine.unsaved >= terms.task_s:
            return _result(paid, egress, now, launches, preemptions, terms)
        if machine is not None and _is_gone(machine, seen, rng):
            machine, preemptions = None, preemptions + 1
        if machine is not None and machine.fails and machine.starts_for <= 0:
            machine = None
        if machine is not None and machine.saving_for is not None and machine.saving_for <= 0:
            saved, machine = saved + machine.unsaved, None
        if machine is None or machine.saving_for is None:
            chosen = rule(_observation(terms, now, saved, machine, tuple(seen), starts))
            zone = next((z for z in seen if z.is_up and z.name == chosen.zone), None)
            action = Action.WAIT if chosen.action is Action.SPOT and zone is None else chosen.action
            is_kept = (
                machine is not None
                and machine.action is action
                and (action is Action.ON_DEMAND or machine.zone == chosen.zone)
            )
            if machine is not None and not is_kept:
                # A machine that starts is let go at once, one that works saves first.
                machine = replace(machine, saving_for=SAVE_S) if machine.starts_for <= 0 else None
            if machine is None and action is not Action.WAIT:
                price = terms.on_demand if zone is None or action is Action.ON_DEMAND else zone.price
                machine = _launched(action, chosen.zone, price, terms, rng)
                starts.learn(machine)
                launches, egress = launches + 1, egress + (EGRESS_USD if saved else 0.0)
        if machine is not None:
            paid += machine.rate * MINUTE_S
            saved += _worked(machine)
    return ReplayResult(paid=paid, finish_s=None, launches=launches, preemptions=preemptions, is_late=True)


def _result(paid: int, egress: float, now: int, launches: int, preemptions: int, terms: ReplayTerms) -> ReplayResult:
    total = paid + round(egress * 1_000_000) * HOUR_S
    late = now > terms.deadline_s
    return ReplayResult(paid=total, finish_s=now, launches=launches, preemptions=preemptions, is_late=late)


def _launched(action: Action, zone: str, price: MicroUsdPerHour, terms: ReplayTerms, rng: Random) -> _Machine:
    if rng.random() < FAILS[action]:
        return _Machine(action, zone, price, GIVES_UP_S, fails=True)
    boot = min(BOOT_MAX * terms.overhead_s, round(terms.overhead_s * rng.lognormvariate(0, BOOT_SPREAD)))
    return _Machine(action, zone, price, boot)


def _is_gone(machine: _Machine, seen: Sequence[Zone], rng: Random) -> bool:
    """Whether a spot machine is known to be gone; a silent one does no work until then."""
    if machine.action is not Action.SPOT:
        return False
    if machine.silent_for is not None:
        machine.silent_for += MINUTE_S
        return machine.silent_for >= SILENT_S
    if any(zone.is_up and zone.name == machine.zone for zone in seen):
        return False
    if rng.random() < SILENT:
        machine.silent_for = 0
        return False
    return True


def _worked(machine: _Machine) -> int:
    """Let one minute pass; return the work that was saved in it."""
    if machine.saving_for is not None:
        machine.saving_for -= MINUTE_S
        return 0
    if machine.silent_for is not None:
        return 0
    if machine.starts_for > 0:
        machine.starts_for -= MINUTE_S
        return 0
    if machine.fails:
        return 0
    machine.ran += MINUTE_S
    machine.unsaved += MINUTE_S
    if machine.ran % SAVES_EVERY_S:
        return 0
    fresh, machine.unsaved = machine.unsaved, 0
    return fresh


def _observation(
    terms: ReplayTerms, now: int, saved: int, machine: _Machine | None, zones: tuple[Zone, ...], starts: _Starts
) -> Observation:
    """What the daemon would know: how starts went, and half of an interval lost on average."""
    unsaved = 0 if machine is None else machine.unsaved
    return Observation(
        task_s=terms.task_s,
        work_s=terms.task_s - saved - unsaved,
        elapsed_s=now,
        left_s=terms.deadline_s - now,
        step_s=MINUTE_S,
        overhead_s=starts.usual_s + SAVES_EVERY_S // 2,
        overhead_max_s=SAVE_S + starts.careful_s,
        zones=zones,
        on_demand=terms.on_demand,
        holds=Action.WAIT if machine is None else machine.action,
        held_zone="" if machine is None else machine.zone,
        pending_s=0 if machine is None else max(0, machine.starts_for),
        unsaved_s=unsaved,
        keeps_work=False,
        save_every_s=SAVES_EVERY_S,
        margin_steps=2 + SILENT_S // MINUTE_S,
    )
