"""The charges of our pods, from RunPod's own billing records."""

from __future__ import annotations

from datetime import datetime

from spotd_providers.contract.provider import Logger
from spotd_providers.contract.values import ProviderCharge
from spotd_providers.kit.charges import charges_of, require_few_charges
from spotd_providers.kit.shapes import row_or_none
from spotd_providers.runpod.client import RunpodClient
from spotd_providers.runpod.pod_keys import PodKeys
from spotd_providers.runpod.wire import WHO, BillingRow


async def charges_between(
    client: RunpodClient, pod_keys: PodKeys, log: Logger, since: datetime, until: datetime
) -> tuple[ProviderCharge, ...]:
    """Return what our pods were billed, hour by hour: one charge per kind (gpu, cpu, disk), or one `total`."""
    found: list[ProviderCharge] = []
    odd = 0
    records = (await client.billing(since, until)).records
    require_few_charges(len(records), who=WHO)
    for raw in records:
        row = row_or_none(BillingRow, raw)
        if row is None:
            odd += 1
        else:
            found.extend(as_charges(row, pod_keys))
    if odd:
        log.warning("runpod.charge_unreadable", rows=odd)
    return tuple(found)


def as_charges(row: BillingRow, pod_keys: PodKeys) -> list[ProviderCharge]:
    """Translate one record; no charges for pods that were not ours. The parts are used only if they add up."""
    key = pod_keys.key_of(row.pod)
    if key is None:
        return []
    parts = [(kind, amount) for kind, amount in (("gpu", row.gpu), ("cpu", row.cpu), ("disk", row.disk)) if amount]
    return charges_of(
        key, row.pod, row.start, row.end, total=row.total, parts=parts, rounding=1e-6, currency=row.currency
    )
