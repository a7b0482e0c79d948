"""The answers of `spotctl init`, and the commented configuration that they make."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

from spotd.setup import SetupRefused

STORE_ACCESS: Final = "store-access"
STORE_SECRET: Final = "store-secret"  # noqa: S105 - the name of a key, not a key
_BARE: Final = re.compile(r"[A-Za-z0-9_-]+")
_FIGURE: Final = re.compile(r"(0|[1-9][0-9]{0,8})(\.[0-9]{1,6})?")
_KEY_CHARS_MAX: Final = 4096
_HEAD: Final = """\
# Configuration of spotd, written by `spotctl init`. `spotd config example` prints every key with its meaning.
# After a change: `spotd config check`, then reload the service, or send SIGHUP to `spotd run`.
"""


@dataclass(frozen=True, slots=True)
class KeySource:
    """Where a secret is: in a file or variable of the user's, or typed just now."""

    kind: Literal["file", "env", "typed"]
    value: str = field(repr=False)


def names_key_place(text: str) -> bool:
    """Whether the text says where a key is kept, and is not the key itself."""
    kind, _, rest = text.strip().partition(":")
    return kind in ("env", "file") and bool(rest)


def read_key_source(text: str) -> KeySource:
    """Return where the secret is that the text names, or the secret itself.

    Raises:
        SetupRefused: it cannot be one; the text is not repeated.
    """
    text = text.strip()
    kind, colon, rest = text.partition(":")
    if colon and kind == "env" and rest:
        return KeySource("env", rest)
    if colon and kind == "file" and rest:
        return KeySource("file", str(Path(rest).expanduser().absolute()))
    if not text:
        raise SetupRefused("the key is empty")
    if len(text) > _KEY_CHARS_MAX or not text.isascii() or not text.isprintable() or " " in text:
        raise SetupRefused("this is no key: it holds blanks or characters that no key has", hint="paste it again")
    return KeySource("typed", text)


@dataclass(slots=True, kw_only=True)
class ConfigDraft:
    """What was answered so far.

    Attributes:
        keys: secrets by name: that of a market, or `store-access` and `store-secret`.
        titles: what a person calls each market.
        ceilings: dollars per GPU-hour, as they were written.
    """

    markets: dict[str, str] = field(default_factory=dict)
    keys: dict[str, KeySource] = field(default_factory=dict)
    bucket: str = ""
    endpoint_url: str = ""
    region: str = ""
    ceilings: dict[str, str] = field(default_factory=dict)
    budget_day: str = ""

    def text(self, references: Mapping[str, str]) -> str:
        """Return the configuration; `references` say for each secret where it is, in TOML."""
        return _HEAD + "".join(f"\n{line}" for line in self._lines(references)) + "\n"

    def _lines(self, references: Mapping[str, str]) -> Iterator[str]:
        yield "# What may be spent; what running machines are committed to counts as spent."
        yield "[budget]"
        yield "# Dollars from midnight to midnight UTC."
        yield f"day = {self.budget_day}" if self.budget_day else "# day = 10.0"
        yield ""
        yield "# Highest effective price in dollars per GPU-hour, by GPU; a job's own max_price goes before it."
        yield "[ceilings]"
        yield from (f"{_key(gpu)} = {price}" for gpu, price in self.ceilings.items())
        if not self.ceilings:
            yield "# H100 = 2.60"
        if self.bucket:
            yield ""
            yield "# The bucket that checkpoints, logs and results pass through; its rights: docs/stores.md."
            yield "[store]"
            yield f"url = {quoted(self.bucket)}"
            if self.endpoint_url:
                yield f"endpoint_url = {quoted(self.endpoint_url)}"
            if self.region:
                yield f"region = {quoted(self.region)}"
            if STORE_ACCESS in self.keys:
                yield f"access_key = {references[STORE_ACCESS]}"
                yield f"secret_key = {references[STORE_SECRET]}"
        for name, title in self.markets.items():
            yield ""
            yield f"# {title}"
            yield f"[providers.{_key(name)}]"
            if name in self.keys:
                yield f"api_key = {references[name]}"


def require_figures(draft: ConfigDraft) -> None:
    """Raise `SetupRefused` for an amount that is no plain figure, which would change the meaning of the file."""
    for amount in (*draft.ceilings.values(), *((draft.budget_day,) if draft.budget_day else ())):
        if not _FIGURE.fullmatch(amount):
            raise SetupRefused(f"{amount!r} is no amount of dollars", hint="write it like 2.60")


def quoted(text: str) -> str:
    """Return the text as TOML writes it."""
    return json.dumps(text, ensure_ascii=False)


def _key(name: str) -> str:
    return name if _BARE.fullmatch(name) else quoted(name)
