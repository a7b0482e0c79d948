"""A real OpenSSH server of the user who runs the tests, on a loopback port, with keys of its own."""

from __future__ import annotations

import getpass
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

SSHD: Final = shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")
READY_S: Final = 20.0
NOISY_LOGIN: Final = 'echo "Last login: yesterday"; echo careful >&2; export LEAKED=from-the-profile; '


@dataclass(frozen=True, slots=True)
class Sshd:
    port: int
    user: str
    authorized_keys: Path
    log: Path

    def admit(self, public_key: str) -> None:
        with self.authorized_keys.open("a") as file:
            file.write(f"{public_key}\n")


@contextmanager
def real_sshd(folder: Path, *, login: str = NOISY_LOGIN) -> Iterator[Sshd]:
    """Serve until the block ends; `login` is what the shell prints and sets before every command."""
    if SSHD is None:
        raise RuntimeError("openssh-server is not installed")
    folder.mkdir(parents=True)
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / "host_key")], check=True)
    (folder / "banner").write_text("*** for authorised users only ***\n")
    (folder / "login").write_text(f'{login}\neval "$SSH_ORIGINAL_COMMAND"\n')
    made = Sshd(_free_port(), getpass.getuser(), folder / "authorized_keys", folder / "log")
    made.authorized_keys.touch(mode=0o600)
    (folder / "config").write_text(
        f"Port {made.port}\nListenAddress 127.0.0.1\nHostKey {folder}/host_key\nPidFile {folder}/pid\n"
        f"AuthorizedKeysFile {made.authorized_keys}\nPasswordAuthentication no\nKbdInteractiveAuthentication no\n"
        f"UsePAM no\nStrictModes no\nPermitRootLogin prohibit-password\nBanner {folder}/banner\n"
        f"ForceCommand /bin/sh {folder}/login\n"
    )
    if os.getuid() == 0:
        Path("/run/sshd").mkdir(parents=True, exist_ok=True)
    server = subprocess.Popen([SSHD, "-D", "-f", str(folder / "config"), "-E", str(made.log)])
    try:
        until = time.monotonic() + READY_S
        while not _answers(made.port):
            if server.poll() is not None or time.monotonic() > until:
                raise RuntimeError(f"sshd does not start: {made.log.read_text()}")
            time.sleep(0.05)
        yield made
    finally:
        server.terminate()
        server.wait(READY_S)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def _answers(port: int) -> bool:
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=1) as connection:
            return connection.recv(4) == b"SSH-"
    except OSError:
        return False
