"""What hosts write is read with suspicion: garbage is noted once, lies are refused, order is kept."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from spotd.core.domain.attempts import HostStatus
from spotd.core.domain.jobs import FailedRestore
from spotd.core.domain.market import gang_of
from spotd.core.domain.states import AttemptState, EndReason
from spotd.core.domain.world import World
from spotd.daemon.hosts.monitor import HostMonitor
from spotd.daemon.hosts.reader import later
from spotd_jobs.objects.folder import FolderStore
from tests.unit.core.builders import NOW, world_with
from tests.unit.daemon.host import Host, text
from tests.unit.daemon.rig import Log
from tests.unit.daemon.test_ids import Still

WORLD = world_with(AttemptState.RUNNING)
(ATTEMPT,) = WORLD.attempts
MEASURED = replace(WORLD, policy=replace(WORLD.policy, canary=timedelta(minutes=1)))
pytestmark = pytest.mark.anyio


@pytest.fixture
def objects(tmp_path: Path) -> FolderStore:
    return FolderStore(tmp_path / "objects")


def monitor(objects: FolderStore) -> HostMonitor:
    """One life of the daemon's."""
    return HostMonitor(objects, clock=Still(), wall=Still(), log=Log(), inline=True, ticks=lambda: 0.0)


@pytest.fixture
def host_monitor(objects: FolderStore) -> HostMonitor:
    return monitor(objects)


@pytest.fixture
def host(objects: FolderStore) -> Host:
    return Host(objects, ATTEMPT)


async def look(host_monitor: HostMonitor, world: World = WORLD) -> HostStatus:
    reports = await host_monitor.read_hosts(world)
    host_monitor.committed(reports)
    return reports[ATTEMPT]


async def test_a_host_that_wrote_nothing_yet_has_an_empty_report(host_monitor: HostMonitor) -> None:
    report = await look(host_monitor)
    assert (report.seq, report.phase, report.checkpoints, report.exit_reason) == (-1, "", (), None)


async def test_a_heartbeat_tells_sequence_and_phase(host_monitor: HostMonitor, host: Host) -> None:
    host.beat("restore")
    host.beat("run")
    report = await look(host_monitor)
    assert (report.seq, report.phase, report.read_at) == (1, "run", NOW)


@pytest.mark.parametrize(
    "data",
    [b"", b"{", b"\xff" * 10, b"x" * 70_000, b'{"schema": 1}', b"[" * 50_000],
    ids=["empty", "cut", "binary", "too large", "keys missing", "deep"],
)
async def test_garbage_in_place_of_a_heartbeat_is_noted_once_and_believed_never(
    host_monitor: HostMonitor, host: Host, data: bytes
) -> None:
    host.beat("run")
    await look(host_monitor)
    host.raw("heartbeat.json", data)
    first, second = await look(host_monitor), await look(host_monitor)
    assert (first.seq, len(first.notes), second.notes) == (0, 1, ())


async def test_another_attempts_heartbeat_is_not_taken(host_monitor: HostMonitor, host: Host) -> None:
    host.beat("run", attempt=7)
    report = await look(host_monitor)
    assert report.seq == -1
    assert "another attempt" in report.notes[0]


async def test_checkpoints_come_once_each_in_the_order_they_were_completed(
    host_monitor: HostMonitor, host: Host
) -> None:
    host.checkpoint("b", b"one")
    host.checkpoint("a", b"two")
    report = await look(host_monitor)
    assert [c.name for c in report.checkpoints] == ["b", "a"]
    host.checkpoint("c", b"three")
    assert [c.name for c in (await look(host_monitor)).checkpoints] == ["c"]


async def test_what_no_commit_took_in_is_reported_again(host_monitor: HostMonitor, host: Host) -> None:
    host.checkpoint("a", b"one")
    host.event("disk_low", free_mb=10)
    first = (await host_monitor.read_hosts(WORLD))[ATTEMPT]
    second = (await host_monitor.read_hosts(WORLD))[ATTEMPT]
    assert (first.checkpoints, first.notes) == (second.checkpoints, second.notes) != ((), ())


