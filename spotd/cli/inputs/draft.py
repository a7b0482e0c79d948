"""A job as the user wrote it in a file and in flags, and where in them an error is."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from spotd.cli.failures import CommandFailed, unusable
from spotd_jobs.spec.files import BYTES_MAX, json_ready, parse_toml, read_toml
from spotd_jobs.spec.keys import FLAGS
from spotd_jobs.spec.parse import merge, parse_job
from spotd_jobs.spec.problems import Problem, SpecError
from spotd_jobs.spec.toml_text import line_of

if TYPE_CHECKING:
    from spotd.client.errors import ClientProblem
    from spotd_jobs.spec.model import JobSpec

STDIN: Final = "-"

_MISSING: Final = "is missing"
_INDEX: Final = re.compile(r"\[\d+\].*")
_LIST: Final = re.compile(r"\[(\"[^\[\]]*\")\]")


@dataclass(frozen=True, slots=True, kw_only=True)
class JobDraft:
    """What the user wrote.

    Attributes:
        text: of the job file, to find lines in; empty without one.
        source: the job file as the user named it, empty without one.
    """

    data: Mapping[str, Any] = field(default_factory=dict)
    flags: Mapping[str, Any] = field(default_factory=dict)
    text: str = ""
    source: str = ""
    base_dir: str = ""

    def as_json(self) -> dict[str, Any]:
        return {"data": self.data, "flags": self.flags, "source": self.source, "base_dir": self.base_dir}

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
        return CommandFailed(message, rows=[self._placed(problem) for problem in problems])

    def _placed(self, problem: Problem | ClientProblem) -> tuple[str, str]:
        key = problem.key
        flag = FLAGS.get(_INDEX.sub("", key)) or (FLAGS["env"] if key.startswith("env.") else None)
        if flag is not None and (not self.source or self._is_flagged(key)):
            hint = problem.hint
            if problem.message == _MISSING and not self.source:
                hint = f"give {flag}, or {key} in a job file"
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


def read_draft(file: str | None, flags: Mapping[str, Any]) -> JobDraft:
    """Return the draft of a job file, which may be absent or `-` for stdin, and flags.

    Raises:
        CommandFailed: the file cannot be read or is not TOML; an argument is not text.
    """
    _refuse_bytes(flags)
    if file is None:
        if not flags:
            raise CommandFailed(
                "there is no job to submit",
                hint="spotctl submit train.toml, or spotctl submit --gpu H100 --image IMAGE -- COMMAND",
            )
        return JobDraft(flags=_with_name(flags), base_dir=os.getcwd())  # noqa: PTH109 - the text, not a path to work with
    try:
        if file == STDIN:
            data, text = parse_toml(sys.stdin.buffer.read(BYTES_MAX + 1), source="stdin", refusal=SpecError)
        else:
            data, text = read_toml(Path(file), refusal=SpecError)
    except SpecError as exc:
        raise unusable("the job file cannot be used", exc) from exc
    folder = Path.cwd() if file == STDIN else Path(file).absolute().parent
    source = "stdin" if file == STDIN else file
    return JobDraft(data=json_ready(data), flags=flags, text=text, source=source, base_dir=str(folder))


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
