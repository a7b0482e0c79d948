"""From catalogue rows to offers: pure translation, no calls.

RunPod sells no single machines: an offer is (GPU type, count, cloud), placed by its scheduler wherever there is room.
The catalogue's price is for ONE GPU and for the whole cloud; a machine costs that times its count. Its disk is extra,
traffic is free. `availability` is for the very count and cloud asked for; `NONE` is no offer. It is no promise: stock
that is shown can be gone, or spread over hosts none of which has enough of it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from spotd_providers.contract.gpus import canonical
from spotd_providers.contract.money import (
    MicroUsdPerGbMonth,
    MicroUsdPerGpuHour,
    MicroUsdPerHour,
    micro_usd,
    whole_machine,
)
from spotd_providers.contract.values import (
    Interruption,
    Market,
    Offer,
    OfferId,
    PoolId,
    ProviderName,
    Rejected,
)
from spotd_providers.runpod.settings import RunpodSettings
from spotd_providers.runpod.wire import GpuRow, price_of

PROVIDER: Final = ProviderName("runpod")
DISK_PRICE: Final = MicroUsdPerGbMonth(100_000)
"""Container disk, $/GB/month, only while the pod runs. Documented, and in no answer of the API."""
IN_STOCK: Final = frozenset({"LOW", "MEDIUM", "HIGH"})


_CREATED_AS: Final = {"NVIDIA RTX PRO 4500 Blackwell Server Edition": "NVIDIA RTX PRO 4500 Blackwell"}
"""Ids of the catalogue that a create does not know, and what it calls the same."""


def create_id(gpu: str) -> str:
    """Return the id by which a create knows this GPU of the catalogue."""
    return _CREATED_AS.get(gpu, gpu)


def offers_of(
    rows: Iterable[GpuRow], cloud: str, count: int, settings: RunpodSettings
) -> tuple[list[Offer], list[Rejected]]:
    """Translate every row to a priced offer, or reject it with the reason that a user reads."""
    offers: list[Offer] = []
    rejected: list[Rejected] = []
    for row in rows:
        price = price_of(row, cloud)
        reason = price if isinstance(price, str) else _not_sold(row, cloud, count, settings)
        if reason is not None or isinstance(price, str):
            rejected.append(Rejected(offer_id=offer_id(row.id, count, cloud), reason=reason or ""))
            continue
        offers.append(_offer(row, cloud, count, MicroUsdPerGpuHour(micro_usd(price)), settings))
    return offers, rejected


def offer_id(gpu: str, count: int, cloud: str) -> str:
    """Name an offer, the same as long as the same thing is sold."""
    return f"{gpu.replace(' ', '_')}:{count}:{cloud.lower()}"


def _offer(row: GpuRow, cloud: str, count: int, price: MicroUsdPerGpuHour, settings: RunpodSettings) -> Offer:
    machine = MicroUsdPerHour(whole_machine(price, count))
    name = offer_id(row.id, count, cloud)
    places = _places(row, settings)
    memory_mb = round(row.memory * 1024) or None
    return Offer(
        provider=PROVIDER,
        offer_id=OfferId(name),
        pool=PoolId(name),
        market=Market.ON_DEMAND,
        interruption=Interruption.NEVER,
        gpu=canonical(PROVIDER, create_id(row.id), memory_mb),
        gpu_count=count,
        gpu_vram_mb=memory_mb,
        gpu_price=machine,
        on_demand_price=machine,
        storage_price=DISK_PRICE,
        region=places[0] if len(places) == 1 else "",
        cuda_max=_cuda_max(row),
        extra={"gpu": create_id(row.id), "cloud": cloud},
    )


def _not_sold(row: GpuRow, cloud: str, count: int, settings: RunpodSettings) -> str | None:
    """Return why this GPU cannot be had on this cloud in this number, or should not."""
    if row.id == "unknown":
        return "RunPod does not know which GPU this is"
    offered = row.secure if cloud == "SECURE" else row.community
    if offered is False:
        return f"not offered on the {cloud.title()} cloud"
    if not settings.amd and (row.manufacturer or "").upper() == "AMD":
        return "an AMD GPU (providers.runpod.amd)"
    most = (row.max_count or {}).get(cloud.lower())
    if isinstance(most, int) and not isinstance(most, bool) and most < count:
        return f"at most {most} of it in one pod"
    if row.availability == "NONE":
        return "none in stock now"
    if row.availability not in IN_STOCK:
        return "availability: RunPod does not say whether there is any"
    if settings.data_centers and not _places(row, settings):
        return "none in stock in your data centres (providers.runpod.data_centers)"
    return None


def _places(row: GpuRow, settings: RunpodSettings) -> tuple[str, ...]:
    """Return the data centres that have some now, among those that may be used."""
    allowed = frozenset(settings.data_centers)
    stocked = (place.id for place in row.data_centers or () if place.availability in IN_STOCK)
    return tuple(place for place in stocked if not allowed or place in allowed)


def _cuda_max(row: GpuRow) -> str | None:
    versions = [item.version for item in row.cuda_versions or () if item.available]
    return max(versions, key=lambda version: tuple(map(int, version.split("."))), default=None)
