"""The key a machine carries: which install bought it, for which attempt of which job.

Theory. A key is `spotd-<label>.<identity>-<job>-<number>`. The label is chosen by a user, so two daemons may have the
same; the identity is made up once for each install and kept in its state and in its checkpoint store. Neither a label
nor a job's id can hold a dot, so a key is read in one way only. Keys written before there were identities have none.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from spotd.core.domain.ids import JobId
from spotd.core.domain.policy import Policy
from spotd_providers.contract.values import AttemptKey, InstallId


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyParts:
    """The parts of a key of our label; `identity` is empty in one that was written before there were any."""

    identity: str
    job: JobId
    number: int


def attempt_key(install: InstallId, job: JobId, number: int, identity: str = "") -> AttemptKey:
    """Return the name a machine carries, from which its attempt is found again."""
    owner = f"{install}.{identity}" if identity else install
    return AttemptKey(f"spotd-{owner}-{job}-{number}")


@lru_cache(maxsize=4096)  # the same keys are read in every cycle
def key_parts(install: InstallId, key: str) -> KeyParts | None:
    """Return the parts of the key, if it carries this label."""
    head, _, number = key.rpartition("-")
    owner, _, job = head.rpartition("-")
    label, dot, identity = owner.partition(".")
    if label != f"spotd-{install}" or not job or "." in job or not (number.isascii() and number.isdecimal()):
        return None
    if bool(dot) != bool(identity):
        return None
    return KeyParts(identity=identity, job=JobId(job), number=int(number))


def key_belongs_to(install: InstallId, key: str) -> bool:
    """Whether a machine's key carries this label, whichever install of that label bought it."""
    return key_parts(install, key) is not None


def is_own_key(policy: Policy, key: str) -> bool:
    """Whether this very install bought the machine with this key, or answers for the lost install that did."""
    parts = key_parts(policy.install, key)
    return parts is not None and (parts.identity == policy.identity or parts.identity in policy.identities)
