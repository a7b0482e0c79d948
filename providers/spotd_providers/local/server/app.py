"""The market's HTTP API. Every call but `/health` needs the bearer token; `/control` is for tests."""

from __future__ import annotations

import hmac
import time
from collections.abc import Callable
from datetime import datetime
from http import HTTPStatus
from typing import Any, Final, TypeVar

import anyio
import anyio.to_thread
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from spotd_providers.contract.values import (
    AttemptKey,
    Billing,
    HostId,
    Instance,
    InstanceId,
    InstanceRef,
    InstanceState,
    Interruption,
    Market,
    MicroUsd,
    MicroUsdPerGb,
    MicroUsdPerGbMonth,
    MicroUsdPerHour,
    Offer,
    OfferId,
    PoolId,
    ProviderCharge,
)
from spotd_providers.kit.text import begins_like_ours
from spotd_providers.local.hosts import Segment, read_ledger, segments
from spotd_providers.local.market.floor import Disturbance, Machine, Sold
from spotd_providers.local.market.market import LocalMarket, Refused
from spotd_providers.local.settings import Dollars, Duration, Flavour, Refusal
from spotd_providers.local.wire import INSTANCE, OFFER, PROVIDER, ChargeAnswer

# The bodies of requests to the market's server.


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class LaunchBody(_Body):
    key: str = Field(min_length=1, max_length=200)
    install: str = Field(min_length=1, max_length=100)
    offer_id: str
    price_max: int = Field(ge=0, strict=True, description="micro-dollars per hour")
    expires_at: float = Field(description="wall clock, seconds since 1970: not to be done any later")
    image: str
    disk_gb: int = Field(ge=0, strict=True)
    start_script: str
    nodes: int = Field(default=1, ge=1, le=64, strict=True)


class ReplaceBody(_Body):
    ranks: list[int] = Field(max_length=64)
    round: int = Field(ge=1, le=1_000_000, strict=True)
    start_script: str


class DropBody(_Body):
    ranks: list[int] = Field(max_length=64)


class BidBody(_Body):
    price: int = Field(gt=0, strict=True)


class PreemptBody(_Body):
    """One machine, or every machine on a host."""

    machine: str | None = None
    host: str | None = None
    notice: bool | None = None
    lasting: Duration = Field(default="30m", validate_default=True)


class PriceBody(_Body):
    host: str
    price: Dollars
    lasting: Duration


T = TypeVar("T")
B = TypeVar("B", bound=BaseModel)

_BILLED: Final = {
    InstanceState.PENDING: Billing.FULL,
    InstanceState.RUNNING: Billing.FULL,
    InstanceState.PAUSED: Billing.DISK,
}
_STATUS: Final = {
    Refusal.UNAUTHORISED: HTTPStatus.UNAUTHORIZED,
    Refusal.NO_OFFER: HTTPStatus.NOT_FOUND,
    Refusal.NO_CAPACITY: HTTPStatus.CONFLICT,
    Refusal.PRICE_MOVED: HTTPStatus.CONFLICT,
    Refusal.REJECTED: HTTPStatus.UNPROCESSABLE_ENTITY,
    Refusal.QUOTA: HTTPStatus.FORBIDDEN,
    Refusal.NO_MACHINE: HTTPStatus.NOT_FOUND,
    Refusal.INTERNAL: HTTPStatus.INTERNAL_SERVER_ERROR,
}


