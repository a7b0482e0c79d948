"""Names of files as text that is safe to show, keep and send, from which the name's very bytes can be had again.

A file name on Linux is bytes: it may hold a line break, half a character, a backslash or an invisible sign. As text,
what is printable stands for itself, and every other byte is `%` and two upper-case hex digits. A `%` of the name itself
is written so only where it would be misread.
"""

from __future__ import annotations

import os
import re
import unicodedata

_HIDDEN = frozenset(("Cc", "Cf", "Cs", "Co", "Zl", "Zp"))
_ENCODED = re.compile(rb"%([0-9A-F]{2})")
_PLAIN = re.compile(rb"(?:[ -$&-\[\]-~]|%(?![0-9A-F]{2}))*")
_ODD = re.compile(rb"[^ -~]|[%\\]")
_HEX = frozenset("0123456789ABCDEF")


def is_hidden(character: str) -> bool:
    """Whether it is a control, format (bidi, zero width), surrogate, private or line-separating character."""
    return unicodedata.category(character) in _HIDDEN


def is_printable(text: str) -> bool:
    """Whether no character of the text is hidden."""
    # `isprintable` refuses more than these, and is a hundred times as fast: manifests hold 100,000 names.
    return text.isprintable() or not any(is_hidden(character) for character in text)


def printable_text(raw: bytes) -> str:
    """Return the name as printable text."""
    if _PLAIN.fullmatch(raw):
        return raw.decode("ascii")
    text = raw.decode("utf-8", "surrogateescape")
    return "".join(_printable_character(text, place) for place in range(len(text)))


def raw_of(text: str) -> bytes:
    """Return the name that the text stands for."""
    return _ENCODED.sub(lambda found: bytes((int(found[1], 16),)), text.encode("utf-8", "surrogateescape"))


def _printable_character(text: str, place: int) -> str:
    character = text[place]
    if character == "%":
        return "%25" if len(text) > place + 2 and _HEX.issuperset(text[place + 1 : place + 3]) else "%"
    if character == "\\" or is_hidden(character):
        return "".join(f"%{byte:02X}" for byte in character.encode("utf-8", "surrogateescape"))
    return character


def ascii_text(name: str) -> str:
    """Return the name or path, as the system's calls give it, as text for documents of a host.

    All but plain printable ASCII is encoded, so that it does not matter which characters the reader's Python calls
    printable.
    """
    return _ODD.sub(lambda found: b"%%%02X" % found[0][0], os.fsencode(name)).decode("ascii")


def name_of(text: str) -> str:
    """Return the name or path that the text stands for, as the system's calls take it."""
    return os.fsdecode(raw_of(text))
