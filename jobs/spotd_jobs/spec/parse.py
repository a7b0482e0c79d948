"""From a job file, or the same given by flags, to one frozen `JobSpec`.

Every problem is reported, not only the first, each with its full key and a way out. Unknown keys are refused with the
nearest known one; keys that the job file will have one day are refused as not available yet, never ignored, because a
deadline that is silently dropped is worse than one that is refused.
"""

from __future__ import annotations

import os.path
import re
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

from spotd_jobs.spec import units
from spotd_jobs.spec.fields import Table, bounded, choice, env_name, fraction, integer, kind, shown, text
from spotd_jobs.spec.model import CheckpointPolicy, GpuAlternative, JobSpec, MarketChoice, MetricBest, Resources
from spotd_jobs.spec.problems import BadValue, Problem, SpecError, nearest

KNOWN: Final[Mapping[str, frozenset[str]]] = {
    "": frozenset({"name", "run", "setup", "image", "workdir", "env", "secrets", "outputs"}),
    "resources": frozenset(
        {"gpu", "min_vram", "gpu_count", "disk", "cpus", "memory", "min_cuda", "min_reliability", "regions"}
        | {"providers", "market"}
    ),
    "price": frozenset({"max_price"}),
    "budget": frozenset({"job"}),
    "checkpoint": frozenset({"path", "every", "keep", "metric", "best", "settle", "stop_signal", "stop_grace"}),
    "schedule": frozenset({"priority"}),
    "retry": frozenset({"errors", "starts"}),
}
"""Every key a job file may hold, by table."""

NOT_YET: Final[Mapping[str, str]] = {
    "schedule.deadline": "remove it; a job runs until it is done or its budget is spent",
    "schedule.windows": "remove it; a job runs at any hour that its price limit allows",
    "schedule.timezone": "remove it; it only matters for windows",
    "schedule.after": "remove it and submit this job when the other one has succeeded",
    "schedule.max_duration": "remove it; [budget] job limits what the job may cost",
    "watchdog": "remove the table; a stalled job is not noticed by itself for now",
    "speed": "remove the table; machines are ranked by effective price for now",
}
"""Keys of the job file that are not built yet, with what to do meanwhile."""

STOP_SIGNALS: Final = frozenset(
    {"SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGALRM", "SIGCONT", "SIGXCPU"}
)
"""Signals a process can catch and that mean something to training frameworks."""

_HOMES: Final = {key: f"{table}.{key}" if table else key for table, keys in KNOWN.items() for key in sorted(keys)}
"""The full path of every known key by its last part, for keys that stand in the wrong table."""

_NAME_PATTERN: Final = r"[a-z0-9][a-z0-9._-]{0,62}"
_WORD_PATTERN: Final = r"[A-Za-z0-9][A-Za-z0-9._-]*"
_GPU: Final = re.compile(r"\s*(?P<name>[A-Za-z0-9][A-Za-z0-9 ._-]*?)\s*(?::\s*(?P<count>[^:]*?)\s*)?")
_GPU_HINT: Final = 'write gpu = ["H100:1", "A100-80GB:1"]: a name, and after a colon how many in one machine'
_COUNT_MAX: Final = 16
_EXCLUSIVE: Final = ((("resources", "gpu"),), (("resources", "min_vram"), ("resources", "gpu_count")))


def parse_job(data: Mapping[str, Any], source: str, *, base: Path | None = None) -> JobSpec:
    """Return the job that the data describe; `workdir` is taken from `base`, else from the current folder.

    Raises:
        SpecError: with every problem found.
    """
    problems: list[Problem] = []
    top = Table(data, (), problems)
    tables = {name: top.table(name, example=f"[{name}] on a line of its own") for name in KNOWN if name}
    _refuse_foreign_keys(data, problems)
    top.refuse_unknown(_known_or_reported(""), elsewhere=_HOMES)
    for name, table in tables.items():
        table.refuse_unknown(_known_or_reported(name), elsewhere=_HOMES)
    env = top.take_env("env", count_max=256, length_max=32_768)
    spec = JobSpec(
        name=_name(top),
        run=_run(top),
        setup=top.take("setup", text(length_max=65_536, example='setup = "pip install -r requirements.txt"'), None),
        image=_image(top),
        workdir=_workdir(top, base),
        env=env,
        secrets=_secrets(top, env),
        outputs=top.take_list("outputs", _output, count_max=64, example='outputs = ["out/**"]'),
        resources=_resources(tables["resources"]),
        price=tables["price"].take("max_price", units.parse_price, None),
        job_budget=tables["budget"].take("job", _budget, None),
        checkpoint=_checkpoint(tables["checkpoint"]),
        priority=tables["schedule"].take("priority", integer(least=-1000, most=1000, example="priority = 0"), 0),
        retry_errors=tables["retry"].take("errors", integer(least=0, most=100, example="errors = 1"), 1),
        retry_starts=tables["retry"].take("starts", integer(least=1, most=100, example="starts = 5"), 5),
    )
    if problems:
        raise SpecError(source, problems)
    return spec


