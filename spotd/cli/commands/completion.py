"""`spotctl completion`: the script by which a shell asks `spotctl` what could come next."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from spotd.cli import stdout

_SHELLS = ("bash", "zsh", "fish")


@click.command()
@click.argument("shell", type=click.Choice(_SHELLS))
@click.pass_context
def completion(ctx: click.Context, *, shell: str) -> None:
    """Print the script that completes commands, options and names of jobs in a shell.

    \b
    bash: echo 'eval "$(spotctl completion bash)"' >> ~/.bashrc
    zsh:  echo 'eval "$(spotctl completion zsh)"' >> ~/.zshrc
    fish: spotctl completion fish > ~/.config/fish/completions/spotctl.fish
    """
    kind = get_completion_class(shell)
    if kind is None:  # every shell of the choice has one
        raise click.UsageError(f"there is no completion for {shell}")
    made = kind(ctx.find_root().command, {}, "spotctl", "_SPOTCTL_COMPLETE")
    # Not source(): that of bash starts a bash to ask for its version, and writes its doubts to the terminal.
    stdout.write(made.source_template % made.source_vars())
