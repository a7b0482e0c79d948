"""The whole catalogue, read in parts: one request for each cloud and size of machine.

The account's minute of requests can end between two parts, above all when it is polled often or machines come and go.
A missing part is then taken from an earlier poll, so that no cloud drops out of the market only because it was read
last; and the part that was read longest ago is read first.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

from spotd_providers.contract.errors import AuthFailed, ProviderError
from spotd_providers.contract.provider import Services
from spotd_providers.contract.values import Offer, Rejected
from spotd_providers.runpod.client import RunpodClient
from spotd_providers.runpod.offers import offers_of
from spotd_providers.runpod.settings import RunpodSettings

PART_AGE_MAX: Final = timedelta(seconds=90)
"""List prices move in weeks and stock in minutes; and a create that finds neither only costs one request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CataloguePart:
    """The offers of one cloud in one size."""

    at: datetime
    offers: tuple[Offer, ...]
    rejected: tuple[Rejected, ...]


class GpuCatalogue:
    """Every size on every cloud, as far as it was read lately."""

    def __init__(self, client: RunpodClient, settings: RunpodSettings, services: Services) -> None:
        self._client = client
        self._settings = settings
        self._services = services
        self._parts: dict[tuple[str, int], CataloguePart] = {}

    async def refresh(self) -> ProviderError | None:
        """Read every part; returns the error of the first that failed, at which it stops.

        Raises:
            AuthFailed: the key is refused. ProviderError: no part at all could be read.
        """
        names = [(cloud, count) for cloud in self._settings.clouds for count in self._settings.gpu_counts]
        never = datetime.min.replace(tzinfo=self._services.clock.now().tzinfo)
        names.sort(key=lambda name: self._parts[name].at if name in self._parts else never)
        for number, (cloud, count) in enumerate(names):
            try:
                rows = await self._client.gpus(cloud=cloud, count=count, cuda_min=self._settings.cuda_min)
            except AuthFailed:
                raise
            except ProviderError as exc:
                if number == 0:
                    raise
                return exc
            good, bad = offers_of(rows.rows, cloud, count, self._settings)
            self._parts[cloud, count] = CataloguePart(
                at=self._services.clock.now(), offers=tuple(good), rejected=(*rows.rejected, *bad)
            )
        return None

    def recent(self) -> tuple[list[Offer], list[Rejected]]:
        """Return the offers and rejected rows that are not too old, in an order independent of that of reading."""
        offers: list[Offer] = []
        rejected: list[Rejected] = []
        now = self._services.clock.now()
        for name in sorted(self._parts):
            part = self._parts[name]
            if now - part.at <= PART_AGE_MAX:
                offers.extend(part.offers)
                rejected.extend(part.rejected)
        return offers, rejected
