"""Writes what a runner would write, into the store of a test."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from spotd.core.domain.intents import AttemptId
from spotd.daemon import object_keys
from spotd_jobs.objects.api import ObjectStore
from spotd_jobs.wire.grant import attempt_prefix
from spotd_jobs.wire.manifest import checkpoint_prefix
from tests.unit.core.builders import NOW


def text(at: datetime) -> str:
    return at.astimezone(UTC).isoformat().replace("+00:00", "Z")


class Host:
    """One attempt's runner, as far as the store can tell."""

    def __init__(self, objects: ObjectStore, attempt: AttemptId, now: Callable[[], datetime] = lambda: NOW) -> None:
        self.objects = objects
        self._now = now
        self.attempt = attempt
        self.seq = -1
        self._events = 0
        self._logs = 0
        self._serial = 0

    def beat(self, phase: str = "run", **changes: Any) -> None:
        self.raw("heartbeat.json", self.heartbeat(phase, **changes))

    def heartbeat(self, phase: str = "run", **changes: Any) -> bytes:
        """The next one, not yet stored."""
        self.seq += 1
        document: dict[str, Any] = {
            "schema": 1,
            "job": self.attempt.job,
            "attempt": self.attempt.number,
            "seq": self.seq,
            "boot": 0,
            "at": text(self._now()),
            "phase": phase,
            "pid": 4711,
            "up_s": 1.0,
            "runner": "0.1.0",
            "grant_issued_at": text(self._now()),
            "order_checkpoint": 0,
            "seen": None,
            "stored": None,
            "upload": {
                "name": None,
                "bytes_done": 0,
                "bytes_total": 0,
                "bytes_per_s": 0,
                "queued": 0,
                "failing": None,
            },
            "restore": None,
            "gpus": [],
            "host": {
                "cpus": 8,
                "load1": 0.5,
                "mem_total_mb": 1000,
                "mem_available_mb": 900,
                "disk_total_mb": 1000,
                "disk_free_mb": 900,
            },
            "notice": None,
            "exit": None,
        }
        return json.dumps({**document, **changes}).encode()

    def raw(self, name: str, data: bytes) -> None:
        """Any bytes at any place this host may write."""
        self.objects.put(attempt_prefix(self.attempt.job, self.attempt.number) + name, data)

    def event(self, kind: str, **data: Any) -> None:
        self._events += 1
        document = {
            "schema": 1,
            "job": self.attempt.job,
            "attempt": self.attempt.number,
            "seq": self._events,
            "at": text(self._now()),
            "kind": kind,
            "data": data,
        }
        self.raw(f"events/{self._events:016d}.json", json.dumps(document).encode())

    def exit(
        self,
        outcome: str = "succeeded",
        *,
        code: int | None = 0,
        reason: str = "it is over",
        waits: bool = False,
    ) -> None:
        more = {"waits": True} if waits else {}
        self.event("exit", outcome=outcome, phase="run", exit_code=code, signal=None, oom=None, reason=reason, **more)

    def log(self, content: str | bytes) -> None:
        self._logs += 1
        self.raw(f"log/{self._logs:016d}", content if isinstance(content, bytes) else content.encode())

    def manifest(self, name: str, content: bytes, *, serial: int | None = None, **changes: Any) -> dict[str, Any]:
        self._serial = self._serial + 1 if serial is None else serial
        digest = hashlib.sha256(content).hexdigest()
        key = f"{object_keys.data_prefix(self.attempt)}{digest}"
        entry = {
            "path": f"{name}/weights",
            "type": "file",
            "size": len(content),
            "mode": 0o644,
            "mtime_ns": 0,
            "target": None,
            "chunks": [{"key": key, "sha256": digest, "size": len(content)}],
        }
        document = {
            "schema": 1,
            "kind": "checkpoint",
            "job": self.attempt.job,
            "attempt": self.attempt.number,
            "name": name,
            "serial": self._serial,
            "step": self._serial,
            "created_at": text(self._now()),
            "bytes": len(content),
            "files": [entry],
            "previous": None,
        }
        return {**document, **changes}

    def checkpoint(self, name: str, content: bytes = b"weights", *, chunks: bool = True, **changes: Any) -> None:
        """A checkpoint as the runner publishes it; without its chunks, one that lies."""
        document = self.manifest(name, content, **changes)
        if chunks:
            self.raw(f"data/{hashlib.sha256(content).hexdigest()}", content)
        self.objects.put(
            f"{checkpoint_prefix(self.attempt.job, self.attempt.number)}{name}.json", json.dumps(document).encode()
        )

    def outputs(self, path: str, content: bytes) -> None:
        document = self.manifest("outputs", content, kind="outputs")
        document["files"][0]["path"] = path
        self.raw(f"data/{hashlib.sha256(content).hexdigest()}", content)
        self.raw("outputs/manifest.json", json.dumps(document).encode())

    def many_outputs(self, files: dict[str, bytes]) -> None:
        """Small files that share one chunk, as the runner stores them."""
        content = b"".join(files.values())
        name = hashlib.sha256(content).hexdigest() + "-0123abcd"
        rows: list[dict[str, Any]] = []
        place = 0
        for path, data in files.items():
            piece = [0, place, len(data)]
            rows.append({"path": path, "type": "file", "size": len(data), "mode": 420, "pieces": [piece]})
            place += len(data)
        document = {
            **self.manifest("outputs", b"", kind="outputs"),
            "schema": 2,
            "entry": "outputs",
            "bytes": len(content),
            "chunks": [[name, len(content)]],
            "files": rows,
        }
        self.raw(f"data/{name}", content)
        self.raw("outputs/manifest.json", json.dumps(document).encode())
