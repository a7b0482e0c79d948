"""The runner as one file: a zipapp whose bytes depend on its sources alone."""

from __future__ import annotations

import io
import zipfile
from functools import cache
from pathlib import Path
from typing import Final

import spotd_jobs

_EPOCH: Final = (1980, 1, 1, 0, 0, 0)
_FILE_MODE: Final = 0o100644 << 16
_MAIN: Final = b"from spotd_jobs.runner.main import run\n\nrun()\n"


@cache
def build_runner() -> bytes:
    """Return the zipapp's bytes: the same sources give the same bytes, on every machine."""
    root = Path(spotd_jobs.__file__).parent
    # The other modules of `wire` are the daemon's: they need more than the standard library.
    sources = {"__main__.py": _MAIN, "spotd_jobs/__init__.py": b"", "spotd_jobs/wire/__init__.py": b""}
    for folder in ("runner", "wire/client"):
        for source in sorted((root / folder).glob("*.py")):
            sources[f"spotd_jobs/{folder}/{source.name}"] = source.read_bytes()
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, content in sorted(sources.items()):
            entry = zipfile.ZipInfo(name, date_time=_EPOCH)
            entry.external_attr = _FILE_MODE
            entry.create_system = 3
            entry.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(entry, content, compresslevel=9)
    return buffer.getvalue()
