"""Which characters of an untrusted text are never shown, in one place for terminals, pages, messages and ids.

Text that a rented host, a provider or another user wrote may hold characters that a screen obeys, that turn the
direction of writing, or that take no ink: with these, one name can pass for another, and a line can be forged. A pile
of combining marks is drawn over the lines around it.
"""

from __future__ import annotations

import re
import unicodedata
from typing import Final

MARKS_MAX: Final = 3
"""Combining marks on one letter: pointed Hebrew has three, Vietnamese two."""
DIRECTIONS: Final = "\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069"
"""What turns the direction of writing, and separators of lines and paragraphs."""
WITHOUT_INK: Final = (
    "\u00ad\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200d\u2060-\u2065\u206a-\u206f\u3164\ufe00-\ufe0f\ufeff"
    "\uffa0\ufff0-\ufffb\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0000-\U000e0fff"
)
"""What Unicode says may be drawn as nothing at all: joiners, fillers, soft hyphens, selectors of variants, tags."""
HALVES: Final = "\ud800-\udfff\ufffe\uffff"
"""Half characters and what is none."""
HIDDEN: Final = f"{DIRECTIONS}{WITHOUT_INK}{HALVES}"
"""All of these, for the inside of a character class; controls are each reader's own."""
_NOT_ASCII: Final = re.compile("[^\x00-\x7f]")


_HIDDEN: Final = re.compile(f"[{HIDDEN}]")


class MarkLimit:
    """Takes what is hidden and piled combining marks out of a text, also where it comes in pieces."""

    def __init__(self) -> None:
        self._count = 0

    def feed(self, text: str) -> str:
        """Return the piece without what is hidden, and with no more than `MARKS_MAX` marks in a row."""
        if _NOT_ASCII.search(text) is None:
            self._count = 0 if text else self._count
            return text
        kept: list[str] = []
        for character in _HIDDEN.sub("", text):
            is_mark = character > "\x7f" and unicodedata.category(character) in ("Mn", "Me")
            self._count = self._count + 1 if is_mark else 0
            if self._count <= MARKS_MAX:
                kept.append(character)
        return "".join(kept)


def without_piles(text: str) -> str:
    """Return the text with no more than `MARKS_MAX` combining marks in a row."""
    return MarkLimit().feed(text)
