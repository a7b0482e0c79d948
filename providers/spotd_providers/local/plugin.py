"""The descriptor of the local market."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from datetime import datetime, timedelta
from http import HTTPStatus
from pathlib import Path
from typing import Any, Final, TypeVar, Unpack

import anyio
from pydantic import BaseModel, ValidationError

from spotd_providers.contract.errors import AuthFailed, ContractViolation, OutcomeUnknown, ProviderError, Unavailable
from spotd_providers.contract.provider import Provider, ProviderTraits, Services
from spotd_providers.contract.values import (
    AttemptKey,
    Capability,
    CheckLine,
    Instance,
    InstanceRef,
    InstanceState,
    Launched,
    LaunchRequest,
    Listing,
    MicroUsdPerHour,
    OfferPage,
    OfferQuery,
    Power,
    ProviderCharge,
)
from spotd_providers.kit.boundary import AdapterPlugin, capabilities
from spotd_providers.kit.calls import BlockingCalls, judge_apart, retry_read
from spotd_providers.kit.http import AnswerLost, Http, HttpAnswer, RequestOptions, open_http
from spotd_providers.kit.shapes import require_few_values
from spotd_providers.kit.text import write_atomically
from spotd_providers.local.hosts import HostClock, measure, read_clock, write_clock
from spotd_providers.local.settings import (
    START_SCRIPT_BYTES_MAX,
    LocalSettings,
    ServedEndpoint,
    find_endpoint,
    spec_hash,
)
from spotd_providers.local.wire import (
    PROVIDER,
    ChargeAnswer,
    LogAnswer,
    MachineAnswer,
    OfferAnswer,
    StatusAnswer,
    as_error,
    as_instance,
    as_listing,
    as_page,
)

# The start of the market's server: detached, so that it outlives its starter.


START_TIMEOUT_S: Final = 20.0
_CLOCK_DRIFT_REAL_S: Final = 2.0
_PASSED_ON: Final = ("PATH", "HOME", "LANG", "TMPDIR", "PYTHONPATH", "VIRTUAL_ENV", "LD_LIBRARY_PATH")
"""No other variable of ours reaches the server, since its machines must not see our secrets."""


def spec_text(settings: LocalSettings) -> str:
    """Return the market's specification as its server reads it."""
    return settings.market().model_dump_json()


def start_server(folder: Path, settings: LocalSettings, clock: HostClock) -> ServedEndpoint:
    """Start a server of this market unless one runs, and wait until it serves.

    Raises:
        Unavailable: it does not come up; the message says why.
    """
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    write_atomically(folder / "spec.json", spec_text(settings))
    _agree_on_time(folder / "clock.json", clock)
    reader, writer = os.pipe()
    try:
        try:
            _spawn(folder, writer, idle_exit=settings.idle_exit)
        finally:
            os.close(writer)
        word = _one_line(reader)
    except subprocess.TimeoutExpired as exc:
        raise Unavailable(f"the local market does not start within {START_TIMEOUT_S:.0f} s") from exc
    finally:
        os.close(reader)
    endpoint = find_endpoint(folder)
    if word.startswith("error: ") or endpoint is None:
        raise Unavailable(f"the local market does not start: {word or 'no word from it'} (see {folder / 'server.log'})")
    return endpoint


def clocks_agree(ours: HostClock, theirs: HostClock) -> bool:
    """Whether two clocks show the same instant, as far as a couple of real seconds."""
    an_hour = timedelta(hours=1)
    return (
        abs(ours.real_seconds(an_hour) / theirs.real_seconds(an_hour) - 1) < 1e-6
        and abs(ours.real_seconds(ours.now() - theirs.now())) < _CLOCK_DRIFT_REAL_S
    )


def _agree_on_time(file: Path, clock: HostClock) -> None:
    """Give the server this clock; a file that agrees with it already is left alone."""
    if file.exists():
        try:
            if clocks_agree(clock, read_clock(file)):
                return
        except ValueError:
            pass  # unreadable: ours replaces it
    write_clock(file, measure(clock))


def _spawn(folder: Path, ready: int, *, idle_exit: timedelta) -> None:
    with (folder / "server.log").open("ab") as log:
        # It detaches itself, so what we wait for here is only its first process.
        subprocess.run(
            [
                sys.executable,
                "-P",
                "-m",
                "spotd_providers.local.server",
                "--detach",
                "--dir",
                str(folder),
                "--ready-fd",
                str(ready),
                "--idle-exit",
                str(idle_exit.total_seconds()),
            ],
            cwd=folder,
            env={name: os.environ[name] for name in _PASSED_ON if name in os.environ},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            pass_fds=[ready],
            start_new_session=True,
            check=False,
            timeout=START_TIMEOUT_S,
        )