class MarketApp:
    """The routes, over one market that is touched by one thread at a time.

    Attributes:
        changed, shut_down: called when something changed, and when the server is to end.
    """

    def __init__(self, market: LocalMarket, *, token: str, spec_hash: str = "") -> None:
        self.market = market
        self.changed: Callable[[], None] = lambda: None
        self.shut_down: Callable[[], None] = lambda: None
        self._spec_hash = spec_hash
        self.last_call_s = time.monotonic()
        self._one = anyio.CapacityLimiter(1)
        routes = [
            Route("/health", self._health),
            Route("/v1/status", self._status),
            Route("/v1/offers", self._offers),
            Route("/v1/machines", self._list),
            Route("/v1/machines", self._launch, methods=["POST"]),
            Route("/v1/machines/{machine}", self._terminate, methods=["DELETE"]),
            Route("/v1/machines/{machine}/bid", self._bid, methods=["PUT"]),
            Route("/v1/machines/{machine}/members", self._replace, methods=["PUT"]),
            Route("/v1/machines/{machine}/members", self._drop, methods=["DELETE"]),
            Route("/v1/machines/{machine}/log", self._log),
            Route("/v1/charges", self._charges),
            Route("/control/preempt", self._preempt, methods=["POST"]),
            Route("/control/price", self._price, methods=["POST"]),
            Route("/shutdown", self._shut_down, methods=["POST"]),
        ]
        self.app = Starlette(
            routes=routes,
            middleware=[Middleware(_Guard, token=token, called=self._called)],
            exception_handlers={Refused: _refused, ValidationError: _invalid},
        )

    async def on_market(self, do: Callable[[], T]) -> T:
        """Run `do` in the one thread that may touch the market, and return its result."""
        return await anyio.to_thread.run_sync(do, limiter=self._one)

    def _called(self) -> None:
        self.last_call_s = time.monotonic()

    async def _health(self, _: Request) -> Response:
        return JSONResponse({"market": "spotd-local"})

    async def _status(self, _: Request) -> Response:
        def read() -> dict[str, Any]:
            self.market.advance()
            return {
                "now": self.market.clock.now().isoformat(),
                "spec_hash": self._spec_hash,
                "hosts": len(self.market.hosts),
                "machines": sum(machine.exists for machine in self.market.memory.machines.values()),
            }

        return JSONResponse(await self.on_market(read))

    async def _offers(self, _: Request) -> Response:
        def read() -> dict[str, Any]:
            rows = [_offer(item) for item in self.market.sold()]
            return {"now": self.market.memory.reached.isoformat(), "offers": rows}

        return JSONResponse(await self.on_market(read))

    async def _list(self, request: Request) -> Response:
        install, key = _install(request), request.query_params.get("key")

        def read() -> dict[str, Any]:
            machines = self.market.listing(install=install, key=key)
            rows = [_instance(machine, self.market.bid_floor(machine)) for machine in machines]
            return {"now": self.market.memory.reached.isoformat(), "count": len(rows), "machines": rows}

        return JSONResponse(await self.on_market(read))

    async def _launch(self, request: Request) -> Response:
        body = await _read(request, LaunchBody)
        fields = body.model_dump(exclude={"price_max", "expires_at"})

        def buy() -> Machine:
            price_max = MicroUsdPerHour(body.price_max)
            return self.market.launch(price_max=price_max, expired=lambda: time.time() > body.expires_at, **fields)

        machine = await self.on_market(buy)
        self.changed()
        return JSONResponse(_instance(machine), HTTPStatus.CREATED)

    async def _terminate(self, request: Request) -> Response:
        machine_id, install = request.path_params["machine"], _install(request)
        await self.on_market(lambda: self.market.terminate(machine_id, install=install))
        self.changed()
        return JSONResponse({"ok": True})

    async def _bid(self, request: Request) -> Response:
        body, machine_id, install = await _read(request, BidBody), request.path_params["machine"], _install(request)
        price = MicroUsdPerHour(body.price)
        await self.on_market(lambda: self.market.change_bid(machine_id, install=install, price=price))
        self.changed()
        return JSONResponse({"ok": True})

    async def _replace(self, request: Request) -> Response:
        body, machine_id, install = await _read(request, ReplaceBody), request.path_params["machine"], _install(request)

        def do() -> None:
            self.market.replace_members(
                machine_id, install=install, ranks=body.ranks, number=body.round, start_script=body.start_script
            )

        await self.on_market(do)
        self.changed()
        return JSONResponse({"ok": True})

    async def _drop(self, request: Request) -> Response:
        body, machine_id, install = await _read(request, DropBody), request.path_params["machine"], _install(request)
        await self.on_market(lambda: self.market.drop_members(machine_id, install=install, ranks=body.ranks))
        self.changed()
        return JSONResponse({"ok": True})

    async def _log(self, request: Request) -> Response:
        machine_id, install = request.path_params["machine"], _install(request)
        lines = min(_number(request, "lines", 100), 10_000)

        def read() -> list[str]:
            machine: Machine | None = self.market.memory.machines.get(machine_id)
            if machine is None or not machine.belongs_to(install):
                raise Refused(Refusal.NO_MACHINE, f"there is no machine {machine_id}")
            return self.market.machines.console(machine_id, lines=lines)

        return JSONResponse({"lines": await self.on_market(read)})

    async def _charges(self, request: Request) -> Response:
        install = _install(request)
        since, until = _instant(request, "since"), _instant(request, "until")

        def read() -> ChargeAnswer:
            self.market.advance()
            spans = segments(read_ledger(self.market.ledger.path))
            rows = (_charge(span, since, until) for span in spans if begins_like_ours(span.key, install))
            return ChargeAnswer(charges=tuple(row for row in rows if row is not None))

        return JSONResponse((await self.on_market(read)).model_dump(mode="json"))

    async def _preempt(self, request: Request) -> Response:
        body = await _read(request, PreemptBody)

        def do() -> list[str]:
            victims = [machine for machine in self._targets(body) if machine.occupies]
            for machine in victims:
                self.market.preempt(machine, notice=body.notice, lasting=body.lasting)
            return [machine.machine_id for machine in victims]

        return await self._controlled(do)

    async def _price(self, request: Request) -> Response:
        body = await _read(request, PriceBody)

        def do() -> list[str]:
            if body.host not in self.market.hosts:
                raise Refused(Refusal.REJECTED, f"there is no host {body.host}", field="host")
            start = self.market.memory.reached
            price = MicroUsdPerHour(body.price)
            cause = Disturbance(host=body.host, start=start, end=start + body.lasting, price=price, exact=True)
            self.market.disturb(cause)
            return []

        return await self._controlled(do)

    async def _shut_down(self, _: Request) -> Response:
        await self.on_market(self.market.shut_down)
        self.shut_down()
        return JSONResponse({"ok": True})

    async def _controlled(self, do: Callable[[], list[str]]) -> Response:
        def caught_up() -> list[str]:
            self.market.advance()
            touched = do()
            self.market.advance()
            return touched

        touched = await self.on_market(caught_up)
        self.changed()
        return JSONResponse({"machines": touched})

    def _targets(self, body: PreemptBody) -> list[Machine]:
        existing = [machine for machine in self.market.memory.machines.values() if machine.exists]
        if body.machine is not None:
            existing = [machine for machine in existing if machine.machine_id == body.machine]
        if body.host is not None:
            existing = [machine for machine in existing if machine.host == body.host]
        return existing


