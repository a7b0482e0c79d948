"""Task files of SkyPilot and dstack as job files of spotd: the part that all three share, and what is left out.

Theory. A key is read, ignored with a sentence, or refused with a sentence; none is dropped silently. What is ignored
changes nothing of what the job computes (a label, an idle time); what would change it (a service, a TPU) is
refused. Values of secrets in such a file are not read: they are taken from the environment, as those of a job file.
Pure: the tables come from `read_yaml`, in which every value is the text that was written.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

Tables = Mapping[str, Any]

_CLOUDS: Final = {
    "aws": "aws", "runpod": "runpod", "vast": "vast", "vastai": "vast", "lambda": "lambda", "lambdalabs": "lambda",
    "kubernetes": "kubernetes", "k8s": "kubernetes", "ssh": "ssh", "slurm": "slurm",
}  # fmt: skip
"""Names of clouds there, by the provider that they are here."""
_CHECKPOINTS: Final = re.compile(r"checkpoint|ckpt|outputs?\b", re.IGNORECASE)
_TPU: Final = re.compile(r"tpu|v[0-9][a-z]*-[0-9]", re.IGNORECASE)
_GANG: Final[Mapping[str, str]] = {
    "SKYPILOT_NUM_NODES": "$SPOTD_NODES", "SKYPILOT_NODE_RANK": "$SPOTD_NODE_RANK",
    "SKYPILOT_NODE_IPS": "$SPOTD_NODE_IPS", "DSTACK_NODES_NUM": "$SPOTD_NODES", "DSTACK_NODES_IPS": "$SPOTD_NODE_IPS",
    "DSTACK_NODE_RANK": "$SPOTD_NODE_RANK", "DSTACK_MASTER_NODE_IP": "$MASTER_ADDR",
}  # fmt: skip
"""Variables there that differ between the machines of a job, by the value here, in words of the shell."""
_MARKET: Final = (
    "is not given, and absent there means on-demand; here it means spot where sold: --market on-demand changes it"
)
_ALL_PORTS: Final = "no port is opened: spotctl forward JOB PORT brings one to this computer"
_SKY_IGNORED: Final[Mapping[str, str]] = {
    "config": "settings of the other tool's own",
    "volumes": "no volume is kept between machines; checkpoints are",
    "inputs": "not read; see [[data]]",
    "outputs": "estimates of the other tool's optimizer",
    "estimated": "estimates of the other tool's optimizer",
}
_SKY_RESOURCES_IGNORED: Final[Mapping[str, str]] = {
    "accelerator_args": "of TPUs, which spotd does not rent",
    "autostop": "a machine ends with its job",
    "disk_tier": "the ranking knows no classes of disks",
    "instance_type": "offers are chosen by GPU, CPUs, memory and price",
    "job_recovery": "after a preemption the job goes on from its newest checkpoint, as always",
    "labels": "machines carry spotd's own label alone",
    "network_tier": "the ranking knows no classes of networks",
    "ports": _ALL_PORTS,
    "spot_recovery": "after a preemption the job goes on from its newest checkpoint, as always",
    "zone": "the region is read, the zone is not",
}
_DSTACK_IGNORED: Final[Mapping[str, str]] = {
    "creation_policy": "machines are rented for one job",
    "docker": "the job's container has no docker",
    "entrypoint": "the command is run in place of the image's own",
    "fleets": "machines are rented for one job",
    "idle_duration": "a machine ends with its job",
    "inactivity_duration": "a machine ends with its job",
    "instance_types": "offers are chosen by GPU, CPUs, memory and price",
    "ports": _ALL_PORTS,
    "privileged": "the job's container has no further rights",
    "registry_auth": "write [registries.NAME] into spotd's config",
    "repos": "the workdir is packed from this computer",
    "retry": "after a preemption the job goes on from its newest checkpoint; [retry] is for errors of its own",
    "schedule": "see [schedule] windows",
    "shell": "the commands are run by bash",
    "single_branch": "the workdir is packed from this computer",
    "stop_duration": "see [checkpoint] stop_grace",
    "tags": "machines carry spotd's own label alone",
    "user": "the job runs as the image's user",
    "utilization_policy": "see [watchdog]",
    "zones": "the region is read, the zone is not",
}
_DSTACK_KINDS: Final = "only type: task is a job; a dev-environment, service, fleet or volume has none here"


@dataclass(frozen=True, slots=True, kw_only=True)
class UnreadableKey:
    """A key with which the file is no job of spotd, why, and the way out."""

    key: str
    message: str
    hint: str = ""


@dataclass(slots=True, kw_only=True)
class TaskFile:
    """What was read of a task file.

    Attributes:
        tool: `SkyPilot` or `dstack`.
        job: as a job file would hold it.
        ignored: keys that are not read, each with a sentence.
        refusals: why it is no job of spotd; empty where it is one.
    """

    tool: str
    job: dict[str, Any] = field(default_factory=dict)
    ignored: list[tuple[str, str]] = field(default_factory=list)
    refusals: list[UnreadableKey] = field(default_factory=list)

    def put(self, path: str, value: Any) -> None:
        """Set a key of the job file, written with its table."""
        table, _, name = path.rpartition(".")
        (self.job.setdefault(table, {}) if table else self.job)[name] = value

    def ignore(self, key: str, why: str) -> None:
        self.ignored.append((key, why))

    def refuse(self, key: str, message: str, hint: str = "") -> None:
        self.refusals.append(UnreadableKey(key=key, message=message, hint=hint))


def read_task(data: Tables, *, stem: str) -> TaskFile:
    """Return what the file says, in spotd's own words; `stem` names a job that has no name."""
    is_dstack = "type" in data or "commands" in data
    task = TaskFile(tool="dstack" if is_dstack else "SkyPilot")
    slug = re.sub(r"[^a-z0-9._-]+", "-", (_text(data.get("name")) or stem).lower()).strip("._-")[:63].rstrip("._-")
    task.put("name", slug or "task")
    (_read_dstack if is_dstack else _read_sky)(task, data)
    return task


