"""The values of a job's secrets, from this environment or a file. No message here ever holds a value."""

from __future__ import annotations

import re
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from spotd.cli import stderr
from spotd.cli.failures import CommandFailed

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
        values[match["name"]] = _unquoted(match["value"])
    return values


def _is_text(value: str) -> bool:
    """Whether a variable of the environment is UTF-8: Python keeps other bytes as lone surrogates."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _unquoted(value: str) -> str:
    quoted = len(value) >= 2 and value[0] == value[-1] and value[0] in "'\""
    return value[1:-1] if quoted else value
