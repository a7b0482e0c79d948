"""Providers that are installed, found by entry point and imported only when the config names them."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Final, Protocol

from spotd_jobs.spec.problems import BadValue, nearest
from spotd_providers.contract.provider import ProviderPlugin

GROUP: Final = "spotd.providers"
BUNDLED_WITH: Final = "spotd"


class Plugins(Protocol):
    """Where plugins come from; tests give their own."""

    def load(self, name: str) -> ProviderPlugin:
        """Import the plugin.

        Raises:
            BadValue: none of that name is installed, or it cannot be imported.
        """
        ...


class InstalledPlugins:
    """The entry points of this Python environment."""

    def __init__(self) -> None:
        self._found: Mapping[str, EntryPoint] | None = None

    def _entry_points(self) -> Mapping[str, EntryPoint]:
        if self._found is None:
            self._found = {entry.name: entry for entry in sorted(entry_points(group=GROUP), key=lambda e: e.name)}
        return self._found

    def bundled(self) -> tuple[str, ...]:
        """Return those that come with spotd itself, sorted."""
        return tuple(
            name
            for name, entry in self._entry_points().items()
            if entry.dist is not None and entry.dist.name == BUNDLED_WITH
        )

    def load(self, name: str) -> ProviderPlugin:
        entry = self._entry_points().get(name)
        if entry is None:
            raise unknown_provider(name, tuple(self._entry_points()))
        try:
            plugin: ProviderPlugin = entry.load()
        except Exception as exc:  # foreign code runs here, and one broken plugin must not hide the other problems
            raise BadValue(
                f"the plugin of this provider does not load: {type(exc).__name__}: {exc}",
                hint="reinstall it where spotd is installed, or remove this table",
            ) from exc
        return plugin


def unknown_provider(name: str, names: tuple[str, ...]) -> BadValue:
    """Return a refusal that lists what is installed, the likely one first."""
    match = nearest(name, names)
    guess = f'did you mean "{match}"? ' if match else ""
    return BadValue("no such provider is installed", hint=f"{guess}installed: {', '.join(names) or 'none'}")
