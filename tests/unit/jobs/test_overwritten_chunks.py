"""A machine that lives on, with leave to write that has not run out, writes over all that it ever sent.

No checkpoint of a later attempt consists of any of that. Its own are lost in a bucket that keeps no versions, and given
back as they were by one that does. In both, what is restored is what was saved.
"""

from __future__ import annotations

import hashlib
import json
import uuid
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from spotd.core.domain.jobs import Checkpoint, Job
from spotd.daemon.grants.inputs import RestorePoints
from spotd_jobs.objects.s3 import Findings, S3Store
from spotd_jobs.objects.s3_client import S3Place
from spotd_jobs.runner.restore import Restored, RestoreRun
from spotd_jobs.wire.client import web
from spotd_jobs.wire.client.sinks_s3 import PostSink
from tests.fakes.seaweed import Weed
from tests.unit.core.builders import NOW, job

LIMIT = 1 << 20


def soon() -> datetime:
    return datetime.now(UTC) + timedelta(hours=1)


class Story:
    """A job of two attempts: the first saves twice, the second once, and sends again what has not changed."""

    def __init__(self, store: S3Store, job_: Job) -> None:
        self.store, self.job = store, job_
        self.sinks = {number: self._sink(number) for number in (1, 2)}
        self.chunks: dict[tuple[int, str], dict[str, Any]] = {}
        for number, content in (
            (1, "embedding"),
            (1, "head at 100"),
            (1, "frozen"),
            (1, "head at 200"),
            (2, "frozen"),
            (2, "head at 300"),
        ):
            self._chunk(number, content)
        saved = [
            self._save(1, "ck-100", ["embedding", "head at 100"]),
            self._save(1, "ck-200", ["frozen", "head at 200"]),
            self._save(2, "ck-300", ["frozen", "head at 300"]),
        ]
        self.job = replace(job_, checkpoints=tuple(reversed(saved)), attempts_made=2)

    def _prefix(self, number: int) -> str:
        return f"jobs/{self.job.id}/attempts/{number}/"

    def _sink(self, number: int) -> PostSink:
        grant = self.store.grant_upload(self._prefix(number), expires=soon(), size_max=LIMIT)
        return PostSink(dict(grant.fields))

    def _chunk(self, number: int, content: str) -> None:
        data = content.encode()
        digest = hashlib.sha256(data).hexdigest()
        self.sinks[number].put(f"data/{digest}", data, digest)
        self.chunks[number, content] = {
            "key": f"{self._prefix(number)}data/{digest}",
            "sha256": digest,
            "size": len(data),
        }

    def _save(self, number: int, name: str, contents: list[str]) -> Checkpoint:
        files = [
            {
                "path": f"{name}/{content.replace(' ', '-')}",
                "type": "file",
                "size": len(content),
                "mode": 0o644,
                "mtime_ns": 0,
                "target": None,
                "chunks": [self.chunks[number, content]],
            }
            for content in contents
        ]
        size = sum(len(content) for content in contents)
        document = {
            "schema": 1,
            "kind": "checkpoint",
            "job": self.job.id,
            "attempt": number,
            "name": name,
            "serial": int(name[3:]),
            "step": int(name[3:]),
            "created_at": "2026-11-21T12:00:00Z",
            "bytes": size,
            "files": files,
            "previous": None,
        }
        data = json.dumps(document).encode()
        self.sinks[number].put(f"checkpoints/{name}.json", data)
        return Checkpoint(
            name=name,
            attempt=number,
            step=int(name[3:]),
            bytes=size,
            at=NOW,
            manifest_key=f"{self._prefix(number)}checkpoints/{name}.json",
            sha256=hashlib.sha256(data).hexdigest(),
        )

    def zombie_writes_over(self, *names: str) -> None:
        """By the first attempt's own grant, as it was given out."""
        for name in names:
            if (1, name) in self.chunks:
                self.sinks[1].put(f"data/{self.chunks[1, name]['sha256']}", b"spoilt!")
            else:
                self.sinks[1].put(f"checkpoints/{name}.json", b"{}")

    def resume(self, folder: Path) -> tuple[Restored | None, list[str]]:
        """What a third attempt restores, and what it passed over."""
        folder.mkdir()
        offers = [offer.model_dump(mode="json") for offer in RestorePoints(self.store, soon()).restores(self.job)]
        restore = RestoreRun(lambda: offers, str(folder), 2, lambda _s: False, lambda: False, lambda: True)
        found = restore.run()
        return found, [fallback.name for fallback in restore.fallbacks]


def story(place: S3Place, findings: Findings) -> Story:
    place = replace(place, prefix=f"{place.prefix}{uuid.uuid4().hex}/")
    return Story(S3Store(place, findings=findings), job())


def content(found: Restored | None) -> dict[str, str]:
    assert found is not None
    return {path.name: path.read_text() for path in Path(found.path).iterdir()}


def test_without_a_zombie_the_newest_is_resumed(weed: Weed, findings: Findings, tmp_path: Path) -> None:
    found, passed_over = story(weed.place(), findings).resume(tmp_path / "ck")
    assert content(found) == {"frozen": "frozen", "head-at-300": "head at 300"}
    assert passed_over == []


def test_a_bucket_with_versions_gives_back_what_was_there_first(
    versioned: S3Place, findings: Findings, tmp_path: Path
) -> None:
    told = story(versioned, findings)
    told.zombie_writes_over("frozen", "head at 200", "embedding", "head at 100", "ck-100", "ck-200")
    found, passed_over = told.resume(tmp_path / "ck")
    assert content(found) == {"frozen": "frozen", "head-at-300": "head at 300"}
    assert passed_over == []
    told.job = replace(told.job, checkpoints=told.job.checkpoints[1:])
    older, _ = told.resume(tmp_path / "older")
    assert content(older) == {"frozen": "frozen", "head-at-200": "head at 200"}, "its manifest was written over, too"


def test_a_bucket_without_versions_falls_back_to_what_was_not_spoilt(
    weed: Weed, findings: Findings, tmp_path: Path
) -> None:
    told = story(weed.place(), findings)
    told.zombie_writes_over("frozen")
    older = replace(told.job, checkpoints=told.job.checkpoints[1:])
    newest, told.job = told.job, older
    found, passed_over = told.resume(tmp_path / "older")
    assert content(found) == {"embedding": "embedding", "head-at-100": "head at 100"}
    assert passed_over == ["ck-200"]
    told.job = newest
    told.zombie_writes_over("frozen", "head at 200", "embedding", "head at 100", "ck-100", "ck-200")
    found, passed_over = told.resume(tmp_path / "ck")
    assert content(found) == {"frozen": "frozen", "head-at-300": "head at 300"}
    assert passed_over == [], "nothing of a later attempt can be spoilt by an earlier one"


def test_a_manifest_written_over_is_left_out(weed: Weed, findings: Findings, tmp_path: Path) -> None:
    told = story(weed.place(), findings)
    told.job = replace(told.job, checkpoints=told.job.checkpoints[1:])
    told.zombie_writes_over("ck-200")
    found, passed_over = told.resume(tmp_path / "ck")
    assert content(found) == {"embedding": "embedding", "head-at-100": "head at 100"}
    assert passed_over == [], "it was not even offered"


@pytest.fixture(autouse=True)
def no_connection_outlives_a_test() -> Iterator[None]:
    yield
    web.drop_connections()
