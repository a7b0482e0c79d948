"""The keys of pods, kept because bills name pods by id only, also long after the pod is gone.

Losing the file costs the keys of old bills, never a machine.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

from spotd_providers.contract.provider import Logger
from spotd_providers.contract.values import AttemptKey
from spotd_providers.kit.files import write_atomically

PODS_MAX: Final = 5000


class PodKeys:
    """The key of each pod of ours, in one small file."""

    def __init__(self, folder: Path, log: Logger) -> None:
        self._file = folder / "pods.json"
        self._log = log
        self._keys: dict[str, str] = {}
        try:
            content = json.loads(self._file.read_text(encoding="utf-8"))
            self._keys = {str(pod): str(key) for pod, key in content["pods"].items()}
        except FileNotFoundError:
            pass
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as exc:
            log.warning("runpod.pod_keys_unreadable", reason=type(exc).__name__)

    def record(self, pod_id: str, key: AttemptKey) -> None:
        """Keep the key of this pod; the oldest entry beyond the bound is dropped."""
        if self._keys.get(pod_id) == key:
            return
        self._keys[pod_id] = key
        while len(self._keys) > PODS_MAX:
            del self._keys[next(iter(self._keys))]
        try:
            write_atomically(self._file, json.dumps({"pods": self._keys}))
        except OSError as exc:
            self._log.warning("runpod.pod_keys_unwritable", reason=type(exc).__name__)

    def key_of(self, pod_id: str) -> AttemptKey | None:
        """Return the key of this pod, if it is or was one of ours."""
        key = self._keys.get(pod_id)
        return None if key is None else AttemptKey(key)