def _one_line(reader: int) -> str:
    """Return the server's first line; empty if it died or wrote nothing in time."""
    text = b""
    while not text.endswith(b"\n"):
        if not select.select([reader], [], [], START_TIMEOUT_S)[0]:
            return ""
        part = os.read(reader, 4096)
        if not part:
            return ""
        text += part
    word = json.loads(text)
    return word if isinstance(word, str) else ""


# Calls to the market's server, which is started when the first of them finds none.


A = TypeVar("A", bound=BaseModel)
REQUEST_TIMEOUT_S: Final = 15.0


class MarketClient:
    """One customer's connection to one market."""

    def __init__(self, http: Http, settings: LocalSettings, services: Services) -> None:
        self._http = http
        self._settings = settings
        self._services = services
        self.folder: Path = settings.directory or services.state_dir
        self._threads = BlockingCalls(1)
        self._starting = anyio.Lock()
        self._endpoint: ServedEndpoint | None = None

    async def read(self, answer_type: type[A], path: str, params: Mapping[str, str | int] | None = None) -> A:
        """Send a read, repeated a few times on failure, and validate its answer.

        Raises:
            Unavailable, RateLimited, AuthFailed, RequestRejected: as the market says.
        """

        async def once() -> A:
            answer = await self._try("GET", path, params=params)
            _require_ok(answer)
            try:
                require_few_values(answer.body)
                return answer_type.model_validate_json(answer.body)
            except ValueError as exc:
                raise Unavailable(f"the local market's answer to {path} has an unknown shape") from exc

        return await retry_read(once, clock=self._services.clock, rng=self._services.rng)

    async def change(self, method: str, path: str, *, params: Mapping[str, str | int], body: Any = None) -> None:
        """Send a change that the caller may safely repeat; return once it is accepted."""
        answer = await self._try(method, path, params=params, json_body=body)
        _require_ok(answer)
        if answer.json() != {"ok": True}:
            raise Unavailable("the local market does not say that it did what was asked")

    async def buy(self, body: Mapping[str, Any], *, key: AttemptKey) -> Any:
        """Send one launch, once.

        Raises:
            OutcomeUnknown: there is no answer that says what happened.
        """
        body = {**body, "expires_at": time.time() + REQUEST_TIMEOUT_S}
        try:
            answer = await self._send("POST", "/v1/machines", json_body=body)
        except AnswerLost as exc:
            raise OutcomeUnknown(f"the local market's answer was lost: {exc}", key=key) from exc
        if answer.status >= 500:
            raise OutcomeUnknown(f"the local market answers HTTP {answer.status} to a launch", key=key)
        if answer.status >= 300:
            raise as_error(answer) or OutcomeUnknown(f"HTTP {answer.status} without a reason", key=key)
        try:
            return answer.json()
        except Unavailable as exc:
            raise OutcomeUnknown(f"the answer to a launch is unreadable: {exc}", key=key) from exc

    async def _try(self, method: str, path: str, **options: Unpack[RequestOptions]) -> HttpAnswer:
        """Send a call that may be repeated.

        Raises:
            Unavailable: no whole answer.
        """
        try:
            return await self._send(method, path, **options)
        except AnswerLost as exc:
            raise Unavailable(str(exc)) from exc

    async def _send(self, method: str, path: str, **options: Unpack[RequestOptions]) -> HttpAnswer:
        """Send a call; one that never left, or was refused for the token of a dead server, goes to the next server."""
        endpoint = await self._meet()
        try:
            answer = await self._call(endpoint, method, path, **options)
        except Unavailable:
            answer = None
        if answer is not None and answer.status != HTTPStatus.UNAUTHORIZED:
            return answer
        self._endpoint = None
        return await self._call(await self._meet(), method, path, **options)

    async def _call(
        self, endpoint: ServedEndpoint, method: str, path: str, **options: Unpack[RequestOptions]
    ) -> HttpAnswer:
        options["headers"] = {"authorization": f"Bearer {endpoint.token}"}
        return await self._http.send(method, endpoint.url + path, **options)

    async def _meet(self) -> ServedEndpoint:
        """Return the endpoint of a running market server, started if there is none."""
        if self._settings.base_url is not None:
            if not self._services.credential:
                raise AuthFailed("a market with a base_url needs its token as api_key")
            return ServedEndpoint(url=self._settings.base_url.rstrip("/"), token=self._services.credential)
        async with self._starting:
            if self._endpoint is None:
                endpoint = find_endpoint(self.folder)
                if endpoint is None or not await self._answers(endpoint):
                    endpoint = await self._start()
                self._endpoint = await self._with_our_settings(endpoint)
            return self._endpoint

    async def _answers(self, endpoint: ServedEndpoint) -> bool:
        """Whether a market listens there: the port of a dead one may have another owner."""
        try:
            answer = await self._http.read("GET", f"{endpoint.url}/health")
            return answer.status == HTTPStatus.OK and bool(answer.json() == {"market": "spotd-local"})
        except Unavailable:
            return False

    async def _start(self) -> ServedEndpoint:
        clock: HostClock = self._services.clock
        try:
            endpoint = await self._threads.run(
                lambda: start_server(self.folder, self._settings, clock), timeout_s=START_TIMEOUT_S + 5
            )
        except (TimeoutError, OSError) as exc:
            raise Unavailable(f"the local market does not start: {exc}") from exc
        self._services.log.info("local.market_started", folder=str(self.folder))
        return endpoint

    async def _with_our_settings(self, endpoint: ServedEndpoint) -> ServedEndpoint:
        """Replace a server that was started with other settings, unless it has machines."""
        try:
            answer = await self._call(endpoint, "GET", "/v1/status")
            _require_ok(answer)
            status = StatusAnswer.model_validate_json(answer.body)
            if status.spec_hash == spec_hash(spec_text(self._settings)):
                return endpoint
            if status.machines:
                self._services.log.warning("local.settings_wait", machines=status.machines)
                return endpoint
            await self._call(endpoint, "POST", "/shutdown")
        except (AnswerLost, ValidationError) as exc:
            raise Unavailable("the local market does not say what it is") from exc
        return await self._start()


