"""From a job file, or the same given by flags, to one frozen `JobSpec`.

Every problem is reported, not only the first, each with its full key and a way out. Unknown keys are refused with the
nearest known one, never ignored, because a key that is silently dropped is worse than one that is refused.
"""

from __future__ import annotations

import os.path
import re
import tomllib
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import date, datetime, time
from pathlib import Path
from typing import Any, Final

from spotd_jobs.spec import model
from spotd_jobs.spec.fields import DEADLINE_HINT, WINDOW_HINT, ZONE_HINT, Table
from spotd_jobs.spec.keys import FILE_ORDER, GPU_HINT
from spotd_jobs.spec.problems import DEPTH_HINT, BadValue, FileProblems, Problem, SpecError, require_few_values

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


def parse_job(data: Mapping[str, Any], source: str, *, base: Path | None = None) -> model.JobSpec:
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
        table.refuse_unknown(_keys_without_report(name), elsewhere=_HOMES)
    parts: defaultdict[str, dict[str, Any]] = defaultdict(dict)
    for key in FILE_ORDER:
        name, _, last = key.path.rpartition(".")
        if key.missing:
            tables[name].required(last, key.missing)
        if last in tables[name]:
            part, field = key.place
            parts[part][field] = key.read(tables[name], last)
    own, wanted = parts[""], parts["resources"]
    if wanted.get("nodes"):
        wanted["nodes"], wanted["nodes_max"] = wanted["nodes"]
    _refuse_contradictions(tables, parts)
    if problems:
        raise SpecError(source, problems)
    if own.get("workdir") is not None:
        own["workdir"] = _absolute(own["workdir"], base)
    if own.get("data"):
        own["data"] = tuple(
            replace(one, source=_absolute(one.source, base)) if one.is_folder else one for one in own["data"]
        )
    if not {"gpu", "min_vram_mb"} & parts["resources"].keys():
        parts["resources"]["gpu_count"] = 0
    return model.JobSpec(
        **own,
        resources=model.Resources(**parts["resources"]),
        checkpoint=model.CheckpointPolicy(**parts["checkpoint"]),
        schedule=model.Schedule(**parts["schedule"]),
        work=model.Work(**parts["work"]),
        watchdog=model.WatchdogPolicy(**parts["watchdog"]),
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
        if parts["resources"].get("market") is not model.MarketChoice.AUTO:
            resources.report("on_demand_after", "changes the market", 'add market = "auto", or remove it')
        elif "deadline" in tables["schedule"]:
            hint = "remove one: with a deadline, its policy decides when on-demand is used"
            resources.report("on_demand_after", "cannot stand beside a deadline", hint)
    _refuse_for_several_machines(tables, parts)
    if "best" in checkpoint and "metric" not in checkpoint:
        checkpoint.report("best", "says of no metric which value is the best", 'name it: metric = "eval_loss"')
    schedule, policy = tables["schedule"], parts["schedule"].get("policy")
    if policy not in {None, model.PolicyName.CEILING} and "deadline" not in schedule:
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


def _refuse_for_several_machines(tables: Mapping[str, Table], parts: Mapping[str, Mapping[str, Any]]) -> None:
    """Report what cannot be said of a job of several machines, and what has to be."""
    resources, checkpoint = tables["resources"], tables["checkpoint"]
    if parts["resources"].get("nodes", 1) == 1:
        if "saved_by" in checkpoint:
            checkpoint.report("saved_by", "is for a job of several machines", "add nodes = 4, or remove it")
        if "replace_within" in tables[""]:
            tables[""].report("replace_within", "is for a job of several machines", "add nodes = 4, or remove it")
        return
    if "gpu" not in resources and "min_vram" not in resources:
        tables[""].report("nodes", "is for machines with GPUs", f"{GPU_HINT}; or remove nodes")
    if "saved_by" not in checkpoint:
        hint = 'write saved_by = "first" below [checkpoint] if rank 0 alone saves, "all" if each machine saves a part'
        checkpoint.report("saved_by", "is missing, and several machines run the command", hint)
    price = parts[""].get("price")
    if price is not None and price.machine_hour is not None:
        hint = "write the price of one GPU: max_price = 2.40"
        tables["price"].report("max_price", "does not say of how many machines it is the price", hint)
    if parts["schedule"].get("preempt"):
        hint = "remove one: room for several machines at once is not made"
        tables["schedule"].report("preempt", "cannot stand beside nodes", hint)


def _absolute(workdir: str, base: Path | None) -> str:
    start = str(base) if base is not None else ""
    # normpath and not realpath: nothing here reads the disk, packing does
    return os.path.normpath(os.path.join(os.path.abspath(start), os.path.expanduser(workdir)))  # noqa: PTH100, PTH111, PTH118  # pathlib has no lexical normpath


def merge(file: Mapping[str, Any], flags: Mapping[str, Any]) -> dict[str, Any]:
    """Return the file's data with the flags laid over it: tables are merged key by key, anything else is replaced.

    A flag that is `None` was not given. A flag that names one of two alternatives (GPU names or a minimum of VRAM)
    puts the other one out of the file.
    """
    merged = _merge(file, flags)
    for one, other in (_EXCLUSIVE, _EXCLUSIVE[::-1]):
        if any(_find(flags, path) is not None for path in one) and not any(
            _find(flags, path) is not None for path in other
        ):
            for table, key in other:
                if isinstance(merged.get(table), dict):
                    merged[table].pop(key, None)
    return merged


def _merge(file: Mapping[str, Any], flags: Mapping[str, Any]) -> dict[str, Any]:
    result = {key: dict(value) if isinstance(value, Mapping) else value for key, value in file.items()}
    for key, value in flags.items():
        if value is None:
            continue
        if isinstance(value, Mapping):
            below = result.get(key, {})
            if isinstance(below, Mapping):  # else the file is wrong here, and parse_job reports it
                merged = _merge(below, value)
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


def _keys_without_report(table: str) -> frozenset[str]:
    """Keys that need no report as unknown: they are known, or reported as belonging elsewhere."""
    return KNOWN[table] if table else KNOWN[""] | {name for name in KNOWN if name} | _FLAGS_ALONE.keys()


# Indexes of an array as people write them: `0-15`, `0-15:2`, `1,3,7`, and with `%4` how many run at once.


ARRAY_MAX: Final = 10_000
"""Jobs of one array."""
INDEX_MAX: Final = 999_999_999
NAME_MAX: Final = 63
ARRAY_HINT: Final = "write --array 0-15, 0-15:2, 1,3,7 or 0-99%4"
_PART: Final = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9})(?::([0-9]{1,9}))?)?", re.ASCII)
_AT_ONCE: Final = re.compile(r"[0-9]{1,9}", re.ASCII)
_TEXT_MAX: Final = 60_000


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrayIndexes:
    """The indexes of an array, ascending, and how many of its jobs may run at once; `None` for no limit."""

    indexes: tuple[int, ...]
    at_once: int | None = None


