"""The command that adds an optional part to this very installation, found out when it is needed.

spotd is installed in several ways, and each has a command of its own for what is added later. A name on an index is
never used: what is added is named by the libraries that the optional part consists of, or by the clone.
"""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Callable, Iterable
from importlib.metadata import Distribution, PackageNotFoundError
from pathlib import Path
from typing import Final
from urllib.parse import unquote, urlsplit

DISTRIBUTION: Final = "spotd"
_OF_EXTRA: Final = re.compile(r"extra\s*==\s*[\"'](?P<extra>[A-Za-z0-9_.-]+)[\"']")


def install_command(extra: str, *, prefix: Path | None = None, python: str | None = None) -> str:
    """Return the command that installs the libraries of one of spotd's extras where this Python finds them.

    Args:
        extra: its name in `pyproject.toml`.
        prefix: the environment; this one unless given.
        python: its interpreter; this one unless given.
    """
    prefix = Path(sys.prefix) if prefix is None else prefix
    python = python or sys.executable
    distribution = _distribution()
    clone = None if distribution is None else _clone(distribution)
    libraries = [] if distribution is None else libraries_of(extra, distribution.requires or ())
    quoted = " ".join(shlex.quote(one) for one in libraries) or shlex.quote(f"{DISTRIBUTION}[{extra}]")
    if (prefix / "pipx_metadata.json").is_file():
        return f"pipx inject {DISTRIBUTION} {quoted}"
    if (prefix / "uv-receipt.toml").is_file():
        return f"uv pip install --python {shlex.quote(python)} {quoted}"
    if clone is not None:
        return f"{_pip(prefix, python)} install -e {shlex.quote(f'{clone}[{extra}]')}"
    return f"{_pip(prefix, python)} install {quoted}"


def libraries_of(extra: str, requirements: Iterable[str]) -> list[str]:
    """Return the requirements of an extra, as pip takes them, without those of the extras that it names itself."""
    found = []
    for line in requirements:
        requirement, _, marker = line.partition(";")
        match = _OF_EXTRA.search(marker)
        if match is not None and match["extra"] == extra:
            found.append(requirement.strip())
    return found


def _distribution(find: Callable[[str], Distribution] = Distribution.from_name) -> Distribution | None:
    try:
        return find(DISTRIBUTION)
    except PackageNotFoundError:
        return None


def _clone(distribution: Distribution) -> Path | None:
    """Return the folder that an editable installation reads the program from, as its own record states it."""
    try:
        record = json.loads(distribution.read_text("direct_url.json") or "{}")
        if not record.get("dir_info", {}).get("editable", False):
            return None
        path = Path(unquote(urlsplit(record["url"]).path))
    except (ValueError, KeyError, AttributeError, TypeError):
        return None
    return path if (path / "pyproject.toml").is_file() else None


def _pip(prefix: Path, python: str) -> str:
    beside = prefix / "bin" / "pip"
    return shlex.quote(str(beside)) if beside.is_file() else f"{shlex.quote(python)} -m pip"
