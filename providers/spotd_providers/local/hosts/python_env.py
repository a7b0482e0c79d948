"""A Python environment of a local machine's own, so that what a job installs stays in the machine's folder.

A machine of the local market is a process of this computer, and its first `python3` would be the one that spotd runs
in: `pip install` in a job's `setup` would change the user's own environment. The machine gets a virtual environment as
`venv` makes it, which finds all that is installed beside spotd and installs into itself. It is written here, since
`venv` takes tenths of a second for each machine.

Source of the form: PEP 405, and https://docs.python.org/3/library/site.html for the lines of a `.pth` file.
"""

from __future__ import annotations

import os
import sys
import sysconfig
from pathlib import Path
from typing import Final

from spotd_providers.kit.files import write_atomically

FOLDER: Final = "python"
_NAMES: Final = ("python", "python3")
_PIP_NAMES: Final = ("pip", "pip3")
_PIP: Final = '#!/bin/sh\nexec "{python}" -m pip "$@"\n'


def make_python_env(directory: Path) -> dict[str, str]:
    """Make the environment below the machine's directory, unless it is there; return the variables that select it.

    Raises:
        OSError: the folder cannot be written.
    """
    folder = directory / FOLDER
    programs = folder / "bin"
    base = Path(getattr(sys, "_base_executable", "") or sys.executable)
    packages = folder / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    if not (folder / "pyvenv.cfg").exists():
        programs.mkdir(parents=True, exist_ok=True)
        packages.mkdir(parents=True, exist_ok=True)
        for name in _NAMES:
            (programs / name).unlink(missing_ok=True)
            (programs / name).symlink_to(base)
        for name in _PIP_NAMES:
            write_atomically(programs / name, _PIP.format(python=programs / "python3"), mode=0o755)
        beside = sorted({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")})
        lines = "".join(f"import site; site.addsitedir({path!r})\n" for path in beside)
        write_atomically(packages / "beside-spotd.pth", lines)
        # Last: it is what makes the folder an environment, so one that is half made is made again.
        text = f"home = {base.parent}\ninclude-system-site-packages = true\n"
        write_atomically(folder / "pyvenv.cfg", text)
    return {"VIRTUAL_ENV": str(folder), "PIP_REQUIRE_VIRTUALENV": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}


def program_path(directory: Path) -> str:
    """Return the machine's PATH: its own environment, then the folder of this interpreter, then our own."""
    own = directory / FOLDER / "bin"
    return os.pathsep.join([str(own), str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
