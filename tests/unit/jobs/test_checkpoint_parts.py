"""The parts of one checkpoint: every list that several machines can send, and what becomes of them together."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spotd_jobs.runner import complete, manifest
from spotd_jobs.runner.manifest import ChunkIndex, Unfit
from spotd_jobs.runner.part_lists import merge, read_part
from spotd_jobs.runner.store import RunnerStore
from spotd_jobs.runner.upload import Progress, TreeUpload
from spotd_jobs.wire.client.sinks import ascii_text

PREFIX = "jobs/j1/attempts/1/"


def store() -> RunnerStore:
    made = SimpleNamespace(prefix=PREFIX, put=lambda *_: None, seal=RunnerStore.seal)
    made.document = lambda **fields: {"schema": 1, "job": "j1", "attempt": 1, **fields}
    return cast("RunnerStore", made)


def rows_of(folder: Path, files: dict[str, bytes], chunk_bytes: int = 65_536) -> list[dict[str, Any]]:
    """What a machine lists of these files below `step`, by the shipped upload."""
    for path, content in files.items():
        place = folder / "step" / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(content)
    seen = manifest.scan(str(folder), "step")
    stage = manifest.stage(str(folder), seen, str(folder / ".stage"))
    known = ChunkIndex(str(folder / ".known"), PREFIX)
    return TreeUpload(stage, store(), known, Progress(), chunk_bytes, lambda: False, with_digests=True).run(2)


def file_row(path: str, content: bytes = b"x", **changes: Any) -> dict[str, Any]:
    digest = hashlib.sha256(content).hexdigest()
    chunk = {"key": f"{PREFIX}data/{digest}-00000000", "sha256": digest, "size": len(content), "offset": 0}
    row = {"path": path, "type": "file", "size": len(content), "mode": 0o644, "mtime_ns": 1, "target": None}
    return {**row, "chunks": [dict(chunk, length=len(content))], **changes}


def dir_row(path: str) -> dict[str, Any]:
    return file_row(path, b"", type="dir", size=0, chunks=[])


def link_row(path: str, target: str) -> dict[str, Any]:
    return file_row(path, b"", type="link", size=0, chunks=[], target=target)


NAMES = st.sampled_from(["a", "b", "c/d", "c/e", "f g", "%"])
SIZES = st.sampled_from([0, 1, 900, 8_191, 8_192, 70_000, 200_000])


@given(contents=st.dictionaries(NAMES, SIZES, min_size=1), owners=st.lists(st.sets(NAMES), min_size=1, max_size=4))
def test_however_files_lie_on_machines_they_come_together_once_each(
    tmp_path_factory: pytest.TempPathFactory, contents: dict[str, int], owners: list[set[str]]
) -> None:
    files = {path: (path.encode() * size)[:size] for path, size in contents.items()}
    parts, union = [], dict[str, bytes]()
    for owned in owners:
        own = {path: content for path, content in files.items() if path in owned}
        union.update(own)
        parts.append(rows_of(tmp_path_factory.mktemp("machine"), own) if own else [])
    merged = merge("step", parts)
    assert [row["path"] for row in merged] == list(dict.fromkeys(row["path"] for part in parts for row in part))
    assert {row["path"]: row["size"] for row in merged if row["type"] == "file"} == {
        ascii_text(f"step/{path}"): len(content) for path, content in union.items()
    }
    assert not any("digest" in row for row in merged)


@given(size=SIZES.filter(bool), at=st.integers(0, 10**6))
def test_one_other_byte_anywhere_in_a_file_that_two_machines_have_is_no_checkpoint(
    tmp_path_factory: pytest.TempPathFactory, size: int, at: int
) -> None:
    content = bytearray(b"x" * size)
    first = rows_of(tmp_path_factory.mktemp("first"), {"a": bytes(content), "b": b"beside"})
    content[at % size] ^= 1
    second = rows_of(tmp_path_factory.mktemp("second"), {"a": bytes(content), "c": b"beside it"})
    with pytest.raises(Unfit, match="machines 1 and 2 saved other content under step/a"):
        merge("step", [first, second])


@pytest.mark.parametrize(
    ("parts", "why"),
    [
        ([[file_row("step/a")], [file_row("step/a", b"y")]], "machines 1 and 2 saved other content under step/a"),
        ([[], [file_row("step/a")], [file_row("step/a", b"xx")]], "machines 2 and 3 saved other content"),
        ([[file_row("step/a")], [dir_row("step/a")]], "machines 1 and 2 saved other content"),
        ([[link_row("step/a", "b")], [link_row("step/a", "c")]], "machines 1 and 2 saved other content"),
        ([[file_row("step/a")], [file_row("step/a/b")]], "step/a is a file of one machine, and a folder of another"),
        ([[link_row("step/a", "b")], [file_row("step/a/b/c")]], "step/a is a file of one machine"),
        ([[file_row("step/a")], [file_row("other/a")]], "machine 2 sent a file that is not of it"),
        ([[file_row("step/a")], [file_row("steps")]], "machine 2 sent a file that is not of it"),
    ],
)
def test_what_contradicts_itself_is_refused_with_its_reason(parts: list[list[dict[str, Any]]], why: str) -> None:
    with pytest.raises(Unfit) as refused:
        merge("step", parts)
    assert why in str(refused.value)


@pytest.mark.parametrize(
    ("parts", "paths"),
    [
        ([[file_row("step")], [file_row("step")]], ["step"]),
        ([[dir_row("step/a")], [file_row("step/a/b")]], ["step/a", "step/a/b"]),
        ([[link_row("step/a", "b")], [link_row("step/a", "b")]], ["step/a"]),
        ([[file_row("step/a", mode=0o600)], [file_row("step/a", mtime_ns=7)]], ["step/a"]),
        ([[file_row("step/a")], [file_row("step/a.b")]], ["step/a", "step/a.b"]),
    ],
)
def test_what_is_alike_is_there_once_as_the_first_machine_has_it(
    parts: list[list[dict[str, Any]]], paths: list[str]
) -> None:
    merged = merge("step", parts)
    assert [row["path"] for row in merged] == paths
    assert merged[0] == parts[0][0]


def test_a_list_arrives_as_it_was_sent_with_every_name_that_a_file_can_have(tmp_path: Path) -> None:
    rows = rows_of(tmp_path, {"ä \udcff%": b"x", "big": b"y" * 200_000, "c/d": b""})
    data = manifest.manifest_bytes(store(), entry="-", files=rows, named={"a": "it is missing"}, sent=7)
    part = read_part(data, PREFIX)
    assert (part.named, part.sent) == ({"a": "it is missing"}, 7)
    assert merge("step", [part.files]) == merge("step", [rows])


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{}",
        b"[1]",
        json.dumps(
            {"schema": 2, "job": "j1", "attempt": 1, "entry": "-", "chunks": [], "files": [], "sent": 0}
        ).encode(),
        manifest.manifest_bytes(store(), entry="-", files=[], named=[], sent=0),
        manifest.manifest_bytes(store(), entry="-", files=[], named={}, sent="many"),
        manifest.manifest_bytes(store(), entry="-", files=[file_row("step/a")], named={}, sent=0).replace(
            b":1,", b":2,"
        ),
    ],
)
def test_what_is_no_list_of_this_attempt_is_refused(data: bytes) -> None:
    with pytest.raises(Unfit, match="its list can not be read"):
        read_part(data, PREFIX)


ZERO = "zero_pp_rank_{}_mp_rank_{:02d}_optim_states.pt"


@pytest.mark.parametrize(
    ("inside", "named", "why"),
    [
        ({"__0_0.distcp", ".metadata"}, {"__0_0.distcp": "w"}, ""),
        ({"__0_0.distcp", ".metadata"}, {"__1_0.distcp": "gone"}, "gone"),
        ({"__0_0.distcp"}, {}, complete.LACKS_METADATA),
        ({"a/__0_0.distcp", ".metadata"}, {}, complete.LACKS_METADATA),
        ({"a/__0_0.distcp", "a/.metadata"}, {}, ""),
        ({"__0_0.distcp", "__0.metadata"}, {}, ""),
        ({ZERO.format(rank, 0) for rank in range(4)}, {}, ""),
        ({ZERO.format(rank, 0) for rank in (0, 1, 3)}, {}, "the optimizer states of a rank are missing"),
        ({*(ZERO.format(rank, 0) for rank in (0, 1)), ZERO.format(1, 1)}, {}, "the optimizer states of a rank"),
        ({"bf16_" + ZERO.format(0, 0), ZERO.format(0, 0)}, {}, ""),
    ],
)
def test_all_parts_together_are_whole_or_it_is_said_what_is_missing(
    inside: set[str], named: dict[str, str], why: str
) -> None:
    found = complete.why_not_whole(inside, named)
    assert found == why if not why else found.startswith(why)


@pytest.mark.parametrize(
    ("paths", "bound"),
    [
        ([f"step/{ZERO.format(0, 0)}"], True),
        ([f"step/global_step5/bf16_{ZERO.format(3, 1)}"], True),
        (["step/__0_0.distcp", "step/.metadata"], False),
        (["step/rank_0.pt", "step/mp_rank_00_model_states.pt"], False),
    ],
)
def test_only_deepspeeds_states_by_rank_are_bound_to_the_number_of_machines(paths: list[str], *, bound: bool) -> None:
    assert complete.is_bound(paths) is bound