# SkyPilot.


def _read_sky(task: TaskFile, data: Tables) -> None:
    readers: Mapping[str, Callable[[TaskFile, Any], None]] = {
        "name": _nothing,
        "workdir": _workdir,
        "num_nodes": _nodes,
        "resources": _sky_resources,
        "envs": _env,
        "secrets": _secrets,
        "file_mounts": _mounts,
        "setup": lambda task, value: task.put("setup", _text(value)) if _text(value) else None,
        "run": lambda task, value: task.put("run", ["bash", "-c", _text(value)]) if _text(value) else None,
        "service": lambda task, _: task.refuse("service", "a service answers requests, and a job of spotd ends"),
        "pool": lambda task, _: task.refuse("pool", "a pool of workers is no job"),
    }
    _walk(task, data, readers, _SKY_IGNORED)
    if "run" not in data and not task.refusals:
        task.refuse("run", "is missing", "a job needs a command")
    if "resources" not in data or "use_spot" not in (_table(data.get("resources")) or {}):
        task.ignore("resources.use_spot", _MARKET)
    gpus = _table(task.job.get("resources")) or {}
    count = _count_of(gpus.get("gpu"))
    _provide(task, data, "SKYPILOT_", {
        "SKYPILOT_NUM_NODES": "1", "SKYPILOT_NODE_RANK": "0", "SKYPILOT_NODE_IPS": "127.0.0.1",
        "SKYPILOT_NUM_GPUS_PER_NODE": count,
    })  # fmt: skip


def _sky_resources(task: TaskFile, value: Any) -> None:
    readers: dict[str, Callable[[TaskFile, Any], None]] = {
        "accelerators": _accelerators,
        "cpus": lambda task, value: _number(task, "resources.cpus", value),
        "memory": lambda task, value: _size(task, "resources.memory", value),
        "disk_size": lambda task, value: _size(task, "resources.disk", value),
        "use_spot": _use_spot,
        "image_id": _sky_image,
        "infra": _infra,
        "cloud": _infra,
        "region": lambda task, value: task.put("resources.regions", [_text(value)]),
        "max_hourly_cost": lambda task, value: task.put("price.max_price", f"{_text(value)}/h"),
        "any_of": _alternatives,
        "ordered": _alternatives,
    }
    _walk(task, _table(value) or {}, readers, _SKY_RESOURCES_IGNORED, prefix="resources.")


def _alternatives(task: TaskFile, value: Any) -> None:
    """Take GPUs, clouds and regions of every alternative: the cheapest of all is taken."""
    for one in value if isinstance(value, list) else []:
        part = TaskFile(tool=task.tool)
        _sky_resources(part, one)
        found, mine = _table(part.job.get("resources")) or {}, task.job.setdefault("resources", {})
        for key in ("gpu", "providers", "regions"):
            if key in found:
                mine[key] = list(dict.fromkeys([*mine.get(key, []), *found[key]]))
        for key in found.keys() - {"gpu", "providers", "regions"}:
            mine.setdefault(key, found[key])
        for row in part.ignored:
            if row not in task.ignored:
                task.ignored.append(row)
        task.refusals += part.refusals
    task.ignore("resources.any_of", "the order of alternatives: the cheapest of all is taken")


