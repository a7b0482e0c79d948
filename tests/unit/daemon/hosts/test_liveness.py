"""A thousand hosts are watched by one listing of their beats, and nobody is lost, or overlooked, for want of a beat."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from spotd.core.domain.attempts import HostStatus
from spotd.core.domain.intents import AttemptId, JobId
from spotd.core.domain.states import AttemptState, EndReason, JobState
from spotd.core.domain.world import World
from spotd.daemon import object_keys
from spotd.daemon.hosts.limits import FloodLimits
from spotd.daemon.hosts.manifests import MISSING_READS_MAX
from spotd.daemon.hosts.monitor import HostMonitor
from spotd_jobs.objects.api import ObjectInfo, ObjectStore, StoreUnavailable
from spotd_jobs.objects.folder import FolderStore
from spotd_jobs.runner import heartbeat
from spotd_jobs.wire.grant import MARKER_BYTES_MAX, attempt_of_marker
from spotd_providers.contract.values import AttemptKey, InstanceState, Loss
from tests.unit.core.builders import NOW, world_with
from tests.unit.daemon.host import Host
from tests.unit.daemon.rig import Log, Rig
from tests.unit.daemon.test_ids import Still

WORLD = world_with(AttemptState.RUNNING)
(ATTEMPT,) = WORLD.attempts
PAGE = 1000
BEAT_S = 15
HOSTS = 200
pytestmark = pytest.mark.anyio


class Counted(FolderStore):
    """Counts requests as a bucket would be asked them: a listing costs one for each thousand keys."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.asked: Counter[str] = Counter()
        self.away: str | None = None

    def _asked(self, verb: str, key: str, count: int = 1) -> None:
        if self.away is not None and self.away in key:
            raise StoreUnavailable("it is away")
        self.asked[verb] += count

    def get(self, key: str, *, bytes_max: int, version: str | None = None) -> bytes:
        self._asked("get", key)
        return super().get(key, bytes_max=bytes_max, version=version)

    def head(self, key: str) -> ObjectInfo | None:
        self._asked("head", key)
        return super().head(key)

    def list_after(self, prefix: str, after: str, *, page: int = 1000) -> Iterator[ObjectInfo]:
        found = list(super().list_after(prefix, after, page=page))
        self._asked("list", prefix, max(1, -(-len(found) // PAGE)))
        return iter(found)


class Watch:
    """The keeper over a store that counts, and a clock that the test moves."""

    def __init__(self, folder: Path, *, list_every_s: float = 0.0, limits: FloodLimits | None = None) -> None:
        self.objects = Counted(folder / "objects")
        self.clock = Still()
        self.log = Log()
        self.host_monitor = HostMonitor(
            self.objects,
            clock=self.clock,
            wall=self.clock,
            log=self.log,
            inline=True,
            ticks=lambda: 0.0,
            list_every_s=list_every_s,
            limits=limits or FloodLimits(audit_every=timedelta(days=1000)),
        )
        self.host = Host(self.objects, ATTEMPT)

    async def look(
        self, world: World = WORLD, *, after_s: float = 0.0, closely: frozenset[AttemptId] = frozenset()
    ) -> HostStatus:
        self.clock.at += timedelta(seconds=after_s)
        reports = await self.host_monitor.read_hosts(world, closely)
        self.host_monitor.committed(reports)
        return reports[ATTEMPT]

    async def settled(self) -> HostStatus:
        """The host beats, and a complete look has seen all that it wrote."""
        self.host.beat("run")
        self.pulse()
        await self.look()
        self.pulse()
        await self.look()
        self.pulse()
        found = await self.look()
        assert found.liveness_check
        self.objects.asked.clear()
        return found

    def pulse(self, news: int = 7) -> None:
        pulse(self.objects, ATTEMPT, news)


_pulses = iter(range(1, 10**9))


def put_quickly(objects: ObjectStore, key: str, data: bytes) -> Path:
    """The object is there, without a disk sync."""
    path = Path(objects.presign_get(key, expires=NOW).removeprefix("file://"))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def pulse(objects: ObjectStore, attempt: AttemptId, news: int) -> None:
    """The attempt's beat is written again, at a time that no other has."""
    touch(put_quickly(objects, object_keys.liveness_key(attempt), b"+" * news))


def touch(beat: Path) -> None:
    """It is written again and says the same."""
    moment = 1_700_000_000 + next(_pulses)
    os.utime(beat, (moment, moment))


@pytest.fixture
def watch(tmp_path: Path) -> Watch:
    return Watch(tmp_path)


async def test_hundreds_of_hosts_without_news_cost_at_most_two_requests_in_a_beat(tmp_path: Path) -> None:
    watch = Watch(tmp_path, list_every_s=10.0)
    (item,) = WORLD.attempts.values()
    (job,) = WORLD.jobs.values()
    ids = [AttemptId(job=JobId(f"j{number:04}"), number=1) for number in range(HOSTS)]
    world = replace(
        WORLD,
        attempts={i: replace(item, id=i, key=AttemptKey(f"spotd-lab-{i.job}-1")) for i in ids},
        jobs={i.job: replace(job, id=i.job) for i in ids},
    )
    places = [put_quickly(watch.objects, object_keys.liveness_key(i), b"+++") for i in ids]
    for i in ids:
        put_quickly(watch.objects, object_keys.heartbeat_key(i), Host(watch.objects, i).heartbeat())
    beats, cycles_per_beat = 4, 5
    liveness_checks = 0
    reports: Mapping[AttemptId, HostStatus] = {}
    for beat in range(beats + 3):
        if beat == 3:  # by then every host was looked at completely, and seen to beat
            watch.objects.asked.clear()
        for _ in range(cycles_per_beat):
            watch.clock.at += timedelta(seconds=BEAT_S / cycles_per_beat)
            reports = await watch.host_monitor.read_hosts(world)
            assert len(reports) == HOSTS
            liveness_checks += sum(report.liveness_check for report in reports.values()) if beat >= 3 else 0
        for place in places:
            touch(place)
    assert liveness_checks == HOSTS * beats * cycles_per_beat
    assert watch.objects.asked.total() <= 2 * beats, watch.objects.asked
    last = max(report.marker_at or NOW for report in reports.values())
    assert watch.clock.at - last <= timedelta(seconds=2 * BEAT_S), "and each is known to live"


async def test_a_host_with_news_is_looked_at_completely_and_others_are_not(watch: Watch) -> None:
    await watch.settled()
    watch.host.checkpoint("a")
    watch.pulse(news=7)
    assert (await watch.look(after_s=10)).checkpoints == (), "it did not say so"
    watch.pulse(news=8)
    found = await watch.look(after_s=10)
    assert not found.liveness_check
    assert [c.name for c in found.checkpoints] == ["a"]
    watch.pulse(news=8)
    assert (await watch.look(after_s=10)).liveness_check


async def test_a_beat_written_again_is_a_sign_of_life(watch: Watch) -> None:
    await watch.settled()
    watch.pulse()
    first = await watch.look(after_s=10)
    still = await watch.look(after_s=10)
    assert (first.liveness_check, first.marker_at) == (True, watch.clock.at - timedelta(seconds=10))
    assert (still.liveness_check, still.marker_at) == (True, first.marker_at)


async def test_a_beat_that_stands_still_for_long_is_not_relied_upon(watch: Watch) -> None:
    await watch.settled()
    assert (await watch.look(after_s=30)).liveness_check
    found = await watch.look(after_s=1)
    assert not found.liveness_check, "well before the 45 s that make a host lost"
    watch.host.beat("run")
    assert (await watch.look(after_s=10)).seq == 1, "its heartbeat goes on: it lives"


async def test_a_host_without_a_beat_is_looked_at_completely_each_time(watch: Watch) -> None:
    watch.host.beat("run")
    for seq in range(3):
        found = await watch.look(after_s=10)
        assert (found.liveness_check, found.seq) == (False, seq)
        watch.host.beat("run")


async def test_a_beat_without_a_heartbeat_says_nothing(watch: Watch) -> None:
    for _ in range(4):
        watch.pulse()
        assert not (await watch.look(after_s=10)).liveness_check


async def test_a_glance_will_not_do_where_more_is_asked_for(tmp_path: Path) -> None:
    watch = Watch(tmp_path, list_every_s=10.0)
    watch.host.beat("run")
    await watch.look()
    watch.host.exit("succeeded")
    assert (await watch.look(after_s=1)).liveness_check
    found = await watch.look(after_s=1, closely=frozenset({ATTEMPT}))
    assert not found.liveness_check
    assert found.exit_reason is not None
    again = await watch.look(after_s=1)
    assert (again.liveness_check, again.exit_reason) == (True, found.exit_reason), (
        "what is known is told until it is taken in"
    )


async def test_a_store_that_cannot_list_the_beats_is_away(watch: Watch) -> None:
    await watch.settled()
    watch.objects.away = "_liveness/"
    assert await watch.host_monitor.read_hosts(WORLD) == {}
    assert watch.host_monitor.last_error == "it is away"
    assert await watch.host_monitor.read_hosts(WORLD) == {}
    watch.objects.away = None
    watch.pulse()
    assert (await watch.look()).attempt == ATTEMPT
    assert watch.log.events() == ["checkpoint_store.away", "checkpoint_store.back"]


async def test_news_that_could_not_be_read_is_still_news(watch: Watch) -> None:
    await watch.settled()
    watch.host.checkpoint("a")
    watch.pulse(news=8)
    watch.objects.away = "/checkpoints/"
    assert await watch.host_monitor.read_hosts(WORLD) == {}
    watch.objects.away = None
    watch.pulse(news=8)
    assert [c.name for c in (await watch.look(after_s=10)).checkpoints] == ["a"]


async def test_what_no_commit_took_in_is_told_by_a_glance_too(watch: Watch) -> None:
    await watch.settled()
    watch.host.checkpoint("a")
    watch.pulse(news=8)
    await watch.host_monitor.read_hosts(WORLD)
    watch.pulse(news=8)
    found = await watch.look()
    assert (found.liveness_check, [c.name for c in found.checkpoints]) == (True, ["a"])


async def test_a_checkpoint_whose_chunks_are_not_listed_yet_is_looked_at_again_without_news(watch: Watch) -> None:
    await watch.settled()
    watch.host.checkpoint("early", b"late", chunks=False)
    watch.pulse(news=8)
    for _ in range(MISSING_READS_MAX):
        assert not (await watch.look()).liveness_check
        watch.pulse(news=8)
    assert (await watch.look()).liveness_check, "but not for ever"


async def test_a_beat_larger_than_any_runner_writes_is_a_flood(watch: Watch) -> None:
    await watch.settled()
    watch.pulse(news=MARKER_BYTES_MAX + 1)
    assert (await watch.look()).flood == f"a liveness marker of {MARKER_BYTES_MAX + 1} bytes"
    assert heartbeat.MARKER_BYTES_MAX == MARKER_BYTES_MAX


async def test_how_much_a_quiet_host_wrote_is_counted_all_the_same(tmp_path: Path) -> None:
    watch = Watch(tmp_path, limits=FloodLimits(objects_day=5, audit_every=timedelta(minutes=10)))
    await watch.settled()
    for _ in range(10):
        watch.host.log(b"x")
    for _ in range(60):
        watch.pulse()
        await watch.look(after_s=10)
    watch.pulse()
    found = await watch.look(after_s=10)
    assert found.liveness_check
    assert "more than 5 objects" in found.flood


async def test_beats_of_attempts_long_gone_are_deleted_and_no_others(watch: Watch) -> None:
    zombie, young = AttemptId(job=JobId("gone"), number=3), AttemptId(job=JobId("other"), number=1)
    pulse(watch.objects, zombie, 3)
    watch.objects.put(object_keys.liveness_key(young), b"+")
    watch.objects.put("jobs/_liveness/no beat", b"+")
    watch.pulse()
    watch.clock.at = datetime.now(UTC)
    await watch.look()
    left = {info.key for info in watch.objects.list("jobs/_liveness/")}
    assert left == {object_keys.liveness_key(ATTEMPT), object_keys.liveness_key(young), "jobs/_liveness/no beat"}
    assert attempt_of_marker("jobs/_liveness/no beat") is None


async def test_a_host_is_lost_in_time_though_all_looks_were_glances(rig: Rig) -> None:
    async with rig.running():
        name = await rig.submit()
        host = await rig.until_running(name, 1)
        attempt = rig.attempts(name)[0].id
        for _ in range(60):
            pulse(rig.objects, attempt, 5)
            await rig.clock.sleep(timedelta(seconds=5))
        assert host.seq == 0
        assert rig.attempts(name)[0].state is AttemptState.RUNNING, "five minutes by its beat alone"
        del rig.shop.machines[next(iter(rig.shop.machines))]
        silent_since = rig.clock.now()
        await rig.until(lambda: rig.attempts(name)[0].end_reason is not None)
        assert rig.attempts(name)[0].end_reason is EndReason.HOST_LOST
        assert rig.clock.now() - silent_since <= timedelta(seconds=60)


async def test_a_host_whose_beat_stands_still_lives_by_its_heartbeat(rig: Rig) -> None:
    async with rig.running():
        name = await rig.submit()
        host = await rig.until_running(name, 1)
        pulse(rig.objects, rig.attempts(name)[0].id, 5)
        for _ in range(20):
            host.beat("run")
            await rig.clock.sleep(timedelta(seconds=15))
        assert rig.attempts(name)[0].state is AttemptState.RUNNING
        host.exit("succeeded")
        await rig.until_state(name, JobState.SUCCEEDED)


async def test_what_a_quiet_host_published_right_before_it_was_taken_is_not_lost(rig: Rig) -> None:
    async with rig.running():
        name = await rig.submit()
        host = await rig.until_running(name, 1)
        attempt = rig.attempts(name)[0].id
        for _ in range(6):
            pulse(rig.objects, attempt, 5)
            await rig.clock.sleep(timedelta(seconds=5))
        host.checkpoint("last-words")
        rig.shop.set_state(AttemptKey("spotd-lab-j1-1"), InstanceState.PAUSED, Loss.OUTBID)
        await rig.until(lambda: len(rig.attempts(name)) == 2)
    assert [c.name for c in rig.job(name).checkpoints] == ["last-words"]
