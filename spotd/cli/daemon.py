"""`spotd`: the table of its commands."""

from __future__ import annotations

import sys

import click

from spotd.cli.entry import Lazy, LazyGroup, run

_HERE = "spotd.cli.commands.daemon"

COMMANDS = {
    "run": Lazy(target=f"{_HERE}:run", help="Run the daemon in the foreground."),
    "demo": Lazy(target=f"{_HERE}:demo", help="Watch real jobs survive preemption; two minutes, no account."),
    "migrate": Lazy(target=f"{_HERE}:migrate", help="Bring the state database to this version."),
    "migrate-state": Lazy(target=f"{_HERE}:migrate_state", help="Move the state to another database."),
    "secrets-key": Lazy(target=f"{_HERE}:secrets_key", help="Make the key for secrets in a shared state."),
    "install-service": Lazy(
        target="spotd.cli.commands.daemon:install_service", help="Run the daemon as a service of systemd."
    ),
    "user": Lazy(target=f"{_HERE}:user", help="Users of the API by TCP: add NAME."),
    "config": Lazy(target=f"{_HERE}:config", help="Check the configuration, or print an example."),
}


@click.group(cls=LazyGroup, lazy=COMMANDS, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="spotd", message="spotd %(version)s")
def spotd() -> None:
    """Waits for the real price of GPU hosts, runs queued training jobs there, and carries them across preemptions.

    Jobs are queued and watched with spotctl.
    """


def main() -> int:
    """Run this process's command line; return its exit code."""
    return run(spotd, "spotd")


if __name__ == "__main__":
    sys.exit(main())