def _require_ok(answer: HttpAnswer) -> None:
    if answer.status != HTTPStatus.OK:
        raise as_error(answer) or Unavailable(f"the local market answers HTTP {answer.status}")


# The local market as a provider.


CAPABILITIES: Final[Mapping[Power, Capability]] = capabilities(
    Power.BID_CHANGE,
    Power.NOTICES,
    Power.LOGS,
    Power.BILLING,
    Power.SPOT,
    Power.HOST_IDENTITY,
    Power.SELF_TERMINATE,
    Power.GANG,
    Power.REPLACE,
    missing={
        Power.BALANCE: "the local market has no account: its machines cost nothing",
        Power.SHELL: "a machine of the local market is a process of this computer",
        Power.PORTS: "a machine of the local market is a process of this computer: its ports are here already",
        Power.PRICE_HISTORY: "the local market keeps no prices",
        Power.STOP_RESUME: "machines of the local market are stopped by being outbid only, not at will",
        Power.CAPACITY_SCORES: "whatever the local market lists can be had",
    },
)
_SKEW_REAL_S: Final = 5.0
NODES_MAX: Final = 64
"""As the server of the market takes in one launch."""


class LocalProvider:
    """One market on this computer."""

    name = PROVIDER
    capabilities = CAPABILITIES
    nodes_max = NODES_MAX

    def __init__(self, client: MarketClient, services: Services) -> None:
        self._client = client
        self._services = services
        self._install = services.install

    async def offers(self, query: OfferQuery) -> OfferPage:
        answer = await self._client.read(OfferAnswer, "/v1/offers")
        return await judge_apart(lambda: as_page(answer, query), rows=len(answer.offers))

    async def launch(self, request: LaunchRequest) -> Launched:
        """Buy a machine that carries the key. The market itself would sell a second one under the same key."""
        answer = await self._client.buy(
            {
                "key": request.key,
                "install": request.install,
                "offer_id": request.offer.offer_id,
                "price_max": request.price_max,
                "image": request.image,
                "disk_gb": request.disk_gb,
                "start_script": request.start_script,
                "nodes": request.offer.nodes,
            },
            key=request.key,
        )
        try:
            machine = as_instance(answer)
        except ValidationError as exc:
            raise OutcomeUnknown("the answer to a launch describes no machine", key=request.key) from exc
        if machine.key != request.key or machine.market is not request.offer.market:
            raise ContractViolation(f"machine {machine.ref.instance_id} is not what was bought")
        return Launched(instance=machine)

    async def find(self, key: AttemptKey) -> tuple[Instance, ...]:
        """Return every machine that carries the key and is not gone.

        Raises:
            Unavailable: the answer was not complete, so that nothing found proves nothing.
        """
        answer = await self._client.read(MachineAnswer, "/v1/machines", {"install": self._install, "key": key})
        listing = as_listing(answer, self._install)
        if not listing.complete:
            raise Unavailable("the local market's list is not complete")
        return tuple(found for found in listing.instances if found.key == key and found.state is not InstanceState.GONE)

    async def instances(self) -> Listing:
        answer = await self._client.read(MachineAnswer, "/v1/machines", {"install": self._install})
        return await judge_apart(lambda: as_listing(answer, self._install), rows=len(answer.machines))

    async def terminate(self, ref: InstanceRef) -> None:
        await self._client.change("DELETE", f"/v1/machines/{ref.instance_id}", params={"install": self._install})

    async def check(self) -> Sequence[CheckLine]:
        """Check that the market runs and has our time."""
        try:
            status = await self._client.read(StatusAnswer, "/v1/status")
        except ProviderError as exc:
            hint = f"see {self._client.folder / 'server.log'}"
            return (CheckLine(name="market", ok=False, detail=str(exc), hint=hint),)
        skew_s = abs(self._services.clock.real_seconds(status.now - self._services.clock.now()))
        is_near = skew_s < _SKEW_REAL_S
        skew = f"within {_SKEW_REAL_S:.0f} s of ours" if is_near else f"{skew_s:.0f} s away from ours"
        hint = "" if is_near else "stop the market; it starts again with the daemon's clock"
        return (
            CheckLine(name="market", ok=True, detail=f"hosts: {status.hosts}, machines: {status.machines}"),
            CheckLine(name="account", ok=True, detail="no key, balance or quota: nothing is paid here"),
            CheckLine(name="clock", ok=is_near, detail=f"the market's time is {skew}", hint=hint),
        )

    async def change_bid(self, ref: InstanceRef, price: MicroUsdPerHour) -> None:
        await self._client.change(
            "PUT", f"/v1/machines/{ref.instance_id}/bid", params={"install": self._install}, body={"price": price}
        )

    async def replace_members(
        self, request: LaunchRequest, ref: InstanceRef, ranks: Sequence[int], number: int
    ) -> None:
        body = {"ranks": list(ranks), "round": number, "start_script": request.start_script}
        await self._client.change("PUT", self._members(ref), params={"install": self._install}, body=body)

    async def drop_members(self, ref: InstanceRef, ranks: Sequence[int]) -> None:
        body = {"ranks": list(ranks)}
        await self._client.change("DELETE", self._members(ref), params={"install": self._install}, body=body)

    def _members(self, ref: InstanceRef) -> str:
        return f"/v1/machines/{ref.instance_id}/members"

    async def logs(self, ref: InstanceRef, *, lines: int) -> Sequence[str]:
        path = f"/v1/machines/{ref.instance_id}/log"
        answer = await self._client.read(LogAnswer, path, {"install": self._install, "lines": max(0, lines)})
        return answer.lines

    async def charges(self, since: datetime, until: datetime) -> Sequence[ProviderCharge]:
        """Return the charges of our machines in the market's own ledger."""
        span = {"since": since.isoformat(), "until": until.isoformat()}
        return (await self._client.read(ChargeAnswer, "/v1/charges", {"install": self._install, **span})).charges


