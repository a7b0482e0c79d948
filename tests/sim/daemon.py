"""The daemon of the simulator: what outlives its process, what the process is shown, and what its user asks of it.

What the process (`process.py`) knows dies with it; what it committed stays; what it sent takes effect without it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from random import Random
from typing import Any

from spotd.core import host_reports, recovery, requests, timeline
from spotd.core.checkpoints import offered
from spotd.core.domain.attempts import Attempt, HostSample, HostStatus, MachineState
from spotd.core.domain.intents import AttemptId, Charge, Intent, IntentKind, IntentState, JobId, terminate_intent_id
from spotd.core.domain.jobs import Checkpoint, Job, disk_gb_for
from spotd.core.domain.market import NO_GANGS
from spotd.core.domain.plan import Plan, applied, broken_rules
from spotd.core.domain.policy import Policy, key_parts
from spotd.core.domain.states import AttemptState, EndReason, JobState
from spotd.core.domain.world import World
from spotd.core.gangs import SHRINKS_WITHIN
from spotd.core.handover import words_against_reuse
from spotd.core.recovery import Survey
from spotd.core.timeline import Anchor, dated, wants_new_date
from spotd.daemon.commits import CrashPoint, Decide, Points, PolicyHolder
from spotd.daemon.hosts.reader import ANSWERS_STOP, clock_behind, exit_reason, later
from spotd.daemon.recovery_survey import NOT_DONE, NumberUsed, name_next, require_newest, require_same, use_number
from spotd_jobs.objects.api import StoreError, StoreUnavailable
from spotd_jobs.wire.reports import Outcome
from spotd_providers.contract.values import (
    AttemptKey,
    InstanceRef,
    Listing,
    MicroUsd,
    MicroUsdPerHour,
    Offer,
    OfferPage,
    ProviderName,
    micro_usd,
)
from tests.sim.agenda import Agenda
from tests.sim.cloud import Cloud, owner_of
from tests.sim.kept import KEPT_BEYOND, note_round
from tests.sim.machines import CloudDown, Machine, Row, Save, Task
from tests.sim.orders import Orders
from tests.sim.own_record import OwnRecord
from tests.sim.process import Died, Process, at_once
from tests.sim.records import Records, surveyed, surveyed_one

EPOCH = datetime(2026, 1, 5, 12, tzinfo=UTC)
CALL_TIMEOUT = timedelta(seconds=90)
GRANT_READ_EVERY = timedelta(seconds=30)
LISTED_AGAIN_AFTER = timedelta(seconds=4)
ASLEEP_LOOKED_AT = timedelta(minutes=1)
CLOCK_COMPARED_EVERY = timedelta(seconds=30)
SURVEY_AGAIN = timedelta(seconds=10)
BOOT_ID = "one uptime"
GPU_USED = 0.9
HANGS_AFTER = timedelta(minutes=17)
"""Of work on a machine."""
ADOPT = CrashPoint.BEFORE_COMMIT_ADOPT, CrashPoint.AFTER_COMMIT_ADOPT
SUBMIT = CrashPoint.BEFORE_COMMIT_SUBMIT, CrashPoint.AFTER_COMMIT_SUBMIT
CANCEL = CrashPoint.BEFORE_COMMIT_CANCEL, CrashPoint.AFTER_COMMIT_CANCEL
RETRY = CrashPoint.BEFORE_COMMIT_RETRY, CrashPoint.AFTER_COMMIT_RETRY


@dataclass(frozen=True, kw_only=True)
class Hang:
    """A command that gets no further: on so many machines, and whether it goes on printing."""

    machines: int
    prints_on: bool


@dataclass(frozen=True, kw_only=True)
class Work:
    """What a job really does: how long it takes, and how often its own code fails first.

    Attributes:
        bytes: of each of its checkpoints.
        never: it fails so wherever it is started, without end.
        no_secrets: what it needs to be prepared is lost.
        outputs: bytes that it leaves.
        saves_always: it prints nothing and writes a large checkpoint without a pause.
    """

    need: timedelta
    errors: int = 0
    bytes: int = 1000
    never: Outcome | None = None
    no_secrets: bool = False
    hangs: Hang | None = None
    outputs: int = 0
    saves_always: bool = True


@dataclass(frozen=True, kw_only=True)
class Taken:
    """A machine that went on with another attempt."""

    at: datetime
    former: AttemptId | None
    next: AttemptId
    disk_gb: int
    """Of the machine."""
    is_clean: bool
    """Whether its host had removed all that was the former job's."""


