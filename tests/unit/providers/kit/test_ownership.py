"""Every call of an adapter that names a machine asks whether that carries our label, before anything is done to it."""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path

import spotd_providers
from spotd_providers.kit.template import ProviderTemplate
from tests.cases import every

ADAPTERS = sorted(
    folder.name for folder in Path(spotd_providers.__path__[0]).iterdir() if (folder / "plugin.py").exists()
)


OF_GANGS = {"replace_members", "drop_members"}
"""Calls that find their machines by the key of their gang, which a foreign one does not carry."""


def asks(adapter: type, name: str) -> bool:
    """Whether this method, or one of its own that it calls, requires that the machine is ours."""
    source = inspect.getsource(getattr(adapter, name))
    called = re.findall(r"await self\.(_\w+)\(", source)
    return any(one == "_require_ours" or (one != name and asks(adapter, one)) for one in called)


@every("adapter", ADAPTERS)
def test_a_call_that_names_a_machine_requires_that_it_is_ours(adapter: str) -> None:
    plugin = importlib.import_module(f"spotd_providers.{adapter}.plugin")
    for one in vars(plugin).values():
        if inspect.isclass(one) and issubclass(one, ProviderTemplate) and one.__module__ == plugin.__name__:
            taking = [
                name
                for name, method in inspect.getmembers(one, inspect.isfunction)
                if not name.startswith("_") and "InstanceRef" in {str(kind) for kind in method.__annotations__.values()}
            ]
            assert "terminate" in taking
            assert [name for name in taking if name not in OF_GANGS and not asks(one, name)] == []
