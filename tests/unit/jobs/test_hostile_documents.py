"""Whatever bytes a host writes where a document is expected: refused in words, or understood; never anything else."""

from __future__ import annotations

import json
import random
import resource
from pathlib import Path

import pytest

from spotd.core.domain.intents import AttemptId
from spotd.core.domain.states import AttemptState
from spotd.daemon import object_keys
from spotd_jobs.objects.folder import FolderStore
from spotd_jobs.wire.grant import WireError
from spotd_jobs.wire.manifest import AcceptedManifest, BadManifest, verify_manifest
from spotd_jobs.wire.reports import Heartbeat, HostEvent, parse_event, parse_heartbeat
from tests.unit.core.builders import world_with
from tests.unit.daemon.host import Host

((ATTEMPT, _),) = world_with(AttemptState.RUNNING).attempts.items()
RSS_GROWTH_MAX_MB = 200
TOKENS = (
    b"null",
    b"true",
    b"-1",
    b"1e999",
    b"NaN",
    b"Infinity",
    b"9" * 400,
    b'"\\u0000"',
    b'"\\ud800"',
    b'"../../etc"',
    b'"/"',
    b'"C:\\\\x"',
    b"[]",
    b"{}",
    b"[" * 3000,
    b'{"a":' * 2000,
    b'"' + b"x" * 5000 + b'"',
    b'"\\u202e"',
    b"\xff\xfe",
    b"\x00",
    b'"jobs/other/attempts/1/data/' + b"0" * 64 + b'"',
    b'"link"',
    b'"dir"',
    b'"a/../b"',
    b"1.5",
    b'"NaN"',
)


def seeds(folder: Path) -> list[tuple[str, bytes]]:
    """One good document of each kind."""
    objects = FolderStore(folder)
    host = Host(objects, ATTEMPT)
    host.beat("run")
    host.event("checkpoint", name="a", bytes=1, seconds=0.5, key="k", serial=1)
    host.exit("failed", code=3)
    host.checkpoint("a", b"weights")
    prefix = object_keys.prefix_of(ATTEMPT)
    names = {"heartbeat.json": "heartbeat", "events/": "event", "checkpoints/": "manifest"}
    found = []
    for info in objects.list(prefix):
        kind = next((kind for name, kind in names.items() if info.key.startswith(prefix + name)), "")
        if kind:
            found.append((kind, objects.get(info.key, bytes_max=1 << 20)))
    assert len(found) == 4
    return found


def mutated(rng: random.Random, data: bytes) -> bytes:
    """One to four changes: bytes flipped, cut, doubled, or a value swapped for something nobody expects."""
    for _ in range(rng.randint(1, 4)):
        at, end = sorted((rng.randrange(len(data) + 1), rng.randrange(len(data) + 1)))
        match rng.randrange(6):
            case 0:
                data = data[:at] + bytes([rng.randrange(256)]) + data[at + 1 :]
            case 1:
                data = data[:at] + data[end:]
            case 2:
                data = data[:end] + data[at:]
            case 3:
                data = data[:at] + rng.choice(TOKENS) + data[at:]
            case _:
                data = _swapped(rng, data)
        data = data[:100_000]
    return data


def _swapped(rng: random.Random, data: bytes) -> bytes:
    """One value of the document is another, so that the change reaches the rules behind the syntax."""
    try:
        document = json.loads(data)
        keys = list(document)
    except (ValueError, TypeError, RecursionError):
        return data
    if not isinstance(document, dict) or not keys:
        return data
    marker = "a-place-that-is-filled-in"
    place = document
    key = rng.choice(keys)
    while isinstance(place[key], dict) and place[key] and rng.random() < 0.7:
        place = place[key]
        key = rng.choice(list(place))
    place[key] = marker
    return json.dumps(document).encode().replace(f'"{marker}"'.encode(), rng.choice(TOKENS))


def read(kind: str, data: bytes, heads: AttemptId) -> str:
    """How it ended; anything but these ends is raised."""
    job, number = heads.job, heads.number
    if kind == "manifest":
        verdict = verify_manifest(data, job, number, lambda _key: None)
        assert isinstance(verdict, AcceptedManifest | BadManifest)
        if isinstance(verdict, BadManifest):
            assert len(verdict.reason) < 500
            assert verdict.reason.isprintable()
        return type(verdict).__name__
    try:
        document: Heartbeat | HostEvent = (parse_heartbeat if kind == "heartbeat" else parse_event)(
            data, job_id=job, attempt=number
        )
    except WireError as refused:
        return "refused" if len(str(refused)) < 500 else "refused at length"
    if isinstance(document, HostEvent):
        document.exit()
    return "read"


def fuzz(folder: Path, count: int, seed: int) -> dict[str, int]:
    rng = random.Random(seed)
    good = seeds(folder)
    ends: dict[str, int] = {}
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for number in range(count):
        kind, data = good[number % len(good)]
        changed = mutated(rng, data)
        try:
            end = read(kind, changed, ATTEMPT)
        except Exception as exc:
            raise AssertionError(f"seed {seed}, number {number}, {kind}: {changed[:300]!r}") from exc
        ends[end] = ends.get(end, 0) + 1
    grown_mb = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    assert grown_mb < RSS_GROWTH_MAX_MB, f"{grown_mb:.0f} MB more"
    return ends


def test_the_documents_it_begins_with_are_good(tmp_path: Path) -> None:
    ends = [read(kind, data, ATTEMPT) for kind, data in seeds(tmp_path)]
    assert sorted(ends) == ["BadManifest", "read", "read", "read"], "the manifest only lacks its chunk here"


def test_no_mutation_of_a_document_does_more_than_be_refused(tmp_path: Path) -> None:
    ends = fuzz(tmp_path, 4000, 20261121)
    assert ends["refused"] > 1000
    assert "refused at length" not in ends
    assert ends.get("read", 0) > 10, "and some changes still say what the kind must say"


@pytest.mark.slow
def test_no_mutation_of_a_million_does_more_than_be_refused(tmp_path: Path) -> None:
    ends = fuzz(tmp_path, 1_000_000, 1)
    assert sum(ends.values()) == 1_000_000
    assert "refused at length" not in ends
