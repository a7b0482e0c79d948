"""The lease on an install: an object in the checkpoint store that names the daemon which acts under a label.

Theory. Two daemons with one label and one store would destroy each other's machines, because each takes the other's
for strays of its own. So each start claims the next *epoch* of its label by creating `installs/<label>/<epoch>.json`,
which can be created only once. The holder of the highest epoch acts; a daemon that sees a higher one than its own buys
nothing more and writes no grant more, and ends nothing that it did not buy itself.

A claim hands the identity on, so a lost state database with the same store finds and ends its own strays. That makes a
claim destructive, and it is made at once only where the former holder is proved to be dead: it used the same state
folder, whose lock this process holds, or the user names its identity in `[daemon] take_over`. Otherwise the lease must
have been silent for longer than any machine lives without its daemon, by the store's own clock, and then stay silent
while this daemon watches it, by its own. A clock that was set wrong thus takes nothing away from a daemon that lives.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from itertools import islice
from typing import Any, Final

from spotd.daemon.errors import BadConfig
from spotd_jobs.objects.api import Conflict, ObjectInfo, ObjectMissing, ObjectStore, StoreError
from spotd_providers.contract.values import InstallId

INSTALLS: Final = "installs/"
SCHEMA: Final = 1
FRESH: Final = timedelta(minutes=30)
"""As long as a machine lives without its daemon."""
DOCUMENT_BYTES_MAX: Final = 16_384
EPOCHS_MAX: Final = 1_000
WORDS_MAX: Final = 120


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """One process that may hold the lease.

    Attributes:
        words: how a person recognizes it (process, computer, state folder).
        places: hashes of what only a process in the same state folder can have in common with it.
        nonce: made up once for the process.
    """

    words: str
    places: frozenset[str]
    nonce: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseFound:
    """The lease as it is in the store, and the object that holds it."""

    epoch: int
    identity: str
    holder: Holder
    info: ObjectInfo

    def is_held_by(self, me: Holder) -> bool:
        """Whether this process wrote it. No other statement decides: each claim of another process has its nonce."""
        return self.holder.nonce == me.nonce


@dataclass(frozen=True, slots=True, kw_only=True)
class Claimed:
    """A lease that this process holds. `identity` is what its machines carry, `also` whose machines are its, too."""

    epoch: int
    identity: str
    also: frozenset[str] = frozenset()


class InstallTaken(BadConfig):
    """Another daemon acts under this label; the message names it and the way out."""


def lease_key(install: InstallId, epoch: int) -> str:
    return f"{INSTALLS}{install}/{epoch:010d}.json"


def place_hash(*facts: str) -> str:
    """Return a hash of facts about a place, so that the store does not show what they are."""
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()[:32]


def find_lease(objects: ObjectStore, install: InstallId) -> LeaseFound | None:
    """Return the newest lease on the label.

    Raises:
        StoreError: the store does not answer, or what it holds cannot be understood.
    """
    newest: tuple[int, ObjectInfo] | None = None
    for info in islice(objects.list(f"{INSTALLS}{install}/"), EPOCHS_MAX):
        name = info.key.rpartition("/")[2].removesuffix(".json")
        if name.isascii() and name.isdecimal() and (newest is None or int(name) > newest[0]):
            newest = int(name), info
    if newest is None:
        return None
    epoch, info = newest
    try:
        data = objects.get(info.key, bytes_max=DOCUMENT_BYTES_MAX)
    except ObjectMissing:
        return None  # deleted since it was listed, which only a newer holder does: the next query finds that one
    return _parsed(data, epoch, info)


def _parsed(data: bytes, epoch: int, info: ObjectInfo) -> LeaseFound:
    try:
        raw: Any = json.loads(data)
        if raw["schema"] != SCHEMA:
            raise ValueError("it has another schema")
        identity, words, nonce = (str(raw[name]) for name in ("identity", "holder", "nonce"))
        places = frozenset(str(one) for one in raw["places"])
        if not (identity.isascii() and identity.isalnum()):
            raise ValueError("its identity is none")
    except (ValueError, KeyError, TypeError, RecursionError) as exc:
        raise StoreError(
            f"the lease {info.key} in the checkpoint store cannot be understood ({exc}): a newer spotd may have written"
            " it; install that one, or delete the object if no other spotd uses this store"
        ) from exc
    printable = "".join(c if c.isprintable() else " " for c in words)[:WORDS_MAX]
    return LeaseFound(
        epoch=epoch, identity=identity, holder=Holder(words=printable, places=places, nonce=nonce), info=info
    )


def document(install: InstallId, epoch: int, identity: str, me: Holder, *, renewed: int) -> bytes:
    """Return the lease as it is stored; `renewed` counts, so that each renewal changes it."""
    fields: Mapping[str, Any] = {
        "schema": SCHEMA,
        "install": install,
        "identity": identity,
        "epoch": epoch,
        "holder": me.words,
        "places": sorted(me.places),
        "nonce": me.nonce,
        "renewed": renewed,
    }
    return json.dumps(fields, indent=1).encode()


def may_claim_at_once(found: LeaseFound | None, me: Holder, take_over: frozenset[str]) -> bool:
    """Whether the former holder is proved to be dead, or given up by the user."""
    return found is None or bool(found.holder.places & me.places) or found.identity in take_over


def age_of(objects: ObjectStore, install: InstallId, found: LeaseFound) -> timedelta:
    """How long ago the lease was renewed, by the store's own clock."""
    key = f"{INSTALLS}{install}.clock"
    now = objects.put(key, b"{}").modified
    objects.delete([key])
    return now - found.info.modified


