"""The one door to HTTP: the only module that imports httpx, so that a maintained successor can replace it.

Keys travel in headers only. httpx writes URLs into its INFO log and its exceptions, so its logger is held at WARNING
and its exceptions never leave this module: they become leaves of the contract's error tree, without URL or body.
"""

from __future__ import annotations

import functools
import json
import logging
import re
import ssl
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta
from email.utils import parsedate_to_datetime
from typing import Any, Final, Protocol, TypedDict, Unpack

import anyio

# httpx imports its command line, and with it rich, click and pygments, wherever they are installed; it is not
# used here, and it is two thirds of what the import costs.
_absent = "httpx" not in sys.modules
if _absent:
    sys.modules["httpx._main"] = None  # type: ignore[assignment]  # marks the module as one that cannot be imported
import httpx  # noqa: E402 - after the lines above, which are the point

if _absent:
    del sys.modules["httpx._main"]

from spotd_providers.contract.errors import Unavailable  # noqa: E402 - behind httpx
from spotd_providers.kit.shapes import BodyTooLarge, Inflate, require_few_values  # noqa: E402 - behind httpx

BODY_BYTES_MAX: Final = 32 * 1024 * 1024
"""Three times the largest answer that any marketplace was seen to give, unpacked."""
DEADLINE_EXTRA_S: Final = 15.0
"""How much longer than one silence a whole answer may take: a byte now and then keeps a connection alive for ever."""
STREAM_QUIET_S: Final = 2.0
STREAM_TALK_S: Final = 4.0
STREAM_TOTAL_S: Final = 20.0
STREAM_BYTES_MAX: Final = 1024 * 1024
CONNECT_TIMEOUT_S: Final = 5.0
CONNECTIONS_MAX: Final = 8
USER_AGENT: Final = "spotd/0.1"
_SECONDS: Final = re.compile(r"[0-9]{1,6}(\.[0-9]{1,3})?")

_NOT_SENT: Final = (
    httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout, httpx.UnsupportedProtocol, httpx.InvalidURL,
)  # fmt: skip

logging.getLogger("httpx").setLevel(logging.WARNING)
logging.getLogger("httpcore").setLevel(logging.WARNING)


class AnswerLost(Exception):
    """A request without a whole answer: it may have reached the provider and taken effect."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpAnswer:
    """One whole HTTP answer.

    Attributes:
        headers: names in lower case.
    """

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def text(self) -> str:
        return self.body.decode("utf-8", "replace")

    def json(self) -> Any:
        """Decode the body; NaN and infinities are refused, since they are not JSON.

        Raises:
            Unavailable: the body is not JSON.
        """
        try:
            require_few_values(self.body)
            return json.loads(self.body, parse_constant=_refuse_constant)
        except (ValueError, RecursionError) as exc:
            raise Unavailable(f"the answer is not JSON ({len(self.body)} bytes, HTTP {self.status})") from exc

    @property
    def retry_after(self) -> timedelta | None:
        """The wait of the `Retry-After` header, if it is a number of seconds."""
        header = self.headers.get("retry-after", "")
        return timedelta(seconds=float(header)) if _SECONDS.fullmatch(header) else None

    @property
    def date(self) -> datetime | None:
        """The server's clock, from the `Date` header."""
        try:
            return parsedate_to_datetime(self.headers["date"])
        except (KeyError, ValueError, TypeError):
            return None


class RequestOptions(TypedDict, total=False):
    """The parts of a request besides its method and path; `timeout_s` replaces the client's own."""

    json_body: Any
    form: Mapping[str, str] | None
    params: Mapping[str, str | int] | None
    headers: Mapping[str, str] | None
    timeout_s: float | None


async def _unpack(response: httpx.Response, bytes_max: int) -> AsyncIterator[bytes]:
    """Yield the unpacked body piece by piece; no more than one piece is in memory.

    Raises:
        BodyTooLarge: it has more bytes than that, or is packed in a way that was not asked for.
    """
    inflate = Inflate(response.headers.get("content-encoding", ""), bytes_max=bytes_max)
    async for raw in response.aiter_raw():
        for piece in inflate(raw):
            yield piece
    inflate.finish()


def _host_of(url: str) -> str:
    """Return the host of a URL, empty for a path.

    Raises:
        Unavailable: it is an address that cannot be called.
    """
    try:
        return httpx.URL(url).host
    except (httpx.InvalidURL, UnicodeError) as exc:
        raise Unavailable("this address cannot be called") from exc


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


