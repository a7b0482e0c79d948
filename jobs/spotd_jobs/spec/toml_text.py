"""Reading TOML so that errors can name a line.

`tomllib` parses and does not report where a key stood. `lines_of` finds that out afterwards with a small scanner over
text that is already known to be valid TOML, and only when there is an error to report.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

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
