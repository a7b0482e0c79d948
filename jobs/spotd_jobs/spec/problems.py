"""What is wrong with a file that a person wrote, with its place and a way out.

Shared by job files and the daemon's configuration: a `Problem` names the key, what is wrong and a way out; all
problems of a file are reported together.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Self

# Reading TOML so that errors can name a line.
#
# `tomllib` parses and does not report where a key stood. `lines_of` finds that out afterwards with a small scanner over
# text that is already known to be valid TOML, and only when there is an error to report.


_Path = tuple["str | int", ...]

_BARE: Final = re.compile(r"[A-Za-z0-9_-]+")
_SPACE: Final = re.compile(r"[ \t]*")
_BLANK: Final = re.compile(r"(?:[ \t\r\n]|#[^\n]*)*")
_SCALAR: Final = re.compile(r"[^,\]\}\n#]*")
_INDEX: Final = re.compile(r"\[(\d+)\]")
_STRINGS: Final = (
    re.compile(r'"""(?:\\.|[^\\])*?"""(?:"{0,2})', re.DOTALL),
    re.compile(r"'''.*?'''(?:'{0,2})", re.DOTALL),
    re.compile(r'"(?:\\.|[^"\\\n])*"'),
    re.compile(r"'[^'\n]*'"),
)
_ESCAPES: Final = {'"': '"', "\\": "\\", "b": "\b", "t": "\t", "n": "\n", "f": "\f", "r": "\r"}
_ESCAPE: Final = re.compile(r'\\(?:u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|(["\\btnfr]))')


class _Lost(Exception):
    """The text is not what the scanner expects; whatever was found so far is all there is."""


def line_of(toml_text: str, key: str) -> int | None:
    """Return the line of one key, as `lines_of` does."""
    return lines_of(toml_text, [key])[0]


def lines_of(toml_text: str, keys: Sequence[str]) -> list[int | None]:
    """Return for each key the line, counted from one, where it stands; else that of what holds it most nearly.

    A key is a path as `problems.key_path` writes it: `resources.gpu[1]`, `env."a.b"`. The text is scanned once.
    """
    wanted = [_parse_path(key) for key in keys]
    if not any(wanted):
        return [None] * len(wanted)
    heads = {path[:depth] for path in wanted for depth in range(1, len(path) + 1)}
    offsets: dict[_Path, int] = {}
    for path, offset in _walk(toml_text):
        if path in heads:
            offsets.setdefault(path, offset)
    return [_line(toml_text, path, offsets) for path in wanted]


def _line(toml_text: str, path: _Path, offsets: Mapping[_Path, int]) -> int | None:
    found = next((offsets[path[:depth]] for depth in range(len(path), 0, -1) if path[:depth] in offsets), None)
    return None if found is None else toml_text.count("\n", 0, found) + 1


def _parse_path(key: str) -> _Path:
    parts: list[str | int] = []
    position = 0
    while position < len(key):
        if key[position] == ".":
            position += 1
        elif match := _INDEX.match(key, position):
            parts.append(int(match.group(1)))
            position = match.end()
        elif scanned := _simple_key(key, position):
            name, position = scanned
            parts.append(name)
        else:
            return tuple(parts)
    return tuple(parts)


def _simple_key(text: str, position: int) -> tuple[str, int] | None:
    if match := _BARE.match(text, position):
        return match.group(), match.end()
    for pattern in _STRINGS[2:]:
        if match := pattern.match(text, position):
            body = match.group()[1:-1]
            return (_ESCAPE.sub(_unescape, body) if match.group()[0] == '"' else body), match.end()
    return None


def _unescape(match: re.Match[str]) -> str:
    short, long, letter = match.groups()
    return _ESCAPES[letter] if letter else chr(int(short or long, 16))


def _dotted_key(text: str, position: int) -> tuple[list[str], int]:
    parts = []
    while True:
        scanned = _simple_key(text, _skip(_SPACE, text, position))
        if scanned is None:
            raise _Lost
        parts.append(scanned[0])
        position = _skip(_SPACE, text, scanned[1])
        if not text.startswith(".", position):
            return parts, position
        position += 1


def _skip(pattern: re.Pattern[str], text: str, position: int) -> int:
    match = pattern.match(text, position)
    return position if match is None else match.end()


def _walk(text: str) -> Iterator[tuple[_Path, int]]:
    """Every key, table and list element with the offset where it begins, in the order of the text."""
    found: list[tuple[_Path, int]] = []
    counts: dict[_Path, int] = {}
    table: _Path = ()
    position = 0
    try:
        while (position := _skip(_BLANK, text, position)) < len(text):
            if text.startswith("[", position):
                start = position
                double = text.startswith("[[", position)
                names, position = _dotted_key(text, position + (2 if double else 1))
                table = _in_newest_element(names, counts)
                if double:
                    counts[table] = counts.get(table, -1) + 1
                    table = (*table, counts[table])
                found += [(table[:depth], start) for depth in range(1, len(table) + 1)]
                position += 2 if double else 1
            else:
                position = _pair(text, position, table, found)
    except _Lost:
        pass
    yield from found


def _in_newest_element(names: list[str], counts: dict[_Path, int]) -> _Path:
    """Return the path of a header, led through the newest element of every array of tables above it."""
    path: _Path = ()
    for number, name in enumerate(names):
        path = (*path, name)
        if number < len(names) - 1 and path in counts:
            path = (*path, counts[path])
    return path


def _pair(text: str, position: int, table: _Path, found: list[tuple[_Path, int]]) -> int:
    names, after = _dotted_key(text, position)
    path = table
    for name in names:
        path = (*path, name)
        found.append((path, position))
    if not text.startswith("=", after):
        raise _Lost
    return _value(text, _skip(_SPACE, text, after + 1), path, found)


def _value(text: str, position: int, path: _Path, found: list[tuple[_Path, int]]) -> int:
    for pattern in _STRINGS:
        if match := pattern.match(text, position):
            return match.end()
    if text.startswith("[", position):
        return _items(text, position + 1, "]", path, found)
    if text.startswith("{", position):
        return _items(text, position + 1, "}", path, found)
    return _skip(_SCALAR, text, position)


def _items(text: str, position: int, end: str, path: _Path, found: list[tuple[_Path, int]]) -> int:
    index = 0
    while True:
        position = _skip(_BLANK, text, position)
        if position >= len(text):
            raise _Lost
        if text[position] == end:
            return position + 1
        if text[position] == ",":
            position += 1
        elif end == "]":
            found.append(((*path, index), position))
            after = _value(text, position, (*path, index), found)
            if after == position:
                raise _Lost
            position = after
            index += 1
        else:
            position = _pair(text, position, path, found)


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
    from difflib import get_close_matches  # only a mistake needs it

    folded = {candidate.lower().replace("-", "_"): candidate for candidate in sorted(known)}
    matches = get_close_matches(word.lower().replace("-", "_"), list(folded), n=1, cutoff=0.6)
    return folded[matches[0]] if matches else None


def unknown_key(path: Sequence[str | int], known: Iterable[str], *, elsewhere: str | None = None) -> Problem:
    """Return a refusal of an unknown key, with the nearest known one or the whole list.

    `elsewhere` is the full path of a known key of the same name in another table.
    """
    names = sorted(known)
    match = nearest(str(path[-1])[:_KEY_CHARS_MAX], names)
    if elsewhere is not None and elsewhere == str(path[-1]):
        hint = f'"{elsewhere}" stands in no table: write it above the first line with ['
    elif elsewhere is not None:
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