async def test_a_checkpoint_that_lacks_its_chunks_is_refused_and_accepted_when_they_come(
    host_monitor: HostMonitor, host: Host
) -> None:
    host.checkpoint("early", b"late", chunks=False)
    first = await look(host_monitor)
    assert first.checkpoints == ()
    assert "not in the store" in first.notes[0]
    host.checkpoint("early", b"late", serial=1)
    assert [c.name for c in (await look(host_monitor)).checkpoints] == ["early"]


async def test_a_manifest_of_another_attempt_is_refused_and_told_once(host_monitor: HostMonitor, host: Host) -> None:
    host.checkpoint("foreign", b"x", attempt=9)
    first, second = await look(host_monitor), await look(host_monitor)
    assert (first.checkpoints, second.notes) == ((), ())
    assert "another attempt" in first.notes[0]


async def test_an_older_checkpoint_that_turns_up_late_does_not_put_the_job_back(
    host_monitor: HostMonitor, host: Host
) -> None:
    host.checkpoint("new", b"new", serial=5)
    await look(host_monitor)
    host.checkpoint("old", b"old", serial=3)
    report = await look(host_monitor)
    assert report.checkpoints == ()
    assert [(one.name, newer.rpartition("/")[2]) for one, newer in report.older] == [("old", "new.json")]


async def test_what_one_list_missed_stands_behind_the_next_newer_one_and_is_reported_once(
    host_monitor: HostMonitor, host: Host
) -> None:
    for name, serial in (("s80", 2), ("s160", 4)):
        host.checkpoint(name, name.encode(), serial=serial)
        await look(host_monitor)
    host.checkpoint("s120", b"s120", serial=3)
    report = await look(host_monitor)
    ((late, newer),) = report.older
    assert (late.name, newer.rpartition("/")[2], report.checkpoints) == ("s120", "s160.json", ())
    host.checkpoint("again", b"again", serial=3)
    host.checkpoint("s120", b"written anew", serial=3)
    report = await look(host_monitor)
    assert (report.older, report.checkpoints) == ((), ()), "a serial counts once"


@pytest.mark.parametrize(
    ("known", "late"),
    [
        pytest.param(("s80", "s160"), ["s120"], id="between the two newest none was known"),
        pytest.param(("s80", "s120", "s160"), [], id="what was older may have left the list"),
        pytest.param(("s160",), [], id="one alone"),
    ],
)
async def test_after_a_restart_only_what_lies_between_the_two_newest_was_missed(
    objects: FolderStore, host: Host, known: tuple[str, ...], late: list[str]
) -> None:
    serials = {"s40": 1, "s80": 2, "s120": 3, "s160": 4}
    for name, serial in serials.items():
        host.checkpoint(name, name.encode(), serial=serial)
    found = {c.name: c for c in (await look(monitor(objects))).checkpoints}
    job = replace(WORLD.jobs[ATTEMPT.job], checkpoints=tuple(found[name] for name in reversed(known)))
    report = await look(monitor(objects), replace(WORLD, jobs={job.id: job}))
    assert ([one.name for one, _ in report.older], report.checkpoints) == (late, ())


async def test_the_exit_event_comes_with_everything_published_before_it(host_monitor: HostMonitor, host: Host) -> None:
    host.checkpoint("last", b"x")
    host.exit("failed", code=3, reason="assertion")
    report = await look(host_monitor)
    assert (report.exit_reason, report.exit_code, report.exit_detail) == (EndReason.USER_ERROR, 3, "assertion")
    assert [c.name for c in report.checkpoints] == ["last"]


