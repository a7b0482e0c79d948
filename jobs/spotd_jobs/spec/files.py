"""TOML files from disk, refused with a sentence instead of a traceback."""

from __future__ import annotations

import re
import tomllib
from datetime import date, datetime, time
from pathlib import Path
from typing import Any, Final

from spotd_jobs.spec.problems import DEPTH_HINT, FileProblems, Problem, require_few_values

BYTES_MAX: Final = 1_000_000
_PART: Final = r"""(?>[A-Za-z0-9_-]+|"(?:[^"\\\n]|\\.)*+"|'[^'\n]*+')[ \t]*+"""
_DEEP_KEY: Final = re.compile(rf"(?:^|[\[{{,])[ \t\[]*+(?>{_PART}\.[ \t]*+){{20}}", re.MULTILINE)
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
    return Problem(key="", message=f"not valid TOML: {place['what']}", hint=hint, line=line)
