"""A real docker with a registry on loopback, in one folder: an image with Python and a shell is pulled as a user's is.

The image holds what this machine's Python and shell need, so nothing is fetched. NVIDIA's toolkit is not there: the
program that hosts call as `docker` leaves `--gpus` out, and writes down what it was asked for.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import tarfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

READY_S: Final = 60.0
_PROGRAMS: Final = ("sh", "env", "cat", "mkdir", "mv", "rm", "sleep", "date", "id", "head", "sed", "uname", "chmod")
_PYTHON: Final = Path("/usr/bin/python3")
_DOCKER: Final = """#!/bin/sh
echo "$*" >>"{asked}"
for word do
  shift
  [ -n "$skip" ] && {{ skip=; continue; }}
  [ "$word" = --gpus ] && {{ skip=yes; continue; }}
  set -- "$@" "$word"
done
exec "{docker}" -H "unix://{socket}" "$@"
"""
_REGISTRY: Final = """version: 0.1
storage: {{filesystem: {{rootdirectory: {root}}}}}
http: {{addr: "127.0.0.1:{port}"}}
"""


class NotHere(Exception):
    """The engine, the registry or a container does not start on this machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Docker:
    """What hosts use: a program that reaches the engine, and an image that it can pull."""

    program: str
    image: str
    asked: Path
    socket: Path

    def run(self, *words: str) -> str:
        command = [_client(), "-H", f"unix://{self.socket}", *words]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
        if done.returncode:
            raise RuntimeError(f"docker {words[0]} fails: {done.stderr.strip()[-300:]}")
        return done.stdout

    def containers(self) -> list[str]:
        """Names of all containers, whether they run or not."""
        return sorted(self.run("ps", "-a", "--format", "{{.Names}}").split())


def missing() -> str:
    """Why there can be no engine here; empty where there can."""
    if os.geteuid() != 0:
        return "docker's engine runs as root"
    for name, package in (("dockerd", "docker.io"), ("docker-registry", "docker-registry")):
        if shutil.which(name, path=_path()) is None:
            return f"{name} is not installed (Debian: apt-get install {package})"
    return "" if _PYTHON.exists() else f"{_PYTHON} is not there, and an image needs a Python"


@contextmanager
def serve_docker(folder: Path) -> Iterator[Docker]:
    """Serve until the block ends; no container outlives it.

    Raises:
        NotHere: with the last words of what does not start.
    """
    folder.mkdir(parents=True)
    place = folder / "docker.sock"
    engine = [
        "dockerd", "--iptables=false", "--ip6tables=false", "--bridge=none", "--storage-driver=vfs", "--host",
        f"unix://{place}", "--data-root", f"{folder}/data", "--exec-root", f"{folder}/exec", "--pidfile",
        f"{folder}/pid",
    ]  # fmt: skip
    port = _free_port()
    (folder / "registry.yml").write_text(_REGISTRY.format(root=folder / "registry", port=port))
    made = Docker(
        program=_DOCKER.format(asked=folder / "asked", docker=_client(), socket=place),
        image=f"127.0.0.1:{port}/trainer:1",
        asked=folder / "asked",
        socket=place,
    )
    with (
        _program(engine, folder / "engine.log", lambda: _answers(made)),
        _program(
            ["docker-registry", "serve", str(folder / "registry.yml")], folder / "registry.log", lambda: _listens(port)
        ),
    ):
        _image(folder / "image.tar")
        try:
            made.run("import", str(folder / "image.tar"), made.image)
            made.run("push", made.image)
            made.run("run", "--rm", "--network", "host", "--entrypoint", "/bin/sh", made.image, "-c", ":")
        except (RuntimeError, subprocess.TimeoutExpired) as exc:
            raise NotHere(f"the engine starts, and no container can: {exc}") from exc
        made.run("rmi", made.image)
        try:
            yield made
        finally:
            left = made.containers()
            if left:
                made.run("rm", "-f", *left)
    _unmount(folder)


@contextmanager
def _program(command: list[str], log: Path, is_ready: Callable[[], bool]) -> Iterator[None]:
    environment = {**os.environ, "PATH": _path()}
    with log.open("wb") as file:
        process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=file, stderr=file)
    try:
        until = time.monotonic() + READY_S
        while not is_ready():
            if process.poll() is not None or time.monotonic() > until:
                raise NotHere(f"{command[0]} does not start here: {log.read_text()[-300:]}")
            time.sleep(0.1)
        yield
    finally:
        process.terminate()
        process.wait(60)


def _unmount(folder: Path) -> None:
    """The engine leaves its network namespace mounted, and the folder could not be removed."""
    places = [line.split()[1] for line in Path("/proc/self/mounts").read_text().splitlines()]
    for place in places:
        if place.startswith(f"{folder}/"):
            subprocess.run(["umount", "-l", place], check=False)


def _image(archive: Path) -> None:
    """Pack a file system of a Python, a shell and the libraries that both load."""
    lines = "import sysconfig; print(sysconfig.get_path('stdlib'))"
    library = Path(subprocess.run([_PYTHON, "-c", lines], capture_output=True, text=True, check=True).stdout.strip())
    programs = [
        _PYTHON.resolve(),
        *(Path(found) for name in _PROGRAMS if (found := shutil.which(name, path="/usr/bin"))),
    ]
    loaded = _libraries([*(path.resolve() for path in programs), *library.glob("lib-dynload/*.so")])
    with tarfile.open(archive, "w", format=tarfile.PAX_FORMAT) as tar:
        for link in ("bin", "sbin", "lib", "lib64"):
            tar.add(f"/{link}", link, recursive=False)
        for path in sorted({*programs, *loaded}):
            tar.add(path.resolve(), str(path).lstrip("/"))
        tar.add(_PYTHON, "usr/bin/python3")
        tar.add(library, str(library).lstrip("/"), filter=_without_tests)
        for name in ("tmp", "etc", "root", "spotd"):
            entry = tarfile.TarInfo(name)
            entry.type, entry.mode = tarfile.DIRTYPE, 0o1777
            tar.addfile(entry)
        tar.add("/etc/passwd", "etc/passwd")


def _without_tests(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
    name = Path(entry.name).name
    return None if name in {"test", "tests", "__pycache__", "idlelib", "lib2to3", "ensurepip"} else entry


def _libraries(programs: list[Path]) -> list[Path]:
    found: set[Path] = set()
    for program in programs:
        for line in subprocess.run(["ldd", program], capture_output=True, text=True, check=False).stdout.splitlines():
            words = line.replace("=>", " ").split()
            found.update(Path("/usr") / word.lstrip("/") for word in words if word.startswith("/lib"))
            found.update(Path(word) for word in words if word.startswith("/usr/lib"))
    return [path for path in found if path.exists()]


def _answers(docker: Docker) -> bool:
    try:
        docker.run("info")
    except (RuntimeError, subprocess.TimeoutExpired):
        return False
    return True


def _listens(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
    except OSError:
        return False
    return True


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def _path() -> str:
    return f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"


def _client() -> str:
    return shutil.which("docker") or "docker"
