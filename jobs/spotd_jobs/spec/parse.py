"""From a job file, or the same given by flags, to one frozen `JobSpec`.

Every problem is reported, not only the first, each with its full key and a way out. Unknown keys are refused with the
nearest known one, never ignored, because a key that is silently dropped is worse than one that is refused.
"""

from __future__ import annotations

import os.path
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from spotd_jobs.spec.deadlines import DEADLINE_HINT
from spotd_jobs.spec.fields import Table
from spotd_jobs.spec.keys import FILE_ORDER, GPU_HINT
from spotd_jobs.spec.model import (
    CheckpointPolicy,
    JobSpec,
    MarketChoice,
    PolicyName,
    Resources,
    Schedule,
    WatchdogPolicy,
    Work,
)
from spotd_jobs.spec.problems import Problem, SpecError, require_few_values
from spotd_jobs.spec.windows import WINDOW_HINT, ZONE_HINT

_TABLES: Final = {key.path.rpartition(".")[0] for key in FILE_ORDER}
KNOWN: Final[Mapping[str, frozenset[str]]] = {
    table: frozenset(name for other, _, name in (key.path.rpartition(".") for key in FILE_ORDER) if other == table)
    for table in sorted(_TABLES)
}
"""Every key a job file may hold, by table."""

_HOMES: Final = {key: f"{table}.{key}" if table else key for table, keys in KNOWN.items() for key in sorted(keys)}
"""The full path of every known key by its last part, for keys that stand in the wrong table."""

_FLAGS_ALONE: Final = {
    "array": "it is a flag: spotctl submit JOB.toml --array 0-15, and each job reads its index from SPOTD_ARRAY_INDEX",
    "include": "it is a flag: spotctl submit JOB.toml --include PATH",
    "resume_from": "it is a flag: spotctl submit JOB.toml --resume-from JOB",
    "secret_file": "it is a flag: spotctl submit JOB.toml --secret-file FILE",
}
"""What belongs to one submission and stands in no file, with the way to give it."""

_EXCLUSIVE: Final = ((("resources", "gpu"),), (("resources", "min_vram"), ("resources", "gpu_count")))


def parse_job(data: Mapping[str, Any], source: str, *, base: Path | None = None) -> JobSpec:
    """Return the job that the data describe; `workdir` is taken from `base`, else from the current folder.

    Raises:
        SpecError: with every problem found.
    """
    require_few_values(data, source, refusal=SpecError)
    problems: list[Problem] = []
    top = Table(data, (), problems)
    tables = {name: top.table(name, example=f"[{name}] on a line of its own") if name else top for name in KNOWN}
    if data.get("watchdog") == {}:
        problems.append(Problem(key="watchdog", message="watches nothing", hint='add no_progress = "1h", or remove it'))
    problems += [
        Problem(key=key, message="unknown key", hint=hint) for key, hint in _FLAGS_ALONE.items() if key in data
    ]
    for name, table in tables.items():
        table.refuse_unknown(_known_or_reported(name), elsewhere=_HOMES)
    parts: defaultdict[str, dict[str, Any]] = defaultdict(dict)
    for key in FILE_ORDER:
        name, _, last = key.path.rpartition(".")
        if key.missing:
            tables[name].required(last, key.missing)
        if last in tables[name]:
            part, field = key.place
            parts[part][field] = key.read(tables[name], last)
    own = parts[""]
    _refuse_contradictions(tables, parts)
    if problems:
        raise SpecError(source, problems)
    if own.get("workdir") is not None:
        own["workdir"] = _absolute(own["workdir"], base)
    if not {"gpu", "min_vram_mb"} & parts["resources"].keys():
        parts["resources"]["gpu_count"] = 0
    return JobSpec(
        **own,
        resources=Resources(**parts["resources"]),
        checkpoint=CheckpointPolicy(**parts["checkpoint"]),
        schedule=Schedule(**parts["schedule"]),
        work=Work(**parts["work"]),
        watchdog=WatchdogPolicy(**parts["watchdog"]),
    )


def _refuse_contradictions(tables: Mapping[str, Table], parts: Mapping[str, Mapping[str, Any]]) -> None:
    """Report keys that need or exclude each other."""
    own = parts[""]
    for name in sorted({*own.get("secrets", ())} & {name for name, _ in own.get("env", ())}):
        tables[""].report("secrets", f"{name} is also in env, where everybody can read it", "remove it from env")
    resources, checkpoint = tables["resources"], tables["checkpoint"]
    if "gpu" not in resources and "min_vram" not in resources:
        if "gpu_count" in resources or not {"cpus", "memory_mb"} & parts["resources"].keys():
            hint = f'{GPU_HINT}; or min_vram = "40GB"; or cpus = 8 for a machine without a GPU'
            resources.report("gpu", "is missing", hint)
    elif "gpu" in resources and "min_vram" in resources:
        hint = 'remove one; a name can say the size, as in "A100-80GB:1"'
        resources.report("min_vram", "cannot stand beside gpu", hint)
    elif "gpu" in resources and "gpu_count" in resources:
        hint = 'write the count after the name: gpu = "H100:8"'
        resources.report("gpu_count", "cannot stand beside gpu", hint)
    if "on_demand_after" in resources:
        if parts["resources"].get("market") is not MarketChoice.AUTO:
            resources.report("on_demand_after", "changes the market", 'add market = "auto", or remove it')
        elif "deadline" in tables["schedule"]:
            hint = "remove one: with a deadline, its policy decides when on-demand is used"
            resources.report("on_demand_after", "cannot stand beside a deadline", hint)
    if "best" in checkpoint and "metric" not in checkpoint:
        checkpoint.report("best", "says of no metric which value is the best", 'name it: metric = "eval_loss"')
    schedule, policy = tables["schedule"], parts["schedule"].get("policy")
    if policy not in {None, PolicyName.CEILING} and "deadline" not in schedule:
        schedule.report("policy", f"{policy} decides about a deadline, and there is none", DEADLINE_HINT)
    if "windows" in schedule and "timezone" not in schedule:
        schedule.report("timezone", "is missing, and windows are times of its clocks", ZONE_HINT)
    elif "timezone" in schedule and "windows" not in schedule:
        schedule.report("timezone", "has no windows that it is for", f"remove it, or {WINDOW_HINT}")
    watchdog = tables["watchdog"]
    if "window" in watchdog and "min_gpu_util" not in watchdog:
        watchdog.report("window", "is the time for which no limit is given", "add min_gpu_util = 5, or remove it")
    elif "action" in watchdog and "min_gpu_util" not in watchdog and "no_progress" not in watchdog:
        watchdog.report("action", "follows on nothing", 'add min_gpu_util = 5 or no_progress = "1h", or remove it')


def _absolute(workdir: str, base: Path | None) -> str:
    start = str(base) if base is not None else ""
    # normpath and not realpath: nothing here reads the disk, packing does
    return os.path.normpath(os.path.join(os.path.abspath(start), os.path.expanduser(workdir)))  # noqa: PTH100, PTH111, PTH118  # pathlib has no lexical normpath


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
    """Keys that need no report as unknown: they are known, or reported as belonging elsewhere."""
    return KNOWN[table] if table else KNOWN[""] | {name for name in KNOWN if name} | _FLAGS_ALONE.keys()
