"""The account's money, and vast.ai's bill for each machine."""

from __future__ import annotations

import re
from datetime import datetime, timedelta
from typing import Final

from spotd_providers.contract.errors import Unavailable
from spotd_providers.contract.provider import Services
from spotd_providers.contract.values import InstallId, ProviderCharge
from spotd_providers.kit.charges import charges_of, require_few_charges, signed_micro_usd
from spotd_providers.kit.keys import key_of
from spotd_providers.kit.pages import PAGES_MAX
from spotd_providers.kit.shapes import row_or_none
from spotd_providers.vastai.answers import VastRefused
from spotd_providers.vastai.client import VastClient
from spotd_providers.vastai.wire import WHO, ChargeRow, instant

_DAY: Final = timedelta(days=1)
_COUNTED_DAYS: Final = re.compile(r"- (\d{1,4}) days?$")


async def money_left(client: VastClient) -> tuple[int, datetime | None]:
    """Return the spendable micro-dollars (negative for a debt), and the server's clock.

    Raises:
        Unavailable: the account answer states no money.
    """
    try:
        reply, answer = await client.user()
    except VastRefused as exc:
        raise Unavailable(str(exc)) from exc
    left = reply.balance if reply.credit is None else reply.credit
    if left is None:
        raise Unavailable("vast.ai's account answer states neither credit nor balance")
    return signed_micro_usd(left), answer.date


async def charges_between(
    client: VastClient, services: Services, since: datetime, until: datetime
) -> tuple[ProviderCharge, ...]:
    """Return what our machines were billed in a span: one charge per kind (gpu, disk, bwd, bwu), or one `total`."""
    found: list[ProviderCharge] = []
    after: str | None = None
    judged = odd = 0
    for _ in range(PAGES_MAX):
        try:
            page = await client.charge_page(since, until, after=after)
        except VastRefused as exc:
            raise Unavailable(str(exc)) from exc
        judged += len(page.results)
        require_few_charges(judged, who=WHO)
        for raw in page.results:
            row = row_or_none(ChargeRow, raw)
            if row is None:
                odd += 1
            else:
                found.extend(as_charges(row, services.install))
        if not page.next_token or page.next_token == after:
            break
        after = page.next_token
    if odd:
        services.log.warning("vast.charge_unreadable", rows=odd)
    return tuple(found)


def as_charges(row: ChargeRow, install: InstallId) -> list[ProviderCharge]:
    """Translate one row; no charges for machines that are not ours. The parts are used only if they add up."""
    key = key_of(row.metadata.label if row.metadata else None, install)
    contract = row.source.removeprefix("instance-")
    if key is None or not contract.isdecimal():
        return []
    start, end = instant(row.start), instant(row.end)
    if start is None or end is None:
        return []
    if _counts_last_day(row.description or "", start, end):
        end += _DAY
    parts = [(item.type, item.amount) for item in row.items]
    return charges_of(key, contract, start, end, total=row.amount, parts=parts, rounding=0.01, currency=row.currency)


def _counts_last_day(description: str, start: datetime, end: datetime) -> bool:
    """Whether `end` names the last day, which is in the row: `Instance 12345678 Charges - 4 days`."""
    found = _COUNTED_DAYS.search(description)
    if found is None or start.timestamp() % _DAY.total_seconds() or (end - start) % _DAY:
        return False
    return int(found[1]) == (end - start) // _DAY + 1
