"""How the daemon finds and opens the local market."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from datetime import timedelta
from typing import Any, Final

from spotd_providers.contract.provider import Provider, ProviderTraits, Services
from spotd_providers.contract.values import ProviderName
from spotd_providers.kit.http import open_http
from spotd_providers.local.client import REQUEST_TIMEOUT_S, MarketClient
from spotd_providers.local.market.market import START_SCRIPT_BYTES_MAX
from spotd_providers.local.provider import LocalProvider
from spotd_providers.local.settings import LocalSettings
from spotd_providers.local.translate import PROVIDER

# The market shares our computer: it refuses a launch that arrives after the request's own time-out, so beyond the lag
# of its lists only the time for one answer has to pass.
_RECONCILE: Final = timedelta(seconds=5)


class LocalPlugin:
    """The descriptor behind the entry point."""

    @property
    def name(self) -> ProviderName:
        return PROVIDER

    @property
    def title(self) -> str:
        return "local market"

    @property
    def settings_model(self) -> type[Any]:
        return LocalSettings

    @property
    def needs_credential(self) -> bool:
        return False

    def traits(self, settings: Any) -> ProviderTraits:
        settings = settings if isinstance(settings, LocalSettings) else LocalSettings.model_validate(settings)
        return ProviderTraits(
            start_script_bytes_max=START_SCRIPT_BYTES_MAX,
            reconcile_window=_RECONCILE + settings.list_lag,
            provision_timeout=timedelta(minutes=5) + settings.provisioning,
            hosts_share_filesystem=True,
            ends_itself_by="file",
        )

    def open(self, settings: Any, services: Services) -> AbstractAsyncContextManager[Provider]:
        settings = settings if isinstance(settings, LocalSettings) else LocalSettings.model_validate(settings)
        return _opened(settings, services)


@asynccontextmanager
async def _opened(settings: LocalSettings, services: Services) -> AsyncIterator[Provider]:
    # The server's port is known once it runs, so every call carries its own address.
    async with open_http("http://127.0.0.1", timeout_s=REQUEST_TIMEOUT_S) as http:
        yield LocalProvider(MarketClient(http, settings, services), services)


PLUGIN: Final = LocalPlugin()
