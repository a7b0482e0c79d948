from __future__ import annotations

import math
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spotd_jobs.spec.codec import spec_from_json, spec_to_json
from spotd_jobs.spec.keys import job_file
from spotd_jobs.spec.model import (
    CheckpointPolicy,
    GpuAlternative,
    GpuSpeed,
    JobSpec,
    MarketChoice,
    PriceLimit,
    Resources,
    SavedBy,
    Work,
)
from spotd_jobs.spec.parse import KNOWN, merge, parse_job, read_toml
from spotd_jobs.spec.problems import Problem, SpecError
from tests.cases import every

FULL = """
name = "llama-lora"
run = "python train.py --output $SPOTD_CHECKPOINT_DIR"
setup = "pip install -r requirements.txt"
image = "pytorch/pytorch:2.9.0-cuda12.8-cudnn9-runtime"
workdir = "."
env = { HF_HOME = "/workspace/hf" }
secrets = ["WANDB_API_KEY"]
outputs = ["out/**"]
[resources]
gpu = ["H100:1", "A100-80GB:2"]
disk = "100GB"
cpus = 8
memory = "64GB"
min_cuda = "12.4"
min_reliability = 0.98
regions = ["us-east-1"]
providers = ["vast", "aws"]
market = "auto"
[price]
max_price = 2.40
[budget]
job = 120.0
[checkpoint]
path = "/workspace/checkpoints"
every = "15m"
keep = 5
settle = "3s"
stop_signal = "SIGUSR1"
stop_grace = "90s"
[schedule]
priority = -3
[retry]
errors = 2
starts = 7
[work]
time = "24h"
steps = 100000
[speed]
H100 = 1.0
A100-80GB = 0.42
"""
LEAST: Mapping[str, Any] = {"name": "j", "run": "true", "image": "busybox", "resources": {"gpu": "H100"}}


def least(**changes: Any) -> dict[str, Any]:
    return merge(LEAST, changes)


def problems_of(data: Mapping[str, Any]) -> dict[str, Problem]:
    with pytest.raises(SpecError) as caught:
        parse_job(data, "train.toml")
    found = {problem.key: problem for problem in caught.value.problems}
    assert len(found) == len(caught.value.problems), "one problem a key"
    for problem in found.values():
        assert problem.message
        assert problem.hint
        assert problem.sentence("train.toml") in str(caught.value)
    return found


def test_the_whole_job_file_is_understood() -> None:
    assert parse_job(tomllib.loads(FULL), "train.toml", base=Path("/home/me/project")) == JobSpec(
        name="llama-lora",
        run=("/bin/sh", "-c", "python train.py --output $SPOTD_CHECKPOINT_DIR"),
        setup="pip install -r requirements.txt",
        image="pytorch/pytorch:2.9.0-cuda12.8-cudnn9-runtime",
        workdir="/home/me/project",
        env=(("HF_HOME", "/workspace/hf"),),
        secrets=("WANDB_API_KEY",),
        outputs=("out/**",),
        resources=Resources(
            gpu=(GpuAlternative(name="H100", count=1), GpuAlternative(name="A100-80GB", count=2)),
            disk_gb=100,
            cpus=8,
            memory_mb=64_000,
            min_cuda="12.4",
            min_reliability=0.98,
            regions=("us-east-1",),
            providers=("vast", "aws"),
            market=MarketChoice.AUTO,
        ),
        price=PriceLimit(per_gpu_hour=2_400_000),
        job_budget=120_000_000,
        checkpoint=CheckpointPolicy(
            path="/workspace/checkpoints",
            every=timedelta(minutes=15),
            keep=5,
            settle=timedelta(seconds=3),
            stop_signal="SIGUSR1",
            stop_grace=timedelta(seconds=90),
        ),
        priority=-3,
        retry_errors=2,
        retry_starts=7,
        work=Work(time=timedelta(hours=24), steps=100_000),
        speed=(GpuSpeed(name="A100-80GB", ppm=420_000), GpuSpeed(name="H100", ppm=1_000_000)),
    )


