"""Every number and instant that a host states is held to a range in which nothing computed from it can overflow."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from spotd.core.domain.intents import AttemptId, JobId
from spotd.core.domain.states import AttemptState
from spotd.daemon.hosts.host_reader import ReadMemory
from spotd.daemon.hosts.limits import TransferMeter
from spotd.daemon.hosts.reader import NOTICE_SPAN_MAX, read_host
from spotd_jobs.objects.folder import FolderStore, _info
from spotd_jobs.runner.main import BOOT_MAX
from spotd_jobs.runner.store import SEQ_PER_BOOT, Numbers
from spotd_jobs.wire.grant import INSTANT_MAX, INSTANT_MIN, WireError
from spotd_jobs.wire.manifest import AcceptedManifest, BadManifest, verify_manifest
from spotd_jobs.wire.reports import Heartbeat, HostEvent, parse_event, parse_heartbeat
from tests.unit.core.builders import NOW, world_with
from tests.unit.daemon.host import Host

JOB, ATTEMPT = "j1", 1
CENTURIES = timedelta(days=366 * 250)
HOSTILE = (
    "0", "-0", "-1", "1", "5e-324", "-5e-324", "1e308", "1e999", "-1e999", "NaN", "Infinity", "-Infinity",
    "1" + "0" * 400, "-1" + "0" * 400, "1" + "0" * 5000, "true", "false", "null", "[]", "{}", '"1"', '""', '"NaN"',
    '"0001-01-01T00:00:00Z"', '"1970-01-01T00:00:00Z"', '"9999-12-31T23:59:59.999999Z"', '"9999-12-31T23:59:59Z"',
    '"10000-01-01T00:00:00Z"', '"2026-11-21T10:00:00"', '"9999-12-31T23:59:59-14:00"', "253402300799",
    "9007199254740993", "18446744073709551616", "0.1", "1.5",
)  # fmt: skip


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(FolderStore(tmp_path), AttemptId(job=JobId(JOB), number=ATTEMPT))


def full_heartbeat(host: Host) -> dict[str, Any]:
    """A heartbeat in which every optional part is there."""
    at = "2026-11-21T10:00:00Z"
    seen = {"name": "c1", "step": 5, "at": at}
    gpu = {"index": 0, "name": "H100", "util_pct": 5.0, "mem_used_mb": 1.0, "mem_total_mb": 2.0}
    document: dict[str, Any] = json.loads(
        host.heartbeat(
            seen=seen,
            stored={**seen, "bytes": 10, "key": "jobs/j1/attempts/1/checkpoints/c1.json"},
            upload={"name": "c1", "bytes_done": 1, "bytes_total": 2, "bytes_per_s": 3, "queued": 0, "failing": None},
            restore={"name": "c0", "bytes_done": 1, "bytes_total": 2},
            gpus=[{**gpu, "power_w": 300.0, "temp_c": 30.0}],
            notice={"source": "imds", "reason": "spot", "at": at},
            exit={"outcome": "failed", "phase": "run", "exit_code": 3, "signal": 9, "oom": False, "reason": "r"},
        )
    )
    return document


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of every value in the document that is no container."""
    rows = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    if not isinstance(value, dict | list):
        yield path
    for key, inner in rows:
        yield from places(inner, (*path, key))


def with_value(document: dict[str, Any], path: tuple[Any, ...], literal: str) -> bytes:
    """The document as JSON with this text in the place of one value."""
    marker = "a-place-that-is-filled-in"
    copy = json.loads(json.dumps(document))
    inner = copy
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = marker
    return json.dumps(copy).encode().replace(f'"{marker}"'.encode(), literal.encode())


