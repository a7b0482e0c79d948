"""The bundle of the runner that starts without a compiler: tests start hundreds of runners."""

from __future__ import annotations

import io
import marshal
import zipfile
from functools import cache
from importlib.util import MAGIC_NUMBER, source_hash
from typing import Final

from spotd_jobs.start import build_runner

_UNCHECKED: Final = (1).to_bytes(4, "little")
"""The flags of compiled code that is believed without a look at its source."""


@cache
def compiled_runner() -> bytes:
    """Return the bundle that is shipped, with the modules' compiled code beside their sources.

    Most of a start is the compiler. Another version of Python ignores this code; the bundle without it is what a start
    script fetches in `tests/integration/runner/test_start.py` and what the daemon gives its hosts.
    """
    buffer = io.BytesIO(build_runner())
    with zipfile.ZipFile(buffer, "a") as archive:
        for name in archive.namelist():
            source = archive.read(name)
            head = MAGIC_NUMBER + _UNCHECKED + source_hash(source)
            archive.writestr(f"{name}c", head + marshal.dumps(compile(source, name, "exec")))
    return buffer.getvalue()
