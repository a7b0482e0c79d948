"""`config.example.toml`, generated from the model, so that it cannot differ from it."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Final

from pydantic import BaseModel, PlainSerializer, TypeAdapter
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from spotd.config.credentials import InstalledPlugins, RegistrySection
from spotd.config.load import DEFAULT_PROVIDER
from spotd.config.model import SECTIONS, BucketSection, ProviderSection
from spotd.config.peers import NotifySection, UserSection
from spotd.config.values import Bytes
from spotd_jobs.spec.units import format_duration, format_size
from spotd_providers.contract.provider import ProviderPlugin

_WIDTH: Final = 116
_HEAD: Final = """\
Configuration of spotd, printed by `spotd config example`; `spotd config check` says what is wrong with yours.
Searched at --config, $SPOTD_CONFIG, $XDG_CONFIG_HOME/spotd/config.toml and /etc/spotd/config.toml, in this order;
with none of them the daemon opens a local market, which costs nothing.

Every key may be left out; what stands here is the default. A key behind a "# " has none, and shows how it is written.
In the environment, SPOTD_DAEMON__POLL_EVERY=30s goes over poll_every in [daemon], and so for every key."""
_CEILINGS: Final = ("H100 = 2.60", "RTX_4090 = 0.40")


def example_text() -> str:
    """Return a configuration with every key of spotd and of the bundled providers, its default and its meaning."""
    found = InstalledPlugins()
    lines = [*_comment(_HEAD)]
    for name, model in SECTIONS.items():
        lines += ["", *_comment(model.__doc__ or ""), f"[{name}]"]
        lines += _fields(model.model_fields)
        if name == "ceilings":
            lines += [
                *_comment("A line for each GPU, by any of its usual names."),
                *(f"# {line}" for line in _CEILINGS),
            ]
    named: tuple[tuple[str, type[BaseModel]], ...] = (
        ("notify.phone", NotifySection),
        ("registries.ghcr", RegistrySection),
        ("buckets.corpus", BucketSection),
        ("users.ada", UserSection),
    )
    for head, table in named:
        lines += ["", *_comment(table.__doc__ or ""), *_example_table(head, table)]
    lines += ["", *_comment("Where to buy. A table for each provider; without any, the local market is open.")]
    for name in found.bundled():
        lines += _provider_lines(found.load(name), default=name == DEFAULT_PROVIDER)
    return "\n".join(lines) + "\n"


def _example_table(head: str, table: type[BaseModel]) -> Iterator[str]:
    """Yield a table of a name of the user's, all of it as comments: one that is there has keys without a default."""
    yield f"# [{head}]"
    for line in _fields(table.model_fields):
        yield line if line.startswith("# ") else f"# {line}"


def _provider_lines(plugin: ProviderPlugin, *, default: bool) -> Iterator[str]:
    yield from ("", f"# {plugin.title}", f"[providers.{plugin.name}]")
    fields = dict(ProviderSection.model_fields)
    yield from _comment(fields["enabled"].description or "")
    yield f"enabled = {_toml(default)}"
    del fields["enabled"]
    if plugin.needs_credential:
        yield from _comment(fields["api_key"].description or "")
        yield f'api_key = {{ env = "{plugin.name.upper()}_API_KEY" }}'
    del fields["api_key"]
    model: type[BaseModel] = plugin.settings_model
    settings = model.model_construct()
    factor = plugin.traits(settings).default_fee_multiplier
    yield from _comment(fields["fee_multiplier"].description or "")
    yield f"# fee_multiplier = {factor}"
    yield from _comment(fields["poll_every"].description or "")
    yield '# poll_every = "60s"'
    yield from _fields(model.model_fields)


def _fields(fields: Mapping[str, FieldInfo]) -> Iterator[str]:
    for name, field in fields.items():
        yield from _comment(field.description or "")
        spelled = spell_default(field)
        if spelled is not None:
            yield f"{name} = {spelled}"
        elif field.examples:
            yield f"# {name} = {_toml(field.examples[0])}"
        else:
            yield f"# {name} ="


def spell_default(field: FieldInfo) -> str | None:
    """Return the default of a key as a user writes it; `None` where there is none, or no short form of it."""
    value = field.get_default(call_default_factory=True, validated_data={})
    if value is None or value is PydanticUndefined:
        return None
    for one in field.metadata:
        if isinstance(one, PlainSerializer) and isinstance(value, int):  # dollars, which are kept as micro-dollars
            value = TypeAdapter(Annotated[Any, one]).dump_python(value)
    return _toml(value)


def _comment(text: str) -> Iterator[str]:
    for paragraph in text.split("\n\n"):
        for line in textwrap.wrap(" ".join(paragraph.split()), _WIDTH):
            yield f"# {line}"


def _toml(value: Any) -> str | None:
    """Return the value as TOML spells it; `None` for what has no short form."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, Enum):
        return _toml(value.value)
    if isinstance(value, timedelta):
        return f'"{format_duration(value)}"'
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, Bytes):
        return f'"{format_size(value)}"'
    if isinstance(value, int | float):
        return str(value)
    if isinstance(value, str | Path):
        return '"' + str(value).replace("\\", "\\\\").replace('"', '\\"') + '"'
    if isinstance(value, Mapping) and value:
        return f"{{ {', '.join(f'{name} = {_toml(item)}' for name, item in value.items())} }}"
    if isinstance(value, Sequence):
        items = [_toml(item) for item in value]
        return None if None in items else f"[{', '.join(str(item) for item in items)}]"
    return None
