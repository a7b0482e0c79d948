"""The market's refusals; each is one error on the wire and one leaf of the contract's error tree."""

from __future__ import annotations

from enum import StrEnum


class Refusal(StrEnum):
    """The code on the wire."""

    UNAUTHORISED = "unauthorised"
    NO_OFFER = "no-offer"
    NO_CAPACITY = "no-capacity"
    PRICE_MOVED = "price-moved"
    REJECTED = "rejected"
    QUOTA = "quota"
    NO_MACHINE = "no-machine"
    INTERNAL = "internal"


class Refused(Exception):
    """A refusal of the market, which did nothing."""

    def __init__(self, refusal: Refusal, message: str, *, field: str = "") -> None:
        super().__init__(message)
        self.refusal = refusal
        self.field = field
