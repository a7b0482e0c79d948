"""The account's money: what is left, and what vast.ai billed for each machine."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any, Final

from spotd_providers.contract.errors import Unavailable
from spotd_providers.contract.money import MicroUsd, micro_usd
from spotd_providers.contract.provider import Services
from spotd_providers.contract.values import InstallId, InstanceId, ProviderCharge
from spotd_providers.kit.keys import key_of
from spotd_providers.vastai.answers import VastRefused
from spotd_providers.vastai.client import VastClient
from spotd_providers.vastai.wire import ChargeRow, charge_row

PAGES_MAX: Final = 400


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
    return _signed(left), answer.date


async def charges_between(
    client: VastClient, services: Services, since: datetime, until: datetime
) -> tuple[ProviderCharge, ...]:
    """Return what our machines were billed in a span: one charge per kind (gpu, disk, bwd, bwu), or one `total`."""
    found: list[ProviderCharge] = []
    after: str | None = None
    for _ in range(PAGES_MAX):
        try:
            page = await client.charge_page(since, until, after=after)
        except VastRefused as exc:
            raise Unavailable(str(exc)) from exc
        for raw in page.results:
            found.extend(_charges_of(raw, services))
        if not page.next_token or page.next_token == after:
            break
        after = page.next_token
    return tuple(found)


def _charges_of(raw: Any, services: Services) -> list[ProviderCharge]:
    row = charge_row(raw)
    if row is None:
        services.log.warning("vast.charge_unreadable")
        return []
    return as_charges(row, services.install)


def as_charges(row: ChargeRow, install: InstallId) -> list[ProviderCharge]:
    """Translate one row; no charges for machines that are not ours. The parts are used only if they add up."""
    key = key_of(row.metadata.label if row.metadata else None, install)
    contract = row.source.removeprefix("instance-")
    if key is None or not contract.isdecimal():
        return []
    adds_up = abs(sum(item.amount for item in row.items) - row.amount) <= max(0.01, abs(row.amount) / 1000)
    parts = [(item.type, item.amount) for item in row.items] if row.items and adds_up else [("total", row.amount)]
    try:
        start, end = datetime.fromtimestamp(row.start, UTC), datetime.fromtimestamp(row.end, UTC)
    except (ValueError, OverflowError, OSError):
        return []
    return [
        ProviderCharge(
            key=key,
            instance_id=InstanceId(contract),
            start=start,
            end=end,
            amount=MicroUsd(_signed(amount)),
            kind=kind,
        )
        for kind, amount in parts
    ]


def _signed(amount: float) -> int:
    """Micro-dollars of a figure that may be a debt or a refund, rounded away from zero."""
    return micro_usd(amount) if amount >= 0 else -micro_usd(-amount)
