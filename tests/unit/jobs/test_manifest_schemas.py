"""Both schemas of a manifest, and names of every kind in them."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import random
import tracemalloc
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spotd_jobs.wire.client import sinks as runner_names
from spotd_jobs.wire.client.sinks import (
    CHUNKS_MAX,
    MANIFEST_BYTES_MAX,
    MANIFEST_TEXT_MAX,
    is_printable,
    printable_text,
    raw_of,
)
from spotd_jobs.wire.grant import WireError
from spotd_jobs.wire.manifest import AcceptedManifest, BadManifest, verify_manifest
from spotd_jobs.wire.manifest_document import FILES_MAX, parse_manifest
from tests.cases import every

JOB, ATTEMPT = "j1", 2
SHA = hashlib.sha256(b"0123456789").hexdigest()
ODD = [
    b"line\nbreak", b"\xff\xfe", b"caf\xc3\xa9", b"cafe\xcc\x81", b"back\\slash", b"zero\xe2\x80\x8dwidth", b"\x01",
    b"\x7f", b"100%", b"%41", b"%4", b"%%41", b"%\n41", b" ", b"C:", b"A", b"a", b"\xed\xa0\x80", b"%\xff", b"%4\xff",
    b"n" * 255, b"\xff" * 255, b"-rf", b"~", b"*", b"\xe2\x80\xae\xd7\x90", b"\xf0\x9f\x98\x80", b"\xef\xbf\xbe", b"'",
]  # fmt: skip


def document(*files: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {
        "schema": 2, "kind": "checkpoint", "job": JOB, "attempt": ATTEMPT, "name": "c", "entry": "c", "serial": 1,
        "step": None, "created_at": "2026-11-21T10:00:00Z", "bytes": sum(row.get("size", 0) for row in files),
        "previous": None, "chunks": [[SHA + "-0123abcd", 10]], "files": list(files), **changes,
    }  # fmt: skip


def file(path: str, *pieces: list[int], size: int = 10, **changes: Any) -> dict[str, Any]:
    return {"path": path, "type": "file", "size": size, "mode": 420, "pieces": [*pieces] or [[0]], **changes}


def verdict(data: dict[str, Any] | bytes) -> AcceptedManifest | BadManifest:
    return verify_manifest(data if isinstance(data, bytes) else json.dumps(data).encode(), JOB, ATTEMPT, None)


@given(st.binary(max_size=60))
def test_any_name_can_be_had_again_from_its_text(raw: bytes) -> None:
    text = printable_text(raw)
    assert raw_of(text) == raw
    assert is_printable(text)
    assert printable_text(raw_of(text)) == text
    assert "\\" not in text


@given(st.binary(max_size=60).filter(lambda raw: b"\0" not in raw))
def test_the_runner_s_text_of_a_name_means_the_same_name(raw: bytes) -> None:
    text = runner_names.ascii_text(os.fsdecode(raw))
    assert text.isascii()
    assert text.isprintable()
    assert raw_of(text) == raw
    assert os.fsencode(runner_names.name_of(text)) == raw


def test_names_of_every_kind_are_accepted_side_by_side() -> None:
    rows = [file("c/" + runner_names.ascii_text(os.fsdecode(raw))) for raw in ODD]
    accepted = verdict(document(*rows))
    assert isinstance(accepted, AcceptedManifest), accepted
    assert [raw_of(entry.path) for entry in accepted.files] == [b"c/" + raw for raw in ODD]
    assert all(is_printable(entry.path) for entry in accepted.files)


@every(
    "path",
    ["c/%2E%2E/x",
     "%2Fetc/passwd", "c/a%2F%2E%2E%2Fb", "c/%00", "c//a", "c/.", "", "c/" + "n" * 256, "c/" + "%FF" * 256,
     "c/" + "a/" * 255 + "b", "../x", "/x", "c%2F..%2F..%2Fx"],
)  # fmt: skip
def test_no_encoding_hides_a_path_that_leads_outside(path: str) -> None:
    assert isinstance(verdict(document(file("c/w"), file(path))), BadManifest)


@every("target", ["%2E%2E/%2E%2E/x", "/etc", "%2Fetc", "a/%2E%2E/%2E%2E/%2E%2E/x", "../../x", "", "%00"])
def test_no_encoding_hides_a_link_that_leads_outside(target: str) -> None:
    row = {"path": "c/l", "type": "link", "mode": 511, "target": target}
    assert isinstance(verdict(document(file("c/w"), row)), BadManifest)


def test_small_files_may_share_a_chunk() -> None:
    rows = [file("c/a", [0, 0, 4], size=4), file("c/b", [0, 4, 6], size=6), file("c/d", [0], [0, 1, 2], size=12)]
    accepted = verdict(document(*rows))
    assert isinstance(accepted, AcceptedManifest), accepted
    assert accepted.chunk_keys == (f"jobs/j1/attempts/2/data/{SHA}-0123abcd",)
    content = b"0123456789"
    found = [b"".join(chunk.part_of(content) for chunk in entry.chunks) for entry in accepted.files]
    assert found == [b"0123", b"456789", b"012345678912"]


@every(
    "change",
    [
        {"files": [file("c/a", [0, 5, 6], size=6)]},
        {"files": [file("c/a", [1])]},
        {"files": [file("c/a", [-1])]},
        {"files": [file("c/a", [0, 0])]},
        {"files": [file("c/a", [0, 0, 0], size=0)]},
        {"chunks": [[SHA, 10, 3]]},
        {"chunks": [[SHA, 0]]},
        {"chunks": [["../../x", 10]]},
        {"chunks": [[SHA.upper(), 10]]},
        {"chunks": [[SHA, 10], [SHA, 11]], "files": [file("c/a", [0], [1], size=21)], "bytes": 21},
        {"entry": "c/d"},
        {"entry": "%2E%2E"},
        {"schema": 3},
        {"files": [file("c/a"), file("c/a/b")]},
        {"files": [file("c/a"), file("c/%61")]},
        {"surprise": 1},
    ],
    ids=str,
)
def test_a_manifest_of_schema_2_that_does_not_hold_together_is_refused(change: dict[str, Any]) -> None:
    whole = document(file("c/a"))
    assert isinstance(verdict(whole), AcceptedManifest)
    assert isinstance(verdict({**whole, "bytes": 10, **change}), BadManifest)


def test_a_compressed_manifest_means_the_same() -> None:
    data = json.dumps(document(file("c/a"))).encode()
    packed = gzip.compress(data)
    accepted = verdict(packed)
    assert isinstance(accepted, AcceptedManifest)
    assert accepted.sha256 == hashlib.sha256(packed).hexdigest()
    for odd in (
        packed[:-1],
        packed + b"x",
        packed + packed,
        packed[:20],
        b"\x1f\x8b",
        packed[:-6] + b"\0\0" + packed[-4:],
    ):
        assert isinstance(verdict(odd), BadManifest)


@pytest.mark.long
def test_what_a_compressed_manifest_can_cost_is_bounded() -> None:
    for bomb in (b" " * (100 << 20), b"[" * (39 << 20), b'{"schema":2,"files":[' + b"[]," * (13 << 20)):
        packed = gzip.compress(bomb, 1)
        tracemalloc.start()
        with pytest.raises(WireError):
            parse_manifest(packed)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < 3 * MANIFEST_TEXT_MAX


@pytest.mark.long
def test_a_hundred_thousand_small_files_fit_into_one_manifest() -> None:
    rng, share = random.Random(1), 10  # a tenth of them, since the size rises with their number
    rows = [
        file(f"c/shards/part-{number:06d}-of-100000.safetensors", [number % 500, 7 * (number // 500), 7], size=7,
             mtime_ns=1_764_000_000_000_000_000 + rng.randrange(10**12))
        for number in range(FILES_MAX // share)
    ]  # fmt: skip
    chunks = [[hashlib.sha256(b"%d" % number).hexdigest() + "-0123abcd", 1400] for number in range(500)]
    data = json.dumps(document(*rows, chunks=chunks), separators=(",", ":")).encode()
    packed = gzip.compress(data, 6)
    assert share * len(data) < MANIFEST_TEXT_MAX
    assert share * len(packed) < MANIFEST_BYTES_MAX
    accepted = verdict(packed)
    assert isinstance(accepted, AcceptedManifest), accepted
    assert (len(accepted.files), len(accepted.chunk_keys)) == (FILES_MAX // share, 500)
    assert isinstance(verdict(document(file("c/a"), chunks=[[SHA, 10]] * (CHUNKS_MAX + 1))), BadManifest)
