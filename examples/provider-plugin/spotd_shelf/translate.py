"""From the shop's words to the contract's: pure functions, and the only place that knows both."""

from __future__ import annotations

from datetime import UTC
from typing import Any, Final

from pydantic import ValidationError

from spotd_providers.contract.gpus import canonical
from spotd_providers.contract.values import (
    AttemptKey,
    HostId,
    Instance,
    InstanceId,
    InstanceRef,
    InstanceState,
    Interruption,
    Loss,
    Market,
    MicroUsdPerHour,
    Offer,
    OfferId,
    PoolId,
    ProviderName,
    Rejected,
    micro_usd,
)
from spotd_shelf.wire import RentalRow, SlotRow

NAME: Final = ProviderName("shelf")

STATES: Final[dict[str, tuple[InstanceState, Loss | None]]] = {
    "starting": (InstanceState.PENDING, None),
    "up": (InstanceState.RUNNING, None),
    # A machine that cannot start is kept, and billed, until it is given back.
    "broken": (InstanceState.PAUSED, Loss.PROVISION_FAILED),
    "reclaimed": (InstanceState.GONE, Loss.PREEMPTED),
    "returned": (InstanceState.GONE, None),
    "ended": (InstanceState.GONE, Loss.SELF),
}


def offer_of(raw: Any) -> Offer | Rejected:
    """An offer priced for the whole machine, or why there is none."""
    try:
        row = SlotRow.model_validate(raw)
        price = MicroUsdPerHour(micro_usd(row.usd_per_gpu_hour) * row.gpus)
    except ValidationError as exc:
        # Names of fields only: their values are untrusted text.
        fields = sorted({str(error["loc"][0]) for error in exc.errors() if error["loc"]})
        slot = raw.get("slot") if isinstance(raw, dict) else None
        return Rejected(offer_id=str(slot)[:80], reason=f"malformed: {', '.join(fields) or 'not an object'}")
    return Offer(
        provider=NAME,
        offer_id=OfferId(row.slot),
        host_id=HostId(row.slot),
        pool=PoolId(row.slot),
        market=Market.SPOT if row.interruptible else Market.ON_DEMAND,
        interruption=Interruption.SUDDEN if row.interruptible else Interruption.NEVER,
        gpu=canonical(NAME, row.gpu, row.vram_mb),
        gpu_count=row.gpus,
        gpu_vram_mb=row.vram_mb,
        gpu_price=price,
        region="shelf",
    )


def instance_of(row: RentalRow) -> Instance:
    """One machine; a state that the shop never documented is UNKNOWN, never gone."""
    state, loss = STATES.get(row.state, (InstanceState.UNKNOWN, None))
    return Instance(
        ref=InstanceRef(provider=NAME, instance_id=InstanceId(row.number)),
        key=AttemptKey(row.name),
        state=state,
        market=Market.SPOT if row.interruptible else Market.ON_DEMAND,
        host_id=HostId(row.slot),
        price=MicroUsdPerHour(micro_usd(row.usd_per_hour)),
        created_at=row.since.astimezone(UTC),
        loss=loss,
    )
