"""What the daemon believes of a host, and what it refuses."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from spotd_jobs.runner.store import RunnerStore
from spotd_jobs.wire.client.sinks import MANIFEST_BYTES_MAX
from spotd_jobs.wire.grant import Upload, UploadMethod, WireError
from spotd_jobs.wire.manifest import AcceptedManifest, BadManifest, restore_of, verify_manifest
from spotd_jobs.wire.reports import (
    EVENT_BYTES_MAX,
    HEARTBEAT_BYTES_MAX,
    EventKind,
    Outcome,
    Phase,
    parse_event,
    parse_heartbeat,
)
from tests.cases import every
from tests.integration.runner.rig import Stored

JOB, ATTEMPT = "j1", 2
SHA = hashlib.sha256(b"data").hexdigest()
KEY = f"jobs/{JOB}/attempts/{ATTEMPT}/data/{SHA}"
CANARY = "canary-5ecret"


def heartbeat() -> dict[str, Any]:
    return {
        "schema": 1, "job": JOB, "attempt": ATTEMPT, "seq": 5, "boot": 1, "at": "2026-11-21T10:00:00Z",
        "phase": "run", "pid": 10, "up_s": 1.5, "runner": "1", "grant_issued_at": "2026-11-21T09:00:00.000001Z",
        "order_checkpoint": 0, "seen": {"name": "step-5", "step": 5, "at": "2026-11-21T10:00:00Z"}, "stored": None,
        "upload": {"name": None, "bytes_done": 0, "bytes_total": 0, "bytes_per_s": 0, "queued": 0, "failing": None},
        "restore": None,
        "gpus": [{"index": 0, "name": "H100", "util_pct": 5.0, "mem_used_mb": 1.0, "mem_total_mb": 2.0,
                  "power_w": None, "temp_c": 30.0}],
        "host": {"cpus": 2, "load1": 0.5, "mem_total_mb": 1, "mem_available_mb": 1, "disk_total_mb": 1,
                 "disk_free_mb": 1},
        "notice": None, "exit": None,
    }  # fmt: skip


def event() -> dict[str, Any]:
    return {
        "schema": 1, "job": JOB, "attempt": ATTEMPT, "seq": 7, "at": "2026-11-21T10:00:00Z", "kind": "exit",
        "data": {"outcome": "failed", "phase": "run", "exit_code": 3, "signal": None, "oom": False, "reason": "r"},
    }  # fmt: skip


def entry(path: str = "step-5/w", **changes: Any) -> dict[str, Any]:
    return {
        "path": path, "type": "file", "size": 4, "mode": 420, "mtime_ns": 1, "target": None,
        "chunks": [{"key": KEY, "sha256": SHA, "size": 4}], **changes,
    }  # fmt: skip


def link(path: str, target: str) -> dict[str, Any]:
    return entry(path, type="link", size=0, chunks=[], target=target)


def chunked(key: str, size: int = 4) -> dict[str, Any]:
    return entry("step-5/b", size=size, chunks=[{"key": key, "sha256": SHA, "size": size}])


def manifest(*files: dict[str, Any], **changes: Any) -> dict[str, Any]:
    rows = list(files) or [entry()]
    return {
        "schema": 1, "kind": "checkpoint", "job": JOB, "attempt": ATTEMPT, "name": "step-5", "serial": 9, "step": 5,
        "created_at": "2026-11-21T10:00:00Z", "bytes": sum(row["size"] for row in rows), "files": rows,
        "previous": None, **changes,
    }  # fmt: skip


def there(key: str) -> Stored:
    return Stored(4, SHA)


def verdict(
    document: Any, head: Callable[[str], Stored | None] = lambda key: Stored(4, SHA)
) -> AcceptedManifest | BadManifest:
    return verify_manifest(json.dumps(document).encode(), JOB, ATTEMPT, head)


def test_not_one_bit_of_a_sealed_manifest_may_differ() -> None:
    sealed = RunnerStore.seal(manifest())
    accepted = []
    for bit in range(8 * len(sealed)):
        flipped = bytearray(sealed)
        flipped[bit // 8] ^= 1 << bit % 8
        if isinstance(verify_manifest(bytes(flipped), JOB, ATTEMPT, there), AcceptedManifest):
            accepted.append((bit, bytes(flipped)))
    assert accepted == []
    assert isinstance(verify_manifest(sealed, JOB, ATTEMPT, there), AcceptedManifest)
    assert isinstance(verify_manifest(sealed + b"\n", JOB, ATTEMPT, there), BadManifest)


def test_a_heartbeat_is_read_in_full() -> None:
    read = parse_heartbeat(json.dumps(heartbeat()).encode(), job_id=JOB, attempt=ATTEMPT)
    assert (read.phase, read.seq, read.seen and read.seen.step, read.gpus[0].name) == (Phase.RUN, 5, 5, "H100")


def test_an_exit_event_gives_its_exit_typed() -> None:
    read = parse_event(json.dumps(event()).encode(), job_id=JOB, attempt=ATTEMPT)
    done = read.exit()
    assert read.kind is EventKind.EXIT
    assert done is not None
    assert (done.outcome, done.exit_code, done.phase) == (Outcome.FAILED, 3, Phase.RUN)


def test_an_exit_event_that_says_nonsense_gives_no_exit() -> None:
    odd = event()
    odd["data"]["exit_code"] = 4000
    assert parse_event(json.dumps(odd).encode(), job_id=JOB, attempt=ATTEMPT).exit() is None


@every(
    "change",
    [
        {"attempt": 3}, {"job": "j2"}, {"seq": -1}, {"seq": "5"}, {"seq": True}, {"seq": 2**70}, {"phase": "sleep"},
        {"up_s": float("nan")}, {"up_s": float("inf")}, {"at": "yesterday"}, {"at": "2026-11-21T10:00:00+01:00"},
        {"at": "2026-11-21T10:00:00"}, {"extra": 1}, {"schema": 2}, {"pid": 0},
        {"runner": "x\x1b[2J"}, {"runner": "\u202egnp.exe"}, {"runner": "x" * 501}, {"gpus": [{}] * 65},
        {"seen": {"name": "../x", "step": 1, "at": "2026-11-21T10:00:00Z"}},
        {"stored": {"name": "x", "step": 1, "at": "2026-11-21T10:00:00Z", "bytes": 1, "key": "/etc/passwd"}},
    ],
    ids=str,
)  # fmt: skip
def test_a_heartbeat_with_one_bad_value_is_refused_whole(change: dict[str, Any]) -> None:
    with pytest.raises(WireError):
        parse_heartbeat(json.dumps({**heartbeat(), **change}).encode(), job_id=JOB, attempt=ATTEMPT)


@settings(max_examples=300, deadline=None)
@given(data=st.binary(max_size=300) | st.text(max_size=200).map(lambda text: text.encode("utf-8", "surrogatepass")))
def test_any_bytes_raise_nothing_but_the_one_error(data: bytes) -> None:
    for parse in (parse_heartbeat, parse_event):
        with pytest.raises(WireError):
            parse(data, job_id=JOB, attempt=ATTEMPT)
    assert isinstance(verify_manifest(data, JOB, ATTEMPT, lambda key: None), BadManifest)


def test_thousands_of_mutated_documents_raise_nothing_but_the_one_error() -> None:
    rng = random.Random(20261121)
    parsers: list[tuple[dict[str, Any], Callable[[bytes], Any]]] = [
        (heartbeat(), lambda data: parse_heartbeat(data, job_id=JOB, attempt=ATTEMPT)),
        (event(), lambda data: parse_event(data, job_id=JOB, attempt=ATTEMPT)),
        (manifest(), lambda data: verify_manifest(data, JOB, ATTEMPT, lambda key: Stored(4, SHA))),
    ]
    refused = 0
    for number in range(6000):
        document, parse = parsers[number % 3]
        data = bytearray(json.dumps(document).encode())
        for _ in range(rng.randint(1, 4)):
            place = rng.randrange(len(data))
            match rng.randrange(3):
                case 0:
                    data[place] = rng.randrange(256)
                case 1:
                    del data[place : place + rng.randint(1, 20)]
                case _:
                    data[place:place] = rng.choice([b"[" * 50, b'"\\ud800"', b"1e999", b"-0", b"null", b"\xff\x00"])
        try:
            refused += isinstance(parse(bytes(data)), BadManifest)
        except WireError:
            refused += 1
    assert refused > 3000


@every(
    "bomb",
    [b"[" * 60_000, b'{"a":' * 10_000, b"1" * 60_000, b'"' + b"\\u0000" * 9_000 + b'"'],
    ids=["brackets", "objects", "digits", "escapes"],
)
def test_bombs_are_refused_not_executed(bomb: bytes) -> None:
    for parse in (parse_heartbeat, parse_event):
        with pytest.raises(WireError):
            parse(bomb, job_id=JOB, attempt=ATTEMPT)
    assert isinstance(verify_manifest(bomb, JOB, ATTEMPT, lambda key: None), BadManifest)


def test_documents_over_their_size_are_not_even_read() -> None:
    with pytest.raises(WireError, match="larger"):
        parse_heartbeat(b" " * (HEARTBEAT_BYTES_MAX + 1), job_id=JOB, attempt=ATTEMPT)
    with pytest.raises(WireError, match="larger"):
        parse_event(b" " * (EVENT_BYTES_MAX + 1), job_id=JOB, attempt=ATTEMPT)
    refused = verify_manifest(b" " * (MANIFEST_BYTES_MAX + 1), JOB, ATTEMPT, lambda key: None)
    assert isinstance(refused, BadManifest)
    assert "larger" in refused.reason


def test_a_sound_manifest_is_accepted_with_what_a_grant_needs() -> None:
    document = manifest(
        entry("step-5/a"), entry("step-5/b"), link("step-5/c", "a"), entry("latest"), link("last.ckpt", "step-5")
    )
    accepted = verdict(document)
    assert isinstance(accepted, AcceptedManifest)
    assert accepted.chunk_keys == (KEY,)
    assert accepted.sha256 == hashlib.sha256(json.dumps(document).encode()).hexdigest()
    offer = restore_of(accepted, "jobs/j1/attempts/2/checkpoints/step-5.json", lambda key: f"file:///store/{key}")
    assert offer.chunks == {KEY: f"file:///store/{KEY}"}
    short = restore_of(
        accepted, "jobs/j1/attempts/2/checkpoints/s.json", lambda key: f"file:///{key}", chunks_base="file:///"
    )
    assert (short.chunks, short.chunks_base) == ({}, "file:///")


PATHS = [
    "../x", "/x", "step-5/../x", "step-5//x", "step-5/./x", "step-5\\x", "step-5/\0", "step-5/a\n", "step-5/\u202e",
    "C:/x", "", "step-5/" + "n" * 256, "step-5/" + "a/" * 2100 + "b",
]  # fmt: skip


@every("path", PATHS, ids=lambda path: repr(path[:20]))
def test_a_manifest_with_a_path_that_could_leave_its_folder_is_refused(path: str) -> None:
    assert isinstance(verdict(manifest(entry("step-5/a"), entry(path))), BadManifest)


UNSOUND = {
    "of another job": manifest(job="j2"),
    "of another attempt": manifest(attempt=1),
    "nothing of its own": manifest(entry("other/w")),
    "outside its entry": manifest(entry("step-5/w"), entry("other/w")),
    "twice the same": manifest(entry("step-5/a"), entry("step-5/a")),
    "below a file": manifest(entry("step-5/a"), entry("step-5/a/b")),
    "below a link": manifest(entry("step-5/x"), link("step-5/a", "x"), entry("step-5/a/b")),
    "link outside": manifest(entry("step-5/x"), link("step-5/a", "../../x")),
    "link to the root": manifest(entry("step-5/x"), link("step-5/a", "/etc")),
    "link down and up": manifest(entry("step-5/x"), link("step-5/a", "b/../../../x")),
    "link without target": manifest(entry("step-5/x"), link("step-5/a", "") | {"target": None}),
    "file with target": manifest(entry(target="x")),
    "folder with content": manifest(entry("step-5/x"), entry("step-5/d", type="dir")),
    "sizes do not add up": manifest(entry(size=5)),
    "total is wrong": manifest(bytes=5),
    "key of another job": manifest(chunked(f"jobs/j2/attempts/1/data/{SHA}")),
    "key of a later attempt": manifest(chunked(f"jobs/j1/attempts/3/data/{SHA}")),
    "key is not the hash": manifest(chunked(KEY[:-1] + ("0" if KEY[-1] != "0" else "1"))),
    "key elsewhere": manifest(chunked(f"code/{SHA}")),
    "chunk of two sizes": manifest(entry("step-5/a"), chunked(KEY, 3)),
    "empty chunk": manifest(chunked(KEY, 0)),
    "set-uid mode": manifest(entry(mode=0o4755)),
    "unknown field": manifest(surprise=1),
    "number as text": manifest(bytes="4"),
}  # fmt: skip


@every("document", UNSOUND.values(), ids=UNSOUND.keys())
def test_a_manifest_that_does_not_hold_together_is_refused(document: dict[str, Any]) -> None:
    refused = verdict(document)
    assert isinstance(refused, BadManifest)
    assert not refused.missing


@every(
    "stored", [None, Stored(3, None), Stored(4, hashlib.sha256(b"DATA").hexdigest())], ids=["absent", "short", "other"]
)
def test_a_manifest_whose_chunks_are_not_all_in_the_store_is_refused(stored: Stored | None) -> None:
    refused = verdict(manifest(), lambda key: stored)
    assert isinstance(refused, BadManifest)
    assert refused.missing


def test_a_store_that_keeps_no_hash_is_judged_by_size() -> None:
    assert isinstance(verdict(manifest(), lambda key: Stored(4, None)), AcceptedManifest)


def test_an_upload_without_its_method_s_fields_is_refused() -> None:
    with pytest.raises(ValidationError, match="directory"):
        Upload.model_validate_json(
            json.dumps(
                {"method": UploadMethod.FOLDER, "prefix": "jobs/j1/attempts/1/", "expires": "2026-11-21T10:00:00Z",
                 "size_max": 10**6, "fields": {}}
            )
        )  # fmt: skip


def test_a_version_of_an_entry_is_restored_under_the_entry_s_own_name() -> None:
    accepted = verdict(manifest(name="step-5~2", entry="step-5"))
    assert isinstance(accepted, AcceptedManifest)
    assert (accepted.name, accepted.entry) == ("step-5~2", "step-5")
    assert isinstance(verdict(manifest(name="step-5~2")), BadManifest), "paths must begin with the entry"


def test_no_checkpoint_is_accepted_that_hangs_on_what_another_attempt_can_still_write() -> None:
    document = manifest(chunked(f"jobs/{JOB}/attempts/1/data/{SHA}"))
    refused = verdict(document)
    assert isinstance(refused, BadManifest)
    assert "another attempt" in refused.reason
    assert not refused.missing
    before = verify_manifest(json.dumps(document).encode(), JOB, ATTEMPT, None)
    assert isinstance(before, AcceptedManifest), "one of an older spotd, which was accepted before, is still read"
