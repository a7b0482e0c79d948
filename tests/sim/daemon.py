"""The daemon of the simulator: the real core, a dictionary for a database, and a shell that can die anywhere.

What the process knows dies with it; what it committed stays; what it sent is under way and takes effect without it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from random import Random
from typing import Any

from spotd.core import forget, outcomes, recovery, requests, timeline
from spotd.core.applied import applied, combine
from spotd.core.attempts import Attempt
from spotd.core.charges import Charge
from spotd.core.checkpoints import Checkpoint
from spotd.core.cooldowns import COOLDOWNS_REMEMBERED
from spotd.core.decide import decide
from spotd.core.disk import disk_gb_for
from spotd.core.host_status import ExitCause, HostStatus
from spotd.core.ids import AttemptId, IntentId, JobId
from spotd.core.intents import Intent, IntentKind, IntentState, launch_intent_id
from spotd.core.invariants import check
from spotd.core.jobs import Job
from spotd.core.launch_calls import launch_sent
from spotd.core.market import MarketSnapshot, ProviderOffers, build_offer_index
from spotd.core.outcomes import LaunchFailure
from spotd.core.plan import Plan
from spotd.core.reconcile import reconcile
from spotd.core.recovery import Survey
from spotd.core.retention import offered
from spotd.core.states import AttemptState, EndReason, JobState
from spotd.core.timeline import Anchor, dated, wants_new_date
from spotd.core.world import World
from spotd.daemon.market import plugin_values
from spotd.daemon.recovery_survey import NOT_DONE, use_number
from spotd_jobs.objects.api import StoreError, StoreUnavailable
from spotd_providers.contract.money import MicroUsd, MicroUsdPerHour, micro_usd
from spotd_providers.contract.values import AttemptKey, Instance, Listing, Offer, ProviderName
from tests.sim.agenda import Agenda
from tests.sim.cloud import Cloud, owner_of
from tests.sim.machines import AccountDead, CloudDown, LostAnswer, Machine, Refused, Row, Save, Task
from tests.sim.records import Records, surveyed, surveyed_one

EPOCH = datetime(2026, 1, 5, 12, tzinfo=UTC)
CALL_TIMEOUT = timedelta(seconds=90)
CALLS_AT_ONCE = 2
GRANT_READ_EVERY = timedelta(seconds=30)
COMMIT_AGAIN = timedelta(seconds=15)
END_UNSAVED_EVERY = timedelta(minutes=1)
ASLEEP_LOOKED_AT = timedelta(minutes=1)
CLOCK_COMPARED_EVERY = timedelta(seconds=30)
SURVEY_AGAIN = timedelta(seconds=10)
BOOT_ID = "one uptime"
DOWN, KEY_REFUSED = "down", "the key is refused"
"""What a provider says that refuses every job."""


class Died(Exception):
    """The process was killed at a named point."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """What a job really does: how long it takes, and how often its own code fails first.

    Attributes:
        bytes: of each of its checkpoints.
        never: it fails so wherever it is started, without end.
        no_secrets: what it needs to be prepared is lost.
    """

    need: timedelta
    errors: int = 0
    bytes: int = 1000
    never: ExitCause | None = None
    no_secrets: bool = False


@dataclass(kw_only=True)
class Told:
    """What the daemon has said and done, for the oracles."""

    events: list[str] = field(default_factory=list)
    charges: list[Charge] = field(default_factory=list)
    resumes: list[tuple[JobId, timedelta, timedelta, timedelta]] = field(default_factory=list)
    """Of which job, from where, and from where at least and at most it had to be."""
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
    lost_jobs: frozenset[JobId] = frozenset()
    """Jobs that a restored state has never heard of."""
    given_up: dict[AttemptKey, datetime] = field(default_factory=dict)
    """Machines that their owner gave up without having seen their end."""


class Daemon:
    """Everything durable is in `world`, `done` and `told`; everything else is of this life of the process."""

    def __init__(
        self, world: World, clouds: list[Cloud], work: dict[JobId, Work], rng: Random, agenda: Agenda, pace: timedelta
    ) -> None:
        self.world = world
        self.clouds = {c.name: c for c in clouds}
        self.work = work
        self.rng = rng
        self.agenda = agenda
        self.pace = pace
        self.done: dict[JobId, Job] = {}
        self.attempts_ever: dict[AttemptId, Attempt] = {}
        self.attempts_of: dict[JobId, dict[AttemptId, Attempt]] = {}
        self.told = Told()
        self.records: Records | None = None
        """Where launches are recorded, in a world in which the state may be lost."""
        self.surveyed = True
        self.crash: Callable[[str], None] = lambda _point: None
        self.died: Callable[[], None] = lambda: None
        self.can_read = True
        """Whether the daemon can read the store."""
        self.can_write = True
        self.unwritable_at: datetime | None = None
        self.hostile: Callable[[Machine], dict[str, Any]] | None = None
        """What a host states that cannot be, if hosts are hostile."""
        self.calls_at_once = CALLS_AT_ONCE
        self.waits: Callable[[JobId], None] = lambda _job: None
        """After the launch of a job began to wait for its turn."""
        self.asleep_until: datetime | None = None
        """The computer sleeps: nothing of the process runs, and nothing of it is lost."""
        self.full_since: datetime | None = None
        """Since when the disk of the state is full: no commit succeeds."""
        self.unsaved: World | None = None
        self.unsaved_from: World | None = None
        self.unsaved_ends: dict[IntentId, datetime] = {}
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

    # --- the wall clock ---

    def set_clock(self, off: timedelta) -> None:
        """The wall clock is set; the daemon, if it runs, notices it and begins anew in the same process."""
        self.wall_off = off
        self.agenda.after(CLOCK_COMPARED_EVERY, self.compare_clocks)

    def compare_clocks(self) -> None:
        if self.full_since is not None or (self.asleep_until is not None and self.true < self.asleep_until):
            self.agenda.after(CLOCK_COMPARED_EVERY, self.compare_clocks)
        elif self.up and self.anchor is not None and wants_new_date(self.anchor, self.now, self.true + self.wall_off):
            self.life += 1
            self.boot()

    def begin_timeline(self) -> None:
        """What `spotd.daemon.timeline` does at each start, without its files."""
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
        return timeline._shifted(value, lambda at: at - off)

    # --- the process ---

    def boot(self) -> None:
        """A new process: boards are empty, nothing is under way, open launches are unknown."""
        self.life += 1
        self.up = True
        self.unsaved = self.unsaved_from = None
        self.unsaved_ends = {}
        self.begin_timeline()
        self.offer_cache = {name: ProviderOffers(provider=name) for name in self.clouds}
        self.listings: dict[ProviderName, Listing] = {}
        self.asked: set[IntentId] = set()
        self.ending: set[IntentId] = set()
        self.calls: Counter[ProviderName] = Counter()
        self.waiting: dict[ProviderName, list[Callable[[], None]]] = {name: [] for name in self.clouds}
        self.polling: set[ProviderName] = set()
        self.ring_at: datetime | None = None
        self.forget_cooldowns()
        self.commit(self.adopted())
        if self.records is not None:
            self.asked.update(i for i, t in self.world.intents.items() if t.kind is IntentKind.LAUNCH)
            self.hold_until_surveyed(surveyed=False)
            self.soon(timedelta(seconds=self.rng.uniform(0.5, 8)), self.survey)
        self.poll_all()
        self.notify()

    def adopted(self) -> Plan:
        return outcomes.after_restart(self.world, self.now, asks_store=self.records is not None)

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
        self.commit(plan)
        self.hold_until_surveyed(surveyed=True)
        self.notify()

    def asked_store(self, records: Records) -> Plan:
        return surveyed(self, records)

    def hold_until_surveyed(self, *, surveyed: bool) -> None:
        """Nothing is bought and no machine is a stray while the state may be older than the store."""
        self.surveyed = surveyed
        why = "" if surveyed else NOT_DONE
        held = replace(self.world.policy, launches_paused=why, identity_sure=surveyed)
        self.world = replace(self.world, policy=held)

    def kill(self) -> None:
        """The process is gone; what it had sent goes on without it."""
        self.life += 1
        self.up = False
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
                self.notify(self.pace)

        self.agenda.after(span, guarded)

    def notify(self, span: timedelta = timedelta(seconds=2)) -> None:
        """A cycle follows within this time."""
        due = self.now + span
        if self.ring_at is None or due < self.ring_at or self.ring_at < self.now:
            self.ring_at = due
            self.soon(span, lambda: self.cycle() if self.ring_at == due else None)

    def durably(self, plan: Callable[[], Plan], after: Callable[[], None]) -> None:
        """An outcome exists only here, so a state that cannot be written is waited for."""
        if self.full_since is not None:
            self.soon(COMMIT_AGAIN, lambda: self.durably(plan, after))
            return
        self.commit(plan())
        after()

    def commit(self, plan: Plan) -> None:
        if self.full_since is not None:
            raise RuntimeError("a commit on a full disk")
        before = self.world
        said = {e.job for e in plan.events}
        for i, after in plan.jobs.items():
            if i in before.jobs and before.jobs[i].state is not after.state and i not in said:
                self.told.broken.append(f"{i} changed its state without an event")
        self.world = applied(before, plan)
        for identity, own in plan.attempts.items():
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
            self.told.broken.extend(check(self.world))

    def remember(self, attempt: Attempt) -> None:
        """For the oracles."""
        self.attempts_ever[attempt.id] = attempt
        self.attempts_of.setdefault(attempt.id.job, {})[attempt.id] = attempt

    # --- what it reads ---

    def poll_all(self) -> None:
        for name in sorted(self.clouds):
            self.poll(name)
        self.soon(self.pace * self.rng.uniform(0.8, 1.2), self.poll_all)

    def poll(self, name: ProviderName) -> None:
        """Prices and machines as of now, arriving a little later."""
        cloud = self.clouds[name]
        cloud.advance(self.true)
        begun = self.now
        try:
            offers = self.translated(cloud.rows())
            listing = self.understood(cloud.listing())
            if self.off:
                listing = replace(listing, at=begun)
            if cloud.spoil is not None:
                listing = plugin_values.listing(listing, name, now=begun)
        except CloudDown:
            self.soon(timedelta(seconds=5), lambda: self.heard(name, None, None))
            return
        provider_offers = ProviderOffers(provider=name, offer_index=build_offer_index(offers), at=begun)
        self.soon(timedelta(seconds=self.rng.uniform(0.1, 4)), lambda: self.heard(name, provider_offers, listing))

    def heard(self, name: ProviderName, provider_offers: ProviderOffers | None, listing: Listing | None) -> None:
        self.polling.discard(name)
        known = self.offer_cache[name]
        if provider_offers is None or listing is None:
            self.offer_cache[name] = replace(known, error="does not answer")
            self.listings.pop(name, None)
        elif known.at is None or provider_offers.at is None or known.at < provider_offers.at:
            self.offer_cache[name], self.listings[name] = provider_offers, listing
        self.notify(timedelta(seconds=5))

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
        reports = {}
        for item in self.world.attempts.values():
            if self.readable(item):
                reports[item.id] = self.report(item)
        return reports

    def report(self, item: Attempt) -> HostStatus:
        m = self.machine_of(item)
        if m is None:
            return HostStatus(attempt=item.id, read_at=self.now)
        fresh: tuple[Checkpoint, ...] = ()
        if m.saved:
            known = self.newest_known(item)
            fresh = tuple(
                _checkpoint(save, item, m.task.bytes)
                for save in m.saved
                if save.work > known and save.at <= self.true and self.acceptable(save)
            )
        odd = self.hostile(m) if self.hostile is not None else {}
        if "step" in odd:
            fresh = tuple(replace(one, step=odd["step"]) for one in fresh)
        return HostStatus(
            attempt=item.id,
            read_at=self.now,
            store_takes_no_writes=self.writes_fail(),
            notice_at=odd.get("notice_at"),
            stored_bytes=m.task.bytes * sum(save.at <= self.true for save in m.saved),
            restored_bytes=odd.get("restored_bytes", 0),
            seq=m.seq,
            phase="run" if m.seq >= 0 else "",
            resumed_from=_name_of(m.task.resume_at) if m.task.resume_at and m.seq >= 0 else None,
            alive_at=None if m.alive_at is None else min(m.alive_at, self.now),
            exit_at=m.exit_at,
            checkpoints=fresh,
            exit_cause=m.exit_cause,
            exit_code=m.task.exit_code if m.exit_cause is m.task.cause is ExitCause.FINISHED else None,
        )

    def writes_fail(self) -> bool:
        """Whether the store took no writes when it was tried last, or has taken them for too short a time."""
        if not self.can_write:
            self.unwritable_at = self.true
        since = self.unwritable_at
        return since is not None and self.true - since < self.world.policy.silence_max

    def newest_known(self, item: Attempt) -> timedelta:
        """Only what an attempt published after its newest accepted checkpoint is news."""
        owner = self.world.jobs.get(item.id.job) or self.done[item.id.job]
        for one in owner.checkpoints:
            if one.attempt == item.id.number:
                return _work_in(one)
        return timedelta(-1)

    # --- what it does ---

    def cycle(self) -> None:
        """One brain cycle; paid calls follow the commit that owes them."""
        self.ring_at = None
        self.cycles += 1
        now = self.now
        for cloud in self.clouds.values():
            cloud.advance(self.true)
        self.forget_cooldowns()
        blind = not self.can_read or any(self.rng.random() < c.faults.store_down for c in self.clouds.values())
        reports = None if blind else self.look()
        if self.full_since is not None:
            self.act_unsaved(reports or {}, blind=blind)
            self.notify(COMMIT_AGAIN)
            return
        self.unsaved = self.unsaved_from = None
        try:
            plan = self.thought(reports or {})
        except Exception as exc:  # noqa: BLE001  # that nothing raises out of a cycle is what is tested
            self.told.broken.append(f"a cycle raised {type(exc).__name__}: {exc}")
            self.notify(self.pace)
            return
        self.settle(plan)
        if not blind:
            self.note_readings()
        if self.can_write and not blind:
            self.write_grants()
        for name in sorted(plan.list_again):
            self.list_again(name)
        # Without a machine only prices can change anything, and a new price rings.
        wake = self.pace * 2 if self.world.attempts else timedelta(hours=1)
        if plan.wake_at is not None and self.world.attempts:
            wake = min(wake, max(timedelta(seconds=1), plan.wake_at - now))
        due = [t.not_before for t in self.world.intents.values() if t.not_before is not None and t.not_before > now]
        self.notify(min([wake, *(at - now for at in due)]))

    def thought(self, reports: Mapping[AttemptId, HostStatus]) -> Plan:
        first = reconcile(self.world, self.listings, reports, self.now)
        second = decide(applied(self.world, first), MarketSnapshot(offer_cache=self.offer_cache), self.now)
        return combine(first, second)

    def act_unsaved(self, reports: Mapping[AttemptId, HostStatus], *, blind: bool) -> None:
        """Stop and end what the core would, without a row for it; launch nothing."""
        durable = self.world
        rows = (durable.jobs, durable.attempts, durable.intents)
        known = self.unsaved_from
        if self.unsaved is None or known is None or rows != (known.jobs, known.attempts, known.intents):
            self.unsaved = durable
        self.unsaved_from = durable
        held = replace(self.unsaved.policy, launches_paused="the state cannot be written")
        self.world, plan = replace(self.unsaved, policy=held), Plan()
        try:
            plan = self.thought(reports)
            self.unsaved = self.world = applied(self.world, plan)
            if self.can_write and not blind:
                self.write_grants()
            self.end_unsaved()
        except Exception as exc:  # noqa: BLE001  # that nothing raises out of a cycle is what is tested
            self.told.broken.append(f"a cycle on a full disk raised {type(exc).__name__}: {exc}")
        finally:
            self.world = durable
        for name in sorted(plan.list_again):
            self.list_again(name)

    def end_unsaved(self) -> None:
        for intent in self.world.intents.values():
            if intent.kind is not IntentKind.TERMINATE or intent.attempt is None or intent.ref is None:
                continue
            last = self.unsaved_ends.get(intent.id)
            waits = intent.not_before is not None and intent.not_before > self.now and intent.tries == 0
            if waits or (last is not None and self.now - last < END_UNSAVED_EVERY):
                continue
            self.unsaved_ends[intent.id] = self.now
            with suppress(CloudDown):
                self.end(intent)

    def end(self, intent: Intent) -> None:
        """The order takes effect."""
        cloud, ref = self.clouds[intent.provider], intent.ref
        assert ref is not None
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

    def settle(self, plan: Plan) -> None:
        """The plan is durable, and then what it owes is under way."""
        self.crash("before commit")
        self.commit(plan)
        self.crash("after commit")
        self.act()

    def note_readings(self) -> None:
        """For the oracles: from when on the daemon had to know what these lists show."""
        for name, listing in self.listings.items():
            read, at = self.read[name], listing.at - self.off
            if (not read or read[-1][0] < at) and listing.complete and at not in self.clouds[name].lies:
                read.append((at, self.true))

    def forget_cooldowns(self) -> None:
        known = {(c.provider, c.scope, c.subject): c for c in self.world.cooldowns}
        kept = tuple(c for c in known.values() if c.until > self.now - COOLDOWNS_REMEMBERED)
        if len(kept) != len(self.world.cooldowns):
            self.world = replace(self.world, cooldowns=kept)

    def write_grants(self) -> None:
        """Hosts of attempts that count may go on, or are told to stop; those given up unseen must stop."""
        for item in self.world.attempts.values():
            given_up = item.end_reason is EndReason.LAUNCH_UNKNOWN
            m = self.machine_of(item) if item.state.counts or given_up else None
            if m is None or m.silent_until is not None:
                continue
            if given_up:
                m.leased_until = min(m.leased_until, self.true + GRANT_READ_EVERY)
                continue
            m.leased_until = self.true + self.world.policy.lease + GRANT_READ_EVERY
            m.stop_ordered = m.stop_ordered or item.state is AttemptState.STOPPING
            m.saves_no_more = m.saves_no_more or (item.stop is not None and not item.stop.flush)

    def list_again(self, name: ProviderName) -> None:
        if name not in self.polling:
            self.polling.add(name)
            self.soon(timedelta(seconds=2), lambda: self.poll(name))

    def act(self) -> None:
        """Every intent that is open is being carried out, each launch once in this life."""
        for intent in sorted(self.world.intents.values(), key=lambda t: t.id):
            if intent.state is not IntentState.OPEN:
                continue
            if intent.kind is IntentKind.LAUNCH:
                item = None if intent.attempt is None else self.world.attempts.get(intent.attempt)
                if item is not None and intent.id not in self.asked:
                    self.asked.add(intent.id)
                    self.take_turn(item.provider, lambda item=item: self.launch(item), item.id.job)  # type: ignore[misc]  # mypy cannot infer a lambda with a default
            elif intent.id not in self.ending and (intent.not_before is None or intent.not_before <= self.now):
                self.ending.add(intent.id)
                self.terminate(intent)

    def take_turn(self, name: ProviderName, call: Callable[[], None], job: JobId | None = None) -> None:
        if self.calls[name] >= self.calls_at_once:
            self.waiting[name].append(call)
            if job is not None:
                self.waits(job)
            return
        self.calls[name] += 1
        call()

    def turn_over(self, name: ProviderName) -> None:
        self.calls[name] -= 1
        if self.waiting[name]:
            self.take_turn(name, self.waiting[name].pop(0))

    def launch(self, item: Attempt) -> None:
        """The call is on the wire: it takes effect at the provider whether or not this process lives."""
        try:
            self.use_number(item)
        except StoreError as exc:
            self.not_prepared(item, LaunchFailure.STORE_AWAY, str(exc))
            return
        self.durably(lambda: self.sending(item), lambda: self.call(item))

    def use_number(self, item: Attempt) -> None:
        if self.records is not None:
            use_number(self.records.store, item)

    def call(self, item: Attempt) -> None:
        self.told.sent[item.id] = self.true
        sent = self.world.intents.get(launch_intent_id(item.key))
        if sent is None or sent.state is not IntentState.SENT:
            del self.told.sent[item.id]
            self.turn_over(item.provider)
            return
        cloud = self.clouds[item.provider]
        lag = timedelta(seconds=self.rng.uniform(0.2, 3))
        if self.rng.random() < cloud.faults.slow_launch:
            lag = timedelta(seconds=self.rng.uniform(15, 95))
        owner = self.world.jobs[item.id.job]
        task = self.task(owner)
        if not any(c.doubted_by for c in owner.checkpoints):  # else an older one may be right
            late = bool(self.told.restored)
            best, most = self.best_saved(owner.id), self.best_saved(owner.id, however_late=late)
            self.told.resumes.append((owner.id, task.resume_at, best, most))
        self.crash("before launch")
        if self.work[owner.id].no_secrets:
            self.not_prepared(item, LaunchFailure.NOT_PREPARED, "a secret of the job is lost")
            return
        answer: list[Instance | Exception] = []
        lease = self.world.policy.lease

        def effect() -> None:
            if cloud.down:
                answer.append(CloudDown())
                return
            cloud.advance(self.true)
            try:
                answer.append(cloud.launch(item.key, item.quote.offer, item.price_max, task, lease))
            except (Refused, LostAnswer, AccountDead) as exc:
                answer.append(exc)

        def heard() -> None:
            self.turn_over(item.provider)
            self.crash("launch answered")
            self.durably(lambda: self.launch_outcome(item, answer[0] if answer else LostAnswer()), committed)

        def committed() -> None:
            self.crash("launch committed")
            self.notify()

        self.agenda.after(lag, effect)
        self.soon(min(CALL_TIMEOUT, lag * 1.5), heard)

    def sending(self, item: Attempt) -> Plan:
        return launch_sent(self.world, item.id, self.now)

    def not_prepared(self, item: Attempt, failure: LaunchFailure, why: str) -> None:
        """The grant cannot be written, so the provider is never asked."""

        def heard() -> None:
            self.turn_over(item.provider)
            self.durably(lambda: outcomes.launch_refused(self.world, item.id, failure, why, self.now), self.notify)

        self.soon(timedelta(seconds=1), heard)

    def launch_outcome(self, item: Attempt, answer: Instance | Exception) -> Plan:
        match answer:
            case Instance():
                return outcomes.launched(self.world, item.id, answer, self.now)
            case Refused(failure=failure):
                return outcomes.launch_refused(self.world, item.id, failure, failure.value, self.now)
            case AccountDead():
                return outcomes.launch_refused(self.world, item.id, LaunchFailure.AUTH, KEY_REFUSED, self.now)
            case CloudDown():
                return outcomes.launch_refused(self.world, item.id, LaunchFailure.UNAVAILABLE, DOWN, self.now)
            case _:
                return outcomes.launch_unknown(self.world, item.id, "time-out", self.now)

    def task(self, owner: Job) -> Task:
        """What the grant of the next attempt says."""
        start = _work_in(offered(owner)[0]) if owner.checkpoints else timedelta(0)
        work = self.work[owner.id]
        task = Task(resume_at=start, need=work.need, bytes=work.bytes, disk_gb=disk_gb_for(owner))
        if work.never is not None:
            return replace(task, need=start, cause=work.never, exit_code=1)
        if owner.errors < work.errors:
            return replace(task, need=start + timedelta(minutes=7), exit_code=1)
        return task

    def terminate(self, intent: Intent) -> None:
        if intent.ref is None:
            return
        self.crash("before terminate")
        failed: list[bool] = []

        def effect() -> None:
            try:
                self.end(intent)
            except CloudDown:
                failed.append(True)

        def heard() -> None:
            self.ending.discard(intent.id)
            self.crash("terminate answered")
            self.durably(lambda: self.end_outcome(intent.id, failed=bool(failed)), committed)

        def committed() -> None:
            self.crash("terminate committed")
            self.notify()

        self.agenda.after(timedelta(seconds=0.5), effect)
        self.soon(timedelta(seconds=1), heard)

    def end_outcome(self, intent: IntentId, *, failed: bool) -> Plan:
        if not failed:
            return outcomes.terminate_accepted(self.world, intent, self.now)
        wait = max(cloud.faults.end_retry_after for cloud in self.clouds.values())
        return outcomes.terminate_failed(self.world, intent, "down", self.now, wait or None)

    # --- what its user asks ---

    @property
    def open(self) -> bool:
        """Whether a request succeeds: else the user is told so, and nothing happens."""
        return self.up and self.full_since is None

    def submit(self, job: Job) -> None:
        self.commit(requests.submit(self.world, job, self.now))
        self.notify()

    def cancel(self, job: JobId) -> None:
        if job in self.world.jobs and not self.world.jobs[job].state.is_final:
            self.told.cancels[job] = self.true
            self.commit(requests.cancel(self.world, job, self.now))
            self.notify()

    def retry(self, job: JobId) -> None:
        held = self.done.get(job) or self.world.jobs[job]
        if held.state.is_final and held.state is not JobState.SUCCEEDED:
            try:
                survey = None if self.records is None else self.asked_about(self.records, held)
            except StoreUnavailable:
                return  # its user is told so
            self.told.cancels.pop(job, None)
            self.told.retries[job].append(self.true)
            self.commit(recovery.retry(self.world, held, survey, self.now))
            self.notify()

    def asked_about(self, records: Records, job: Job) -> Survey | None:
        return surveyed_one(self, records, job)

    def forget(self, found: AttemptId | Intent) -> None:
        """Its owner gives a machine up, if that is not refused."""
        errors = {
            name: provider_offers.error for name, provider_offers in self.offer_cache.items() if provider_offers.error
        }
        if not forget.refusal(self.world, found, self.listings, errors):
            item = found if isinstance(found, Intent) else self.world.attempts[found]
            self.told.given_up[item.key] = self.true
            self.commit(forget.forget(self.world, found, self.now))
            self.notify()

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
