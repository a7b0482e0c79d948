"""`spotd install-service`: the unit of this installation, written, compared or removed."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from spotd.cli import stderr, stdout
from spotd.cli.failures import CommandFailed, unusable
from spotd.setup import SetupRefused
from spotd.words import clean, count
from spotd_jobs.spec.problems import FileProblems

if TYPE_CHECKING:
    from spotd.setup.service import ServiceInstaller


@click.command("install-service")
@click.option("--system/--user", "system", default=None, help="For the whole computer, or this user; root: the former.")
@click.option(
    "--config",
    "config_path",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Configuration of the service; default: this user's, or with --system /etc/spotd/config.toml.",
)
@click.option(
    "--credential",
    "credentials",
    multiple=True,
    metavar="NAME=FILE",
    help="Where a secret lies that the configuration calls { credential = NAME }; default: keys/NAME beside it.",
)
@click.option("--dry-run", is_flag=True, help="Print the unit, and change nothing.")
@click.option("--no-start", is_flag=True, help="Write the unit, and start nothing.")
@click.option("--force", is_flag=True, help="Replace a unit that differs, or remove one while machines run.")
@click.option("--uninstall", is_flag=True, help="Stop the service and remove its unit; state and keys stay.")
def install_service(
    *,
    system: bool | None,
    config_path: Path | None,
    credentials: Sequence[str],
    dry_run: bool,
    no_start: bool,
    force: bool,
    uninstall: bool,
) -> None:
    """Run spotd as a service of systemd: hardened, restarted when it fails, started at boot.

    Run again after an update: what is as it should be stays untouched, and a difference is shown before it is replaced.
    """
    from spotd.setup.service import HostSystem, ServiceInstaller

    host = HostSystem()
    is_system = host.uid == 0 if system is None else system
    installer = ServiceInstaller(system=is_system, config=config_path, host=host)
    with _refusals():
        if uninstall:
            _uninstall(installer, system=is_system, dry_run=dry_run, force=force)
            return
        loaded = installer.loaded()
        text = installer.text(loaded, dict(map(_pair, credentials)))
        for warning in installer.warnings(loaded):
            stderr.warning(warning)
        if dry_run:
            stdout.write(text)
            stderr.note(f"would be written to {installer.path}; nothing was changed")
            return
        installer.require_possible()
        _install(installer, text, start=not no_start, force=force)
    if not is_system and not host.lingers:
        stderr.warning("the service ends with your last session, unless: loginctl enable-linger")
    if is_system:
        stderr.note("spotctl finds it, as root, by: export SPOTD_SOCKET=/run/spotd/spotd.sock")


def _install(installer: ServiceInstaller, text: str, *, start: bool, force: bool) -> None:
    from spotd.setup.service import UnitStanding

    standing, difference = installer.standing(text)
    if standing is UnitStanding.SAME and (installer.is_active() or not start):
        stdout.line(f"{installer.path} is as it should be")
        return
    if standing is UnitStanding.DIFFERENT and not force:
        stderr.block("\n".join(clean(line) if line.strip() else line for line in difference.splitlines()))
        if not stderr.can_ask():
            raise CommandFailed(
                f"{installer.path} exists and differs; nothing was changed",
                hint="--force replaces it; changes of yours belong in an override (systemctl edit spotd)",
            )
        if not stderr.ask("replace it?"):
            raise click.Abort
    installer.install(text, start=start)
    stdout.line(f"{installer.path} is installed" + (" and runs" if start else ""))
    stderr.note(f"its log: {installer.journal}")


def _uninstall(installer: ServiceInstaller, *, system: bool, dry_run: bool, force: bool) -> None:
    installer.require_possible()
    if not installer.path.exists() and not installer.path.is_symlink():
        stdout.line(f"{installer.path} is not there; nothing was changed")
        return
    if not force and (machines := _machines(system=system)):
        raise CommandFailed(
            f"{count(machines, 'machine')} would be left without spotd, and cost money",
            hint="spotctl cancel their jobs first; with --force each ends itself half an hour after its last contact",
        )
    if dry_run:
        stdout.line(f"{installer.path} would be removed")
        return
    installer.uninstall()
    stdout.line(f"{installer.path} is removed; state, configuration and keys are as they were")


def _machines(*, system: bool) -> int:
    """Return how many machines the daemon has; 0 where none runs that could say so."""
    from spotd import paths
    from spotd.client.daemon import Daemon
    from spotd.client.errors import ClientError

    try:
        status = Daemon(paths.SYSTEM_SOCKET if system else paths.socket_path(os.environ)).status()
    except ClientError:
        return 0
    return int(status["status"]["machines"])


def _pair(text: str) -> tuple[str, Path]:
    name, equals, path = text.partition("=")
    if not (name and equals and path):
        raise CommandFailed(f"{text!r} is not NAME=FILE", hint="--credential vast=/path/to/key")
    return name, Path(path)


@contextmanager
def _refusals() -> Iterator[None]:
    """Turn what cannot be done into the end of the command, with its reason."""
    try:
        yield
    except SetupRefused as exc:
        raise CommandFailed(exc.message, hint=exc.hint) from exc
    except FileProblems as exc:
        raise unusable("the configuration cannot be used", exc) from exc
