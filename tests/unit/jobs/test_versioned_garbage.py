"""Garbage collection in a bucket that keeps versions: what it deletes is gone from every listing, and stays gone."""

from __future__ import annotations

import hashlib
import uuid
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from spotd.core.domain.intents import AttemptId
from spotd.core.domain.jobs import Checkpoint, Job
from spotd.daemon.garbage import Swept, sweep
from spotd.daemon.grants.inputs import RestorePoints
from spotd_jobs.objects.api import ObjectMissing
from spotd_jobs.objects.s3 import Findings, S3Store
from spotd_jobs.objects.s3_client import S3Place
from spotd_jobs.wire.client import web
from spotd_jobs.wire.client.sinks import WINDOW
from spotd_jobs.wire.manifest import checkpoint_prefix
from tests.fakes.seaweed import Weed
from tests.unit.core.builders import NOW, job
from tests.unit.daemon.host import Host

MUCH = 1_000_000
AT_ONCE = timedelta(seconds=-60)
"""The store's dates have whole seconds: everything counts as old."""
FIRST = AttemptId(job=job().id, number=1)


class Stored:
    """A job whose first attempt has saved often, in a store that is this test's alone."""

    def __init__(self, versioned: S3Place, findings: Findings, saves: int) -> None:
        self.place = replace(versioned, prefix=f"{versioned.prefix}{uuid.uuid4().hex}/")
        self.objects = S3Store(self.place, findings=findings)
        self.host = Host(self.objects, FIRST)
        saved = [self._save(number) for number in range(1, saves + 1)]
        self.job: Job = job(attempts_made=1, checkpoints=tuple(reversed(saved))[:2])

    def _save(self, number: int) -> Checkpoint:
        name, content = f"ck-{number}", f"weights at {number}".encode()
        self.host.checkpoint(name, content)
        key = f"{checkpoint_prefix(FIRST.job, 1)}{name}.json"
        digest = hashlib.sha256(self.objects.get(key, bytes_max=MUCH)).hexdigest()
        return Checkpoint(
            name=name, attempt=1, step=number, bytes=len(content), at=NOW, manifest_key=key, sha256=digest
        )

    def sweep(self, *open_attempts: int) -> Swept:
        return sweep(self.objects, self.job, frozenset(open_attempts), settled=AT_ONCE)

    def names(self) -> list[str]:
        return [info.key for info in self.objects.list("")]

    def contents(self) -> list[bytes]:
        """What a machine that begins now is offered, read by the very URLs, newest first."""
        offered = RestorePoints(self.objects, datetime.now(UTC) + timedelta(hours=1)).restores(self.job)
        found = []
        for offer in offered:
            assert web.request("GET", offer.manifest.url)[0] == 200
            found += [web.request("GET", url)[2] for url in offer.chunks.values()]
        return found


def markers(weed: Weed, stored: Stored) -> tuple[int, int]:
    """How many keys are hidden by a delete marker, and how many versions the bucket still holds."""
    owner: Any = weed.owner()
    listed = owner.list_object_versions(Bucket=stored.place.bucket, Prefix=stored.place.prefix)
    owner.close()
    hidden = [one for one in listed.get("DeleteMarkers", ()) if one["IsLatest"]]
    return len(hidden), len(listed.get("Versions", ()))


def test_what_a_running_attempt_left_behind_is_gone_and_what_is_kept_can_be_restored(
    weed: Weed, versioned: S3Place, findings: Findings
) -> None:
    saves = WINDOW + 4
    stored = Stored(versioned, findings, saves)
    before = stored.names()
    done = stored.sweep(1)
    gone = sorted(set(before) - set(stored.names()))
    # Dates of whole seconds tell nobody which of the others are the newest, and those stay.
    assert 4 <= done.objects == len(gone) <= 2 * (saves - 2)
    assert markers(weed, stored) == (len(gone), 2 * saves), "the bucket itself has lost nothing"
    assert stored.objects.head(gone[0]) is None
    with pytest.raises(ObjectMissing):
        stored.objects.get(gone[0], bytes_max=MUCH)
    again = stored.sweep(1)
    assert markers(weed, stored) == (len(gone) + again.objects, 2 * saves), "what is hidden is not garbage again"
    assert stored.contents() == [f"weights at {number}".encode() for number in (saves, saves - 1)]


def test_what_an_ended_attempt_left_behind_is_gone_with_its_grant(
    weed: Weed, versioned: S3Place, findings: Findings
) -> None:
    stored = Stored(versioned, findings, 4)
    stored.host.raw("grant.json", b"with secrets")
    done = stored.sweep()
    assert done.objects == 4
    assert len(stored.names()) == 4
    assert not any(key.endswith("grant.json") for key in stored.names())
    assert stored.sweep().objects == 0
    assert stored.contents() == [b"weights at 4", b"weights at 3"]


def test_a_manifest_that_was_written_over_does_not_hold_the_collection_up(
    weed: Weed, versioned: S3Place, findings: Findings
) -> None:
    stored = Stored(versioned, findings, 4)
    stored.objects.put(stored.job.checkpoints[0].manifest_key, b"{}")
    assert stored.sweep().objects == 4
    assert stored.contents() == [b"weights at 4", b"weights at 3"], "by what it said when it was accepted"