def _accelerators(task: TaskFile, value: Any) -> None:
    rows = value if isinstance(value, list) else [value] if isinstance(value, str) else []
    if isinstance(value, dict):  # {A100: 8}, or the set {A100:1, V100:1}, whose values are nothing
        rows = [f"{name}:{count}" if count else name for name, count in value.items()]
    if isinstance(value, list) and len(rows) > 1:
        task.ignore("resources.accelerators", "the order of GPUs: the cheapest of all is taken")
    found = []
    for row in rows:
        name, _, count = _text(row).partition(":")
        if _TPU.match(name):
            task.refuse("resources.accelerators", f"{name} is a TPU, which spotd does not rent")
        elif re.fullmatch(r"0?\.[0-9]+", count):
            task.refuse("resources.accelerators", f"{name}:{count} is a part of a GPU", "ask for a whole one")
        elif name:
            found.append(f"{name}:{count.removesuffix('.0') or 1}")
    if found:
        task.put("resources.gpu", found)


def _use_spot(task: TaskFile, value: Any) -> None:
    task.put("resources.market", "spot" if _is_true(value) else "on-demand")


def _sky_image(task: TaskFile, value: Any) -> None:
    name = _text(value)
    if name.startswith("docker:"):
        task.put("image", name.removeprefix("docker:"))
    else:
        task.ignore("resources.image_id", "an image of a cloud's machine, not of a container: give --image")


def _infra(task: TaskFile, value: Any) -> None:
    cloud, _, rest = _text(value).partition("/")
    name = _CLOUDS.get(cloud.lower())
    if name is None:
        task.refuse("resources.infra", f"{cloud or 'nothing'} is no provider that spotd rents from", "remove it")
        return
    task.put("resources.providers", [name])
    region = rest.partition("/")[0]
    if region and region != "*" and name != "kubernetes":
        task.put("resources.regions", [region])


def _mounts(task: TaskFile, value: Any) -> None:
    for target, source in (_table(value) or {}).items():
        parts = _table(source)
        where = _text(parts.get("source") if parts is not None else source)
        mode = _text(parts.get("mode")).upper() if parts is not None else "COPY"
        _data(task, f"file_mounts.{target}", target, where, is_written=mode != "COPY")


# dstack.


def _read_dstack(task: TaskFile, data: Tables) -> None:
    if _text(data.get("type")) not in ("task", ""):
        task.refuse("type", f"is {_text(data.get('type'))}", _DSTACK_KINDS)
        return
    readers: Mapping[str, Callable[[TaskFile, Any], None]] = {
        "type": _nothing,
        "name": _nothing,
        "nodes": _nodes,
        "image": lambda task, value: task.put("image", _text(value)),
        "python": lambda task, _: task.ignore("python", "the image has its own Python: give --image"),
        "nvcc": lambda task, _: task.ignore("nvcc", "the image has its own compiler: give --image"),
        "env": _env,
        "commands": _commands,
        "working_dir": lambda task, _: task.ignore("working_dir", "the job runs in the workdir"),
        "files": _files,
        "volumes": _volumes,
        "resources": _dstack_resources,
        "spot_policy": _spot_policy,
        "max_price": lambda task, value: task.put("price.max_price", f"{_text(value)}/h"),
        "max_duration": _max_duration,
        "priority": lambda task, value: _number(task, "schedule.priority", value),
        "backends": _backends,
        "regions": lambda task, value: task.put("resources.regions", [_text(one) for one in _list(value)]),
    }
    _walk(task, data, readers, _DSTACK_IGNORED)
    if "commands" not in data:
        task.refuse("commands", "is missing", "a job needs a command")
    if "spot_policy" not in data:
        task.ignore("spot_policy", _MARKET)
    resources = _table(task.job.get("resources")) or {}
    count = str(resources.get("gpu_count") or _count_of(resources.get("gpu")))
    _provide(task, data, "DSTACK_", {
        "DSTACK_NODES_NUM": "1", "DSTACK_NODE_RANK": "0", "DSTACK_MASTER_NODE_IP": "127.0.0.1",
        "DSTACK_NODES_IPS": "127.0.0.1",
        "DSTACK_GPUS_NUM": str(int(count) * int(task.job.get("nodes", 1))), "DSTACK_GPUS_PER_NODE": count,
    })  # fmt: skip


def _commands(task: TaskFile, value: Any) -> None:
    lines = [_text(one) for one in _list(value)]
    task.put("run", ["bash", "-c", "\n".join(["set -e", *lines])])


