"""A toy shop that rents out what stands on a shelf: an HTTP API over a TOML file, and a ledger in memory.

It runs nothing; it is here to be bought from. `python -m spotd_shelf.shop shelf.toml` serves it on loopback.
"""

from __future__ import annotations

import hmac
import sys
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

PAGE_ROWS = 25


@dataclass(slots=True, kw_only=True)
class Slot:
    """A place on the shelf; `usd_per_gpu_hour` may be changed while the shop is open."""

    name: str
    gpu: str
    gpus: int
    vram_mb: int
    usd_per_gpu_hour: float
    interruptible: bool


@dataclass(slots=True, kw_only=True)
class Rental:
    """One machine somebody took home; `usd_per_hour` is for the whole machine."""

    number: str
    slot: str
    name: str
    owner: str
    usd_per_hour: float
    interruptible: bool
    image: str
    disk_gb: int
    start: str
    since: datetime
    state: str = "up"
    until: datetime | None = None

    @property
    def exists(self) -> bool:
        return self.state not in ("returned", "reclaimed", "ended")


@dataclass(slots=True, kw_only=True)
class Refusal(Exception):
    """A purchase that was not made."""

    status: int
    code: str


@dataclass(slots=True, kw_only=True)
class Shop:
    """Stock, customers and rentals."""

    slots: list[Slot]
    keys: dict[str, str]
    """API key -> customer."""
    now: Callable[[], datetime] = lambda: datetime.now(UTC)
    balance_usd: float = 100.0
    rentals_max: int = 100
    rentals: dict[str, Rental] = field(default_factory=dict)
    _numbers: count[int] = field(default_factory=lambda: count(1000))

    def free(self) -> list[Slot]:
        """Slots that are not rented."""
        taken = {rental.slot for rental in self.rentals.values() if rental.exists}
        return [slot for slot in self.slots if slot.name not in taken]

    def rent(self, owner: str, order: dict[str, Any]) -> Rental:
        """The slot is the customer's.

        Raises:
            Refusal: it is not, and nothing was recorded.
        """
        slot = next((slot for slot in self.free() if slot.name == order["slot"]), None)
        if slot is None:
            raise Refusal(status=409, code="slot_taken")
        price = slot.usd_per_gpu_hour * slot.gpus
        if price > order["usd_per_hour_max"]:
            raise Refusal(status=409, code="price_moved")
        if self.balance_usd <= 0:
            raise Refusal(status=402, code="no_money")
        if sum(rental.exists and rental.owner == owner for rental in self.rentals.values()) >= self.rentals_max:
            raise Refusal(status=403, code="too_many_rentals")
        return self.add_rental(owner=owner, slot=slot, price=price, order=order)

    def add_rental(self, *, owner: str, slot: Slot, price: float, order: dict[str, Any]) -> Rental:
        """Record the rental, which is billed from now on."""
        rental = Rental(
            number=f"r-{next(self._numbers)}",
            slot=slot.name,
            name=order["name"],
            owner=owner,
            usd_per_hour=price,
            interruptible=slot.interruptible,
            image=order["image"],
            disk_gb=order["disk_gb"],
            start=order["start"],
            since=self.now(),
        )
        self.rentals[rental.number] = rental
        return rental

    def end(self, rental: Rental, state: str) -> None:
        """The rental costs nothing any more."""
        if rental.exists:
            rental.state, rental.until = state, self.now()

    def bill_usd(self, rental: Rental) -> float:
        """What a rental cost up to now."""
        return rental.usd_per_hour * ((rental.until or self.now()) - rental.since).total_seconds() / 3600

    def listed(self, owner: str) -> list[Rental]:
        """What a customer is shown, oldest first."""
        return [rental for rental in self.rentals.values() if rental.owner == owner]

    def slot_rows(self) -> list[dict[str, Any]]:
        """The shelf as the API shows it."""
        return [
            {
                "slot": slot.name,
                "gpu": slot.gpu,
                "gpus": slot.gpus,
                "vram_mb": slot.vram_mb,
                "usd_per_gpu_hour": slot.usd_per_gpu_hour,
                "interruptible": slot.interruptible,
            }
            for slot in self.free()
        ]

    def rental_row(self, rental: Rental) -> dict[str, Any]:
        """A rental as the API shows it."""
        return {
            "number": rental.number,
            "slot": rental.slot,
            "name": rental.name,
            "usd_per_hour": rental.usd_per_hour,
            "interruptible": rental.interruptible,
            "since": rental.since.isoformat(),
            "state": rental.state,
        }


def read_stock(path: Path) -> list[Slot]:
    """The slots a TOML file describes."""
    with path.open("rb") as stream:
        return [Slot(**row) for row in tomllib.load(stream)["slot"]]


def shop_app(shop: Shop) -> Starlette:
    """The shop's HTTP API."""

    def customer(request: Request) -> str:
        given = request.headers.get("authorization", "").removeprefix("Bearer ")
        for key, owner in shop.keys.items():
            if hmac.compare_digest(given.encode(), key.encode()):
                return owner
        raise Refusal(status=401, code="unknown_key")

    async def slots(request: Request) -> Response:
        customer(request)
        return JSONResponse({"slots": shop.slot_rows()})

    async def rent(request: Request) -> Response:
        owner = customer(request)
        rental = shop.rent(owner, await request.json())
        return JSONResponse({"rental": shop.rental_row(rental)}, status_code=201)

    async def rentals(request: Request) -> Response:
        owner = customer(request)
        name = request.query_params.get("name")
        rows = [r for r in shop.listed(owner) if name is None or r.name == name]
        first = int(request.query_params.get("from", "0"))
        page = rows[first : first + PAGE_ROWS]
        more = first + PAGE_ROWS if len(rows) > first + PAGE_ROWS else None
        return JSONResponse({"rentals": [shop.rental_row(r) for r in page], "next": more})

    async def give_back(request: Request) -> Response:
        owner = customer(request)
        rental = shop.rentals.get(request.path_params["number"])
        if rental is None or rental.owner != owner:
            raise Refusal(status=404, code="no_such_rental")
        shop.end(rental, "returned")
        return JSONResponse({"rental": shop.rental_row(rental)})

    async def account(request: Request) -> Response:
        owner = customer(request)
        return JSONResponse({"customer": owner, "balance_usd": shop.balance_usd})

    async def refused(_: Request, refusal: Exception) -> Response:
        if not isinstance(refusal, Refusal):
            raise refusal
        return JSONResponse({"error": refusal.code}, status_code=refusal.status)

    routes: Sequence[Route] = [
        Route("/v1/slots", slots),
        Route("/v1/rentals", rentals, methods=["GET"]),
        Route("/v1/rentals", rent, methods=["POST"]),
        Route("/v1/rentals/{number}", give_back, methods=["DELETE"]),
        Route("/v1/account", account),
    ]
    return Starlette(routes=routes, exception_handlers={Refusal: refused})


def main() -> None:
    """The shop is open on 127.0.0.1:8901 until interrupted; its one key is `open-sesame`."""
    import uvicorn

    shop = Shop(slots=read_stock(Path(sys.argv[1])), keys={"open-sesame": "me"})
    uvicorn.run(shop_app(shop), host="127.0.0.1", port=8901)


if __name__ == "__main__":
    main()