def require_silent(objects: ObjectStore, install: InstallId, found: LeaseFound, own_identity: str) -> None:
    """Refuse a label under which another daemon acts, or acted until not long ago.

    Raises:
        InstallTaken: naming the other one and the way out.
    """
    age = age_of(objects, install, found)
    if age < FRESH:
        raise InstallTaken(taken_words(install, found, f"renewed {max(0, int(age.total_seconds()))} s ago"))
    if own_identity and own_identity != found.identity:
        raise InstallTaken(
            f'the checkpoint store belongs to another install of the label "{install}" (identity {found.identity}, '
            f"last held by {found.holder.words}); this one is {own_identity}\n\n"
            f"hint: {_way_out(found)}"
        )


def taken_words(install: InstallId, found: LeaseFound, since: str) -> str:
    return (
        f'another spotd acts under the label "{install}" with this checkpoint store: {found.holder.words} '
        f"(identity {found.identity}, lease {found.epoch}, {since})\n\nhint: {_way_out(found)}"
    )


def _way_out(found: LeaseFound) -> str:
    return (
        'stop that one, or give this one a label of its own with install = "..." in [daemon]; if that one is gone for'
        f' good, write take_over = ["{found.identity}"] in [daemon], and its machines become this one\'s'
    )


def claim(
    objects: ObjectStore, install: InstallId, me: Holder, found: LeaseFound | None, *, own_identity: str, fresh: str
) -> Claimed:
    """Claim the next epoch for this process.

    Args:
        own_identity: this install by the state; empty in a new state, which takes over the lease's.
        fresh: an identity for an install that never had one.

    Raises:
        Conflict: another process was faster.
        StoreError: it could not be written.
    """
    epoch = 1 if found is None else found.epoch + 1
    identity = own_identity or (fresh if found is None else found.identity)
    also = frozenset() if found is None else frozenset({found.identity}) - {identity}
    key = lease_key(install, epoch)
    objects.put(key, document(install, epoch, identity, me, renewed=0), create_only=True)
    # A store that ignores the condition keeps the last writer's: the others find out here or at their first renewal.
    written = find_lease(objects, install)
    if written is None or not written.is_held_by(me):
        raise Conflict(f"another spotd has just claimed the label {install}")
    former = [lease_key(install, epoch - 1)] if epoch > 1 else []
    objects.delete(former)
    return Claimed(epoch=epoch, identity=identity, also=also)


def renew(objects: ObjectStore, install: InstallId, me: Holder, held: Claimed, *, renewed: int) -> LeaseFound | None:
    """Renew the lease; or return who has it now.

    Raises:
        StoreError: it is not known whether it is still this process's.
    """
    found = find_lease(objects, install)
    if found is not None and not found.is_held_by(me):
        return found
    # None: the store lost the object, and no process has claimed since.
    data = document(install, held.epoch, held.identity, me, renewed=renewed)
    objects.put(lease_key(install, held.epoch), data, create_only=found is None)
    return None
