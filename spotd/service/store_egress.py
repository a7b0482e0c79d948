"""What reading the checkpoint store costs: as the config states it, or the list price of the store that it names.

List prices of November 2026, in dollars per decimal gigabyte to the internet. The first 100 GB of a month at AWS and
Google, and three times what is stored at Backblaze, are free there; that is not counted, since nothing here knows what
else is read of the account.
"""

from __future__ import annotations

import re
from typing import Final
from urllib.parse import urlsplit

from spotd.config.model import StoreSection
from spotd.core.domain.egress import ELSEWHERE, FREE_EGRESS, StoreEgress
from spotd_providers.contract.money import MicroUsdPerGb
from spotd_providers.contract.values import ProviderName

FREE: Final = MicroUsdPerGb(0)
S3: Final = MicroUsdPerGb(90_000)
S3_TO_OTHER_REGION: Final = MicroUsdPerGb(20_000)
S3_BETWEEN_US_EAST: Final = MicroUsdPerGb(10_000)
GOOGLE: Final = MicroUsdPerGb(120_000)
BACKBLAZE: Final = MicroUsdPerGb(10_000)
LIST_PRICES: Final = (
    ("r2.cloudflarestorage.com", FREE),
    ("backblazeb2.com", BACKBLAZE),
    ("storage.googleapis.com", GOOGLE),
)
"""By the end of the endpoint's name. Of a store that is not recognised nothing is known, and nothing is counted."""
AWS: Final = ProviderName("aws")
_US_EAST: Final = frozenset({"us-east-1", "us-east-2"})
_REGION_OF_ENDPOINT: Final = re.compile(r"s3[.-](?:dualstack\.)?([a-z]{2}(?:-[a-z]+)+-[0-9])\.amazonaws\.com(?:\.cn)?")


def store_egress(section: StoreSection) -> StoreEgress:
    """Return the prices of reading the store that is configured."""
    if not section.is_bucket:
        return FREE_EGRESS
    host = (urlsplit(section.endpoint_url).hostname or "").lower() if section.endpoint_url else ""
    is_aws = not host or _ends_with(host, "amazonaws.com") or _ends_with(host, "amazonaws.com.cn")
    listed = S3 if is_aws else next((price for name, price in LIST_PRICES if _ends_with(host, name)), FREE)
    price = listed if section.egress_per_gb is None else MicroUsdPerGb(section.egress_per_gb)
    if not is_aws or not price:
        return StoreEgress(per_gb=price)
    return StoreEgress(per_gb=price, near=_within_aws(_region(section, host), price))


def _region(section: StoreSection, host: str) -> str:
    """Return the region of the bucket; empty where neither the config nor the endpoint states it."""
    found = _REGION_OF_ENDPOINT.fullmatch(host)
    return found[1] if found else (section.region or "")


def _within_aws(region: str, price: MicroUsdPerGb) -> dict[tuple[ProviderName, str], MicroUsdPerGb]:
    """Return what hosts at AWS pay: nothing in the bucket's own region, less than the internet in every other."""
    near = {(AWS, ELSEWHERE): min(price, S3_TO_OTHER_REGION)}
    if region in _US_EAST:
        near |= {(AWS, one): min(price, S3_BETWEEN_US_EAST) for one in _US_EAST}
    if region:
        near[AWS, region] = FREE
    return near


def _ends_with(host: str, name: str) -> bool:
    return host == name or host.endswith(f".{name}")