def merge(file: Mapping[str, Any], flags: Mapping[str, Any]) -> dict[str, Any]:
    """Return the file's data with the flags laid over it: tables are merged key by key, anything else is replaced.

    A flag that is `None` was not given. A flag that names one of two alternatives (GPU names or a minimum of VRAM)
    puts the other one out of the file.
    """
    merged = _merged(file, flags)
    for one, other in (_EXCLUSIVE, _EXCLUSIVE[::-1]):
        if any(_find(flags, path) is not None for path in one) and not any(
            _find(flags, path) is not None for path in other
        ):
            for table, key in other:
                if isinstance(merged.get(table), dict):
                    merged[table].pop(key, None)
    return merged


def _merged(file: Mapping[str, Any], flags: Mapping[str, Any]) -> dict[str, Any]:
    result = {key: dict(value) if isinstance(value, Mapping) else value for key, value in file.items()}
    for key, value in flags.items():
        if value is None:
            continue
        if isinstance(value, Mapping):
            below = result.get(key, {})
            if isinstance(below, Mapping):  # else the file is wrong here, and parse_job reports it
                merged = _merged(below, value)
                if merged or key in result:
                    result[key] = merged
        else:
            result[key] = value
    return result


def _find(data: Mapping[str, Any], path: tuple[str, ...]) -> Any:
    value: Any = data
    for key in path:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def _known_or_reported(table: str) -> frozenset[str]:
    """Keys that need no report as unknown: they are known, or reported as not available yet or belonging elsewhere."""
    if not table:
        below = {name for name in KNOWN if name} | {path for path in NOT_YET if "." not in path}
        return KNOWN[""] | below
    return KNOWN[table] | {path.partition(".")[2] for path in NOT_YET if path.startswith(f"{table}.")}


def _refuse_foreign_keys(data: Mapping[str, Any], problems: list[Problem]) -> None:
    for path, hint in NOT_YET.items():
        table, _, key = path.rpartition(".")
        holder = data.get(table) if table else data
        if isinstance(holder, Mapping) and key in holder:
            problems.append(Problem(key=path, message="not available yet", hint=hint))


def _name(top: Table) -> str:
    top.required("name", 'write name = "llama-lora"')
    rule = "may hold only a-z, 0-9, '.', '_' and '-', must start with a letter or digit and be at most 63 long"

    def convert(value: object) -> str:
        if isinstance(value, str) and value.strip() and not re.fullmatch(_NAME_PATTERN, value):
            slug = re.sub(r"[^a-z0-9._-]+", "-", value.lower()).strip("._-")[:63].rstrip("._-")
            raise BadValue(f"{shown(value)} {rule}", hint=f'write name = "{slug or "llama-lora"}"')
        return text(length_max=63, example='name = "llama-lora"')(value)

    return top.take("name", convert, "")


def _run(top: Table) -> tuple[str, ...]:
    example = 'run = "python train.py" or run = ["python", "train.py"]'
    top.required("run", f"write {example}")
    shell_text = text(length_max=65_536, example=example)

    def convert(value: object) -> tuple[str, ...]:
        if isinstance(value, str):
            return ("/bin/sh", "-c", shell_text(value))
        if not isinstance(value, list | tuple):
            raise BadValue(f"must be text or a list of texts, not {kind(value)}", hint=f"write {example}")
        if not value:
            raise BadValue("must not be empty", hint=f"write {example}")
        for index, part in enumerate(value):
            if not isinstance(part, str):
                raise BadValue(
                    f"must hold only texts; entry {index + 1} is {kind(part)}", hint=f'write it in quotes: "{part}"'
                )
            if "\0" in part:
                raise BadValue("must not hold a NUL character", hint=f"write {example}")
        if not value[0].strip():
            raise BadValue("must start with the program to run", hint=f"write {example}")
        if sum(map(len, value)) > 65_536 or len(value) > 1024:
            raise BadValue("is too long for a command line", hint="put it into a script in the workdir")
        return tuple(value)

    return top.take("run", convert, ())


def _image(top: Table) -> str:
    example = 'image = "pytorch/pytorch:2.9.0-cuda12.8-cudnn9-runtime"'
    top.required("image", f"write {example}")
    rule = "is not the name of a container image"
    pattern = r"[A-Za-z0-9][A-Za-z0-9._:/@-]*"
    return top.take("image", text(length_max=512, example=example, pattern=pattern, rule=rule), "")


def _workdir(top: Table, base: Path | None) -> str | None:
    given = top.take("workdir", text(length_max=4096, example='workdir = "."'), None)
    if given is None:
        return None
    start = str(base) if base is not None else ""
    # normpath and not realpath: nothing here reads the disk, packing does
    return os.path.normpath(os.path.join(os.path.abspath(start), os.path.expanduser(given)))  # noqa: PTH100, PTH111, PTH118  # pathlib has no lexical normpath


