"""The wheel, as a stranger gets it: what is in it, and that it works where the checkout is not."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

from tests.integration.packaging.conftest import REPO, run

PACKAGES = {"spotd": REPO / "spotd", "spotd_providers": REPO / "providers" / "spotd_providers",
            "spotd_jobs": REPO / "jobs" / "spotd_jobs"}  # fmt: skip
VERSION = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]["version"]
EXAMPLE = "spotd/demo/example/"
UNITS = "spotd/setup/units/"


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bin folder of a new environment with the wheel, which sees this one's libraries but not its spotd."""
    home = tmp_path_factory.mktemp("installed")
    venv.create(home, symlinks=True, with_pip=False)
    python = home / "bin" / "python"
    paths = sysconfig.get_paths("venv", {"base": str(home), "platbase": str(home)})
    # Folders named in a .pth file are searched, but their own .pth files, such as an editable install's, are not read.
    libraries = sorted({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")})
    Path(paths["purelib"], "libraries.pth").write_text("\n".join(libraries) + "\n")
    command = [sys.executable, "-m", "pip", "--python", str(python), "install", "--no-index", "--no-deps", str(wheel)]
    subprocess.run(command, check=True, capture_output=True, timeout=120, cwd=home)
    return home / "bin"


def test_the_wheel_holds_the_three_packages_whole_and_nothing_else(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    dist_info = f"spotd-{VERSION}.dist-info/"
    expected = {
        f"{package}/{path.relative_to(source).as_posix()}"
        for package, source in PACKAGES.items()
        for path in source.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    packed = {name for name in names if not name.startswith((dist_info, EXAMPLE, UNITS))}
    assert packed == expected
    assert not [name for name in packed if "fake" in name], "fakes are for tests"
    assert {f"{package}/py.typed" for package in PACKAGES} <= packed
    assert "spotd/store/migrations/versions/r0015_first_schema.py" in packed
    assert "spotd/store/migrations/versions/r0017_machine_key.py" in packed
    assert {name for name in names if name.startswith(dist_info)} >= {dist_info + "licenses/LICENSE"}


def test_the_wheel_brings_the_training_script_of_the_demo_byte_for_byte(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        brought = {name.removeprefix(EXAMPLE) for name in archive.namelist() if name.startswith(EXAMPLE)}
        assert archive.read(EXAMPLE + "train.py") == (REPO / "examples" / "numpy" / "train.py").read_bytes()
    assert brought == {path.name for path in (REPO / "examples" / "numpy").iterdir() if path.is_file()}


@pytest.mark.lengthy
def test_the_wheel_brings_the_units_and_the_installed_command_writes_one_for_itself(
    wheel: Path, installed: Path, tmp_path: Path
) -> None:
    with zipfile.ZipFile(wheel) as archive:
        brought = {name.removeprefix(UNITS) for name in archive.namelist() if name.startswith(UNITS)}
    assert brought == {path.name for path in (REPO / "systemd").iterdir()}
    done = run([installed / "spotd", "install-service", "--user", "--dry-run"], tmp_path)
    # pytest's folders are in /tmp, which a service does not see.
    assert f"{installed} is hidden from it" in done.stderr or f"ExecStart={installed}/spotd run" in done.stdout


@pytest.mark.parametrize("name", sorted(PACKAGES))
def test_the_installed_packages_are_the_wheels_and_not_the_checkouts(
    installed: Path, tmp_path: Path, name: str
) -> None:
    done = run([installed / "python", "-c", f"import {name}; print({name}.__file__)"], tmp_path)
    assert Path(done.stdout.strip()).is_relative_to(installed.parent), done.stdout + done.stderr


def test_the_installed_client_shows_its_help(installed: Path, tmp_path: Path) -> None:
    done = run([installed / "spotctl", "--help"], tmp_path)
    assert done.returncode == 0, done.stderr
    assert "submit" in done.stdout
    assert run([installed / "spotctl", "--version"], tmp_path).stdout.strip().endswith(VERSION)


def test_the_installed_daemon_prints_the_example_config_of_the_checkout(installed: Path, tmp_path: Path) -> None:
    done = run([installed / "spotd", "config", "example"], tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout == (REPO / "config.example.toml").read_text()


@pytest.mark.lengthy
def test_the_installed_daemon_finds_its_providers_by_their_entry_points(installed: Path, tmp_path: Path) -> None:
    config = tmp_path / "config.toml"
    config.write_text("[providers.local]\n[providers.vast]\nenabled = false\n")
    done = run([installed / "spotd", "config", "check", config], tmp_path)
    assert done.returncode == 0, done.stderr


@pytest.mark.e2e
@pytest.mark.lengthy
def test_the_installed_daemon_carries_a_job_across_a_preemption(installed: Path, tmp_path: Path) -> None:
    done = run([installed / "spotd", "demo", "--quick", "--plain"], tmp_path, within=180)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr
    assert "preemptions 0" not in done.stdout
    assert "equal" in done.stdout
    assert "none is left" in done.stdout
