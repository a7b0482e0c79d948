"""The `config.json` of a model, from a file of this machine, refused with a sentence instead of a traceback."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any, Final, NoReturn

from spotd.cli.failures import CommandFailed
from spotd.estimates.architecture import Architecture
from spotd.estimates.model_config import WAY_OUT, ModelConfigError, architecture_of

NAME: Final = "config.json"
BYTES_MAX: Final = 4_000_000


def read_architecture(path: Path) -> Architecture:
    """Return the architecture that a config describes, or the config of a folder that holds a model.

    Raises:
        CommandFailed: unreadable, not JSON, or a model that cannot be counted; names the file and the key.
    """
    file = path / NAME if path.is_dir() else path
    config = _config(file, _content(file))
    try:
        return architecture_of(config)
    except ModelConfigError as exc:
        place = ": ".join(part for part in (str(file), exc.key) if part)
        raise CommandFailed(f"{place}: {exc}", hint=exc.hint) from exc


def _content(file: Path) -> bytes:
    try:
        if not stat.S_ISREG(file.stat().st_mode):
            raise CommandFailed(f"{file}: this is not a file", hint=f"name a model's {NAME}")
        with file.open("rb") as opened:
            raw = opened.read(BYTES_MAX + 1)
    except FileNotFoundError as exc:
        hint = f"name a model's {NAME}, or the folder it is in"
        raise CommandFailed(f"{file}: no such file", hint=hint) from exc
    except OSError as exc:
        hint = "check the path, the file's owner and mode"
        raise CommandFailed(f"{file}: cannot be read: {exc.strerror}", hint=hint) from exc
    if len(raw) > BYTES_MAX:
        raise CommandFailed(f"{file}: larger than {BYTES_MAX // 10**6} MB", hint=f"name the {NAME}, not the weights")
    return raw


def _config(file: Path, raw: bytes) -> dict[str, Any]:
    hint = f"name a model's {NAME}, as it is on its page; or {WAY_OUT}"
    try:
        config = json.loads(raw.decode("utf-8-sig"), parse_constant=_refuse_constant)
    except UnicodeDecodeError as exc:
        raise CommandFailed(f"{file}: not UTF-8 text", hint=hint) from exc
    except json.JSONDecodeError as exc:
        message = f"{file}:{exc.lineno}: not JSON: {exc.msg}"
        raise CommandFailed(message, hint=hint) from exc
    except ValueError as exc:
        raise CommandFailed(f"{file}: holds a number that none can be: {exc}", hint=hint) from exc
    except RecursionError as exc:
        raise CommandFailed(f"{file}: nested too deeply", hint=hint) from exc
    if not isinstance(config, dict):
        raise CommandFailed(f"{file}: does not hold a table of settings", hint=hint)
    return config


def _refuse_constant(text: str) -> NoReturn:
    raise ValueError(text)
