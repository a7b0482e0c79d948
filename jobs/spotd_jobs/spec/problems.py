"""What is wrong with a file that a person wrote, with its place and a way out.

Shared by job files and the daemon's configuration: a `Problem` names the key, what is wrong and a way out; all
problems of a file are reported together.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import Any, Final, Self

from spotd_jobs.spec.toml_text import lines_of

PROBLEMS_MAX: Final = 50
"""So many are listed; a person mends some and asks again."""
VALUES_MAX: Final = 10_000
"""Keys and values of one file, far more than any that a person wrote."""
DEPTH_MAX: Final = 16
DEPTH_HINT: Final = "no key needs more than three levels"
_KEY_CHARS_MAX: Final = 300
_TEXT_CHARS_MAX: Final = 1_000
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
        self.source = source[:_TEXT_CHARS_MAX]
        self.problems = listed_problems(problems)
        super().__init__("\n".join(_with_hint(problem, self.source) for problem in self.problems))

    def located(self, toml_text: str) -> Self:
        """Return the same refusal with the line of each problem filled in from the text that was read."""
        lines = lines_of(toml_text, [problem.key for problem in self.problems])
        problems = [
            problem if problem.line is not None else replace(problem, line=line)
            for problem, line in zip(self.problems, lines, strict=True)
        ]
        return type(self)(self.source, sorted(problems, key=lambda problem: problem.line or 0))


def listed_problems(problems: Sequence[Problem]) -> tuple[Problem, ...]:
    """Return those that are listed, each cut to a length that can be read; the last says how many are not."""
    if len(problems) > PROBLEMS_MAX:
        more = Problem(key="", message=f"and {len(problems) - PROBLEMS_MAX + 1:,} more", hint="mend these first")
        problems = [*problems[: PROBLEMS_MAX - 1], more]
    return tuple(
        replace(
            one,
            key=_cut(one.key, _KEY_CHARS_MAX),
            message=_cut(one.message, _TEXT_CHARS_MAX),
            hint=_cut(one.hint, _TEXT_CHARS_MAX),
        )
        for one in problems
    )


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 3]}..."


def require_few_values(data: Mapping[str, Any], source: str, *, refusal: type[FileProblems]) -> None:
    """Require that a file holds no more keys and values than are judged one by one, and no deeper ones.

    Raises:
        FileProblems: of the class `refusal`; it holds more.
    """
    count, waiting = 0, [iter(data.values())]
    while waiting:
        for value in waiting[-1]:
            count += 1
            if count > VALUES_MAX:
                hint = "no file meant for spotd has so many; data belongs into files that the job reads"
                raise refusal(source, [Problem(key="", message=f"holds more than {VALUES_MAX:,} values", hint=hint)])
            if len(waiting) > DEPTH_MAX:
                raise refusal(source, [Problem(key="", message="is nested too deeply", hint=DEPTH_HINT)])
            if isinstance(value, Mapping):
                waiting.append(iter(value.values()))
                break
            if isinstance(value, list | tuple):
                waiting.append(iter(value))
                break
        else:
            waiting.pop()


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
    match = nearest(str(path[-1])[:_KEY_CHARS_MAX], names)
    if elsewhere is not None:
        hint = f'did you mean "{elsewhere}"?'
    elif match is not None:
        hint = f'did you mean "{match}"?'
    else:
        hint = f"known keys here: {', '.join(names)}"
    return Problem(key=key_path(path), message="unknown key", hint=hint)


def unknown_keys(
    given: Iterable[str],
    known: Collection[str],
    path: tuple[str | int, ...] = (),
    *,
    elsewhere: Mapping[str, str] | None = None,
) -> list[Problem]:
    """Return a refusal of each key that is not known; of very many the first ones, and how many more there are.

    A search for the nearest known key costs a fifth of a millisecond: a hundred thousand of them would take a minute.
    """
    unknown = [key for key in given if key not in known]
    homes = elsewhere or {}
    found = [unknown_key((*path, key), known, elsewhere=homes.get(key)) for key in unknown[:PROBLEMS_MAX]]
    if len(unknown) > PROBLEMS_MAX:
        more = f"holds {len(unknown) - PROBLEMS_MAX:,} more unknown keys"
        found.append(Problem(key=key_path(path), message=more, hint="mend the others first"))
    return found
