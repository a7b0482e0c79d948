"""What is known of one provider of the config, whether it opened or not."""

from __future__ import annotations

from dataclasses import dataclass

from spotd.daemon.market.pollers import Poller
from spotd_providers.contract.provider import Provider, ProviderTraits
from spotd_providers.contract.values import ProviderName


@dataclass(frozen=True, slots=True, kw_only=True)
class ProviderEntry:
    """One provider of the config. `provider` is `None` for one that is disabled or did not open: see `last_error`."""

    name: ProviderName
    title: str
    enabled: bool
    fee_ppm: int
    provider: Provider | None = None
    poller: Poller | None = None
    traits: ProviderTraits | None = None
    last_error: str = ""
