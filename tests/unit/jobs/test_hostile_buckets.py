"""What a host can write into a bucket beyond plain objects is counted, and keeps nothing from being deleted."""

from __future__ import annotations

import uuid
from dataclasses import replace
from typing import Any

import pytest

from spotd.core.domain.intents import AttemptId
from spotd.core.domain.states import AttemptState, JobState
from spotd.daemon.garbage import sweep
from spotd.daemon.hosts.limits import FloodLimits, count
from spotd_jobs.objects.s3 import Findings, S3Store
from spotd_jobs.objects.s3_client import S3Place
from tests.fakes.seaweed import Weed
from tests.unit.core.builders import NOW, job, world_with

KB = 1_000
(RUNNING,) = world_with(AttemptState.RUNNING).attempts.values()
DATA = f"jobs/{RUNNING.id.job}/attempts/1/data/"


class Bucket:
    """A prefix that is this test's alone, and what any S3 client may write there."""

    def __init__(self, weed: Weed, place: S3Place, findings: Findings) -> None:
        self.place = replace(place, prefix=f"{place.prefix}{uuid.uuid4().hex}/")
        self.objects = S3Store(self.place, findings=findings)
        self.client: Any = weed.owner()

    def put(self, key: str, data: bytes = b"x") -> None:
        self.client.put_object(Bucket=self.place.bucket, Key=self.place.prefix + key, Body=data)

    def names(self) -> list[str]:
        return [info.key for info in self.objects.list(f"jobs/{RUNNING.id.job}/")]


@pytest.fixture
def plain(weed: Weed, findings: Findings) -> Bucket:
    return Bucket(weed, weed.place(), findings)


def test_an_object_that_is_written_over_counts_each_time(weed: Weed, versioned: S3Place, findings: Findings) -> None:
    bucket = Bucket(weed, versioned, findings)
    for number in range(12):
        bucket.put(f"{DATA}one", bytes([number]) * KB)
    limits = FloodLimits(bytes_day=5 * KB)
    assert sum(info.size for info in bucket.objects.list(DATA)) == KB
    assert "bytes" in count(bucket.objects, RUNNING, limits, at=NOW).flood
    assert count(bucket.objects, RUNNING, FloodLimits(bytes_day=12 * KB), at=NOW).flood == ""


def test_parts_of_an_upload_that_was_never_completed_count(plain: Bucket) -> None:
    full = f"{plain.place.prefix}{DATA}large"
    upload = plain.client.create_multipart_upload(Bucket=plain.place.bucket, Key=full)["UploadId"]
    for number in (1, 2):
        plain.client.upload_part(
            Bucket=plain.place.bucket, Key=full, UploadId=upload, PartNumber=number, Body=b"x" * 6 * KB
        )
    assert list(plain.objects.list(DATA)) == []
    assert "bytes" in count(plain.objects, RUNNING, FloodLimits(bytes_day=10 * KB), at=NOW).flood


@pytest.mark.parametrize(
    "name",
    [".spotd-x", "\x01", "\ufffe", "a b+c%2F&<>", "\U000e0041", "carriage\rreturn", "tab\there"],
    ids=["temporary", "control", "noncharacter", "escapes", "tag", "return", "tab"],
)
def test_a_name_that_no_list_of_keys_can_carry_keeps_no_garbage(plain: Bucket, name: str) -> None:
    for key in (f"{DATA}a", f"{DATA}{name}", f"{DATA}z"):
        plain.put(key)
    assert f"{DATA}{name}" in plain.names()
    done = sweep(plain.objects, job(attempts_made=1, state=JobState.FAILED), frozenset())
    assert (plain.names(), done.objects, done.clean) == ([], 3, frozenset({AttemptId(job=RUNNING.id.job, number=1)}))


def test_a_listing_goes_on_behind_a_key(plain: Bucket) -> None:
    for name in ("a", "b", "c", "d"):
        plain.put(f"{DATA}{name}")
    found = [info.key for info in plain.objects.list_after(DATA, f"{DATA}b", page=1)]
    assert found == [f"{DATA}c", f"{DATA}d"]
