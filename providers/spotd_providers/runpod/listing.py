"""The pods that RunPod lists as ours, and whether the list is complete.

Absence is only ever concluded from a complete listing, so everything doubtful makes it incomplete: a later page that
fails or is promised without a cursor, a cursor that repeats, a row that cannot be attributed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import anyio

from spotd_providers.contract.errors import ProviderError
from spotd_providers.contract.provider import Services
from spotd_providers.contract.values import Instance, InstanceId, InstanceState, Listing, Loss
from spotd_providers.kit.console import CONSOLE_LINES, start_complaint
from spotd_providers.kit.keys import key_of
from spotd_providers.kit.pages import PAGES_MAX, Page, all_pages
from spotd_providers.kit.shapes import row_or_none
from spotd_providers.kit.text import clean
from spotd_providers.runpod.answers import says
from spotd_providers.runpod.client import RunpodClient
from spotd_providers.runpod.pod_keys import PodKeys
from spotd_providers.runpod.pods import IMAGE_FAILURE_WORDS, as_instance, unreadable
from spotd_providers.runpod.wire import PodRow

PULL_SUSPECT_AFTER: Final = timedelta(minutes=6)
LOG_READ_EVERY: Final = timedelta(minutes=5)
SYSTEM_LINES: Final = 50
CONSOLE_SUSPECT_AFTER: Final = timedelta(minutes=2)


class PodListing:
    """Listings of one account, with what was learned from them so far.

    Attributes:
        ours: pods that carry our name, which may be deleted without another read.
    """

    def __init__(self, client: RunpodClient, services: Services, pod_keys: PodKeys) -> None:
        self._client = client
        self._services = services
        self._pod_keys = pod_keys
        self.ours: set[InstanceId] = set()
        self._image_checks: dict[str, tuple[datetime, str]] = {}
        self._started: dict[str, datetime] = {}
        self._console_due: set[str] = set()
        self._complaints: dict[str, str] = {}

    def own(self, instance: Instance) -> None:
        self.ours.add(instance.ref.instance_id)
        self._pod_keys.record(instance.ref.instance_id, instance.key)

    async def read(self) -> Listing:
        """Return every machine under our install label, all pages.

        Raises:
            AuthFailed, RateLimited, Unavailable: the first page could not be read.
        """

        async def page(cursor: str | None) -> Page:
            answer = await self._client.pod_page(cursor=cursor)
            following = answer.pagination
            return answer.pods, following.cursor or "" if following is not None and following.goes_on else None

        raw, whole = await all_pages(page)
        rows: dict[str, Instance] = {}
        complete = self._attribute(raw, rows) and whole
        for instance in rows.values():
            self.own(instance)
        at = self._services.clock.now()
        return Listing(instances=await self._explain_losses(tuple(rows.values())), complete=complete, at=at)

    async def _explain_losses(self, instances: Sequence[Instance]) -> tuple[Instance, ...]:
        """Explain all at once: each may have to read a log, and no loss may wait for the logs of the others."""
        found: dict[int, Instance] = {}

        async def explain(number: int, instance: Instance) -> None:
            found[number] = await self._explain_loss(instance)

        async with anyio.create_task_group() as group:
            for number, instance in enumerate(instances):
                group.start_soon(explain, number, instance, name=f"runpod.explain:{instance.ref.instance_id}")
        return tuple(found[number] for number in range(len(instances)))

    def _attribute(self, page: Sequence[Any], rows: dict[str, Instance]) -> bool:
        """Add the machines that are ours to `rows`; return whether every row could be attributed."""
        whole = True
        for raw in page:
            row = row_or_none(PodRow, raw)
            name = raw.get("name") if isinstance(raw, dict) else None
            key = key_of(name, self._services.install)
            if row is not None and key is not None:
                rows[row.id] = as_instance(row, key)
                self._note_start(row)
            elif row is None and isinstance(raw, dict) and key is not None and _is_id(raw.get("id")):
                rows.setdefault(raw["id"], unreadable(raw["id"], key))
            elif row is None or not isinstance(name, str):
                whole = False
        return whole

    def _note_start(self, row: PodRow) -> None:
        """Mark its console to be read, if the pod stopped, was restarted, or is a few minutes old.

        RunPod starts a container whose process ends again and again and calls it RUNNING all the time.
        """
        before = self._started.get(row.id, row.started_at)
        if row.started_at is not None:
            self._started[row.id] = row.started_at
        stopped = (row.status or "").strip().upper() == "EXITED"
        settled = row.created_at is not None and self._services.clock.now() - row.created_at > CONSOLE_SUSPECT_AFTER
        if before != row.started_at or (row.id not in self._complaints and (stopped or settled)):
            self._console_due.add(row.id)

    async def _start_complaint(self, pod_id: str) -> str:
        """Return the error that spotd's own start script reported on this pod, if any."""
        if pod_id in self._console_due and not self._complaints.get(pod_id):
            self._console_due.discard(pod_id)
            try:
                lines = await self._client.log_lines(pod_id, source="container", lines=CONSOLE_LINES)
            except ProviderError:
                lines = []
            self._complaints[pod_id] = start_complaint(lines)
        return self._complaints.get(pod_id, "")

    async def _explain_loss(self, instance: Instance) -> Instance:
        """Set the loss of a machine whose image cannot start our script or cannot be pulled."""
        complaint = await self._start_complaint(instance.ref.instance_id)
        if complaint and instance.state is not InstanceState.GONE:
            return replace(instance, state=InstanceState.PAUSED, loss=Loss.IMAGE_ERROR, detail=complaint)
        late = (
            instance.state is InstanceState.PENDING
            and instance.created_at is not None
            and self._services.clock.now() - instance.created_at > PULL_SUSPECT_AFTER
        )
        if late or instance.loss is Loss.PROVISION_FAILED:
            complaint = await self._image_complaint(instance.ref.instance_id)
            if complaint:
                return replace(instance, state=InstanceState.PAUSED, loss=Loss.IMAGE_ERROR, detail=complaint)
        return instance

    async def _image_complaint(self, pod_id: str) -> str:
        """Return the line of the host's log that names the image as the fault, if any. RunPod itself waits for ever."""
        now = self._services.clock.now()
        at, complaint = self._image_checks.get(pod_id, (datetime.min.replace(tzinfo=UTC), ""))
        if complaint or now - at < LOG_READ_EVERY:
            return complaint
        try:
            lines = await self._client.log_lines(pod_id, source="system", lines=SYSTEM_LINES)
        except ProviderError:
            lines = []
        complaint = next((clean(line) for line in reversed(lines) if says(line, IMAGE_FAILURE_WORDS)), "")
        if len(self._image_checks) > PAGES_MAX:
            self._image_checks.clear()
        self._image_checks[pod_id] = (now, complaint)
        return complaint


def _is_id(value: Any) -> bool:
    return isinstance(value, str) and 0 < len(value) <= 128
