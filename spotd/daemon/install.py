"""Under which label this daemon owns machines, and what forbids it to go on under another."""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Final

from spotd.core.domain.keys import key_belongs_to
from spotd.core.domain.policy import Policy
from spotd.core.domain.world import World
from spotd.daemon.database import Database
from spotd.daemon.errors import BadConfig
from spotd.daemon.ids import ALPHABET
from spotd.daemon.install_lease import Holder, place_hash
from spotd.files import write_once
from spotd.store import MachineView
from spotd_providers.contract.values import InstallId, ProviderName

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
    words = f"process {os.getpid()} on {socket.gethostname()}, state in {state_dir}"
    return Holder(words=words, places=_places(name, state_dir, state_url), nonce=secrets.token_hex(16))


def _places(name: str, state_dir: Path, state_url: str | Path) -> frozenset[str]:
    folder = place_hash("folder", _machine(), str(state_dir.resolve()), _token(state_dir / PLACE_FILE))
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
