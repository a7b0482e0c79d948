"""A job as the user wrote it in a file and in flags, and where in them an error is."""

from __future__ import annotations

import os
import re
import stat
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from spotd.cli import stderr
from spotd.cli.entry import CommandFailed, unusable
from spotd_jobs.spec.keys import FLAGS
from spotd_jobs.spec.parse import BYTES_MAX, json_ready, merge, parse_job, parse_toml, read_toml
from spotd_jobs.spec.problems import Problem, SpecError, line_of

if TYPE_CHECKING:
    from spotd.api.schemas.bodies import FolderBody
    from spotd.client.transport import ClientProblem
    from spotd_jobs.spec.model import JobSpec


STDIN: Final = "-"
YAML_SUFFIXES: Final = (".yaml", ".yml")

_MISSING: Final = "is missing"
_INDEX: Final = re.compile(r"\[\d+\].*")
_LIST: Final = re.compile(r"\[(\"[^\[\]]*\")\]")


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenJob:
    """What the user wrote.

    Attributes:
        text: of the job file, to find lines in; empty without one.
        source: the job file as the user named it, empty without one.
        folders: what the folders hold that are sources of its data.
        is_foreign: the file is one of another tool, in which no key of spotd's own can be written.
    """

    data: Mapping[str, Any] = field(default_factory=dict)
    flags: Mapping[str, Any] = field(default_factory=dict)
    text: str = ""
    source: str = ""
    base_dir: str = ""
    folders: dict[str, FolderBody] = field(default_factory=dict)
    is_foreign: bool = False

    def as_json(self) -> dict[str, Any]:
        draft = {"data": self.data, "flags": self.flags, "source": self.source, "base_dir": self.base_dir}
        return {**draft, "folders": self.folders} if self.folders else draft

    def check(self) -> JobSpec:
        """Return the job if it is well written, before anything is asked of the daemon.

        Raises:
            CommandFailed: naming every mistake and its place.
        """
        try:
            return parse_job(merge(self.data, self.flags), self.source, base=Path(self.base_dir))
        except SpecError as exc:
            raise self.refusal(exc.problems) from exc

    def refusal(
        self, problems: Sequence[Problem | ClientProblem], *, message: str = "the job was refused"
    ) -> CommandFailed:
        """Return the mistakes with the flag, or file and line, that each is in."""
        return CommandFailed(message, rows=[self._words_of(problem) for problem in problems])

    def _words_of(self, problem: Problem | ClientProblem) -> tuple[str, str]:
        key = problem.key
        flag = FLAGS.get(_INDEX.sub("", key)) or (FLAGS["env"] if key.startswith("env.") else None)
        if flag is not None and (not self.source or self.is_foreign or self._is_flagged(key)):
            hint = problem.hint
            if problem.message == _MISSING and not self.source:
                hint = f"give {flag}, or {key} in a job file"
            elif problem.message == _MISSING and self.is_foreign:
                hint = f"give {flag}: {self.source} names none"
            written = f"{_INDEX.sub('', key).rpartition('.')[2]} = "
            if hint.startswith(f"write {written}") and flag.startswith("--"):
                # A list in a file is a flag that is repeated.
                hint = _LIST.sub(lambda found: found[1].replace('", "', f'" {flag} "'), hint)
                hint = hint.replace(written, f"{flag} ")
            return f"{flag}: {problem.message}", hint
        line = line_of(self.text, key) if self.text and key else None
        place = self.source if line is None else f"{self.source}:{line}"
        return ": ".join(part for part in (place, key, problem.message) if part), problem.hint

    def _is_flagged(self, key: str) -> bool:
        value: Any = self.flags
        for part in _INDEX.sub("", key).split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        return value is not None


def read_draft(file: str | None, flags: Mapping[str, Any]) -> WrittenJob:
    """Return the draft of a job file, which may be absent or `-` for stdin, and flags.

    Raises:
        CommandFailed: the file cannot be read or is not TOML, nor a task file of another tool; an argument is not text.
    """
    _refuse_bytes(flags)
    if file is None:
        if not flags:
            raise CommandFailed(
                "there is no job to submit",
                hint="spotctl submit train.toml, or spotctl submit --gpu H100 --image IMAGE -- COMMAND",
            )
        return WrittenJob(flags=_with_name(flags), base_dir=os.getcwd())  # noqa: PTH109 - the text, not a path to work with
    if file.lower().endswith(YAML_SUFFIXES):
        return _task_draft(file, flags)
    try:
        if file == STDIN:
            data, text = parse_toml(sys.stdin.buffer.read(BYTES_MAX + 1), source="stdin", refusal=SpecError)
        else:
            data, text = read_toml(Path(file), refusal=SpecError)
    except SpecError as exc:
        raise unusable("the job file cannot be used", exc) from exc
    folder = Path.cwd() if file == STDIN else Path(file).absolute().parent
    source = "stdin" if file == STDIN else file
    return WrittenJob(data=json_ready(data), flags=flags, text=text, source=source, base_dir=str(folder))


