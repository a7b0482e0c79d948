"""What happens in a simulated cloud by itself: machines train, fall silent, are taken back and bill.

Time passes only by `advance`, in steps of any length: what a machine did meanwhile is computed, not stepped through.
"""

from __future__ import annotations

from collections import defaultdict
from datetime import datetime, timedelta
from math import exp, sqrt
from random import Random
from zlib import crc32

from spotd.core.domain.copies import replace
from spotd_jobs.wire.reports import Outcome
from spotd_providers.contract.values import (
    AttemptKey,
    InstanceState,
    Interruption,
    Loss,
    Market,
    MicroUsd,
    MicroUsdPerHour,
    ProviderName,
)
from tests.sim.machines import (
    BOOT,
    CHECKPOINT_EVERY,
    FOR_EVER,
    FORGOTTEN_AFTER,
    GB,
    HEARTBEAT,
    HOUR,
    OWED_UNIT,
    Faults,
    Host,
    Machine,
    Row,
    Save,
    Task,
)

MICROSECOND = timedelta(microseconds=1)
NOTICE = timedelta(minutes=2)
SPIKE = 20
NEXT_TAKES = timedelta(seconds=15)
"""From the moment in which its next attempt can be known to the begin of that one's command."""
CLEARED = 0.85
"""How many of the jobs that are done leave nothing that cannot be removed."""
WAITS_BEYOND = timedelta(minutes=1)
BILLED_LEAST = timedelta(minutes=1)
"""Of a machine in a market as EC2's."""
WAITS_FOR_OTHERS = timedelta(minutes=20)
UNHEARD_FOR = timedelta(minutes=2)
"""From the end of all of them without a report until their provider shows it."""
AGAIN_TAKES = timedelta(seconds=30)
"""From the grant of the next round to the begin of the command of several machines."""
ENDING_TAKES = timedelta(seconds=30)
"""From the end of a runner that ends its machine to the end of the machine."""


