"""The volumes that servers of flavours without a disk boot from: marked as ours, and found by that once they are left.

Nova makes such a volume without a name and deletes it with its server. Only what has the key as its name and in its
metadata is ever deleted by us.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final
from urllib.parse import quote

from spotd_providers.contract.errors import AuthFailed, ProviderError, Unavailable
from spotd_providers.contract.provider import Services
from spotd_providers.contract.values import AttemptKey
from spotd_providers.kit.calls import all_pages
from spotd_providers.kit.template import bound
from spotd_providers.openstack.keys import OpenstackClient
from spotd_providers.openstack.wire import PROVIDER, WHO, ServerRow, marks_of

VOLUMES: Final = "/volume/volumes/detail"
NAMED_MAX: Final = 5
"""Volumes that are marked after one list, which waits for it; the next one goes on."""
UNNAMED: Final = f"{PROVIDER}.volume_unnamed"
SHOWN: Final = {"name", "bootable", "metadata"}


class BootVolumes:
    """The volumes of one project that servers of ours were seen to boot from."""

    def __init__(self, client: OpenstackClient, services: Services) -> None:
        self._client, self._services = client, services
        self._due: dict[str, AttemptKey] = {}
        self._marked: dict[str, AttemptKey] = {}
        self._refusals: dict[str, str] = {}

    def note(self, row: ServerRow, key: AttemptKey) -> None:
        """Remember what a server of this key boots from.

        A volume that its server does not take along is somebody's data: it is neither named nor deleted.
        """
        if row.image != "":
            return
        listed = [one for one in (row.volumes or [])[:20] if isinstance(one, dict)]
        ids = [one.get("id") for one in listed if one.get("delete_on_termination") is True]
        self._due.update({one: key for one in ids if isinstance(one, str) and one not in self._marked})
        bound(self._due)

    async def name_some(self) -> None:
        """Mark some of those that are due; one that cannot be marked now comes last in the next call."""
        if not self._client.keys.has("volume"):
            return
        for number, key in list(self._due.items())[:NAMED_MAX]:
            del self._due[number]
            try:
                await self._mark(number, key)
            except ProviderError as exc:
                self._due[number] = key
                if self._refusals.get(number) != str(exc):
                    self._refusals[number] = str(exc)
                    bound(self._refusals)
                    self._services.log.warning(UNNAMED, volume=number, detail=str(exc))
                if not isinstance(exc, AuthFailed):  # it may not answer, and the list waits
                    return
            else:
                self._marked[number] = key
                bound(self._marked)

    async def _mark(self, number: str, key: AttemptKey) -> None:
        """Give a volume without a name the key of the server that boots from it: one with a name is its owner's.

        Raises:
            ProviderError: it may lack its marks still.
        """
        path = f"/volume/volumes/{quote(number, safe='')}"
        answer = await self._client.ask_or_absent("GET", path, what="a volume", attempts=1)
        if answer is None:
            return
        row = answer.get("volume")
        if not isinstance(row, dict) or row.get("id") != number or not row.keys() >= SHOWN:
            raise Unavailable(f"{WHO}'s answer about volume {number} is about none")
        is_ours = row["name"] in ("", None, key) and row["bootable"] in ("true", True)
        if not is_ours or self._is_marked(row, key):
            return
        if not isinstance(row["metadata"], dict):
            raise Unavailable(f"{WHO}'s answer about volume {number} does not show its metadata")
        marks = {**row["metadata"], **marks_of(key, self._services.install)}
        body = {"volume": {"name": key, "metadata": marks}}
        answer = await self._client.ask_or_absent("PUT", path, what="naming a volume", attempts=1, json_body=body)
        if answer is not None and not self._is_marked(answer.get("volume"), key):
            raise Unavailable(f"{WHO}'s answer does not show that volume {number} got its name and metadata")

    def _is_marked(self, raw: Any, key: Any) -> bool:
        """Whether a volume carries this key as its name and in its metadata."""
        metadata = raw.get("metadata") if isinstance(raw, dict) else None
        if not isinstance(metadata, dict) or not isinstance(key, str) or raw.get("name") != key:
            return False
        return marks_of(AttemptKey(key), self._services.install).items() <= metadata.items()

    async def rows(self) -> Sequence[Any]:
        """Return the volumes of the project, as far as they can be listed."""
        if not self._client.keys.has("volume"):
            return ()
        rows, _ = await all_pages(lambda token: self._client.page(VOLUMES, "volumes", token))
        return rows

    def leftover(self, raw: Any) -> Any:
        """Return a volume of ours that nothing holds; `None` for another."""
        is_left = _is_free(raw) and self._is_marked(raw, raw.get("name"))
        return {"id": raw.get("id"), "name": raw.get("name")} if is_left else None

    async def summary(self) -> str:
        """Count the volumes that a failed start may have left, which nothing shows to be ours."""
        count = sum(_is_free(one) and one.get("name") in ("", None) for one in await self.rows())
        return f"{count} without a name are attached to nothing, and may be left of failed starts"


def _is_free(raw: Any) -> bool:
    """Whether a volume is held by nothing."""
    return isinstance(raw, dict) and raw.get("attachments") == [] and raw.get("status") in ("available", "error")
