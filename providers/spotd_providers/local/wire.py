"""The answers of the market's server: values of the contract as JSON, parsed strictly."""

from __future__ import annotations

from typing import Annotated, Any, Final

from pydantic import AwareDatetime, FailFast, TypeAdapter

from spotd_providers.contract.values import Instance, Offer, ProviderCharge, ProviderName
from spotd_providers.kit.shapes import Row

PROVIDER: Final = ProviderName("local")
OFFER: Final = TypeAdapter(Offer)
INSTANCE: Final = TypeAdapter(Instance)


class OfferAnswer(Row):
    now: AwareDatetime
    offers: list[Any]


class MachineAnswer(Row):
    """`count` is how many rows the server meant to send."""

    now: AwareDatetime
    count: int
    machines: list[Any]


class ChargeAnswer(Row):
    charges: Annotated[tuple[ProviderCharge, ...], FailFast()]


class LogAnswer(Row):
    lines: Annotated[list[str], FailFast()]


class StatusAnswer(Row):
    now: AwareDatetime
    spec_hash: str
    hosts: int
    machines: int


class ErrorAnswer(Row):
    error: str
    message: str
    field: str = ""