@pytest.mark.parametrize(
    ("outcome", "reason"),
    [
        ("succeeded", EndReason.DONE),
        ("setup_failed", EndReason.USER_ERROR),
        ("code_unusable", EndReason.CODE_ERROR),
        ("input_unusable", EndReason.INPUT_ERROR),
        ("input_away", EndReason.INPUT_AWAY),
        ("disk_full", EndReason.DISK_FULL),
        ("preempted", EndReason.PREEMPTED),
        ("stopped", EndReason.PREEMPTED),
        ("lease_expired", EndReason.LEASE_EXPIRED),
        ("not_current", EndReason.HOST_LOST),
        ("runner_error", EndReason.HOST_LOST),
        ("member_lost", EndReason.HOST_LOST),
        ("unfit", EndReason.CONTRACT_BROKEN),
    ],
)
async def test_each_outcome_of_the_runner_has_its_reason(
    host_monitor: HostMonitor, host: Host, outcome: str, reason: EndReason
) -> None:
    host.exit(outcome)
    report = await look(host_monitor)
    assert (report.exit_reason, report.exit_phase) == (reason, "run")


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (41.0, "41 s, $0.004556"),
        (604_800.0, "70 s, $0.007778"),
        (-1.0, "?, ?"),
        ("long", "?, ?"),
        (None, "?, ?"),
        (True, "?, ?"),
        (1e17, "?, ?"),
    ],
)
async def test_what_a_canary_found_is_shown_with_its_time_and_cost(
    host_monitor: HostMonitor, host: Host, seconds: object, words: str
) -> None:
    host.event("canary", finding="2 GPUs, 79.6 GiB", seconds=seconds, unfit=None, cost="$9")
    assert (await look(host_monitor, MEASURED)).notes == (f"canary: 2 GPUs, 79.6 GiB; it took {words}",)
    assert (await look(host_monitor, MEASURED)).notes == ()


async def test_a_canary_takes_no_longer_than_its_machine_is_rented(host_monitor: HostMonitor, host: Host) -> None:
    ((identity, item),) = MEASURED.attempts.items()
    young = replace(item, launched_at=NOW - timedelta(seconds=20))
    host.event("canary", finding="2 GPUs", seconds=60.0, unfit=None)
    report = await look(host_monitor, replace(MEASURED, attempts={identity: young}))
    assert report.notes == ("canary: 2 GPUs; it took 20 s, $0.002223",)


async def test_a_canary_of_a_host_that_was_not_to_measure_itself_is_passed_over(
    host_monitor: HostMonitor, host: Host
) -> None:
    host.event("canary", finding="2 GPUs", seconds=60.0, unfit=None)
    host.event("disk_low", free_mb=10)
    (note,) = (await look(host_monitor)).notes
    assert "10 MB" in note


async def test_a_death_by_signal_is_told_as_a_shell_would(host_monitor: HostMonitor, host: Host) -> None:
    host.event("exit", outcome="failed", phase="run", exit_code=None, signal=9, oom=True, reason="killed")
    assert (await look(host_monitor)).exit_code == 137


async def test_a_fallback_on_restore_is_told_with_its_reason(host_monitor: HostMonitor, host: Host) -> None:
    host.event("checkpoint_fallback", name="u9", reason="chunk is corrupt", next="u8")
    host.event("restored", name="u8", step=8, bytes=1, seconds=0.1, key="k")
    report = await look(host_monitor)
    assert report.resumed_from == "u8"
    assert report.fallbacks == (FailedRestore(name="u9", reason="chunk is corrupt", next="u8"),)
    assert report.notes == ()


async def test_a_notice_of_the_host_is_told_in_the_daemons_time(host_monitor: HostMonitor, host: Host) -> None:
    at = NOW + timedelta(minutes=2)
    host.beat("run", notice={"source": "file", "reason": "outbid", "at": text(at)})
    assert (await look(host_monitor)).notice_at == at


async def test_a_restarted_daemon_tells_nothing_twice(
    objects: FolderStore, host_monitor: HostMonitor, host: Host
) -> None:
    host.checkpoint("one", b"1")
    host.event("disk_low", free_mb=10)
    report = await look(host_monitor)
    owner = WORLD.jobs[ATTEMPT.job]

    item = replace(WORLD.attempts[ATTEMPT], read_at=NOW)
    later = replace(
        WORLD,
        jobs={owner.id: replace(owner, checkpoints=report.checkpoints)},
        attempts={ATTEMPT: item},
    )
    fresh = monitor(objects)
    again = await look(fresh, later)
    assert (again.checkpoints, again.notes) == ((), ())
    host.checkpoint("two", b"2")
    assert [c.name for c in (await look(fresh, later)).checkpoints] == ["two"]


