"""Pages of the documentation that are made of the code: commands, config, job file, API."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

import click

from spotd.api.app import api_routes
from spotd.api.openapi import document
from spotd.cli import client, daemon
from spotd.config import example
from spotd.config.credentials import InstalledPlugins, RegistrySection
from spotd.config.model import SECTIONS, BucketSection, ProviderSection
from spotd_jobs.spec.keys import FILE_ORDER
from spotd_providers.contract.values import Capability, Power

_WIDTH = 100


def _page(title: str, about: str, lines: Iterator[str]) -> str:
    return "\n".join([f"# {title}", "", about, "", *lines]).rstrip() + "\n"


def _cell(text: object) -> str:
    return str(text).replace("|", "\\|")


def _table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> Iterator[str]:
    yield f"| {' | '.join(head)} |"
    yield "|" + "---|" * len(head)
    yield from (f"| {' | '.join(map(_cell, row))} |" for row in rows)
    yield ""


def _plain(text: str) -> str:
    """The text in one line, with placeholders that Markdown would take for tags in code."""
    return re.sub(r"(?<![`\w])<([a-z]+)>", r"`<\1>`", " ".join(text.split()))


def commands() -> str:
    """What `--help` of each command prints."""

    def lines() -> Iterator[str]:
        for name, group in (("spotctl", client.spotctl), ("spotd", daemon.spotd)):
            settings = {**group.context_settings, "terminal_width": _WIDTH, "max_content_width": _WIDTH}
            with click.Context(group, info_name=name, **settings) as ctx:
                yield from (f"## {name}", "", "```text", group.get_help(ctx), "```", "")
                for one in group.list_commands(ctx):
                    command = group.get_command(ctx, one)
                    assert command is not None
                    command._help_option = None  # of whoever called it in this process without its group
                    with click.Context(command, ctx, one, terminal_width=_WIDTH, max_content_width=_WIDTH) as inner:
                        yield from (f"### {name} {one}", "", "```text", command.get_help(inner), "```", "")

    return _page("Commands", "Every command with its options, as `--help` prints it.", lines())


def config() -> str:
    """Every key of the config with its default and its meaning."""

    def lines() -> Iterator[str]:
        for name, model in SECTIONS.items():
            yield from (f"## [{name}]", "", _plain(model.__doc__ or ""), "")
            rows = _keys(model.model_fields)
            if name == "ceilings":
                rows += [("`H100 = 2.60`", "", "A line for each GPU, by any of its usual names.")]
            yield from _table(("key", "default", "meaning"), rows)
        yield from ("## [registries.NAME]", "", _plain(RegistrySection.__doc__ or ""), "")
        yield from _table(("key", "default", "meaning"), _keys(RegistrySection.model_fields))
        yield from ("## [buckets.NAME]", "", _plain(BucketSection.__doc__ or ""), "")
        yield from _table(("key", "default", "meaning"), _keys(BucketSection.model_fields))
        yield from ("## [providers.NAME]", "", "Keys that every provider has.", "")
        yield from _table(("key", "default", "meaning"), _keys(ProviderSection.model_fields))
        found = InstalledPlugins()
        for name in found.bundled():
            plugin = found.load(name)
            yield from (f"## [providers.{name}]", "", f"{plugin.title}: beside the keys of every provider.", "")
            yield from _table(("key", "default", "meaning"), _keys(plugin.settings_model.model_fields))

    about = "Every key of the config file. `spotd config example` prints the same as a file to begin with, "
    about += "and `spotd config check` says what is wrong with yours."
    return _page("Config file", about, lines())


def _keys(fields: Mapping[str, Any]) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for name, field in fields.items():
        spelled = example.spell_default(field)
        rows.append((f"`{name}`", f"`{spelled}`" if spelled else "", _plain(field.description or "")))
    return rows


def job_file() -> str:
    """Every key of the job file with the flag for it."""

    def table(path: str) -> str:
        return path.rpartition(".")[0]

    def lines() -> Iterator[str]:
        for name, keys in groupby(
            sorted(FILE_ORDER, key=lambda key: table(key.path) != ""), lambda key: table(key.path)
        ):
            yield from (f"## [{name}]" if name else "## At the top", "")
            rows = [
                (
                    f"`{key.path.rpartition('.')[2]}`",
                    f"`{key.flag}`" if key.flag.startswith("--") else key.flag,
                    key.help,
                )
                for key in keys
            ]
            yield from _table(("key", "flag of `spotctl submit`", "meaning"), rows)

    about = (
        "Every key of a job file. A flag goes over the key of the file. Unknown keys are refused with the nearest one "
        "that is known."
    )
    return _page("Job file", about, lines())


def api() -> str:
    """Every route of the API, with what it takes and answers."""
    found = document(api_routes())

    def lines() -> Iterator[str]:
        for path, methods in found["paths"].items():
            for method, operation in methods.items():
                yield from (f"### {method.upper()} {path}", "", operation["summary"], "")
                parameters = [one for one in operation.get("parameters", ()) if one["in"] == "query"]
                if parameters:
                    rows = [(f"`{p['name']}`", _kind(p["schema"]), p.get("description", "")) for p in parameters]
                    yield from _table(("parameter", "type", "meaning"), rows)
                for words, content in _contents(operation):
                    yield from (f"{words}: {content}.", "")
        yield from ("## Objects", "")
        for name, schema in found["components"]["schemas"].items():
            yield from (f"### {name}", "", _plain(schema.get("description", "")), "")
            required = set(schema.get("required", ()))
            rows = [
                (
                    f"`{key}`",
                    _kind(one),
                    _plain(one.get("description", "")) + ("" if key in required else " (optional)"),
                )
                for key, one in schema["properties"].items()
            ]
            yield from _table(("key", "type", "meaning"), rows)

    about = found["info"]["description"] + (
        "\n\nThis page and [openapi.json](openapi.json), which the daemon serves at `/v1/openapi.json`, are made of "
        'the routes and the types of the code.\n\n```sh\ncurl --unix-socket "$XDG_RUNTIME_DIR/spotd/spotd.sock" '
        "http://spotd/v1/status\n```\n\n## Routes"
    )
    return _page("HTTP API", about, lines())


def _contents(operation: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    if "requestBody" in operation:
        yield "Body", _content(operation["requestBody"]["content"])
    status, answer = next(iter(operation["responses"].items()))
    yield f"Answer ({status})", _content(answer["content"])


def _content(content: Mapping[str, Any]) -> str:
    ((media, one),) = content.items()
    if "itemSchema" in one:
        return f"a stream of {_kind(one['itemSchema'])}, one a line"
    return _kind(one["schema"]) if media == "application/json" else f"bytes (`{media}`)"


def _kind(schema: Mapping[str, Any]) -> str:
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    if "anyOf" in schema:
        return " or ".join(_kind(one) for one in schema["anyOf"])
    if "enum" in schema:
        return " or ".join(f"`{one}`" for one in schema["enum"])
    if schema.get("type") == "array":
        return f"list of {_kind(schema['items'])}"
    if "minimum" in schema:
        return f"integer, {schema['minimum']} to {schema['maximum']}"
    if isinstance(schema.get("additionalProperties"), dict):
        return f"object of {_kind(schema['additionalProperties'])}"
    return str(schema.get("type", "anything"))


_POWERS = {
    Power.SPOT: "spot machines, which may be taken back",
    Power.BID_CHANGE: "a bid that follows the market while the machine runs",
    Power.NOTICES: "a notice before a machine is taken back",
    Power.CAPACITY_SCORES: "how likely a launch is to succeed",
    Power.HOST_IDENTITY: "which host an offer stands on, so that a bad one is left out",
    Power.SELF_TERMINATE: "a machine that ends itself, without the daemon",
    Power.STOP_RESUME: "a machine that is stopped and resumed",
    Power.LOGS: "the console of a machine, before the runner reports",
    Power.SHELL: "`spotctl ssh`",
    Power.PORTS: "`spotctl forward` by the provider's own way",
    Power.BALANCE: "the money left at the provider",
    Power.BILLING: "what was billed, read back and compared",
    Power.PRICE_HISTORY: "prices of the past, for `spotctl history import`",
    Power.GANG: "several machines that reach each other, for `nodes`",
    Power.REPLACE: "a lost one of them is replaced while the others wait, for `replace_within`",
}
"""What each power is for a user. One without words fails the page."""


def powers() -> str:
    """What each bundled provider can do, and why it cannot do the rest."""
    found = InstalledPlugins()
    bundled = [(name, found.load(name)) for name in found.bundled()]
    declared: dict[str, Mapping[Power, Capability]] = {name: getattr(one, "powers") for name, one in bundled}  # noqa: B009 - of bundled plugins only, so no part of their Protocol

    def cell(has: Capability) -> str:
        return "no" if not has.available else f"yes, {has.reason}" if has.reason else "yes"

    def lines() -> Iterator[str]:
        rows = [
            (_POWERS[power], f"`{power}`", *(cell(declared[name][power]) for name, _ in bundled))
            for power in sorted(Power, key=[*_POWERS, *Power].index)
        ]
        rows.append(("what it was run against", "", *(str(getattr(one, "tried")) for _, one in bundled)))  # noqa: B009 - as above
        yield from _table(("", "power", *(f"`{name}`" for name, _ in bundled)), rows)
        for name, plugin in bundled:
            yield from (f"## {plugin.title}: what is missing, and why", "")
            for power in sorted(Power, key=[*_POWERS, *Power].index):
                if not declared[name][power].available:
                    yield f"* `{power}`: {declared[name][power].reason}"
            yield ""

    about = (
        "Made of what each bundled provider declares. `spotctl providers --explain` shows the same of those that you"
        " have configured, third parties' included."
    )
    return _page("What each provider can do", about, lines())


NEVER_RUN = "never run against the live service"
"""What a plugin states that was tried against a fake of its service only."""


def compared(text: str) -> str:
    """Return the page of comparison with the cells about spotd's places as the bundled plugins have them."""
    found = InstalledPlugins()
    bundled = {name: found.load(name) for name in found.bundled() if name != "local"}
    titles = sorted((plugin.title for plugin in bundled.values()), key=str.lower)
    unproven = sorted((one.title for one in bundled.values() if getattr(one, "tried") == NEVER_RUN), key=str.lower)  # noqa: B009 - as above
    cells = {
        "where": f"{', '.join(titles)} ([what each can do](reference/powers.md)); others by plugin",
        "maturity": f"young; {NEVER_RUN}: {', '.join(unproven)}",
    }
    lines = []
    for line in text.split("\n"):
        parts = line.split(" | ")
        own = cells.get(parts[0].removeprefix("| "))
        lines.append(" | ".join([parts[0], own, *parts[2:]]) if own else line)
    return re.sub(r"spotd \w+\.", f"spotd {len(bundled)}.", "\n".join(lines), count=1)


PAGES = {
    "commands.md": commands, "config.md": config, "job-file.md": job_file, "api.md": api, "powers.md": powers,
}  # fmt: skip