def test_what_is_left_out_takes_the_model_default() -> None:
    assert parse_job(LEAST, "flags") == JobSpec(
        name="j",
        run=("/bin/sh", "-c", "true"),
        image="busybox",
        resources=Resources(gpu=(GpuAlternative(name="H100", count=1),)),
    )


def test_an_argument_list_runs_without_a_shell() -> None:
    assert parse_job(least(run=["python", "a b.py", ""]), "x").run == ("python", "a b.py", "")


def test_a_job_may_run_on_several_machines() -> None:
    made = parse_job(least(nodes=4, checkpoint={"saved_by": "first"}), "job.toml")
    assert (made.resources.nodes, made.checkpoint.saved_by) == (4, SavedBy.FIRST)
    parts = parse_job(least(nodes="2..4", checkpoint={"saved_by": "all"}), "job.toml")
    assert parts.checkpoint.saved_by is SavedBy.ALL
    assert job_file(made)["nodes"] == 4
    one = parse_job(least(nodes=1), "job.toml")
    assert one == parse_job(least(), "job.toml")
    assert "nodes" not in job_file(one)


@every(
    ("text", "fewest", "most", "again"),
    [("2..4", 2, 4, "2..4"), (" 2 .. 64 ", 2, 64, "2..64"), ("3..3", 3, None, 3), ("4", 4, None, 4)],
)
def test_machines_may_be_a_range(text: str, fewest: int, most: int | None, again: object) -> None:
    made = parse_job(least(nodes=text, checkpoint={"saved_by": "first"}), "job.toml")
    assert (made.resources.nodes, made.resources.nodes_max) == (fewest, most)
    assert job_file(made)["nodes"] == again
    assert parse_job(least(**job_file(made)), "job.toml").resources == made.resources
    assert spec_from_json(spec_to_json(made)) == made


def test_vram_may_stand_in_place_of_names() -> None:
    data = {**LEAST, "resources": {"min_vram": "40GB", "gpu_count": 2}}
    resources = parse_job(data, "x").resources
    assert (resources.gpu, resources.min_vram_mb, resources.gpu_count) == ((), 40_000, 2)


def test_the_workdir_is_taken_from_the_folder_of_the_job_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    assert parse_job(least(workdir="../code"), "x", base=Path("/a/jobs")).workdir == "/a/code"
    assert parse_job(least(workdir="/abs"), "x", base=Path("/a")).workdir == "/abs"
    assert parse_job(least(workdir="~/code"), "x", base=Path("/a")).workdir == "/home/me/code"


