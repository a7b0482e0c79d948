"""What an account owns besides pods: SSH keys, registry credentials, network volumes. None of it is billed here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Final

from tests.fakes.runpod.refusal import Refusal

VOLUME_GB: Final = range(10, 4097)


@dataclass(slots=True, kw_only=True)
class Belongings:
    """By id: registry credentials (their secrets included) and network volumes; and the account's SSH keys."""

    ssh_keys: list[str] = field(default_factory=list)
    registries: dict[str, dict[str, str]] = field(default_factory=dict)
    volumes: dict[str, dict[str, Any]] = field(default_factory=dict)
    refuses_registries: int = 0
    """The status with which a new registry credential is refused, its content quoted; 0 for none."""
    lists_registries: bool = True
    _serial: count[int] = field(default_factory=lambda: count(1))

    def add_registry(self, fields: Any) -> dict[str, str]:
        """What is told of a new credential: never its password.

        Raises:
            Refusal: a field is missing.
        """
        if self.refuses_registries:
            raise Refusal(self.refuses_registries, f"cannot store {fields}")
        texts = _texts(fields, ("name", "username", "password"))
        identity = f"reg{next(self._serial)}"
        self.registries[identity] = texts
        return {"id": identity, "name": texts["name"]}

    def drop_registry(self, identity: str, *, used: bool) -> None:
        """The credential is gone.

        Raises:
            Refusal: there is none (a 400, as dstack's client has met, where 404 would be expected), or a pod uses it.
        """
        self._registry(identity)
        if used:
            raise Refusal(400, "Registry auth is in use by a Pod.")
        del self.registries[identity]

    def add_volume(self, fields: Any, *, data_centers: set[str]) -> dict[str, Any]:
        """A new network volume, which binds its pods to its data center.

        Raises:
            Refusal: a size or a data center that cannot be had.
        """
        texts = _texts(fields, ("name", "dataCenter"))
        size = fields.get("size")
        if not isinstance(size, int) or size not in VOLUME_GB:
            raise Refusal(422, "Request validation failed.", errors=["$.size: invalid value"])
        if texts["dataCenter"] not in data_centers:
            raise Refusal(400, "No such data center.")
        identity = f"vol{next(self._serial):07d}"
        kind = str(fields.get("type") or "STANDARD")
        self.volumes[identity] = {"id": identity, **texts, "size": size, "type": kind}
        return self.volumes[identity]

    def volume(self, identity: str) -> dict[str, Any]:
        """The volume.

        Raises:
            Refusal: there is none.
        """
        if identity not in self.volumes:
            raise Refusal(404, "The requested Network Volume does not exist.")
        return self.volumes[identity]

    def drop_volume(self, identity: str) -> None:
        """The volume is gone.

        Raises:
            Refusal: there is none.
        """
        del self.volumes[self.volume(identity)["id"]]

    def _registry(self, identity: str) -> dict[str, str]:
        if identity not in self.registries:
            raise Refusal(400, "Registry auth not found")
        return self.registries[identity]


def _texts(fields: Any, names: tuple[str, ...]) -> dict[str, str]:
    known: Mapping[str, Any] = fields if isinstance(fields, dict) else {}
    faults = [f"$: missing property '{name}'" for name in names if not isinstance(known.get(name), str)]
    if faults:
        raise Refusal(422, "Request validation failed.", errors=faults)
    return {name: known[name] for name in names}
