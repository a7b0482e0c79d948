"""The files of a local market's folder, which its server and its customers share.

`lock` is held while a server lives, so there is never a second one. `server.json` (only this user can read it) says
where it listens and holds the token that opens its door; after a crash it may be stale, which shows when nothing
answers there. `spec.json` and `clock.json` are written by the process that starts the server.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import secrets
from dataclasses import dataclass, field
from pathlib import Path

from spotd_providers.kit.files import write_atomically
from spotd_providers.local.hosts import REAL_TIME, ScaledClock, read_clock
from spotd_providers.local.settings import MarketSpec


class AlreadyServed(Exception):
    """Another server holds this market."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedEndpoint:
    """The address of a market's server, and the token for it."""

    url: str
    token: str = field(repr=False)


def find_endpoint(folder: Path) -> ServedEndpoint | None:
    """Return the address of this market's last server, which may have ended."""
    try:
        content = json.loads((folder / "server.json").read_text())
        return ServedEndpoint(url=content["url"], token=content["token"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def announce(folder: Path, url: str) -> str:
    """Write where the server listens; return the token for its clients.

    Every server has a new one: a process that takes a dead server's port, and is sent its token, has nothing.
    """
    token = secrets.token_urlsafe(32)
    write_atomically(folder / "server.json", json.dumps({"url": url, "pid": os.getpid(), "token": token}), mode=0o600)
    return token


def withdraw(folder: Path) -> None:
    """Delete the file by which clients find the server."""
    (folder / "server.json").unlink(missing_ok=True)


def clock_of(folder: Path) -> ScaledClock:
    file = folder / "clock.json"
    return read_clock(file) if file.exists() else REAL_TIME


def spec_of(folder: Path) -> tuple[MarketSpec, str]:
    """Return the market's specification, and the hash of its text."""
    try:
        text = (folder / "spec.json").read_text()
    except FileNotFoundError:
        return MarketSpec(), ""
    return MarketSpec.model_validate_json(text), spec_hash(text)


def spec_hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def take(folder: Path) -> int:
    """Lock the market until the returned descriptor is closed, or the process has ended.

    Raises:
        AlreadyServed: another one has it.
    """
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    descriptor = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as exc:
        os.close(descriptor)
        raise AlreadyServed(f"another server has the market in {folder}") from exc
    return descriptor


def still_ours(folder: Path, descriptor: int) -> bool:
    """Whether the market that was taken is still the one in this folder; its files may have been removed since."""
    try:
        return os.path.samestat((folder / "lock").stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False
