"""Official clients of providers, each installed once into an environment of its own in the user's cache."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import venv
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import platformdirs
import pytest

_INSTALL_SECONDS_MAX: Final = 240
_STORY_SECONDS_MAX: Final = 240


@dataclass(frozen=True, slots=True, kw_only=True)
class Client:
    """A package with a client in it, and what its own list of dependencies leaves out."""

    package: str
    version: str
    also: tuple[str, ...] = ()
    install_seconds_max: int = _INSTALL_SECONDS_MAX
    name: str = ""
    """Of its environment, where it is not the package's."""


DSTACK: Final = Client(package="dstack", version="0.22.5", also=("httpx==0.28.1",), install_seconds_max=600)
"""With the clients that it has written for itself and rents real machines with; and with gpuhunt."""
PRIME: Final = Client(package="prime", version="0.18.0")
OPENSTACK: Final = Client(package="openstacksdk", version="4.22.0")
VERDA: Final = Client(package="verda", version="1.25.0")
AZURE: Final = Client(package="azure-mgmt-compute", version="39.0.0")
VASTAI: Final = Client(package="vastai", version="1.9.1")


class CannotInstall(Exception):
    """The official client is not here and cannot be had; the message says why."""


def environment_with(client: Client) -> Path:
    """The folder of a virtual environment that holds this client. It may drag in dozens of other packages.

    Raises:
        CannotInstall: no package index answers, or it has no such version.
    """
    cache = Path(os.environ.get("SPOTD_TEST_CACHE") or platformdirs.user_cache_dir("spotd-tests"))
    package, version, seconds_max = client.package, client.version, client.install_seconds_max
    folder = cache / f"{client.name or package}-{version}-py{sys.version_info.major}.{sys.version_info.minor}"
    ready = folder / "ready"
    if ready.exists() and (folder / "bin" / "python").exists():
        return folder
    try:
        venv.create(folder, with_pip=True, clear=True)
        done = subprocess.run(
            [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", f"{package}=={version}", *client.also],
            capture_output=True,
            text=True,
            timeout=seconds_max,
            check=False,
        )
    except subprocess.TimeoutExpired as exc:
        raise CannotInstall(f"installing {package} {version} took longer than {seconds_max} s") from exc
    except (OSError, subprocess.CalledProcessError) as exc:
        raise CannotInstall(f"an environment for {package} {version} cannot be made: {type(exc).__name__}") from exc
    if done.returncode:
        raise CannotInstall(f"{package} {version} cannot be installed: {done.stderr.strip()[-300:]}")
    ready.touch()
    return folder


def told_by(client: Client, story: Path, url: str, key: str, *, home: Path, **environment: str) -> Any:
    """What this script printed last, as JSON: it was run where the client of this name and version is installed.

    A client that cannot be had here skips the test.
    """
    try:
        python = environment_with(client) / "bin" / "python"
    except CannotInstall as exc:
        pytest.skip(str(exc))
    home.mkdir()
    done = subprocess.run(
        [str(python), str(story), url, key],
        capture_output=True,
        text=True,
        timeout=_STORY_SECONDS_MAX,
        env={"PATH": os.environ.get("PATH", os.defpath), "HOME": str(home), "LANG": "C.UTF-8", **environment},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])
