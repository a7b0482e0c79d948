"""The text of the systemd unit, from the templates in `systemd/` and what this computer needs."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Final

from spotd.setup import SetupRefused

UNIT_NAME: Final = "spotd.service"
MARK: Final = "# Written by `spotd install-service`"
_TEMPLATES: Final = {True: "spotd.service", False: "spotd-user.service"}
_PLAIN: Final = re.compile(r"[A-Za-z0-9/._@+:,=-]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitPlan:
    """What the unit depends on.

    Attributes:
        command: the program with its own arguments, before `run`.
        config: a configuration that is not where the service would search for it.
        writable: folders that a user's service may write to; a system service has only its own.
        credentials: the file of each secret, by the name that the configuration gives it.
        environment: variables without which the service would search elsewhere than this shell.
    """

    system: bool
    command: Sequence[str]
    config: Path | None = None
    writable: Sequence[Path] = ()
    credentials: Mapping[str, Path] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)


def unit_text(plan: UnitPlan) -> str:
    """Return the whole unit.

    Raises:
        SetupRefused: a path in it cannot be written in a unit.
    """
    scope = "" if plan.system else " --user"
    lines = [
        f"{MARK}, which compares and asks before it writes again. Changes of yours belong in an",
        f"# override: systemctl{scope} edit spotd",
        "",
    ]
    body = _template(plan.system).splitlines()
    begin = body.index("[Unit]")
    for line in body[begin:]:
        key = line.partition("=")[0]
        if key == "ExecStart":
            lines += _start_lines(plan)
        elif key == "ReadWritePaths":
            lines += [f"ReadWritePaths={_word(str(path))}" for path in plan.writable]
        elif key != "#LoadCredential":
            lines.append(line)
    return "\n".join(lines) + "\n"


def _start_lines(plan: UnitPlan) -> Iterator[str]:
    words = [*plan.command, "run", *(() if plan.config is None else ("--config", str(plan.config)))]
    # In this one line a dollar begins a variable, so two are one.
    yield "ExecStart=" + " ".join(_word(word).replace("$", "$$") for word in words)
    for name, value in sorted(plan.environment.items()):
        yield f"Environment={_word(f'{name}={value}')}"
    for name, path in sorted(plan.credentials.items()):
        # The rest of the line is the path as it stands, blanks included; only a per cent has a meaning of its own.
        yield f"LoadCredential={name}:{_printable(str(path)).replace('%', '%%')}"


def _word(text: str) -> str:
    """Return the text as one word of a unit: what has a meaning there is quoted."""
    text = _printable(text).replace("%", "%%")
    if _PLAIN.fullmatch(text):
        return text
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _printable(text: str) -> str:
    if not text.isprintable():
        raise SetupRefused(f"{text!r} cannot be written in a unit", hint="move it to a path without line breaks")
    return text


def _template(system: bool) -> str:  # noqa: FBT001 - the one key of the table above
    name = _TEMPLATES[system]
    packaged = Path(str(files("spotd.setup"))) / "units" / name
    checkout = Path(__file__).resolve().parents[2] / "systemd" / name
    for path in (packaged, checkout):
        if path.is_file():
            return path.read_text(encoding="utf-8")
    raise SetupRefused(f"{name} is missing from this installation", hint="reinstall spotd")
