"""The machines that vast.ai lists as ours, and whether the list is complete.

Absence is only ever concluded from a complete listing, so everything doubtful makes it incomplete: a later page that
fails, a page token that repeats, fewer rows than vast.ai says there are, a row that can not be attributed.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from spotd_providers.contract.errors import ProviderError, Unavailable
from spotd_providers.contract.provider import Services
from spotd_providers.contract.values import (
    AttemptKey,
    Instance,
    InstanceId,
    InstanceState,
    Listing,
    Loss,
    Market,
)
from spotd_providers.kit.console import CONSOLE_LINES, start_complaint
from spotd_providers.kit.keys import key_of
from spotd_providers.kit.pages import Page, all_pages
from spotd_providers.kit.shapes import row_or_none
from spotd_providers.vastai.answers import VastRefused
from spotd_providers.vastai.billing import money_left
from spotd_providers.vastai.client import VastClient
from spotd_providers.vastai.instances import as_instance, ref_of, unreadable
from spotd_providers.vastai.wire import InstanceRow

CREDIT_AGE_MAX: Final = timedelta(minutes=1)
_STOPPED_SOMEHOW: Final = frozenset({Loss.OUTBID, Loss.HOST_LOST})


class InstanceListing:
    """Listings of one account, with what was learned from them so far.

    Attributes:
        ours: contracts that carry our label, which may be destroyed without another read.
    """

    def __init__(
        self, client: VastClient, services: Services, *, console: Callable[[int, int], Awaitable[Sequence[str]]]
    ) -> None:
        self._client = client
        self._services = services
        self._console = console
        self._complaints: dict[InstanceId, str] = {}
        self.ours: set[InstanceId] = set()
        self._bought_at: dict[InstanceId, datetime] = {}
        self._unverified: dict[AttemptKey, Market] = {}
        self._credit_gone = (False, datetime.min.replace(tzinfo=UTC))

    def own(self, contract: int) -> None:
        """Record that this contract was bought here, now."""
        machine = ref_of(contract).instance_id
        self.ours.add(machine)
        self._bought_at[machine] = self._services.clock.now()

    def own_row(self, row: InstanceRow, key: AttemptKey) -> Instance:
        """Translate a row of ours to a machine."""
        bought_at = self._bought_at.get(ref_of(row.id).instance_id)
        return as_instance(row, key, now=self._services.clock.now(), bought_at=bought_at)

    def verify_later(self, key: AttemptKey, wanted: Market) -> None:
        """Check, when this machine is first listed, that it is of the market that was paid for."""
        self._unverified[key] = wanted

    async def read(self, label: str | None) -> Listing:
        """Return every machine under our install label (and this label, if given), all pages.

        Raises:
            AuthFailed, RateLimited, Unavailable: not even the first page came.
        """
        total: int | None = None

        async def page(after: str | None) -> Page:
            nonlocal total
            try:
                answer = await self._client.instance_page(label=label, after=after)
            except VastRefused as exc:
                raise Unavailable(str(exc)) from exc
            total = answer.total_instances
            return answer.instances, answer.next_token or None

        raw, whole = await all_pages(page)
        rows: dict[int, Instance] = {}
        seen: set[int] = set()
        complete = self._attribute(raw, rows, seen) and whole
        if label is None and total is not None and len(seen) < total:
            complete = False
        found = await self._apply_findings(tuple(rows.values()))
        self.ours.update(instance.ref.instance_id for instance in found)
        return Listing(instances=found, complete=complete, at=self._services.clock.now())

    def _attribute(self, page: Sequence[Any], rows: dict[int, Instance], seen: set[int]) -> bool:
        """Add the machines that are ours to `rows`; return whether every row could be attributed."""
        whole = True
        for raw in page:
            row = row_or_none(InstanceRow, raw)
            if row is not None:
                seen.add(row.id)
                key = key_of(row.label, self._services.install)
                if key is not None:
                    rows[row.id] = self.own_row(row, key)
                continue
            fields = raw if isinstance(raw, dict) else {}
            contract, label = fields.get("id"), fields.get("label")
            key = key_of(label, self._services.install)
            if isinstance(contract, int) and not isinstance(contract, bool) and 0 < contract < 2**53:
                seen.add(contract)
                if key is not None:
                    rows.setdefault(contract, unreadable(contract, key))
                    continue
            if key is not None or not isinstance(label, str):
                whole = False
        return whole

    async def _apply_findings(self, found: tuple[Instance, ...]) -> tuple[Instance, ...]:
        """Work three late findings into the machines.

        An empty account, an image that cannot start our script, and a bid that was sold on-demand.
        """
        if any(_stopped_somehow(i) for i in found) and await self._is_out_of_credit():
            found = tuple(
                replace(i, loss=Loss.BALANCE, detail="the account has no credit left") if _stopped_somehow(i) else i
                for i in found
            )
        return tuple([await self._verify_market(await self._explain_loss(instance)) for instance in found])

    async def _explain_loss(self, instance: Instance) -> Instance:
        """Read why a container ended by itself: in an image without Python only its console says so."""
        if instance.loss is not Loss.SELF:
            return instance
        machine = instance.ref.instance_id
        if machine not in self._complaints:
            try:
                self._complaints[machine] = start_complaint(await self._console(int(machine), CONSOLE_LINES))
            except ProviderError:
                self._complaints[machine] = ""
        complaint = self._complaints[machine]
        return replace(instance, loss=Loss.IMAGE_ERROR, detail=complaint) if complaint else instance

    async def _verify_market(self, instance: Instance) -> Instance:
        wanted = self._unverified.get(instance.key)
        if wanted is None or instance.market is None:
            return instance
        if instance.market is wanted:
            del self._unverified[instance.key]
            return instance
        detail = f"sold {instance.market.value} though {wanted.value} was asked for"
        self._services.log.error("vast.wrong_purchase", key=instance.key, reason=detail)
        try:
            await self._client.destroy(int(instance.ref.instance_id))
        except ProviderError:
            return replace(instance, detail=detail)  # the next listing tries again
        return replace(instance, state=InstanceState.ENDING, loss=Loss.PROVISION_FAILED, detail=detail)

    async def _is_out_of_credit(self) -> bool:
        gone, at = self._credit_gone
        now = self._services.clock.now()
        if now - at < CREDIT_AGE_MAX:
            return gone
        try:
            left, _ = await money_left(self._client)
        except ProviderError:
            return False
        self._credit_gone = (left <= 0, now)
        return left <= 0


def _stopped_somehow(instance: Instance) -> bool:
    return instance.state is InstanceState.PAUSED and instance.loss in _STOPPED_SOMEHOW
