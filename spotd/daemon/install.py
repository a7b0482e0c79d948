"""Under which label this daemon owns machines, and what forbids it to go on under another."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from spotd.core.model import key_belongs_to
from spotd.daemon.lifecycle import BadConfig
from spotd.store import MachineView
from spotd_providers.contract.values import InstallId

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
        "`spotctl status` counts no machine"
    )


def former_install(machine: MachineView) -> str:
    """The label in a machine's key."""
    owner = machine.key.removeprefix("spotd-").rsplit("-", 2)[0]
    return owner.partition(".")[0]
