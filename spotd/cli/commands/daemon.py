"""`run`, `demo`, `migrate` and `config`: thin doors to the daemon's own modules, imported when they are used."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from spotd import paths
from spotd.cli import stderr, stdout
from spotd.cli.entry import CommandFailed, ExitCode, unusable
from spotd.setup import SetupRefused
from spotd.words import clean, count
from spotd_jobs.spec.problems import FileProblems

if TYPE_CHECKING:
    from spotd.config.load import Loaded
    from spotd.setup.service import ServiceInstaller


_config_option = click.option(
    "--config",
    "config_path",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Configuration; default: $SPOTD_CONFIG, then the user's, then /etc/spotd/config.toml.",
)


@click.command()
@_config_option
def run(*, config_path: Path | None) -> int:
    """Run the daemon in the foreground until SIGTERM or Ctrl-C; machines go on and the next start adopts them."""
    with paths.starting(paths.socket_path()):  # before the imports below, which take most of a start
        from spotd.service import memory

        memory.postpone_gc()
        from spotd.service.main import run as run_daemon

        return run_daemon(config_path, {})


@click.command()
@click.option("--seed", type=click.IntRange(0, 2**31 - 1), default=1, show_default=True, help="Of prices and jobs.")
@click.option("--keep", is_flag=True, help="Leave the folder with state, logs and outputs behind.")
@click.option("--plain", is_flag=True, help="Lines instead of a live view.")
@click.option("--quick", is_flag=True, help="Only the first job: under a minute.")
def demo(*, seed: int, keep: bool, plain: bool, quick: bool) -> int:
    """Watch real jobs being bought, taken away and resumed: no account, no configuration, nothing left behind."""
    from spotd.demo.main import main as run_demo

    return run_demo(seed=seed, keep=keep, plain=plain, quick=quick)


@click.command()
@_config_option
def migrate(*, config_path: Path | None) -> None:
    """Bring the state database to this version; `spotd run` does the same when it starts."""
    loaded = _load_config(config_path)
    from spotd.service.state import StateError, migrate_state

    try:
        place = migrate_state(loaded.config.daemon.state)
    except StateError as exc:
        raise CommandFailed(exc.message, code=ExitCode.LOCAL_IO, hint=exc.hint) from exc
    stdout.line(f"{place} is at this version")


@click.command()
@click.argument("place")
@_config_option
def migrate_state(*, place: str, config_path: Path | None) -> None:
    """Move the state to PLACE: sqlite, sqlite:////path/to/file or postgresql://user@host/database.

    The daemon must have ended. The old place is sealed and kept; it is never opened again.
    """
    loaded = _load_config(config_path)
    import anyio

    from spotd.service.state import StateError, relocate_state

    try:
        rows, left = anyio.run(relocate_state, loaded.config, place)
    except StateError as exc:
        raise CommandFailed(exc.message, code=ExitCode.LOCAL_IO, hint=exc.hint) from exc
    stdout.line(f"moved {count(rows, 'row')}")
    if left:
        stdout.line(f"the secrets of {count(left, 'ended job')} cannot be read and stay behind")
    stdout.line(f'next: write state = "{clean(place)}" in [daemon], then start spotd')


@click.command()
@click.argument("file", type=click.Path(path_type=Path))
def secrets_key(*, file: Path) -> None:
    """Make the key that encrypts the secrets of jobs in a shared state, and write it into FILE, which is new.

    Only this user may read the file. Copy it to every computer of that state.
    """
    import secrets

    text, file = f"{secrets.token_hex(32)}\n", file.resolve()
    try:
        paths.create_whole(file, text, mode=0o600)
    except OSError as exc:
        hint = "check that its folder is there and is yours"
        if isinstance(exc, FileExistsError):
            hint = "name a file that is not there yet: a key that is lost cannot be made again"
        raise CommandFailed(f"{file}: {exc.strerror}", code=ExitCode.LOCAL_IO, hint=hint) from exc
    stdout.line(f"the key is in {file}")
    stdout.line(
        f'next: copy it to every computer of the state, and write secrets_key = {{ file = "{file}" }} in [daemon]'
    )


@click.group()
def config() -> None:
    """Check the configuration, or print an example."""


@config.command()
@click.argument("file", type=click.Path(path_type=Path), required=False)
@_config_option
def check(*, file: Path | None, config_path: Path | None) -> None:
    """Say what is wrong with the configuration, or that nothing is. FILE is the same as --config FILE."""
    loaded = _load_config(file or config_path)
    for problem in loaded.warnings:
        stderr.warning(problem.sentence("" if loaded.path is None else str(loaded.path)))
        if problem.hint:
            stderr.line(f"  hint: {clean(problem.hint)}")
    from spotd.config.load import out_of_reach

    if names := out_of_reach(loaded.config):
        raise CommandFailed(
            f"nothing can be launched at {', '.join(names)}: machines there cannot reach the checkpoint store,"
            " a folder on this computer",
            hint='set [store] url = "s3://bucket/prefix", or enabled = false for the provider',
        )
    if loaded.path is None:
        stdout.line("there is no configuration file; the defaults hold")
    elif loaded.warnings:
        stdout.line(f"{loaded.path} can be used, but for {count(len(loaded.warnings), 'warning')}")
    else:
        stdout.line(f"{loaded.path} is in order")


@config.command()
def example() -> None:
    """Print a configuration with every key, its default and what it means."""
    from spotd.config.example import example_text

    stdout.write(example_text())


@click.group()
def user() -> None:
    """Users of the API by TCP: add NAME."""


@user.command()
@click.argument("name")
@click.option("--role", type=click.Choice(["view", "submit", "operate"]), required=True, help="What the user may do.")
@click.option("--budget-per-day", metavar="USD", default="", help="Of a user of the role submit: 20, or 7.50.")
@_config_option
def add(*, name: str, role: str, budget_per_day: str, config_path: Path | None) -> None:
    """Make a token for a user, print it this once, and write its hash into the configuration.

    The daemon lets the user in after SIGHUP. To remove one, delete the table [users.NAME] and send SIGHUP.
    """
    loaded = _load_config(config_path)
    if loaded.path is None:
        raise CommandFailed("there is no configuration file to write the user into", hint="spotctl init")
    if name in loaded.config.users:
        hint = f"delete it from {loaded.path}, then run this again"
        raise CommandFailed(f"[users.{clean(name)}] is there already", hint=hint)
    if not re.fullmatch(r"[a-z0-9][a-z0-9_-]{0,31}", name):
        raise CommandFailed("that is no name of a user", hint="up to 32 of a-z, 0-9, - and _")
    if budget_per_day and not re.fullmatch(r"[0-9]{1,9}(\.[0-9]{1,6})?", budget_per_day):
        raise CommandFailed("--budget-per-day is no amount in dollars", hint="write 20 or 7.50")
    from spotd.config.load import append_table
    from spotd.config.peers import user_table
    from spotd.tokens import digest_of, new_user_token

    token = new_user_token()
    try:
        append_table(loaded.path, user_table(name, role, budget_per_day, digest_of(token)))
    except FileProblems as exc:
        raise unusable("the user was not added", exc) from exc
    except OSError as exc:
        words = f"{loaded.path} cannot be written: {exc.strerror}"
        raise CommandFailed(words, code=ExitCode.LOCAL_IO, hint="run this as the owner of the file") from exc
    stdout.line(token)
    stderr.note(f"only its hash is kept, in {loaded.path}; the daemon knows it after SIGHUP (systemctl reload spotd)")


def _load_config(path: Path | None) -> Loaded:
    """Return the configuration in force.

    Raises:
        CommandFailed: with every mistake and its place.
    """
    from spotd.config.load import load

    try:
        return load(path)
    except FileProblems as exc:
        raise unusable("the configuration cannot be used", exc) from exc


# `spotd install-service`: the unit of this installation, written, compared or removed.


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
    from spotd.client.transport import ClientError

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
