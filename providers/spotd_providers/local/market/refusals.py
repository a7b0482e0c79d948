"""Why the market says no; each becomes one error on the wire and one leaf of the contract's error tree."""

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
    """The market did nothing of what was asked."""

    def __init__(self, refusal: Refusal, message: str, *, field: str = "") -> None:
        super().__init__(message)
        self.refusal = refusal
        self.field = field
