"""Calls to the market's server, which is started when the first of them finds none."""

from __future__ import annotations

import time
from collections.abc import Mapping
from http import HTTPStatus
from pathlib import Path
from typing import Any, Final, TypeVar, Unpack

import anyio
from pydantic import BaseModel, ValidationError

from spotd_providers.contract.errors import AuthFailed, OutcomeUnknown, Unavailable
from spotd_providers.contract.provider import Services
from spotd_providers.contract.values import AttemptKey
from spotd_providers.kit.http import AnswerLost, Http, HttpAnswer, RequestOptions
from spotd_providers.kit.inflate import require_few_values
from spotd_providers.kit.retry import retry_read
from spotd_providers.kit.threads import BlockingCalls
from spotd_providers.local.hosts import HostClock
from spotd_providers.local.launcher import START_TIMEOUT_S, spec_text, start_server
from spotd_providers.local.server.files import ServedEndpoint, find_endpoint, spec_hash
from spotd_providers.local.settings import LocalSettings
from spotd_providers.local.translate import as_error
from spotd_providers.local.wire import StatusAnswer

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
