"""Under which label this daemon owns machines, and what forbids it to go on under another."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import socket
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any, Final

from spotd.core.domain.intents import JobId
from spotd.core.domain.policy import Policy, key_belongs_to
from spotd.core.domain.world import World
from spotd.daemon.commits import Database
from spotd.paths import write_once
from spotd.store import FORMER_PLACES, MachineView
from spotd_jobs.objects.api import Conflict, ObjectInfo, ObjectMissing, ObjectStore, StoreError
from spotd_providers.contract.provider import Clock
from spotd_providers.contract.values import InstallId, ProviderName

# Errors that end a start or a reload of the daemon, with a message for the user.


class BadConfig(Exception):
    """A config cannot be used; the message is for the user, over several lines if need be."""


# The lease on an install: an object in the checkpoint store that names the daemon which acts under a label.
#
# Theory. Two daemons with one label and one store would destroy each other's machines, because each takes the other's
# for strays of its own. So each start claims the next *epoch* of its label by creating
# `installs/<label>/<epoch>.json`, which can be created only once. The holder of the highest epoch acts; a daemon that
# sees a higher one than its own buys nothing more and writes no grant more, and ends nothing that it did not buy
# itself.
#
# A claim hands the identity on, so a lost state database with the same store finds and ends its own strays. That
# makes a claim destructive, and it is made at once only where the former holder is proved to be dead: it used the
# same state folder, whose lock this process holds, or the user names its identity in `[daemon] take_over`. Otherwise
# the lease must have been silent for longer than any machine lives without its daemon, by the store's own clock, and
# then stay silent while this daemon watches it, by its own. A clock that was set wrong thus takes nothing away from a
# daemon that lives.


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
    return _parse_lease(data, epoch, info)


def _parse_lease(data: bytes, epoch: int, info: ObjectInfo) -> LeaseFound:
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
    return store_now(objects, install) - found.info.modified


def store_now(objects: ObjectStore, install: InstallId) -> datetime:
    """Return the store's own clock."""
    key = f"{INSTALLS}{install}.clock"
    now = objects.put(key, b"{}").modified
    objects.delete([key])
    return now


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


# Names of jobs: short, sortable by submission, unambiguous when read aloud.
#
# Lower-case Crockford base32 (no i, l, o, u), six digits of seconds and four of chance. There is no hyphen in one,
# because the key a machine carries is split at hyphens.


ALPHABET: Final = "0123456789abcdefghjkmnpqrstvwxyz"
TIME_DIGITS: Final = 6
CHANCE_DIGITS: Final = 4
_EPOCH: Final = datetime(2020, 1, 1, tzinfo=UTC)
_TIMES: Final = len(ALPHABET) ** TIME_DIGITS
_CHANCES: Final = len(ALPHABET) ** CHANCE_DIGITS


class JobIds:
    """Every id it makes is larger than the one before."""

    def __init__(self, clock: Clock, rng: Random) -> None:
        self._clock = clock
        self._rng = rng
        self._newest = -1

    def new(self) -> JobId:
        seconds = int((self._clock.now() - _EPOCH).total_seconds())
        # A market replayed from before 2020 keeps unique ids and merely loses their order between starts.
        number = max(0, seconds) % _TIMES * _CHANCES + self._rng.randrange(_CHANCES)
        self._newest = max(number, self._newest + 1)
        return JobId(_encode(self._newest))


def _encode(number: int) -> str:
    digits = []
    for _ in range(TIME_DIGITS + CHANCE_DIGITS):
        number, digit = divmod(number, len(ALPHABET))
        digits.append(ALPHABET[digit])
    return "".join(reversed(digits))


IDENTITY_LENGTH: Final = 6
STATE_ID: Final = "state_id"
PLACE_FILE: Final = "place"
MACHINE_FILES: Final = (Path("/etc/machine-id"), Path("/var/lib/dbus/machine-id"))
NAMED_MAX: Final = 8
"""Machines that one sentence names."""