class Http:
    """A pooled client for one provider. `send` distinguishes what certainly failed from what may have taken effect."""

    def __init__(self, client: httpx.AsyncClient, date_shown: Callable[[datetime], None] | None = None) -> None:
        self._client = client
        self._date_shown = date_shown
        self._deadline_s = (client.timeout.read or 20.0) + DEADLINE_EXTRA_S
        self.requests_sent = 0

    async def send(self, method: str, path: str, **options: Unpack[RequestOptions]) -> HttpAnswer:
        """Send one request, once.

        Raises:
            Unavailable: the request never left, so it had no effect.
            AnswerLost: it may have had its effect.
        """
        _host_of(path)
        self.requests_sent += 1
        timeout_s = options.get("timeout_s")
        timeout = httpx.USE_CLIENT_DEFAULT if timeout_s is None else httpx.Timeout(timeout_s)
        total_s = self._deadline_s if timeout_s is None else timeout_s + DEADLINE_EXTRA_S
        try:
            with anyio.fail_after(total_s):
                async with self._client.stream(
                    method,
                    path,
                    json=options.get("json_body"),
                    data=options.get("form"),
                    params=options.get("params"),
                    headers=options.get("headers"),
                    timeout=timeout,
                ) as response:
                    body = bytearray()
                    async for chunk in _unpack(response, BODY_BYTES_MAX):
                        body += chunk
                    answer = HttpAnswer(
                        status=response.status_code,
                        headers={name.lower(): value for name, value in response.headers.items()},
                        body=bytes(body),
                    )
                    if self._date_shown is not None and answer.date is not None:
                        self._date_shown(answer.date)
                    return answer
        except BodyTooLarge as exc:
            raise AnswerLost(str(exc)) from exc
        except TimeoutError as exc:
            raise AnswerLost(f"no whole answer within {total_s:.0f} s") from exc
        except _NOT_SENT as exc:
            raise Unavailable(f"cannot connect to {self._client.base_url.host}: {type(exc).__name__}") from exc
        except httpx.HTTPError as exc:
            raise AnswerLost(f"no whole answer: {type(exc).__name__}") from exc

    async def read_stream(
        self, path: str, *, params: Mapping[str, str | int], headers: Mapping[str, str]
    ) -> HttpAnswer:
        """Read a stream until it ends, sends nothing for a while or is too long: it may never end by itself.

        A stream of a log may also never be silent, since the machine goes on writing or the server keeps the line open
        with comments. So reading ends some seconds after the beginning of the answer in any case.

        Raises:
            Unavailable: there was no answer at all.
        """
        _host_of(path)
        self.requests_sent += 1
        status, answer_headers, body = 0, dict[str, str](), bytearray()
        timeout = httpx.Timeout(STREAM_TOTAL_S, connect=CONNECT_TIMEOUT_S)
        try:
            with anyio.move_on_after(STREAM_TOTAL_S) as whole:
                async with self._client.stream(
                    "GET", path, params=params, headers=headers, timeout=timeout
                ) as response:
                    status = response.status_code
                    answer_headers = {name.lower(): value for name, value in response.headers.items()}
                    chunks = _unpack(response, STREAM_BYTES_MAX)
                    whole.deadline = min(whole.deadline, anyio.current_time() + STREAM_TALK_S)
                    while len(body) < STREAM_BYTES_MAX and not whole.cancel_called:
                        chunk = None
                        with anyio.move_on_after(STREAM_QUIET_S):
                            chunk = await anext(chunks, None)
                        if chunk is None:
                            break
                        body += chunk
        except BodyTooLarge:
            pass  # what was said before is enough
        except (httpx.HTTPError, httpx.InvalidURL) as exc:
            if not body:
                raise Unavailable(f"no answer: {type(exc).__name__}") from exc
        if not status:
            raise Unavailable("no answer in time")
        return HttpAnswer(status=status, headers=answer_headers, body=bytes(body[:STREAM_BYTES_MAX]))

    async def read(self, method: str, path: str, **options: Unpack[RequestOptions]) -> HttpAnswer:
        """Send one request without side effects: a lost answer is the same as no answer.

        Raises:
            Unavailable: no whole answer.
        """
        try:
            return await self.send(method, path, **options)
        except AnswerLost as exc:
            raise Unavailable(str(exc)) from exc


@functools.cache
def _tls_context() -> ssl.SSLContext:
    """Build the TLS context of all clients, once: each context holds five megabytes of authorities."""
    return httpx.create_ssl_context()


class TokenSource(Protocol):
    """What gives a bearer token that is valid now; after one was refused, another."""

    async def __call__(self, *, refused: bool) -> str: ...


class _ChangingToken(httpx.Auth):
    """A token that runs out. A request that is refused for it was not carried out, so it is sent once more."""

    def __init__(self, tokens: TokenSource, header: str) -> None:
        self._tokens = tokens
        self._header = header
        self._before = "Bearer " if header == "authorization" else ""

    async def async_auth_flow(self, request: httpx.Request) -> AsyncGenerator[httpx.Request, httpx.Response]:
        token = await self._tokens(refused=False)
        if token:
            request.headers[self._header] = f"{self._before}{token}"
        answer = yield request
        if token and answer.status_code == 401:
            request.headers[self._header] = f"{self._before}{await self._tokens(refused=True)}"
            yield request


@asynccontextmanager
async def open_http(
    base_url: str,
    *,
    headers: Mapping[str, str] | None = None,
    timeout_s: float = 20.0,
    tls: ssl.SSLContext | None = None,
    tokens: TokenSource | None = None,
    key_header: str = "authorization",
    date_shown: Callable[[datetime], None] | None = None,
) -> AsyncIterator[Http]:
    """Open a client for one base URL; `headers` (keys included) go with every request.

    The environment's proxies are honoured, but never on the way to this very computer; its `.netrc` is not.

    Args:
        tls: for a server whose authority is not one that everybody knows, or that asks for a certificate.
        tokens: where the key is a token that changes.
        key_header: what it travels in; it is a bearer token in the usual one.
        date_shown: takes the date of each answer, where it states one.

    Raises:
        Unavailable: the base URL is none.
    """
    host = _host_of(base_url)
    async with httpx.AsyncClient(
        base_url=base_url,
        headers={"user-agent": USER_AGENT, "accept-encoding": "gzip", **(headers or {})},
        timeout=httpx.Timeout(timeout_s, connect=CONNECT_TIMEOUT_S),
        limits=httpx.Limits(max_connections=CONNECTIONS_MAX, max_keepalive_connections=CONNECTIONS_MAX),
        auth=None if tokens is None else _ChangingToken(tokens, key_header),
        verify=_tls_context() if tls is None else tls,
        trust_env=host not in ("127.0.0.1", "localhost", "::1"),
    ) as client:
        yield Http(client, date_shown)