def parse_array(text: str) -> ArrayIndexes:
    """Return the indexes that the text names.

    Raises:
        BadValue: it names none, too many, or one of them twice.
    """
    shown = text if len(text) <= 40 else f"{text[:37]}..."
    listed, percent, most = text.strip().partition("%")
    if percent and not (_AT_ONCE.fullmatch(most) and int(most) > 0):
        raise BadValue(f'"{shown}" does not say behind % how many jobs run at once', hint=ARRAY_HINT)
    parts = listed.split(",") if len(text) <= _TEXT_MAX else []
    ranges = [_range(part.strip(), shown) for part in parts]
    count = sum(map(len, ranges))
    if not ranges or count > ARRAY_MAX:
        many = f"{count:,}" if ranges else "too many"
        raise BadValue(
            f'"{shown}" makes {many} jobs, and an array has at most {ARRAY_MAX:,}',
            hint="submit several arrays, or let each job do more",
        )
    indexes = sorted({index for some in ranges for index in some})
    if len(indexes) < count:
        raise BadValue(f'"{shown}" names an index twice', hint=ARRAY_HINT)
    return ArrayIndexes(indexes=tuple(indexes), at_once=int(most) if percent else None)


def _range(part: str, shown: str) -> range:
    match = _PART.fullmatch(part)
    if match is None:
        raise BadValue(f'"{shown}" is not a list of indexes', hint=ARRAY_HINT)
    first, last, step = int(match[1]), int(match[2] or match[1]), int(match[3] or 1)
    if step == 0 or last < first:
        raise BadValue(f'"{shown}" has a range without an index', hint=ARRAY_HINT)
    return range(first, last + 1, step)


