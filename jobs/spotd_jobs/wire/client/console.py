"""Lines of the runner for the machine's own console, and text made fit for documents."""

from __future__ import annotations

import os
import sys

from spotd_jobs.wire.client.names import is_hidden

LINE_CHARACTERS_MAX = 480


def log_line(text: str) -> None:
    """Print one line on stderr, for readers of the machine's console. It never holds a URL or a secret."""
    try:
        sys.stderr.write("spotd: " + text + "\n")
        sys.stderr.flush()
    except (OSError, ValueError):
        return  # the console is gone; the store is what counts


def clean(text: str) -> str:
    """Return the text as one bounded line without control or invisible characters, as the daemon demands."""
    text = text.encode("utf-8", "replace").decode("utf-8")[:LINE_CHARACTERS_MAX]
    if text.isascii():
        return "".join(character if " " <= character <= "~" else " " for character in text)
    return "".join(" " if is_hidden(character) else character for character in text)


def reason_of(error: BaseException) -> str:
    """Why something failed, without paths of URLs: an OSError by its own words, others by their text."""
    if isinstance(error, OSError) and error.errno is not None:
        return clean(os.strerror(error.errno))
    return clean(str(error) or type(error).__name__)