def _dstack_resources(task: TaskFile, value: Any) -> None:
    readers: Mapping[str, Callable[[TaskFile, Any], None]] = {
        "gpu": _dstack_gpu,
        "cpu": lambda task, value: _number(task, "resources.cpus", _of_table(value, "count")),
        "memory": lambda task, value: _size(task, "resources.memory", value),
        "disk": lambda task, value: _size(task, "resources.disk", _of_table(value, "size")),
    }
    ignored = {"shm_size": "a job may use half of the memory as shared memory"}
    _walk(task, _table(value) or {}, readers, ignored, prefix="resources.")


def _dstack_gpu(task: TaskFile, value: Any) -> None:
    """Read `H100:8`, `A100:40GB:2`, `24GB..`, `2`, or the same as a table."""
    names: list[str] = []
    memory = count = ""
    table = _table(value)
    if table is not None:
        names = [_text(one) for one in _list(table.get("name", []))]
        memory, count = _text(table.get("memory")), _text(table.get("count"))
        for key in sorted(table.keys() - {"name", "memory", "count"}):
            task.ignore(f"resources.gpu.{key}", "offers are chosen by the GPU's name, or by its memory")
    else:
        for part in _text(value).split(":"):
            if re.match(r"[0-9]+(\.[0-9]+)?\s*[MGT]B", part, re.IGNORECASE):
                memory = part
            elif re.fullmatch(r"[0-9.]*", part):
                count = part
            else:
                names += [one for one in part.split(",") if one]
    least = _least(count) or "1"
    if any(_TPU.match(name) for name in names):
        task.refuse("resources.gpu", "is a TPU, which spotd does not rent")
    elif names:
        suffix = "" if not memory else "-" + _least(memory).replace(" ", "")
        task.put("resources.gpu", [f"{name}{suffix}:{least}" for name in names])
    elif memory or least != "0":
        task.put("resources.min_vram", _least(memory) or "1GB")
        if least != "1":
            _number(task, "resources.gpu_count", least)


def _spot_policy(task: TaskFile, value: Any) -> None:
    if _text(value) in ("spot", "on-demand", "auto"):
        task.put("resources.market", _text(value))
    else:
        task.refuse("spot_policy", f"is {_text(value)}", "write spot, on-demand or auto")


def _max_duration(task: TaskFile, value: Any) -> None:
    text = _text(value)
    if text in ("off", "false", "-1", ""):
        return
    task.put("schedule.max_duration", f"{text}s" if text.isdecimal() else text)


def _backends(task: TaskFile, value: Any) -> None:
    names = [_CLOUDS.get(_text(one).lower(), "") for one in _list(value)]
    known = sorted({name for name in names if name})
    if known:
        task.put("resources.providers", known)
    if "" in names or not known:
        others = [_text(one) for one, name in zip(_list(value), names, strict=True) if not name]
        task.ignore("backends", f"spotd rents nothing from {', '.join(others) or 'none of these'}")


def _files(task: TaskFile, value: Any) -> None:
    for one in _list(value):
        table = _table(one)
        local, _, target = _text(one).partition(":")
        if table is not None:
            local, target = _text(table.get("local_path")), _text(table.get("path"))
        _data(task, "files", target or local, local, is_written=False)


def _volumes(task: TaskFile, value: Any) -> None:
    for one in _list(value):
        table = _table(one)
        target = _text(table.get("path")) if table is not None else _text(one).rpartition(":")[2]
        if _CHECKPOINTS.search(target):
            task.put("checkpoint.path", target)
        else:
            task.ignore(f"volumes {target}", "no volume is kept between machines; data goes into [[data]]")


# What both have.


def _walk(
    task: TaskFile,
    data: Tables,
    readers: Mapping[str, Callable[[TaskFile, Any], None]],
    ignored: Mapping[str, str],
    *,
    prefix: str = "",
) -> None:
    for key, value in data.items():
        if key in readers:
            readers[key](task, value)
        else:
            task.ignore(f"{prefix}{key}", ignored.get(key, "not known here"))


def _nodes(task: TaskFile, value: Any) -> None:
    words = _text(value)
    if re.fullmatch(r"[0-9]{1,9}", words) is None:
        task.refuse("nodes", f"{words} is no number", "write a whole number") if words else None
    elif words != "1":
        task.put("nodes", int(words))


def _workdir(task: TaskFile, value: Any) -> None:
    if isinstance(value, str) and value:
        task.put("workdir", value)
    elif value:
        task.refuse("workdir", "is a place of git", "clone it, and name the folder")


