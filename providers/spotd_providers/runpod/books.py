"""The account's money: what is left (GraphQL), and what RunPod's own books say each pod cost (v2)."""

from __future__ import annotations

from datetime import datetime
from typing import Final

from spotd_providers.contract.errors import Unavailable
from spotd_providers.contract.money import MicroUsd, MicroUsdPerHour, micro_usd
from spotd_providers.contract.provider import Logger
from spotd_providers.contract.values import Balance, Charge, InstanceId
from spotd_providers.runpod.answers import RunpodRefused
from spotd_providers.runpod.client import RunpodClient
from spotd_providers.runpod.graphql import Graph
from spotd_providers.runpod.memory import PodMemory
from spotd_providers.runpod.wire import BillingRow, Myself, billing_row, shaped

ACCOUNT: Final = "query { myself { clientBalance currentSpendPerHr spendLimit } }"


async def account(graph: Graph) -> Myself:
    """The money of the account.

    Raises:
        NotSupported: GraphQL is gone. Unavailable: it states no money.
    """
    try:
        data = await graph.ask(ACCOUNT)
    except RunpodRefused as exc:
        raise Unavailable(f"RunPod does not tell the balance: {exc.detail or exc.status}") from exc
    return shaped(Myself, data.get("myself"), what="the account")


def as_balance(myself: Myself) -> Balance:
    """What is left; a debt is shown as nothing left."""
    burn = None if myself.spend is None or myself.spend < 0 else MicroUsdPerHour(micro_usd(myself.spend))
    return Balance(available=MicroUsd(micro_usd(max(0.0, myself.balance))), burn=burn)


async def charges_between(
    client: RunpodClient, memory: PodMemory, log: Logger, since: datetime, until: datetime
) -> tuple[Charge, ...]:
    """What our pods were billed in a span, hour by hour: one charge per kind (gpu, cpu, disk), or one `total`."""
    found: list[Charge] = []
    for raw in (await client.billing(since, until)).records:
        row = billing_row(raw)
        if row is None:
            log.warning("runpod.charge_unreadable")
        else:
            found.extend(as_charges(row, memory))
    return tuple(found)


def as_charges(row: BillingRow, memory: PodMemory) -> list[Charge]:
    """The charges of one record; none for pods that were not ours. The parts are used only if they add up."""
    key = memory.key_of_pod(row.pod)
    if key is None:
        return []
    parts = [(kind, amount) for kind, amount in (("gpu", row.gpu), ("cpu", row.cpu), ("disk", row.disk)) if amount]
    adds_up = abs(sum(amount for _, amount in parts) - row.total) <= max(1e-6, abs(row.total) / 1000)
    return [
        Charge(
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