def assert_bounded(value: Any) -> None:
    """Whatever was accepted can be added up, subtracted and shifted by centuries without an error."""
    if isinstance(value, dict):
        for inner in value.values():
            assert_bounded(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            assert_bounded(inner)
    elif isinstance(value, datetime):
        assert INSTANT_MIN <= value <= INSTANT_MAX
        assert value + CENTURIES > value - CENTURIES
    elif isinstance(value, int | float):
        assert math.isfinite(value)
        assert abs(value) <= 2**63


def test_no_value_of_a_heartbeat_can_be_out_of_range(host: Host) -> None:
    document = full_heartbeat(host)
    accepted = 0
    for path in places(document):
        for literal in HOSTILE:
            try:
                beat = parse_heartbeat(with_value(document, path, literal), job_id=JOB, attempt=ATTEMPT)
            except WireError:
                continue
            accepted += 1
            assert_bounded(beat.model_dump(by_alias=True))
    assert accepted > 300


def test_no_value_of_an_event_can_be_out_of_range(host: Host) -> None:
    for kind, data in (
        ("disk_low", {"free_mb": 3}),
        ("checkpoint", {"name": "c", "step": 1, "bytes": 1, "uploaded_bytes": 1, "seconds": 0.5, "serial": 3}),
        ("exit", {"outcome": "failed", "phase": "run", "exit_code": 3, "signal": None, "oom": None, "reason": "r"}),
    ):
        document = {"schema": 1, "job": JOB, "attempt": ATTEMPT, "seq": 1, "at": "2026-11-21T10:00:00Z"}
        document |= {"kind": kind, "data": data}
        for path in places(document):
            for literal in HOSTILE:
                try:
                    event = parse_event(with_value(document, path, literal), job_id=JOB, attempt=ATTEMPT)
                except WireError:
                    continue
                assert_bounded(event.model_dump(by_alias=True))
                ended = event.exit()
                if ended is not None:
                    assert type(ended.exit_code) in {int, type(None)}
                    assert_bounded(ended.model_dump())


def test_no_value_of_a_manifest_can_be_out_of_range(host: Host) -> None:
    document = host.manifest("c1", b"weights")
    sizes = {chunk["key"]: chunk["size"] for chunk in document["files"][0]["chunks"]}

    class There:
        def __init__(self, size: int) -> None:
            self.size, self.sha256 = size, None

    for path in places(document):
        for literal in HOSTILE:
            data = with_value(document, path, literal)
            verdict = verify_manifest(data, JOB, ATTEMPT, lambda key: There(sizes.get(key, 0)))
            assert isinstance(verdict, AcceptedManifest | BadManifest)
            if isinstance(verdict, AcceptedManifest):
                assert_bounded([verdict.created_at, verdict.bytes, verdict.serial, verdict.step or 0])


def test_a_heartbeat_with_an_odd_figure_of_a_gpu_still_counts_and_the_figure_is_unknown(host: Host) -> None:
    document = full_heartbeat(host)
    for name in ("util_pct", "mem_used_mb", "mem_total_mb", "power_w", "temp_c"):
        for literal in ("NaN", "-1e300", "1e300", "1" + "0" * 400, "true", '"97"'):
            data = with_value(document, ("gpus", 0, name), literal)
            beat = parse_heartbeat(data, job_id=JOB, attempt=ATTEMPT)
            assert getattr(beat.gpus[0], name) is None


def test_a_heartbeat_of_a_host_whose_clock_is_centuries_off_still_counts(host: Host) -> None:
    for year in ("1900", "1970", "2300", "9999"):
        data = host.heartbeat(at=f"{year}-12-31T23:59:59Z")
        assert parse_heartbeat(data, job_id=JOB, attempt=ATTEMPT).phase == "run"


def test_two_heartbeats_a_breath_apart_give_a_rate_that_is_a_number(host: Host) -> None:
    meter = TransferMeter()
    for up_s, done in ((1.0, 0), (1.0 + 5e-324, 10**15), (math.nextafter(1.0, 2), 10**15), (1.0006, 10**15)):
        upload = {"name": "c", "bytes_done": done, "bytes_total": 10**15, "bytes_per_s": 0}
        data = host.heartbeat(up_s=up_s, upload={**upload, "queued": 0, "failing": None})
        meter.take(parse_heartbeat(data, job_id=JOB, attempt=ATTEMPT))
        assert meter.now is not None
        assert meter.now.rate is None or 0 <= meter.now.rate <= 10**15


@pytest.mark.parametrize("stated", ["0001-01-01T00:00:00Z", "9999-12-31T23:59:59Z", "2150-01-01T00:00:00Z"])
@pytest.mark.parametrize("speed", [1, 10_000])
def test_a_notice_for_a_year_far_away_is_never_far_from_now(stated: str, speed: int, tmp_path: Path) -> None:
    world = world_with(AttemptState.RUNNING)
    ((attempt_id, attempt),) = world.attempts.items()
    host = Host(FolderStore(tmp_path), attempt_id)
    host.beat(notice={"source": "s", "reason": "r", "at": stated})

    def virtual(real: datetime) -> datetime:
        try:
            return NOW + (real - NOW) * speed
        except OverflowError:
            return NOW

    report = read_host(host.objects, ReadMemory(), attempt, world.jobs[attempt_id.job], at=NOW, dated=virtual)
    assert report.notice_at is not None
    assert abs(report.notice_at - NOW) <= NOTICE_SPAN_MAX


def test_the_types_of_the_wire_hold_no_unbounded_number() -> None:
    """A field that is added later must not be a bare number or instant."""
    for model in (Heartbeat, HostEvent):
        schema = json.dumps(model.model_json_schema())
        for part in schema.split("{"):
            if '"const"' not in part and ('"type": "integer"' in part or '"type": "number"' in part):
                assert "aximum" in part, part
                assert "inimum" in part, part


@pytest.mark.parametrize("seconds", [-1e18, -1.0, 0.0, 253402300800.0, 1e12, 9.3e18])
def test_a_file_of_any_time_of_change_is_listed(seconds: float, tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"x")
    found = (tmp_path / "f").lstat()
    odd = os.stat_result((*found[:7], 0, seconds, 0), {"st_mtime": seconds, "st_mtime_ns": int(seconds * 1e9)})
    assert datetime(1970, 1, 1, tzinfo=UTC) <= _info("f", odd).modified <= INSTANT_MAX


@pytest.mark.long
def test_numbers_of_a_runner_never_repeat_and_their_names_keep_their_order() -> None:
    boot = 1_764_000_000
    numbers = Numbers(boot)
    taken = [numbers.take() for _ in range(SEQ_PER_BOOT + 5)]
    assert len(set(taken)) == len(taken)
    names = [f"{number:016d}" for number in (taken[0], taken[-1], Numbers(boot + 30).take())]
    assert names == sorted(names)
    assert len(f"{Numbers(BOOT_MAX).take():016d}") == 16
    assert Numbers(BOOT_MAX).take() < 2**53
