"""Names of files as text for documents, from which the name's very bytes can be had again.

All but plain printable ASCII is `%` and two hex digits for each byte, so that it does not matter which characters the
reader's Python calls printable.
"""

from __future__ import annotations

import os
import re

_ODD = re.compile(rb"[^ -~]|[%\\]")
_ENCODED = re.compile(rb"%([0-9A-F]{2})")


def encoded(name: str) -> str:
    """Return the name or path, as the system's calls give it, as text."""
    return _ODD.sub(lambda found: b"%%%02X" % found[0][0], os.fsencode(name)).decode("ascii")


def decoded(text: str) -> str:
    """Return the name or path that the text stands for, as the system's calls take it."""
    raw = text.encode("utf-8", "surrogateescape")
    return os.fsdecode(_ENCODED.sub(lambda found: bytes((int(found[1], 16),)), raw))
