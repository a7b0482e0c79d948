"""The hazards of a world, as they happen."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from random import Random
from typing import TYPE_CHECKING, Any

from spotd.core.domain.intents import IntentKind, JobId
from spotd.core.kernel.outcomes import LaunchFailure
from spotd.core.plan_builder import stall_words
from tests.sim.cloud import Cloud
from tests.sim.hazards import Hazard
from tests.sim.machines import Machine
from tests.sim.records import Records
from tests.sim.restoring import Backup, backup_of, restore
from tests.sim.wrong_rows import WrongRows

if TYPE_CHECKING:
    from tests.sim.daemon import Daemon
    from tests.sim.weather import Weather

MINUTE = timedelta(minutes=1)
HOUR = timedelta(hours=1)
SECOND = timedelta(seconds=1)
STEPS = (timedelta(0), SECOND, -SECOND, 20 * SECOND, -20 * SECOND, HOUR, -HOUR, 8 * HOUR, -8 * HOUR)
"""By how much the wall clock is off."""
BACKUPS_KEPT = 6 * HOUR
REFUSALS = (
    LaunchFailure.NO_CAPACITY,
    LaunchFailure.OFFER_GONE,
    LaunchFailure.PRICE_MOVED,
    LaunchFailure.QUOTA,
    LaunchFailure.REJECTED,
    LaunchFailure.NO_BALANCE,
    LaunchFailure.RATE_LIMITED,
)


class Mishaps:
    """Brings the hazards of the shape over the world, until the calm ends them."""

    def __init__(self, weather: Weather) -> None:
        self.weather = weather
        self.hazards = weather.shape.hazards
        self.luck = weather.luck
        self.rows_luck = Random(f"wrong rows of {weather.seed}")
        self.agenda = weather.agenda
        self.clouds = weather.clouds
        self.daemon = weather.daemon
        self.copies: list[Backup] = []

    def begin(self) -> None:
        chances: dict[Hazard, tuple[float, Callable[[], None]]] = {
            Hazard.SILENCE: (0.3, self.silence),
            Hazard.ONE_SIDED: (0.3, self.one_sided),
            Hazard.LISTS: (0.5, self.lists),
            Hazard.SLEEP: (0.15, self.sleep),
            Hazard.DEAD_ACCOUNT: (0.15, self.dead_account),
            Hazard.CLOCK_STEPS: (0.6, self.clock_steps),
            Hazard.FULL_DISK: (0.2, self.full_disk),
            Hazard.RESTORED: (2.0, self.copy_or_restore),
            Hazard.READ_ONLY: (0.2, self.read_only),
            Hazard.DEAR_EVERYWHERE: (0.5, self.is_expensive),
            Hazard.REFUSALS: (0.2, self.refusals),
        }
        for hazard, (per_hour, action) in chances.items():
            if hazard in self.hazards:
                self.weather.often(per_hour, action, self.luck)
        if Hazard.NUMBERS in self.hazards:
            self.daemon.hostile = self.numbers
        for cloud in self.clouds:
            self.prepare(cloud)
        if Hazard.ROWS in self.hazards:
            self.rows_luck.choice(self.clouds).spoil = WrongRows(self.rows_luck)
        if Hazard.RESTORED in self.hazards:
            self.daemon.records = records = Records()
            records.now = lambda: self.daemon.true
            records.can_read = lambda: self.daemon.can_read
            records.can_write = lambda: self.daemon.can_write
        if Hazard.HASTY in self.hazards:
            self.daemon.launches_at_once = 1
            self.daemon.waits = self.hasty
        if Hazard.REVOKED in self.hazards:
            self.later(self.weather.shape.storm * self.luck.random(), self.revoke)

    def prepare(self, cloud: Cloud) -> None:
        rates: dict[str, Any] = {}
        if Hazard.DUMB in self.hazards:
            rates["dumb"] = self.luck.choice([0.05, 0.3])
        if Hazard.NOTICES in self.hazards:
            rates["notice_per_hour"] = self.luck.choice([0.1, 0.5])
        if Hazard.OVERCHARGE in self.hazards:
            rates["overcharge_per_hour"] = 0.1
        if Hazard.SPIKES in self.hazards:
            rates["spike_per_hour"] = self.luck.choice([0.2, 1.0])
        if Hazard.LATE_CAUSES in self.hazards:
            rates["cause_lag"] = 12 * MINUTE
        if Hazard.HASTY in self.hazards:
            rates["slow_launch"] = 0.8
        cloud.faults = replace(cloud.faults, **rates)
        if Hazard.RETRY_AFTER in self.hazards:
            cloud.faults.end_retry_after = timedelta(days=1)
        if Hazard.LOST_AND_AWAY in self.hazards:
            cloud.lost = lambda: self.away(cloud)

    def end(self) -> None:
        """The calm: what can heal is healed."""
        self.daemon.asleep_until = self.daemon.hostile = None
        self.disk_freed()
        if Hazard.CLOCK_STEPS in self.hazards:
            self.daemon.set_clock(timedelta(0))
        for cloud in self.clouds:
            cloud.dead, cloud.lying_until, cloud.spoil, cloud.lost = cloud.revoked is not None, None, None, lambda: None
            cloud.refuses, cloud.dear_until = None, self.agenda.now
            cloud.make_traffic_free()
            for m in cloud.active.values():
                m.factor = 1

    def later(self, span: timedelta, action: Callable[[], None]) -> None:
        self.agenda.after(span, action)

    # --- one by one ---

    def silence(self) -> None:
        """A network is gone: nothing that these hosts write arrives, and they hear nothing."""
        span = self.luck.choice([MINUTE, 4 * MINUTE, 20 * MINUTE])
        for cloud in self.clouds if self.luck.random() < 0.5 else [self.luck.choice(self.clouds)]:
            cloud.advance(self.agenda.now)
            for m in cloud.active.values():
                if m.alive:
                    cloud.hush(m, span)

    def one_sided(self) -> None:
        span = self.luck.choice([MINUTE, 10 * MINUTE, 2 * HOUR])
        if self.luck.random() < 0.5:
            self.weather.hosts_write(up=False)
            self.later(span, lambda: self.weather.hosts_write(up=True))
        else:
            self.daemon.can_read = False
            self.later(span, lambda: setattr(self.daemon, "can_read", True))

    def lists(self) -> None:
        cloud = self.luck.choice(self.clouds)
        cloud.lying_until = self.agenda.now + self.luck.choice([3, 30, 90]) * timedelta(seconds=1)

    def sleep(self) -> None:
        self.daemon.asleep_until = self.agenda.now + HOUR * self.luck.choice([0.1, 1, 8])

    def dead_account(self) -> None:
        cloud = self.luck.choice(self.clouds)
        cloud.dead = True
        self.later(HOUR * self.luck.choice([0.2, 6]), lambda: setattr(cloud, "dead", cloud.revoked is not None))

    def revoke(self) -> None:
        """The account is refused from now on; its owner learns that it stays so, and gives up what is in it."""
        cloud = self.luck.choice(self.clouds)
        cloud.advance(self.agenda.now)
        cloud.dead, cloud.revoked = True, self.agenda.now
        patience = HOUR * self.luck.choice([0.5, 3, 30])
        all_of_it = self.luck.random() < 0.5
        self.later(patience, lambda: self.give_up(cloud, all_of_it=all_of_it))

    def give_up(self, cloud: Cloud, *, all_of_it: bool) -> None:
        """What runs on may be left to end by itself; what hangs does not, and `why` says that nothing can end it."""
        twin = self.weather.twin
        for daemon in (self.daemon,) if twin is None else (self.daemon, twin.daemon):
            self.give_up_of(daemon, cloud, all_of_it=all_of_it)
        self.later(HOUR, lambda: self.give_up(cloud, all_of_it=all_of_it))

    def give_up_of(self, daemon: Daemon, cloud: Cloud, *, all_of_it: bool) -> None:
        if daemon.open and daemon.surveyed:
            for identity, item in sorted(daemon.world.attempts.items(), key=lambda kv: kv[1].key):
                hangs = bool(stall_words(item, daemon.world.jobs[identity.job]))
                if item.provider == cloud.name and (all_of_it or hangs or not item.state.counts):
                    daemon.forget(identity)
            for intent in list(daemon.world.intents.values()):
                if intent.provider == cloud.name and intent.kind is IntentKind.TERMINATE and intent.attempt is None:
                    daemon.forget(intent)

    def hasty(self, job: JobId) -> None:
        if not self.weather.is_calm and self.luck.random() < 0.5:
            self.later(timedelta(seconds=self.luck.uniform(1, 30)), lambda: self.cancel(job))

    def cancel(self, job: JobId) -> None:
        if self.daemon.open:
            self.daemon.cancel(job)

    def copy_or_restore(self) -> None:
        """Copies of any age are there, and one in eight times the state is put back to one of them."""
        daemon = self.daemon
        if daemon.full_since is not None or daemon.anchor is None:
            return
        self.copies = [copy for copy in self.copies if daemon.true - copy.at < BACKUPS_KEPT]
        if not self.copies or self.luck.random() < 0.87:
            if daemon.up:
                self.copies.append(backup_of(daemon))
            return
        copy = self.luck.choice(self.copies)
        if daemon.up:
            daemon.kill()
        self.copies = [other for other in self.copies if other.at <= copy.at]
        for job in sorted(restore(daemon, copy)):
            self.weather.submit_again(job)

    def is_expensive(self) -> None:
        for cloud in self.clouds:
            cloud.dear_until = self.agenda.now + 6 * MINUTE

    def read_only(self) -> None:
        span = self.luck.choice([MINUTE, 10 * MINUTE, 2 * HOUR])
        self.weather.hosts_write(up=False)
        self.daemon.can_write = False
        self.later(span, self.writable)

    def writable(self) -> None:
        self.weather.hosts_write(up=True)
        self.daemon.can_write = True

    def refusals(self) -> None:
        cloud = self.luck.choice(self.clouds)
        cloud.refuses = self.luck.choice(REFUSALS)
        self.later(HOUR * self.luck.choice([0.5, 6, 24]), lambda: setattr(cloud, "refuses", None))

    def clock_steps(self) -> None:
        """Often a little before or after midnight, where a day of the books ends."""
        off = self.luck.choice(STEPS)
        at = self.agenda.now
        if self.luck.random() < 0.5:
            midnight = self.daemon.now.replace(hour=0, minute=0, second=0, microsecond=0) + timedelta(days=1)
            at = midnight - self.daemon.off + timedelta(seconds=self.luck.uniform(-40, 5))
        self.agenda.at(at, lambda: None if self.weather.is_calm else self.daemon.set_clock(off))

    def full_disk(self) -> None:
        if self.daemon.full_since is None:
            self.daemon.full_since = self.agenda.now
            self.later(self.luck.choice([5 * MINUTE, HOUR, 6 * HOUR]), self.disk_freed)

    def disk_freed(self) -> None:
        since, self.daemon.full_since = self.daemon.full_since, None
        if since is not None:
            self.daemon.told.full.append((since, self.agenda.now))

    def away(self, cloud: Cloud) -> None:
        cloud.down = True
        self.later(HOUR * self.luck.choice([0.2, 2, 6]), lambda: setattr(cloud, "down", False))

    def numbers(self, m: Machine) -> dict[str, Any]:
        """What the hosts of one machine in five state, as far as the parsers let it through."""
        if zlib.crc32(m.key.encode()) % 5:
            return {}
        odd: list[dict[str, Any]] = [
            {"notice_at": datetime(9999, 12, 31, tzinfo=UTC)},
            {"notice_at": datetime(1970, 1, 1, tzinfo=UTC)},
            {"step": 2**63 - 1},
            {"step": 0},
            {"restored_bytes": 2**63 - 1},
        ]
        return self.luck.choice(odd)
