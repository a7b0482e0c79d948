"""The attempt keys in the labels of machines."""

from __future__ import annotations

from typing import Any

from spotd_providers.contract.values import AttemptKey, InstallId


def key_of(label: Any, install: InstallId) -> AttemptKey | None:
    """Return the attempt key in this label, if it carries this install's label."""
    if not isinstance(label, str):
        return None
    label = label.strip()
    head, _, number = label.rpartition("-")
    owner, _, job = head.rpartition("-")
    # Behind the dot is which of several installs of one label it is: that is for the daemon to judge.
    name, _, _ = owner.partition(".")
    ours = name == f"spotd-{install}" and bool(job) and number.isdecimal()
    return AttemptKey(label) if ours else None


def begins_like_ours(key: str, install: InstallId | str) -> bool:
    """Whether a key carries this label, with or without the identity of an install."""
    return key.startswith((f"spotd-{install}-", f"spotd-{install}."))
