"""Official clients of providers, each installed once into an environment of its own in the user's cache."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from pathlib import Path
from typing import Final

import platformdirs

_INSTALL_SECONDS_MAX: Final = 240


class CannotInstall(Exception):
    """The official client is not here and cannot be had; the message says why."""


def environment_with(package: str, version: str) -> Path:
    """The folder of a virtual environment that holds this package. It may drag in dozens of others.

    Raises:
        CannotInstall: no package index answers, or it has no such version.
    """
    cache = Path(os.environ.get("SPOTD_TEST_CACHE") or platformdirs.user_cache_dir("spotd-tests"))
    folder = cache / f"{package}-{version}-py{sys.version_info.major}.{sys.version_info.minor}"
    ready = folder / "ready"
    if ready.exists() and (folder / "bin" / "python").exists():
        return folder
    try:
        venv.create(folder, with_pip=True, clear=True)
        done = subprocess.run(
            [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", f"{package}=={version}"],
            capture_output=True,
            text=True,
            timeout=_INSTALL_SECONDS_MAX,
            check=False,
        )
    except subprocess.TimeoutExpired as exc:
        raise CannotInstall(f"installing {package} {version} took longer than {_INSTALL_SECONDS_MAX} s") from exc
    except (OSError, subprocess.CalledProcessError) as exc:
        raise CannotInstall(f"an environment for {package} {version} cannot be made: {type(exc).__name__}") from exc
    if done.returncode:
        raise CannotInstall(f"{package} {version} cannot be installed: {done.stderr.strip()[-300:]}")
    ready.touch()
    return folder
