"""What RunPod does not tell of a pod and its own orders do: whose it was, and how it was sold.

Bills name pods by id only, also long after the pod is gone, and v2 does not show whether a pod is interruptible.
Losing the file costs the keys of old bills and the word "outbid", never a machine.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

from spotd_providers.contract.provider import Logger
from spotd_providers.contract.values import AttemptKey, Market
from spotd_providers.kit.files import write_atomically

REMEMBERED_MAX: Final = 5000


class PodMemory:
    """Orders and pods, kept in one small file."""

    def __init__(self, folder: Path, log: Logger) -> None:
        self._file = folder / "pods.json"
        self._log = log
        self._markets: dict[str, str] = {}
        self._keys: dict[str, str] = {}
        try:
            content = json.loads(self._file.read_text(encoding="utf-8"))
            self._markets = {str(key): str(market) for key, market in content["orders"].items()}
            self._keys = {str(pod): str(key) for pod, key in content["pods"].items()}
        except FileNotFoundError:
            pass
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as exc:
            log.warning("runpod.memory_unreadable", reason=type(exc).__name__)

    def ordered(self, key: AttemptKey, market: Market) -> None:
        """A pod of this market is about to be ordered under this key."""
        self._markets[key] = market.value
        self._save()

    def seen(self, pod_id: str, key: AttemptKey) -> None:
        """This pod carries this key."""
        if self._keys.get(pod_id) != key:
            self._keys[pod_id] = key
            self._save()

    def market_of(self, key: AttemptKey) -> Market | None:
        """How the pod under this key was ordered, if that is known."""
        word = self._markets.get(key)
        return Market(word) if word in tuple(Market) else None

    def key_of_pod(self, pod_id: str) -> AttemptKey | None:
        """Whose pod this was, if it was one of ours."""
        key = self._keys.get(pod_id)
        return None if key is None else AttemptKey(key)

    def _save(self) -> None:
        for rows in (self._markets, self._keys):
            while len(rows) > REMEMBERED_MAX:
                del rows[next(iter(rows))]
        try:
            write_atomically(self._file, json.dumps({"orders": self._markets, "pods": self._keys}))
        except OSError as exc:
            self._log.warning("runpod.memory_unwritable", reason=type(exc).__name__)
