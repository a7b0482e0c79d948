"""`spotctl`: the table of its commands."""

from __future__ import annotations

import os
import sys

import click

from spotd.cli.entry import Lazy, LazyGroup, run

_HERE = "spotd.cli.commands"

COMMANDS = {
    "init": Lazy(target=f"{_HERE}.init:init", help="Set spotd up: a few questions, tried live, then a configuration."),
    "submit": Lazy(target=f"{_HERE}.submit:submit", help="Queue a job, after showing what it would cost and where."),
    "data": Lazy(target=f"{_HERE}.files:data", help="Datasets for jobs: put NAME DIR, ls, rm NAME."),
    "ls": Lazy(target=f"{_HERE}.jobs:ls", help="List jobs.", aliases=("ps", "queue")),
    "show": Lazy(target=f"{_HERE}.jobs:show", help="Everything about one job."),
    "why": Lazy(target=f"{_HERE}.jobs:why", help="Why a job waits, runs where it does, or stopped."),
    "top": Lazy(target=f"{_HERE}.interfaces:top", help="Jobs, machines, market and events, live."),
    "logs": Lazy(target=f"{_HERE}.logs:logs", help="What a job wrote, over all its machines."),
    "ssh": Lazy(target=f"{_HERE}.interfaces:ssh", help="A shell on a job's machine, where its provider gives one."),
    "forward": Lazy(target=f"{_HERE}.interfaces:forward", help="Reach a port of a job's machine from this computer."),
    "cancel": Lazy(target=f"{_HERE}.jobs:cancel", help="Stop a job and destroy its machine."),
    "retry": Lazy(target=f"{_HERE}.jobs:retry", help="Queue an ended job again, from its newest checkpoint."),
    "budget": Lazy(target=f"{_HERE}.submit:budget", help="Change what a job may cost in all."),
    "ceiling": Lazy(target=f"{_HERE}.submit:ceiling", help="Change what a machine of a job may cost per hour."),
    "forget": Lazy(target=f"{_HERE}.submit:forget", help="Give up a machine that can neither be seen nor ended."),
    "prices": Lazy(target=f"{_HERE}.prices:prices", help="Effective prices now.", aliases=("offers",)),
    "history": Lazy(target=f"{_HERE}.prices:history", help="What prices were, as far back as they are kept."),
    "size": Lazy(target=f"{_HERE}.size:size", help="The memory that a model needs, and the GPUs that hold it."),
    "breakeven": Lazy(target=f"{_HERE}.size:breakeven", help="Renting against buying one's own cards."),
    "backtest": Lazy(target=f"{_HERE}.backtest:backtest", help="What a job would have cost, ceiling by ceiling."),
    "events": Lazy(target=f"{_HERE}.logs:events", help="What happened, and why."),
    "cost": Lazy(target=f"{_HERE}.cost:cost", help="What jobs cost, and what that saved."),
    "checkpoints": Lazy(target=f"{_HERE}.files:checkpoints", help="The checkpoints of a job: verify, pull, pin, rm."),
    "pull": Lazy(target=f"{_HERE}.files:pull", help="Fetch a job's outputs or one of its checkpoints."),
    "providers": Lazy(target=f"{_HERE}.health:providers", help="Health and powers of each provider."),
    "hosts": Lazy(target=f"{_HERE}.hosts:hosts", help="The pinned keys of own hosts: add ADDRESS, ls, rm ADDRESS."),
    "web": Lazy(target=f"{_HERE}.interfaces:web", help="Serve the dashboard to a browser on this computer."),
    "doctor": Lazy(target=f"{_HERE}.health:doctor", help="Check the daemon, its store and every provider."),
    "notify": Lazy(target=f"{_HERE}.health:notify", help="Send a notification to try its channel: notify test."),
    "reconcile": Lazy(target=f"{_HERE}.health:reconcile", help="Compare machines with the providers' lists now."),
    "mcp": Lazy(target=f"{_HERE}.interfaces:mcp", help="Serve tools to an agent, within budgets that a person set."),
    "completion": Lazy(target=f"{_HERE}.init:completion", help="Completion for bash, zsh or fish."),
}


@click.group(cls=LazyGroup, lazy=COMMANDS, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--url", "urls", multiple=True, metavar="URL", help="A daemon of another computer; each of several.")
@click.option("--token-file", metavar="FILE", help="The token for it.")
@click.option("--ca", metavar="FILE", help="The authority of its certificate, where this computer knows none.")
@click.version_option(package_name="spotd", message="spotctl %(version)s")
def spotctl(*, urls: tuple[str, ...], token_file: str | None, ca: str | None) -> None:
    """Queue GPU jobs, and see where they run, why, and what they cost.

    JOB is an id, the beginning of one, or a name. The daemon is found by --url, $SPOTCTL_URL (with $SPOTCTL_TOKEN_FILE
    and $SPOTCTL_CA), else $SPOTD_SOCKET, else in the runtime directory of this user.
    """
    given = {"SPOTCTL_URL": ",".join(urls), "SPOTCTL_TOKEN_FILE": token_file, "SPOTCTL_CA": ca}
    os.environ.update({name: value for name, value in given.items() if value})


def main() -> int:
    """Run this process's command line; return its exit code."""
    return run(spotctl, "spotctl")


if __name__ == "__main__":
    sys.exit(main())
