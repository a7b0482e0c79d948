"""Where a state is, and what its database refuses.

Every message of an error names the place and holds no value of a statement: `hint` is the way out.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from sqlalchemy.engine import URL, make_url

MEMORY: Final = ":memory:"
POSTGRES: Final = "postgresql"


class StateError(Exception):
    """The state database refused or could not do something. Nothing of the transaction was written."""

    def __init__(self, message: str, *, hint: str) -> None:
        super().__init__(f"{message}; {hint}")
        self.message = message
        self.hint = hint


class StateUnavailable(StateError):
    """It cannot be read or written now (disk full, locked, I/O error): hold, and try the same transaction again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Leader:
    """The process that leads a state which several share.

    Attributes:
        term: names this process and this lead of it; no other lead has the same.
        words: which process it is, for people.
        url: where it serves its API; empty where it has stated nothing.
        certificate: SHA-256 of its certificate there, in hexadecimal digits.
        proofs: that a daemon with a `secrets_key` stated the two, by each that it had (`SecretsKey.proof_of`).
    """

    term: str
    words: str
    url: str = ""
    certificate: str = ""
    proofs: tuple[str, ...] = ()


class StoreInUse(StateError):
    """Another process writes this state: there can be only one. `leader` is which, where several may be started."""

    def __init__(self, message: str, *, hint: str, leader: Leader | None = None) -> None:
        super().__init__(message, hint=hint)
        self.leader = leader


class StoreTooNew(StateError):
    """A newer spotd wrote this state; it was left as it is."""


class StoreOtherSchema(StateError):
    """The tables are not those of the revision that the file states; it was left as it is."""


class StoreCorrupt(StateError):
    """The file is damaged or no state database at all; it was left as it is."""


class StoreUnsupported(StateError):
    """The place that was asked for is of a kind that this version cannot use."""


class StoreMoved(StateError):
    """The state was moved to another place, where it may have gone on."""


class LeadershipLost(StateUnavailable):
    """Another process may write this state: stop, and begin anew once this one leads again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DatabasePlace:
    """Where a state lives: in PostgreSQL where `url` is set, else in a file, else in memory only."""

    path: Path | None
    url: URL | None = None

    def __str__(self) -> str:
        if self.url is not None:
            return self.url.render_as_string(hide_password=True)
        return MEMORY if self.path is None else str(self.path)


def parse_place(url: str | Path) -> DatabasePlace:
    """Return the place of a path, `sqlite:///...` or `postgresql://...` URL or `:memory:`.

    Raises:
        StoreUnsupported: another kind of database. The message does not repeat the URL, which may hold a password.
    """
    if isinstance(url, str) and "://" in url:
        scheme = url.partition("://")[0]
        if scheme == POSTGRES:
            return DatabasePlace(path=None, url=make_url(url))
        if scheme.partition("+")[0] != "sqlite":
            raise StoreUnsupported(
                f'a state in "{scheme}://" is not supported',
                hint='write state = "sqlite" or state = "postgresql://user@host/database" in [daemon]',
            )
        url = make_url(url).database or MEMORY
    return DatabasePlace(path=None if str(url) == MEMORY else Path(url).absolute())
