"""The descriptor of RunPod."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

from spotd_providers.contract.errors import AuthFailed
from spotd_providers.contract.provider import Provider, ProviderTraits, Services
from spotd_providers.kit.http import open_http
from spotd_providers.kit.plugin import AdapterPlugin
from spotd_providers.kit.settings import is_loopback
from spotd_providers.runpod.client import RunpodClient
from spotd_providers.runpod.launching import SCRIPT_BYTES_MAX
from spotd_providers.runpod.offers import PROVIDER
from spotd_providers.runpod.provider import RunpodProvider
from spotd_providers.runpod.settings import RunpodSettings

REQUEST_TIMEOUT_S: Final = 30.0
USER_AGENT: Final = "spotd/0.1 (+runpod)"
"""RunPod's edge answers 403 to the default agents of scripting libraries."""


def _traits(settings: RunpodSettings) -> ProviderTraits:
    return ProviderTraits(
        start_script_bytes_max=SCRIPT_BYTES_MAX,
        hosts_share_filesystem=is_loopback(settings.base_url),
        ends_itself_by="runpod",
        ends_itself_at=settings.base_url,
    )


@asynccontextmanager
async def _open(settings: RunpodSettings, services: Services) -> AsyncIterator[Provider]:
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


PLUGIN: Final = AdapterPlugin(
    name=PROVIDER,
    title="RunPod",
    settings_model=RunpodSettings,
    needs_credential=True,
    traits_by=_traits,
    open_by=_open,
)