@dataclass(kw_only=True)
class Told:
    """What the daemon has said and done, for the oracles."""

    events: list[str] = field(default_factory=list)
    charges: list[Charge] = field(default_factory=list)
    resumes: list[tuple[JobId, timedelta, timedelta, timedelta]] = field(default_factory=list)
    """Of which job, from where, and from where at least and at most it had to be."""
    inputs: list[tuple[datetime, Job]] = field(default_factory=list)
    """Jobs that read outputs of others, as they were when a machine was prepared for them, and when."""
    moves: list[tuple[datetime, AttemptId, MicroUsdPerHour, MicroUsdPerHour]] = field(default_factory=list)
    """When a job was ordered to move, from which attempt, what its machine cost, and what the other was to cost."""
    cancels: dict[JobId, datetime] = field(default_factory=dict)
    retries: defaultdict[JobId, list[datetime]] = field(default_factory=lambda: defaultdict(list))
    sent: dict[AttemptId, datetime] = field(default_factory=dict)
    """When the call of each launch was made, or would have been."""
    broken: list[str] = field(default_factory=list)
    rows: Counter[tuple[JobId | None, datetime]] = field(default_factory=Counter)
    """Events by job and hour."""
    not_ours: list[str] = field(default_factory=list)
    """Keys of machines of another install that were ended."""
    full: list[tuple[datetime, datetime]] = field(default_factory=list)
    """When nothing could be saved."""
    restored: list[tuple[datetime, datetime]] = field(default_factory=list)
    """When copies of the state were made, and when they were put back."""
    forgotten: dict[AttemptId, datetime] = field(default_factory=dict)
    """Attempts that a restored state does not know, and when it was restored."""
    doubted: set[JobId] = field(default_factory=set)
    """Jobs of which some life has doubted checkpoints; a state that was restored since may have lost the doubt."""
    lost_jobs: frozenset[JobId] = frozenset()
    """Jobs that a restored state has never heard of."""
    unwanted: dict[AttemptKey, datetime] = field(default_factory=dict)
    """Machines of jobs that were over in a state that was put back, and when; a retry may take their attempts in."""
    bills: list[tuple[datetime, Attempt, Machine]] = field(default_factory=list)
    """When which bill was believed, and of which machine."""
    handovers: list[Taken] = field(default_factory=list)
    given_up: dict[AttemptKey, datetime] = field(default_factory=dict)
    """Machines that their owner gave up without having seen their end."""
    skipped: int = 0
    """Lists that woke nothing, where decisions by them are compared."""


