"""The charges of our pods, from RunPod's own billing records."""

from __future__ import annotations

from datetime import datetime

from spotd_providers.contract.money import MicroUsd, micro_usd
from spotd_providers.contract.provider import Logger
from spotd_providers.contract.values import InstanceId, ProviderCharge
from spotd_providers.runpod.client import RunpodClient
from spotd_providers.runpod.pod_keys import PodKeys
from spotd_providers.runpod.wire import BillingRow, billing_row


async def charges_between(
    client: RunpodClient, pod_keys: PodKeys, log: Logger, since: datetime, until: datetime
) -> tuple[ProviderCharge, ...]:
    """Return what our pods were billed, hour by hour: one charge per kind (gpu, cpu, disk), or one `total`."""
    found: list[ProviderCharge] = []
    for raw in (await client.billing(since, until)).records:
        row = billing_row(raw)
        if row is None:
            log.warning("runpod.charge_unreadable")
        else:
            found.extend(as_charges(row, pod_keys))
    return tuple(found)


def as_charges(row: BillingRow, pod_keys: PodKeys) -> list[ProviderCharge]:
    """Translate one record; no charges for pods that were not ours. The parts are used only if they add up."""
    key = pod_keys.key_of(row.pod)
    if key is None:
        return []
    parts = [(kind, amount) for kind, amount in (("gpu", row.gpu), ("cpu", row.cpu), ("disk", row.disk)) if amount]
    adds_up = abs(sum(amount for _, amount in parts) - row.total) <= max(1e-6, abs(row.total) / 1000)
    return [
        ProviderCharge(
            key=key,
            instance_id=InstanceId(row.pod),
            start=row.start,
            end=row.end,
            amount=MicroUsd(_signed(amount)),
            kind=kind,
        )
        for kind, amount in (parts if parts and adds_up else [("total", row.total)])
    ]


def _signed(amount: float) -> int:
    """Micro-dollars of a figure that may be a refund, rounded away from zero."""
    return micro_usd(amount) if amount >= 0 else -micro_usd(-amount)
