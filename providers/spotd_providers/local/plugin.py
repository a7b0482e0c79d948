"""The descriptor of the local market."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Final

from spotd_providers.contract.provider import Provider, ProviderTraits, Services
from spotd_providers.kit.http import open_http
from spotd_providers.kit.plugin import AdapterPlugin
from spotd_providers.local.client import REQUEST_TIMEOUT_S, MarketClient
from spotd_providers.local.market.market import START_SCRIPT_BYTES_MAX
from spotd_providers.local.provider import LocalProvider
from spotd_providers.local.settings import LocalSettings
from spotd_providers.local.wire import PROVIDER

# The market shares our computer: it refuses a launch that arrives after the request's own time-out, so beyond the lag
# of its lists only the time for one answer has to pass.
_RECONCILE: Final = timedelta(seconds=5)


def _traits(settings: LocalSettings) -> ProviderTraits:
    return ProviderTraits(
        start_script_bytes_max=START_SCRIPT_BYTES_MAX,
        reconcile_window=_RECONCILE + settings.list_lag,
        provision_timeout=timedelta(minutes=5) + settings.provisioning,
        hosts_share_filesystem=True,
        runs_images=False,
        ends_itself_by="file",
        bill_open_for=timedelta(0),
    )


@asynccontextmanager
async def _open(settings: LocalSettings, services: Services) -> AsyncIterator[Provider]:
    # The server's port is known once it runs, so every call carries its own address.
    async with open_http("http://127.0.0.1", timeout_s=REQUEST_TIMEOUT_S) as http:
        yield LocalProvider(MarketClient(http, settings, services), services)


PLUGIN: Final = AdapterPlugin(
    name=PROVIDER,
    title="local market",
    settings_model=LocalSettings,
    needs_credential=False,
    traits_by=_traits,
    open_by=_open,
)