def require_same_install(install: InstallId, machines: Iterable[MachineView]) -> None:
    """Refuse a label under which machines that are still owned would not be found any more.

    Raises:
        BadConfig: naming the machines and the way out.
    """
    strange = [one for one in machines if not key_belongs_to(install, one.key)]
    if not strange:
        return
    former = former_install(strange[0])
    named = ", ".join(f"{one.instance or 'a launch'} at {one.provider} ({one.key})" for one in strange[:NAMED_MAX])
    more = f" and {len(strange) - NAMED_MAX} more" if len(strange) > NAMED_MAX else ""
    count = f"{len(strange)} machine{'s' if len(strange) > 1 else ''}"
    raise BadConfig(
        f'[daemon] install is "{install}" now, but {count} of install "{former}" may be running: {named}{more}\n\n'
        f'hint: write install = "{former}" again, let its jobs end or cancel them, and rename when '
        "`spotctl providers` counts no machine"
    )


def former_install(machine: MachineView) -> str:
    """Return the label in a machine's key."""
    owner = machine.key.removeprefix("spotd-").rsplit("-", 2)[0]
    return owner.partition(".")[0]


def new_identity() -> str:
    """Return an identity that no other install has."""
    return "".join(secrets.choice(ALPHABET) for _ in range(IDENTITY_LENGTH))


async def this_holder(database: Database, state_dir: Path, state_url: str | Path) -> Holder:
    """Return this process, as the lease names it.

    The places are what proves that a former holder is dead: it used this very state, which only one process can.

    Raises:
        StoreError: the state can neither name itself nor be written.
    """
    name = await database.read(lambda reads: reads.meta(STATE_ID))
    if name is None:
        name = secrets.token_hex(16)
        await database.tx(lambda tx: tx.set_meta(STATE_ID, str(name)))
    server, former = await database.read(lambda reads: (reads.server(), reads.meta(FORMER_PLACES) or ""))
    words = f"process {os.getpid()} on {socket.gethostname()}, state in {server or state_dir}"
    places = _places(name, state_dir, state_url, server) | frozenset(former.split())
    return Holder(words=words, places=places, nonce=secrets.token_hex(16))


def folder_hash(state_dir: Path) -> str:
    """Return what names this computer's folder of the state, the same after each restart."""
    return place_hash("folder", _machine(), str(state_dir.resolve()), _token(state_dir / PLACE_FILE))


def _places(name: str, state_dir: Path, state_url: str | Path, server: str) -> frozenset[str]:
    if server:
        # Who leads it is the only one that writes: the folder of one of its daemons proves nothing of another.
        return frozenset({place_hash("state", name, server)})
    folder = folder_hash(state_dir)
    try:
        return frozenset({folder, place_hash("state", name, str(Path(state_url).stat().st_ino))})
    except OSError:
        return frozenset({folder})


def _machine() -> str:
    """Return what distinguishes this computer from others, as far as the system shows it."""
    for path in MACHINE_FILES:
        with suppress(OSError):
            return path.read_text(encoding="ascii").strip()
    return ""


def _token(path: Path) -> str:
    """Return what distinguishes this folder from others; made up when it is first asked for.

    Raises:
        BadConfig: it can be neither read nor written.
    """
    try:
        with suppress(FileNotFoundError):
            return path.read_text(encoding="ascii").strip()
        return write_once(path, secrets.token_hex(16)).strip()
    except (OSError, UnicodeError) as exc:
        raise BadConfig(f"{path} cannot be used: {exc}\n\nhint: check the owner and the disk of its folder") from exc


def other_account_words(world: World, policy: Policy, provider: ProviderName) -> str:
    """Which machines the key in use can neither see nor end, since they belong to another account; empty for none."""
    rules = policy.providers.get(provider)
    if rules is None:
        return ""
    strange = [
        a for a in world.attempts.values() if a.provider == provider and a.ref and rules.is_other_account(a.account)
    ]
    if not strange:
        return ""
    named = ", ".join(f"{a.ref.instance_id} ({a.key})" for a in strange[:NAMED_MAX] if a.ref is not None)
    return (
        f"the key of {provider} belongs to the account {rules.account}, but {named} to {strange[0].account}: they can "
        f"neither be seen nor ended; put a key of that account back into [providers.{provider}] until they have ended"
    )