BAD: list[Any] = [
    pytest.param({"name": None}, "name", "is missing", 'write name = "llama-lora"', id="no name"),
    pytest.param({"name": "Llama LoRA"}, "name", "may hold only a-z", 'write name = "llama-lora"', id="name"),
    pytest.param({"name": "x" * 64}, "name", "at most 63 long", "write name", id="long name"),
    pytest.param({"name": 3}, "name", "must be text, not a number", "write name", id="name type"),
    pytest.param({"run": None}, "run", "is missing", "python train.py", id="no run"),
    pytest.param({"run": "  "}, "run", "must not be empty", "python train.py", id="blank run"),
    pytest.param({"run": []}, "run", "must not be empty", "python train.py", id="empty run"),
    pytest.param({"run": ["python", 3]}, "run", "entry 2 is a number", 'write it in quotes: "3"', id="run entry"),
    pytest.param({"run": ["", "x"]}, "run", "must start with the program", "python", id="run without program"),
    pytest.param({"run": 5}, "run", "must be text or a list of texts, not a number", "python", id="run type"),
    pytest.param({"run": "a\0b"}, "run", "NUL", "python", id="run NUL"),
    pytest.param({"setup": ["a"]}, "setup", "must be text, not a list", "pip install", id="setup list"),
    pytest.param({"image": None}, "image", "is missing", "pytorch/pytorch", id="no image"),
    pytest.param({"image": "my image"}, "image", "is not the name of a container image", "pytorch/", id="image"),
    pytest.param({"workdir": 1}, "workdir", "must be text, not a number", 'workdir = "."', id="workdir type"),
    pytest.param({"env": {"N": 1}}, "env.N", "must be text, not a number", 'N = "1"', id="env number"),
    pytest.param({"env": {"D": True}}, "env.D", "not true or false", 'D = "true"', id="env bool"),
    pytest.param({"env": {"A-B": "x"}}, "env.A-B", "not a name for an environment", "letters, digits", id="env name"),
    pytest.param({"env": {"a.b": "x"}}, 'env."a.b"', "not a name for an environment", "letters", id="env dot"),
    pytest.param({"env": {"SPOTD_RESUME": "x"}}, "env.SPOTD_RESUME", "is set by spotd itself", "SPOTD_", id="env own"),
    pytest.param({"env": "A=1"}, "env", "must be a table, not text", "env = {", id="env text"),
    pytest.param({"secrets": "KEY"}, "secrets", "must be a list, not text", 'secrets = ["WANDB', id="secrets text"),
    pytest.param({"secrets": ["1x"]}, "secrets[0]", "not a name", "letters", id="secret name"),
    pytest.param({"secrets": ["A", "A"]}, "secrets[1]", '"A" is given twice', "remove", id="secret twice"),
    pytest.param({"secrets": ["A"], "env": {"A": "v"}}, "secrets", "A is also in env", "remove it from env", id="both"),
    pytest.param({"outputs": ["/out"]}, "outputs[0]", "must not start with /", 'outputs = ["out/**"]', id="absolute"),
    pytest.param({"outputs": ["../x"]}, "outputs[0]", "must not leave the working folder", "out/**", id="outside"),
    pytest.param({"resources": None}, "resources.gpu", "is missing", 'min_vram = "40GB"', id="no GPU"),
    pytest.param({"resources": 3}, "resources", "must be a table, not a number", "[resources]", id="no table"),
    pytest.param({"resources": {"gpu": []}}, "resources.gpu", "must not be empty", "H100:1", id="empty GPU list"),
    pytest.param({"resources": {"gpu": "8xH100"}}, "resources.gpu", "count in front", 'write "H100:8"', id="8x"),
    pytest.param({"resources": {"gpu": ["H100:0"]}}, "resources.gpu[0]", "not for 1 to 16", "H100:1", id="zero GPUs"),
    pytest.param({"resources": {"gpu": ["H100:two"]}}, "resources.gpu[0]", 'asks for "two" GPUs', "H100:1", id="two"),
    pytest.param({"resources": {"gpu": ["H100", 1]}}, "resources.gpu[1]", "not a number", "H100:1", id="GPU type"),
    pytest.param(
        {"resources": {"gpu": "H100", "min_vram": "40GB"}},
        "resources.min_vram",
        "beside gpu",
        "remove one",
        id="two ways",
    ),
    pytest.param(
        {"resources": {"gpu": "H100", "gpu_count": 2}},
        "resources.gpu_count",
        "beside gpu",
        '"H100:8"',
        id="count twice",
    ),
    pytest.param({"resources": {"disk": 100}}, "resources.disk", "no unit of size", '"100GB"', id="disk number"),
    pytest.param({"resources": {"disk": "0GB"}}, "resources.disk", "not between 1GB and 100TB", "bounds", id="no disk"),
    pytest.param({"resources": {"cpus": 0}}, "resources.cpus", "0 is not between 1 and 4096", "cpus = 8", id="cpus"),
    pytest.param({"resources": {"cpus": 1.5}}, "resources.cpus", "1.5 is not a whole number", "cpus = 8", id="half"),
    pytest.param({"resources": {"cpus": True}}, "resources.cpus", "is true or false", "cpus = 8", id="cpus bool"),
    pytest.param({"resources": {"min_cuda": 12.4}}, "resources.min_cuda", "12.10 as a number", '"12.4"', id="cuda"),
    pytest.param({"resources": {"min_cuda": "new"}}, "resources.min_cuda", "not a CUDA version", '"12.4"', id="cuda?"),
    pytest.param(
        {"resources": {"min_reliability": 98}},
        "resources.min_reliability",
        "98 is not between",
        "98 percent is 0.98",
        id="%",
    ),
    pytest.param(
        {"resources": {"min_reliability": float("nan")}}, "resources.min_reliability", "not nan", "0.98", id="nan rate"
    ),
    pytest.param(
        {"resources": {"market": "spott"}}, "resources.market", "spot, on-demand, auto", 'mean "spot"?', id="market"
    ),
    pytest.param({"resources": {"regions": ["a b"]}}, "resources.regions[0]", "only letters", "us-east-1", id="region"),
    pytest.param({"price": {"max_price": 0}}, "price.max_price", "must be above 0", "19.20/h", id="free"),
    pytest.param({"price": {"max_price": -1}}, "price.max_price", "-1 is negative", "19.20/h", id="negative price"),
    pytest.param({"price": {"max_price": float("nan")}}, "price.max_price", "nan is not", "19.20/h", id="nan price"),
    pytest.param({"price": {"max_price": "2/day"}}, "price.max_price", 'unknown unit "/day"', "19.20/h", id="per day"),
    pytest.param({"price": {"max_price": True}}, "price.max_price", "True is not", "19.20/h", id="bool price"),
    pytest.param({"budget": {"job": 0}}, "budget.job", "must be above 0", "leave it out", id="no budget"),
    pytest.param({"budget": {"job": float("inf")}}, "budget.job", "inf is not", "write dollars", id="endless budget"),
    pytest.param({"checkpoint": {"path": "../up"}}, "checkpoint.path", "must not hold ..", "$SPOTD", id="path up"),
    pytest.param({"checkpoint": {"path": "/"}}, "checkpoint.path", "more than checkpoints", "$SPOTD", id="path root"),
    pytest.param({"work": {"time": "0s"}}, "work.time", "between 1s and 3650d", "bounds", id="work 0"),
    pytest.param({"work": {"steps": 0}}, "work.steps", "not between 1 and", "steps = 100000", id="steps 0"),
    pytest.param({"work": {"steps": 1e300}}, "work.steps", "whole number", "steps = 100000", id="steps float"),
    pytest.param({"speed": 2}, "speed", "must be a table, not a number", "H100 = 1.0", id="speed no table"),
    pytest.param({"speed": {"H100": 0}}, "speed.H100", "not between 0.001 and 1000", "H100 = 1.0", id="speed 0"),
    pytest.param({"speed": {"H100": -1}}, "speed.H100", "not between 0.001", "H100 = 1.0", id="speed negative"),
    pytest.param({"speed": {"H100": math.nan}}, "speed.H100", "nan is not between", "H100 = 1.0", id="speed nan"),
    pytest.param({"speed": {"H100": 1e308}}, "speed.H100", "not between", "H100 = 1.0", id="speed huge"),
    pytest.param({"speed": {"H100": 10**400}}, "speed.H100", "not between", "H100 = 1.0", id="speed beyond float"),
    pytest.param({"speed": {"H100": True}}, "speed.H100", "must be a number", "H100 = 1.0", id="speed bool"),
    pytest.param({"speed": {"": 1}}, 'speed.""', "not a name", "H100 = 1.0", id="speed no name"),
    pytest.param({"speed": {f"G{n}": 1 for n in range(65)}}, "speed", "more than 64", "name only", id="speeds"),
    pytest.param({"nodes": 0}, "nodes", "0 is not between 1 and 64", "nodes = 4", id="no node"),
    pytest.param({"nodes": -1}, "nodes", "-1 is not between", "nodes = 4", id="nodes negative"),
    pytest.param({"nodes": 65}, "nodes", "65 is not between", "nodes = 4", id="nodes many"),
    pytest.param({"nodes": math.nan}, "nodes", "whole number", "nodes = 4", id="nodes nan"),
    pytest.param({"nodes": "1..4"}, "nodes", "no range of several machines: from 2", '"2..4"', id="nodes from one"),
    pytest.param({"nodes": "0..4"}, "nodes", "no range of several machines", '"2..4"', id="nodes from none"),
    pytest.param({"nodes": "4..2"}, "nodes", "no range of several machines", '"2..4"', id="nodes backwards"),
    pytest.param({"nodes": "2..65"}, "nodes", "up to 64", '"2..4"', id="nodes range many"),
    pytest.param({"nodes": "2.."}, "nodes", "whole number", '"2..4"', id="nodes open range"),
    pytest.param({"nodes": "-2..4"}, "nodes", "whole number", '"2..4"', id="nodes range negative"),
    pytest.param({"nodes": "2..1e308"}, "nodes", "whole number", '"2..4"', id="nodes range of floats"),
    pytest.param({"nodes": "2..4"}, "checkpoint.saved_by", "is missing", 'saved_by = "first"', id="range who saves"),
    pytest.param({"nodes": 4}, "checkpoint.saved_by", "is missing", 'saved_by = "first"', id="nodes who saves"),
    pytest.param({"checkpoint": {"saved_by": "first"}}, "checkpoint.saved_by", "several", "nodes = 4", id="saved by"),
    pytest.param(
        {"nodes": 4, "checkpoint": {"saved_by": "each"}},
        "checkpoint.saved_by",
        "one of first",
        "write",
        id="saved by each",
    ),
    pytest.param(
        {"nodes": 4, "price": {"max_price": "19.20/h"}},
        "price.max_price",
        "how many machines",
        "2.40",
        id="nodes price",
    ),
    pytest.param(
        {"nodes": 4, "schedule": {"preempt": True}}, "schedule.preempt", "beside nodes", "remove", id="nodes preempt"
    ),
    pytest.param({"nodes": 4, "resources": None}, "nodes", "machines with GPUs", "remove nodes", id="nodes cpus"),
    pytest.param(
        {"resources": {"on_demand_after": "2h"}},
        "resources.on_demand_after",
        "market",
        'market = "auto"',
        id="patience",
    ),
    pytest.param(
        {"resources": {"on_demand_after": "2h", "market": "spot"}},
        "resources.on_demand_after",
        "changes the market",
        'market = "auto"',
        id="patience on spot",
    ),
    pytest.param(
        {"resources": {"on_demand_after": "2h", "market": "auto"}, "schedule": {"deadline": "36h"}},
        "resources.on_demand_after",
        "beside a deadline",
        "remove one",
        id="patience and deadline",
    ),
    pytest.param(
        {"resources": {"on_demand_after": "31d", "market": "auto"}},
        "resources.on_demand_after",
        "between 0s and 30d",
        "bounds",
        id="patience of a month",
    ),
    pytest.param(
        {"resources": {"on_demand_after": 2, "market": "auto"}},
        "resources.on_demand_after",
        "2 has no unit",
        '"',
        id="patience without unit",
    ),
    pytest.param({"checkpoint": {"every": 15}}, "checkpoint.every", "15 has no unit of time", '"15m"', id="every"),
    pytest.param({"checkpoint": {"every": "0s"}}, "checkpoint.every", "between 1ms and 7d", "bounds", id="every 0"),
    pytest.param({"checkpoint": {"keep": 0}}, "checkpoint.keep", "0 is not between", "keep = 3", id="keep none"),
    pytest.param(
        {"checkpoint": {"stop_signal": "TERM"}}, "checkpoint.stop_signal", "not a signal", "SIGTERM", id="TERM"
    ),
    pytest.param({"checkpoint": {"stop_signal": "SIGUSR"}}, "checkpoint.stop_signal", "not a sig", "SIGUSR", id="USR"),
    pytest.param({"checkpoint": {"stop_signal": 15}}, "checkpoint.stop_signal", "15 is not a signal", "SIG", id="15"),
    pytest.param(
        {"checkpoint": {"stop_signal": "SIGKILL"}}, "checkpoint.stop_signal", "cannot be caught", "SIGTERM", id="KILL"
    ),
    pytest.param(
        {"checkpoint": {"stop_grace": "2d"}}, "checkpoint.stop_grace", "between 0s and 1d", "bounds", id="grace"
    ),
    pytest.param({"schedule": {"priority": 1001}}, "schedule.priority", "between -1000 and 1000", "= 0", id="priority"),
    pytest.param({"schedule": {"priority": "high"}}, "schedule.priority", '"high" is not a whole', "= 0", id="high"),
    pytest.param({"retry": {"errors": -1}}, "retry.errors", "-1 is not between 0 and 100", "errors = 1", id="retry"),
]


