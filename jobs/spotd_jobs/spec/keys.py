"""Every key of the job file, declared once: where its value goes, how it is read and shown, and the flag for it."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, fields
from datetime import timedelta
from enum import StrEnum
from typing import Any, Final

from spotd_jobs.spec import model, units
from spotd_jobs.spec.data import DATASET_NAME, read_data, shown_data
from spotd_jobs.spec.fields import (
    Convert,
    Table,
    bounded,
    choice,
    deadline_words,
    env_name,
    fraction,
    integer,
    kind,
    parse_deadline,
    parse_window,
    parse_zone,
    shown,
    text,
    truth,
    window_words,
)
from spotd_jobs.spec.problems import BadValue, nearest

STOP_SIGNALS: Final = frozenset(
    {"SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGALRM", "SIGCONT", "SIGXCPU"}
)
"""Signals a process can catch and that mean something to training frameworks."""

_WORD_PATTERN: Final = r"[A-Za-z0-9][A-Za-z0-9._-]*"
_GPU: Final = re.compile(r"\s*(?P<name>[A-Za-z0-9][A-Za-z0-9 ._-]*?)\s*(?::\s*(?P<count>[^:]*?)\s*)?")
GPU_HINT: Final = 'write gpu = ["H100:1", "A100-80GB:1"]: a name, and after a colon how many in one machine'
_NODES: Final = 'nodes = 4, or nodes = "2..4"'
_RANGE: Final = re.compile(r"\s*([0-9]{1,9})\s*\.\.\s*([0-9]{1,9})\s*")
_GPU_NAME: Final = r"[A-Za-z0-9][A-Za-z0-9 ._-]{0,63}"
SPEED_EXAMPLE: Final = "[speed] with H100 = 1.0 and A100-80GB = 0.42 below it"
STEPS_MAX: Final = 10**12
SPEED_MIN: Final = 0.001
SPEED_MAX: Final = 1000.0
_COUNT_MAX: Final = 16
NODES_MAX: Final = 64
_RUN: Final = 'run = "python train.py" or run = ["python", "train.py"]'
_IMAGE: Final = 'image = "pytorch/pytorch:2.9.0-cuda12.8-cudnn9-runtime"'
_SHELL: Final = ("/bin/sh", "-c")
_DAY: Final = timedelta(days=1)


@dataclass(frozen=True, slots=True)
class JobKey:
    """One key of the job file.

    Attributes:
        path: in the file, as in `checkpoint.keep`.
        read: gives the converted value of a table's key, and keeps what is wrong with it.
        flag, metavar, help, type, repeated: of the flag for it. Without a metavar the command takes it in its own way.
        field: of `JobSpec`, as in `resources.disk_gb`; the same as `path` where it is empty.
        show: gives the value as the file has it; `None` or empty where it has none.
        missing: how to write it, where a job cannot do without.
    """

    path: str
    read: Callable[[Table, str], Any]
    flag: str = ""
    metavar: str = ""
    help: str = ""
    type: type = str
    repeated: bool = False
    field: str = ""
    show: Callable[[model.JobSpec], Any] | None = None
    missing: str = ""

    @property
    def place(self) -> tuple[str, str]:
        """The part of `JobSpec` that holds it, empty for the job itself, and its name there."""
        part, _, name = (self.field or self.path).rpartition(".")
        return part, name

    def shown(self, spec: model.JobSpec) -> Any:
        """Return its value in this job as a job file has it."""
        if self.show is not None:
            return self.show(spec)
        part, name = self.place
        value = getattr(getattr(spec, part) if part else spec, name)
        if isinstance(value, timedelta):
            return units.format_duration(value)
        if isinstance(value, tuple):
            return list(value)
        return value.value if isinstance(value, StrEnum) else value


def _one(convert: Convert[Any]) -> Callable[[Table, str], Any]:
    return lambda table, key: table.take(key, convert, None)


def _many(
    convert: Convert[Any], example: str, *, least: int = 0, most: int = 64, lone: bool = False
) -> Callable[[Table, str], Any]:
    return lambda table, key: table.take_list(key, convert, count_min=least, count_max=most, example=example, lone=lone)


def _words(example: str) -> Callable[[Table, str], Any]:
    rule = "may hold only letters, digits, '.', '_' and '-'"
    return _many(text(length_max=64, example=example, pattern=_WORD_PATTERN, rule=rule), example)


def _span(*, least: timedelta = timedelta(0), most: timedelta = _DAY, words: str = "0s and 1d") -> Convert[timedelta]:
    return bounded(units.parse_duration, least=least, most=most, words=words)


def _name(value: object) -> str:
    rule = "may hold only a-z, 0-9, '.', '_' and '-', must start with a letter or digit and be at most 63 long"
    if isinstance(value, str) and value.strip() and not re.fullmatch(DATASET_NAME, value):
        slug = re.sub(r"[^a-z0-9._-]+", "-", value.lower()).strip("._-")[:63].rstrip("._-")
        raise BadValue(f"{shown(value)} {rule}", hint=f'write name = "{slug or "llama-lora"}"')
    return text(length_max=63, example='name = "llama-lora"')(value)


def _run(value: object) -> tuple[str, ...]:
    if isinstance(value, str):
        return ("/bin/sh", "-c", text(length_max=65_536, example=_RUN)(value))
    if not isinstance(value, list | tuple):
        raise BadValue(f"must be text or a list of texts, not {kind(value)}", hint=f"write {_RUN}")
    if not value:
        raise BadValue("must not be empty", hint=f"write {_RUN}")
    for index, part in enumerate(value):
        if not isinstance(part, str):
            raise BadValue(
                f"must hold only texts; entry {index + 1} is {kind(part)}", hint=f'write it in quotes: "{part}"'
            )
        if "\0" in part:
            raise BadValue("must not hold a NUL character", hint=f"write {_RUN}")
    if not value[0].strip():
        raise BadValue("must start with the program to run", hint=f"write {_RUN}")
    if sum(map(len, value)) > 65_536 or len(value) > 1024:
        raise BadValue("is too long for a command line", hint="put it into a script in the workdir")
    return tuple(value)


def _output(value: object) -> str:
    example = 'outputs = ["out/**"]'
    pattern = text(length_max=1024, example=example)(value)
    if pattern.startswith("/"):
        raise BadValue(f"{shown(value)} must not start with /", hint=f"name it from the working folder: {example}")
    if ".." in pattern.split("/"):
        raise BadValue(f"{shown(value)} must not leave the working folder with ..", hint=f"write {example}")
    return pattern


def _budget(value: object) -> int:
    amount = units.parse_money(value)
    if amount == 0:
        raise BadValue("must be above 0", hint="write job = 120.0, or leave it out for no limit")
    return amount


def _gpu(value: object) -> model.GpuAlternative:
    """Return the name and count of `H100:8`; the name is not resolved here.

    Raises:
        BadValue: not such a text, or a count that no machine has.
    """
    if not isinstance(value, str):
        raise BadValue(f'must be text like "H100:1", not {kind(value)}', hint=GPU_HINT)
    if swapped := re.fullmatch(r"\s*(\d+)\s*[xX]\s*([A-Za-z].*?)\s*", value):
        raise BadValue(f"{shown(value)} has the count in front", hint=f'write "{swapped[2]}:{swapped[1]}"')
    match = _GPU.fullmatch(value) if len(value) <= 80 else None
    if match is None:
        raise BadValue(f"{shown(value)} is not a GPU name with a count", hint=GPU_HINT)
    count = match["count"]
    if count is None:
        return model.GpuAlternative(name=match["name"], count=1)
    if not re.fullmatch(r"[0-9]{1,4}", count) or not 1 <= int(count) <= _COUNT_MAX:
        raise BadValue(f'{shown(value)} asks for "{count}" GPUs, not for 1 to {_COUNT_MAX}', hint=GPU_HINT)
    return model.GpuAlternative(name=match["name"], count=int(count))


def _nodes(value: object) -> tuple[int, int | None]:
    """Return the fewest machines, and the most where it is a range."""
    ends = _RANGE.fullmatch(value) if isinstance(value, str) else None
    if ends is None:
        number = int(value) if isinstance(value, str) and re.fullmatch(r"[0-9]{1,9}", value) else value
        return integer(least=1, most=NODES_MAX, example=_NODES)(number), None
    fewest, most = int(ends[1]), int(ends[2])
    if not 2 <= fewest <= most <= NODES_MAX:
        raise BadValue(
            f"{shown(value)} is no range of several machines: from 2, up to {NODES_MAX}", hint=f"write {_NODES}"
        )
    return fewest, most if most > fewest else None


def _shown_nodes(spec: model.JobSpec) -> int | str | None:
    wanted = spec.resources
    if wanted.nodes_max:
        return wanted.nodes_words
    return None if wanted.nodes == 1 else wanted.nodes


def _speeds(table: Table, key: str) -> tuple[model.GpuSpeed, ...]:
    found = table.take_numbers(
        key, least=SPEED_MIN, most=SPEED_MAX, count_max=64, name_pattern=_GPU_NAME, example=SPEED_EXAMPLE
    )
    return tuple(model.GpuSpeed(name=name, ppm=round(speed * units.MICRO)) for name, speed in found)


def _cuda(value: object) -> str:
    hint = 'write min_cuda = "12.4", in quotes'
    if not isinstance(value, str):
        raise BadValue(f"must be text, not {kind(value)} (12.10 as a number would be 12.1)", hint=hint)
    if not re.fullmatch(r"[0-9]{1,2}\.[0-9]{1,2}", value):
        raise BadValue(f"{shown(value)} is not a CUDA version", hint=hint)
    return value


def _checkpoint_path(value: object) -> str:
    example = 'path = "/workspace/checkpoints", or leave it out to use $SPOTD_CHECKPOINT_DIR'
    path = text(length_max=4096, example=example)(value)
    if ".." in path.split("/"):
        raise BadValue(f"{shown(value)} must not hold ..", hint=f"write {example}")
    if not path.strip("/."):
        raise BadValue(f"{shown(value)} holds more than checkpoints", hint=f"write {example}")
    return path


def _stop_signal(value: object) -> str:
    if isinstance(value, str) and value in STOP_SIGNALS:
        return value
    if value in ("SIGKILL", "SIGSTOP"):
        raise BadValue(f"{value} cannot be caught, so the job could not save", hint='write stop_signal = "SIGTERM"')
    spelled = str(value).upper()
    guess = f"SIG{spelled}" if f"SIG{spelled}" in STOP_SIGNALS else nearest(spelled, STOP_SIGNALS)
    hint = f'did you mean "{guess}"?' if guess else f"write one of {', '.join(sorted(STOP_SIGNALS))}"
    raise BadValue(f"{shown(value)} is not a signal that a job can be stopped with", hint=hint)


def _max_price(spec: model.JobSpec) -> float | str | None:
    limit = spec.price
    if limit is not None and limit.machine_hour is not None:
        return f"{_dollars(limit.machine_hour):g}/h"
    return None if limit is None or limit.per_gpu_hour is None else _dollars(limit.per_gpu_hour)


def _dollars(amount: int) -> float:
    return amount / units.MICRO


def _megabytes(size: int | None) -> str | None:
    return None if size is None else f"{size}MB"


_SIZE_MB: Final = bounded(units.parse_size_mb, least=1, most=100_000_000, words="1MB and 100TB")
_WATCHED: Final = _span(least=timedelta(seconds=1), most=7 * _DAY, words="1s and 7d")
_SIZE_GB: Final = bounded(units.parse_size_gb, least=1, most=100_000, words="1GB and 100TB")

KEYS: Final = (
    JobKey("name", _one(_name), "--name", "NAME", "Name of the job, 63 characters at most.",
           missing='write name = "llama-lora"'),
    JobKey("resources.gpu", _many(_gpu, 'gpu = ["H100:1"]', least=1, most=32, lone=True),
           "--gpu", "NAME[:N]", "Acceptable GPU and count; may be repeated.", repeated=True,
           show=lambda spec: [f"{one.name}:{one.count}" for one in spec.resources.gpu]),
    JobKey("resources.min_vram", _one(_SIZE_MB),
           "--min-vram", "SIZE", "Any GPU with so much memory, instead of --gpu.",
           field="resources.min_vram_mb", show=lambda spec: _megabytes(spec.resources.min_vram_mb)),
    JobKey("resources.gpu_count", _one(integer(least=1, most=_COUNT_MAX, example="gpu_count = 1")),
           "--gpu-count", "N", "GPUs per machine, with --min-vram.", type=int,
           show=lambda spec: None if spec.resources.gpu else spec.resources.gpu_count or None),
    JobKey("nodes", _one(_nodes), "--nodes", "N", "Machines that run the command together; 2..4 for a range.",
           field="resources.nodes", show=_shown_nodes),
    JobKey("replace_within", _one(_span()), "--replace-within", "SPAN",
           "With --nodes: how long the others wait for another in the place of a lost one, say 10m.",
           show=lambda spec: units.format_duration(spec.replace_within) if spec.replace_within else None),
    JobKey("image", _one(text(length_max=512, example=_IMAGE, pattern=r"[A-Za-z0-9][A-Za-z0-9._:/@-]*",
                              rule="is not the name of a container image")),
           "--image", "IMAGE", "Container image.", missing=f"write {_IMAGE}"),
    JobKey("reuse", _one(truth(example="reuse = false")),
           "--no-reuse", help="Neither take over the machine of a job that is done nor leave its own to one.",
           show=lambda spec: None if spec.reuse else False),
    JobKey("price.max_price", _one(units.parse_price),
           "--max-price", "USD", "Ceiling per GPU-hour; 19.20/h for the machine.", field="price", show=_max_price),
    JobKey("budget.job", _one(_budget), "--budget", "USD", "Most that the whole job may cost.",
           field="job_budget", show=lambda spec: None if spec.job_budget is None else _dollars(spec.job_budget)),
    JobKey("resources.disk", _one(_SIZE_GB), "--disk", "SIZE", "Disk of the machine, say 100GB.",
           field="resources.disk_gb", show=lambda spec: f"{spec.resources.disk_gb}GB"),
    JobKey("resources.cpus", _one(integer(least=1, most=4096, example="cpus = 8")),
           "--cpus", "N", "Least number of CPUs.", type=int),
    JobKey("resources.memory", _one(_SIZE_MB), "--memory", "SIZE", "Least main memory.",
           field="resources.memory_mb", show=lambda spec: _megabytes(spec.resources.memory_mb)),
    JobKey("resources.min_cuda", _one(_cuda), "--min-cuda", "VERSION", "Least CUDA version."),
    JobKey("resources.min_reliability", _one(fraction(example="min_reliability = 0.98")),
           "--min-reliability", "0..1", "Least reliability.", type=float),
    JobKey("resources.market", _one(choice(model.MarketChoice)),
           "--market", "MARKET", "spot, on-demand or auto; absent: spot where sold."),
    JobKey("resources.on_demand_after", _one(_span(most=30 * _DAY, words="0s and 30d")),
           "--on-demand-after", "SPAN", "With --market auto: only spot until it waited so long, say 2h."),
    JobKey("resources.rent_after", _one(_span(most=30 * _DAY, words="0s and 30d")),
           "--rent-after", "SPAN", "Only own machines until it waited so long for one, say 2h."),
    JobKey("resources.providers", _words('providers = ["vast"]'),
           "--provider", "NAME", "Only this provider; may be repeated.", repeated=True),
    JobKey("resources.regions", _words('regions = ["us-east-1"]'),
           "--region", "NAME", "Only this region; may be repeated.", repeated=True),
    JobKey("workdir", _one(text(length_max=4096, example='workdir = "."')),
           "--workdir", "DIR", "Pack this folder and run there."),
    JobKey("setup", _one(text(length_max=65_536, example='setup = "pip install -r requirements.txt"')),
           "--setup", "COMMAND", "Shell command before the job, on every machine."),
    JobKey("outputs", _many(_output, 'outputs = ["out/**"]'),
           "--outputs", "GLOB", "Files to keep on success; may be repeated.", repeated=True),
    JobKey("checkpoint.path", _one(_checkpoint_path),
           "--checkpoint-path", "PATH", "Where checkpoints appear on the machine."),
    JobKey("checkpoint.every", _one(_span(least=timedelta(milliseconds=1), most=7 * _DAY, words="1ms and 7d")),
           "--every", "SPAN", "How often the job saves, say 15m."),
    JobKey("checkpoint.keep", _one(integer(least=1, most=1000, example="keep = 3")),
           "--keep", "N", "Checkpoints to keep.", type=int),
    JobKey("checkpoint.metric", _one(text(length_max=100, example='metric = "eval_loss"')),
           "--metric", "NAME", "Number in each checkpoint; the best is kept too."),
    JobKey("checkpoint.best", _one(choice(model.MetricBest)),
           "--best", "WHICH", "lowest or highest value of the metric.",
           show=lambda spec: None if spec.checkpoint.metric is None else spec.checkpoint.best.value),
    JobKey("checkpoint.saved_by", _one(choice(model.SavedBy)), "--saved-by", "WHICH",
           "With --nodes: first, where the first machine alone saves, or all, where each saves a part."),
    JobKey("checkpoint.stop_signal", _one(_stop_signal), "--stop-signal", "SIGNAL", "Sent before the machine ends."),
    JobKey("checkpoint.stop_grace", _one(_span()), "--stop-grace", "SPAN", "Time to save after that, say 90s."),
    JobKey("schedule.priority", _one(integer(least=-1000, most=1000, example="priority = 0")),
           "--priority", "N", "-1000 to 1000.", type=int, field="priority"),
    JobKey("schedule.deadline", _one(parse_deadline),
           "--deadline", "WHEN", "Be done by then: 36h from now, or an instant with its zone.",
           show=lambda spec: deadline_words(spec.schedule.deadline)),
    JobKey("schedule.max_duration",
           _one(_span(least=timedelta(minutes=1), most=units.DURATION_MAX, words="1m and 3650d")),
           "--max-duration", "SPAN", "End it once its command ran so long, on all machines together."),
    JobKey("schedule.policy", _one(choice(model.PolicyName)),
           "--policy", "NAME", "How it meets its deadline; slack-pacing unless given."),
    JobKey("schedule.windows", _many(parse_window, 'windows = ["Mon-Fri 22:00-08:00"]', least=1, most=32, lone=True),
           "--window", "SPAN", "Run only then, say 'Mon-Fri 22:00-08:00'; may be repeated.", repeated=True,
           show=lambda spec: [window_words(one) for one in spec.schedule.windows]),
    JobKey("schedule.preempt", _one(truth(example="preempt = true")), "--preempt",
           help="Stop jobs of lower priority, saved, where it could start at once.",
           show=lambda spec: spec.schedule.preempt or None),
    JobKey("schedule.after", _words('after = ["prep-data"]'),
           "--after", "JOB", "Run after this job has succeeded; may be repeated.", repeated=True),
    JobKey("schedule.timezone", _one(parse_zone), "--timezone", "ZONE", "Time zone of the windows, say Europe/Kyiv."),
    JobKey("retry.errors", _one(integer(least=0, most=100, example="errors = 1")),
           "--retries", "N", "Tries after failures of the job's own code.", type=int, field="retry_errors"),
    JobKey("retry.starts", _one(integer(least=1, most=100, example="starts = 5")),
           "--starts", "N", "Failed starts in a row that end the job; 5 unless given.", type=int, field="retry_starts"),
    JobKey("work.time", _one(_span(least=timedelta(seconds=1), most=units.DURATION_MAX, words="1s and 3650d")),
           "--work-time", "SPAN", "How long it works in all at speed 1.0, say 24h."),
    JobKey("work.steps", _one(integer(least=1, most=STEPS_MAX, example="steps = 100000")),
           "--work-steps", "N", "How many steps it makes in all.", type=int),
    JobKey("watchdog.min_gpu_util", _one(integer(least=1, most=100, example="min_gpu_util = 5")),
           "--min-gpu-util", "PERCENT", "Use of the busiest GPU below which the job counts as stalled.", type=int),
    JobKey("watchdog.window", _one(_WATCHED), "--gpu-window", "SPAN", "For so long below it; 20m unless given.",
           show=lambda spec: spec.watchdog.min_gpu_util and units.format_duration(spec.watchdog.window)),
    JobKey("watchdog.no_progress", _one(_WATCHED),
           "--no-progress", "SPAN", "Stalled without new output, step or checkpoint for so long, say 1h."),
    JobKey("watchdog.action", _one(choice(model.StallAction)),
           "--on-stall", "ACTION", "move or stop; it saves first, and moves unless given.",
           show=lambda spec: spec.watchdog.action.value if spec.watchdog.is_on else None),
    JobKey("run", _one(_run), "the command behind --", missing=f"write {_RUN}",
           help="Command of the job: a line for the shell, or a list of words.",
           show=lambda spec: spec.run[2] if spec.run[:2] == _SHELL and len(spec.run) == 3 else list(spec.run)),
    JobKey("env", lambda table, key: table.take_env(key, count_max=256, length_max=32_768), "--env",
           help="Variables of the job, by name.",
           show=lambda spec: dict(spec.env)),
    JobKey("secrets", _many(env_name, 'secrets = ["WANDB_API_KEY"]'), "--secret",
           help="Names of variables whose values are secret; they are read where the job is submitted."),
    JobKey("checkpoint.settle", _one(_span()),
           help="A checkpoint without a mark of its framework is complete once nothing in it has changed for so long."),
    JobKey("speed", _speeds, help="How fast the job is on each GPU, against 1.0.",
           show=lambda spec: {one.name: one.ppm / units.MICRO for one in spec.speed}),
    JobKey("data", read_data,
           help="Datasets, each a [[data]] table: source (a name that `spotctl data put` gave, a folder as in"
           " ./set, an https URL, s3://BUCKET/PREFIX or hf://OWNER/NAME@REVISION), path (where it lies below the"
           " job's folder), sha256 and mode (copy).",
           show=shown_data),
)  # fmt: skip
"""In the order in which `spotctl submit --help` lists the flags."""

FLAGS: Final = {key.path: key.flag for key in KEYS if key.flag}
"""The flag of each key that has one."""


_PARTS: Final = {
    "": model.JobSpec,
    "resources": model.Resources,
    "checkpoint": model.CheckpointPolicy,
    "schedule": model.Schedule,
    "work": model.Work,
    "watchdog": model.WatchdogPolicy,
}


def _model_place(key: JobKey) -> tuple[int, int]:
    part, name = key.place
    order = [[one.name for one in fields(model)] for model in (model.JobSpec, _PARTS[part])]
    return order[0].index(part or name), order[1].index(name)


FILE_ORDER: Final = tuple(sorted(KEYS, key=_model_place))
"""The keys in the order of the model, in which a job file is read and shown."""


def job_file(spec: model.JobSpec) -> dict[str, Any]:
    """Return the job in the shape of a job file, defaults filled in, without keys that have no value."""
    result: dict[str, Any] = {}
    for key in FILE_ORDER:
        value = key.shown(spec)
        if value is not None and value not in ({}, []):
            table, _, name = key.path.rpartition(".")
            (result.setdefault(table, {}) if table else result)[name] = value
    return result
