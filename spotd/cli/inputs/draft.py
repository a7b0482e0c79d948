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
from spotd.cli.inputs.options import require_extra
from spotd_jobs.spec.keys import FLAGS
from spotd_jobs.spec.parse import BYTES_MAX, json_ready, merge, parse_job, parse_toml, read_toml
from spotd_jobs.spec.problems import Problem, SpecError, line_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from spotd.api.schemas.bodies import FolderBody
    from spotd.client.transport import ClientProblem
    from spotd_jobs.spec.model import JobSpec


# YAML as text: a document becomes tables, lists and strings, and nothing else.
#
# Theory. A task file comes from anywhere. YAML turns `no` into a truth value, `3.10` into 3.1 and `22:30` into 1,350,
# makes objects of tags, and an alias of nine others nine times over fills any memory. So nothing is resolved: every
# scalar stays the text that was written, and the reader of a key knows what it should be. Aliases, tags that make
# objects and keys that are written twice are refused. The events of the parser are read one by one, so that depth and
# number have a bound before anything is built. PyYAML is imported here alone, and only for a YAML file.


VALUES_MAX: Final = 20_000
DEPTH_MAX: Final = 32
Value = str | list[Any] | dict[str, Any]
_PLAIN_TAGS: Final = "tag:yaml.org,2002:"


class YamlRefused(Exception):
    """A document that is not read, with its line and the way out."""

    def __init__(self, message: str, *, line: int | None = None, hint: str = "") -> None:
        super().__init__(message)
        self.message, self.line, self.hint = message, line, hint


def read_yaml(raw: bytes) -> dict[str, Any]:
    """Return the one document of a file.

    Raises:
        YamlRefused
        CommandFailed: PyYAML is not installed.
    """
    require_extra("yaml", "yaml", "a YAML file is read with PyYAML")
    import yaml

    if len(raw) > BYTES_MAX:
        raise YamlRefused("is larger than 1 MB", hint="a task file names data, it does not hold it")
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as exc:
        raise YamlRefused("is not UTF-8 text", hint="save it as UTF-8") from exc
    try:
        found = _document(yaml.parse(text, Loader=yaml.SafeLoader))
    except yaml.MarkedYAMLError as exc:
        mark = exc.problem_mark or exc.context_mark
        said = " ".join(part for part in (exc.problem, exc.context) if part)
        hint = "indent by spaces" if "\\t" in said else "check the indentation and the quotes there"
        raise YamlRefused(f"is not YAML: {said}", line=None if mark is None else mark.line + 1, hint=hint) from exc
    except yaml.YAMLError as exc:
        raise YamlRefused(f"is not YAML: {exc}", hint="save it as plain UTF-8 text") from exc
    if not isinstance(found, dict):
        raise YamlRefused("holds no table of keys", hint="a task file begins with keys such as resources: and run:")
    return found


def _document(events: Iterator[Any]) -> Value | None:
    """Build the value of the only document."""
    open_values: list[list[Any] | dict[str, Any]] = []
    keys: list[str | None] = []
    result: Value | None = None
    count = documents = 0
    for event in events:
        kind, line = type(event).__name__, event.start_mark.line + 1
        if kind == "DocumentStartEvent":
            documents += 1
            if documents > 1:
                hint = "submit each task as a file of its own; [after] makes one wait for another"
                raise YamlRefused("holds several documents", line=line, hint=hint)
        elif kind == "AliasEvent":
            hint = "write the value out in the place of the alias"
            raise YamlRefused(f"uses the alias *{event.anchor}, which is not read", line=line, hint=hint)
        elif kind in ("MappingEndEvent", "SequenceEndEvent"):
            open_values.pop()
            keys.pop()
        elif kind in ("ScalarEvent", "MappingStartEvent", "SequenceStartEvent"):
            count += 1
            if count > VALUES_MAX:
                raise YamlRefused(f"holds more than {VALUES_MAX:,} values", line=line, hint="shorten it")
            if event.tag is not None and not event.tag.startswith(_PLAIN_TAGS):
                raise YamlRefused(f"has the tag {event.tag}", line=line, hint="write a plain value")
            if event.tag is not None and "python" in event.tag:
                raise YamlRefused("has a tag that makes an object", line=line, hint="write a plain value")
            made: Value = _scalar(event) if kind == "ScalarEvent" else {} if kind == "MappingStartEvent" else []
            if _put(open_values, keys, made, line):
                result = made
            if not isinstance(made, str):
                if len(open_values) >= DEPTH_MAX:
                    raise YamlRefused(f"is nested deeper than {DEPTH_MAX} levels", line=line, hint="flatten it")
                open_values.append(made)
                keys.append(None)
    return result


def _scalar(event: Any) -> str:
    """Return the text of a scalar; what is written as nothing is empty."""
    is_plain = event.style is None
    return "" if is_plain and event.value in ("~", "null", "Null", "NULL") else str(event.value)


def _put(open_values: list[list[Any] | dict[str, Any]], keys: list[str | None], made: Value, line: int) -> bool:
    """Put a value where it belongs; whether it is the document itself."""
    if not open_values:
        return True
    parent = open_values[-1]
    if isinstance(parent, list):
        parent.append(made)
        return False
    key = keys[-1]
    if key is None:
        if not isinstance(made, str):
            raise YamlRefused("has a key that is no text", line=line, hint="write a name before the colon")
        if made in parent:
            raise YamlRefused(f"has the key {made} twice", line=line, hint="keep one of them")
        if made == "<<":
            raise YamlRefused("merges tables by <<, which is not read", line=line, hint="write the keys out")
        keys[-1] = made
        parent[made] = ""
        return False
    parent[key] = made
    keys[-1] = None
    return False


STDIN: Final = "-"
YAML_SUFFIXES: Final = (".yaml", ".yml")

_MISSING: Final = "is missing"
_ONE_A_LINE: Final = "write one secret a line: NAME=value"
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

    path = Path(file)
    try:
        with path.open("rb") as opened:
            data = read_yaml(opened.read(BYTES_MAX + 1))
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
            raw = file.read(BYTES_MAX + 1)
    except OSError as exc:
        raise CommandFailed(
            f"the secret file {path} cannot be read: {exc.strerror}", hint="check its path and mode"
        ) from exc
    if len(raw) > BYTES_MAX:
        raise CommandFailed(f"the secret file {path} is larger than 1 MB", hint=_ONE_A_LINE)
    try:
        lines = raw.decode().splitlines()
    except UnicodeDecodeError as exc:
        raise CommandFailed(f"the secret file {path} is not UTF-8 text", hint=_ONE_A_LINE) from exc
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
