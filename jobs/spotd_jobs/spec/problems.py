"""What is wrong with a file that a person wrote, with its place and a way out.

Shared by job files and the daemon's configuration: a `Problem` names the key, what is wrong and a way out; all
problems of a file are reported together.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import Final, Self

from spotd_jobs.spec.toml_text import line_of

_BARE_KEY: Final = re.compile(r"[A-Za-z0-9_-]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One thing that is wrong.

    Attributes:
        key: full path, as in `resources.gpu[1]`; empty where the file as a whole is meant.
        message: what is wrong, a clause that reads on after the key.
        hint: what to do about it; may be empty.
        line: where in the file, counted from one, if known.
    """

    key: str
    message: str
    hint: str = ""
    line: int | None = None

    def sentence(self, source: str) -> str:
        """One line: place, key, what is wrong, without the hint."""
        place = source if self.line is None else f"{source}:{self.line}"
        return ": ".join(part for part in (place, self.key, self.message) if part)


class BadValue(ValueError):
    """One value cannot be used; the message is a clause that reads on after its key, `hint` is the way out."""

    def __init__(self, message: str, *, hint: str) -> None:
        super().__init__(message)
        self.hint = hint


class FileProblems(Exception):
    """A file was refused; `problems` holds all reasons, at least one."""

    def __init__(self, source: str, problems: Sequence[Problem]) -> None:
        self.source = source
        self.problems = tuple(problems)
        super().__init__("\n".join(_with_hint(problem, source) for problem in self.problems))

    def located(self, toml_text: str) -> Self:
        """Return the same refusal with the line of each problem filled in from the text that was read."""
        problems = [
            problem if problem.line is not None else replace(problem, line=line_of(toml_text, problem.key))
            for problem in self.problems
        ]
        return type(self)(self.source, sorted(problems, key=lambda problem: problem.line or 0))


class SpecError(FileProblems):
    """A job file or the flags in its place were refused."""


def _with_hint(problem: Problem, source: str) -> str:
    sentence = problem.sentence(source)
    return f"{sentence} ({problem.hint})" if problem.hint else sentence


def key_path(parts: Iterable[str | int]) -> str:
    """Return the path as a person writes it: dotted keys, quoted where TOML demands it, `[n]` for a place in a list."""
    text = ""
    for part in parts:
        if isinstance(part, int):
            text += f"[{part}]"
            continue
        spelled = part if _BARE_KEY.fullmatch(part) else '"' + part.replace("\\", "\\\\").replace('"', '\\"') + '"'
        text += f".{spelled}" if text else spelled
    return text


def nearest(word: str, known: Iterable[str]) -> str | None:
    """Return the known word a person most likely meant, or `None` when nothing is close.

    Case and the difference between `-` and `_` do not count.
    """
    folded = {candidate.lower().replace("-", "_"): candidate for candidate in sorted(known)}
    matches = get_close_matches(word.lower().replace("-", "_"), list(folded), n=1, cutoff=0.6)
    return folded[matches[0]] if matches else None


def unknown_key(path: Sequence[str | int], known: Iterable[str], *, elsewhere: str | None = None) -> Problem:
    """Return a refusal of an unknown key, with the nearest known one or the whole list.

    `elsewhere` is the full path of a known key of the same name in another table.
    """
    names = sorted(known)
    match = nearest(str(path[-1]), names)
    if elsewhere is not None:
        hint = f'did you mean "{elsewhere}"?'
    elif match is not None:
        hint = f'did you mean "{match}"?'
    else:
        hint = f"known keys here: {', '.join(names)}"
    return Problem(key=key_path(path), message="unknown key", hint=hint)