def _env(task: TaskFile, value: Any) -> None:
    """Take variables; one without a value is asked of the environment, as a secret."""
    pairs = list(value.items()) if isinstance(value, dict) else [_text(one).partition("=")[::2] for one in _list(value)]
    given = {name: _text(text) for name, text in pairs if _text(text)}
    if given:
        task.put("env", {**given, **(_table(task.job.get("env")) or {})})
    _secrets(task, {name: "" for name, text in pairs if not _text(text)})


def _secrets(task: TaskFile, value: Any) -> None:
    names = [*_list(value)] if isinstance(value, list) else [*(_table(value) or {})]
    if isinstance(value, dict) and any(_text(text) for text in value.values()):
        task.ignore("secrets", "the values in the file: they are read from this environment, or from --secret-file")
    if names:
        task.put("secrets", list(dict.fromkeys([*task.job.get("secrets", []), *names])))


def _data(task: TaskFile, key: str, target: str, source: str, *, is_written: bool) -> None:
    """Take a folder or bucket that the job reads; one that it writes checkpoints to is where those appear."""
    if is_written and _CHECKPOINTS.search(target):
        task.put("checkpoint.path", target)
        task.ignore(key, "the bucket behind it: what appears there is stored as checkpoints, in spotd's own store")
        return
    path = target.removeprefix("~/").strip("/").removeprefix("./")
    if not source:
        task.ignore(key, "it names no source to read from")
    elif not source.startswith(("s3://", "https://", "./", "../", "/", "~/", "hf://")) and "://" in source:
        task.ignore(
            key, f"{source.partition('://')[0]}:// is no source of data; spotctl data put NAME DIR stores it once"
        )
    elif re.search(r"\.[A-Za-z0-9]{1,5}$", source) and "://" not in source:
        task.ignore(key, "a single file: put it into the workdir")
    elif path in ("", "."):
        task.ignore(key, "it lies at the top: name it as the workdir")
    else:
        place = source if "://" in source or source.startswith(("/", ".", "~")) else f"./{source}"
        task.job.setdefault("data", []).append({"source": place, "path": path})
        if target != path:
            task.ignore(key, f"the place {target}: the data lies in {path}, below the folder in which the job runs")


def _provide(task: TaskFile, data: Tables, prefix: str, values: Mapping[str, str]) -> None:
    """Give the variables of the other tool that the commands use; those of a gang's machine by the command's shell."""
    text = str(data)
    used = {name: value for name, value in values.items() if re.search(rf"{name}\b", text)}
    others = sorted(set(re.findall(rf"\b{prefix}[A-Z_]+", text)) - used.keys())
    if "nodes" in task.job:
        own = [f'export {name}="{_GANG[name]}"' for name in used if name in _GANG]
        used = {name: value for name, value in used.items() if name not in _GANG}
        *shell, script = task.job.get("run") or ["bash", "-c", ""]
        task.put("run", [*shell, "\n".join([*own, script])])
    if used:
        task.put("env", {**used, **(_table(task.job.get("env")) or {})})
    if others:
        task.ignore(", ".join(others), "variables that the other tool sets, and spotd does not")


def _count_of(gpus: Any) -> str:
    """Return the number of GPUs, where every alternative has the same."""
    counts = {one.rpartition(":")[2] for one in gpus or []}
    return counts.pop() if len(counts) == 1 else "1"


def _number(task: TaskFile, path: str, value: Any) -> None:
    least = _least(_text(value)).rpartition(":")[2]
    if re.fullmatch(r"-?[0-9]{1,9}", least):
        task.put(path, int(least))
    elif least:
        task.refuse(path, f"{_text(value)} is no number", "write a whole number")


def _size(task: TaskFile, path: str, value: Any) -> None:
    least = _least(_text(value)).replace(" ", "")
    if least.endswith(("x", "X")):
        task.ignore(path, "a multiple of what else is asked for")
    elif least:
        task.put(path, f"{least}GB" if re.fullmatch(r"[0-9.]+", least) else least)


def _least(text: str) -> str:
    """Return the lower end of `8`, `8+`, `8..`, `8..16`; empty for `..16`."""
    return text.partition("..")[0].removesuffix("+").strip()


def _of_table(value: Any, key: str) -> Any:
    table = _table(value)
    return value if table is None else table.get(key, "")


def _nothing(_task: TaskFile, _value: Any) -> None: ...


def _is_true(value: Any) -> bool:
    return _text(value).lower() in ("true", "yes", "on", "1")


def _text(value: Any) -> str:
    return value.strip() if isinstance(value, str) else ""


def _table(value: Any) -> dict[str, Any] | None:
    return value if isinstance(value, dict) else None


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value] if value else []