def task_names(name: str, array: ArrayIndexes) -> tuple[str, ...]:
    """Return the names of the jobs of an array.

    Raises:
        BadValue: the longest is no name of a job.
    """
    longest = f"{name}-{array.indexes[-1]}"
    if len(longest) > NAME_MAX:
        raise BadValue(f"{longest} is longer than {NAME_MAX} characters", hint="give the job a shorter name")
    return tuple(f"{name}-{index}" for index in array.indexes)


# TOML files from disk, refused with a sentence instead of a traceback.


BYTES_MAX: Final = 1_000_000
_PATH_PART: Final = r"""(?>[A-Za-z0-9_-]+|"(?:[^"\\\n]|\\.)*+"|'[^'\n]*+')[ \t]*+"""
_DEEP_KEY: Final = re.compile(rf"(?:^|[\[{{,])[ \t\[]*+(?>{_PATH_PART}\.[ \t]*+){{20}}", re.MULTILINE)
"""A parser of TOML takes time by the square of a key's parts."""
_PLACE: Final = re.compile(
    r"^(?P<what>.*?) \(at (?:line (?P<line>\d+), column (?P<column>\d+)|(?P<end>end of document))\)$"
)


def read_toml(path: Path, *, refusal: type[FileProblems]) -> tuple[dict[str, Any], str]:
    """Return the data of a TOML file and the text it was read from.

    Raises:
        FileProblems: of the class `refusal`; the file is missing, unreadable, too large, not UTF-8 or not TOML.
    """
    source = str(path)
    try:
        with path.open("rb") as file:
            raw = file.read(BYTES_MAX + 1)
    except FileNotFoundError as exc:
        problem = Problem(key="", message="no such file", hint="check the path; it is taken from the current folder")
        raise refusal(source, [problem]) from exc
    except IsADirectoryError as exc:
        problem = Problem(key="", message="this is a folder, not a file", hint="name the TOML file inside it")
        raise refusal(source, [problem]) from exc
    except OSError as exc:
        problem = Problem(key="", message=f"cannot be read: {exc.strerror}", hint="check the file's owner and mode")
        raise refusal(source, [problem]) from exc
    return parse_toml(raw, source=source, refusal=refusal)


def parse_toml(raw: bytes, *, source: str, refusal: type[FileProblems]) -> tuple[dict[str, Any], str]:
    """Return the data of a TOML document and its text.

    Raises:
        FileProblems: of the class `refusal`; too large, not UTF-8 or not TOML.
    """
    if len(raw) > BYTES_MAX:
        problem = Problem(key="", message="larger than 1 MB", hint="no file meant for spotd is so large")
        raise refusal(source, [problem])
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as exc:
        line = raw.count(b"\n", 0, exc.start) + 1
        problem = Problem(key="", message="not UTF-8 text", hint="save the file as UTF-8", line=line)
        raise refusal(source, [problem]) from exc
    text = text.replace("\r\n", "\n")
    if (deep := _DEEP_KEY.search(text)) is not None:
        line = text.count("\n", 0, deep.start()) + 1
        problem = Problem(key="", message="a key of too many parts", hint=DEPTH_HINT, line=line)
        raise refusal(source, [problem])
    try:
        data = tomllib.loads(text)
        require_few_values(data, source, refusal=refusal)
        return data, text
    except tomllib.TOMLDecodeError as exc:
        raise refusal(source, [_syntax_problem(str(exc), text)]) from exc
    except RecursionError as exc:
        problem = Problem(key="", message="lists or tables are nested too deeply", hint=DEPTH_HINT)
        raise refusal(source, [problem]) from exc


def json_ready(value: Any) -> Any:
    """Return TOML's dates as text; the daemon refuses them where they do not belong."""
    if isinstance(value, dict):
        return {key: json_ready(item) for key, item in value.items()}
    if isinstance(value, list):
        return [json_ready(item) for item in value]
    return value.isoformat() if isinstance(value, datetime | date | time) else value


def _syntax_problem(message: str, text: str) -> Problem:
    place = _PLACE.match(message)
    if place is None:
        return Problem(key="", message=f"not valid TOML: {message}", hint='text needs quotes: name = "llama-lora"')
    line = text.count("\n") + 1 if place["end"] else int(place["line"])
    hint = 'text needs quotes, as in name = "llama-lora"; a table starts with [name] on a line of its own'
    if place["what"].startswith(("Cannot declare", "Cannot overwrite")):
        hint = "it stands twice: write each key once, and all keys of a [table] below one heading"
    return Problem(key="", message=f"not valid TOML: {place['what']}", hint=hint, line=line)