def test_a_job_may_take_on_demand_after_a_while() -> None:
    resources = {"gpu": "H100", "market": "auto", "on_demand_after": "2h"}
    spec = parse_job({**LEAST, "resources": resources}, "")
    assert spec.resources.on_demand_after == timedelta(hours=2)
    assert job_file(spec)["resources"]["on_demand_after"] == "2h"
    assert parse_job({**LEAST, "resources": {**resources, "on_demand_after": "0s"}}, "").resources.on_demand_after == (
        timedelta(0)
    )
    assert parse_job(LEAST, "").resources.on_demand_after is None


@every(("changes", "key", "message", "hint"), BAD)
def test_a_bad_value_is_refused_with_its_key_and_a_way_out(
    changes: Mapping[str, Any], key: str, message: str, hint: str
) -> None:
    data = {**LEAST}
    for name, value in changes.items():
        if value is None:
            data.pop(name)
        elif isinstance(value, Mapping) and name != "env" and "gpu" not in value:
            data[name] = {**data.get(name, {}), **value}
        else:
            data[name] = value
    found = problems_of(data)
    assert key in found
    assert message in found[key].message
    assert hint in found[key].hint


@every(
    ("changes", "key", "hint"),
    [
        pytest.param({"nmae": "x"}, "nmae", 'did you mean "name"?', id="typo"),
        pytest.param({"gpu": "H100"}, "gpu", 'did you mean "resources.gpu"?', id="wrong table"),
        pytest.param(
            {"price": {"nodes": 4}},
            "price.nodes",
            '"nodes" stands in no table: write it above the first line with [',
            id="below a table",
        ),
        pytest.param({"resources": {"max_price": 1}}, "resources.max_price", '"price.max_price"?', id="other table"),
        pytest.param({"resources": {"min_ram": "1GB"}}, "resources.min_ram", '"min_vram"?', id="letter"),
        pytest.param({"checkpoint": {"stop-grace": "1s"}}, "checkpoint.stop-grace", '"stop_grace"?', id="dash"),
        pytest.param({"chekpoint": {"keep": 1}}, "chekpoint", 'did you mean "checkpoint"?', id="table typo"),
        pytest.param({"array": "0-15"}, "array", "spotctl submit JOB.toml --array 0-15", id="flag: array"),
        pytest.param({"resume_from": "a"}, "resume_from", "--resume-from JOB", id="flag: resume_from"),
        pytest.param({"include": [".env"]}, "include", "--include PATH", id="flag: include"),
        pytest.param({"retry": {"zzz": 1}}, "retry.zzz", "known keys here: errors", id="nothing near"),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest_known_one(changes: dict[str, Any], key: str, hint: str) -> None:
    found = problems_of(merge(LEAST, changes))
    assert list(found) == [key]
    assert found[key].message == "unknown key"
    assert hint in found[key].hint


def test_every_problem_is_reported_and_located() -> None:
    text = FULL.replace('"100GB"', "100").replace("priority = -3", 'prio = 1\ndeadline = "1"').replace("2.40", "nan")
    with pytest.raises(SpecError) as caught:
        parse_job(tomllib.loads(text), "train.toml")
    located = caught.value.located(text)
    lines = text.splitlines()
    assert [problem.key for problem in located.problems] == [
        "resources.disk",
        "price.max_price",
        "schedule.prio",
        "schedule.deadline",
    ]
    for problem in located.problems:
        assert problem.line is not None
        assert lines[problem.line - 1].startswith(problem.key.rpartition(".")[2])
    assert str(located).splitlines()[0] == (
        'train.toml:12: resources.disk: 100 has no unit of size (write "100GB" for gigabytes)'
    )


def test_flags_override_the_file_key_by_key() -> None:
    file = {"name": "a", "env": {"A": "1", "B": "2"}, "price": {"max_price": 1.0}, "outputs": ["x"]}
    flags = {"name": None, "env": {"B": "3"}, "price": {"max_price": "2.0"}, "outputs": ["y"], "budget": {"job": None}}
    assert merge(file, flags) == {
        "name": "a",
        "env": {"A": "1", "B": "3"},
        "price": {"max_price": "2.0"},
        "outputs": ["y"],
    }
    assert file["env"] == {"A": "1", "B": "2"}, "the file's data is not changed"


def test_a_flag_for_one_way_to_name_the_gpu_puts_out_the_other() -> None:
    by_name = {"resources": {"gpu": "H100", "disk": "1GB"}}
    by_size = {"resources": {"min_vram": "40GB", "gpu_count": 2, "disk": "1GB"}}
    assert merge(by_name, {"resources": {"min_vram": "24GB"}}) == {"resources": {"min_vram": "24GB", "disk": "1GB"}}
    assert merge(by_size, {"resources": {"gpu": "A100"}}) == {"resources": {"gpu": "A100", "disk": "1GB"}}
    both = {"resources": {"gpu": "A100", "min_vram": "1GB"}}
    assert merge({}, both) == both, "two flags that contradict each other are for parse_job to refuse"


def test_a_flag_does_not_hide_that_the_file_is_wrong() -> None:
    merged = merge({**LEAST, "price": 3}, {"price": {"max_price": 1}})
    assert problems_of(merged)["price"].message == "must be a table, not a number"


JUNK = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=6), inner, max_size=3)),
    max_leaves=6,
)