async def test_attempts_that_no_longer_count_are_not_looked_at(host_monitor: HostMonitor) -> None:
    assert await host_monitor.read_hosts(world_with(AttemptState.ENDING)) == {}


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_threads_report_what_one_thread_would(objects: FolderStore, host: Host) -> None:
    host.beat("run")
    threaded = HostMonitor(objects, clock=Still(), wall=Still(), log=Log())
    assert (await threaded.read_hosts(WORLD))[ATTEMPT].seq == 0


async def test_a_report_counts_the_bytes_that_each_checkpoint_added_to_the_store(
    objects: FolderStore, host_monitor: HostMonitor, host: Host
) -> None:
    host.checkpoint("first", b"seven b")
    assert sum((await look(host_monitor)).uploads.values()) == 7
    host.checkpoint("second", b"seven b")
    host.checkpoint("third", b"another")
    first = await look(host_monitor)
    assert sorted(first.uploads.values()) == [0, 7]
    assert {saved.manifest_key for saved in first.checkpoints} == set(first.uploads)
    assert not (await look(host_monitor)).uploads


async def test_a_restarted_daemon_does_not_count_the_chunks_of_the_checkpoint_it_knows(
    objects: FolderStore, host_monitor: HostMonitor, host: Host
) -> None:
    host.checkpoint("first", b"seven b")
    saved = (await look(host_monitor)).checkpoints
    (job,) = WORLD.jobs.values()
    world = replace(WORLD, jobs={job.id: replace(job, checkpoints=saved)})
    again = monitor(objects)
    host.checkpoint("second", b"seven b")
    assert list((await look(again, world)).uploads.values()) == [0]


async def test_the_instants_of_its_host_come_with_a_report(host_monitor: HostMonitor, host: Host) -> None:
    host.beat("run", at=text(NOW - timedelta(minutes=3)))
    assert (await look(host_monitor)).alive_at == NOW - timedelta(minutes=3)
    host.exit()
    assert (await look(host_monitor)).exit_at == NOW


HOUR_BEHIND = timedelta(hours=1)


async def test_a_host_whose_clock_is_behind_lived_when_it_was_not_read_yet(objects: FolderStore, host: Host) -> None:
    clock = Still()
    host_monitor = HostMonitor(objects, clock=clock, wall=clock, log=Log(), inline=True, ticks=lambda: 0.0)
    clock.at = first = NOW + HOUR_BEHIND
    host.beat("run", at=text(NOW))
    assert (await look(host_monitor)).alive_at == NOW, "nothing shows yet whose clock it is"
    clock.at = first + timedelta(minutes=5)
    host.beat("run", at=text(NOW + timedelta(minutes=5)))
    assert (await look(host_monitor)).alive_at == first
    assert (await look(host_monitor)).alive_at == first, "a read without news changes nothing"
    host.exit()
    assert (await look(host_monitor)).exit_at == first - timedelta(minutes=5)


async def test_a_restarted_daemon_goes_by_the_last_read_before(objects: FolderStore, host: Host) -> None:
    clock = Still()
    clock.at = first = NOW + HOUR_BEHIND
    host.beat("run", at=text(NOW))
    (item,) = WORLD.attempts.values()
    read = replace(WORLD, attempts={ATTEMPT: replace(item, heartbeat_seq=0, read_at=first)})
    clock.at = first + timedelta(minutes=5)
    again = HostMonitor(objects, clock=clock, wall=clock, log=Log(), inline=True, ticks=lambda: 0.0)
    assert (await look(again, read)).alive_at == NOW, "the heartbeat is older than that read"
    host.beat("run", at=text(NOW + timedelta(minutes=5)))
    again = HostMonitor(objects, clock=clock, wall=clock, log=Log(), inline=True, ticks=lambda: 0.0)
    assert (await look(again, read)).alive_at == first


async def test_what_a_host_dates_by_a_right_clock_stays(objects: FolderStore, host: Host) -> None:
    clock = Still()
    host_monitor = HostMonitor(objects, clock=clock, wall=clock, log=Log(), inline=True, ticks=lambda: 0.0)
    host.beat("run", at=text(NOW))
    await look(host_monitor)
    clock.at = NOW + timedelta(hours=5)
    host.beat("run", at=text(NOW + timedelta(minutes=1)))
    assert (await look(host_monitor)).alive_at == NOW + timedelta(minutes=1), "it was read long after it was written"


