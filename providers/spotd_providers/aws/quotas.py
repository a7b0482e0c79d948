"""The account's limits: vCPUs of a family of types in a region, on spot and on-demand apart.

A new account has none for GPUs. A limit that is used up is no lack of capacity: every other type of its family is
refused in that region too, in every zone, while other families, regions and the other market are not touched by it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from spotd_providers.contract.values import Market, QuotaId

SPOT_QUOTAS: Final[Mapping[str, str]] = {"G": "L-3819A6DF", "P2-P4": "L-7212CCBC", "P5": "L-C4BD4855"}
ON_DEMAND_QUOTAS: Final[Mapping[str, str]] = {"G": "L-DB2E81BA", "P": "L-417A185B"}
"""What Service Quotas calls them. AWS's pages do not agree on which spot quota P6 counts against."""
_NAME: Final = re.compile(r"([a-z]+)([0-9]*)")


def family_of(instance_type: str, market: Market) -> str:
    """Return the quota family whose vCPUs this type takes; types without GPUs keep their own letters."""
    found = _NAME.match(instance_type)
    letters, generation = (found[1], found[2]) if found is not None else (instance_type, "")
    if letters in {"g", "gr", "vt"}:
        return "G"
    if letters != "p":
        return letters.upper()
    if market is Market.ON_DEMAND:
        return "P"
    return "P2-P4" if generation in {"2", "3", "4"} else f"P{generation}"


def family_quota(instance_type: str, region: str, market: Market) -> QuotaId:
    """Return the vCPU quota that a launch of this type counts against."""
    return QuotaId(f"{region} {market.value} {family_of(instance_type, market)} vCPUs")


def region_quota(region: str) -> QuotaId:
    """Return the quota of volumes, their operations and addresses, which every launch in the region counts against."""
    return QuotaId(f"{region} volumes and addresses")
