"""Task files of SkyPilot and dstack: what is read of them, what is left out, and what is refused, in sentences."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from spotd.cli.entry import CommandFailed
from spotd.cli.inputs.draft import DEPTH_MAX, YamlRefused, read_draft, read_yaml
from spotd.cli.inputs.task_files import TaskFile, read_task
from spotd_jobs.spec.model import JobSpec, MarketChoice
from tests.cases import every

TASKS = Path(__file__).with_name("tasks")
BASH = ["bash", "-c"]


def task(name: str) -> TaskFile:
    path = next(TASKS.glob(f"{name}.*"))
    return read_task(read_yaml(path.read_bytes()), stem=path.stem)


def at(found: TaskFile, path: str) -> Any:
    value: Any = found.job
    for part in path.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value


READ: dict[str, dict[str, Any]] = {
    "sky-hello": {
        "name": "sky-hello", "workdir": ".", "setup": "echo set up", "env.SKYPILOT_NODE_RANK": "0",
        "run": [*BASH, "echo hello from $SKYPILOT_NODE_RANK"],
        "resources.gpu": ["V100:8"], "resources.providers": ["aws"],
    },
    "sky-finetune": {
        "name": "tune_llama-8b", "env.EPOCHS": "3", "env.DEBUG": "no", "secrets": ["HF_TOKEN"],
        "resources.gpu": ["A100-80GB:1", "H100:1"], "resources.market": "spot", "resources.disk": "512GB",
        "image": "pytorch/pytorch:2.8.0-cuda12.6-cudnn9-runtime", "checkpoint.path": "/checkpoints",
        "env.SKYPILOT_NUM_GPUS_PER_NODE": "1", "workdir": "./tuner",
    },
    "sky-any-of": {
        "resources.gpu": ["A10G:1", "L4:1", "RTX4090:1"], "resources.providers": ["aws", "runpod"],
        "resources.regions": ["us-east-1"], "resources.cpus": 8, "resources.memory": "32GB",
    },
    "sky-data": {
        "resources.gpu": ["T4:1"], "resources.market": "on-demand",
        "data": [
            {"source": "s3://public-images/train", "path": "data"},
            {"source": "./local-set", "path": "set"},
        ],
    },
    "sky-cpu": {
        "resources.cpus": 16, "resources.memory": "64GB", "resources.providers": ["kubernetes"],
        "secrets": ["AWS_SECRET_ACCESS_KEY"], "env": None,
    },
    "sky-price": {"price.max_price": "0.9/h", "resources.gpu": ["RTX3090:2"], "resources.providers": ["vast"]},
    "ds-train": {
        "run": [*BASH, "set -e\npip install trl\naccelerate launch --num_processes $DSTACK_GPUS_PER_NODE sft.py"],
        "env": {"DSTACK_GPUS_PER_NODE": "1", "LOG_LEVEL": "info"}, "secrets": ["HF_TOKEN"],
        "resources.min_vram": "24GB", "resources.gpu_count": None,
    },
    "ds-image": {
        "image": "rocm/pytorch:rocm6.0", "resources.gpu": ["MI300X:1"], "resources.disk": "150GB",
        "resources.cpus": 16, "resources.memory": "64GB", "resources.market": "auto", "price.max_price": "4.5/h",
        "schedule.max_duration": "6h", "env.WANDB_PROJECT": "tuning", "secrets": ["WANDB_API_KEY"],
    },
    "ds-volumes": {
        "resources.gpu": ["A100-40GB:2"], "checkpoint.path": "/checkpoints", "resources.market": "spot",
    },
    "ds-ports": {
        "resources.gpu": ["RTX4090:1", "RTX3090:1"], "resources.providers": ["aws", "vast"],
        "resources.regions": ["us-east-1"], "schedule.priority": 50, "schedule.max_duration": None,
    },
    "ds-files": {"data": [{"source": "./set", "path": "data"}, {"source": ".", "path": "repo"}],
                 "resources.min_vram": "1GB", "resources.gpu_count": None, "resources.disk": "200GB"},
    "sky-several-nodes": {
        "nodes": 2, "env": None, "resources.gpu": ["A100:8"],
        "run": [*BASH, 'export SKYPILOT_NUM_NODES="$SPOTD_NODES"\ntorchrun --nnodes=$SKYPILOT_NUM_NODES train.py'],
    },
    "ds-nodes": {
        "nodes": 2, "resources.gpu_count": 8, "env.DSTACK_GPUS_NUM": "16",
        "run": [
            *BASH,
            'export DSTACK_MASTER_NODE_IP="$MASTER_ADDR"\nset -e\ntorchrun --master-addr=$DSTACK_MASTER_NODE_IP',
        ],
    },
    "ds-cpu": {"resources.cpus": 4, "resources.memory": "16GB", "resources.gpu": None},
}  # fmt: skip
IGNORED = {
    "sky-finetune": ["resources.accelerators", "resources.disk_tier", "resources.job_recovery",
                     "file_mounts./checkpoints", "SKYPILOT_TASK_ID"],
    "sky-data": ["resources.ports", "resources.autostop", "resources.labels", "file_mounts./data",
                 "file_mounts.~/set", "file_mounts./conf/one.json", "file_mounts./gcs"],
    "sky-hello": ["resources.use_spot"],
    "sky-any-of": ["resources.any_of", "resources.use_spot"],
    "sky-cpu": ["secrets", "resources.use_spot"],
    "sky-price": ["config", "experimental"],
    "ds-train": ["python", "resources.shm_size", "spot_policy"],
    "ds-volumes": ["volumes /models"],
    "ds-ports": ["ports", "retry", "idle_duration", "backends", "spot_policy"],
    "ds-files": ["working_dir", "registry_auth", "fleets", "spot_policy"],
}  # fmt: skip
REFUSED = {
    "sky-service": ["service"],
    "sky-tpu": ["resources.accelerators"],
    "sky-git": ["workdir", "resources.accelerators"],
    "ds-service": ["type"],
    "ds-devenv": ["type"],
    "ds-tpu": ["resources.gpu"],
}


def test_there_are_twenty_files_and_each_is_read_or_refused() -> None:
    names = {path.name.partition(".")[0] for path in TASKS.iterdir()}
    assert len(names) == 20
    assert names == READ.keys() | REFUSED.keys()
    assert not READ.keys() & REFUSED.keys()


@every("name", READ)
def test_the_common_part_is_read(name: str) -> None:
    found = task(name)
    assert found.refusals == []
    assert {path: at(found, path) for path in READ[name]} == READ[name]


@every("name", IGNORED)
def test_each_key_that_is_not_read_is_named_with_a_sentence(name: str) -> None:
    found = task(name)
    assert sorted(key for key, _ in found.ignored) == sorted(IGNORED[name])
    assert all(len(why) > 10 for _, why in found.ignored)


@every("name", REFUSED)
def test_what_is_no_job_of_spotd_is_refused_with_a_sentence(name: str) -> None:
    assert [one.key for one in task(name).refusals] == REFUSED[name]


@every("name", READ)
def test_what_was_read_is_a_job_that_the_parser_takes(name: str) -> None:
    path = next(TASKS.glob(f"{name}.*"))
    flags: dict[str, Any] = {} if "image" in task(name).job else {"image": "python:3.12"}
    flags |= {"checkpoint": {"saved_by": "first"}} if "nodes" in task(name).job else {}
    spec = read_draft(str(path), flags).check()
    assert isinstance(spec, JobSpec)


def test_flags_go_over_the_file_and_what_is_missing_is_asked_for_as_a_flag(capsys: pytest.CaptureFixture[str]) -> None:
    path = str(TASKS / "sky-price.yaml")
    spec = read_draft(path, {"image": "me", "resources": {"market": "auto"}}).check()
    assert spec.resources.market is MarketChoice.AUTO
    assert "sky-price.yaml: config is not read: settings of the other tool's own" in capsys.readouterr().err
    with pytest.raises(CommandFailed) as refused:
        read_draft(path, {}).check()
    assert list(refused.value.rows) == [("--image: is missing", f"give --image: {path} names none")]


def test_several_nodes_are_a_job_of_several_machines_once_it_is_said_which_of_them_saves() -> None:
    path = str(TASKS / "sky-several-nodes.yaml")
    spec = read_draft(path, {"image": "me", "checkpoint": {"saved_by": "first"}}).check()
    assert spec.resources.nodes == 2
    with pytest.raises(CommandFailed) as refused:
        read_draft(path, {"image": "me"}).check()
    [(sentence, hint)] = refused.value.rows
    assert "several machines run the command" in sentence
    assert "--saved-by" in hint


@pytest.mark.parametrize("words", ["1", "", "one", "-2", "2..4", "0", "99999999999", "nan"])
def test_a_number_of_nodes_that_is_none_is_refused_and_one_node_is_an_ordinary_job(words: str, tmp_path: Path) -> None:
    path = tmp_path / "task.yaml"
    path.write_text(f"resources: {{accelerators: A100}}\nnum_nodes: {words}\nrun: true\n")
    if words in ("1", ""):
        assert read_draft(str(path), {"image": "me"}).check().resources.nodes == 1
        return
    with pytest.raises(CommandFailed):
        read_draft(str(path), {"image": "me", "checkpoint": {"saved_by": "first"}}).check()


def test_no_value_of_a_secret_is_taken_from_the_file() -> None:
    assert "hunter2" not in str(task("sky-cpu").job)


# YAML itself.


def laughs() -> bytes:
    lines = ["a0: &a0 [lol, lol]"] + [f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]" for n in range(1, 30)]
    return "\n".join(lines).encode()


@every(
    ("raw", "words", "line"),
    [
        pytest.param(laughs(), "uses the alias *a0", 2, id="a billion laughs"),
        pytest.param(b"run: x\n" + b"#" * 2_000_000, "larger than 1 MB", None, id="2 MB"),
        pytest.param(b"run: a\nresources: {}\nrun: b\n", "the key run twice", 3, id="a key twice"),
        pytest.param(b"run: a\n\tname: b\n", "is not YAML", 2, id="a tab"),
        pytest.param(b"run: [a\n", "is not YAML", 2, id="cut"),
        pytest.param(b"a: " + b"[" * 5000, f"nested deeper than {DEPTH_MAX}", 1, id="deep"),
        pytest.param(b"x: [" + b"1," * 30_000 + b"]", "more than 20,000 values", 1, id="many"),
        pytest.param(b"run: !!python/object/apply:os.system [id]\n", "a tag that makes an object", 1, id="an object"),
        pytest.param(b"run: !env HOME\n", "the tag !env", 1, id="a tag"),
        pytest.param(b"a: 1\n---\nb: 2\n", "several documents", 2, id="a pipeline"),
        pytest.param(b"base: &b {x: 1}\nuse:\n  <<: {x: 1}\n", "merges tables", 3, id="a merge"),
        pytest.param(b"- a\n- b\n", "holds no table", None, id="a list"),
        pytest.param(b"", "holds no table", None, id="nothing"),
        pytest.param(b"\xff\xfe", "is not UTF-8", None, id="bytes"),
        pytest.param(b"a: \x00\n", "is not YAML", None, id="a NUL"),
        pytest.param(b"? [a]\n: b\n", "a key that is no text", 1, id="a key of a list"),
    ],
)
def test_a_document_that_could_harm_or_mislead_is_refused_with_its_line(
    raw: bytes, words: str, line: int | None
) -> None:
    with pytest.raises(YamlRefused, match=words.replace("*", r"\*")) as refused:
        read_yaml(raw)
    assert refused.value.line == line
    assert refused.value.hint


def test_every_value_is_the_text_that_was_written() -> None:
    raw = b"a: no\nb: 3.10\nc: 22:30\nd: 0777\ne: ~\nf: '~'\ng: 2026-01-01\nh: |\n  two\n  lines\n"
    assert read_yaml(raw) == {
        "a": "no", "b": "3.10", "c": "22:30", "d": "0777", "e": "", "f": "~", "g": "2026-01-01", "h": "two\nlines\n",
    }  # fmt: skip


@pytest.mark.process
def test_yaml_is_imported_for_a_yaml_file_alone() -> None:
    code = (
        "import sys; from spotd.cli.inputs.draft import read_draft;"
        f"read_draft(None, {{'name': 'x'}}); before = 'yaml' in sys.modules;"
        f"read_draft({str(TASKS / 'sky-hello.yaml')!r}, {{}}); print(before, 'yaml' in sys.modules)"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout == "False True\n"
