"""When an entry of the checkpoint folder counts, by framework and by how the job ended."""

from __future__ import annotations

import io
import json
import os
import struct
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from spotd_jobs.runner import checkpoint_uploader, complete, manifest
from spotd_jobs.runner.checkpoint_uploader import CheckpointUploader, CommandEnd
from spotd_jobs.runner.manifest import ChunkIndex
from tests.cases import every
from tests.integration.runner.inside import runner_grant, store_of
from tests.integration.runner.rig import Rig

SETTLE_S = 10.0
JUST_NOW, LONG_AGO = 9.9, 10.0


def archive(cut: int = 0) -> bytes:
    """What `torch.save` and numpy write: a zip, here cut short by some bytes."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as file:
        file.writestr("data", b"w" * 1000)
    return buffer.getvalue()[: len(buffer.getvalue()) - cut]


def safetensors(cut: int = 0) -> bytes:
    header = json.dumps({"__metadata__": {"format": "pt"}, "w": {"dtype": "U8", "data_offsets": [0, 64]}}).encode()
    whole = struct.pack("<Q", len(header)) + header + b"x" * 64
    return whole[: len(whole) - cut]


def state(step: int) -> bytes:
    return json.dumps({"global_step": step}).encode()


def index(*shards: str) -> bytes:
    return json.dumps({"weight_map": {f"layer{number}": shard for number, shard in enumerate(shards)}}).encode()


HF = {"model.safetensors": safetensors(), "training_args.bin": b"t", "optimizer.pt": archive(), "rng_state.pth": b"r"}
DCP = {"__0_0.distcp": b"d", "__1_0.distcp": b"d"}
ZERO_3 = {
    f"zero_pp_rank_{rank}_mp_rank_00_{part}_states.pt": archive() for rank in range(2) for part in ("model", "optim")
}
BF16 = {"mp_rank_00_model_states.pt": archive(), "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt": archive()}
PARALLEL = {f"mp_rank_0{rank}_model_states.pt": archive() for rank in range(2)}
PIPELINE = {"layer_00-model_00-model_states.pt": archive(), "mp_rank_00_model_states.pt": archive()}
METADATA = b"\x80\x02\x8c\x0c__0_0.distcp\x94\x8c\x0c__1_0.distcp\x94."
"""As PyTorch pickles it: the names of the parts stand in it."""
DEEPSPEED = {"mp_rank_00_model_states.pt": archive(), "zero_pp_rank_0_mp_rank_00_optim_states.pt": archive()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    id: str
    name: str
    content: bytes | Mapping[str, bytes]
    complete: bool
    beside: Mapping[str, bytes] = field(default_factory=dict)
    stable_s: float = JUST_NOW
    ended_cleanly: bool | None = None
    later: bool = False
    """What lies beside was written after the entry."""


def yes(title: str, name: str, content: bytes | Mapping[str, bytes], **rest: Any) -> Case:
    return Case(id=title, name=name, content=content, complete=True, **rest)


def no(title: str, name: str, content: bytes | Mapping[str, bytes], **rest: Any) -> Case:
    return Case(id=title, name=name, content=content, complete=False, **rest)


OLD: Mapping[str, Any] = {"stable_s": LONG_AGO}
CLEAN: Mapping[str, Any] = {"ended_cleanly": True}
KILLED: Mapping[str, Any] = {"ended_cleanly": False}
HF_5 = {**HF, "trainer_state.json": state(5)}
RANKS = {"model.safetensors": safetensors(), "rng_state_0.pth": b"r", "trainer_state.json": state(5)}
SHARDED = {"model.safetensors.index.json": index("a.safetensors", "b.safetensors"), "a.safetensors": safetensors()}
MEGATRON = {"mp_rank_00/x.pt": b"x"}
HF_SHARDS = {**SHARDED, "b.safetensors": safetensors(), "config.json": b"{}"}
HF_DEEPSPEED = {**HF_5, "latest": b"global_step5", **{f"global_step5/{name}": data for name, data in DEEPSPEED.items()}}
LIGHTNING_DEEPSPEED = {"latest": b"checkpoint", **{f"checkpoint/{name}": data for name, data in DEEPSPEED.items()}}
ORBAX = {"_CHECKPOINT_METADATA": b"{}", "default/_METADATA": b"{}", "default/d/0": b"d", "default/manifest.ocdbt": b"m"}
ACCELERATE = {"model.safetensors": safetensors(), "optimizer.bin": archive(), "scheduler.bin": archive()}
ACCELERATE.update({f"random_states_{rank}.pkl": b"r" for rank in range(2)}, **{"custom_checkpoint_0.pkl": b"c"})
FSDP = {
    "pytorch_model_fsdp_0/__0_0.distcp": b"d",
    "pytorch_model_fsdp_0/.metadata": b"m",
    "optimizer_0/__0_0.distcp": b"d",
}
TEMPORARY = ("tmp-checkpoint-5", "TMPfile", "a.tmp", "a.partial", "a.incomplete", ".hidden", "5.orbax-checkpoint-tmp-9")
MARKS = (".complete", "DONE", "STABLE", "_SUCCESS", "commit_success.txt", ".snapshot_metadata")
CASES = [
    no("plain file just written", "last.pt", b"x"),
    yes("plain file left alone", "last.pt", b"x", **OLD),
    no("plain folder just written", "step-1", {"w": b"x"}),
    yes("plain folder left alone", "step-1", {"w": b"x"}, **OLD),
    yes("after a clean end nobody writes", "step-1", {"w": b"x"}, **CLEAN),
    no("after a kill nobody knows", "step-1", {"w": b"x"}, **KILLED),
    yes("after a kill, but settled before", "step-1", {"w": b"x"}, **KILLED, **OLD),
    yes("archive whole after a kill", "a.pt", archive(), **KILLED),
    no("archive cut by a kill", "a.pt", archive(40), **KILLED),
    no("archive cut, long ago", "a.pt", archive(40), **OLD),
    no("folder of whole archives after a kill may lack one", "step-1", {"a.pt": archive()}, **KILLED),
    yes("safetensors whole", "m.safetensors", safetensors(), **OLD),
    no("safetensors cut", "m.safetensors", safetensors(1), **OLD),
    no("safetensors header cut", "m.safetensors", b"\x08", **OLD),
    no("empty file", "last.pt", b"", **OLD),
    no("empty folder", "step-1", {}, **OLD),
    *[no(f"temporary name {name}", name, b"x", **OLD, **CLEAN) for name in TEMPORARY],
    *[yes(f"mark {mark}", "step-1", {"w": b"x", mark: b""}) for mark in MARKS],
    *[yes(f"mark {mark} after a kill", "step-1", {"w": b"x", mark: b""}, **KILLED) for mark in MARKS],
    no("a mark deep inside marks nothing", "step-1", {"sub/DONE": b"", "w": b"x"}),
    yes("HF with its state", "checkpoint-5", HF_5),
    no("HF without its state", "checkpoint-5", HF, **OLD),
    no("HF without its state after the end", "checkpoint-5", HF, **CLEAN),
    no("HF says incomplete", "checkpoint-5", {**HF_5, "checkpoint-is-incomplete.txt": b""}, **OLD),
    no("HF of another step", "checkpoint-6", HF_5, **OLD),
    no("HF state half written", "checkpoint-5", {**HF, "trainer_state.json": b'{"global_st'}),
    no("HF on many ranks: others may still write", "checkpoint-5", RANKS),
    yes("HF on many ranks, settled", "checkpoint-5", RANKS, **OLD),
    yes("a user's own checkpoint-5", "checkpoint-5", {"w": b"x"}, **OLD),
    no("DCP without metadata", "step-5", DCP, **OLD),
    no("DCP without metadata after the end", "step-5", DCP, **CLEAN),
    yes("DCP with metadata", "step-5", {**DCP, ".metadata": b"m"}),
    no("DCP metadata not renamed", "step-5", {**DCP, ".metadata.tmp": b"m"}, **OLD),
    yes("DCP per rank, settled", "step-5", {**DCP, "__0.metadata": b"m"}, **OLD),
    no("DCP per rank, just now", "step-5", {**DCP, "__0.metadata": b"m"}),
    no("DCP nested without metadata", "step-5", {f"app/{name}": data for name, data in DCP.items()}, **OLD),
    no("DeepSpeed unnamed", "global_step5", DEEPSPEED, **OLD),
    no("DeepSpeed unnamed after the end", "global_step5", DEEPSPEED, **CLEAN),
    yes("DeepSpeed named", "global_step5", DEEPSPEED, beside={"latest": b"global_step5"}),
    no("DeepSpeed, an older one is named", "global_step5", DEEPSPEED, beside={"latest": b"global_step4"}, **OLD),
    yes("DeepSpeed, a newer one is named", "global_step5", DEEPSPEED, beside={"latest": b"g6"}, later=True, **OLD),
    no("Megatron unnamed", "iter_0000100", MEGATRON, **OLD),
    yes("Megatron named", "iter_0000100", MEGATRON, beside={"latest_checkpointed_iteration.txt": b"100\n"}),
    no("DCP, its metadata names a part that is gone", "step-5", {"__0_0.distcp": b"d", ".metadata": METADATA}, **OLD),
    no("DCP, only its metadata is left", "step-5", {".metadata": METADATA}),
    yes("DCP, every part that its metadata names", "step-5", {**DCP, ".metadata": METADATA}),
    no("DCP below, a part is gone", "step-5", {"app/.metadata": METADATA, "app/__0_0.distcp": b"d"}, **OLD),
    yes("torchtitan", "step-500", {**DCP, ".metadata": METADATA}),
    no("torchtitan, still writing", "step-500", {**DCP, ".metadata.tmp": METADATA}, **OLD),
    no("torchtitan as HF, its index just written", "step-500", HF_SHARDS),
    yes("torchtitan as HF", "step-500", HF_SHARDS, **OLD),
    *[
        case
        for title, parts in (("ZeRO 3", ZERO_3), ("bf16", BF16), ("tensor parallel", PARALLEL), ("pipeline", PIPELINE))
        for case in (
            no(f"DeepSpeed {title} unnamed", "global_step5", parts, **OLD),
            yes(f"DeepSpeed {title} named", "global_step5", parts, beside={"latest": b"global_step5"}),
            no(
                f"DeepSpeed {title} named, a part cut short",
                "global_step5",
                {**parts, "mp_rank_00_model_states.pt": archive(40)},
                beside={"latest": b"global_step5"},
            ),
        )
    ],
    no("DeepSpeed under the HF trainer, just now", "checkpoint-5", HF_DEEPSPEED),
    yes("DeepSpeed under the HF trainer", "checkpoint-5", HF_DEEPSPEED, **OLD),
    yes(
        "Megatron's distributed kind",
        "iter_0000100",
        {**DCP, ".metadata": METADATA, "common.pt": archive()},
        beside={"latest_checkpointed_iteration.txt": b"100"},
    ),
    no(
        "Megatron's distributed kind, a part gone",
        "iter_0000100",
        {".metadata": METADATA, "common.pt": archive()},
        beside={"latest_checkpointed_iteration.txt": b"100"},
    ),
    no("Lightning just now", "last.ckpt", archive()),
    yes("Lightning", "last.ckpt", archive(), **OLD),
    yes("Lightning after a kill", "epoch=0-step=5.ckpt", archive(), **KILLED),
    no("Lightning cut short", "last.ckpt", archive(40), **OLD),
    yes("Lightning sharded", "last.ckpt", {**DCP, ".metadata": METADATA, "meta.pt": archive()}),
    no("Lightning sharded, still writing", "last.ckpt", {**DCP, "meta.pt": archive()}, **OLD),
    yes("Lightning with DeepSpeed", "last.ckpt", LIGHTNING_DEEPSPEED, **OLD),
    no("Lightning with DeepSpeed, just now", "last.ckpt", LIGHTNING_DEEPSPEED),
    yes("Orbax", "5", ORBAX, **OLD),
    yes("Orbax in a bucket's folder, at once", "5", {**ORBAX, "commit_success.txt": b""}),
    no("Orbax, a part not renamed yet", "5", {**ORBAX, "state.orbax-checkpoint-tmp-3/d": b"d"}, **OLD, **CLEAN),
    no("Orbax just now", "5", ORBAX),
    no("shard missing", "step-5", SHARDED, **OLD),
    no("a shard cut short", "step-5", {**SHARDED, "b.safetensors": safetensors(1)}, **OLD),
    no("shards below, one missing", "step-5", {f"unet/{name}": data for name, data in SHARDED.items()}, **OLD),
    no("the index itself is cut", "step-5", {**SHARDED, "model.safetensors.index.json": b'{"weight'}, **OLD),
    yes("all shards there", "step-5", {**SHARDED, "b.safetensors": safetensors()}, **OLD),
    no("HF on many ranks says incomplete", "checkpoint-5", {**RANKS, "checkpoint-is-incomplete.txt": b""}, **CLEAN),
    no("accelerate just now", "checkpoint_3", ACCELERATE),
    yes("accelerate on two ranks", "checkpoint_3", ACCELERATE, **OLD),
    no("accelerate, optimizer cut short", "checkpoint_3", {**ACCELERATE, "optimizer.bin": archive(40)}, **OLD),
    no("accelerate with FSDP, still writing", "checkpoint_3", {**ACCELERATE, **FSDP}, **OLD),
    yes("accelerate with FSDP", "checkpoint_3", {**ACCELERATE, **FSDP, "optimizer_0/.metadata": b"m"}, **OLD),
    yes("accelerate", "checkpoint_3", {"optimizer.bin": archive(), "random_states_0.pkl": b"r"}, **OLD),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_an_entry_counts_only_when_it_is_certainly_complete(case: Case, tmp_path: Path) -> None:
    _write(tmp_path, case.name, case.content)
    for name, data in case.beside.items():
        (tmp_path / name).write_bytes(data)
    seen = manifest.scan(str(tmp_path), case.name)
    pointed = frozenset().union(*(complete.pointed_names(data.decode()) for data in case.beside.values()))
    around = complete.CompletenessContext(
        pointed=pointed,
        pointer_ns=seen.changed_ns + (1 if case.later else -1) if case.beside else 0,
        stable_s=case.stable_s,
        settle_s=SETTLE_S,
        ended_cleanly=case.ended_cleanly,
    )
    verdict = complete.judge(str(tmp_path), seen, around)
    assert verdict.complete is case.complete, verdict.why


@pytest.mark.parametrize(
    ("name", "content", "step"),
    [
        ("checkpoint-500", {"trainer_state.json": state(500)}, 500),
        ("last.ckpt", b"x", None),
        ("epoch=3-step=400.ckpt", b"x", 400),
        ("step_000123", {"w": b"x"}, 123),
        ("iter_0000100", {"w": b"x"}, 100),
        ("17.npz", b"x", 17),
        ("a" + "9" * 40, b"x", None),
    ],
)
def test_the_step_is_read_from_content_or_name(
    name: str, content: bytes | dict[str, bytes], step: int | None, tmp_path: Path
) -> None:
    _write(tmp_path, name, content)
    assert complete.step_of(str(tmp_path), manifest.scan(str(tmp_path), name)) == step


def test_a_whole_checkpoint_named_latest_is_no_pointer(tmp_path: Path) -> None:
    (tmp_path / "latest").write_bytes(b"w" * 5000)
    assert not complete.is_pointer(str(tmp_path), "latest")
    (tmp_path / "latest").write_bytes(b"global_step5")
    assert complete.is_pointer(str(tmp_path), "latest")


def test_a_stage_keeps_what_rotation_removes(tmp_path: Path) -> None:
    folder, home = tmp_path / "ckpt", tmp_path / "home"
    _write(folder, "step-1", {"w": b"weights", "sub/o": b"optimizer"})
    seen = manifest.scan(str(folder), "step-1")
    stage = manifest.stage(str(folder), seen, str(home / "stage"))
    for file in ("w", "sub/o"):
        (folder / "step-1" / file).unlink()
    descriptor = stage.open(seen.inside()["w"])
    assert os.read(descriptor, 100) == b"weights"
    os.close(descriptor)
    stage.release()
    assert not (home / "stage").exists()


def test_a_file_written_over_in_place_is_noticed_through_its_stage(tmp_path: Path) -> None:
    folder = tmp_path / "ckpt"
    _write(folder, "step-1", {"w": b"weights"})
    seen = manifest.scan(str(folder), "step-1")
    stage = manifest.stage(str(folder), seen, str(tmp_path / "stage"))
    with (folder / "step-1/w").open("r+b") as stream:
        stream.write(b"other, longer")
    with pytest.raises(manifest.Vanished):
        stage.open(seen.inside()["w"])


@every(
    ("path", "target", "inside"),
    [
        ("c/a", "b", True),
        ("c/d/a", "../b", True),
        ("c/a", "../other", False),
        ("c/d/a", "../../x", False),
        ("c/a", "/etc/passwd", False),
        ("c/a", "d/../../x", False),
        ("c/a", "", False),
    ],
)
def test_a_link_counts_as_inside_only_when_no_other_link_can_lead_it_out(
    path: str, target: str, *, inside: bool
) -> None:
    assert manifest.leads_inside(path, target) is inside


def _write(folder: Path, name: str, content: bytes | Mapping[str, bytes]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    if isinstance(content, bytes):
        (folder / name).write_bytes(content)
        return
    (folder / name).mkdir()
    for path, data in content.items():
        place = folder / name / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(data)


class Watched:
    """A checkpoint folder and what the runner takes of it, on a clock of its own; nothing is sent."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        self.folder = folder / "checkpoints"
        store = store_of(runner_grant(Rig(folder)))
        known = ChunkIndex(str(folder / "known"), store.prefix)
        monkeypatch.setattr(checkpoint_uploader, "steady", lambda: self.now)
        rules = {"settle_s": SETTLE_S}
        self.uploader = CheckpointUploader(store, known, str(self.folder), str(folder / "home"), rules, 65_536)

    def taken_at(self, now: float, end: CommandEnd | None = None) -> int:
        """How many entries wait to be sent after the scan of this moment."""
        self.now = now
        self.uploader._scan(end)
        return self.uploader.queued


def test_what_a_killed_command_wrote_last_is_no_checkpoint_however_long_it_lies_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched = Watched(tmp_path, monkeypatch)
    _write(watched.folder, "step-1", {"w": b"half of it"})
    killed = CommandEnd(cleanly=False, at=1.0)
    assert [watched.taken_at(0.0), watched.taken_at(100.0, killed)] == [0, 0]


def test_what_is_left_of_a_checkpoint_that_is_being_removed_is_no_other_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched = Watched(tmp_path, monkeypatch)
    _write(watched.folder, "step-1", {"w": b"weights", "o": b"optimizer"})
    assert [watched.taken_at(0.0), watched.taken_at(SETTLE_S)] == [0, 1]
    (watched.folder / "step-1" / "o").unlink()
    assert [watched.taken_at(20.0), watched.taken_at(40.0)] == [1, 1]


def test_no_name_is_published_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    uploader = Watched(tmp_path, monkeypatch).uploader
    names = []
    for serial in range(3):
        names.append(uploader._unique_name("step-1", serial))
        uploader._published.add(names[-1])
    assert names == ["step-1", "step-1~2", "step-1~3"]
