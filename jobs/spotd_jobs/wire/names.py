"""Names of files as text that is safe to show, keep and send, from which the name's very bytes can be had again.

A file name on Linux is bytes: it may hold a line break, half a character, a backslash or an invisible sign. As text,
what is printable stands for itself, and every other byte is `%` and two upper-case hex digits. A `%` of the name itself
is written so only where it would be misread.
"""

from __future__ import annotations

import re
import unicodedata
from typing import Final

_HIDDEN: Final = frozenset({"Cc", "Cf", "Cs", "Co", "Zl", "Zp"})
_ENCODED: Final = re.compile(rb"%([0-9A-F]{2})")
_PLAIN: Final = re.compile(rb"(?:[ -$&-\[\]-~]|%(?![0-9A-F]{2}))*")
_HEX: Final = frozenset("0123456789ABCDEF")


def is_printable(text: str) -> bool:
    """No control, format (bidi, zero width), surrogate, private or line-separating character."""
    # `isprintable` refuses more than these, and is a hundred times as fast: manifests hold 100,000 names.
    return text.isprintable() or not any(unicodedata.category(character) in _HIDDEN for character in text)


def shown(raw: bytes) -> str:
    """Return the name as printable text."""
    if _PLAIN.fullmatch(raw):
        return raw.decode("ascii")
    text = raw.decode("utf-8", "surrogateescape")
    return "".join(_shown(text, place) for place in range(len(text)))


def raw_of(text: str) -> bytes:
    """Return the name that the text stands for."""
    return _ENCODED.sub(lambda found: bytes((int(found[1], 16),)), text.encode("utf-8", "surrogateescape"))


def _shown(text: str, place: int) -> str:
    character = text[place]
    if character == "%":
        return "%25" if len(text) > place + 2 and _HEX.issuperset(text[place + 1 : place + 3]) else "%"
    if character == "\\" or unicodedata.category(character) in _HIDDEN:
        return "".join(f"%{byte:02X}" for byte in character.encode("utf-8", "surrogateescape"))
    return character
