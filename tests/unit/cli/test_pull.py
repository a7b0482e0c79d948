from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spotd.cli.transfers import pull_into, spans_of
from spotd.core.domain.intents import JobId
from spotd.core.domain.states import JobState
from tests.unit.api import worlds
from tests.unit.cli.conftest import Ctl

JOB = JobId(worlds.RUNNING_ID)
OUTPUTS = (
    {"path": "out/model.bin", "data": b"weights" * 50_000},
    {"path": "out/run.sh", "data": b"#!/bin/sh\n", "mode": 0o777},
)


@pytest.fixture
def saved(ctl: Ctl, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ctl:
    """A job with two outputs; the current folder is empty."""
    monkeypatch.chdir(tmp_path)
    store(ctl)
    return ctl


def store(ctl: Ctl, *more: dict[str, Any], problem: str = "") -> None:
    """The job has its two outputs and these."""
    outputs = worlds.stored_outputs(ctl.rig, [*OUTPUTS, *more], of=JOB)
    done = replace(outputs, problem=problem)
    ctl.place.write(worlds.ended(JobState.SUCCEEDED, name="llama-lora", ident=JOB, outputs=done))


def lie(ctl: Ctl, change: Callable[[list[Any]], object]) -> None:
    """The daemon lists other files than are stored."""
    real = ctl.place.handlers.files.entries

    async def changed(ref: str, checkpoint: str | None) -> Any:
        body = await real(ref, checkpoint)
        change(body["files"])
        return body

    ctl.place.replace("files.entries", changed)


def entry(path: str, **given: Any) -> Any:
    return {"path": path, "kind": "file", "bytes": 4, "mode": 0o644, "target": None, **given}


def below(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir()}


def test_outputs_come_into_a_folder_named_after_the_job(saved: Ctl, tmp_path: Path) -> None:
    result = saved("pull", "llama-lora")
    assert (result.code, result.out) == (0, "llama-lora/out/model.bin\nllama-lora/out/run.sh\n")
    assert (tmp_path / "llama-lora/out/model.bin").read_bytes() == b"weights" * 50_000
    assert result.err == "2 files, 350 kB, in llama-lora\n"


def test_a_file_may_be_executable_but_brings_no_other_power(saved: Ctl, tmp_path: Path) -> None:
    lie(saved, lambda files: files[1].update(mode=0o4777))
    saved("pull", "llama-lora", "--to", "here")
    assert (tmp_path / "here/out/run.sh").stat().st_mode & 0o7777 == 0o755
    assert (tmp_path / "here/out/model.bin").stat().st_mode & 0o7777 == 0o644


def test_patterns_and_folders_choose(saved: Ctl, tmp_path: Path) -> None:
    assert saved("pull", "llama-lora", "*.sh", "--to", "one").out == "one/out/run.sh\n"
    assert saved("pull", "llama-lora", "out/", "--to", "two").out.count("\n") == 2
    result = saved("pull", "llama-lora", "*.pt")
    assert (result.code, result.err.splitlines()[0]) == (6, "error: no file matches '*.pt'")


def test_list_fetches_nothing(saved: Ctl, tmp_path: Path) -> None:
    result = saved("pull", "llama-lora", "--list")
    assert result.out == "PATH             SIZE\nout/model.bin  350 kB\nout/run.sh       10 B\n"
    assert below(tmp_path) == set()


def test_a_checkpoint_is_pulled_by_name(ctl: Ctl, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    kept = worlds.stored_checkpoint(ctl.rig, "step-1200", b"weights", of=JOB)
    ctl.place.write(worlds.ended(name="llama-lora", ident=JOB, checkpoints=(kept,)))
    body = json.loads(ctl("pull", "llama-lora", "--checkpoint", "step-1200", "-o", "json").out)
    assert (body["kind"], body["name"], body["written"]) == ("checkpoint", "step-1200", 1)


def test_pulling_again_keeps_what_is_there_and_finishes_what_is_not(saved: Ctl, tmp_path: Path) -> None:
    saved("pull", "llama-lora", "--to", "here")
    (tmp_path / "here/out/run.sh").unlink()
    result = saved("pull", "llama-lora", "--to", "here")
    assert result.err == "2 files, 350 kB, 1 of them there already, in here\n"
    assert below(tmp_path / "here") == {"out/model.bin", "out/run.sh"}


def test_other_content_is_replaced_only_by_force(saved: Ctl, tmp_path: Path) -> None:
    target = tmp_path / "here/out/run.sh"
    target.parent.mkdir(parents=True)
    target.write_text("mine")
    result = saved("pull", "llama-lora", "--to", "here")
    assert (result.code, target.read_text()) == (74, "mine")
    assert "is there already with other content" in result.err
    assert saved("pull", "llama-lora", "--to", "here", "--force").code == 0
    assert target.read_text() == "#!/bin/sh\n"


def test_a_file_that_ends_early_leaves_nothing_of_itself(saved: Ctl, tmp_path: Path) -> None:
    real = saved.place.handlers.files.contents

    async def cut(*args: Any) -> AsyncIterator[bytes]:
        async with aclosing(real(*args)) as pieces:
            yield (await anext(pieces))[:100_000]
        raise OSError("a chunk is corrupt")

    saved.place.replace("files.contents", cut)
    result = saved("pull", "llama-lora", "--to", "here")
    assert result.code == 5
    assert "went away in the middle of its answer" in result.err
    assert below(tmp_path / "here") == set()


def test_a_file_of_another_size_than_was_said_is_not_kept(saved: Ctl, tmp_path: Path) -> None:
    lie(saved, lambda files: files[1].update(bytes=11))
    result = saved("pull", "llama-lora", "--to", "here")
    assert result.code == 5
    assert "out/run.sh has 10 bytes instead of 11" in result.err
    assert below(tmp_path / "here") == {"out/model.bin"}


@pytest.mark.parametrize(
    "bad",
    [
        entry("../evil"),
        entry("/etc/evil"),
        entry("a/../../evil"),
        entry("a//b"),
        entry("."),
        entry(""),
        entry("a\x00b"),
        entry("a\nb"),
        entry("..\\evil"),
        entry("link", kind="link", target="/etc/passwd"),
        entry("link", kind="link", target="../evil"),
        entry("a/link", kind="link", target="../../evil"),
        entry("a/link", kind="link", target="b/../../../evil"),
        entry("link", kind="link", target=""),
        entry("link", kind="link", target=None),
        entry("../evil", kind="dir"),
    ],
    ids=lambda bad: ascii((bad["kind"], bad["path"], bad["target"])),
)
def test_a_path_that_leads_outside_stops_everything(saved: Ctl, tmp_path: Path, bad: Any) -> None:
    lie(saved, lambda files: files.append(bad))
    folder = tmp_path / "deep" / "here"
    result = saved("pull", "llama-lora", "--to", str(folder))
    assert result.code == 74
    assert "leads outside" in result.err
    assert below(tmp_path) == set()


def test_links_and_empty_folders_arrive(saved: Ctl, tmp_path: Path) -> None:
    store(
        saved,
        {"path": "latest", "type": "link", "target": "out/model.bin"},
        {"path": "out/again", "type": "link", "target": "../out/run.sh"},
        {"path": "empty", "type": "dir"},
    )
    assert saved("pull", "llama-lora", "--to", "here").code == 0
    assert (tmp_path / "here/latest").readlink() == Path("out/model.bin")
    assert (tmp_path / "here/out/again").read_bytes() == b"#!/bin/sh\n"
    assert (tmp_path / "here/empty").is_dir()
    assert "4 of them there already" in saved("pull", "llama-lora", "--to", "here").err


def test_nothing_is_written_through_a_link_in_the_folder(saved: Ctl, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (tmp_path / "here").mkdir()
    (tmp_path / "here/out").symlink_to(elsewhere)
    result = saved("pull", "llama-lora", "--to", "here")
    assert result.code == 74
    assert "is a link, and may lead elsewhere" in result.err
    assert below(elsewhere) == set()


def test_a_folder_in_the_place_of_a_file_is_named(saved: Ctl, tmp_path: Path) -> None:
    (tmp_path / "here/out/model.bin").mkdir(parents=True)
    result = saved("pull", "llama-lora", "--to", "here", "--force")
    assert (result.code, "is a folder, and the job has a file of that name" in result.err) == (74, True)


def test_a_place_that_cannot_be_written_is_named(saved: Ctl, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    result = saved("pull", "llama-lora", "--to", "file/here")
    assert result.code == 74
    assert result.err.startswith("error: cannot write to file/here: Not a directory")


def test_no_outputs_yet_is_exit_6_with_a_way_out(ctl: Ctl) -> None:
    ctl.place.write(worlds.running())
    result = ctl("pull", "llama-lora")
    assert (result.code, result.err) == (
        6,
        "error: job llama-lora has no outputs (yet)\nhint: outputs are stored on success, if the job names any\n",
    )


def test_hundreds_of_small_files_come_in_one_request(saved: Ctl, tmp_path: Path) -> None:
    store(saved, *({"path": f"small/{number:03d}", "data": b"%d" % number} for number in range(400)))
    asked: list[Sequence[tuple[int, int]]] = []
    real = saved.place.handlers.files.contents

    def counted(*args: Any) -> Any:
        asked.append(args[-1])
        return real(*args)

    saved.place.replace("files.contents", counted)
    assert saved("pull", "llama-lora", "--to", "here").code == 0
    assert asked == [((0, 401),)]
    assert (tmp_path / "here/small/399").read_bytes() == b"399"


def test_names_of_every_kind_arrive_as_they_were(saved: Ctl, tmp_path: Path) -> None:
    names = {"line%0Abreak": b"line\nbreak", "%FF%FE": b"\xff\xfe", "back%5Cslash": b"back\\slash", "100%": b"100%",
             "n" * 255: b"n" * 255, "%E2%80%8D": b"\xe2\x80\x8d", "%2541": b"%41"}  # fmt: skip
    store(saved, *({"path": f"odd/{shown}", "data": shown.encode()} for shown in names))
    result = saved("pull", "llama-lora", "odd/", "--to", "here")
    assert result.code == 0
    assert {os.fsencode(path.name) for path in (tmp_path / "here/odd").iterdir()} == set(names.values())
    assert all(line.isprintable() for line in result.out.splitlines())


@pytest.mark.parametrize("path", ["%2E%2E/evil", "a%2F%2E%2E%2F%2E%2E%2Fevil", "%2Fetc%2Fevil", "a/%00"])
def test_no_encoding_hides_a_path_that_leads_outside(saved: Ctl, tmp_path: Path, path: str) -> None:
    lie(saved, lambda files: files.append(entry(path)))
    result = saved("pull", "llama-lora", "--to", str(tmp_path / "deep/here"))
    assert (result.code, "leads outside" in result.err) == (74, True)
    assert below(tmp_path) == set()


def test_a_name_that_this_disk_cannot_hold_is_said_and_all_others_come(saved: Ctl, tmp_path: Path) -> None:
    store(saved, {"path": "out/lost", "data": b"lost" * 100_000}, {"path": "out/zzz", "data": b"there"})
    lie(saved, lambda files: files[2].update(path="out/" + "x" * 300))
    result = saved("pull", "llama-lora", "--to", "here")
    assert result.code == 74
    assert "1 file could not be written here; the first is out/xxx" in result.err
    assert below(tmp_path / "here") == {"out/model.bin", "out/run.sh", "out/zzz"}
    body = json.loads(saved("pull", "llama-lora", "--to", "here", "-o", "json").out)
    assert [row["path"] for row in body["failed"]] == ["out/" + "x" * 300]


def test_names_that_a_disk_does_not_tell_apart_are_said_and_none_is_lost_in_silence(tmp_path: Path) -> None:
    listed = [entry("A"), entry("b"), entry("a")]

    def read(spans: Sequence[tuple[int, int]]) -> Iterator[bytes]:
        yield b"AAAA"
        # As on a disk that does not tell upper case from lower: the name is there already, and is the same file.
        (tmp_path / "here/a").hardlink_to(tmp_path / "here/A")
        yield b"bbbbaaaa"

    pulled = pull_into(tmp_path / "here", listed, [0, 1, 2], read, force=True, on_bytes=lambda _: None)
    assert (pulled.written, [path for path, _ in pulled.failed]) == (2, ["a"])
    assert (tmp_path / "here/A").read_bytes() == b"AAAA"


@given(st.lists(st.tuples(st.integers(0, 2), st.sampled_from(["file", "dir", "link"]), st.booleans()), max_size=30))
def test_spans_ask_for_the_content_of_the_chosen_files_and_no_other(rows: list[tuple[int, str, bool]]) -> None:
    listed = [entry(str(n), kind=kind, bytes=size if kind == "file" else 0) for n, (size, kind, _) in enumerate(rows)]
    places = [n for n, (_, _, chosen) in enumerate(rows) if chosen]
    asked = [n for first, last in spans_of(listed, places) for n in range(first, last + 1)]
    assert asked == sorted(set(asked))
    assert [n for n in asked if listed[n]["bytes"]] == [n for n in places if listed[n]["bytes"]]
    assert set(asked) <= set(places)


def test_outputs_that_are_missing_show_in_the_exit_code_and_what_is_there_is_fetched(
    saved: Ctl, tmp_path: Path
) -> None:
    store(saved, problem="3 of them could not be stored by the host")
    result = saved("pull", "llama-lora")
    assert result.code == 1
    assert "warning: some of its outputs are missing" in result.err
    assert (tmp_path / "llama-lora/out/run.sh").exists()