@pytest.mark.parametrize("stated", [NOW - timedelta(days=20_000), NOW, datetime.max.replace(tzinfo=UTC)])
def test_no_stated_instant_is_moved_beyond_the_read(stated: datetime) -> None:
    for behind in (timedelta(seconds=1), timedelta(days=20_000), NOW - datetime.min.replace(tzinfo=UTC)):
        assert later(stated, behind, NOW) <= NOW
    assert later(stated, timedelta(0), NOW) == stated


GANG = replace(
    WORLD,
    jobs={
        i: replace(one, spec=replace(one.spec, replace_within=timedelta(minutes=10))) for i, one in WORLD.jobs.items()
    },
    attempts={
        i: replace(item, quote=replace(item.quote, offer=gang_of(item.quote.offer, 4)))
        for i, item in WORLD.attempts.items()
    },
)


async def test_words_of_machines_that_wait_count_once_they_are_written_again(objects: FolderStore, host: Host) -> None:
    clock = Still()
    host_monitor = HostMonitor(objects, clock=clock, wall=clock, log=Log(), inline=True, ticks=lambda: 0.0)
    host.beat("run")
    await look(host_monitor, GANG)
    for name in ("0-1", "0-2", "0-x", "12345678-1"):
        host.raw(f"waits/{name}.json", b"1")
    clock.at = NOW + timedelta(seconds=30)
    first = await look(host_monitor, GANG)
    assert (first.words, first.first_at, first.marker_at) == ((), NOW, None)
    host.raw("waits/0-2.json", b"22")
    at = clock.at = NOW + timedelta(seconds=45)
    second = await look(host_monitor, GANG)
    assert (second.words, second.first_at, second.marker_at) == (((0, 2, at, at),), NOW, at)
    clock.at = NOW + timedelta(seconds=60)
    assert (await look(host_monitor, GANG)).words == second.words
    host.raw("waits/0-2.json", b"333")
    later_at = clock.at = NOW + timedelta(seconds=75)
    assert (await look(host_monitor, GANG)).words == ((0, 2, at, later_at),)


async def test_two_objects_are_no_machine_that_writes_again_and_again(objects: FolderStore, host: Host) -> None:
    clock = Still()
    host_monitor = HostMonitor(objects, clock=clock, wall=clock, log=Log(), inline=True, ticks=lambda: 0.0)
    host.beat("run")
    await look(host_monitor, GANG)
    for size, name in enumerate(("0-1", "0-01", "00-1")):
        host.raw(f"waits/{name}.json", b"1" * size)
    for seconds in (30, 45, 60):
        clock.at = NOW + timedelta(seconds=seconds)
        found = await look(host_monitor, GANG)
        assert (found.words, found.marker_at) == ((), None)


@pytest.mark.parametrize("name", ["1-2", "0-0", "0-4"], ids=["another round", "the first one", "no machine"])
async def test_only_words_of_the_others_of_this_round_are_signs_of_life(
    objects: FolderStore, host: Host, name: str
) -> None:
    clock = Still()
    host_monitor = HostMonitor(objects, clock=clock, wall=clock, log=Log(), inline=True, ticks=lambda: 0.0)
    host.beat("run")
    await look(host_monitor, GANG)
    for number in range(3):
        host.raw(f"waits/{name}.json", b"1" * number)
        clock.at = NOW + timedelta(seconds=30 + number)
        found = await look(host_monitor, GANG)
        assert (found.words, found.marker_at) == ((), None)


async def test_no_words_are_listed_where_the_first_machine_speaks_or_no_one_is_replaced(
    objects: FolderStore, host: Host
) -> None:
    for world, seconds in ((GANG, 10), (WORLD, 60)):
        clock = Still()
        host_monitor = HostMonitor(objects, clock=clock, wall=clock, log=Log(), inline=True, ticks=lambda: 0.0)
        host.beat("run")
        await look(host_monitor, world)
        for number in range(3):
            host.raw("waits/0-2.json", b"1" * number)
            clock.at = NOW + timedelta(seconds=seconds + number)
            assert (await look(host_monitor, world)).words == ()