def _secrets(top: Table, env: tuple[tuple[str, str], ...]) -> tuple[str, ...]:
    names = top.take_list("secrets", env_name, count_max=64, example='secrets = ["WANDB_API_KEY"]')
    for name in sorted(set(names) & {name for name, _ in env}):
        top.report("secrets", f"{name} is also in env, where everybody can read it", "remove it from env")
    return names


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


def parse_gpu(value: object) -> GpuAlternative:
    """Return the name and count of `H100:8`; the name is not resolved here.

    Raises:
        BadValue: not such a text, or a count that no machine has.
    """
    if not isinstance(value, str):
        raise BadValue(f'must be text like "H100:1", not {kind(value)}', hint=_GPU_HINT)
    if swapped := re.fullmatch(r"\s*(\d+)\s*[xX]\s*([A-Za-z].*?)\s*", value):
        raise BadValue(f"{shown(value)} has the count in front", hint=f'write "{swapped[2]}:{swapped[1]}"')
    match = _GPU.fullmatch(value) if len(value) <= 80 else None
    if match is None:
        raise BadValue(f"{shown(value)} is not a GPU name with a count", hint=_GPU_HINT)
    count = match["count"]
    if count is None:
        return GpuAlternative(name=match["name"], count=1)
    if not re.fullmatch(r"[0-9]{1,4}", count) or not 1 <= int(count) <= _COUNT_MAX:
        raise BadValue(f'{shown(value)} asks for "{count}" GPUs, not for 1 to {_COUNT_MAX}', hint=_GPU_HINT)
    return GpuAlternative(name=match["name"], count=int(count))


def _resources(table: Table) -> Resources:
    gpu = table.take_list("gpu", parse_gpu, count_min=1, count_max=32, example='gpu = ["H100:1"]', lone=True)
    if "gpu" not in table and "min_vram" not in table:
        table.report("gpu", "is missing", _GPU_HINT + '; or min_vram = "40GB"')
    elif "gpu" in table and "min_vram" in table:
        table.report("min_vram", "cannot stand beside gpu", 'remove one; a name can say the size, as in "A100-80GB:1"')
    elif "gpu" in table and "gpu_count" in table:
        table.report("gpu_count", "cannot stand beside gpu", 'write the count after the name: gpu = "H100:8"')
    size_mb = bounded(units.parse_size_mb, least=1, most=100_000_000, words="1MB and 100TB")
    size_gb = bounded(units.parse_size_gb, least=1, most=100_000, words="1GB and 100TB")
    return Resources(
        gpu=gpu,
        min_vram_mb=table.take("min_vram", size_mb, None),
        gpu_count=table.take("gpu_count", integer(least=1, most=_COUNT_MAX, example="gpu_count = 1"), 1),
        disk_gb=table.take("disk", size_gb, Resources().disk_gb),
        cpus=table.take("cpus", integer(least=1, most=4096, example="cpus = 8"), None),
        memory_mb=table.take("memory", size_mb, None),
        min_cuda=table.take("min_cuda", _cuda, None),
        min_reliability=table.take("min_reliability", fraction(example="min_reliability = 0.98"), None),
        regions=_words(table, "regions", 'regions = ["us-east-1"]'),
        providers=_words(table, "providers", 'providers = ["vast"]'),
        market=table.take("market", choice(MarketChoice), None),
    )


def _words(table: Table, key: str, example: str) -> tuple[str, ...]:
    rule = "may hold only letters, digits, '.', '_' and '-'"
    word = text(length_max=64, example=example, pattern=_WORD_PATTERN, rule=rule)
    return table.take_list(key, word, count_max=64, example=example)


def _cuda(value: object) -> str:
    hint = 'write min_cuda = "12.4", in quotes'
    if not isinstance(value, str):
        raise BadValue(f"must be text, not {kind(value)} (12.10 as a number would be 12.1)", hint=hint)
    if not re.fullmatch(r"[0-9]{1,2}\.[0-9]{1,2}", value):
        raise BadValue(f"{shown(value)} is not a CUDA version", hint=hint)
    return value


def _checkpoint(table: Table) -> CheckpointPolicy:
    usual = CheckpointPolicy()
    day, moment, nothing = timedelta(days=1), timedelta(milliseconds=1), timedelta(0)
    if "best" in table and "metric" not in table:
        table.report("best", "says of no metric which value is the best", 'name it: metric = "eval_loss"')
    return CheckpointPolicy(
        path=table.take("path", _checkpoint_path, None),
        every=table.take("every", bounded(units.parse_duration, least=moment, most=7 * day, words="1ms and 7d"), None),
        keep=table.take("keep", integer(least=1, most=1000, example="keep = 3"), usual.keep),
        metric=table.take("metric", text(length_max=100, example='metric = "eval_loss"'), None),
        best=table.take("best", choice(MetricBest), usual.best),
        settle=table.take(
            "settle", bounded(units.parse_duration, least=nothing, most=day, words="0s and 1d"), usual.settle
        ),
        stop_signal=table.take("stop_signal", _stop_signal, usual.stop_signal),
        stop_grace=table.take(
            "stop_grace", bounded(units.parse_duration, least=nothing, most=day, words="0s and 1d"), usual.stop_grace
        ),
    )


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
