"""The calls to the shop, and which failure means what. Nothing the shop writes is quoted: it may repeat our key."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any, Final, TypeVar

from pydantic import BaseModel, ValidationError

from spotd_providers.contract.errors import (
    AuthFailed,
    NoBalance,
    OfferGone,
    OutcomeUnknown,
    PriceMoved,
    ProviderError,
    QuotaExceeded,
    RateLimited,
    RequestRejected,
    Unavailable,
)
from spotd_providers.contract.provider import Services
from spotd_providers.kit.calls import retry_read
from spotd_providers.kit.http import AnswerLost, Http, HttpAnswer
from spotd_shelf.wire import AccountReply, RentalPage, RentalReply, RentalRow, SlotPage

T = TypeVar("T")
M = TypeVar("M", bound=BaseModel)

WAIT_WITHOUT_ADVICE: Final = timedelta(seconds=10)
PAGES_MAX: Final = 1000

REFUSALS: Final[dict[str, Callable[[], ProviderError]]] = {
    "slot_taken": lambda: OfferGone("this slot was taken by somebody else"),
    "price_moved": lambda: PriceMoved("the slot costs more than was agreed"),
    "no_money": lambda: NoBalance("the shop's account is empty"),
    "too_many_rentals": lambda: QuotaExceeded("the shop lends no more machines to this account"),
}


class ShelfClient:
    """Typed calls over one HTTP client that carries the key."""

    def __init__(self, http: Http, services: Services) -> None:
        self._http = http
        self._clock = services.clock
        self._rng = services.rng

    async def slots(self) -> list[Any]:
        """Raw rows of everything on the shelf."""
        return (await self._read("/v1/slots", SlotPage)).slots

    async def account(self) -> AccountReply:
        """The account."""
        return await self._read("/v1/account", AccountReply)

    async def rentals(self, name: str | None = None) -> list[Any]:
        """Raw rows of every machine of the account, or of those under one name, to the last page."""
        rows: list[Any] = []
        start: int | None = 0
        for _ in range(PAGES_MAX):
            query = f"?from={start}" + (f"&name={name}" if name is not None else "")
            page = await self._read(f"/v1/rentals{query}", RentalPage)
            rows += page.rentals
            start = page.next
            if start is None:
                return rows
        raise Unavailable("the list of rentals has no end")

    async def rent(self, order: dict[str, Any], *, key: str) -> RentalRow:
        """The machine is ours. One request, whatever happens to it.

        Raises:
            OutcomeUnknown: it may be ours.
        """
        try:
            answer = await self._http.send("POST", "/v1/rentals", json_body=order, timeout_s=30.0)
        except AnswerLost as exc:
            raise OutcomeUnknown("the shop's answer to a purchase was lost", key=key) from exc
        if answer.status >= 500:
            raise OutcomeUnknown(f"the shop answered {answer.status} to a purchase", key=key)
        if answer.status >= 400:
            raise self._refusal(answer)
        try:
            return RentalReply.model_validate(answer.json()).rental
        except (ValidationError, Unavailable) as exc:
            raise OutcomeUnknown("the shop's answer to a purchase cannot be read", key=key) from (
                None if isinstance(exc, ValidationError) else exc
            )

    async def give_back(self, number: str) -> None:
        """The shop has the machine back, or never had rented it out."""

        async def call() -> None:
            answer = await self._http.read("DELETE", f"/v1/rentals/{number}")
            if answer.status == 404 and _code(answer) == "no_such_rental":
                return
            self._judge(answer)
            _shaped(answer, RentalReply)

        await self._repeated(call)

    async def _read(self, path: str, shape: type[M]) -> M:
        async def call() -> M:
            answer = await self._http.read("GET", path)
            self._judge(answer)
            return _shaped(answer, shape)

        return await self._repeated(call)

    async def _repeated(self, call: Callable[[], Awaitable[T]]) -> T:
        return await retry_read(call, clock=self._clock, rng=self._rng)

    def _judge(self, answer: HttpAnswer) -> None:
        """Returns for a success.

        Raises:
            AuthFailed, RateLimited, Unavailable: it was none.
        """
        if 200 <= answer.status < 300:
            return
        refusal = self._refusal(answer)
        if isinstance(refusal, AuthFailed | RateLimited):
            raise refusal
        raise Unavailable(f"the shop answered {answer.status}")

    def _refusal(self, answer: HttpAnswer) -> ProviderError:
        if answer.status == 429:
            return RateLimited("the shop asks for patience", retry_after=_advice(answer))
        code = _code(answer)
        if code in REFUSALS:
            return REFUSALS[code]()
        if answer.status in (401, 403):
            return AuthFailed("the shop does not accept the key")
        return RequestRejected(
            f"the shop answered {answer.status}", field="request", reason=f"refused with HTTP {answer.status}"
        )


def _shaped(answer: HttpAnswer, shape: type[M]) -> M:
    try:
        return shape.model_validate(answer.json())
    except ValidationError:
        # Without its cause, which quotes what the shop wrote.
        raise Unavailable("the shop's answer has an unexpected form") from None


def _code(answer: HttpAnswer) -> str:
    try:
        body = answer.json()
    except Unavailable:
        return ""
    code = body.get("error") if isinstance(body, dict) else None
    return code if isinstance(code, str) else ""


def _advice(answer: HttpAnswer) -> timedelta:
    advice = answer.headers.get("retry-after", "")
    return timedelta(seconds=int(advice)) if re.fullmatch(r"\d{1,6}", advice) else WAIT_WITHOUT_ADVICE
