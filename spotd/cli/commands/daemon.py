"""`run`, `demo`, `migrate` and `config`: thin doors to the daemon's own modules, imported when they are used."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from spotd.cli import stderr, stdout
from spotd.cli.failures import CommandFailed, ExitCode, unusable
from spotd.words import clean, count
from spotd_jobs.spec.problems import FileProblems

if TYPE_CHECKING:
    from spotd.config.load import Loaded

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
    loaded = _loaded(config_path)
    from spotd.service.migration import StateError, migrate_state

    try:
        place = migrate_state(loaded.config.daemon.state)
    except StateError as exc:
        raise CommandFailed(exc.message, code=ExitCode.LOCAL_IO, hint=exc.hint) from exc
    stdout.line(f"{place} is at this version")


@click.group()
def config() -> None:
    """Check the configuration, or print an example."""


@config.command()
@click.argument("file", type=click.Path(path_type=Path), required=False)
@_config_option
def check(*, file: Path | None, config_path: Path | None) -> None:
    """Say what is wrong with the configuration, or that nothing is. FILE is the same as --config FILE."""
    loaded = _loaded(file or config_path)
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


def _loaded(path: Path | None) -> Loaded:
    """Return the configuration in force.

    Raises:
        CommandFailed: with every mistake and its place.
    """
    from spotd.config.load import load

    try:
        return load(path)
    except FileProblems as exc:
        raise unusable("the configuration cannot be used", exc) from exc
