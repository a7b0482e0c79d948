"""Texts of untrusted origin made safe to show: no key, no signed URL, no control characters, bounded length."""

from __future__ import annotations

import re
from typing import Final

from spotd_providers.contract.printable import HIDDEN, without_piles

TEXT_CHARS_MAX: Final = 240
_URL: Final = re.compile(r"(\bhttps?://[^\s?\"']*)(\?[^\s\"']*)?")
"""Whole, with or without a query: a URL that only matched with one would be searched again from each of its parts."""
_LONG_HEX: Final = re.compile(r"\b[0-9a-fA-F]{32,}\b")
_ASSIGNED_SECRET: Final = re.compile(
    r"(?i)\b(api_key|token|secret|password|authorization)(\"?\s*[=:]\s*)\"?(bearer\s+)?[^\s\"&,]+"
)
_MIXED_TOKEN: Final = re.compile(r"(?=\S*[0-9])(?=\S*[A-Za-z])\S{8,}")
_UNPRINTABLE: Final = re.compile(f"[\x00-\x08\x0b-\x1f\x7f-\x9f{HIDDEN}]")


def clean(text: str, *, chars_max: int = TEXT_CHARS_MAX) -> str:
    """Remove control characters, URL queries and anything that resembles a key from the text."""
    text = without_piles(_UNPRINTABLE.sub("", text))
    text = _URL.sub(lambda url: f"{url[1]}?..." if url[2] else url[1], text)
    text = _ASSIGNED_SECRET.sub(r"\1\2***", text)
    return _LONG_HEX.sub("***", text).strip()[:chars_max]


def quote_safely(text: str) -> str:
    """Clean the text of a refusal for an error message: a word with letters and digits may be an echoed secret."""
    return _MIXED_TOKEN.sub("***", clean(text))
