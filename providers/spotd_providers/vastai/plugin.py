"""The descriptor of vast.ai."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Final

from spotd_providers.contract.errors import AuthFailed
from spotd_providers.contract.provider import Provider, ProviderTraits, Services
from spotd_providers.contract.values import Market
from spotd_providers.kit.http import open_http
from spotd_providers.kit.plugin import AdapterPlugin
from spotd_providers.kit.settings import is_loopback
from spotd_providers.vastai.client import SEARCHES_PER_MINUTE, VastClient
from spotd_providers.vastai.launching import SCRIPT_CHARS_MAX
from spotd_providers.vastai.offers import PROVIDER
from spotd_providers.vastai.provider import VastProvider
from spotd_providers.vastai.settings import VastSettings

# The bill is reported to exceed the listed price by up to a fifth; the vendor's pages do not confirm it, so it is the
# careful default, to be replaced by what the account's own charges say.
DEFAULT_FEE_MULTIPLIER: Final = "1.20"
REQUEST_TIMEOUT_S: Final = 30.0


def _traits(settings: VastSettings) -> ProviderTraits:
    return ProviderTraits(
        start_script_bytes_max=SCRIPT_CHARS_MAX,
        # Large images take long on a marketplace host's line; launchers in the field give up after this long.
        provision_timeout=timedelta(minutes=30),
        offers_every_min=len(Market) * timedelta(minutes=1) / SEARCHES_PER_MINUTE,  # a search for each
        hosts_share_filesystem=is_loopback(settings.base_url),
        default_fee_multiplier=DEFAULT_FEE_MULTIPLIER,
        ends_itself_by="vast",
        ends_itself_at=settings.base_url,
        bills_from_running=True,
        bills_from_script=True,
    )


@asynccontextmanager
async def _open(settings: VastSettings, services: Services) -> AsyncIterator[Provider]:
    if not services.credential:
        raise AuthFailed('vast.ai needs an API key: api_key = { env = "VAST_API_KEY" } under [providers.vast]')
    headers = {"authorization": f"Bearer {services.credential}", "accept": "application/json"}
    async with (
        open_http(settings.base_url, headers=headers, timeout_s=REQUEST_TIMEOUT_S) as http,
        open_http(settings.base_url, timeout_s=REQUEST_TIMEOUT_S) as keyless,
    ):
        client = VastClient(http, keyless=keyless, clock=services.clock, rng=services.rng)
        yield VastProvider(client, settings, services)


PLUGIN: Final = AdapterPlugin(
    name=PROVIDER,
    title="vast.ai",
    settings_model=VastSettings,
    needs_credential=True,
    traits_by=_traits,
    open_by=_open,
)