class _Guard:
    """The check of the token."""

    def __init__(self, app: ASGIApp, *, token: str, called: Callable[[], None]) -> None:
        self._app = app
        self._called = called
        self._token = f"Bearer {token}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] != "/health":
            given = dict(scope["headers"]).get(b"authorization", b"")
            if not hmac.compare_digest(given, self._token):
                answer = _error(Refusal.UNAUTHORISED, "the market's token is missing or wrong")
                await answer(scope, receive, send)
                return
            self._called()
        await self._app(scope, receive, send)


def _error(refusal: Refusal, message: str, field: str = "") -> JSONResponse:
    return JSONResponse({"error": refusal, "message": message, "field": field}, _STATUS[refusal])


def _refused(_: Request, exc: Exception) -> Response:
    if not isinstance(exc, Refused):
        raise exc
    return _error(exc.refusal, str(exc), exc.field)


def _invalid(_: Request, exc: Exception) -> Response:
    if not isinstance(exc, ValidationError):
        raise exc
    first = exc.errors(include_url=False, include_input=False)[0]
    return _error(Refusal.REJECTED, first["msg"], ".".join(str(part) for part in first["loc"]))


async def _read(request: Request, model: type[B]) -> B:
    return model.model_validate_json(await request.body())


def _install(request: Request) -> str:
    install = request.query_params.get("install", "")
    if not install:
        raise Refused(Refusal.REJECTED, "which install?", field="install")
    return install


