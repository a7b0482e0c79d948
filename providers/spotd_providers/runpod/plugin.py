"""How the daemon finds and opens RunPod."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from datetime import timedelta
from typing import Any, Final

from spotd_providers.contract.errors import AuthFailed
from spotd_providers.contract.provider import Provider, ProviderTraits, Services
from spotd_providers.contract.values import ProviderName
from spotd_providers.kit.http import open_http
from spotd_providers.kit.urls import is_loopback
from spotd_providers.runpod.client import RunpodClient
from spotd_providers.runpod.launching import SCRIPT_BYTES_MAX
from spotd_providers.runpod.offers import PROVIDER
from spotd_providers.runpod.provider import RunpodProvider
from spotd_providers.runpod.settings import RunpodSettings

REQUEST_TIMEOUT_S: Final = 30.0
USER_AGENT: Final = "spotd/0.1 (+runpod)"
"""RunPod's edge answers 403 to the default agents of scripting libraries."""


class RunpodPlugin:
    """The descriptor behind the entry point."""

    @property
    def name(self) -> ProviderName:
        return PROVIDER

    @property
    def title(self) -> str:
        return "RunPod"

    @property
    def settings_model(self) -> type[Any]:
        return RunpodSettings

    @property
    def needs_credential(self) -> bool:
        return True

    def traits(self, settings: Any) -> ProviderTraits:
        settings = settings if isinstance(settings, RunpodSettings) else RunpodSettings.model_validate(settings)
        return ProviderTraits(
            start_script_bytes_max=SCRIPT_BYTES_MAX,
            reconcile_window=timedelta(seconds=180),
            # RunPod itself waits for ever for an image that cannot be pulled.
            provision_timeout=timedelta(minutes=20),
            quote_ttl=timedelta(minutes=5),
            hosts_share_filesystem=is_loopback(settings.base_url),
            # No platform fee is documented; traffic is free and the disk is priced on its own.
            default_fee_multiplier="1.00",
            ends_itself_by="runpod",
            ends_itself_at=settings.base_url,
        )

    def open(self, settings: Any, services: Services) -> AbstractAsyncContextManager[Provider]:
        settings = settings if isinstance(settings, RunpodSettings) else RunpodSettings.model_validate(settings)
        return _opened(settings, services)


@asynccontextmanager
async def _opened(settings: RunpodSettings, services: Services) -> AsyncIterator[Provider]:
    if not services.credential:
        raise AuthFailed('RunPod needs an API key: api_key = { env = "RUNPOD_API_KEY" } under [providers.runpod]')
    headers = {
        "authorization": f"Bearer {services.credential}",
        "accept": "application/json",
        "user-agent": USER_AGENT,
    }
    async with open_http(settings.base_url, headers=headers, timeout_s=REQUEST_TIMEOUT_S) as http:
        client = RunpodClient(http, clock=services.clock, rng=services.rng)
        yield RunpodProvider(client, settings, services)


PLUGIN: Final = RunpodPlugin()