# The market shares our computer: it refuses a launch that arrives after the request's own time-out, so beyond the lag
# of its lists only the time for one answer has to pass.
_RECONCILE: Final = timedelta(seconds=5)


def _traits(settings: LocalSettings) -> ProviderTraits:
    return ProviderTraits(
        start_script_bytes_max=START_SCRIPT_BYTES_MAX,
        reconcile_window=_RECONCILE + settings.list_lag,
        provision_timeout=timedelta(minutes=5) + settings.provisioning,
        hosts_share_filesystem=True,
        runs_images=False,
        replaces_first=True,
        ends_itself_by="file",
        bill_open_for=timedelta(0),
    )


@asynccontextmanager
async def _open(settings: LocalSettings, services: Services) -> AsyncIterator[Provider]:
    # The server's port is known once it runs, so every call carries its own address.
    async with open_http("http://127.0.0.1", timeout_s=REQUEST_TIMEOUT_S) as http:
        yield LocalProvider(MarketClient(http, settings, services), services)


PLUGIN: Final = AdapterPlugin(
    name=PROVIDER,
    title="local market",
    settings_model=LocalSettings,
    needs_credential=False,
    traits_by=_traits,
    open_by=_open,
    powers=CAPABILITIES,
    tried="the whole of it runs here",
)