def _number(request: Request, name: str, default: int) -> int:
    text = request.query_params.get(name, str(default))
    if not text.isdecimal():
        raise Refused(Refusal.REJECTED, "not a number", field=name)
    return int(text)


def _instant(request: Request, name: str) -> datetime:
    try:
        instant = datetime.fromisoformat(request.query_params.get(name, ""))
    except ValueError:
        instant = None
    if instant is None or instant.tzinfo is None:
        raise Refused(Refusal.REJECTED, "not an instant with its zone", field=name)
    return instant


def _offer(item: Sold) -> Any:
    host, is_spot = item.host, item.kind is Market.SPOT
    is_bid = is_spot and host.flavour is Flavour.SUDDEN
    taken_away = Interruption.SUDDEN if is_bid else Interruption.NOTICE
    offer = Offer(
        provider=PROVIDER,
        offer_id=OfferId(item.offer_id),
        host_id=HostId(host.name),
        pool=PoolId(host.name),
        market=item.kind,
        interruption=taken_away if is_spot else Interruption.NEVER,
        gpu=host.gpu,
        gpu_count=host.gpu_count,
        gpu_vram_mb=host.vram_mb,
        gpu_price=item.price,
        pays_bid=is_bid,
        on_demand_price=MicroUsdPerHour(host.on_demand) if host.on_demand else None,
        storage_price=MicroUsdPerGbMonth(host.storage_gb_month),
        upload_price=MicroUsdPerGb(host.upload_gb),
        download_price=MicroUsdPerGb(host.download_gb),
        region=host.region,
        cpus=host.cpus,
        memory_mb=host.memory_mb,
        disk_gb_max=host.disk_gb_max,
        cuda_max=host.cuda_max,
        reliability=host.reliability,
        upload_mbps=host.upload_mbps,
        download_mbps=host.download_mbps,
        nodes_max=host.slots,
    )
    return OFFER.dump_python(offer, mode="json")


def _instance(machine: Machine, bid_floor: MicroUsdPerHour | None = None) -> Any:
    instance = Instance(
        ref=InstanceRef(provider=PROVIDER, instance_id=InstanceId(machine.machine_id)),
        key=AttemptKey(machine.key),
        state=machine.state,
        market=machine.market,
        host_id=HostId(machine.host),
        price=machine.price,
        created_at=machine.created_at,
        notice_at=machine.doomed_at,
        loss=machine.loss,
        detail=machine.detail,
        bid_floor=bid_floor,
        billing=_BILLED.get(machine.state, Billing.NOTHING),
        ended_at=machine.gone_at,
    )
    return INSTANCE.dump_python(instance, mode="json")


def _charge(span: Segment, since: datetime, until: datetime) -> ProviderCharge | None:
    """Compute the cost of the part of the span inside the window."""
    start = max(span.start, since)
    end = until if span.end is None else min(span.end, until)
    if end <= start:
        return None
    amount = MicroUsd(span.amount(end) - span.amount(start)) if start > span.start else span.amount(end)
    return ProviderCharge(
        key=AttemptKey(span.key),
        instance_id=InstanceId(span.machine_id),
        start=start,
        end=end,
        amount=amount,
        kind="storage" if span.paused else "total",
    )
