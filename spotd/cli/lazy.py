"""A command group that imports a command only when it is called or asked for its own help."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem


@dataclass(frozen=True, slots=True, kw_only=True)
class Lazy:
    """Where a command lives (`module:attribute`) and the line that the group's help shows for it."""

    target: str
    help: str
    aliases: tuple[str, ...] = ()


class LazyGroup(click.Group):
    """Commands from a table of `Lazy`, in the table's order."""

    def __init__(self, *args: Any, lazy: Mapping[str, Lazy], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._lazy = lazy
        self._names = {alias: name for name, entry in lazy.items() for alias in (name, *entry.aliases)}

    def list_commands(self, ctx: click.Context) -> list[str]:
        del ctx
        return list(self._lazy)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        name = self._names.get(cmd_name)
        if name is None:
            return None
        module, _, attribute = self._lazy[name].target.partition(":")
        command: click.Command = getattr(import_module(module), attribute)
        del ctx
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        word = args[0]
        if word not in self._names and not word.startswith("-"):
            from difflib import get_close_matches  # costs as much as half of --help, and only a typo needs it

            close = get_close_matches(word.lower(), self._names, n=1)
            suggestion = f", did you mean {close[0]!r}?" if close else ""
            raise click.UsageError(f"there is no command {word!r}{suggestion}", ctx)
        return super().resolve_command(ctx, args)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Return the commands that begin so, without importing any, and the options."""
        from click.shell_completion import CompletionItem

        names = [name for name in self._lazy if name.startswith(incomplete)]
        found = [CompletionItem(name, help=self._lazy[name].help) for name in names]
        return [*found, *click.Command.shell_complete(self, ctx, incomplete)]

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        del ctx
        rows = [(", ".join((name, *entry.aliases)), entry.help) for name, entry in self._lazy.items()]
        with formatter.section("Commands"):
            formatter.write_dl(rows)