class Daemon:
    """Everything durable is in `world`, `done` and `told`; `process` is the run of the shipped code."""

    decides_twice = False
    """Whether what a decision may be left out for is decided all the same, and compared."""

    def __init__(
        self, world: World, clouds: list[Cloud], work: dict[JobId, Work], rng: Random, agenda: Agenda, pace: timedelta
    ) -> None:
        self.world = world
        self.policy = PolicyHolder(world.policy)
        self.clouds = {c.name: c for c in clouds}
        self.work = work
        self.rng = rng
        self.agenda = agenda
        self.pace = pace
        self.done: dict[JobId, Job] = {}
        self.attempts_ever: dict[AttemptId, Attempt] = {}
        self.attempts_of: dict[JobId, dict[AttemptId, Attempt]] = {}
        self.told = Told()
        self.orders = Orders(self)
        self.own = OwnRecord(self)
        self.removed: frozenset[ProviderName] = frozenset()
        """Providers that are not in the config of the next start."""
        self.absent = self.removed
        """Providers that are not in the config of this process."""
        self.policy.owned = self.completed
        self.records: Records | None = None
        """Where launches are recorded, in a world in which the state may be lost."""
        self.surveyed = True
        self.crash: Callable[[str], None] = lambda _point: None
        self.died: Callable[[], None] = lambda: None
        self._can_read = self._can_write = True
        self.store_away_since: datetime | None = None
        """Since when the store cannot be read, or takes no writes."""
        self.unwritable_at: datetime | None = None
        self.hostile: Callable[[Machine], dict[str, Any]] | None = None
        """What a host states that cannot be, if hosts are hostile."""
        self.launches_at_once: int | None = None
        """At each provider, where it differs from what is shipped."""
        self.waits: Callable[[JobId], None] = lambda _job: None
        """After the launch of a job began to wait for its turn."""
        self.asleep_until: datetime | None = None
        """The computer sleeps: nothing of the process runs, and nothing of it is lost."""
        self.full_since: datetime | None = None
        """Since when the disk of the state is full: no commit succeeds."""
        self.wall_off = timedelta(0)
        """By how much the wall clock of the computer differs from the true time, which the providers have."""
        self.anchor: Anchor | None = None
        self.off = timedelta(0)
        """By how much the dates of the daemon differ from the true time."""
        self.read = {c.name: c.read for c in clouds}
        self.life = 0
        self.cycles = 0
        self.up = False

    @property
    def now(self) -> datetime:
        """By the daemon's own dates."""
        return self.agenda.now + self.off

    @property
    def true(self) -> datetime:
        """By the dates of everybody else."""
        return self.agenda.now

    @property
    def can_read(self) -> bool:
        """Whether the daemon can read the store."""
        return self._can_read

    @can_read.setter
    def can_read(self, can: bool) -> None:
        self._can_read = can
        self._note_store()

    @property
    def can_write(self) -> bool:
        return self._can_write

    @can_write.setter
    def can_write(self, can: bool) -> None:
        self._can_write = can
        self._note_store()

    def _note_store(self) -> None:
        is_away = not (self._can_read and self._can_write)
        self.store_away_since = (self.store_away_since or self.true) if is_away else None

    # --- the wall clock ---

    def set_clock(self, off: timedelta) -> None:
        """The wall clock is set; the daemon, if it runs, notices it and begins anew in the same process."""
        self.wall_off = off
        self.agenda.after(CLOCK_COMPARED_EVERY, self.compare_clocks)

    def compare_clocks(self) -> None:
        if self.full_since is not None or (self.asleep_until is not None and self.true < self.asleep_until):
            self.agenda.after(CLOCK_COMPARED_EVERY, self.compare_clocks)
        elif self.up and self.anchor is not None and wants_new_date(self.anchor, self.now, self.true + self.wall_off):
            self.process.end()
            self.boot()

    def begin_timeline(self) -> None:
        """What `spotd.daemon.clock` does at each start, without its files."""
        if self.anchor is None and not self.wall_off:
            self.anchor = Anchor(boot_id=BOOT_ID, boot_s=self.uptime_s(), at=self.now)
        found = dated(self.anchor, None, BOOT_ID, self.uptime_s(), self.true + self.wall_off)
        if found.step:
            before = found.anchor.at - found.step
            plan = timeline.redated(self.world, found.step, before, found.only_after)
            self.world = replace(self.world, cooldowns=())
            self.off = found.anchor.at - self.true
            self.commit(plan)
        self.anchor = found.anchor

    def uptime_s(self) -> float:
        return (self.true - EPOCH).total_seconds()

    def truly(self, value: Any) -> Any:
        """The value with the true dates, for the oracles."""
        if not self.off:
            return value
        off = self.off
        return timeline._shift(value, lambda at: at - off)

    # --- the process ---

    def boot(self) -> None:
        """A new process: its caches are empty, nothing is under way, open launches are unknown."""
        self.life += 1
        self.up = True
        self.blind = not self.can_read
        self.newest: set[AttemptId] = set()
        """Which the store has shown to be the newest of their jobs."""
        self.begin_timeline()
        self.polling: set[ProviderName] = set()
        self.absent = self.removed
        if self.records is not None:
            self.hold_until_surveyed(surveyed=False)
        self.process = Process(self)
        self.own.recall()
        life = self.life
        self.process.begin()
        if self.life != life:
            return  # it died at once
        if self.records is not None:
            self.soon(timedelta(seconds=self.rng.uniform(0.5, 8)), self.survey)
        self.poll_all()

    def survey(self) -> None:
        """The store tells what a state that was put back has forgotten."""
        if self.records is None or self.surveyed:
            return
        try:
            if self.full_since is not None:
                raise StoreUnavailable("the state cannot be written")
            plan = self.asked_store(self.records)
        except StoreUnavailable:
            self.soon(SURVEY_AGAIN, self.survey)
            return
        self.request(lambda _world, _now: plan, ADOPT)
        self.hold_until_surveyed(surveyed=True)
        self.process.wake_event.notify()

    def asked_store(self, records: Records) -> Plan:
        return surveyed(self, records)

    def hold_until_surveyed(self, *, surveyed: bool) -> None:
        """Nothing is bought and no machine is a stray while the state may be older than the store."""
        self.surveyed = surveyed
        self.policy.paused = "" if surveyed else NOT_DONE

    def completed(self, policy: Policy) -> Policy:
        """The policy as this process has it: whose machines are its own, and without what its config lacks."""
        if not self.surveyed:
            policy = replace(policy, identity_sure=False)
        if self.absent:
            rest = {name: rules for name, rules in policy.providers.items() if name not in self.absent}
            policy = replace(policy, providers=rest)
        return policy

    def kill(self) -> None:
        """The process is gone; what it had sent goes on without it."""
        self.life += 1
        self.up = False
        self.process.end()
        for cloud in self.clouds.values():
            for m in cloud.machines.values():
                order = self.world.intents.get(terminate_intent_id(m.ref))
                if order is not None and order.accepted_at is None:
                    m.end_taken = None  # the answer was given to a process that ended before it wrote it down
        self.died()

    def soon(self, span: timedelta, action: Callable[[], None]) -> None:
        """The action happens after so long, if the process still lives then."""
        life = self.life

        def guarded() -> None:
            if self.life != life:
                return
            if self.asleep_until is not None and self.true < self.asleep_until:
                self.agenda.at(min(self.asleep_until, self.true + ASLEEP_LOOKED_AT), guarded)  # the calm wakes it
                return
            try:
                action()
            except Died:
                self.kill()
            except Exception as exc:  # noqa: BLE001  # that nothing ends the daemon is what is tested
                self.told.broken.append(f"the daemon raised {type(exc).__name__}: {exc}")

        self.agenda.after(span, guarded)

    def request(self, decide: Decide, points: Points) -> None:
        """Commit at once what a user, or the survey of the store, waits for."""
        at_once(self.process.commits.commit(decide, points))
        self.process.wake_event.notify()

    def before_commit(self, plan: Plan) -> None:
        """The plan is about to be made durable."""

    def commit(self, plan: Plan) -> None:
        """The plan is durable."""
        before = self.world
        said = {e.job for e in plan.events}
        for i, after in plan.jobs.items():
            if i in before.jobs and before.jobs[i].state is not after.state and i not in said:
                self.told.broken.append(f"{i} changed its state without an event")
        for i, after in plan.jobs.items():
            if i in before.jobs and after.moves.count > before.jobs[i].moves.count:
                left = AttemptId(job=i, number=after.moves.attempt)
                self.told.moves.append((self.true, left, plan.attempts[left].meter.rate, after.moves.rate))
        self.world = applied(before, plan)
        for identity, own in plan.attempts.items():
            # An attempt that is over comes back into a plan with its bill, long after its job was closed.
            is_new = own.state is AttemptState.STARTING and identity not in before.attempts
            if own.machine_key is not None and own.ref is not None and is_new:
                self.note_handover(before, own)
        self.orders.note(before, plan, self.world)
        self.own.note(before, plan, self.world)
        for identity, own in plan.attempts.items():
            former = self.attempts_ever.get(identity)
            if own.bill.believed is not None and (former is None or former.bill.believed != own.bill.believed):
                m = self.machine_of(own)
                self.told.bills.extend([] if m is None else [(self.true, own, m)])
            self.remember(self.truly(own))
            self.told.forgotten.pop(identity, None)
        for i, j in {**before.jobs, **plan.jobs}.items():
            if i not in self.world.jobs:
                self.done[i] = j
            else:
                self.done.pop(i, None)
        self.told.events.extend(e.kind for e in plan.events)
        self.told.rows.update((e.job, self.now.replace(minute=0, second=0, microsecond=0)) for e in plan.events)
        self.told.charges.extend(replace(c, end=c.end - self.off) for c in plan.charges)
        self.told.broken.extend(f"contained: {c.subject}: {c.error}" for c in plan.contained)
        if not plan.is_empty:
            self.told.broken.extend(one.sentence for one in broken_rules(self.world))
        for intent in plan.intents.values():
            if intent.kind is IntentKind.LAUNCH and intent.state is IntentState.OPEN and self.must_wait(intent):
                self.waits(job_of_key(intent.key))

    def note_handover(self, before: World, own: Attempt) -> None:
        cloud = self.clouds[own.provider]
        cloud.advance(self.true)
        former = next((i for i, item in before.attempts.items() if item.ref == own.ref), None)
        assert own.ref is not None
        old = cloud.machines[own.ref.instance_id]
        cloud.hand_over(own.ref, own.key)
        if own.members is not None:
            m = cloud.machines[own.ref.instance_id]
            m.round = m.granted = own.members.round
        self.told.handovers.append(
            Taken(at=self.true, former=former, next=own.id, disk_gb=old.task.disk_gb, is_clean=old.is_clean)
        )

    def must_wait(self, launch: Intent) -> bool:
        """Whether as many launches as are made at once are under way at its provider."""
        others = [
            other
            for other in self.world.intents.values()
            if other.kind is IntentKind.LAUNCH
            and other.state in {IntentState.OPEN, IntentState.SENT}
            and other.provider == launch.provider
            and other.id != launch.id
        ]
        return self.launches_at_once is not None and len(others) >= self.launches_at_once

    def remember(self, attempt: Attempt) -> None:
        """For the oracles."""
        self.attempts_ever[attempt.id] = attempt
        self.attempts_of.setdefault(attempt.id.job, {})[attempt.id] = attempt

    # --- what it reads ---

    def poll_all(self) -> None:
        for name in sorted(self.clouds.keys() - self.absent):
            self.poll(name)
        self.soon(self.pace * self.rng.uniform(0.8, 1.2), self.poll_all)

    def poll(self, name: ProviderName) -> None:
        """Prices and machines as of now, arriving a little later."""
        cloud = self.clouds[name]
        cloud.advance(self.true)
        begun = self.now
        try:
            rows = cloud.rows()
            offers, true_offers = self.translated(rows), cloud.unleapt
            listing = self.understood(cloud.listing())
            if self.off:
                listing = replace(listing, at=begun)
            if cloud.spoil is not None:
                offers = cloud.spoil.checked_offers(offers, name, begun)
                listing = cloud.spoil.checked_listing(listing, name, begun)
        except CloudDown:
            self.soon(timedelta(seconds=5), lambda: self.unheard(name, begun))
            return
        self.soon(
            timedelta(seconds=self.rng.uniform(0.1, 4)), lambda: self.heard(name, offers, listing, begun, true_offers)
        )

    def unheard(self, name: ProviderName, begun: datetime) -> None:
        self.polling.discard(name)
        self.process.offer_cache.offers_failed(name, "does not answer", at=begun)
        self.process.offer_cache.machines_failed(name, "does not answer", at=begun)

    def heard(
        self,
        name: ProviderName,
        offers: tuple[Offer, ...],
        listing: Listing,
        begun: datetime,
        unleapt: tuple[Offer, ...] | None = None,
    ) -> None:
        self.polling.discard(name)
        cache = self.process.offer_cache
        known = cache.page(name)
        if known is None or known.at < begun:
            page, changes_bids = OfferPage(offers=offers, at=begun), self.clouds[name].trade.states_floor
            self.orders.note_page(name, offers, unleapt)
            self.own.note_page(name, offers)
            no_gangs = "" if self.clouds[name].trade.gangs else NO_GANGS
            cache.offers_seen(name, page, asked_at=begun, changes_bids=changes_bids, no_gangs=no_gangs)
            cache.machines_listed(name, listing)

    def translated(self, rows: list[Row]) -> tuple[Offer, ...]:
        """What an adapter does: a price that is no price is no offer."""
        offers = []
        for row in rows:
            if row.price == row.offer.gpu_price and type(row.price) is int:
                offers.append(row.offer)
                continue
            try:
                price = micro_usd(row.price)  # type: ignore[arg-type]  # whatever came over the wire
            except ValueError:
                continue
            offers.append(replace(row.offer, gpu_price=MicroUsdPerHour(price)))
        return tuple(offers)

    def understood(self, listing: Listing) -> Listing:
        return listing

    def machine_of(self, attempt: Attempt) -> Machine | None:
        found = self.clouds[attempt.provider].by_key.get(attempt.key)
        return found[0] if found else None

    def readable(self, attempt: Attempt) -> bool:
        """Whether what the attempt's host writes is looked at."""
        return attempt.state.counts

    def acceptable(self, save: Save) -> bool:
        """What verifying a manifest and its chunks tells."""
        return save.sound

    def look(self) -> dict[AttemptId, HostStatus]:
        """What the hosts wrote; nothing while the store cannot be read."""
        self.cycles += 1
        for cloud in self.clouds.values():
            cloud.advance(self.true)
        self.blind = not self.can_read or any(self.rng.random() < c.faults.store_down for c in self.clouds.values())
        if self.blind:
            return {}
        attempts = self.world.attempts.values()
        read = {item.id: self.report(item) for item in attempts if self.readable(item)}
        others = (item for item in attempts if item.id not in read and item.machine is not MachineState.GONE)
        return {item.id: self.count(item) for item in others} | read

    def count(self, item: Attempt) -> HostStatus:
        """What is known of a host when all that it wrote is counted and nothing of it is read."""
        m = self.machine_of(item)
        stored = 0 if m is None else m.task.bytes * len(m.saved)
        return HostStatus(attempt=item.id, read_at=self.now, liveness_check=True, stored_bytes=stored)

    def report(self, item: Attempt) -> HostStatus:
        m = self.machine_of(item)
        if m is None:
            return HostStatus(attempt=item.id, read_at=self.now)
        fresh: tuple[Checkpoint, ...] = ()
        if m.saved:
            known = newest_known(item.id, self.world.jobs.get(item.id.job) or self.done[item.id.job])
            fresh = tuple(
                _checkpoint(save, item, m.task.bytes) for save in m.saved_beyond(known) if self.acceptable(save)
            )
        behind = self.clock_behind(item, m)
        phase = "" if m.seq < 0 else phase_of(m, self.true)
        if m.ran_from is not None:
            m.said = None
        first_at, words = self.words_of(item, m)
        odd = self.hostile(m) if self.hostile is not None else {}
        if "step" in odd:
            fresh = tuple(replace(one, step=odd["step"]) for one in fresh)
        return HostStatus(
            attempt=item.id,
            read_at=self.now,
            store_takes_no_writes=self.writes_fail(),
            notice_at=odd.get("notice_at"),
            stored_bytes=m.task.bytes * len(m.saved),
            restored_bytes=odd.get("restored_bytes", 0),
            seq=m.seq,
            phase=phase,
            gang=gang_of(m, phase),
            first_at=first_at,
            words=words,
            marker_at=words[0][3] if words else None,
            resumed_from=_name_of(m.task.resume_at) if m.task.resume_at and m.seq >= 0 else None,
            alive_at=None if m.alive_at is None else later(min(m.alive_at, self.now), behind, self.now),
            exit_at=None if m.exit_at is None else later(m.exit_at, behind, self.now),
            script_began_at=None if m.ran_from is None else later(m.ran_from, behind, self.now),
            began_there_s=None if m.ran_from is None else int(m.ran_from.timestamp()),
            checkpoints=fresh,
            sample=self.sample(item, m),
            exit_reason=None if m.outcome is None else exit_reason(m.outcome, exit_code_of(m)),
            exit_phase="" if m.outcome is None else "canary" if m.outcome is Outcome.UNFIT else "run",
            exit_answers_stop=m.outcome in ANSWERS_STOP,
            exit_code=exit_code_of(m),
            waits=m.waits and m.outcome is not None,
            outputs_sha256=outputs_of(m) if has_succeeded(m) and m.task.outputs else None,
            outputs_bytes=m.task.outputs if has_succeeded(m) else 0,
        )

    def words_of(
        self, item: Attempt, m: Machine
    ) -> tuple[datetime | None, tuple[tuple[int, int, datetime, datetime], ...]]:
        """When its first machine spoke last, as this process has read it, and who says to wait without it."""
        seq, first_at = self.process.first_read.get(item.id, (-1, None))
        if m.seq > seq or first_at is None:
            first_at = self.now if m.seq >= 0 else None
            self.process.first_read[item.id] = m.seq, first_at
        if m.worded_at is None:
            return first_at, ()
        known = self.process.words_read.get(item.id)
        if known is None:
            self.process.words_read[item.id] = m.worded_at, None, None
            return first_at, ()
        mark, since, newest = known
        if m.worded_at > mark:
            since, newest = since or self.now, self.now
            self.process.words_read[item.id] = m.worded_at, since, newest
        if since is None or newest is None:
            return first_at, ()
        part = {rank for rank in range(m.offer.nodes + len(m.dropped)) if rank not in m.dropped}
        return first_at, tuple((m.round, rank, since, newest) for rank in sorted(part - m.gone))

    def sample(self, item: Attempt, m: Machine) -> HostSample | None:
        """What the host of a watched job states: it gets on by its output, or by a checkpoint, until it hangs."""
        owner = self.world.jobs.get(item.id.job)
        if owner is None or not owner.spec.watchdog.is_on or m.alive_at is None:
            return None
        work, up = self.work[item.id.job], m.alive_at - m.since
        got_on = m.seq if m.hung_at is None else min(m.seq, m.hung_seq)
        idle = timedelta(0) if m.hung_at is None else max(timedelta(0), m.alive_at - max(m.hung_at, m.since))
        prints_on = work.hangs is not None and work.hangs.prints_on
        return HostSample(
            boot=len(m.spans),
            up=up,
            phase="run",
            printed=0 if work.saves_always else m.seq if prints_on else got_on,
            writes=got_on if work.saves_always else 0,
            gpu_time=up if owner.spec.watchdog.min_gpu_util else None,
            gpu_busy=(up - idle) * GPU_USED if owner.spec.watchdog.min_gpu_util else None,
        )

    def clock_behind(self, item: Attempt, m: Machine) -> timedelta:
        """By how much the host's clock, which is right, is behind at least by the dates of this process.

        What arrives after a silence is written when it is over.
        """
        known = self.process.clocks_behind
        if m.alive_at is not None and m.seq > item.heartbeat_seq:
            written = max([m.alive_at, *(over for _, over in m.quiet_spans[-1:])])
            known[item.id] = clock_behind(written, item.read_at)
        return known.get(item.id, timedelta(0))

    def writes_fail(self) -> bool:
        """Whether the store took no writes when it was tried last, or has taken them for too short a time."""
        if not self.can_write:
            self.unwritable_at = self.true
        since = self.unwritable_at
        return since is not None and self.true - since < self.world.policy.silence_max

    def without_known(self, report: HostStatus, job: Job) -> HostStatus:
        """Only what an attempt published after its newest accepted checkpoint is news."""
        known = newest_known(report.attempt, job)
        return replace(report, checkpoints=tuple(c for c in report.checkpoints if _work_in(c) > known))

    # --- what it does ---

    def end(self, ref: InstanceRef) -> None:
        """The order takes effect."""
        cloud = self.clouds[ref.provider]
        cloud.advance(self.true)
        m = cloud.machines.get(ref.instance_id)
        if m is not None and owner_of(m.key) != self.owner:
            self.told.not_ours.append(m.key)
        cloud.terminate(ref)

    @property
    def owner(self) -> str:
        """How the keys of this install begin."""
        policy = self.world.policy
        return f"spotd-{policy.install}.{policy.identity}" if policy.identity else f"spotd-{policy.install}"

    def note_readings(self) -> None:
        """For the oracles: from when on the daemon had to know what these lists show."""
        for name, listing in {} if self.blind else self.process.listings.items():
            read, at = self.read[name], listing.at - self.off
            if (not read or read[-1][0] < at) and listing.complete and at not in self.clouds[name].lies:
                read.append((at, self.true))

    def write_grants(self, world: World) -> None:
        """Hosts of attempts that count may go on, or are told to stop; those given up unseen must stop."""
        if self.blind or not self.can_write:
            return
        for item in world.attempts.values():
            given_up = item.end_reason is EndReason.LAUNCH_UNKNOWN
            m = self.machine_of(item) if item.state.counts or given_up else None
            if m is not None and m.awaits and m.next_task is None and item.awaits_handover and item.stop is None:
                self.announce(item, m)
            if m is None or m.silent_until is not None:
                continue
            if given_up:
                m.leased_until = min(m.leased_until, self.true + GRANT_READ_EVERY)
                continue
            if item.stop is None and not self.is_newest(item.id):
                continue
            if item.state is AttemptState.INTENDED and item.heartbeat_seen_at is None:
                continue
            m.leased_until = self.true + self.world.policy.lease + GRANT_READ_EVERY
            m.stop_ordered = m.stop_ordered or item.state is AttemptState.STOPPING
            if item.members is not None:
                m.seats = item.members.since
            is_held = item.bidding.held_since is not None
            if (item.is_kept or is_held) and item.members is not None and item.members.round > m.granted:
                m.granted, m.offered = item.members.round, self.first_grant(self.world.jobs[item.id.job]).resume_at
                note_round(m, item)
            m.saves_no_more = m.saves_no_more or (item.stop is not None and not item.stop.flush)

    def announce(self, item: Attempt, m: Machine) -> None:
        """What the shipped writer of grants does for an attempt that took over a machine."""
        job = self.world.jobs[item.id.job]
        if self.work[job.id].no_secrets or item.ref is None:
            return
        self.process.crash(CrashPoint.BEFORE_PUT_NEXT)
        if self.records is not None:
            try:
                self.use_number(item)
            except NumberUsed:
                if not self.is_newest(item.id):
                    return
                require_same(self.records.store, item)
            former = key_parts(self.world.policy.install, item.former_key or item.key)
            assert former is not None
            try:
                name_next(self.records.store, AttemptId(job=former.job, number=former.number), item, "folder://grant")
            except NumberUsed:
                return
        m.next_task, m.given_at = replace(self.first_grant(job), disk_gb=m.task.disk_gb), self.true
        self.process.crash(CrashPoint.AFTER_PUT_NEXT)

    def is_newest(self, attempt: AttemptId) -> bool:
        """Whether the store shows no later attempt of its job."""
        if self.records is not None and attempt not in self.newest:
            try:
                require_newest(self.records.store, attempt)
            except StoreError:
                return False
            self.newest.add(attempt)
        return True

    def list_again(self, name: ProviderName) -> None:
        if name not in self.polling and name not in self.absent:
            self.polling.add(name)
            self.soon(LISTED_AGAIN_AFTER, lambda: self.poll(name))

    def use_number(self, item: Attempt) -> None:
        if self.records is not None:
            use_number(self.records.store, item)
            self.newest.add(item.id)

    def first_grant(self, owner: Job) -> Task:
        """What the grant of the next attempt says, noted for the oracles."""
        task = self.task(owner)
        if owner.chain is not None:
            self.told.inputs.append((self.true, owner))
        late = bool(self.told.restored)
        if any(c.doubted_by for c in owner.checkpoints):
            self.told.doubted.add(owner.id)
        elif not (late and owner.id in self.told.doubted):  # else an older one may be right
            best, most = self.best_saved(owner.id), self.best_saved(owner.id, however_late=late)
            self.told.resumes.append((owner.id, task.resume_at, best, most))
        return task

    def task(self, owner: Job) -> Task:
        """What the grant of the next attempt says."""
        start = _work_in(offered(owner)[0]) if owner.checkpoints else timedelta(0)
        work = self.work[owner.id]
        policy = self.world.policy
        rules = next(iter(policy.providers.values()))
        task = Task(
            reuse=None if words_against_reuse(policy, rules, owner.spec) else policy.reuse_wait,
            resume_at=start,
            need=work.need,
            bytes=work.bytes,
            disk_gb=disk_gb_for(owner),
            inputs=owner.input_bytes,
            outputs=work.outputs,
            keeps=None if not owner.spec.replace_within else owner.spec.replace_within + SHRINKS_WITHIN + KEPT_BEYOND,
        )
        if work.hangs is not None and owner.stalls < work.hangs.machines and work.need - start > HANGS_AFTER:
            task = replace(task, hangs_at=start + HANGS_AFTER)
        if work.never is not None:
            return replace(task, need=start, cause=work.never, exit_code=1, hangs_at=None)
        if owner.errors < work.errors:
            return replace(task, need=start + timedelta(minutes=7), exit_code=1)
        return task

    # --- what its user asks ---

    @property
    def open(self) -> bool:
        """Whether a request succeeds: else the user is told so, and nothing happens."""
        is_asleep = self.asleep_until is not None and self.true < self.asleep_until
        return self.up and self.full_since is None and not is_asleep

    def submit(self, job: Job) -> None:
        self.request(lambda world, now: requests.submit(world, job, now), SUBMIT)

    def cancel(self, job: JobId) -> None:
        if job in self.world.jobs and not self.world.jobs[job].state.is_final:
            self.told.cancels[job] = self.true
            self.request(lambda world, now: requests.cancel(world, job, now), CANCEL)

    def retry(self, job: JobId) -> None:
        held = self.done.get(job) or self.world.jobs[job]
        if held.state.is_final and held.state is not JobState.SUCCEEDED:
            try:
                survey = None if self.records is None else self.asked_about(self.records, held)
            except StoreUnavailable:
                return  # its user is told so
            self.told.cancels.pop(job, None)
            self.told.retries[job].append(self.true)
            self.request(lambda world, now: recovery.retry(world, held, survey, now), RETRY)

    def asked_about(self, records: Records, job: Job) -> Survey | None:
        return surveyed_one(self, records, job)

    def forget(self, found: AttemptId | Intent) -> None:
        """Its owner gives a machine up, if that is not refused."""
        cache = self.process.offer_cache
        errors = {name: cache.machines(name).error for name in self.clouds if name not in self.absent}
        item = found if isinstance(found, Intent) else self.world.attempts[found]
        counts = isinstance(item, Attempt) and item.state.counts
        if host_reports.refusal(self.world, found, cache.listings(), errors) or (counts and not self.can_read):
            return  # its user is told so
        self.told.given_up[item.key] = self.true
        self.request(lambda world, now: host_reports.forget(world, found, now, self.last_report(item)), CANCEL)

    def last_report(self, item: Attempt | Intent) -> HostStatus | None:
        """All that the host of a machine wrote until now."""
        self.clouds[item.provider].advance(self.true)
        return self.report(item) if isinstance(item, Attempt) and item.state.counts else None

    # --- for the oracles ---

    def best_saved(self, job_id: JobId, *, however_late: bool = False) -> timedelta:
        """The most work any machine of the job published, complete, while its attempt counted, or at any time.

        A restored state cannot know when an attempt that it never heard of ended.
        """
        best = timedelta(0)
        for item in self.attempts_of.get(job_id, {}).values():
            m = self.machine_of(item)
            if m is not None:
                ended = item.ended_at
                best = max(
                    [best, *(s.work for s in m.saved if s.sound and (however_late or ended is None or s.at <= ended))]
                )
        return timedelta(seconds=int(best.total_seconds()))

    def spent(self) -> MicroUsd:
        jobs = {**self.world.jobs, **self.done}
        return MicroUsd(
            sum(j.spent for j in jobs.values()) + sum(a.meter.settled for a in self.world.attempts.values())
        )