def _task_draft(file: str, flags: Mapping[str, Any]) -> WrittenJob:
    """Return the draft of a task file of another tool, and say what of it is not read.

    Raises:
        CommandFailed: the file cannot be read, or is no job of spotd.
    """
    from spotd.cli.inputs.task_files import read_task
    from spotd.cli.inputs.yaml_text import BYTES_MAX as YAML_BYTES_MAX
    from spotd.cli.inputs.yaml_text import YamlRefused, read_yaml

    path = Path(file)
    try:
        with path.open("rb") as opened:
            data = read_yaml(opened.read(YAML_BYTES_MAX + 1))
    except OSError as exc:
        raise CommandFailed(f"{file} cannot be read: {exc.strerror}", hint="check the path") from exc
    except YamlRefused as exc:
        place = file if exc.line is None else f"{file}:{exc.line}"
        raise CommandFailed(f"{place} {exc.message}", hint=exc.hint) from exc
    task = read_task(data, stem=path.stem)
    if task.refusals:
        rows = [(f"{file}: {one.key} {one.message}", one.hint) for one in task.refusals]
        raise CommandFailed(f"this {task.tool} task is no job of spotd", rows=rows)
    for key, why in task.ignored:
        stderr.note(f"{file}: {key} is not read: {why}")
    return WrittenJob(data=task.job, flags=flags, source=file, base_dir=str(path.absolute().parent), is_foreign=True)


def nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return dotted keys as tables; what was not given is left out."""
    result: dict[str, Any] = {}
    for key, value in values.items():
        if value is None or value == () or value == {}:
            continue
        table, _, name = key.rpartition(".")
        (result.setdefault(table, {}) if table else result)[name] = list(value) if isinstance(value, tuple) else value
    return result


def _with_name(flags: Mapping[str, Any]) -> Mapping[str, Any]:
    """Name a job given by flags alone after its program, and after the time so that it can be run again."""
    if "name" in flags or not flags.get("run"):
        return flags
    words = [str(word) for word in flags["run"]]
    program = next((word for word in words if word.endswith((".py", ".sh"))), words[0])
    stem = re.sub(r"[^a-z0-9._-]+", "-", Path(program).stem.lower()).strip("._-")[:40] or "job"
    return {**flags, "name": f"{stem}-{datetime.now().astimezone():%m%d-%H%M%S}"}


def _refuse_bytes(value: Any) -> None:
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError as exc:
            raise CommandFailed(
                "an argument holds bytes that are not UTF-8 text", hint="check it for stray bytes"
            ) from exc
    elif isinstance(value, Mapping):
        for key, item in value.items():
            _refuse_bytes(key)
            _refuse_bytes(item)
    elif isinstance(value, list | tuple):
        for item in value:
            _refuse_bytes(item)


# The values of a job's secrets, from this environment or a file. No message here ever holds a value.


_BYTES_MAX: Final = 1_000_000
_LINE: Final = re.compile(r"(?:export\s+)?(?P<name>[A-Za-z_][A-Za-z0-9_]*)\s*=\s*(?P<value>.*)")
_ENCODE: Final = "encode the value, for example with base64, and decode it in the job"
_READABLE_BY_OTHERS: Final = stat.S_IRGRP | stat.S_IROTH


def collect(names: Sequence[str], *, file: Path | None, environ: Mapping[str, str]) -> dict[str, str]:
    """Return a value for each name; the file comes before the environment.

    Raises:
        CommandFailed: a name has no value, or the file cannot be used.
    """
    filed = {} if file is None else read_file(file)
    values: dict[str, str] = {}
    missing: list[tuple[str, str]] = []
    for name in names:
        value = filed.get(name) or environ.get(name, "")
        if "\0" in value or not _is_text(value):
            missing.append((f"the secret {name} holds a NUL or bytes that are not UTF-8 text", _ENCODE))
        elif value:
            values[name] = value
        else:
            empty = name in filed or name in environ
            message = f"the secret {name} is {'empty' if empty else 'not set'}"
            missing.append((message, f"export {name}=..., or put {name}=... into a file and give --secret-file"))
    if missing:
        raise CommandFailed("a secret has no usable value", rows=missing)
    if unused := sorted(set(filed) - set(names)):
        stderr.note(f"not sent, since the job does not name them as secrets: {', '.join(unused)}")
    return values


def read_file(path: Path) -> dict[str, str]:
    """Return the values of a file of `NAME=value` lines; quotes around a value are removed, `#` begins a comment line.

    Raises:
        CommandFailed: unreadable, or a line is none of these.
    """
    try:
        with path.open("rb") as file:
            mode = path.stat().st_mode
            raw = file.read(_BYTES_MAX + 1)
    except OSError as exc:
        raise CommandFailed(
            f"the secret file {path} cannot be read: {exc.strerror}", hint="check its path and mode"
        ) from exc
    if len(raw) > _BYTES_MAX:
        raise CommandFailed(f"the secret file {path} is larger than 1 MB")
    try:
        lines = raw.decode().splitlines()
    except UnicodeDecodeError as exc:
        raise CommandFailed(f"the secret file {path} is not UTF-8 text") from exc
    if mode & _READABLE_BY_OTHERS:
        stderr.warning(f"others can read {path}; chmod 600 {path}")
    values = {}
    for number, line in enumerate(lines, start=1):
        text = line.strip()
        if not text or text.startswith("#"):
            continue
        match = _LINE.fullmatch(text)
        if match is None:
            raise CommandFailed(
                f"{path}:{number}: not a line of the form NAME=value",
                hint="one secret a line; lines that begin with # are comments",
            )
        values[match["name"]] = _without_quotes(match["value"])
    return values


def _is_text(value: str) -> bool:
    """Whether a variable of the environment is UTF-8: Python keeps other bytes as lone surrogates."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _without_quotes(value: str) -> str:
    quoted = len(value) >= 2 and value[0] == value[-1] and value[0] in "'\""
    return value[1:-1] if quoted else value
