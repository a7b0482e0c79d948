"""How far a checkpoint has come, as `ls`, `show` and `logs` tell it from a host's heartbeats."""

from __future__ import annotations

from typing import Any

import pytest

from spotd.api.handlers.logs import POLLS_BETWEEN, _TransferReports
from spotd.api.requests import JobQuery, LogQuery
from spotd.daemon.hosts.limits import LEFT_S_MAX, HostTransfer, TransferKind, TransferMeter
from tests.unit.daemon.host import Host
from tests.unit.daemon.rig import Rig

pytestmark = pytest.mark.anyio
MB = 1_000_000


def uploading(done: int, *, sent_per_s: int = 0, **changes: Any) -> dict[str, Any]:
    row = {"name": "c1", "bytes_done": done, "bytes_total": 100 * MB, "bytes_per_s": sent_per_s, "queued": 0}
    return {**row, "failing": None, **changes}


def restoring(done: int) -> dict[str, Any]:
    return {"name": "c1", "bytes_done": done, "bytes_total": 100 * MB}


class Beats:
    """Heartbeats of one host, straight into a meter."""

    def __init__(self, rig: Rig) -> None:
        from spotd.core.domain.intents import AttemptId, JobId
        from spotd_jobs.wire.reports import parse_heartbeat

        self.meter = TransferMeter()
        self._rig = rig
        self._parse = parse_heartbeat
        self._host = Host(rig.objects, AttemptId(job=JobId("j1"), number=1))

    def __call__(self, up_s: float, phase: str = "run", **changes: Any) -> HostTransfer | None:
        self._host.beat(phase, up_s=up_s, **changes)
        data = self._rig.objects.get("jobs/j1/attempts/1/heartbeat.json", bytes_max=100_000)
        self.meter.take(self._parse(data, job_id="j1", attempt=1))
        return self.meter.now


@pytest.fixture
def beats(rig: Rig) -> Beats:
    return Beats(rig)


def test_the_first_heartbeat_has_only_what_the_host_says_of_its_rate(beats: Beats) -> None:
    at = beats(10.0, upload=uploading(20 * MB, sent_per_s=4 * MB))
    assert at is not None
    assert (at.kind, at.name, at.done, at.rate, at.left_s) == (TransferKind.UPLOAD, "c1", 20 * MB, 4 * MB, 20.0)
    at = Beats(beats._rig)(10.0, "restore", restore=restoring(20 * MB))
    assert at is not None
    assert (at.kind, at.rate, at.left_s) == (TransferKind.RESTORE, None, None)


def test_later_ones_tell_the_rate_by_what_lies_between_them(beats: Beats) -> None:
    beats(10.0, upload=uploading(0))
    at = beats(14.0, upload=uploading(40 * MB, sent_per_s=1))
    assert at is not None
    assert (at.rate, at.left_s) == (10 * MB, 6.0), "chunks that the store had count as progress too"


def test_the_rate_is_that_of_the_last_few_heartbeats(beats: Beats) -> None:
    for second in range(10):
        beats(float(second), "restore", restore=restoring(0))
    at = None
    for second in range(10, 20):
        at = beats(float(second), "restore", restore=restoring((second - 9) * 5 * MB))
    assert at is not None
    assert at.rate == 5 * MB


@pytest.mark.parametrize(
    "change", [{"upload": uploading(MB, name="c2")}, {"upload": uploading(MB), "boot": 1}, {"upload": uploading(MB)}]
)
def test_another_transfer_is_measured_from_its_own_beginning(beats: Beats, change: dict[str, Any]) -> None:
    beats(1.0, upload=uploading(0))
    beats(2.0, upload=uploading(90 * MB))
    at = beats(3.0, **change)
    assert at is not None
    assert (at.done, at.rate) == (MB, None)


def test_nothing_moves_between_transfers_and_after_the_end(beats: Beats) -> None:
    beats(1.0, upload=uploading(MB))
    assert beats(2.0) is None
    assert beats(3.0, "run", restore=restoring(100 * MB)) is None
    over = {"outcome": "failed", "phase": "run", "exit_code": 1, "signal": None, "oom": None, "reason": "x"}
    assert beats(4.0, "done", upload=uploading(MB), exit=over) is None


@pytest.mark.parametrize("up_s", [1.0, 0.5], ids=["the same instant", "an earlier one"])
def test_a_host_whose_clock_stands_or_runs_back_gets_no_absurd_rate(beats: Beats, up_s: float) -> None:
    beats(1.0, upload=uploading(0))
    at = beats(up_s, upload=uploading(50 * MB))
    assert at is not None
    assert at.rate is None


def test_what_would_take_for_ever_is_bounded(beats: Beats) -> None:
    beats(1.0, upload=uploading(0, bytes_total=10**15))
    at = beats(2.0, upload=uploading(1, bytes_total=10**15))
    assert at is not None
    assert at.left_s == LEFT_S_MAX


async def test_ls_show_and_json_tell_of_the_transfer_while_it_lasts(rig: Rig) -> None:
    async with rig.ready():
        name = await rig.submit()
        host = await rig.until_running(name, 1)
        host.beat("run", up_s=10.0, upload=uploading(0))
        await rig.until(lambda: rig.attempts(name)[-1].heartbeat_seq == host.seq)
        host.beat("run", up_s=12.0, upload=uploading(50 * MB, queued=1))
        await rig.until(lambda: rig.attempts(name)[-1].heartbeat_seq == host.seq)
        listed = (await rig.handlers().jobs.page(JobQuery()))["jobs"][0]["transfer"]
        assert listed is not None
        assert (listed["bytes_per_s"], listed["seconds_left"], listed["queued"]) == (25 * MB, 2.0, 1)
        assert (await rig.handlers().jobs.detail(name))["job"]["transfer"] == listed
        host.beat("run", up_s=13.0)
        await rig.until(lambda: rig.attempts(name)[-1].heartbeat_seq == host.seq)
        assert (await rig.handlers().jobs.detail(name))["job"]["transfer"] is None


async def test_a_followed_log_tells_of_a_transfer_that_takes_a_while(rig: Rig) -> None:
    async with rig.ready():
        name = await rig.submit()
        host = await rig.until_running(name, 1)
        host.beat("run", up_s=10.0, upload=uploading(0))
        await rig.until(lambda: rig.attempts(name)[-1].heartbeat_seq == host.seq)
        host.beat("run", up_s=12.0, upload=uploading(10 * MB))
        await rig.until(lambda: rig.attempts(name)[-1].heartbeat_seq == host.seq)
        seen: list[str] = []
        async for record in rig.handlers().logs.stream(name, LogQuery(follow=True)):
            if record["kind"] == "transfer" and not seen:
                seen.append(record["text"])
                host.exit("succeeded")
        assert seen == ["upload of c1: 10 of 100 MB, 5.0 MB/s, 18 s left"]
        assert [r["kind"] async for r in rig.handlers().logs.stream(name, LogQuery())] == ["end"]


def test_a_log_is_told_seldom_and_of_nothing_quick() -> None:
    def at(name: str, left_s: float | None) -> HostTransfer:
        rate = None if left_s is None else MB
        return HostTransfer(kind=TransferKind.UPLOAD, name=name, done=1, total=2, rate=rate, left_s=left_s)

    moving = _TransferReports()
    assert [bool(moving.sentence(t)) for t in (None, at("a", None), at("a", 4.0), at("a", 60.0))] == [False] * 3 + [
        True
    ]
    told = [bool(moving.sentence(at("a", 30.0))) for _ in range(2 * POLLS_BETWEEN)]
    assert told.count(True) == 2
    assert moving.sentence(at("b", 60.0))