def phase_of(m: Machine, now: datetime) -> str:
    """What the runner says that it does."""
    if m.kept_at is not None or (m.said is not None and m.ran_from is None):
        return "save"
    if m.works_from is None or m.works_from <= now:
        return "run"
    return "canary" if m.measured and not m.went_on else "boot"


def gang_of(m: Machine, phase: str) -> tuple[int, tuple[int, ...]] | None:
    """What it says of the others, from when all of them have met."""
    if (m.offer.nodes == 1 and not m.dropped) or phase not in {"run", "save"}:
        return None
    return m.round, m.said or tuple(sorted(m.lost if m.kept_at else ()))


def exit_code_of(m: Machine) -> int | None:
    return m.task.exit_code if m.outcome is m.task.cause is Outcome.SUCCEEDED else None


def has_succeeded(m: Machine) -> bool:
    return m.outcome is m.task.cause is Outcome.SUCCEEDED and not m.task.exit_code


def outputs_of(m: Machine) -> str:
    """The hash of what it left."""
    return f"outputs of {m.key}"


def newest_known(attempt: AttemptId, job: Job) -> timedelta:
    """How much work the newest accepted checkpoint of an attempt holds."""
    for one in job.checkpoints:
        if one.attempt == attempt.number:
            return _work_in(one)
    return timedelta(-1)


def job_of_key(key: AttemptKey) -> JobId:
    return JobId(key.split("-")[-2])


def _name(save: Save) -> str:
    return _name_of(save.work)


def _name_of(work: timedelta) -> str:
    return f"w{int(work.total_seconds())}"


def _work_in(checkpoint: Checkpoint) -> timedelta:
    return timedelta(seconds=int(checkpoint.name[1:]))


def _checkpoint(save: Save, item: Attempt, size: int) -> Checkpoint:
    return Checkpoint(
        name=_name(save),
        attempt=item.id.number,
        step=int(save.work.total_seconds()),
        bytes=size,
        at=save.at,
        manifest_key=f"k{_name(save)}",
        sha256="0" * 64,
    )
