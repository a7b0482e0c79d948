"""The body of a purchase, and the meaning of its refusal."""

from __future__ import annotations

from typing import Any, Final

from spotd_providers.contract.errors import (
    NoBalance,
    NoCapacity,
    OfferGone,
    PriceMoved,
    ProviderError,
    QuotaExceeded,
    RequestRejected,
    Unavailable,
)
from spotd_providers.contract.money import MICRO
from spotd_providers.contract.values import LaunchRequest, Market
from spotd_providers.kit.answers import rejected
from spotd_providers.vastai.answers import VastRefused
from spotd_providers.vastai.offers import DISK_GB_MIN
from spotd_providers.vastai.wire import WHO

SHELL: Final = "/bin/sh"
ARGUMENTS_CHARS_MAX: Final = 4096
SCRIPT_CHARS_MAX: Final = ARGUMENTS_CHARS_MAX - len(SHELL) - len("-c")
LABEL_CHARS_MAX: Final = 256
IMAGE_CHARS_MAX: Final = 1024
BID_USD_MIN: Final = 0.001
BID_USD_MAX: Final = 128.0


def request_body(request: LaunchRequest) -> tuple[int, dict[str, Any]]:
    """Build the purchase: the ask to buy, and the body.

    `price` makes it a bid; without it vast.ai silently sells on-demand. `cancel_unavail` makes an unavailable GPU an
    error where the default for bids is a stopped contract that bills. `onstart` carries the entrypoint in this style.

    Raises:
        RequestRejected: it can not be asked for.
    """
    ask = request.offer.extra.get("ask", "")
    if not ask.isdecimal():
        raise rejected(WHO, "offer", "it is not an offer of vast.ai")
    size = len(request.start_script)
    if size > SCRIPT_CHARS_MAX:
        raise rejected(WHO, "start_script", f"it has {size} of at most {SCRIPT_CHARS_MAX} characters")
    if len(request.key) > LABEL_CHARS_MAX:
        raise rejected(WHO, "key", f"a label has at most {LABEL_CHARS_MAX} characters")
    if not request.image or len(request.image) > IMAGE_CHARS_MAX:
        raise rejected(WHO, "image", f"an image name has 1 to {IMAGE_CHARS_MAX} characters")
    body: dict[str, Any] = {
        "client_id": "me",
        "image": request.image,
        "disk": max(request.disk_gb, DISK_GB_MIN),
        "label": request.key,
        "runtype": "args",
        "onstart": SHELL,
        "args": ["-c", request.start_script],
        "user": "root",
        "env": {},
        "cancel_unavail": True,
    }
    if request.offer.market is Market.SPOT:
        price = request.price_max / MICRO
        if not BID_USD_MIN <= price <= BID_USD_MAX:
            raise rejected(WHO, "price_max", f"vast.ai takes bids from ${BID_USD_MIN} to ${BID_USD_MAX:.0f} per hour")
        body["price"] = price
    return int(ask), body


def refusal_of_purchase(refused: VastRefused, market: Market) -> ProviderError:
    """Translate a refused purchase into an error of the contract; nothing was bought."""
    said = refused.detail or refused.code or f"HTTP {refused.status}"
    words = f"{refused.code} {refused.detail}".lower()
    if "no_such_ask" in words or "no longer available" in words or "is not available" in words:
        return OfferGone(f"vast.ai no longer sells this offer: {said}")
    if "spend_rate" in words or "spend rate" in words:
        return QuotaExceeded(f"vast.ai limits how fast this account may spend: {said}")
    if refused.status == 402 or "credit" in words or "balance" in words:
        return NoBalance(f"the vast.ai account has no credit: {said}")
    if refused.code == "invalid_price" or ("bid" in words and "low" in words):
        return PriceMoved(f"vast.ai did not take the price: {said}")
    if refused.status in (404, 410):
        return OfferGone(f"vast.ai no longer sells this offer: {said}")
    if refused.status in (200, 409) and market is Market.SPOT:
        return PriceMoved(f"vast.ai did not take the bid: {said}")
    if refused.status in (200, 409):
        return NoCapacity(f"vast.ai could not place the machine: {said}")
    if 400 <= refused.status < 500:
        return RequestRejected(
            f"vast.ai refused the request: {said}", field="request", reason=refused.code or str(refused.status)
        )
    return Unavailable(f"vast.ai refused the request: {said}")
