"""The wheel, installed as people install it: with the libraries that a package registry has today."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from spotd.setup.service import MARK
from tests.integration.packaging.conftest import REPO, run
from tests.waiting import until

pytestmark = [pytest.mark.system, pytest.mark.timeout(900)]

PACKAGES_MAX = 26
"""Of others, in an installation without extras."""
INSTALL_S = 600.0
CORE = {
    line.partition(">")[0] for line in tomllib.loads((REPO / "pyproject.toml").read_text())["project"]["dependencies"]
}


def _installer(folder: Path, name: str) -> Path:
    """A program of the registry, in an environment of its own."""
    subprocess.run([sys.executable, "-m", "venv", folder], check=True, timeout=120)
    command: list[str | Path] = [
        folder / "bin" / "python",
        "-m",
        "pip",
        "install",
        "--quiet",
        "--disable-pip-version-check",
        name,
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_S, check=False)
    if done.returncode:
        pytest.skip(f"the package registry does not give {name}: {done.stderr.strip()[-200:]}")
    return folder / "bin" / name


@pytest.fixture(scope="module", params=["pip", "pipx", "uv"])
def installed(request: pytest.FixtureRequest, wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the commands."""
    folder = tmp_path_factory.mktemp(f"by-{request.param}")
    home, commands = folder / "home", folder / "bin"
    home.mkdir()
    environment = {**os.environ, "HOME": str(home), "PIPX_HOME": str(folder / "pipx"), "PIPX_BIN_DIR": str(commands),
                   "UV_TOOL_DIR": str(folder / "uv"), "UV_TOOL_BIN_DIR": str(commands), "UV_NATIVE_TLS": "1",
                   "UV_PYTHON_DOWNLOADS": "never", "UV_CACHE_DIR": str(folder / "cache")}  # fmt: skip
    environment.pop("PYTHONPATH", None)
    if request.param == "pip":
        subprocess.run([sys.executable, "-m", "venv", folder / "venv"], check=True, timeout=120)
        command: list[str | Path] = [folder / "venv/bin/python", "-m", "pip", "install", "--quiet", wheel]
        commands = folder / "venv" / "bin"
    elif request.param == "pipx":
        command = [_installer(folder / "tool", "pipx"), "install", "--python", sys.executable, wheel]
    else:
        command = [_installer(folder / "tool", "uv"), "tool", "install", "--python", sys.executable, wheel]
        if index := _registry():
            command[3:3] = ["--index-url", index]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=INSTALL_S, check=False)
    if done.returncode and ("connect" in done.stderr.lower() or "No matching distribution" in done.stderr):
        pytest.skip(f"the package registry does not answer: {done.stderr.strip()[-300:]}")
    assert done.returncode == 0, done.stderr[-3000:]
    return commands


def _registry() -> str:
    """The address that this computer's pip is set to, which uv does not read."""
    command = [sys.executable, "-m", "pip", "config", "get", "global.index-url"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    return done.stdout.strip()


def test_both_commands_work(installed: Path, tmp_path: Path) -> None:
    for name in ("spotd", "spotctl"):
        done = run([installed / name, "--version"], tmp_path)
        assert (done.returncode, done.stderr) == (0, "")
    assert run([installed / "spotctl", "init"], tmp_path).returncode == 0, "the local market, without a terminal"
    assert run([installed / "spotd", "config", "check"], tmp_path).stdout.endswith("is in order\n")


def test_the_service_would_start_this_very_installation(installed: Path, tmp_path: Path) -> None:
    done = run([installed / "spotd", "install-service", "--user", "--dry-run"], tmp_path)
    # pytest's own folders are often in /tmp, which a service does not see: then this is what it says.
    program = (installed / "spotd").resolve()
    assert (MARK in done.stdout and f"{program.parent}" in done.stdout) or "is hidden from it" in done.stderr


def test_an_installation_without_extras_brings_few_packages(installed: Path, tmp_path: Path) -> None:
    python = (installed / "spotd").resolve().read_text().splitlines()[0].removeprefix("#!").split()[0]
    script = "import json, importlib.metadata as m; print(json.dumps([d.name.lower() for d in m.distributions()]))"
    found = set(json.loads(run([python, "-c", script], tmp_path).stdout)) - {"spotd", "pip", "setuptools", "wheel"}
    assert found >= {line.partition(">")[0] for line in CORE}
    assert len(found) <= PACKAGES_MAX, sorted(found)


def test_a_job_runs_to_its_end_on_the_local_market(installed: Path, tmp_path: Path) -> None:
    environment = {"HOME": str(tmp_path), "PATH": os.environ["PATH"], "SPOTD_SOCKET": str(tmp_path / "run/s")}

    def spotctl(*words: str) -> subprocess.CompletedProcess[str]:
        command: list[str | Path] = [installed / "spotctl", *words]
        return subprocess.run(
            command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=180, check=False
        )

    log = tmp_path / "log"
    with log.open("wb") as errors:
        daemon = subprocess.Popen([installed / "spotd", "run"], env=environment, cwd=tmp_path, stderr=errors)
        try:
            until(lambda: spotctl("providers").returncode == 0, "the daemon", every=0.5)
            words = ["--gpu", "RTX_4090", "--max-price", "5", "--image", "none", "--", "sh", "-c", "echo finished"]
            done = spotctl("submit", "-y", "--wait", *words)
        finally:
            daemon.terminate()
            daemon.wait(60)
    assert done.returncode == 0, done.stderr + log.read_text()[-2000:]
    assert "finished" in done.stdout
