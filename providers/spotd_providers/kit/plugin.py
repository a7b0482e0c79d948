"""The descriptor of a provider: what an entry point of the group `spotd.providers` names."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from pydantic import BaseModel

from spotd_providers.contract.provider import Provider, ProviderTraits, Services
from spotd_providers.contract.values import Capability, Power, ProviderName
from spotd_providers.kit.boundary import keep_contract

S = TypeVar("S", bound=BaseModel)


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterPlugin(Generic[S]):
    """A `ProviderPlugin` whose settings are a pydantic model."""

    name: ProviderName
    title: str
    settings_model: type[S]
    needs_credential: bool
    traits_by: Callable[[S], ProviderTraits]
    open_by: Callable[[S, Services], AbstractAsyncContextManager[Provider]]

    def traits(self, settings: Any) -> ProviderTraits:
        return self.traits_by(self._validate(settings))

    @asynccontextmanager
    async def open(self, settings: Any, services: Services) -> AsyncIterator[Provider]:
        """Open the provider; every error of it is one of the contract's, whatever went wrong inside."""
        async with self.open_by(self._validate(settings), services) as provider:
            keep_contract(type(provider))
            yield provider

    def _validate(self, settings: Any) -> S:
        return settings if isinstance(settings, self.settings_model) else self.settings_model.model_validate(settings)


def capabilities(*available: Power, missing: Mapping[Power, str]) -> Mapping[Power, Capability]:
    """Declare the powers that are available, and the missing ones with the sentence a user reads."""
    absent = {power: Capability(available=False, reason=reason) for power, reason in missing.items()}
    return {**dict.fromkeys(available, Capability(available=True)), **absent}
