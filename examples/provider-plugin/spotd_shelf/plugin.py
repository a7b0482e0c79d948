"""How spotd finds, configures and opens this provider: the entry point names `PLUGIN`."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from datetime import timedelta
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from spotd_providers.contract.errors import AuthFailed
from spotd_providers.contract.provider import Provider, ProviderTraits, Services
from spotd_providers.contract.values import ProviderName
from spotd_providers.kit.http import open_http
from spotd_shelf.client import ShelfClient
from spotd_shelf.provider import START_SCRIPT_BYTES_MAX, ShelfProvider
from spotd_shelf.translate import NAME


class ShelfSettings(BaseModel):
    """What a user may write under `[providers.shelf]`, beside the keys common to all providers."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    base_url: str = Field(default="http://127.0.0.1:8901", description="where the shop answers")


class ShelfPlugin:
    """The descriptor; it holds no state."""

    @property
    def name(self) -> ProviderName:
        return NAME

    @property
    def title(self) -> str:
        return "The Shelf"

    @property
    def settings_model(self) -> type[Any]:
        return ShelfSettings

    @property
    def needs_credential(self) -> bool:
        return True

    def traits(self, settings: ShelfSettings) -> ProviderTraits:
        return ProviderTraits(
            start_script_bytes_max=START_SCRIPT_BYTES_MAX,
            # Thirty seconds for the purchase, and the shop's list may be a minute late.
            reconcile_window=timedelta(seconds=120),
            hosts_share_filesystem="//127.0.0.1" in settings.base_url,
        )

    def open(self, settings: ShelfSettings, services: Services) -> AbstractAsyncContextManager[Provider]:
        return _open(settings, services)


@asynccontextmanager
async def _open(settings: ShelfSettings, services: Services) -> AsyncIterator[Provider]:
    if services.credential is None:
        raise AuthFailed("the shop needs a key: set [providers.shelf] api_key")
    headers = {"authorization": f"Bearer {services.credential}"}
    async with open_http(settings.base_url, headers=headers) as http:
        yield ShelfProvider(ShelfClient(http, services), services)


PLUGIN = ShelfPlugin()