@given(
    st.dictionaries(st.sampled_from(sorted(KNOWN[""] | {name for name in KNOWN if name})), JUNK, max_size=4),
    st.dictionaries(
        st.sampled_from(sorted(name for name in KNOWN if name)),
        st.dictionaries(st.sampled_from(sorted(set().union(*KNOWN.values()))), JUNK, max_size=4),
        max_size=4,
    ),
)
def test_any_junk_is_a_job_or_a_list_of_problems(top: dict[str, Any], tables: dict[str, Any]) -> None:
    refused: tuple[Problem, ...] = ()
    try:
        spec = parse_job({**LEAST, **top, **tables}, "junk")
    except SpecError as exc:
        refused = exc.problems
    else:
        assert spec.run
        return
    assert refused
    assert all(problem.hint for problem in refused)


@pytest.mark.parametrize(
    ("content", "message", "line"),
    [
        pytest.param(b"name = llama\n", "not valid TOML", 1, id="no quotes"),
        pytest.param(b'name = "a"\n[price\n', "not valid TOML", 2, id="open table"),
        pytest.param(b"a = 1\na = 2\n", "not valid TOML", 2, id="twice"),
        pytest.param(b'name = "\xff"\n', "not UTF-8 text", 1, id="latin-1"),
        pytest.param(b"a = " + b"[" * 5000, "", None, id="deep"),
        pytest.param(b"#" * 1_000_001, "larger than 1 MB", None, id="huge"),
    ],
)
def test_a_file_that_is_no_toml_is_refused_with_its_line(
    tmp_path: Path, content: bytes, message: str, line: int | None
) -> None:
    path = tmp_path / "train.toml"
    path.write_bytes(content)
    with pytest.raises(SpecError) as caught:
        read_toml(path, refusal=SpecError)
    (problem,) = caught.value.problems
    assert message in problem.message
    assert line in (None, problem.line)
    assert problem.hint
    assert str(path) in str(caught.value)


def test_a_missing_file_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"absent\.toml: no such file \(check the path"):
        read_toml(tmp_path / "absent.toml", refusal=SpecError)
    with pytest.raises(SpecError, match="this is a folder, not a file"):
        read_toml(tmp_path, refusal=SpecError)


@pytest.mark.process
def test_the_client_can_parse_without_heavy_imports() -> None:
    script = (
        "import sys; before = set(sys.modules); import spotd_jobs.spec.parse, spotd_jobs.spec.parse, spotd_jobs.pack; "
        "print(sorted({name.partition('.')[0] for name in set(sys.modules) - before}))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert not {"pydantic", "pathspec", "httpx", "sqlmodel", "anyio"} & set(eval(done.stdout))  # noqa: S307  # our own list
