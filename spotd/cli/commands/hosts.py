"""`spotctl hosts`: the keys of own hosts, pinned by a person who compares a fingerprint.

The file is one of OpenSSH's. The provider reads it anew at each connection and trusts nothing else, so a key that
changes is refused until it was removed and added again here.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import os
import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, NamedTuple, TypeVar

import click

from spotd import paths
from spotd.cli import stderr, stdout
from spotd.cli.entry import CommandFailed, ExitCode
from spotd.cli.inputs.options import ID, JSON, TABLE, output, require_here, require_yes, show_data
from spotd.cli.views.table import Column
from spotd.cli.views.table import show as show_table
from spotd.shell_address import fault_of
from spotd.words import clean

SSH_PORT: Final = 22
KEYSCAN_S: Final = 10
_KINDS: Final = ("ssh-ed25519", "ecdsa-sha2-nistp256", "ecdsa-sha2-nistp384", "ecdsa-sha2-nistp521", "ssh-rsa")
F = TypeVar("F", bound=Callable[..., object])


class Pinned(NamedTuple):
    """One line of the file: the host as OpenSSH names it there, and its key."""

    host: str
    kind: str
    key: str

    @property
    def fingerprint(self) -> str:
        """What `ssh-keygen -lf` prints on the host."""
        try:
            digest = hashlib.sha256(base64.b64decode(self.key, validate=True)).digest()
        except (binascii.Error, ValueError):
            return "unreadable"
        return f"SHA256:{base64.b64encode(digest).decode().rstrip('=')}"


def known_hosts_file() -> Path:
    """Return the file that the provider of own hosts reads unless its settings name another."""
    return paths.state_dir(os.environ) / "providers" / "ssh" / "known_hosts"


def host_name(address: str, port: int) -> str:
    """Return how OpenSSH names a host in its file."""
    return address if port == SSH_PORT else f"[{address}]:{port}"


def pinned_keys(file: Path) -> list[Pinned]:
    """Return the keys in the file; none if it is not there."""
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as exc:
        raise CommandFailed(
            f"{file} cannot be read: {exc}",
            code=ExitCode.LOCAL_IO,
            hint="check its owner and mode, or give --known-hosts",
        ) from exc
    rows = (line.split() for line in lines if not line.startswith(("#", "@")))
    return [Pinned(*row[:3]) for row in rows if len(row) >= 3]


def _write(file: Path, rows: Sequence[Pinned]) -> None:
    try:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        paths.replace_whole(file, "".join(f"{' '.join(row)}\n" for row in rows), mode=0o600)
    except OSError as exc:
        raise CommandFailed(
            f"{file} cannot be written: {exc}", code=ExitCode.LOCAL_IO, hint="check its folder, or give --known-hosts"
        ) from exc


def _options(function: F) -> F:
    function = click.option(
        "--known-hosts", "file", type=click.Path(path_type=Path), metavar="FILE", help="As providers.ssh.known_hosts."
    )(function)
    function = click.option("--port", type=click.IntRange(1, 65535), default=SSH_PORT, show_default=True)(function)
    return click.argument("address")(function)


@click.group()
def hosts() -> None:
    """The pinned keys of own hosts, which the provider `ssh` connects to."""
    require_here("the pinned keys lie")


@hosts.command()
@_options
@click.option("-y", "--yes", is_flag=True, help="Do not ask: the fingerprint was compared before.")
def add(*, address: str, port: int, file: Path | None, yes: bool) -> None:
    """Show the key of the host at ADDRESS, ask, and pin it.

    Compare the fingerprint with what the host itself prints: ssh-keygen -lf /etc/ssh/ssh_host_ed25519_key.pub
    """
    if fault := fault_of(address, port, "user"):
        raise CommandFailed(
            f"{clean(address) or 'an empty address'}: {fault}", hint="spotctl hosts add gpu1.example.org --port 22"
        )
    file = file or known_hosts_file()
    name = host_name(address, port)
    pinned = pinned_keys(file)
    found = _scan(address, port)._replace(host=name)
    before = [row for row in pinned if row.host == name]
    if found in before:
        stdout.line(f"{name} is pinned: {found.kind} {found.fingerprint}")
        return
    if before:
        raise CommandFailed(
            f"{name} shows another key than the pinned one: {found.fingerprint}, pinned is {before[0].fingerprint}",
            hint=f"if the host was installed anew: spotctl hosts rm {address} --port {port}, then add it again",
        )
    stderr.line(f"{name} shows the key {found.kind} {found.fingerprint}")
    if not yes:
        if not stderr.can_ask():
            raise CommandFailed("a key is pinned only with a confirmation", hint="compare it, then repeat with --yes")
        require_yes("does the host print the same fingerprint", otherwise="nothing was pinned")
    _write(file, [*pinned, found])
    stdout.line(f"{name} is pinned in {file}")


@hosts.command()
@click.option("--known-hosts", "file", type=click.Path(path_type=Path), metavar="FILE")
@output(TABLE, JSON, ID)
def ls(*, file: Path | None, output: str) -> None:
    """List the pinned keys."""
    rows = pinned_keys(file or known_hosts_file())
    answer = {
        "schema": 1,
        "hosts": [{"host": row.host, "kind": row.kind, "fingerprint": row.fingerprint} for row in rows],
    }
    if not show_data(answer, output, [row.host for row in rows]):
        columns: Sequence[Column[Pinned]] = (
            Column("HOST", lambda row: row.host),
            Column("KEY", lambda row: row.kind),
            Column("FINGERPRINT", lambda row: row.fingerprint),
        )
        show_table(columns, rows)


@hosts.command()
@_options
def rm(*, address: str, port: int, file: Path | None) -> None:
    """Forget the key of the host at ADDRESS; nothing connects to it until it is added again."""
    file = file or known_hosts_file()
    name = host_name(address, port)
    pinned = pinned_keys(file)
    kept = [row for row in pinned if row.host != name]
    if len(kept) == len(pinned):
        raise CommandFailed(f"no key of {name} is pinned in {file}", code=ExitCode.NOT_FOUND, hint="spotctl hosts ls")
    _write(file, kept)
    stdout.line(f"{name} is pinned no more")


def _scan(address: str, port: int) -> Pinned:
    """Return the host's best key, as OpenSSH's own program reads it."""
    if shutil.which("ssh-keyscan") is None:
        raise CommandFailed(
            "ssh-keyscan is not installed here", code=ExitCode.LOCAL_IO, hint="apt install openssh-client"
        )
    command = ["ssh-keyscan", "-T", str(KEYSCAN_S), "-p", str(port), "--", address]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, check=False, timeout=6 * KEYSCAN_S)
    except subprocess.TimeoutExpired:
        answer = subprocess.CompletedProcess(command, 1, "", "")
    rows = (line.split() for line in answer.stdout.splitlines() if not line.startswith("#"))
    keys = [Pinned(*row[:3]) for row in rows if len(row) >= 3 and row[1] in _KINDS]
    if not keys:
        raise CommandFailed(
            f"no ssh server answers at {address}, port {port}",
            code=ExitCode.UNREACHABLE,
            hint="check its name, --port, and that sshd runs there",
        )
    return min(keys, key=lambda one: _KINDS.index(one.kind))