class Nature:
    """The machines of one provider and the market in which they were bought."""

    def __init__(self, name: str, rng: Random, now: datetime, fee_ppm: int, *, ends_itself: bool) -> None:
        self.name = ProviderName(name)
        self.rng = rng
        self.now = now
        self.before = now
        """When time passed last."""
        self.faults = Faults()
        self.fee_ppm = fee_ppm
        self.ends_itself = ends_itself
        self.dear_until = now
        self.is_hourly = False
        """Whether prices change by the hour, and a minute is billed at least."""
        self.new_ones_hang = 0.0
        """How often a machine in the place of a lost one never gets as far as its command."""
        self.store_up = True
        """Whether hosts can write to the store."""
        self.hosts: list[Host] = []
        self.machines: dict[str, Machine] = {}
        self.by_key: defaultdict[AttemptKey, list[Machine]] = defaultdict(list)
        self.active: dict[str, Machine] = {}
        """Ours that are not gone."""
        self.fading: list[Machine] = []
        """Ours that are gone and still listed."""
        self.highest_price = 0
        self._rows: list[Row] | None = None
        self._moved_at = now - HOUR

    def advance(self, now: datetime) -> None:
        """Everything up to now has happened to the machines."""
        if now <= self.now:
            return
        hours = (now - self.now) / HOUR
        self.before, self.now = self.now, now
        faults = self.faults
        lost = 1 - exp(-faults.preempt_per_hour * hours)
        hushed = 1 - exp(-faults.silence_per_hour * hours)
        warned = 1 - exp(-faults.notice_per_hour * hours)
        overcharged = 1 - exp(-faults.overcharge_per_hour * hours)
        for m in list(self.active.values()):
            self._bill(m)
            if not m.alive:
                continue
            self._train(m)
            if m.waits_until is not None:
                self._wait(m, m.waits_until)
                if not m.alive:
                    continue
            if m.gives_up_at is not None and m.gives_up_at <= now and m.alive:
                self._halt(m, InstanceState.GONE, Loss.PROVISION_FAILED if m.is_half else Loss.HOST_LOST)
                continue
            if m.notice_at is not None and m.notice_at <= now:
                self._take_back(m)
            elif overcharged and self.rng.random() < overcharged:
                m.factor = 3
                self._note_rate(m)
            elif m.host.offer.market is Market.ON_DEMAND:
                continue
            elif lost and self.rng.random() < lost:
                self._take_back(m)
            elif warned and m.host.offer.interruption is Interruption.NOTICE and self.rng.random() < warned:
                m.notice_at = m.notice_at or now + NOTICE
            elif hushed and self.rng.random() < hushed:
                self.hush(m, timedelta(minutes=self.rng.choice([1, 10, 90])))

    def hush(self, m: Machine, span: timedelta) -> None:
        """Its network is gone for so long; it computes on until its lease is over."""
        m.silent_until = max(m.silent_until or self.now, self.now + span)
        m.was_silent = True

    def move_prices(self, span: timedelta) -> None:
        """The market after so long; whoever is outbid learns it by losing the machine."""
        if self.is_hourly and self.faults.market_moves and self.now - self._moved_at < HOUR:
            return
        self._rows, self._moved_at = None, self.now
        hours = span / HOUR
        stay, shake = exp(-1.5 * hours), 0.2 * sqrt(hours)
        spike = self.faults.spike_per_hour and self.rng.random() < self.faults.spike_per_hour * hours
        spike = spike or self.now < self.dear_until
        for host in self.hosts:
            if host.offer.market is Market.ON_DEMAND:
                host.price = host.base if self.faults.market_moves else host.base // 3
            elif self.faults.market_moves:
                jump = 2 if self.rng.random() < 0.01 else 1
                level = host.base + (host.level - host.base) * stay + self.rng.gauss(0, shake) * host.base
                host.level = max(20_000, int(level * jump))
                host.price = host.level * SPIKE if spike else host.level
            else:
                host.price = host.level = host.base // 3
            self.highest_price = max(self.highest_price, host.price)
        for m in list(self.active.values()):
            if m.alive and m.host.price * m.offer.nodes > m.bid and m.host.offer.market is Market.SPOT:
                self._take_back(m)
            elif m.state is InstanceState.PAUSED and m.bid >= m.host.price * m.offer.nodes and self.rng.random() < 0.5:
                self.wake(m)
            self._note_rate(m)

    def wake(self, m: Machine) -> None:
        """A machine that was outbid starts again."""
        self._bill(m)
        m.state, m.loss, m.since, m.ran_from = InstanceState.PENDING, None, self.now, None
        m.wake_whole()
        self._note_rate(m)

    def outbid(self, m: Machine) -> None:
        """Somebody bids more for it."""
        self._halt(m, InstanceState.PAUSED, Loss.OUTBID)

    def _take_back(self, m: Machine) -> None:
        if m.host.offer.pays_bid:
            self.outbid(m)
        else:
            self._halt(m, InstanceState.GONE, Loss.PREEMPTED)

    def _wait(self, m: Machine, until: datetime) -> None:
        """Its runner waits for another job, and becomes the runner of one that it was handed over to."""
        start = None if m.given_at is None else m.given_at + NEXT_TAKES
        if m.awaits and m.waits and m.state is InstanceState.RUNNING:
            if (m.silent_until is not None and m.silent_until > self.now) or not self.store_up:
                self._was_quiet(m)
                return
            if m.quiet_spans and start is not None:
                start = max(start, m.quiet_spans[-1][1] + NEXT_TAKES)
            if m.next_task is not None and start is not None and start - NEXT_TAKES <= until:
                if self.now >= start:
                    self._go_on(m, m.next_task, start)
                return
        if self.now >= until and m.waits:
            m.waits = False
            if self.ends_itself:
                self._end_itself(m, until)

    def _go_on(self, m: Machine, task: Task, start: datetime) -> None:
        m.task, m.awaits, m.waits, m.waits_until = task, False, False, None
        m.ran_from, m.ran_work = start, task.resume_at
        self._move_bytes(m, m.offer.download_price, (task.bytes if m.ran_work else 0) + task.inputs)

    def _wait_for_next(self, m: Machine, since: datetime) -> None:
        """The others say that they wait, until they have their next attempt: then this is another machine."""
        over = min(since + (m.task.keeps or timedelta(0)), m.leased_until)
        is_quiet = self._is_quiet(m)
        if self.now >= over or (m.stop_ordered and not is_quiet):
            self._end_unheard(m, min(over, self.now))
        elif not is_quiet:
            m.worded_at = self.now

    def _wait_for_first(self, m: Machine) -> None:
        """They read their next grant, and wait for another first one, or for the round that begins without one."""
        if m.state is not InstanceState.RUNNING or m.outcome is not None:
            return
        is_quiet = self._is_quiet(m)
        if not is_quiet and m.awaits and m.next_task is not None:
            m.task, m.awaits = m.next_task, False
        over = min((m.kept_at or self.now) + (m.task.keeps or timedelta(0)) + WAITS_FOR_OTHERS, m.leased_until)
        if self.now >= over:
            self._end_unheard(m, over)
        elif is_quiet or m.awaits:
            return
        elif m.stop_ordered:
            self._end_unheard(m, self.now)
        elif m.granted > m.round:
            m.without_first = False
            m.alive_at = self.now
            if m.first in m.gone:
                self._end_unheard(m, self.now)
            else:
                self._go_on_together(m)

    def _is_quiet(self, m: Machine) -> bool:
        if m.silent_until is not None and m.silent_until <= self.now:
            self._was_quiet(m)
            m.silent_until = None
        if m.silent_until is None and self.store_up:
            return False
        m.mute_until = self.now
        self._was_quiet(m)
        return True

    def _end_unheard(self, m: Machine, at: datetime) -> None:
        """None of them is there who could report their end; their provider ends what is left."""
        if (since := m.first_lost_at or m.kept_at) is not None:
            m.waits_kept.append((since, max(since, at)))
        m.kept_at = m.first_lost_at = m.ran_from = None
        m.without_first, m.is_over_unheard = False, True
        m.gives_up_at = m.gives_up_at or self.now + UNHEARD_FOR

    def _train(self, m: Machine) -> None:
        if m.is_over_unheard:
            return
        if m.first_lost_at is not None:
            self._wait_for_next(m, m.first_lost_at)
            return
        if m.without_first:
            self._wait_for_first(m)
            return
        if m.awaits:
            if m.state is InstanceState.PENDING and self.now - m.since >= BOOT:
                m.state, m.waits = InstanceState.RUNNING, False  # it was started again, under a grant that is over
            return
        if m.state is InstanceState.PENDING:
            if self.now - m.since < BOOT or m.is_half:
                return
            m.state, m.ran_from = InstanceState.RUNNING, m.since + BOOT
            m.measured = timedelta(0) if m.began_once else self._canary_takes(m)
            if m.began_once and m.task.keeps is not None:
                self._start_again(m)
            m.began_once = m.began_once or not m.dumb
            m.ran_work = m.saved[-1].work if m.saved else m.task.resume_at
            # A runner that is started again fetches nothing where its attempt has ended, or without a lease.
            m.is_empty = m.outcome is None and not m.dumb and m.leased_until > m.ran_from and not m.refuses
        if m.outcome is not None or m.ran_from is None or m.dumb:
            return
        if m.kept_at is not None:
            self._keep(m, m.kept_at)
            return
        if m.leased_until <= m.ran_from:
            self._exit(m, Outcome.LEASE_EXPIRED, m.ran_from)  # it woke up too late to do anything
            return
        if m.silent_until is not None and m.silent_until <= self.now:
            self._was_quiet(m)
            m.silent_until = None
        until = min(self.now, m.leased_until)
        ends_with = Outcome.LEASE_EXPIRED
        if m.member_lost_at is not None and m.member_lost_at < until:
            until, ends_with = max(m.member_lost_at, m.ran_from), Outcome.MEMBER_LOST
        if m.is_empty and until >= m.ran_from + m.measured:
            m.is_empty = False
            self._move_bytes(m, m.offer.download_price, (m.task.bytes if m.ran_work else 0) + m.task.inputs)
        began = m.ran_from + m.measured + m.meets
        work = self._work_until(m, began, max(began, until))
        if m.refuses and until >= began:
            until, ends_with = began, Outcome.UNFIT
        if m.silent_until is not None or not self.store_up:
            m.mute_until = self.now
            self._was_quiet(m)
            if until < self.now:
                self._exit(m, ends_with, until)  # it will be heard of once it can be heard
            return
        m.alive_at = until
        counted = int((until - m.ran_from) / HEARTBEAT) + int((m.since - m.born) / HEARTBEAT)
        m.seq = counted if not m.went_on else max(m.seq, int((until - m.born - BOOT) / HEARTBEAT))
        last = m.saved[-1].work if m.saved else m.task.resume_at
        while last + CHECKPOINT_EVERY <= min(work, m.task.need):
            last += CHECKPOINT_EVERY
            self._save(m, last, began + (last - m.ran_work), sound=self.rng.random() >= self.faults.bad_manifest)
        if until < began or m.refuses:
            self._end_early(m, until, ends_with)
        elif work >= m.task.need:
            if not m.task.exit_code:
                self._move_bytes(m, m.offer.upload_price, m.task.outputs)
            self._exit(m, m.task.cause, began + (m.task.need - m.ran_work))
        elif m.stop_ordered or until < self.now:
            keeps = m.task.keeps is not None and ends_with is Outcome.MEMBER_LOST and not m.stop_ordered
            if not m.saves_no_more and (ends_with is Outcome.LEASE_EXPIRED or m.member_saves):
                self._save(m, work, until, sound=True)
            if keeps:
                m.kept_at = until
                self._keep(m, until)
                return
            self._exit(m, Outcome.STOPPED if m.stop_ordered else ends_with, until)
        elif m.notice_at is not None and m.host.offer.interruption is Interruption.NOTICE:
            self._save(m, work, until, sound=True)
            self._exit(m, Outcome.PREEMPTED, until)

    def _keep(self, m: Machine, since: datetime) -> None:
        """The others wait, their first one speaks for them, and they go on once its grant names the next round."""
        over = min(since + (m.task.keeps or timedelta(0)), m.leased_until)
        if m.silent_until is not None and m.silent_until <= self.now:
            self._was_quiet(m)
            m.silent_until = None
        is_quiet = m.silent_until is not None or not self.store_up
        if is_quiet:
            m.mute_until = self.now
            self._was_quiet(m)
        elif self.now < over:
            m.alive_at = self.now
            m.seq = max(m.seq, int((self.now - m.born - BOOT) / HEARTBEAT))
            if m.stop_ordered:
                self._end_wait(m, Outcome.STOPPED, self.now)
                return
            if m.granted > m.round:
                self._go_on_together(m)
                return
        if self.now >= over:
            self._end_wait(m, Outcome.LEASE_EXPIRED if over == m.leased_until else Outcome.MEMBER_LOST, over)
        elif m.notice_at is not None and m.host.offer.interruption is Interruption.NOTICE and not is_quiet:
            self._end_wait(m, Outcome.PREEMPTED, self.now)

    def end_wait(self, m: Machine) -> None:
        """The first machine is lost: the others end at once."""
        self._end_wait(m, Outcome.MEMBER_LOST, self.now)

    def _end_wait(self, m: Machine, outcome: Outcome, at: datetime) -> None:
        m.waits_kept.append((m.kept_at or at, at))
        m.kept_at = None
        self._exit(m, outcome, at)

    def _start_again(self, m: Machine) -> None:
        """All of them woke, each with what its grant says of its place: they meet, or wait for one in vain."""
        m.round, m.meets = m.granted, AGAIN_TAKES
        if m.is_torn:
            m.meets, m.member_lost_at, m.member_saves = FOR_EVER, m.since + BOOT + WAITS_FOR_OTHERS, False

    def _go_on_together(self, m: Machine) -> None:
        if m.gone:  # one of those that came is lost again: the others wait for it in vain
            self._end_wait(m, Outcome.MEMBER_LOST, self.now)
            return
        m.waits_kept.append((m.kept_at or self.now, self.now))
        m.kept_at = m.member_lost_at = None
        m.round, m.went_on = m.granted, m.went_on + 1
        m.lost.clear()
        # What it saves from now on is newer, whatever an incomplete checkpoint of before says of itself.
        m.saved = [save for save in m.saved if save.sound]
        m.ran_from, m.ran_work, m.measured, m.meets = self.now + AGAIN_TAKES, m.offered, timedelta(0), timedelta(0)
        self._move_bytes(m, m.offer.download_price, (m.task.bytes if m.ran_work else 0) + m.task.inputs)
        if Random(f"{m.went_on}th new one of {m.key}").random() < self.new_ones_hang:
            m.meets = FOR_EVER

    def _canary_takes(self, m: Machine) -> timedelta:
        luck = Random(f"canary of {m.key} on {m.host.name}")
        return timedelta(seconds=0 if m.task.canary is None else m.task.canary.time_s * luck.uniform(0.2, 1))

    def _end_early(self, m: Machine, until: datetime, ends_with: Outcome) -> None:
        """What its canary, or anything while it is under way, makes of a machine on which nothing runs yet."""
        if m.stop_ordered:
            self._exit(m, Outcome.STOPPED, until)
        elif m.notice_at is not None and m.host.offer.interruption is Interruption.NOTICE:
            self._exit(m, Outcome.PREEMPTED, until)
        elif until < self.now or ends_with is Outcome.UNFIT:
            self._exit(m, ends_with, until)

    def _work_until(self, m: Machine, ran_from: datetime, until: datetime) -> timedelta:
        work = m.ran_work + (until - ran_from)
        if m.task.hangs_at is None or work < m.task.hangs_at:
            return work
        hung_at = max(ran_from, ran_from + (m.task.hangs_at - m.ran_work))
        if m.hung_at is None:
            m.hung_at = hung_at
        m.hung_seq = max(m.hung_seq, int((hung_at - ran_from) / HEARTBEAT) + int((m.since - m.born) / HEARTBEAT))
        return max(m.ran_work, m.task.hangs_at)

    def _exit(self, m: Machine, cause: Outcome, at: datetime) -> None:
        m.outcome, m.exit_at = cause, min(at, self.now)
        has_succeeded = cause is Outcome.SUCCEEDED
        may_wait = has_succeeded and m.notice_at is None and not m.stop_ordered
        if m.task.reuse is not None and may_wait and self.rng.random() < CLEARED:
            m.waits = m.is_clean = True
            m.waits_until = min(m.exit_at + m.task.reuse + WAITS_BEYOND, max(m.leased_until, m.exit_at))
            return
        if self.ends_itself:
            # A runner that still has its lease publishes its end before it ends its machine.
            ends = m.exit_at if cause is Outcome.LEASE_EXPIRED else max(m.exit_at, m.mute_until or m.exit_at)
            self._end_itself(m, ends)

    def _end_itself(self, m: Machine, ends: datetime) -> None:
        unused = max(timedelta(0), self.now - ends - ENDING_TAKES) // MICROSECOND
        m.owed -= self._rate(m) * unused
        m.owed_by_day[self.now.date()] -= self._rate(m) * unused
        self._halt(m, InstanceState.GONE, None)

    def _save(self, m: Machine, work: timedelta, at: datetime, *, sound: bool) -> None:
        # In the last instant in which nothing of it arrived this did not arrive either.
        arrives = at if m.mute_until is None else max(at, m.mute_until + MICROSECOND)
        m.saved.append(Save(work=work, at=arrives, sound=sound))
        self._move_bytes(m, m.offer.upload_price, m.task.bytes)

    def _move_bytes(self, m: Machine, price: int, count: int) -> None:
        amount = -(-price * count // GB)
        m.traffic += amount
        m.owed_by_day[self.now.date()] += amount * OWED_UNIT

    def _was_quiet(self, m: Machine) -> None:
        begun = max(self.before, m.born)
        if m.quiet_spans and m.quiet_spans[-1][1] >= begun:
            begun = m.quiet_spans.pop()[0]
        m.quiet_spans.append((begun, self.now))

    # --- what it costs ---

    def _gpu_price(self, m: Machine) -> int:
        return m.factor * (m.bid if m.host.offer.pays_bid else min(m.bid, m.host.price * m.offer.nodes))

    def _rate(self, m: Machine) -> int:
        if m.state is InstanceState.GONE:
            return 0
        disk = -(-m.host.offer.storage_price * m.task.disk_gb // 720)
        net = disk if m.state is InstanceState.PAUSED else self._gpu_price(m) + disk
        return -(-net * self.fee_ppm // 1_000_000)

    def _note_rate(self, m: Machine) -> None:
        rate = self._rate(m)
        if not m.rates or m.rates[-1][1] != rate:
            m.rates.append((self.now, rate))

    def _bill(self, m: Machine) -> None:
        if m.billed_until >= self.now:
            return
        owed = self._rate(m) * ((self.now - m.billed_until) // MICROSECOND)
        m.owed += owed
        m.owed_by_day[self.now.date()] += owed
        m.billed_until = self.now

    def _halt(self, m: Machine, state: InstanceState, loss: Loss | None) -> None:
        self._bill(m)
        if self.is_hourly and state is InstanceState.GONE and self.now - m.born < BILLED_LEAST:
            missing = self._rate(m) * ((BILLED_LEAST - (self.now - m.born)) // MICROSECOND)
            m.owed += missing
            m.owed_by_day[self.now.date()] += missing
        if m.alive:
            m.spans.append((m.since, min(self.now, max(m.since, m.leased_until))))
        m.state, m.loss = state, loss
        if state is InstanceState.GONE:
            m.died = self.now
            self.active.pop(m.ref.instance_id, None)
            self.fading.append(m)
        self._note_rate(m)

    def forget_faded(self) -> None:
        """What is gone for long is on no list."""
        shown_for = HOUR if self.faults.cause_lag else FORGOTTEN_AFTER
        self.fading = [m for m in self.fading if m.died is not None and self.now - m.died <= shown_for]

    def states_cause(self, m: Machine) -> bool:
        """Whether a log says by now why the machine is gone; each is late by a time of its own."""
        late = self.faults.cause_lag * (crc32(m.ref.instance_id.encode()) % 100) / 100
        return m.died is None or self.now - m.died >= late

    def relist(self, host: Host) -> None:
        """The offer says what the host costs now."""
        if host.offer.gpu_price != host.price:
            host.offer = replace(host.offer, gpu_price=MicroUsdPerHour(host.price))

    # --- for the oracles ---

    def live_spans(self) -> list[tuple[AttemptKey, datetime, datetime]]:
        """When each machine could compute: one whose image never speaks runs no command."""
        found: list[tuple[AttemptKey, datetime, datetime]] = []
        for m in self.machines.values():
            if m.dumb:
                continue
            over = m.exit_at if m.misstated_at is not None and m.exit_at is not None else self.now
            found.extend((m.key, a, min(b, over)) for a, b in m.spans)
            if m.alive:
                found.append((m.key, m.since, min(over, m.leased_until)))
        return [span for span in found if span[1] < span[2]]

    def total_billed(self) -> MicroUsd:
        return MicroUsd(sum(m.billed for m in self.machines.values()))
